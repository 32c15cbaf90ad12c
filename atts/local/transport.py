"""Transports of a drafter that works beside the target: in the same thread, or in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Condition, Thread, current_thread
from time import perf_counter
from typing import Protocol

Work = Callable[[], None]

PATIENCE = 5.0
"""Seconds in which a drafter must end what it began, where another way to draft is tried."""


class DraftTransport(Protocol):
    """Does pieces of work one after the other, in the order given."""

    is_beside: bool  # whether it works while its caller does

    def post(self, work: Work) -> None:
        """Begin a piece of work."""
        ...

    def wait(self, seconds: float) -> bool:
        """Whether all work is over after so many seconds at the most."""
        ...

    def elapsed(self, began: float) -> float:
        """Seconds of the target's step, which began then."""
        return perf_counter() - began


class InlineTransport(DraftTransport):
    """Works at once: what is drafted depends on nothing but the texts."""

    is_beside = False

    def post(self, work: Work) -> None:
        """Done when this returns."""
        work()

    def wait(self, seconds: float) -> bool:
        """It is over."""
        return True


class ThreadTransport(DraftTransport):
    """Works in a thread that ends with this object; native kernels and torch let both threads compute at once."""

    is_beside = True

    def __init__(self) -> None:
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self._open = _Open()
        thread = Thread(target=_serve, args=(self._works, self._open), name="atts-drafter", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._works, thread)

    def post(self, work: Work) -> None:
        """Begins when the thread wakes."""
        self._open.add(1)
        self._works.put(work)

    def wait(self, seconds: float) -> bool:
        """Sleep until it is over, or for so long."""
        return self._open.wait(seconds)


class _Open:
    """How many pieces of work are not over."""

    def __init__(self) -> None:
        self._count, self._changed = 0, Condition()

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, seconds)


def _serve(works: SimpleQueue[Work | None], pieces: _Open) -> None:
    while (work := works.get()) is not None:
        work()
        del work  # or it would keep the drafter alive, and so this thread
        pieces.add(-1)


def _end(works: SimpleQueue[Work | None], thread: Thread) -> None:
    """When its user is gone or Python ends; a thread that is stopped within a kernel would take the process with it."""
    works.put(None)
    if thread is not current_thread():
        thread.join(5.0)
