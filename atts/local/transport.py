"""Transport of work to a drafter that continues guesses while its target verifies a step."""

from __future__ import annotations

from collections.abc import Callable
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
