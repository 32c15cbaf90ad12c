"""Task groups and other small helpers of structured concurrency; no other module opens a task
group.

Everything here works on asyncio and trio, and nothing outlives the `async with` or the `await` that
began it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import current_token

__all__ = [
    "TaskGroup",
    "background",
    "backoff",
    "clock",
    "collect",
    "first_error",
    "shielded",
    "soon",
    "task_group",
]

T = TypeVar("T")
Args = TypeVarTuple("Args")


@asynccontextmanager
async def task_group() -> AsyncGenerator[TaskGroup]:
    """An anyio task group whose failure leaves as the error itself, not wrapped in a group.

    When several tasks failed, the most telling error is raised and the others are noted on it
    (`first_error`).

    :raises BaseException: the error of a task, or of the block itself.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as errors:
        failure = first_error(errors)
    if failure is not None:
        raise failure


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to show of many: an interrupt before a failure, the earlier before the later;
    the rest as notes.

    >>> str(first_error(BaseExceptionGroup("", [ValueError("a"), ExceptionGroup("", [KeyError("b")])])))
    'a'
    """
    found = list(_flatten(errors))
    real = [error for error in found if not isinstance(error, _cancellations())] or found
    first = next((error for error in real if not isinstance(error, Exception)), real[0])
    for other in real:
        if other is not first:
            first.add_note(f"at the same time: {type(other).__name__}: {other}")
    return first


def _flatten(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error


def _cancellations() -> tuple[type[BaseException], ...]:
    try:
        return (anyio.get_cancelled_exc_class(),)
    except anyio.NoEventLoopError:
        return ()


async def collect(functions: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Call all at once and return their results in the order given.

    :raises BaseException: the first error; the others are cancelled and awaited before it leaves.
    """
    results: dict[int, T] = {}

    async def keep(index: int, function: Callable[[], Awaitable[T]]) -> None:
        results[index] = await function()

    async with task_group() as group:
        for index, function in enumerate(functions):
            group.start_soon(keep, index, function)
    return [results[index] for index in range(len(results))]


@asynccontextmanager
async def background(
    function: Callable[[Unpack[Args]], Coroutine[Any, Any, object]], *args: *Args
) -> AsyncGenerator[None]:
    """Run a function beside the block and cancel it when the block ends.

    :raises BaseException: what the function raised; it cancels the block first.
    """
    async with task_group() as group:
        group.start_soon(function, *args)
        yield
        group.cancel_scope.cancel()


def backoff(attempt: int, first: float, *, longest: float = math.inf, salt: int = 0) -> float:
    """Seconds before attempt number `attempt` (from 1) is repeated: doubling, spread by a quarter
    either way.

    `salt` spreads callers that failed together, the same way every time.

    >>> [round(backoff(attempt, 0.5, longest=1.0, salt=3), 2) for attempt in (1, 2, 3)]
    [0.59, 1.18, 1.18]
    """
    spread = 0.75 + 0.5 * (salt * 0.6180339887498949 % 1.0)
    return float(min(longest, first * 2.0 ** min(attempt - 1, 16)) * spread)


@contextmanager
def shielded(seconds: float) -> Generator[None]:
    """Clean-up that awaits: cancellation does not cut it short, `seconds` do."""
    with anyio.move_on_after(seconds, shield=True):
        yield


def clock() -> Callable[[], float]:
    """The running loop's clock as a plain function: what `anyio.current_time` reads, without
    finding the loop anew.

    :raises anyio.NoEventLoopError: no loop is running.
    """
    anyio.current_time()  # raises where there is no loop
    try:
        if (
            asyncio.current_task() is not None
        ):  # None under trio's guest mode, whose host loop is not our clock
            return asyncio.get_running_loop().time
    except RuntimeError:
        pass
    from trio.lowlevel import current_clock  # an extra, and installed where its loop is running

    return current_clock().current_time


def soon() -> Callable[[Callable[[], None]], None]:
    """A way to run a function in this event loop from another thread, without waiting, on asyncio
    and trio.

    A loop that has ended runs nothing any more; the call is dropped.
    """
    native: Any = current_token().native_token
    run: Callable[[Callable[[], None]], object] = (
        getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
    )

    def hand_over(function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it everybody who waited
            run(function)

    return hand_over
