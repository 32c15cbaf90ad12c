"""Sharing of keys and values between models of one loop: what a relative computed of the same
tokens is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from atts.accel.zoo.slot_ledger import Relative, SlotLedger
from atts.local.cache import PrefixMatch, PrefixNode, PrefixTree, SlotIds
from atts.local.scheduler import WORTH_WAITING, CacheAction, Scheduler, SchedulerConfig
from atts.local.sequence import Sequence


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
            sequence.capacity = stop
            self.ledger.lend(sequence.row, stop, self.kin.unit)


class KVSharing:
    """Which relatives have what of a sequence's ids."""

    def __init__(self, tree: PrefixTree, ledger: SlotLedger) -> None:
        self._tree = tree
        self.ledger = ledger

    def kinds(self, sequence: Sequence) -> Iterator[tuple[Relative, int]]:
        """Each relative of its model, and the part of the tree that holds what that one computed."""
        for kin in self.ledger.kin.get(sequence.model, ()):
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


class SharingScheduler(Scheduler):
    """A scheduler whose sequences read keys and values that models related to theirs computed."""

    def __init__(self, config: SchedulerConfig, tree: PrefixTree, ledger: SlotLedger) -> None:
        super().__init__(config, tree, ledger)
        self._ledger = ledger
        self._sharing = KVSharing(tree, ledger)
        self._loan: SharedSlots | None = None  # for the request that was looked at last
        self.tables: SlotIds = self.table.transpose(2, 0, 1)  # [columns, rows, tokens]
        self.divide([0])

    def divide(self, parents: list[int]) -> None:
        """Make each column of layers what that old one was; whoever is amid a loan borrows again."""
        for sequence in self.running():
            if sequence.num_computed < self._ledger.borrowed[sequence.row]:
                self._preempt(sequence)
        tables = self.tables[parents]
        none = np.zeros((0, len(parents)), dtype=np.int32)
        nodes = list(self.tree.nodes())
        divided = [node.slots[:, parents] if len(node.slots) else none for node in nodes]
        # what needs memory is done: from here on nothing fails
        self.tree.no_slots = none
        for node, slots in zip(nodes, divided, strict=True):
            node.slots = slots
        self.tables = tables
        self.table = tables.transpose(1, 2, 0)

    @property
    def num_locked(self) -> int:
        """Slots that running sequences read or write, in the column where they are the most."""
        running = self.running()
        if not running:
            return super().num_locked
        held = [self.table[each.row, : each.capacity] for each in running]
        return self._ledger.num_apart(np.concatenate(held))

    def cache_prefix(self, sequence: Sequence) -> PrefixNode:
        """Hand what is computed over to the prefix tree, once slots that relatives have are held
        instead.
        """
        assert sequence.node is not None, "a running sequence holds a lock"
        start = max(sequence.num_shared, sequence.node.depth)
        self._sharing.deduplicate(sequence, self.table[sequence.row], start)
        return super().cache_prefix(sequence)

    def _prefill_stop(self, sequence: Sequence, stop: int) -> int:
        borrowed = int(self._ledger.borrowed[sequence.row])
        # what follows is computed from its first unit on
        return min(stop, borrowed) if sequence.num_computed < borrowed else stop

    def _reachable(self, sequence: Sequence, found: PrefixMatch) -> int:
        self._loan = self._sharing.best(sequence, self._start(sequence, found))
        return max(found.length, self._loan.stop if self._loan else 0)

    def _try_admit(self, sequence: Sequence, found: PrefixMatch) -> bool:
        loan = self._loan
        if not super()._try_admit(sequence, found):
            return False
        if loan is not None:
            self.tree.lock(loan.found.node)
            self._evict_until_free(loan.stop - sequence.capacity)
            self.tree.unlock(loan.found.node)
            loan.put_into(sequence, self.table[sequence.row], self._ledger.num_free)
        return True

    def _can_free(self, count: int) -> bool:
        """Slots of the tree that running sequences hold as well cannot be freed."""
        free = self._ledger.num_free
        if free >= count or free + self.tree.num_evictable < count:
            return free >= count
        return self._ledger.num_slots - self.num_locked >= count

    def _useful_kinds(self, sequence: Sequence) -> set[int]:
        return {sequence.kind, *(kind for _, kind in self._sharing.kinds(sequence))}

    def _release(self, sequence: Sequence, *, cache: CacheAction) -> None:
        row = sequence.row
        super()._release(sequence, cache=cache)
        self._ledger.lend(row, 0, 0)
