"""Task groups, counting slots and child processes; no other module opens a task group."""

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
"""Held while transformers or torch is imported, and while a first call imports more of it.

Their lazy modules look their parts up without a lock, so that of two threads that use one for the
first time, one meets half of it. Take it in functions only: a module that takes it while it is
imported waits for its own importer.
"""


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
        # None under trio's guest mode, whose host loop is not our clock
        if asyncio.current_task() is not None:
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


class _Waiter:
    __slots__ = ("event", "state", "tokens")

    def __init__(self, event: anyio.Event, tokens: int) -> None:
        self.event = event
        self.tokens = tokens
        # then "granted", by the one who gave, or "gone", by its own cancellation
        self.state = "waiting"


class SlotQueue:
    """At most `slots` holders and `tokens` tokens at once; None means no bound.

    First come first served within a priority, lower numbers first. The head of the queue is never
    overtaken within its priority: a large request waits for room, it does not starve. A waiter that
    is cancelled leaves the queue, and what it had been granted goes to the next.
    """

    __slots__ = ("_event", "_lanes", "_priorities", "free_slots", "free_tokens", "slots", "tokens")

    def __init__(self, slots: int | None, tokens: int | None = None) -> None:
        self.slots = slots
        self.tokens = tokens
        # below 0 after a resize below what is in use
        self.free_slots: float = math.inf if slots is None else slots
        self.free_tokens: float = math.inf if tokens is None else tokens
        self._event: Callable[[], anyio.Event] = anyio.Event
        self._lanes: dict[int, deque[_Waiter]] = {}  # by priority; an empty lane is removed
        self._priorities: list[int] = []  # of the lanes, sorted

    def enter_loop(self) -> None:
        """Prepare for the loop that is running: its own class of events is a third of the price of
        finding it.
        """
        self._event = type(anyio.Event())

    @property
    def in_use(self) -> int:
        """Slots taken; 0 where slots are not bounded."""
        return 0 if self.slots is None else self.slots - int(self.free_slots)

    @property
    def tokens_in_use(self) -> int:
        """Tokens taken; 0 where tokens are not bounded."""
        return 0 if self.tokens is None else self.tokens - int(self.free_tokens)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(waiter.state == "waiting" for lane in self._lanes.values() for waiter in lane)

    def resize(self, slots: int) -> None:
        """Bound the slots anew: those above the bound end as they are given back, those gained are
        granted now.
        """
        assert self.slots is not None, "only a bound can be moved"
        self.free_slots += slots - self.slots
        self.slots = slots
        self._grant()

    def take_nowait(self, tokens: int = 0) -> bool:
        """Take a slot and the tokens if they are free and no one was first."""
        if self._lanes or self.free_slots < 1 or self.free_tokens < tokens:
            return False
        self.free_slots -= 1
        self.free_tokens -= tokens
        return True

    async def take(self, tokens: int = 0, priority: int = 0) -> None:
        """Wait for a slot and the tokens; what more tokens than the bound mean, a subclass says in
        `_refuse`.
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
            if waiter.state == "granted":  # granted and cancelled in the same step: pass it on
                self.give(tokens)
            else:
                waiter.state = "gone"
                self._grant()  # it may have stood in the way of smaller ones
            raise

    def _refuse(self, tokens: int) -> None:
        raise ValueError(f"{tokens} tokens of {self.tokens} are never free")

    def give(self, tokens: int = 0) -> None:
        """Give a slot and its tokens back; the head of the queue has them before this returns."""
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
"""How often a child looks whether its parent is still there."""
_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG; sent when the thread that started the child ends, so it must be a
harmless one.
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
    """The command line that runs a module or a file in an isolated Python, with the `atts` of this
    process.

    Environment variables that Python itself reads do not reach it; what they added to this
    process's path does.
    """
    start = json.dumps([str(program), import_path(), str(Path(__file__).parent)])
    return [sys.executable, "-I", "-c", _START, start, *arguments]


def import_path() -> list[str]:
    """`sys.path` without the current directory, unless `PYTHONPATH` names it in full."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # it was deleted
        here = ""
    return [p for p in sys.path if os.path.isabs(p) and (p in named or os.path.realpath(p) != here)]


def usable_cores() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with(parent: int) -> None:
    """Kill this process, and what it started, as soon as process `parent` is gone; to be called in
    its child.
    """
    if sys.platform == "linux":
        # a child that is stopped would not look
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGCONT)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
