"""Sharing of keys and values between models of one loop: what a relative computed of the same
tokens is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from atts.local.allocator import SlotIds
from atts.local.prefix import PrefixMatch, PrefixTree
from atts.local.sequence import Sequence
from atts.local.slot_ledger import Relative, SlotLedger

# tokens that must be spared, or a request neither borrows them nor waits for who computes them
WORTH_WAITING = 8


class SharedSlots(NamedTuple):
    """A relative's slots for the first ids of a waiting request."""

    ledger: SlotLedger
    kin: Relative
    found: PrefixMatch  # in the relative's part of the tree
    stop: int
    gain: int

    def put_into(self, sequence: Sequence, row: SlotIds, free: int) -> None:
        """Put them into the row, of the layers that are the same, beside at most so many `free`
        ones of the others.
        """
        start = sequence.capacity
        stop = min(self.stop, start + free)
        if stop >= start + WORTH_WAITING:
            row[start:stop] = self.ledger.borrow(self.kin, self.found.slots[start:stop])
            sequence.capacity = sequence.borrowed = stop
            sequence.unit = self.kin.unit


class KVSharing:
    """Which relatives have what of a sequence's ids."""

    def __init__(self, tree: PrefixTree, ledger: SlotLedger) -> None:
        self._tree = tree
        self.ledger = ledger

    def kinds(self, sequence: Sequence) -> Iterator[tuple[Relative, int]]:
        """Each relative of its model, and the part of the tree that holds what that one computed."""
        for kin in self.ledger.kin.get(sequence.chain, ()):
            yield kin, sequence.kind_of(kin.chain)

    def best(self, sequence: Sequence, known: int) -> SharedSlots | None:
        """The loan that spares a waiting request the most; what is fed apart is long enough.

        A few rows alone attend by other kernels, and would not say to the bit what they say among
        many.
        """
        best = None
        ids = tuple(sequence.ids)
        for kin, kind in self.kinds(sequence):
            found = self._tree.match(ids, len(ids), self._tree.root(kind))
            stop = known + self.ledger.reach(kin, found.slots[known:])
            if stop < len(ids):
                stop = min(stop, len(ids) - WORTH_WAITING)
            gain = (stop - known) * kin.unit
            if stop >= known + WORTH_WAITING and (best is None or gain > best.gain):
                best = SharedSlots(self.ledger, kin, found, stop, gain)
        return best

    def deduplicate(self, sequence: Sequence, row: SlotIds, start: int) -> None:
        """Hold what relatives have computed of the same tokens instead of what this one has, from a
        position on.
        """
        ids = tuple(sequence.ids[: sequence.num_computed])
        start = max(start, self._tree.match(ids, len(ids), self._tree.root(sequence.kind)).length)
        for kin, kind in self.kinds(sequence):
            found = self._tree.match(ids, len(ids), self._tree.root(kind))
            if found.length > start:
                self.ledger.exchange(kin, row[start : found.length], found.slots[start:])
