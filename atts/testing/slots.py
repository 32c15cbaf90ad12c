"""The queue before a scripted engine: so many requests at once, the others in order."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import anyio


class Slots:
    """A counting lock with a queue ordered by priority, then by arrival; no number (None) means no queue.

    A waiter that is cancelled leaves the queue, and a slot already given to it goes to the next.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.taken = 0
        self._arrivals = count()
        self._queue: list[tuple[int, int, anyio.Event]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def acquire(self, priority: int = 0) -> None:
        """Wait for a slot."""
        if self.number is None or (self.taken < self.number and not self._queue):
            self.taken += 1
            return
        entry = (priority, next(self._arrivals), anyio.Event())
        heappush(self._queue, entry)
        try:
            await entry[2].wait()
        except BaseException:
            if entry[2].is_set():
                self.release()
            else:
                self._queue.remove(entry)
                self._queue.sort()  # a sorted list is a heap
            raise

    def release(self) -> None:
        """Give a slot back: to the first in the queue when there is one."""
        if self._queue:
            heappop(self._queue)[2].set()
        else:
            self.taken -= 1
