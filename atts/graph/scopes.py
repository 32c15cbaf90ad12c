"""The scope that a problem's function is given: it starts rollouts, makes calls and ends the
problem.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from atts.concurrency import task_group
from atts.core import ProblemSpan, ProblemStatus
from atts.errors import OptionError
from atts.graph.admission import Run
from atts.graph.calls import Caller
from atts.graph.groups import Admit, Group, RolloutResult, RolloutScope

T = TypeVar("T")


class ProblemScope(Caller):
    """One open problem. Everything it started ends before its function returns."""

    __slots__ = ("cancel_scope", "declared", "index", "is_opening", "order", "run", "why")

    def __init__(self, run: Run, problem: str, index: int, order: int) -> None:
        super().__init__(run.state, problem, -1, ())
        self.index = index
        self.order = order  # of opening, over all runs of the graph: older problems come first
        self.why = ""
        self.cancel_scope = anyio.CancelScope()
        self.is_opening = True  # until it submits rollouts: counted as one itself
        self._declared = self.declared = anyio.Event()
        self.run = run

    def cancel(self, why: str) -> None:
        """End this problem: its function, its rollouts, their calls; nothing of any other."""
        self.why = self.why or why
        self.cancel_scope.cancel()

    @contextmanager
    def concluding(self, rollouts: int) -> Generator[None]:
        """While so many ended rollouts of this problem wait for something slower than engines, such
        as a grader.

        No problem is opened while more of them wait, over all problems, than a few for every place:
        what cannot be concluded at the speed of the engines is not piled up.
        """
        admission = self.run.admission
        admission.concluding += rollouts
        try:
            yield
        finally:
            admission.concluding -= rollouts
            admission.dispatch()

    async def rollouts(
        self,
        function: Callable[[RolloutScope[T]], Awaitable[T]],
        samples: int | range,
        *,
        settle: Callable[[RolloutResult[T]], bool] | None = None,
        timeout_seconds: float | None = None,
        admit: Admit = "each",
        priority: int = 0,
    ) -> list[RolloutResult[T]]:
        """Run `function` once per sample and return every result in the order of the samples.

        They start when places are free, earlier problems first. `settle` sees each rollout that
        ended by itself, as it ends; once it says true the others are cancelled ("settled").
        `timeout_seconds` counts from now. Admitted "together" they start at once, may `meet` in
        rounds, and keep their places until the last has ended.

        :raises OptionError: no samples, or more together than there are places.
        :raises Exception: what `settle` raised.
        """
        wanted = range(samples) if isinstance(samples, int) else samples
        if not wanted:
            raise OptionError("samples", f"{samples!r} asks for no rollout")
        group = Group(
            self.run, self.problem, self.frontier, function, wanted, admit=admit, settle=settle
        )
        try:
            await self._gather(group, timeout_seconds, priority)
        finally:
            group.release()
        self.frontier = tuple(dict.fromkeys(group.last_nodes)) or self.frontier
        return group.gathered()

    async def _gather(self, group: Group[T], timeout_seconds: float | None, priority: int) -> None:
        run = self.run
        async with task_group() as tasks:
            group.tasks = tasks
            if timeout_seconds is not None:
                tasks.cancel_scope.deadline = anyio.current_time() + timeout_seconds
            run.groups[group] = None
            try:
                if not group.why:
                    self._declare()
                    run.admission.submit(group, priority, self.order)
                    await group.done.wait()
            finally:
                del run.groups[group]
                # the cause is known only here: `close` was not called, or it has its reason
                if group.is_cut_short():
                    is_late = anyio.current_time() >= tasks.cancel_scope.deadline
                    group.close("deadline" if is_late else "cancelled")

    def end(self, status: ProblemStatus, started: float, error: Exception | None) -> None:
        """Close the problem's books; the next one may be opened."""
        admission = self.run.admission
        state = self.run.state
        self._declare()
        admission.open -= 1
        admission.dispatch()
        state.problems_done += 1
        words = "" if error is None else f"{type(error).__name__}: {error}"
        state.emit(ProblemSpan(self.problem, self.index, status, started, state.now(), words))

    def _declare(self) -> None:
        if self.is_opening:
            self.is_opening = False
            self.run.admission.opening -= 1
        self.declared.set()
