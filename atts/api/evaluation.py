"""The verbs `solve` and `evaluate`: one problem, a dataset, and the events of a run as it happens."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import update_wrapper
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import anyio
from anyio.lowlevel import current_token
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from atts import tasks
from atts.api.engines import build_engines
from atts.api.setup import Setup, load_problems
from atts.core import Outcome, Problem
from atts.errors import OptionError, UsageError
from atts.journal import Event, Setting
from atts.run import Notice, RunOptions, RunResult, Shard
from atts.run import evaluate as run_evaluation

P = ParamSpec("P")
T = TypeVar("T")


class evaluate:
    """One evaluation: `await` it for its result, or open it with `async with` and iterate its events first.

    `dataset` is a benchmark's name ("math500[:20]"), a file, or problems. In a `directory` everything is journalled and
    the same call resumes. A `shard` such as "2/3" takes every third problem from the second on; `atts.merge` makes one
    run of all. Inside `async with`, leaving the block before the end cancels the run; it can be resumed.

    >>> import anyio
    >>> async def main() -> str:
    ...     setup = Setup(draft="scripted", target="scripted", method="draft-only")
    ...     from atts.testing import toy_problems
    ...     result = await evaluate(toy_problems(2), setup)
    ...     return result.status
    >>> anyio.run(main)
    'finished'
    """

    def __init__(
        self,
        dataset: str | Path | Sequence[Problem] = "arithmetic",
        setup: Setup | None = None,
        *,
        limit: int | None = None,
        directory: str | Path | None = None,
        options: RunOptions | None = None,
        shard: str | Shard | None = None,
    ) -> None:
        self._dataset = dataset
        self._setup = setup or Setup()
        self._limit = limit
        self._shard = Shard.parse(shard) if isinstance(shard, str) else shard
        self._options = replace(options or RunOptions(), directory=Path(directory) if directory else None)
        self._stack = AsyncExitStack()
        self._events: MemoryObjectReceiveStream[Notice] | None = None
        self._done = anyio.Event()
        self._result: RunResult | None = None

    def __await__(self) -> Generator[Any, Any, RunResult]:
        return self._whole().__await__()

    async def __aenter__(self) -> Self:
        send, self._events = anyio.create_memory_object_stream[Notice](math.inf)
        listener = _Stream(send)
        self._options = replace(self._options, listeners=(*self._options.listeners, listener))
        await self._stack.enter_async_context(tasks.background(self._follow, send))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, trace)
        finally:
            if self._events is not None:
                self._events.close()

    def __aiter__(self) -> AsyncIterator[Notice]:
        """Events as they happen, until the run ends.

        :raises UsageError: outside `async with`.
        """
        if self._events is None:
            raise UsageError("events are there inside `async with atts.evaluate(...) as run:` only")
        return self._events.__aiter__()

    async def result(self) -> RunResult:
        """Wait for the end, and the result."""
        await self._done.wait()
        assert self._result is not None, "a failed run cancels the task that waits for it"
        return self._result

    async def _follow(self, send: MemoryObjectSendStream[Notice]) -> None:
        async with send:
            self._result = await self._run()
        self._done.set()

    async def _whole(self) -> RunResult:
        if self._events is not None:  # already running
            return await self.result()
        return await self._run()

    async def _run(self) -> RunResult:
        problems = load_problems(self._dataset, self._limit)
        if self._shard is not None:
            problems = self._shard.take(whole := problems)
            if not problems:
                raise OptionError("shard", f"{self._shard} of {len(whole)} problems is empty; take fewer shards")
        setup = self._setup
        plan = setup.plan(*build_engines(setup.draft, setup.target), problems[0].kind)
        if self._shard is not None:
            held = {"shard": Setting(str(self._shard), "--shard")}
            plan = replace(plan, configuration={**plan.configuration, **held})
        return await run_evaluation(problems, plan, self._options)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A listener that never blocks the run: what a reader has not taken yet is held for it."""

    send: MemoryObjectSendStream[Notice]

    def recalled(self, event: Event) -> None:
        """Earlier sessions' events are not news."""

    def notify(self, event: Notice) -> None:
        """Queue it; dropped once the reader has left."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.send.send_nowait(event)


async def solve(problem: str | Problem, setup: Setup | None = None) -> Outcome:
    """Solve one problem: rollouts, gate, vote. Text is taken as a problem without a reference.

    :raises OptionError: the setup names something unknown.
    :raises EngineError: an engine cannot be opened or is lost.
    """
    one = problem if isinstance(problem, Problem) else Problem("problem", problem)
    result = await evaluate([one], setup)
    return next(result.outcomes())


def sync(call: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """The twin of a verb for code without an event loop; inside one it would block that, so it says what to write."""
    verb = call.__name__

    def run(*arguments: P.args, **options: P.kwargs) -> T:
        async def main() -> T:
            return await call(*arguments, **options)

        try:
            current_token()
        except anyio.NoEventLoopError:
            return anyio.run(main)
        raise UsageError(
            f"atts.{verb}_sync was called inside a running event loop; write `await atts.{verb}(...)` there"
        )

    update_wrapper(run, call, ("__module__",), ())
    run.__name__ = run.__qualname__ = f"{verb}_sync"
    run.__doc__ = f"`{verb}` for code without an event loop.\n\n:raises UsageError: called inside one."
    return run


solve_sync, evaluate_sync = sync(solve), sync(evaluate)
