"""The transports of a drafter that works beside the target: at once in the same thread, or in one of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Protocol

Work = Callable[[], None]


class DraftTransport(Protocol):
    """Does one piece of work at a time, which must be over before the next is given."""

    is_beside: bool  # whether it works while its caller does

    def post(self, work: Work) -> None:
        """Begin a piece of work."""
        ...

    def wait(self, seconds: float) -> bool:
        """Whether the work is over after so many seconds at the most."""
        ...


class InlineTransport:
    """Works at once: what is drafted depends on nothing but the texts."""

    is_beside = False

    def post(self, work: Work) -> None:
        """Done when this returns."""
        work()

    def wait(self, seconds: float) -> bool:
        """It is over."""
        return True


class ThreadTransport:
    """Works in a thread that ends with this object; native kernels and torch let both threads compute at once."""

    is_beside = True

    def __init__(self) -> None:
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self._is_over = Event()
        thread = Thread(target=_serve, args=(self._works, self._is_over), name="atts-drafter", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._works, thread)

    def post(self, work: Work) -> None:
        """Begins when the thread wakes."""
        self._is_over.clear()
        self._works.put(work)

    def wait(self, seconds: float) -> bool:
        """Sleep until it is over, or for so long."""
        return self._is_over.wait(seconds)


def _serve(works: SimpleQueue[Work | None], is_over: Event) -> None:
    while (work := works.get()) is not None:
        work()
        del work  # or it would keep the drafter alive, and so this thread
        is_over.set()


def _end(works: SimpleQueue[Work | None], thread: Thread) -> None:
    """When its user is gone or Python ends; a thread that is stopped within a kernel would take the process with it."""
    works.put(None)
    if thread is not current_thread():
        thread.join(5.0)
