"""Several models of a zoo in one loop: a block is loaded once, and runs once per step for all
models that share it.

The first part of the module manages the cache slots that models share.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.accel.zoo.shared_worker import AddModel
from atts.errors import UnsupportedByEngine
from atts.local.batch import MANY, Floats, Ints, Sequence, StepBatch, StepPlan, TokenTable, picked
from atts.local.cache import PrefixMatch, PrefixNode, PrefixTree, SlotAllocator, SlotIds
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import (
    Adapted,
    NativeModel,
    PackedAdapter,
    Packing,
    Segment,
    unknown_parts,
)
from atts.local.loader import LowRank, Rope, Weights, layer_deltas, load_adapter, load_weights
from atts.local.logit_sampling import SampledTokens, SamplingBatch
from atts.local.loop import StepLoop
from atts.local.messages import Command, LoopReport, Submit, WorkerConfig
from atts.local.model_config import ModelConfig
from atts.local.scheduler import WORTH_WAITING, CacheAction, Scheduler, SchedulerConfig
from atts.local.seams import HookedModel, Model
from atts.models.stored_blocks import content_digest, unit_digests

# Where the models of a loop begin to differ, the layers are divided into ranges. Each range has
# separate cache slots. A slot table has one column of slots per range, so a range is called a
# column. If a related model has computed the same tokens with the same blocks, a sequence reads
# that model's slots. It then does not compute these tokens again in the shared layers. Its
# computation begins at the first unit (embedding, attention block, feed-forward block or head) that
# differs. The input of this unit comes from stored states.

OnSplit = Callable[[list[int]], None]
"""Callback that is called when the layers are divided into new columns. A column is a range of
layers with its own cache slots. The argument has, for each new column, the index of the old column
that contained it.
"""


class Lineage(NamedTuple):
    """Names of the parts of a model's computation. Where two models have the same name, they
    compute the same thing.

    `units` has the name of the embedding at index 0, and that of a layer's attention at index `1 +
    2 * layer`.
    """

    units: tuple[str, ...]
    keys: tuple[str, ...]  # for each layer, a name for the computation of its keys and values
    # Index of the last unit that receives all rows (tokens) of a step. Later units receive only the
    # rows whose logits are needed.
    whole: int


class Relative(NamedTuple):
    """A model whose first layers are the same as those of a sequence's model. So the sequence may
    read keys and values that it has cached for these layers.
    """

    chain: int
    # number of first layers that have the same keys and values in both models
    layers: int
    unit: int  # index of the first unit that differs, so that each model must compute it


class Kept(NamedTuple):
    """Stored inputs of one unit. There is one hidden state for each cache slot of a column: the
    column of the layers before the unit.
    """

    column: int
    states: NDArray[np.float32]  # [slots, width] the stored state for each slot
    # [slots] Whether a slot has a valid state. Only states that were computed with many rows at
    # once are stored. With few rows, another attention kernel is used, whose results differ in the
    # last bits.
    is_known: NDArray[np.bool_]


def alone(parents: list[int]) -> None:
    """Do nothing. Loops whose layers all share one column use this function as their callback."""


def divergence_point(one: Lineage, other: Lineage) -> tuple[int, int]:
    """Compare two models. Return how many of the first layers have the same keys and values in both
    models. Also return the index of the first unit at which the models differ.
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
    """Allocates the cache slots of each column (range of layers).

    A slot's holders are the sequence that wrote it, and all sequences that read it. A slot without
    a holder is free.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        super().__init__(num_slots)
        self._width = width
        self._columns = [SlotAllocator(num_slots)]
        self.holders: NDArray[np.int32] = np.zeros((1, num_slots + 1), dtype=np.int32)
        self.starts: tuple[int, ...] = (0,)  # index of the first layer of each column
        self.kin: dict[int, list[Relative]] = {}
        self.kept: dict[int, Kept] = {}  # stored inputs of units, by the unit's index
        # for each row of the slot table: the position up to which it reads slots of a related model
        self.borrowed: Ints = np.zeros(0, dtype=np.int64)
        # for each row: the first unit that its model must compute itself for these positions
        self._units: Ints = np.zeros(0, dtype=np.int64)

    def new_table(self, rows: int, width: int) -> SlotIds:
        """Return a slot table of zeros with a single column, [rows, width, 1]. Also reset the
        record of borrowed slots.
        """
        self.borrowed, self._units = np.zeros((2, rows), dtype=np.int64)
        return np.zeros((1, rows, width), dtype=np.int32).transpose(1, 2, 0)

    def lend(self, row: int, stop: int, unit: int) -> None:
        """Record that a row of the slot table reads a related model's slots up to position `stop`.

        At these positions, the row's own model computes only unit `unit` and all later units.
        """
        self.borrowed[row] = stop
        self._units[row] = unit

    def first_units(self, batch: StepBatch) -> Ints:
        """Return the index of the first unit to compute for each sequence: [sequences]."""
        rows = batch.table_rows
        begins = batch.context_lens - np.diff(batch.query_starts)
        return np.where(begins < self.borrowed[rows], self._units[rows], 0)

    def relate(self, chains: Mapping[int, Lineage], divide: OnSplit = alone) -> None:
        """Divide the layers into columns. A new column starts at each layer at which two of these
        chains (models) with the same first layers begin to differ.

        Then call `divide` with the index of the old column that contained each new column. All
        memory is allocated first. So the ledger does not change if there is not enough memory or
        `divide` fails.
        """
        divergences = {
            (a, b): divergence_point(chains[a], chains[b]) for a in chains for b in chains if a != b
        }
        # for each number of first layers that two chains share: the index of the first unit
        # that differs between such chains
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
        """Return the stored inputs of a unit for a new column.

        If inputs of this unit are already stored for column `parent`, they are used again.
        Otherwise the result is an empty store.
        """
        known = self.kept.get(unit)
        size = self.num_slots + 1
        if known is not None and known.column == parent:
            return known._replace(column=column)
        return Kept(
            column, np.zeros((size, self._width), dtype=np.float32), np.zeros(size, dtype=np.bool_)
        )

    def column_of(self, layer: int) -> int:
        """Return the index of the column that contains a layer."""
        return bisect_right(self.starts, layer) - 1

    def reach(self, kin: Relative, slots: SlotIds) -> int:
        """Return how many tokens at the start of a sequence can be read from a related model's
        slots.

        Reading must end before the first slot without a stored hidden state.
        """
        kept = self.kept[kin.unit]
        known = kept.is_known[slots[:, kept.column]] if len(slots) else np.zeros(0, dtype=np.bool_)
        return len(known) if known.all() else int(known.argmin())

    def borrow(self, kin: Relative, slots: SlotIds) -> SlotIds:
        """Let a sequence use a related model's slots in the layers that both models share, and
        allocate new slots in all other layers.

        Return all these slots: [tokens, columns]. Each of them gets one more holder.
        """
        return self._hold(slots[:, : self._shared(kin)])

    def exchange(self, kin: Relative, mine: SlotIds, theirs: SlotIds) -> None:
        """Replace the slots in `mine` by those in `theirs` wherever both contain the same keys and
        values.

        `mine` is changed in place, and `theirs` are slots of a related model.
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
        """Allocate `count` slots in every column, and return them: [count, columns]."""
        return self._hold(np.zeros((count, 0), dtype=np.int32))

    def free(self, runs: Many[SlotIds]) -> None:
        """Remove one holder of each of these slots. Slots without a holder become free."""
        for run in runs:
            for at, (column, slots) in enumerate(zip(self._columns, run.T, strict=True)):
                self.holders[at, slots] -= 1
                column.free([slots[self.holders[at, slots] == 0]])
        self._count()

    def num_apart(self, slots: SlotIds) -> int:
        """Count the different slots in each column of `slots`, and return the largest count.

        Each column has the slots of one range of layers.
        """
        is_there = np.zeros((slots.shape[1], self.num_slots + 1), dtype=np.bool_)
        is_there[np.arange(slots.shape[1]), slots] = True
        return int(is_there.sum(axis=1).max())

    def _count(self) -> None:
        self.num_free = min(column.num_free for column in self._columns)
        self._least_free = min(self._least_free, self.num_free)


class SharedSlots(NamedTuple):
    """Slots of a related model that a waiting request may read for its first tokens."""

    ledger: SlotLedger
    kin: Relative
    # the longest beginning of the request that the prefix tree has for the related model, with its
    # slots
    found: PrefixMatch
    stop: int
    gain: int

    def put_into(self, sequence: Sequence, row: SlotIds, free: int) -> None:
        """Write slots for the sequence's first tokens into its row: the related model's slots in
        the layers that both models share, and new slots in all other layers.

        At most `free` positions are filled. If they would be too few to be worthwhile, none is
        filled.
        """
        start = sequence.capacity
        stop = min(self.stop, start + free)
        if stop >= start + WORTH_WAITING:
            row[start:stop] = self.ledger.borrow(self.kin, self.found.slots[start:stop])
            sequence.capacity = stop
            self.ledger.lend(sequence.row, stop, self.kin.unit)


class KVSharing:
    """Finds cached keys and values that related models computed for a sequence's tokens."""

    def __init__(self, tree: PrefixTree, ledger: SlotLedger) -> None:
        self._tree = tree
        self.ledger = ledger

    def kinds(self, sequence: Sequence) -> Iterator[tuple[Relative, int]]:
        """Yield each model that is related to the sequence's model, with the root key of that
        model's entries in the prefix tree.
        """
        for kin in self.ledger.kin.get(sequence.model, ()):
            yield kin, sequence.kind_of(kin.chain)

    def best(self, sequence: Sequence, known: int) -> SharedSlots | None:
        """Find the related model whose slots save a waiting request the most work.

        The slots of the request's last tokens are not used. Otherwise only few rows would remain to
        be computed. For few rows, another attention kernel is used, whose results differ in the
        last bits.
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
        """Replace a sequence's slots, from position `start` on, by slots of related models if these
        contain the same keys and values.
        """
        ids = tuple(sequence.ids[: sequence.num_computed])
        start = max(start, self._tree.match(ids, len(ids), self._tree.root(sequence.kind)).length)
        for kin, kind in self.kinds(sequence):
            match = self._tree.match(ids, len(ids), self._tree.root(kind))
            if match.length > start:
                self.ledger.exchange(kin, row[start : match.length], match.slots[start:])


class SharingScheduler(Scheduler):
    """A scheduler whose sequences can read keys and values that related models have cached."""

    def __init__(self, config: SchedulerConfig, tree: PrefixTree, ledger: SlotLedger) -> None:
        super().__init__(config, tree, ledger)
        self._ledger = ledger
        self._sharing = KVSharing(tree, ledger)
        # a related model's slots that were found for the last examined request; None if there are
        # none
        self._loan: SharedSlots | None = None
        # [columns, rows, tokens] slot of each token in each column
        self.tables: SlotIds = self.table.transpose(2, 0, 1)
        self.divide([0])

    def divide(self, parents: list[int]) -> None:
        """Divide the slot table and the prefix tree into new columns. A column is a range of layers
        with its own slots.

        `parents` has, for each new column, the index of the old column that contained it. Sequences
        that have not yet computed all borrowed positions are preempted, and admitted again later.
        """
        for sequence in self.running():
            if sequence.num_computed < self._ledger.borrowed[sequence.row]:
                self._preempt(sequence)
        tables = self.tables[parents]
        none = np.zeros((0, len(parents)), dtype=np.int32)
        nodes = list(self.tree.nodes())
        divided = [node.slots[:, parents] if len(node.slots) else none for node in nodes]
        # All memory was allocated above. So the assignments below cannot fail after some of them
        # are made.
        self.tree.no_slots = none
        for node, slots in zip(nodes, divided, strict=True):
            node.slots = slots
        self.tables = tables
        self.table = tables.transpose(1, 2, 0)

    @property
    def num_locked(self) -> int:
        """Count the slots that running sequences read or write in each column, and return the
        largest count.
        """
        running = self.running()
        if not running:
            return super().num_locked
        rows = [self.table[each.row, : each.capacity] for each in running]
        return self._ledger.num_apart(np.concatenate(rows))

    def cache_prefix(self, sequence: Sequence) -> PrefixNode:
        """Store a sequence's computed slots in the prefix tree.

        Before they are stored, slots of related models replace them where both contain the same
        keys and values.
        """
        assert sequence.node is not None, (
            "a running sequence must have locked a node of the prefix tree"
        )
        start = max(sequence.num_shared, sequence.node.depth)
        self._sharing.deduplicate(sequence, self.table[sequence.row], start)
        return super().cache_prefix(sequence)

    def _prefill_stop(self, sequence: Sequence, stop: int) -> int:
        borrowed = int(self._ledger.borrowed[sequence.row])
        # End this step at the last borrowed position. Later tokens need the results of all units
        # for the borrowed positions.
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
        """Return whether this number of slots can be freed.

        A slot that a running sequence uses cannot be freed, even if the prefix tree contains it
        too.
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


class Layers(Protocol):
    """A model that can compute a range of its units.

    Unit 0 is the embedding. Then each layer has two units, and the last unit is the last norm.
    """

    def through(
        self,
        batch: StepBatch,
        table: SlotIds,
        rows: tuple[Floats, Floats],
        units: tuple[int, int],
        /,
    ) -> None:
        """Compute these units for the batch, and write the hidden states into the two arrays of
        `rows`.

        The first array has the states of all tokens, and the second those of the `logit_rows`. The
        last layer computes only the `logit_rows`.
        """
        ...


class RangedModel(HookedModel, Layers, Protocol):
    """A model that can compute all its units at once, or a range of them."""


M = TypeVar("M", bound=RangedModel)
M_co = TypeVar("M_co", bound=RangedModel, covariant=True)


class Chain(NamedTuple, Generic[M_co]):
    """One model of a loop with several models, as a chain of units."""

    model: M_co
    # name of each unit. If several chains have the same name for a unit, they can compute it
    # together.
    units: tuple[str, ...]
    lineage: Lineage = Lineage((), (), 0)
    adapter: PackedAdapter | None = None


class ManyModels(Generic[M]):
    """The models of one loop, each with a number, and their output heads.

    A model is loaded when it is first used. If the heads differ, each row of hidden states has an
    additional column with the number of the row's model.
    """

    def __init__(self, load: Callable[[WorkerConfig], Chain[M]], first: WorkerConfig) -> None:
        self._load = load
        self._configs = [first]
        self._chains: dict[int, Chain[M]] = {}
        self.open(0)
        self._model = self._chains[0].model

    def add(self, config: WorkerConfig) -> None:
        """Add a model under the next number. It is loaded when it is first used."""
        self._configs.append(config)

    def open(self, number: int, divide: OnSplit = alone) -> None:
        """Load a model if it is not loaded yet.

        If the layers are then divided into new columns, call `divide` with the index of the old
        column that contained each new one.

        :raises EngineError: the model cannot be loaded; nothing has changed.
        """
        if number not in self._chains:
            chain = self._load(self._configs[number])
            self._relate(number, chain, divide)
            self._chains[number] = chain
            self._heads = self._alike(-1)
            self._has_one_head = len({chain.units[-1] for chain in self._chains.values()}) == 1

    def _alike(self, unit: int) -> Ints:
        """Return an array that maps each model's number to the first loaded model with the same
        unit at index `unit`.

        Units are the same if they have the same name.
        """
        representatives = np.zeros(1 + max(self._chains), dtype=np.int64)
        # for each name of the unit, the first model that has this name
        first_with = dict[str, int]()
        for number, chain in self._chains.items():
            representatives[number] = first_with.setdefault(chain.units[unit], number)
        return representatives

    def _relate(self, number: int, chain: Chain[M], divide: OnSplit) -> None:
        """Prepare to run a new model together with the others. This class needs no preparation."""

    def _owned(self, hidden: Floats, owners: Ints) -> Tensor:
        """Return the hidden states as a tensor.

        If the models have different output heads, the tensor has an additional column with the
        number of each row's model.
        """
        if self._has_one_head:
            return torch.from_numpy(hidden)
        return torch.from_numpy(
            np.concatenate([hidden, owners[:, None].astype(np.float32)], axis=1)
        )

    @property
    def is_thread_independent(self) -> bool:
        """Return whether the results are the same to the bit for every number of threads."""
        return self._model.is_thread_independent

    def use_threads(self, threads: int) -> None:
        """Set the number of threads of the loop's first model."""
        self._model.use_threads(threads)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of each row with its model's head: [rows, vocabulary] float32."""
        if self._has_one_head:
            return self._model.compute_logits(hidden)
        logits = torch.empty(len(hidden), self._configs[0].model.vocabulary)
        for model, rows in self._by_head(hidden):
            logits[rows] = model.compute_logits(hidden[rows, :-1].contiguous())
        return logits

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Compute the log-probability of one token per row.

        Also return the logits of `kept_rows`.
        """
        if self._has_one_head:
            return self._model.score(hidden, tokens, kept_rows)
        values = np.empty(len(tokens))
        asked = np.array(kept_rows, dtype=np.int64)
        kept = torch.empty(len(kept_rows), self._configs[0].model.vocabulary)
        for model, rows in self._by_head(hidden):
            mine = np.isin(asked, rows)
            scored_tokens = [tokens[row] for row in rows]
            # The last column of `hidden` has the number of each row's model, so it is cut off.
            scores, logits = model.score(
                hidden[rows, :-1].contiguous(),
                scored_tokens,
                rows.searchsorted(asked[mine]).tolist(),
            )
            values[rows] = scores
            kept[mine.nonzero()[0]] = logits
        return values.tolist(), kept

    def _by_head(self, hidden: Tensor) -> list[tuple[M, Ints]]:
        """Group the rows by output head. For each head, return a model that has this head, and the
        indices of the rows.
        """
        heads = self._heads[hidden[:, -1].numpy().astype(np.int64)]
        return [
            (self._chains[head].model, (heads == head).nonzero()[0])
            for head in sorted(set(heads.tolist()))
        ]

    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Sample one token per row."""
        return self._model.sample(logits, sampling, uniforms)

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Return the log-probability of each row's token at temperature 1 and without filters."""
        return self._model.logprobs(logits, tokens)


class ZooLoader:
    """Loads the models of a zoo that share one KV cache. A model may have at most as many layers as
    the cache.

    A block that several models share is loaded only once.
    """

    def __init__(self, library: ctypes.CDLL, cache: Tensor, threads: int) -> None:
        self._library = library
        self._cache = cache
        self._threads = threads
        self._packing = Packing(library)

    @property
    def num_bytes(self) -> int:
        """Return the size of all packed weights in bytes. Shared weights are counted once."""
        return self._packing.num_bytes

    def __call__(self, config: WorkerConfig) -> Chain[NativeModel]:
        """Load a model.

        :raises EngineError: the model cannot be loaded.
        """
        folder = config.folder
        shape = config.model
        name = config.name
        layers = range(min(shape.num_layers, len(self._cache)))
        weights = load_weights(
            folder, shape, torch.float32, torch.device("cpu"), name, merges=False, layers=layers
        )
        digests = unit_digests(folder, shape.num_layers)
        part = shape.part(layers)
        count = len(layers)
        keys = [*digests[: 1 + 2 * count], digests[-1]]
        model = NativeModel(
            self._library,
            part,
            weights,
            self._cache,
            self._threads,
            packing=self._packing,
            keys=keys,
        )
        added = load_adapter(folder, shape, name) if layers else {}
        deltas = layer_deltas(added, shape) if added else [None] * 4 * count
        ropes = rope_names(shape, weights.ropes)
        halves = half_names(folder, shape, weights.ropes)
        units = [f"{half} {at // 2 + 1 == shape.num_layers}" for at, half in enumerate(halves)]
        lows = [[content_name(low) for low in deltas[at : at + 2]] for at in range(0, 4 * count, 2)]
        alone = [f"{half} {own}" for half, own in zip(halves, lows, strict=False)]
        head = f"{digests[-1]} {digests[0] if shape.ties_embeddings else ''}"
        lineage = Lineage(
            (digests[0], *alone, head),
            key_names(part, weights, ropes[:count], deltas),
            2 * count - 1,
        )
        adapter = self._packing.adapter(deltas) if added else None
        return Chain(model, (digests[0], *units, head), lineage, adapter)


def rope_names(shape: ModelConfig, ropes: Mapping[str, Rope]) -> list[str]:
    """Return a name for each layer's rotary position encoding and attention window. Layers with the
    same name have the same settings.
    """
    return [
        f"{content_name(None, ropes[kind].frequencies, ropes[kind].scales)} {window}"
        for kind, window in zip(shape.ropes, shape.windows, strict=True)
    ]


def half_names(folder: Path, shape: ModelConfig, ropes: Mapping[str, Rope]) -> list[str]:
    """Return two names for each layer of a stored model: that of its attention block and that of
    its feed-forward block.

    Blocks with the same name compute the same thing.

    :raises ZooError: the model's manifest cannot be read.
    """
    names = rope_names(shape, ropes)
    return [
        f"{digest} {names[at // 2]}"
        for at, digest in enumerate(unit_digests(folder, shape.num_layers)[1:-1])
    ]


def key_names(
    shape: ModelConfig, weights: Weights, ropes: Many[str], deltas: Many[LowRank | None]
) -> tuple[str, ...]:
    """Return a name for each layer, made from all parameters that determine the layer's keys and
    values.

    These are the rotary encoding, the norms, and the rows of the query-key-value matrix that
    compute keys and values. Layers with the same name have the same parameters.
    """
    # The first matrix computes queries, keys and values. The rows of the queries come first.
    query_rows = shape.num_heads * shape.head_dim
    names = list[str]()
    for rope, layer, low in zip(ropes, weights.layers, deltas[::4], strict=True):
        keys_and_values = [
            None if part is None else part[query_rows:] for part in (layer.qkv, layer.qkv_bias)
        ]
        added = low and replace(low, up=low.up[query_rows:])
        names.append(f"{rope} {content_name(added, layer.norm, layer.key_norm, *keys_and_values)}")
    return tuple(names)


def content_name(low: LowRank | None, *tensors: Tensor | None) -> str:
    """Return a digest of some arrays and an adapter, which serves as their name.

    The same contents give the same name. An adapter that changes nothing is ignored.
    """
    added = (low.down, low.up) if low and low.up.any() else ()
    parts = [
        part.contiguous().numpy().data.cast("B") if part is not None else b"-"
        for part in (*added, *tensors)
    ]
    return content_digest(*parts)


class LoopModels(Model, Protocol):
    """Several models that one loop computes like a single model."""

    def add(self, config: WorkerConfig) -> None:
        """Add a model under the next number."""
        ...

    def open(self, number: int, divide: OnSplit = ...) -> None:
        """Load a model if it is not loaded yet."""
        ...


class ManyModelsLoop(StepLoop):
    """A step loop with several models; each request names its model."""

    def __init__(
        self,
        model: LoopModels,
        scheduler: Scheduler,
        token_table: TokenTable,
        send: Callable[[LoopReport], None],
    ) -> None:
        super().__init__(model, scheduler, token_table, send)
        self._models = model

    def _take(self, command: Command) -> None:
        if isinstance(command, AddModel):
            self._models.add(command.config)
        else:
            super()._take(command)

    def _new_sequence(self, command: Submit) -> Sequence:
        sequence = super()._new_sequence(command)
        self._models.open(command.model, self._divide)
        return sequence

    def _divide(self, parents: list[int]) -> None:
        """Do nothing, because the slots of this loop have a single column."""


# A model is a chain of units: its embedding, the attention block and the feed-forward block of each
# layer, and its head. Two chains share a unit if they have the same block at the same index. Sums
# within a row are always added in the same order. So a model's results are equal to the bit,
# whether it runs alone or with other models. An adapter is applied only to the rows of its model.

_Rows = slice | Ints
_Part = tuple[int, ...]
"""One entry of the argument `parts` of `NativeModel.run`. It contains, among other values, a model,
a range of the model's units and a range of rows.
"""
_MOST_LAYOUTS = 256


class UnitSpan(NamedTuple):
    """A range of units, and groups of chains (models). In each unit of the range, the chains of a
    group are computed together.
    """

    start: int
    stop: int
    groups: tuple[tuple[int, ...], ...]


class _Keeping(NamedTuple):
    """The rows of a step for which inputs of a unit are read or stored.

    Rows in `begun` read stored inputs. Rows in `known` store their inputs. For rows in `passing`,
    inputs that were stored earlier become invalid.
    """

    unit: int
    passing: _Rows
    begun: _Rows
    known: _Rows
    is_idle: bool  # True if this step neither reads nor stores inputs of this unit


class _Layout(NamedTuple):
    """The plan of a step's computation: where states are stored, which rows each adapter applies
    to, and which model each row belongs to.
    """

    keepings: list[_Keeping]
    runs: list[tuple[_Keeping | None, Ints]]
    adapted: Adapted
    owners: Ints  # number of the model of each row that needs logits
    unit_calls: int
    unit_rows: int


class _Ready(NamedTuple):
    """A step that is ready to run, with its layout, its inputs and its working memory."""

    given: tuple[StepBatch, SlotIds]
    # for each sequence, the index of the first unit that its model computes in this step
    units: Ints
    # the order in which the sequences are computed; then, for each logit row of the given batch,
    # its index in this order
    order: tuple[Ints, Ints]
    batch: StepBatch
    layout: _Layout
    rows: tuple[Floats, Floats]
    step: Any  # the prepared step that `NativeModel.prepare` returned

    def fill(self) -> None:
        """Copy the tokens and positions of the next step into the prepared arrays. Every sequence
        must have one new token.
        """
        given, table = self.given
        batch = self.batch
        # Copy in place, because the prepared step has pointers to these arrays.
        for name in ("tokens", "positions", "context_lens"):
            getattr(batch, name)[:] = getattr(given, name)[self.order[0]]
        batch.slots[:] = table[:, batch.table_rows, batch.context_lens - 1]


class ChainModel(ManyModels[NativeModel]):
    """Computes steps whose sequences belong to several models. All these models share one cache.

    In a step, rows of models that share blocks are next to each other. So a shared block computes
    one contiguous range of rows.
    """

    def __init__(
        self,
        load: ZooLoader,
        ledger: SlotLedger,
        first: WorkerConfig,
        block_rows: int | None = None,
    ) -> None:
        """Load the first model.

        If `block_rows` is given, a block computes at most that number of rows at a time.
        """
        self._loader = load
        self._ledger = ledger
        self._block_rows = block_rows
        self._order: list[int] = []
        self._layouts: dict[tuple[bytes, ...], _Layout] = {}
        self._ready: _Ready | None = None
        # `unit_calls` counts how often units were run. `unit_rows` sums up the rows of all these
        # runs.
        self.unit_rows = self.unit_calls = 0
        super().__init__(load, first)

    def _relate(self, number: int, chain: Chain[NativeModel], divide: OnSplit) -> None:
        """Divide the cache into columns where the models differ, and order the models so that
        neighbours have many units in common.
        """
        chains = {**self._chains, number: chain}
        self._ledger.relate({at: chain.lineage for at, chain in chains.items()}, divide)
        self._order = _neighbours(
            [*self._order, number], {at: chain.units for at, chain in chains.items()}
        )
        self._ranks, self._depths = np.zeros((2, 1 + max(self._order)), dtype=np.int64)
        for rank, at in enumerate(self._order):
            self._ranks[at] = rank
            self._depths[at] = len(chains[at].units)
        self._layouts.clear()
        self._ready = None

    @property
    def device_name(self) -> str:
        """Return a description of the kernels and the device."""
        return f"{self._model.device_name}, shared blocks"

    @property
    def num_bytes(self) -> int:
        """Return the size of all packed weights in bytes. Shared weights are counted once."""
        return self._loader.num_bytes

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`.

        `table` contains several slot tables: one for each range of layers with its own slots.
        """
        ready = self._ready
        units = self._ledger.first_units(batch)
        if (
            ready is not None
            and ready.given[0] is batch
            and ready.given[1] is table
            and np.array_equal(ready.units, units)
        ):
            # The arrays are the same objects as in the last step, but their contents are new.
            ready.fill()
        else:
            self._ready = ready = self._prepared(batch, units, table)
        x, hidden = ready.rows
        layout = ready.layout
        slots = ready.batch.slots
        for keeping in layout.keepings:
            kept = self._ledger.kept[keeping.unit]
            kept.is_known[slots[kept.column, keeping.passing]] = False
        for states, parts in layout.runs:
            if states is not None:
                self._keep(states, slots, x)
            self._model.run(ready.step, parts)
        self.unit_calls += layout.unit_calls
        self.unit_rows += layout.unit_rows
        back = ready.order[1]
        return self._owned(hidden[back], layout.owners[back])

    def _prepared(self, given: StepBatch, units: Ints, table: SlotIds) -> _Ready:
        order = np.lexsort((self._ranks[given.models], units))
        batch, back = self._ordered(given, order, table)
        layout = self._layout(batch, units[order], table)
        width = self._configs[0].model.hidden_size
        rows = _floats(len(batch.tokens), width), _floats(len(back), width)
        step = self._model.prepare(batch, table, rows, layout.adapted)
        return _Ready(
            (given, table), units, (order, back), batch=batch, layout=layout, rows=rows, step=step
        )

    @staticmethod
    def _ordered(batch: StepBatch, order: Ints, table: SlotIds) -> tuple[StepBatch, Ints]:
        """Return the batch with its sequences in the given order, and with the slots of all
        columns.

        Also return the new index of each logit row.
        """
        ordered, rows, _ = picked(batch, order)
        counts = np.diff(ordered.query_starts)
        before = ordered.context_lens - ordered.query_starts[1:]
        places = np.arange(len(rows)) + before.repeat(counts)
        slots = table[:, ordered.table_rows.repeat(counts), places].astype(np.int64, order="C")
        asked_rows = ordered.logit_rows
        logit_rows = np.sort(asked_rows)
        ordered = replace(ordered, slots=slots, logit_rows=logit_rows, num_single=0)
        return ordered, logit_rows.searchsorted(asked_rows)

    def _layout(self, batch: StepBatch, units: Ints, table: SlotIds) -> _Layout:
        """Return the plan of a step, which is cached for later steps of the same shape."""
        key = tuple(
            [part.tobytes() for part in (batch.models, units, batch.query_starts, batch.logit_rows)]
        )
        if key not in self._layouts:
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._lay_out(batch, units, table)
        return self._layouts[key]

    def _lay_out(self, batch: StepBatch, units: Ints, table: SlotIds) -> _Layout:
        starts = batch.query_starts
        keepings = list[_Keeping]()
        runs = list[tuple[_Keeping | None, list[_Part]]]()
        bounds = bounds_of(batch)
        present = [chain for chain in self._order if chain in batch.models]
        for span in self.spans(present):
            column = self._ledger.column_of(span.start // 2)
            parts = list[_Part]()
            begins = column * len(batch.tokens), column * table[0].size
            for group in span.groups:
                head = self._chains[group[0]].model.address, span.start, span.stop, *begins
                is_due = np.array([chain in group for chain in batch.models.tolist()]) & (
                    units <= span.start
                )
                parts += [(*head, *rows) for rows in _spans(bounds, is_due, self._block_rows)]
            keeping = (
                self._keeping(span.start, batch, units) if span.start in self._ledger.kept else None
            )
            keepings += [keeping] if keeping else []
            if runs and (keeping is None or keeping.is_idle):
                runs[-1][1].extend(parts)
            else:
                runs.append((keeping, parts))
        adapters = dict[int, PackedAdapter]()
        for chain in present:
            adapter = self._chains[chain].adapter
            if adapter is not None:
                adapters[chain] = adapter
        adapted = adapted_rows(batch, bounds, adapters)
        owners = batch.models.repeat(np.diff(starts))[batch.logit_rows]
        arrays = [np.array(parts, dtype=np.int64).reshape(-1, 11) for _, parts in runs]
        passed = np.concatenate(arrays)
        counts = passed[:, 2] - passed[:, 1]
        rows = passed[:, 6] - passed[:, 5]
        calls = [(keeping, array) for (keeping, _), array in zip(runs, arrays, strict=True)]
        return _Layout(keepings, calls, adapted, owners, int(counts.sum()), int(counts @ rows))

    def _keeping(self, unit: int, batch: StepBatch, units: Ints) -> _Keeping:
        """Decide which rows of a step read the stored inputs of a unit, and which rows store new
        inputs.

        If this unit is the first one that a sequence computes, its rows read stored inputs. If a
        sequence has also computed earlier units, its rows store their inputs, provided that there
        are many of them.
        """
        counts = np.diff(batch.query_starts)
        passes = (self._depths[batch.models] > unit) & (units < unit)
        passing = passes.repeat(counts)
        known = (passes & (counts >= MANY)).repeat(counts)
        begun = (units == unit).repeat(counts)
        return _Keeping(
            unit, _among(passing), _among(begun), _among(known), not (begun | known).any()
        )

    def _keep(self, keeping: _Keeping, slots: Ints, x: Floats) -> None:
        """Read the stored inputs for all sequences whose first computed unit is this one. Store the
        inputs of other sequences if they have many rows.
        """
        kept = self._ledger.kept[keeping.unit]
        mine = slots[kept.column]
        x[keeping.begun] = kept.states[mine[keeping.begun]]
        kept.states[mine[keeping.known]] = x[keeping.known]
        kept.is_known[mine[keeping.known]] = True

    def spans(self, present: Many[int]) -> list[UnitSpan]:
        """Divide the units of these chains (models) into ranges.

        In each range, the same groups of chains run together. A range also ends where states are
        stored, and at the end of a column.
        """
        cuts = {*self._ledger.kept, *(1 + 2 * start for start in self._ledger.starts[1:])}
        spans = list[UnitSpan]()
        for at in range(max(len(self._chains[chain].units) for chain in present)):
            groups = dict[str, tuple[int, ...]]()
            for chain in present:
                if at < len(units := self._chains[chain].units):
                    groups[units[at]] = (*groups.get(units[at], ()), chain)
            partition = tuple(groups.values())
            if spans and spans[-1].groups == partition and at not in cuts:
                spans[-1] = spans[-1]._replace(stop=at + 1)
            else:
                spans.append(UnitSpan(at, at + 1, partition))
        return spans


def bounds_of(batch: StepBatch) -> Ints:
    """Return the boundaries between sequences in the arrays of rows, of sequences and of logit
    rows: [sequences + 1, 3].
    """
    starts = batch.query_starts
    return np.column_stack([starts, np.arange(len(starts)), batch.logit_rows.searchsorted(starts)])


def adapted_rows(batch: StepBatch, bounds: Ints, adapters: Mapping[int, PackedAdapter]) -> Adapted:
    """Return the ranges of rows that each model's adapter applies to."""
    segments = [
        Segment(first, last, logits, end, adapter.address)
        for chain, adapter in adapters.items()
        for first, last, _, _, logits, end in _spans(bounds, batch.models == chain)
    ]
    return Adapted(
        (Segment * len(segments))(*segments),
        max([own.rank for own in adapters.values()], default=0),
    )


