"""Tests of task groups: plain errors, ordered results, and no task left behind."""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest

from atts import concurrency

T = TypeVar("T")
Virtually = Callable[[Callable[[], Awaitable[T]]], T]
pytestmark = pytest.mark.anyio


async def test_a_single_error_is_raised_without_a_group() -> None:
    """A single error is raised directly, not wrapped in a group of one, nor in nested groups."""

    async def fail() -> None:
        raise KeyError("lost")

    async def nested() -> None:
        async with concurrency.task_group() as outer, concurrency.task_group() as inner:
            outer.start_soon(anyio.sleep, 60)
            inner.start_soon(fail)

    with pytest.raises(KeyError, match="lost"):
        await nested()


class Interrupt(BaseException):
    """An exception used instead of KeyboardInterrupt, which a task cannot safely raise in an event
    loop.
    """


async def test_one_of_several_errors_is_raised_with_notes_of_the_others() -> None:
    """No error is lost, and an interrupt is raised in preference to a failure."""

    async def fail(error: BaseException) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise error

    async def both(*errors: BaseException) -> None:
        async with concurrency.task_group() as group:
            for error in errors:
                group.start_soon(fail, error)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    with pytest.raises(ValueError, match="one") as caught:
        await both(ValueError("one"), ValueError("one"))
    assert caught.value.__notes__ == ["at the same time: ValueError: one"]
    with pytest.raises(Interrupt):
        await both(ValueError("one"), Interrupt())


async def test_cancelling_from_outside_stays_a_cancellation() -> None:
    """A task group inside a cancelled scope neither hides nor replaces the cancellation."""
    with anyio.CancelScope() as scope:
        async with concurrency.task_group() as group:
            group.start_soon(anyio.sleep_forever)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_collect_returns_results_in_argument_order() -> None:
    """Results are in the order of the arguments, whichever result is ready first."""
    events = [anyio.Event() for _ in range(4)]
    done: list[int] = []

    async def wait(index: int) -> int:
        if index < 3:
            await events[index + 1].wait()
        done.append(index)
        events[index].set()
        return index

    assert await concurrency.collect([lambda i=i: wait(i) for i in range(4)]) == [0, 1, 2, 3]  # type: ignore[misc]
    assert done == [3, 2, 1, 0]


async def test_collect_cancels_the_others_when_one_fails() -> None:
    """If one call fails, the others are cancelled, and their clean-up ends before the error is
    raised.
    """
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with concurrency.shielded(1.0):
                await anyio.lowlevel.checkpoint()
                cleaned.append("yes")

    async def fail() -> None:
        await anyio.wait_all_tasks_blocked()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await concurrency.collect([wait, wait, fail])
    assert cleaned == ["yes", "yes"]


async def test_background_ends_with_its_block() -> None:
    """A background task ends when its block ends or fails, and a failure of the task ends the
    block.
    """
    ended: list[str] = []

    async def serve(name: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(name)

    async with concurrency.background(serve, "first"):
        await anyio.wait_all_tasks_blocked()
    assert ended == ["first"]

    async def broken() -> None:
        async with concurrency.background(serve, "second"):
            await anyio.wait_all_tasks_blocked()
            raise ValueError("block")

    with pytest.raises(ValueError, match="block"):
        await broken()
    assert ended == ["first", "second"]

    async def crash() -> None:
        raise OSError("server")

    with pytest.raises(OSError, match="server"):
        async with concurrency.background(crash):
            await anyio.sleep_forever()


def test_shielded_clean_up_is_timed(virtually: Virtually[float]) -> None:
    """Cancellation does not shorten a shielded clean-up, but the clean-up's own time limit does."""

    async def main() -> float:
        with anyio.CancelScope() as scope:
            scope.cancel()
            with concurrency.shielded(5.0):
                await anyio.sleep(3.0)
            with concurrency.shielded(5.0):
                await anyio.sleep_forever()
            await anyio.sleep_forever()
        return anyio.current_time()

    assert virtually(main) == 8.0


def test_the_clock_is_the_loops_own(virtually: Virtually[None]) -> None:
    """The clock is virtual if the event loop's time is virtual; without a loop there is no clock."""

    async def main() -> None:
        now = concurrency.clock()
        start = now()
        await anyio.sleep(7200)
        assert math.isclose(now() - start, 7200)
        assert now() == anyio.current_time()

    virtually(main)
    with pytest.raises(anyio.NoEventLoopError):
        concurrency.clock()


def test_slots_and_tokens_in_use_are_counted() -> None:
    """The number of slots or tokens in use is the number taken minus the number returned; an
    unlimited queue counts nothing.
    """
    queue = concurrency.SlotQueue(3, 10)
    assert (queue.in_use, queue.tokens_in_use) == (0, 0)
    assert queue.take_nowait(4)
    assert queue.take_nowait(5)
    assert (queue.in_use, queue.tokens_in_use) == (2, 9)
    assert not queue.take_nowait(2)
    queue.give(4)
    assert (queue.in_use, queue.tokens_in_use) == (1, 5)
    free = concurrency.SlotQueue(None)
    assert free.take_nowait(7)
    assert (free.in_use, free.tokens_in_use) == (0, 0)


def test_a_slot_is_given_back_once() -> None:
    """A slot can be returned only once, because a second return would admit more calls than the
    limit.
    """
    queue = concurrency.SlotQueue(2)
    assert queue.take_nowait()
    queue.resize(1)
    queue.give()
    with pytest.raises(AssertionError, match="must be taken"):
        queue.give()
    assert (queue.in_use, queue.free_slots) == (0, 1)
