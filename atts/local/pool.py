"""Hands out slots of the key-value cache: fixed in number, one a token, taken and returned in runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atts.local.batch import Slots


class SlotPool:
    """A stack of free slots. Slot 0 is never handed out: it stays zero, and padding points at it.

    >>> pool = SlotPool(4)
    >>> taken = pool.take(3)
    >>> pool.free, pool.used
    (1, 3)
    >>> pool.give([taken]); pool.free
    4
    """

    def __init__(self, size: int) -> None:
        self._stack: Slots = np.arange(size, 0, -1, dtype=np.int32)  # low slots on top
        self._size = self._free = size
        self._least = size

    @property
    def size(self) -> int:
        """How many slots there are."""
        return self._size

    @property
    def free(self) -> int:
        """How many can be taken now."""
        return self._free

    @property
    def used(self) -> int:
        """How many are taken."""
        return self._size - self._free

    @property
    def peak(self) -> int:
        """The most that were taken at once."""
        return self._size - self._least

    def take(self, count: int) -> Slots:
        """`count` slots; the caller has made sure there are as many."""
        assert count <= self._free, "slots must be made free before they are taken"
        self._free -= count
        self._least = min(self._least, self._free)
        return self._stack[self._free : self._free + count][::-1].copy()

    def give(self, runs: Sequence[Slots]) -> None:
        """Take back slots that nobody reads any more."""
        for run in runs:
            count = len(run)
            assert self._free + count <= self._size, "a slot was given back twice"
            self._stack[self._free : self._free + count] = run[::-1]
            self._free += count
