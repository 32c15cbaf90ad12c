"""The allocator of key-value cache slots: fixed in number, one token each, taken and returned in
runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SlotIds = NDArray[np.int32]


class SlotAllocator:
    """A stack of free slots. Slot 0 is never handed out: it stays zero, and padding points at it.

    >>> allocator = SlotAllocator(4)
    >>> slots = allocator.allocate(3)
    >>> allocator.num_free, allocator.num_used
    (1, 3)
    >>> allocator.free([slots]); allocator.num_free
    4
    """

    def __init__(self, num_slots: int) -> None:
        self._stack: SlotIds = np.arange(num_slots, 0, -1, dtype=np.int32)  # low slots on top
        self.num_slots = self.num_free = num_slots
        self._least_free = num_slots
        # slots whose token the drafter has computed as well
        self.drafted = np.zeros(num_slots + 1, dtype=np.bool_)

    @property
    def num_used(self) -> int:
        """How many slots are allocated."""
        return self.num_slots - self.num_free

    @property
    def peak_used(self) -> int:
        """The most that were allocated at once."""
        return self.num_slots - self._least_free

    def allocate(self, count: int) -> SlotIds:
        """`count` slots; the caller has made sure there are as many."""
        assert count <= self.num_free, "slots must be made free before they are allocated"
        self.num_free -= count
        self._least_free = min(self._least_free, self.num_free)
        slots = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self.drafted[slots] = False
        return slots

    def free(self, runs: Sequence[SlotIds]) -> None:
        """Take back slots that no sequence reads any more."""
        for run in runs:
            count = len(run)
            assert self.num_free + count <= self.num_slots, "a slot was freed twice"
            self._stack[self.num_free : self.num_free + count] = run[::-1]
            self.num_free += count
