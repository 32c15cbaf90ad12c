"""Helpers for task groups, queues for slots, and child processes; no other module opens a task
group.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
from bisect import insort
from collections import deque
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
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import current_token

import_lock = threading.RLock()
"""A lock to hold while importing transformers or torch, and during the first call of a function
that imports further modules of these libraries.

Both libraries load parts of their modules on first use, without a lock of their own. A second
thread could therefore see a module that is only half loaded.

Take the lock inside functions only. A module that takes the lock at import time deadlocks with the
thread that is importing that module.
"""


__all__ = [
    "TaskGroup",
    "background",
    "backoff",
    "clock",
    "collect",
    "first_error",
    "loop_caller",
    "shielded",
    "task_group",
]

T = TypeVar("T")
Args = TypeVarTuple("Args")


@asynccontextmanager
async def task_group() -> AsyncGenerator[TaskGroup]:
    """Open an anyio task group that raises a failing task's own error, and never an exception
    group.

    If several tasks failed, `first_error` chooses the error to raise, and attaches the others as
    notes.

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
    """Return the most important error of an exception group, with the other errors attached as
    notes.

    Interrupts such as KeyboardInterrupt are the most important, then failures, then cancellations.
    If several errors are equally important, the first one is returned.

    >>> str(first_error(BaseExceptionGroup("", [ValueError("a"), ExceptionGroup("", [KeyError("b")])])))
    'a'
    """
    flat = list(_flatten(errors))
    cancelled = _cancellations()
    candidates = [error for error in flat if not isinstance(error, cancelled)] or flat
    interrupts = [error for error in candidates if not isinstance(error, Exception)]
    first = interrupts[0] if interrupts else candidates[0]
    for other in candidates:
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
    """Run all functions concurrently, and return their results in the order of the functions.

    :raises BaseException: the first error, after the other functions were cancelled and awaited.
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
    """Run a function concurrently with the block, and cancel the function when the block ends.

    :raises BaseException: the function's error, after it has cancelled the block.
    """
    async with task_group() as group:
        group.start_soon(function, *args)
        yield
        group.cancel_scope.cancel()


def backoff(attempt: int, first: float, *, longest: float = math.inf, salt: int = 0) -> float:
    """Return the seconds to wait before the next attempt; `attempt` is the number of the failed
    attempt, counted from 1.

    The wait doubles with each attempt, up to `longest`, and is multiplied by a pseudo-random factor
    between 0.75 and 1.25. The factor depends only on `salt`. Callers that failed together pass
    different salts, so they do not retry together. The same salt gives the same wait.

    >>> [round(backoff(attempt, 0.5, longest=1.0, salt=3), 2) for attempt in (1, 2, 3)]
    [0.59, 1.18, 1.18]
    """
    spread = 0.75 + 0.5 * (salt * 0.6180339887498949 % 1.0)
    return float(min(longest, first * 2.0 ** min(attempt - 1, 16)) * spread)


@contextmanager
def shielded(seconds: float) -> Generator[None]:
    """Protect asynchronous clean-up in the block from cancellation, for at most `seconds`."""
    with anyio.move_on_after(seconds, shield=True):
        yield


def clock() -> Callable[[], float]:
    """Return a function that reads the clock of the running event loop.

    It returns the same time as `anyio.current_time`, but faster, because it does not look up the
    event loop at each call.

    :raises anyio.NoEventLoopError: no event loop is running.
    """
    anyio.current_time()  # raises NoEventLoopError if no event loop runs
    try:
        # In trio's guest mode, trio runs inside an asyncio loop that has another clock.
        # `current_task` is then None, so trio's clock is used.
        if asyncio.current_task() is not None:
            return asyncio.get_running_loop().time
    except RuntimeError:
        pass
    # The running event loop is trio's, so trio is already loaded.
    from trio.lowlevel import current_clock

    return current_clock().current_time


def loop_caller() -> Callable[[Callable[[], None]], None]:
    """Return a function that other threads can call to schedule a callback in the current event
    loop.

    The returned function works on asyncio and trio, and never blocks the calling thread. Callbacks
    scheduled after the loop has ended are dropped.
    """
    native: Any = current_token().native_token
    run: Callable[[Callable[[], None]], object] = (
        getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
    )

    def schedule(function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # If the event loop has ended, the function is never called.
            run(function)

    return schedule


class _Waiter:
    __slots__ = ("event", "state", "tokens")

    def __init__(self, event: anyio.Event, tokens: int) -> None:
        self.event = event
        self.tokens = tokens
        # "granted": `_grant` gave the task a slot; "gone": the waiting task was cancelled
        self.state = "waiting"


class SlotQueue:
    """A semaphore that limits both slots and tokens, with a queue of waiting tasks for each
    priority. A limit of None means unlimited.

    Requests with lower priority numbers are served first. Requests with the same priority are
    served in the order of arrival, so small requests cannot overtake a large one again and again.

    If a waiting task is cancelled after its request was granted, the slot and the tokens pass to
    the next waiting task.
    """

    __slots__ = ("_event", "_lanes", "_priorities", "free_slots", "free_tokens", "slots", "tokens")

    def __init__(self, slots: int | None, tokens: int | None = None) -> None:
        self.slots = slots
        self.tokens = tokens
        # Negative after `resize` has set a limit below the number of slots in use.
        self.free_slots: float = math.inf if slots is None else slots
        self.free_tokens: float = math.inf if tokens is None else tokens
        self._event: Callable[[], anyio.Event] = anyio.Event
        # For each priority: the queue of the tasks that wait. A queue is removed when it is empty.
        self._lanes: dict[int, deque[_Waiter]] = {}
        self._priorities: list[int] = []  # the keys of `_lanes` in ascending order

    def enter_loop(self) -> None:
        """Look up the event class of the running event loop once, because this lookup takes most of
        the time of `anyio.Event()`.
        """
        self._event = type(anyio.Event())

    @property
    def in_use(self) -> int:
        """Return the number of slots taken, or 0 if slots are unlimited."""
        return 0 if self.slots is None else self.slots - int(self.free_slots)

    @property
    def tokens_in_use(self) -> int:
        """Return the number of tokens taken, or 0 if tokens are unlimited."""
        return 0 if self.tokens is None else self.tokens - int(self.free_tokens)

    @property
    def waiting(self) -> int:
        """Return the number of waiting tasks."""
        return sum(waiter.state == "waiting" for lane in self._lanes.values() for waiter in lane)

    def resize(self, slots: int) -> None:
        """Change the number of slots. If the number grows, waiting tasks get the new slots at once.
        If it shrinks, tasks keep the slots that they have, and surplus slots disappear when they
        are given back.
        """
        assert self.slots is not None, "an unlimited queue cannot be resized"
        self.free_slots += slots - self.slots
        self.slots = slots
        self._grant()

    def take_nowait(self, tokens: int = 0) -> bool:
        """Take a slot and `tokens` tokens if enough are free and no other task waits for them.
        Return True if they were taken.
        """
        if self._lanes or self.free_slots < 1 or self.free_tokens < tokens:
            return False
        self.free_slots -= 1
        self.free_tokens -= tokens
        return True

    async def take(self, tokens: int = 0, priority: int = 0) -> None:
        """Wait until a slot and `tokens` tokens are free, and take them.

        :raises ValueError: `tokens` exceeds the queue's limit. Subclasses override `_refuse` to
            raise a different error.
        """
        if self.tokens is not None and tokens > self.tokens:
            self._refuse(tokens)
        waiter = _Waiter(self._event(), tokens)
        if priority not in self._lanes:
            self._lanes[priority] = deque()
            insort(self._priorities, priority)
        self._lanes[priority].append(waiter)
        self._grant()
        try:
            await waiter.event.wait()
        except BaseException:
            if (
                waiter.state == "granted"
                # `_grant` gave this task a slot just before the task was cancelled. The task will
                # not use the slot and its tokens, so give them back.
            ):
                self.give(tokens)
            else:
                waiter.state = "gone"
                # The cancelled request leaves the queue, so smaller requests behind it may now get
                # a slot.
                self._grant()
            raise

    def _refuse(self, tokens: int) -> None:
        raise ValueError(f"{tokens} tokens were requested, but the limit is {self.tokens} tokens")

    def give(self, tokens: int = 0) -> None:
        """Give back a slot and `tokens` tokens, and grant the waiting requests that now fit."""
        # Giving back a slot twice would raise the limit for ever, without an error.
        assert self.slots is None or self.free_slots < self.slots, (
            "a slot must be taken before it is given back"
        )
        self.free_slots += 1
        self.free_tokens += tokens
        if self._lanes:
            self._grant()

    def _grant(self) -> None:
        while self._priorities:
            lane = self._lanes[self._priorities[0]]
            while lane:
                waiter = lane[0]
                if waiter.state == "waiting":
                    if self.free_slots < 1 or self.free_tokens < waiter.tokens:
                        return
                    self.free_slots -= 1
                    self.free_tokens -= waiter.tokens
                    waiter.state = "granted"
                    waiter.event.set()
                lane.popleft()
            del self._lanes[self._priorities.pop(0)]


_PARENT_SECONDS = 0.25
"""Interval, in seconds, at which a child process checks whether its parent is still running."""
_DEATH_SIGNAL = 1
"""The number of the Linux prctl option PR_SET_PDEATHSIG, which requests a signal when the parent
ends.

