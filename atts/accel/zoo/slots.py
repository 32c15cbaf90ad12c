"""The slots that models of one loop share, and the scheduler that lends them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from copy import deepcopy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.local.batch import Ints, StepBatch
from atts.local.cache import PrefixMatch, PrefixNode, PrefixTree, SlotAllocator, SlotIds
from atts.local.scheduler import WORTH_WAITING, CacheAction, Scheduler, SchedulerConfig
from atts.local.sequence import Sequence

# Layers are divided where models of the loop part; each column of layers has slots of its own. A
# position of a sequence has a slot in each column. Where a relative has computed the same tokens
# through the same blocks, its slots are held once more instead of being computed again, and what
# went into the first unit that differs is read from where it is kept.

OnSplit = Callable[[list[int]], None]
"""Hears from which of the old columns each new one is."""


class Lineage(NamedTuple):
    """Names of what a chain computes, equal where the computation is equal: 0 embedding, 1 + 2 *
    layer attention, ...
    """

    units: tuple[str, ...]
    keys: tuple[str, ...]  # keys of each layer's keys and values, its own part alone
    whole: int  # the last unit before which the states of all of a step's rows are there


class Relative(NamedTuple):
    """A relative that may have computed a sequence's first tokens."""

    chain: int
    layers: int  # layers whose keys and values are the same
    unit: int  # unit from which on they are computed separately


class Kept(NamedTuple):
    """Inputs that a unit keeps, by the slots of the column before it."""

    column: int
    states: NDArray[np.float32]  # [slots, width]
    # True where the state was computed in a batch of many rows. A single row uses another attention
    # kernel, whose results differ in the last bits.
    is_known: NDArray[np.bool_]


def alone(parents: list[int]) -> None:
    """Do nothing: nothing else has columns."""


