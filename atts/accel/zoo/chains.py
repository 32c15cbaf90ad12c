"""Several models of a zoo in one step: each block runs once for the rows of all that share it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.accel.zoo.many_models import Chain, ManyModels, ManyModelsLoop, ZooLoader
from atts.accel.zoo.slots import OnSplit, SharingScheduler, SlotLedger
from atts.errors import UnsupportedByEngine
from atts.local.batch import MANY, Floats, Ints, StepBatch, StepPlan, picked
from atts.local.cache import SlotIds
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import Adapted, NativeModel, Segment, unknown_parts
from atts.local.cpu.weights import PackedAdapter
from atts.local.messages import LoopReport, WorkerConfig
from atts.local.sequence import TokenTable

# A model is a chain of units: its embedding, attention and feed-forward block of each layer, its
# head. Two chains share a unit where they have the same block in the same place; rows are summed in
# the same order whatever runs in the same step, so that a model's numbers are those it computes alone, to
# the bit. What adapters add is computed for their rows only.

_Rows = slice | Ints
_Part = tuple[int, ...]
"""Rows and units of a model, as `NativeModel.run` takes them."""
_MOST_LAYOUTS = 256


class UnitSpan(NamedTuple):
    """Units that the same chains pass together, from one up to another."""

    start: int
    stop: int
    groups: tuple[tuple[int, ...], ...]


class _Keeping(NamedTuple):
    """Rows whose states before a unit are not known any more, are read from where they are kept,
    and are kept.
    """

    unit: int
    passing: _Rows
    begun: _Rows
    known: _Rows
    is_idle: bool  # whether no rows are read or kept


class _Layout(NamedTuple):
    """Order of computation in a step: where states are kept first, which adapters add to what, and
    whose the rows are.
    """

    keepings: list[_Keeping]
    runs: list[tuple[_Keeping | None, Ints]]
    adapted: Adapted
    owners: Ints  # owners of logit rows
    unit_calls: int
    unit_rows: int


class _Ready(NamedTuple):
    """A step that is laid out, of the arrays that it was made of and in those that it is computed
    in.
    """

    given: tuple[StepBatch, SlotIds]
    units: Ints  # unit of each sequence from which on it is computed
    order: tuple[Ints, Ints]  # order of the sequences, and where their logit rows are then
    batch: StepBatch
    layout: _Layout
    rows: tuple[Floats, Floats]
    step: Any  # step object of the native model

    def fill(self) -> None:
        """Take over what is new where sequences write one token each."""
        given, table = self.given
        own = self.batch
        for name in ("tokens", "positions", "context_lens"):
            getattr(own, name)[:] = getattr(given, name)[self.order[0]]
        own.slots[:] = table[:, own.table_rows, own.context_lens - 1]


class ChainModel(ManyModels[NativeModel]):
    """Runs steps of sequences of several models over one cache.

    Sequences are computed in an order in which chains that share blocks are neighbours, so that a
    block takes a slice.
    """

    def __init__(
        self,
        load: ZooLoader,
        ledger: SlotLedger,
        first: WorkerConfig,
        block_rows: int | None = None,
    ) -> None:
        """Start a schedule in which a block runs for at most `block_rows` rows at once, where that is given."""
        self._loader = load
        self._ledger = ledger
        self._block_rows = block_rows
        self._order: list[int] = []
        self._layouts: dict[tuple[bytes, ...], _Layout] = {}
        self._ready: _Ready | None = None
        # rows taken through units, and how often a unit was run
        self.unit_rows = self.unit_calls = 0
        super().__init__(load, first)

    def _relate(self, number: int, chain: Chain[NativeModel], divide: OnSplit) -> None:
        """Return the chains' numbers, in an order in which neighbours differ in few of their units."""
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
        """Describe what computes."""
        return f"{self._model.device_name}, shared blocks"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of packed weights; shared weights count once."""
        return self._loader.num_bytes

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`; each column of the
        ledger's has a table.
        """
        ready = self._ready
        units = self._ledger.first_units(batch)
        if (
            ready is not None
            and ready.given[0] is batch
            and ready.given[1] is table
            and np.array_equal(ready.units, units)
        ):
            ready.fill()  # the next step uses the same arrays with other numbers
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
        """Order a batch by chains, with slots of all columns; return also where its logit rows are
        then.
        """
        found, rows, _ = picked(batch, order)
        where = found.logit_rows
        counts = np.diff(found.query_starts)
        places = np.arange(len(rows)) + (found.context_lens - found.query_starts[1:]).repeat(counts)
        slots = table[:, found.table_rows.repeat(counts), places].astype(np.int64, order="C")
        logit_rows = np.sort(where)
        found = replace(found, slots=slots, logit_rows=logit_rows, num_single=0)
        return found, found.logit_rows.searchsorted(where)

    def _layout(self, batch: StepBatch, units: Ints, table: SlotIds) -> _Layout:
        """Return the layout of a step; it is the same as long as each sequence writes one token."""
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
        found = [(keeping, array) for (keeping, _), array in zip(runs, arrays, strict=True)]
        return _Layout(keepings, found, adapted, owners, int(counts.sum()), int(counts @ rows))

    def _keeping(self, unit: int, batch: StepBatch, units: Ints) -> _Keeping:
        """Keep states of rows computed among many, unless their sequence is computed from there on."""
        counts = np.diff(batch.query_starts)
        passes = (self._depths[batch.models] > unit) & (units < unit)
        passing = passes.repeat(counts)
        known = (passes & (counts >= MANY)).repeat(counts)
        begun = (units == unit).repeat(counts)
        return _Keeping(
            unit, _among(passing), _among(begun), _among(known), not (begun | known).any()
        )

    def _keep(self, keeping: _Keeping, slots: Ints, x: Floats) -> None:
        """Read what goes into a unit for sequences that are computed from there on; remember it of
        the others.
        """
        kept = self._ledger.kept[keeping.unit]
        mine = slots[kept.column]
        x[keeping.begun] = kept.states[mine[keeping.begun]]
        kept.states[mine[keeping.known]] = x[keeping.known]
        kept.is_known[mine[keeping.known]] = True

    def spans(self, present: Sequence[int]) -> list[UnitSpan]:
        """Divide the units of a step's chains: together where they are equal, cut where states are
        kept.
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
    """Return the bounds of the sequences, in rows, sequences and logit rows."""
    starts = batch.query_starts
    return np.column_stack([starts, np.arange(len(starts)), batch.logit_rows.searchsorted(starts)])


def adapted_rows(batch: StepBatch, bounds: Ints, adapters: Mapping[int, PackedAdapter]) -> Adapted:
    """Return the rows that adapters add to, by the models that have these."""
    segments = [
        Segment(first, last, logits, end, adapter.address)
        for chain, adapter in adapters.items()
        for first, last, _, _, logits, end in _spans(bounds, batch.models == chain)
    ]
    return Adapted(
        (Segment * len(segments))(*segments),
        max([own.rank for own in adapters.values()], default=0),
    )


def _neighbours(chains: Sequence[int], units: Mapping[int, Sequence[str]]) -> list[int]:
    """Order chains so that few of the units of neighbours differ; each is put in twice."""
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
    """Return runs of neighbouring sequences as from and to of rows, sequences and logit rows.

    One that alone is more stays in one piece.
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
    """Return which rows a mask has; a slice where they are neighbours."""
    wanted_rows = mask.nonzero()[0]
    first = int(wanted_rows[0]) if len(wanted_rows) else 0
    count = len(wanted_rows)
    return slice(first, first + count) if mask[first : first + count].all() else wanted_rows


def shared_kernels(config: WorkerConfig, device: torch.device) -> tuple[ctypes.CDLL | None, str]:
    """Return kernels that run several models of a zoo in one step, if any, and trouble with their
    cache.
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
    """A step loop of models that share blocks, and slots of the layers that are the same."""

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