Linux sends the signal when the *thread* that started the child ends, even if the parent process
still runs. So the signal must be one that does not kill the child.
"""
_START = """\
import json, runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
program, path, folder = json.loads(sys.argv.pop(1))
sys.path[:] = path + [own for own in sys.path if own not in path]
spec = spec_from_file_location("atts", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["atts"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["atts"])
if program.endswith(".py"):
    runpy.run_path(program, run_name="__main__")
else:
    runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


def python_command(program: str | Path, *arguments: str) -> list[str]:
    """Return the command that runs a module or file in an isolated Python process with the same
    `atts` as this process.

    The child ignores Python's environment variables, such as PYTHONPATH. It still gets the entries
    that these variables added to the import path of this process.
    """
    start = json.dumps([str(program), import_path(), str(Path(__file__).parent)])
    return [sys.executable, "-I", "-c", _START, start, *arguments]


def import_path() -> list[str]:
    """Return the absolute paths in `sys.path`. The current directory is left out, unless
    `PYTHONPATH` names it.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        current = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # the current directory was deleted
        current = ""
    kept = list[str]()
    for entry in sys.path:
        if os.path.isabs(entry) and (entry in named or os.path.realpath(entry) != current):
            kept.append(entry)
    return kept


def usable_cores() -> int:
    """Return the number of processors on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with(parent: int) -> None:
    """Start a thread that kills this process and its children after the process with id `parent`
    has ended.
    """
    if sys.platform == "linux":
        # A stopped child cannot test whether its parent still runs, so Linux wakes it with SIGCONT
        # when the parent ends.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGCONT)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
