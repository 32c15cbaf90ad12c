"""The ledger of cache slots that models share: who holds which slot of which layers, and where
models differ.

Layers are divided where models of the loop part; each column of layers has slots of its own. A
position of a sequence has a slot in each column. Where a relative has computed the same tokens
through the same blocks, its slots are held once more instead of being computed again, and what went
into the first unit that differs is read from where it is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.local.batch import Ints, StepBatch
from atts.local.cache import SlotAllocator, SlotIds

Divide = Callable[[list[int]], None]
"""Hears from which of the old columns each new one is."""


class Lineage(NamedTuple):
    """What a chain computes, by names that are equal where it is the same: 0 embedding, 1 + 2 *
    layer attention, ...
    """

    units: tuple[str, ...]
    keys: tuple[str, ...]  # of each layer's keys and values, its own part alone
    whole: int  # the last unit before which the states of all of a step's rows are there


class Relative(NamedTuple):
    """A relative that may have computed a sequence's first tokens."""

    chain: int
    layers: int  # whose keys and values are the same
    unit: int  # from which on they are computed apart


class Kept(NamedTuple):
    """What goes into a unit, by the slots of the column before it."""

    column: int
    states: NDArray[np.float32]  # [slots, width]
    # computed among many rows: alone, rows attend by other kernels, not to the same bit
    is_known: NDArray[np.bool_]


def alone(parents: list[int]) -> None:
    """Nothing else has columns."""


def parting(one: Lineage, other: Lineage) -> tuple[int, int]:
    """How many layers' keys and values two chains share, and the unit from which each computes
    alone.
    """
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
        self.kept: dict[int, Kept] = {}  # by the unit that it goes into
        # of each row of the slot table: up to where a relative's keys and values of the first
        # layers are read, and the unit from which on those positions are computed
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
        """Return from which unit on each sequence of a step is computed: [sequences]."""
        rows = batch.table_rows
        begins = batch.context_lens - np.diff(batch.query_starts)
        return np.where(begins < self.borrowed[rows], self._units[rows], 0)

    def relate(self, chains: Mapping[int, Lineage], divide: Divide = alone) -> None:
        """Divide the layers where these chains part; `divide` hears from which of the old columns
        each new one is.

        What needs memory comes first: where that ends, or `divide` breaks, all is as it was.
        """
        found = {(a, b): parting(chains[a], chains[b]) for a in chains for b in chains if a != b}
        units = dict[int, int]()  # by layers: one place where all that part there can go on
        for layers, unit in found.values():
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
        for (chain, other), (layers, _) in found.items():
            if layers:
                kin[chain].append(Relative(other, layers, units[layers]))
        divide(parents)
        self._columns = columns
        self.holders = holders
        self.starts = starts
        self.kept = kept
        self.kin = kin

    def _kept(self, unit: int, column: int, parent: int) -> Kept:
        """What was kept before a unit by the slots of the column's parent; nothing yet where it was
        by other slots.
        """
        known = self.kept.get(unit)
        size = self.num_slots + 1
        if known is not None and known.column == parent:
            return known._replace(column=column)
        return Kept(
            column, np.zeros((size, self._width), dtype=np.float32), np.zeros(size, dtype=np.bool_)
        )

    def column_of(self, layer: int) -> int:
        """The column that a layer is in."""
        return bisect_right(self.starts, layer) - 1

    def reach(self, kin: Relative, slots: SlotIds) -> int:
        """From how many of a relative's positions on, one after the other, a sequence can go on."""
        kept = self.kept[kin.unit]
        known = kept.is_known[slots[:, kept.column]] if len(slots) else np.zeros(0, dtype=np.bool_)
        return len(known) if known.all() else int(known.argmin())

    def borrow(self, kin: Relative, slots: SlotIds) -> SlotIds:
        """Hold a relative's slots of the layers that are the same, beside new ones of the others."""
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
        own = [column.allocate(len(slots)) for column in self._columns[slots.shape[1] :]]
        found = np.column_stack([slots, *own]).astype(np.int32)
        for at, column in enumerate(found.T):
            self.holders[at, column] += 1
        self._count()
        return found

    def allocate(self, count: int) -> SlotIds:
        """New slots in every column: [count, columns]."""
        return self._hold(np.zeros((count, 0), dtype=np.int32))

    def free(self, runs: Sequence[SlotIds]) -> None:
        """Hold these once less; those that nobody holds any more are free."""
        for run in runs:
            for at, (column, slots) in enumerate(zip(self._columns, run.T, strict=True)):
                self.holders[at, slots] -= 1
                column.free([slots[self.holders[at, slots] == 0]])
        self._count()

    def num_apart(self, slots: SlotIds) -> int:
        """How many slots these are in the column where they are the most."""
        is_there = np.zeros((slots.shape[1], self.num_slots + 1), dtype=np.bool_)
        is_there[np.arange(slots.shape[1]), slots] = True
        return int(is_there.sum(axis=1).max())

    def _count(self) -> None:
        self.num_free = min(column.num_free for column in self._columns)
        self._least_free = min(self._least_free, self.num_free)
