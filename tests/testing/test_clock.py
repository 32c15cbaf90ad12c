"""Tests of virtual time: it keeps the order of real time, costs nothing, and never overtakes a
thread.
"""

import asyncio
import socket
import threading
import time
from typing import Literal, get_args

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from atts.testing.clock import Backend, run_virtual

Log = list[tuple[str, float]]


@pytest.fixture(params=get_args(Backend))
def backend(request: pytest.FixtureRequest) -> Literal["asyncio", "trio"]:
    """Choose one of the two back ends that `run_virtual` supports."""
    return "trio" if request.param == "trio" else "asyncio"


def test_a_day_passes_at_once(backend: Backend) -> None:
    """In virtual time, sleeping for a day takes no real time and ends exactly on time."""

    async def main() -> float:
        await anyio.sleep(86_400 * 3 + 0.125)
        return anyio.current_time()

    began = time.monotonic()
    assert run_virtual(main, backend=backend) == 86_400 * 3 + 0.125
    assert time.monotonic() - began < 60


def test_arguments_and_errors_pass_through(backend: Backend) -> None:
    """The function's arguments, result and error reach the caller."""

    async def divide(left: float, right: float) -> float:
        await anyio.lowlevel.checkpoint()
        return left / right

    assert run_virtual(divide, 6, 4, backend=backend) == 1.5
    with pytest.raises(ZeroDivisionError):
        run_virtual(divide, 6, 0, backend=backend)


def test_sleepers_wake_in_the_order_of_their_deadlines(backend: Backend) -> None:
    """Nested waits wake in the same order as on a real clock."""
    log: Log = []

    async def walk(name: str, steps: tuple[float, ...]) -> None:
        for step in steps:
            await anyio.sleep(step)
            log.append((name, anyio.current_time()))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(walk, "a", (3.0, 3.0, 3.0))
            group.start_soon(walk, "b", (2.0, 2.0, 2.0))
            group.start_soon(walk, "c", (0.0, 7.0))

    run_virtual(main, backend=backend)
    assert log == [
        ("c", 0.0), ("b", 2.0), ("a", 3.0), ("b", 4.0), *sorted([("a", 6.0), ("b", 6.0)], key=log.index), ("c", 7.0),
        ("a", 9.0),
    ]  # fmt: skip


def test_deadlines_are_virtual(backend: Backend) -> None:
    """A time-out ends a virtual sleep exactly at its deadline, but not a sleep that ends before it."""

    async def main() -> tuple[bool, float, bool, float]:
        with anyio.move_on_after(5) as cut:
            await anyio.sleep(8)
        first = anyio.current_time()
        with anyio.move_on_after(5) as spared:
            await anyio.sleep(4.875)
        return cut.cancelled_caught, first, spared.cancelled_caught, anyio.current_time()

    assert run_virtual(main, backend=backend) == (True, 5.0, False, 9.875)


def test_work_does_not_move_the_clock(backend: Backend) -> None:
    """Time does not advance while tasks compute or yield, but only when all of them wait."""

    async def main() -> float:
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
        time.sleep(0.01)  # noqa: ASYNC251  # real work, on purpose
        return anyio.current_time()

    assert run_virtual(main, backend=backend) == 0.0


@pytest.mark.parametrize("kind", ["default", "limited"])
def test_a_thread_is_waited_for(backend: Backend, kind: str) -> None:
    """A virtual timer does not fire while a thread is still working, whichever limiter the thread
    uses.
    """
    log: list[str] = []

    async def work() -> None:
        limiter = anyio.CapacityLimiter(1) if kind == "limited" else None
        await anyio.to_thread.run_sync(time.sleep, 0.05, limiter=limiter)
        log.append("thread")

    async def nap() -> None:
        await anyio.sleep(30)
        log.append("timer")

    async def main() -> float:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            group.start_soon(nap)
        return anyio.current_time()

    for _ in range(2):  # in the second run, the thread comes from the pool of idle threads
        assert run_virtual(main, backend=backend) == 30.0
    assert log == ["thread", "timer"] * 2


def test_an_idle_thread_does_not_slow_time(backend: Backend) -> None:
    """The clock does not wait for a pooled thread that finished its work."""

    async def main() -> float:
        await anyio.to_thread.run_sync(time.sleep, 0)
        await anyio.sleep(3600)
        return anyio.current_time()

    began = time.monotonic()
    assert run_virtual(main, backend=backend) == 3600.0
    assert time.monotonic() - began < 60


def test_an_executor_thread_is_waited_for() -> None:
    """The clock also waits for threads that the asyncio loop itself started."""

    async def main() -> str:
        async def nap() -> str:
            await asyncio.sleep(30)
            return "timer"

        tasks = [
            asyncio.create_task(asyncio.to_thread(lambda: time.sleep(0.05))),
            asyncio.create_task(nap()),
        ]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert waiting == {tasks[1]}
        for task in waiting:
            task.cancel()
        return "thread" if tasks[0] in done else "timer"

    assert run_virtual(main) == "thread"


def test_a_thread_that_needs_the_clock_does_not_deadlock(backend: Backend) -> None:
    """While a thread runs, real time passes, so a thread that waits for a timer gets it."""

    async def main() -> float:
        await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(anyio.sleep, 0.05))
        return anyio.current_time()

    assert run_virtual(main, backend=backend) == 0.05


def test_a_hung_thread_can_be_abandoned(backend: Backend) -> None:
    """A deadline over a thread that never ends still takes effect."""
    release = threading.Event()

    async def main() -> bool:
        with anyio.move_on_after(0.05) as scope:
            await anyio.to_thread.run_sync(release.wait, abandon_on_cancel=True)
        release.set()
        return scope.cancelled_caught

    assert run_virtual(main, backend=backend)


def test_ready_input_is_read_before_time_jumps(backend: Backend) -> None:
    """Data already in a socket is read before a timer fires."""
    ours, theirs = socket.socketpair()

    async def main() -> float:
        theirs.sendall(b"x")
        with anyio.fail_after(1000):
            await anyio.wait_readable(ours)
        return anyio.current_time()

    with ours, theirs:
        assert run_virtual(main, backend=backend) == 0.0


def test_patience_waits_for_input_that_is_on_its_way(backend: Backend) -> None:
    """The clock waits for a socket although it does not know the thread that will write to it."""
    ours, theirs = socket.socketpair()
    helper = threading.Timer(0.02, theirs.sendall, (b"x",))

    async def main() -> float:
        helper.start()
        with anyio.fail_after(1000):
            await anyio.wait_readable(ours)
        return anyio.current_time()

    with ours, theirs:
        assert run_virtual(main, backend=backend, patience_seconds=30.0) == 0.0
        helper.join()
