"""Virtual time for tests: code that sleeps for hours runs in milliseconds, and its tasks run in the
same order as in real time.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack

import anyio

Backend = Literal["asyncio", "trio"]
_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


def run_virtual(
    function: Callable[[Unpack[_Args]], Awaitable[_Result]],
    *args: *_Args,
    backend: Backend = "asyncio",
    patience_seconds: float = 0.0,
) -> _Result:
    """Run an async function under virtual time, and return its result.

    `anyio.sleep`, `anyio.current_time`, deadlines and time-outs use virtual time, which begins at
    0. `time.monotonic` and the wall clock stay real. `patience_seconds` is how long, in real time,
    the loop waits for sockets before virtual time jumps.

    >>> async def nap() -> float:
    ...     await anyio.sleep(3600)
    ...     return anyio.current_time()
    >>> run_virtual(nap)
    3600.0

    :raises BaseException: any error that the function raises.
    """
    return anyio.run(
        function, *args, backend=backend, backend_options=virtual_options(backend, patience_seconds)
    )


def virtual_options(backend: Backend, patience_seconds: float = 0.0) -> dict[str, Any]:
    """Return anyio's `backend_options` for virtual time. Use them for only one `anyio.run` or one
    test runner.
    """
    if backend == "asyncio":
        return {"use_uvloop": False, "loop_factory": lambda: VirtualLoop(patience_seconds)}
    clock = TrioClock(patience_seconds)
    return {"clock": clock, "instruments": [clock]}


# Virtual time stands still while any task can run. When all tasks wait, it jumps to the next timer.
# While worker threads compute, however, the event loop waits in real time. So a timer can end
# before a thread's result arrives only if it would in real time. By default, the loop does not wait
# for sockets and subprocesses before it jumps, so tests that use them must set `patience_seconds`.


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop with virtual time, which its selector advances."""

    def __init__(self, patience_seconds: float = 0.0) -> None:
        self._executing: set[asyncio.Future[Any]] = set()
        self._virtual = _JumpingSelector(patience_seconds, self.has_threads)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]  # the stub's variadic form cannot be restated
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function in a thread like the base class, and register the call until it ends."""
        future: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self._executing.add(future)
        future.add_done_callback(self._executing.discard)
        return future

    def has_threads(self) -> bool:
        """Return True if a worker thread is still computing a result."""
        return bool(self._executing) or any(_owes(thread, self) for thread in threading.enumerate())


def _owes(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> bool:
    # The loop waits for a result of an anyio worker thread until anyio adds the thread to `idle_workers`. anyio
    # does this in the loop's thread when the result arrives, so the collections do not change here.
    workers = getattr(thread, "workers", ())
    idle = getattr(thread, "idle_workers", ())
    return getattr(thread, "loop", None) is loop and thread in workers and thread not in idle


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that does not sleep until the next timer is due, but moves its clock `now` to that
    time.
    """

    def __init__(self, patience_seconds: float, has_threads: Callable[[], bool]) -> None:
        super().__init__()
        self.now = 0.0
        self._patience_seconds = patience_seconds
        self._has_threads = has_threads

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            # None: no timer is set, so wait for real events. 0: a task can run, so only look for
            # events.
            return super().select(timeout)
        # Look for running threads first. A thread that ends after this look wakes the loop, so its
        # result is not missed.
        wait = timeout if self._has_threads() else min(timeout, self._patience_seconds)
        ready = super().select(wait)
        if not ready:
            self.now += timeout
        return ready


class TrioClock:
    """A trio clock that jumps to the next deadline when no task can run. It is also a trio
    instrument, so that trio reports each task step to it.

    trio's own `MockClock` also jumps, but does not wait for worker threads first.
    """

    def __init__(self, patience_seconds: float = 0.0) -> None:
        self._now = 0.0
        self._patience_seconds = patience_seconds
        # real time at which the current wait ends and virtual time jumps; None if no wait has begun
        self._jump_at: float | None = None

    def start_clock(self) -> None:
        """Do nothing, because virtual time begins at 0."""

    def current_time(self) -> float:
        """Return the virtual seconds since the run began."""
        return self._now

    def before_task_step(self, task: object) -> None:
        """Stop waiting for the next jump, because a task is about to run."""
        self._jump_at = None

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return how many real seconds to wait for events. trio calls this when no task can run."""
        virtual = deadline - self._now
        if virtual <= 0 or virtual == math.inf:
            return max(0.0, virtual)
        real = time.monotonic()
        if self._jump_at is None:
            self._jump_at = real + (
                virtual if _trio_threads() else min(virtual, self._patience_seconds)
            )
        elif real >= self._jump_at:
            self._now = deadline
            self._jump_at = None
            return 0.0
        return max(0.0, self._jump_at - real)


def _trio_threads() -> int:
    # Imported here, because trio is an optional dependency.
    from trio.testing import active_thread_count

    return active_thread_count()
