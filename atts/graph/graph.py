"""The task graph, which solves problems with limits on the work in flight, and times every call."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import anyio

from atts.concurrency import TaskGroup, task_group
from atts.core import ProblemStatus
from atts.graph.limits import Admission, Limit, Pool, RetryPolicy
from atts.graph.rollouts import GraphState, ProblemScope, Run, Sink

T = TypeVar("T")


class HasId(Protocol):
    """Any object with an id, such as `core.Problem`."""

    @property
    def id(self) -> str:
        """Return the id."""
        ...


P = TypeVar("P", bound=HasId)

# If an open problem neither calls an engine nor submits rollouts, the next problem is opened after
# this time.
OPENING_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The state of one engine's pool: the current use and queue, and the seconds so far, summed
    over slots.
    """

    slots: int | None
    tokens: int | None
    in_use: int
    tokens_in_use: int
    waiting: int
    busy_seconds: float
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class GraphStats:
    """A snapshot of a graph, with counts since the graph was made."""

    seconds: float  # seconds during which a run was in progress
    problems_open: int
    problems_done: int
    rollouts_waiting: int
    rollouts_in_flight: int
    rollouts: Mapping[str, int]  # ended, by status
    nodes: int
    sibling_seconds: float  # Ts: waiting for siblings, summed over rollouts
    engines: Mapping[str, EngineUse]

    def busy_share(self, engine: str) -> float:
        """Return the share of the engine's slot-seconds that was used.

        It is NaN if slots are not bounded or no time passed.
        """
        use = self.engines[engine]
        if not use.slots or not self.seconds:
            return math.nan
        return use.busy_seconds / (use.slots * self.seconds)


_use = attrgetter(*(field.name for field in fields(EngineUse)))


@dataclass(frozen=True, slots=True)
class ProblemResult(Generic[T]):
    """The result of one problem; `value` is the result of its function."""

    index: int
    problem: str
    status: ProblemStatus
    value: T | None = None
    error: Exception | None = None
    why: str = ""


class Graph:
    """A graph that runs problems on engines with limits.

    `rollouts` is the largest number in flight over all problems, and `limits` bounds the work of
    each engine. `sink` gets every `CallSpan`, `RolloutSpan` and `ProblemSpan` as it ends. A graph
    may run again, and runs may share it. With a `shared_graph` it uses that graph's places and
    limits, and keeps its own sink, node numbers and ending.

    :raises OptionError: a limit below 1.
    """

    def __init__(
        self,
        *,
        rollouts: int = 64,
        limits: Mapping[str, Limit] | None = None,
        policy: RetryPolicy | None = None,
        sink: Sink | None = None,
        first_node: int = 0,
        shared_graph: Graph | None = None,
    ) -> None:
        if shared_graph is None:
            pools = {name: Pool(name, limit) for name, limit in (limits or {}).items()}
            is_strict = bool(pools)
            admission = Admission(rollouts)
        else:
            pools = shared_graph._state.pools
            is_strict = shared_graph._state.strict
            admission = shared_graph._admission
        self._state: GraphState = GraphState(
            pools, is_strict, policy or RetryPolicy(), sink, first_node - 1
        )
        self._admission: Admission = admission
        self._runs: list[Run] = []
        self._seconds = 0.0
        self._began = 0.0

    async def run(
        self,
        problems: Iterable[P],
        solve: Callable[[P, ProblemScope], Awaitable[T]],
        *,
        timeout_seconds: float | None = None,
    ) -> list[ProblemResult[T]]:
        """Solve every problem, and return the results in the order of the problems.

        After a `stop`, a `cancel` or the time-out ("deadline", like `stop`) the list ends with the
        last opened problem.

        :raises Exception: the first fatal error (`RetryPolicy.is_fatal`), after everything else was
            cancelled.
        """
        results: list[ProblemResult[T]] = []
        await self.drive(problems, solve, results.append, timeout_seconds=timeout_seconds)
        return sorted(results, key=lambda result: result.index)

    async def drive(
        self,
        problems: Iterable[P],
        solve: Callable[[P, ProblemScope], Awaitable[T]],
        finished: Callable[[ProblemResult[T]], None],
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        """Run like `run`, but pass each result to `finished` when it comes, and keep none.

        :raises Exception: the first fatal error, or what `finished` raised.
        """
        self._state.enter_loop()
        if not self._runs:
            self._began = self._state.now()
        run = Run(self._state, self._admission)
        self._runs.append(run)
        try:
            async with task_group() as tasks:
                run.cancel_scope = tasks.cancel_scope
                if timeout_seconds is not None:
                    tasks.start_soon(_stop_after, run, timeout_seconds)
                async with task_group() as solving:
                    with run.intake:
                        await self._open(run, solving, problems, solve, finished)
                tasks.cancel_scope.cancel()  # the timer
        finally:
            self._runs.remove(run)
            if not self._runs:
                self._seconds += self._state.now() - self._began
        if run.error is not None:
            raise run.error

    def stop(self, why: str) -> None:
        """Open no more problems, end all rollouts ("cancelled"), and let problems conclude from
        their rollouts so far.
        """
        for run in self._runs:
            run.stop(why)

    def cancel(self, why: str) -> None:
        """End everything now; open problems are "cancelled"."""
        for run in self._runs:
            run.cancel(why)

    def stats(self) -> GraphStats:
        """Return a snapshot of the graph's counts."""
        state = self._state
        admission = self._admission
        return GraphStats(
            seconds=self._seconds + (state.now() - self._began if self._runs else 0.0),
            problems_open=admission.open,
            problems_done=state.problems_done,
            rollouts_waiting=admission.waiting,
            rollouts_in_flight=admission.in_flight,
            rollouts=MappingProxyType(dict(state.rollouts)),
            nodes=state.nodes,
            sibling_seconds=state.sibling_seconds,
            engines=MappingProxyType(
                {name: EngineUse(*_use(pool)) for name, pool in state.pools.items()}
            ),
        )

    async def _open(
        self,
        run: Run,
        tasks: TaskGroup,
        problems: Iterable[P],
        solve: Callable[[P, ProblemScope], Awaitable[T]],
        finished: Callable[[ProblemResult[T]], None],
    ) -> None:
        """Open problems one by one, each when there is room and the previous one has called an
        engine or submitted rollouts.
        """
        for index, problem in enumerate(problems):
            await self._admission.room()
            scope = ProblemScope(run, problem.id, index, self._admission.opened())
            tasks.start_soon(_solve, scope, problem, solve, finished)
            with anyio.move_on_after(OPENING_SECONDS):
                await scope.declared.wait()


async def _solve(
    scope: ProblemScope,
    problem: P,
    solve: Callable[[P, ProblemScope], Awaitable[T]],
    finished: Callable[[ProblemResult[T]], None],
) -> None:
    started = scope.run.state.now()
    status: ProblemStatus = "cancelled"
    value: T | None = None
    error: Exception | None = None
    try:
        with scope.cancel_scope:
            value = await solve(problem, scope)
            status = "done"
    except Exception as failure:  # noqa: BLE001 - a failed problem does not end the others
        status = "failed"
        error = failure
        if scope.run.state.policy.is_fatal(failure):
            scope.run.fail(failure)
    finally:
        scope.end(status, started, error)
        why = (scope.why or scope.run.why) if status == "cancelled" else ""
        finished(ProblemResult(scope.index, scope.problem, status, value, error, why))


async def _stop_after(run: Run, seconds: float) -> None:
    await anyio.sleep(seconds)
    run.stop("deadline")
