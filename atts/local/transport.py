"""Transports of a drafter that works beside the target: in the same thread, or in a thread of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from time import perf_counter

Work = Callable[[], None]

PATIENCE = 5.0
"""Seconds in which a drafter must end what it began, where another way to draft is tried."""


class InlineTransport:
    """Does pieces of work one after the other, each at once: what is drafted depends on nothing but
    the texts.
    """

    is_beside = False  # whether it works while its caller does

    def post(self, work: Work) -> None:
        """Begin a piece of work; done when this returns."""
        work()

    def wait(self, seconds: float) -> bool:
        """Whether all work is over after so many seconds at the most."""
        return True

    def elapsed(self, began: float) -> float:
        """Seconds of the target's step, which began then."""
        return perf_counter() - began


class ThreadTransport(InlineTransport):
    """Works in a thread that ends with this object; native kernels and torch let both threads
    compute at once.
    """

    is_beside = True

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "atts-drafter")
        self._last = list[Future[None]]()

    def post(self, work: Work) -> None:
        """Begins when the thread wakes, after what was posted before."""
        self._last = [self._thread.submit(work)]

    def wait(self, seconds: float) -> bool:
        """Sleep until it is over, or for so long."""
        return not wait_for(self._last, seconds).not_done
