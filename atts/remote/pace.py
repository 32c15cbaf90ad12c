"""How many requests one server gets at once: as many as allowed, fewer after it said that it is too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio

SHRINK = 0.8
GROW = 1.05
COOL_SECONDS = 15.0  # one burst of refusals counts once
CLEAN_SECONDS = 1.0  # without trouble, before the limit grows again


class Pace:
    """A limit that adapts: a refusal shrinks it, a server error stops its growth for a while, quiet lets it grow.

    Waiters are served in order; one that is cancelled leaves the queue, and its turn goes to the next.
    """

    def __init__(self, most: int, clock: Callable[[], float], *, least: int = 1) -> None:
        self._most = most
        self._least = least
        self._clock = clock
        self._limit = float(most)
        self._shrink_after = self._grow_after = 0.0
        self._waiting: deque[anyio.Event] = deque()
        self.in_flight = 0

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return max(self._least, int(self._limit))

    def enter_nowait(self) -> bool:
        """Take a turn if there is one; never before those who wait."""
        free = not self._waiting and self.in_flight < self.limit
        self.in_flight += free
        return free

    async def enter(self) -> None:
        """Wait for a turn."""
        if self.enter_nowait():
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.leave()
            else:
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """Give the turn back."""
        self.in_flight -= 1
        while self._waiting and self.in_flight < self.limit:
            self.in_flight += 1
            self._waiting.popleft().set()

    def refused(self) -> None:
        """The server said that it was too much."""
        now = self._clock()
        if now >= self._shrink_after:
            self._limit = max(self._least, min(self._limit, max(self.in_flight, self._least)) * SHRINK)
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
            self._limit = min(self._most, max(self._limit * GROW, self._limit + 1))
            self._grow_after = now + CLEAN_SECONDS
