"""Adaptive concurrency limit: additive increase, multiplicative decrease on refusals (AIMD)."""

from __future__ import annotations

from collections.abc import Callable

from atts.slots import SlotQueue

SHRINK = 0.8
GROW = 1.05
COOL_SECONDS = 15.0  # one burst of refusals counts once
CLEAN_SECONDS = 1.0  # without trouble, before the limit grows again


class AdaptiveLimit(SlotQueue):
    """Slots for requests: a refusal shrinks their number, a server error stops its growth, quiet lets it grow."""

    __slots__ = ("_clock", "_grow_after", "_limit", "_most", "_shrink_after")

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        super().__init__(most)
        self._most = most
        self._clock = clock
        self._limit = float(most)
        self._shrink_after = self._grow_after = 0.0

    def refused(self) -> None:
        """The server said that it was too much."""
        now = self._clock()
        if now >= self._shrink_after:
            self._set(max(1, min(self._limit, max(self.in_use, 1)) * SHRINK))
            self._shrink_after = now + COOL_SECONDS
        self._grow_after = now + COOL_SECONDS

    def erred(self) -> None:
        """The server failed: no reason to send less, none to send more."""
        self._grow_after = max(self._grow_after, self._clock() + COOL_SECONDS)

    def answered(self) -> None:
        """The server answered well."""
        if self._limit >= self._most:
            return
        now = self._clock()
        if now >= self._grow_after:
            self._set(min(self._most, max(self._limit * GROW, self._limit + 1)))
            self._grow_after = now + CLEAN_SECONDS

    def _set(self, limit: float) -> None:
        self._limit = limit
        self.resize(max(1, int(limit)))