def _neighbours(chains: Many[int], units: Mapping[int, Many[str]]) -> list[int]:
    """Order chains (models) so that neighbours share many units.

    Each chain is inserted where it adds the fewest differences. Then each chain is removed and
    inserted again in the same way.
    """
    order = list[int]()

    def apart(one: int | None, other: int | None) -> int:
        if one is None or other is None:
            return 0
        return sum(mine != theirs for mine, theirs in zip_longest(units[one], units[other]))

    def put(chain: int) -> None:
        costs = [
            apart(a, chain) + apart(chain, b) - apart(a, b)
            for a, b in pairwise([None, *order, None])
        ]
        order.insert(costs.index(min(costs)), chain)

    for chain in chains:
        put(chain)
    for chain in chains:
        order.remove(chain)
        put(chain)
    return order


def _spans(bounds: Ints, mask: NDArray[np.bool_], most: int | None = None) -> list[_Part]:
    """Divide the sequences for which `mask` is true into groups of consecutive sequences with at
    most `most` rows.

    Return the bounds of each group in rows, sequences and logit rows. A single sequence with more
    than `most` rows is not divided.
    """
    edges = list[int]()
    for begin, end in (
        np.diff(mask, prepend=False, append=False).nonzero()[0].reshape(-1, 2).tolist()
    ):
        for at in range(begin + 1, end) if most is not None else ():
            if bounds[at + 1, 0] - bounds[begin, 0] > most:
                edges += [begin, at]
                begin = at
        edges += [begin, end]
    return [
        tuple(span)
        for span in bounds[edges].reshape(-1, 2, 3).swapaxes(1, 2).reshape(-1, 6).tolist()
    ]