def divergence_point(one: Lineage, other: Lineage) -> tuple[int, int]:
    """Return how many layers' keys and values two chains share, and the first unit that differs."""
    pairs = zip(one.units, other.units, strict=False)
    unit = next(
        (at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(one.units) - 1
    )
    layers = min(unit // 2, len(one.keys), len(other.keys))
    if unit % 2 and layers < min(len(one.keys), len(other.keys)):
        layers += one.keys[layers] == other.keys[layers]
    return layers, min(unit, one.whole, other.whole)


class SlotLedger(SlotAllocator):
    """Slots by column, each with how many hold it: who took it first, and those that read what is
    written there.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        super().__init__(num_slots)
        self._width = width
        self._columns = [SlotAllocator(num_slots)]
        self.holders: NDArray[np.int32] = np.zeros((1, num_slots + 1), dtype=np.int32)
        self.starts: tuple[int, ...] = (0,)  # the first layer of each column
        self.kin: dict[int, list[Relative]] = {}
        self.kept: dict[int, Kept] = {}  # keyed by the unit that the state goes into
        # For each row of the slot table: up to where a relative's keys and values of the first
        # layers are read, and the unit from which on those positions are computed.
        self.borrowed: Ints = np.zeros(0, dtype=np.int64)
        self._units: Ints = np.zeros(0, dtype=np.int64)

    def new_table(self, rows: int, width: int) -> SlotIds:
        """Return a table of slots, all 0, with a single column: [rows, width, 1]."""
        self.borrowed, self._units = np.zeros((2, rows), dtype=np.int64)
        return np.zeros((1, rows, width), dtype=np.int32).transpose(1, 2, 0)

    def lend(self, row: int, stop: int, unit: int) -> None:
        """Note that a row reads a relative's slots up to `stop`, of the layers before a unit."""
        self.borrowed[row] = stop
        self._units[row] = unit

    def first_units(self, batch: StepBatch) -> Ints:
        """Return the unit from which on each sequence of a step is computed: [sequences]."""
        rows = batch.table_rows
        begins = batch.context_lens - np.diff(batch.query_starts)
        return np.where(begins < self.borrowed[rows], self._units[rows], 0)

    def relate(self, chains: Mapping[int, Lineage], divide: OnSplit = alone) -> None:
        """Divide the layers where these chains part; `divide` hears from which of the old columns
        each new one is.

        What needs memory comes first: where that ends, or `divide` breaks, all is as it was.
        """
        divergences = {
            (a, b): divergence_point(chains[a], chains[b]) for a in chains for b in chains if a != b
        }
        # keyed by number of layers: a unit whose whole part can continue there
        units = dict[int, int]()
        for layers, unit in divergences.values():
            if layers:
                units[layers] = min(unit, units.get(layers, unit))
        starts = (
            0,
            *sorted(units.keys() - {max(len(lineage.keys) for lineage in chains.values())}),
        )
        parents = [self.column_of(start) for start in starts]
        columns = [deepcopy(self._columns[at]) for at in parents]
        holders = self.holders[parents]
        places = {units[n]: bisect_right(starts, n - 1) - 1 for n in sorted(units, reverse=True)}
        kept = {unit: self._kept(unit, column, parents[column]) for unit, column in places.items()}
        kin: dict[int, list[Relative]] = {chain: [] for chain in chains}
        for (chain, other), (layers, _) in divergences.items():
            if layers:
                kin[chain].append(Relative(other, layers, units[layers]))
        divide(parents)
        self._columns = columns
        self.holders = holders
        self.starts = starts
        self.kept = kept
        self.kin = kin

    def _kept(self, unit: int, column: int, parent: int) -> Kept:
        """Return the state kept before a unit by these slots; nothing if other slots kept it."""
        known = self.kept.get(unit)
        size = self.num_slots + 1
        if known is not None and known.column == parent:
            return known._replace(column=column)
        return Kept(
            column, np.zeros((size, self._width), dtype=np.float32), np.zeros(size, dtype=np.bool_)
        )

    def column_of(self, layer: int) -> int:
        """Return the column that a layer is in."""
        return bisect_right(self.starts, layer) - 1

    def reach(self, kin: Relative, slots: SlotIds) -> int:
        """Count the relative's leading positions from which a sequence can continue."""
        kept = self.kept[kin.unit]
        known = kept.is_known[slots[:, kept.column]] if len(slots) else np.zeros(0, dtype=np.bool_)
        return len(known) if known.all() else int(known.argmin())

    def borrow(self, kin: Relative, slots: SlotIds) -> SlotIds:
        """Hold a relative's slots of the layers that are the same, with new ones of the others."""
        return self._hold(slots[:, : self._shared(kin)])

    def exchange(self, kin: Relative, mine: SlotIds, theirs: SlotIds) -> None:
        """Hold a relative's slots instead, in place, wherever both were computed alike, so that
        they are equal.
        """
        kept = self.kept[kin.unit]
        alike = np.ones(len(mine), dtype=np.bool_)
        for slots in (mine, theirs):
            alike &= kept.is_known[slots[:, kept.column]]
        for at in range(self._shared(kin)):
            old = mine[alike, at]
            new = theirs[alike, at]
            self.holders[at, new] += 1
            self.holders[at, old] -= 1
            self._columns[at].free([old[self.holders[at, old] == 0]])
            mine[alike, at] = new
        self._count()

    def _shared(self, kin: Relative) -> int:
        return 1 + self.column_of(kin.layers - 1)

    def _hold(self, slots: SlotIds) -> SlotIds:
        added_columns = [column.allocate(len(slots)) for column in self._columns[slots.shape[1] :]]
        all_columns = np.column_stack([slots, *added_columns]).astype(np.int32)
        for at, column in enumerate(all_columns.T):
            self.holders[at, column] += 1
        self._count()
        return all_columns

    def allocate(self, count: int) -> SlotIds:
        """Hand out new slots in every column: [count, columns]."""
        return self._hold(np.zeros((count, 0), dtype=np.int32))

    def free(self, runs: Many[SlotIds]) -> None:
        """Hold these once less; those without a holder are free."""
        for run in runs:
            for at, (column, slots) in enumerate(zip(self._columns, run.T, strict=True)):
                self.holders[at, slots] -= 1
                column.free([slots[self.holders[at, slots] == 0]])
        self._count()

    def num_apart(self, slots: SlotIds) -> int:
        """Return the largest number of these slots in one column."""
        is_there = np.zeros((slots.shape[1], self.num_slots + 1), dtype=np.bool_)
        is_there[np.arange(slots.shape[1]), slots] = True
        return int(is_there.sum(axis=1).max())

    def _count(self) -> None:
        self.num_free = min(column.num_free for column in self._columns)
        self._least_free = min(self._least_free, self.num_free)


class SharedSlots(NamedTuple):
    """A relative's slots for the first ids of a waiting request."""

    ledger: SlotLedger
    kin: Relative
    found: PrefixMatch  # in the relative's part of the tree
    stop: int
    gain: int

    def put_into(self, sequence: Sequence, row: SlotIds, free: int) -> None:
        """Put them into the row, of the layers that are the same, with at most so many `free`
        ones of the others.
        """
        start = sequence.capacity
        stop = min(self.stop, start + free)
        if stop >= start + WORTH_WAITING:
            row[start:stop] = self.ledger.borrow(self.kin, self.found.slots[start:stop])
            sequence.capacity = stop
            self.ledger.lend(sequence.row, stop, self.kin.unit)


class KVSharing:
    """Record of which related models have which keys and values of a sequence's ids."""

    def __init__(self, tree: PrefixTree, ledger: SlotLedger) -> None:
        self._tree = tree
        self.ledger = ledger

    def kinds(self, sequence: Sequence) -> Iterator[tuple[Relative, int]]:
        """Return each relative of its model, and the kind of what that one computed."""
        for kin in self.ledger.kin.get(sequence.model, ()):
            yield kin, sequence.kind_of(kin.chain)

    def best(self, sequence: Sequence, known: int) -> SharedSlots | None:
        """Find the loan that saves a waiting request the most; what is fed apart is long enough.

        A few rows alone attend by other kernels, and would not say to the bit what they say among
        many.
        """
        best = None
        ids = tuple(sequence.ids)
        for kin, kind in self.kinds(sequence):
            match = self._tree.match(ids, len(ids), self._tree.root(kind))
            stop = known + self.ledger.reach(kin, match.slots[known:])
            if stop < len(ids):
                stop = min(stop, len(ids) - WORTH_WAITING)
            gain = (stop - known) * kin.unit
            if stop >= known + WORTH_WAITING and (best is None or gain > best.gain):
                best = SharedSlots(self.ledger, kin, match, stop, gain)
        return best

    def deduplicate(self, sequence: Sequence, row: SlotIds, start: int) -> None:
        """Hold what relatives have computed of the same tokens instead of what this one has, from a
        position on.
        """
        ids = tuple(sequence.ids[: sequence.num_computed])
        start = max(start, self._tree.match(ids, len(ids), self._tree.root(sequence.kind)).length)
        for kin, kind in self.kinds(sequence):
            match = self._tree.match(ids, len(ids), self._tree.root(kind))
            if match.length > start:
                self.ledger.exchange(kin, row[start : match.length], match.slots[start:])


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
        """Make each column of layers what that old one was; a loan under way is made again."""
        for sequence in self.running():
            if sequence.num_computed < self._ledger.borrowed[sequence.row]:
                self._preempt(sequence)
        tables = self.tables[parents]
        none = np.zeros((0, len(parents)), dtype=np.int32)
        nodes = list(self.tree.nodes())
        divided = [node.slots[:, parents] if len(node.slots) else none for node in nodes]
        # everything that needs memory is done, so nothing fails from here on
        self.tree.no_slots = none
        for node, slots in zip(nodes, divided, strict=True):
            node.slots = slots
        self.tables = tables
        self.table = tables.transpose(1, 2, 0)

    @property
    def num_locked(self) -> int:
        """Count the slots that running sequences read or write, in the column that has the most."""
        running = self.running()
        if not running:
            return super().num_locked
        rows = [self.table[each.row, : each.capacity] for each in running]
        return self._ledger.num_apart(np.concatenate(rows))

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
        # later tokens are computed from the first unit on
        return min(stop, borrowed) if sequence.num_computed < borrowed else stop

    def _reachable(self, sequence: Sequence, match: PrefixMatch) -> int:
        self._loan = self._sharing.best(sequence, self._num_reusable(sequence, match))
        return max(match.length, self._loan.stop if self._loan else 0)

    def _try_admit(self, sequence: Sequence, match: PrefixMatch) -> bool:
        loan = self._loan
        if not super()._try_admit(sequence, match):
            return False
        if loan is not None:
            self.tree.lock(loan.found.node)
            self._evict_until_free(loan.stop - sequence.capacity)
            self.tree.unlock(loan.found.node)
            loan.put_into(sequence, self.table[sequence.row], self._ledger.num_free)
        return True

    def _can_free(self, count: int) -> bool:
        """Return whether slots can be freed, without those of the tree that running sequences hold
        as well.
        """
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