def _floats(rows: int, columns: int) -> Floats:
    return np.empty((rows, columns), dtype=np.float32)


def _among(mask: NDArray[np.bool_]) -> _Rows:
    """Return the indices at which a mask is true. If they are contiguous, return a slice."""
    wanted_rows = mask.nonzero()[0]
    first = int(wanted_rows[0]) if len(wanted_rows) else 0
    count = len(wanted_rows)
    return slice(first, first + count) if mask[first : first + count].all() else wanted_rows


def shared_kernels(config: WorkerConfig, device: torch.device) -> tuple[ctypes.CDLL | None, str]:
    """Return native kernels that can run several models of a zoo in one step, or None.

    Also return a message if the folder for compiled kernels cannot be used.
    """
    options = config.options
    if device.type != "cpu" or options.dtype == "bfloat16" or options.kernel == "torch":
        return None, ""
    if unknown_parts(config.model):
        return None, ""
    try:
        return native_library(config.name, config.model)
    except UnsupportedByEngine:
        return None, ""


class SharedLoop(ManyModelsLoop):
    """A step loop for several models. Blocks that models share run once, and their layers share
    cache slots.
    """

    def __init__(
        self,
        model: ChainModel,
        scheduler: SharingScheduler,
        token_table: TokenTable,
        send: Callable[[LoopReport], None],
    ) -> None:
        super().__init__(model, scheduler, token_table, send)
        self._sharing = scheduler

    def _forward(self, plan: StepPlan) -> Tensor:
        tables = self._sharing.tables
        return self._model.forward(self._batches.of(plan, tables[0]), tables)

    def _divide(self, parents: list[int]) -> None:
        self._sharing.divide(parents)
