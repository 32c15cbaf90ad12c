"""Several models of a zoo in one step: each block runs once for the rows of all models that share it.

A model is a chain of units: its embedding, attention and feed-forward block of each layer, its head. Two chains share a
unit where they have the same block in the same place; rows are summed in the same order whatever runs beside them, so
that a model's numbers are those it computes alone, to the bit. What adapters add is computed for their rows only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.decode import SampledTokens, SamplingBatch
from atts.local.adapters import LowRank
from atts.local.allocator import SlotIds
from atts.local.batch import Ints, StepBatch
from atts.local.ledger import Lineage, SlotLedger
from atts.local.loader import Weights, layer_deltas, load_adapter, load_weights
from atts.local.messages import WorkerConfig
from atts.local.native_model import NativeModel, Segment
from atts.local.packing import PackedAdapter, Packing
from atts.stored_blocks import content_digest, unit_digests

_Floats = NDArray[np.float32]
_MOST_LAYOUTS = 1024
MANY = 4
"""Rows of a sequence in a step that attend by the kernels for many, whatever the model."""


class Stage(NamedTuple):
    """Units that the same chains pass together, from one up to another."""

    start: int
    stop: int
    groups: tuple[tuple[int, ...], ...]


class _Layout(NamedTuple):
    """Where the rows of some chains stand in a batch, and where those that logits are asked of stand among them."""

    rows: Ints
    starts: Ints  # of each sequence among these rows
    logits: Ints
    logit_rows: Ints
    segments: list[Segment]
    is_all: bool  # in the order of the batch


class _Part(NamedTuple):
    """The rows of some chains, as a batch of their own."""

    batch: StepBatch
    layout: _Layout


class _Chain(NamedTuple):
    model: NativeModel
    units: tuple[str, ...]  # what each is called: equal where chains can pass it together
    lineage: Lineage
    config: WorkerConfig
    adapter: PackedAdapter | None


class ChainModel:
    """Runs steps of sequences of several models over one cache; a `Model` whose hidden states end with their chain.

    A chain's weights are loaded when it is first asked; those of blocks that another chain has are not kept twice.
    """

    def __init__(
        self, library: ctypes.CDLL, cache: Tensor, threads: int, first: WorkerConfig, ledger: SlotLedger
    ) -> None:
        self._library, self._cache, self._threads, self._ledger = library, cache, threads, ledger
        self._packing = Packing(library)
        self._configs = [first]
        self._chains: dict[int, _Chain] = {}
        self._stages: dict[tuple[int, ...], list[Stage]] = {}
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        self.unit_rows = self.unit_calls = 0  # rows taken through units, and how often a unit was run
        self.open(0)

    def add(self, config: WorkerConfig) -> None:
        """One more chain; its number follows the last one's."""
        self._configs.append(config)

    def open(self, number: int, divide: Callable[[list[int]], None] = lambda parents: None) -> None:
        """Load a chain when it is first asked, and tell which of the ledger's old columns each is from then on."""
        if number not in self._chains:
            chains = {**self._chains, number: self._load(self._configs[number])}
            self._ledger.relate({at: chain.lineage for at, chain in chains.items()}, divide)
            self._chains = chains
            self._stages.clear()
            self._layouts.clear()

    @property
    def device_name(self) -> str:
        """What computes."""
        return f"{self._chains[0].model.device_name}, shared blocks"

    @property
    def num_bytes(self) -> int:
        """Bytes of packed weights, shared ones once."""
        return self._packing.num_bytes

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`, and their chains: [logits, hidden_size + 1].

        There is a table for each column of the ledger's.
        """
        present = tuple(sorted(set(batch.chains.tolist())))
        width = self._chains[present[0]].config.model.hidden_size
        x = np.empty((len(batch.tokens), width), dtype=np.float32)
        hidden = np.empty((len(batch.logit_rows), width), dtype=np.float32)
        counts, parts = np.diff(batch.query_starts), dict[tuple[object, ...], list[_Part]]()
        positions = np.arange(len(batch.tokens)) + (batch.context_lens - batch.query_starts[1:]).repeat(counts)
        slots = table[:, batch.table_rows.repeat(counts), positions].astype(np.int64, order="C")
        for stage in self.stages(present):
            column, is_due = self._ledger.column_of(stage.start // 2), batch.units <= stage.start
            if stage.start in self._ledger.kept:
                self._keep(stage.start, batch, slots, x)
            for group in stage.groups:
                key = group, column, is_due.sum()
                if key not in parts:
                    parts[key] = self._parts(replace(batch, slots=slots[column]), group, is_due)
                for part in parts[key]:
                    self._run(stage, group, part, (table[column], x, hidden))
        owners = np.repeat(batch.chains, counts)[batch.logit_rows]
        return torch.from_numpy(np.concatenate([hidden, owners[:, None].astype(np.float32)], axis=1))

    def _keep(self, unit: int, batch: StepBatch, slots: Ints, x: _Floats) -> None:
        """Read what goes into a unit for sequences that are computed from there on; remember it of the others."""
        kept, counts = self._ledger.kept[unit], np.diff(batch.query_starts)
        passes = np.array([unit < len(self._chains[chain].units) for chain in batch.chains.tolist()])
        if len(counts) == len(batch.tokens) and passes.all() and not batch.units.any():  # all write a token
            kept.is_known[slots[kept.column]] = False
            return
        begins = (batch.units == unit).repeat(counts)
        x[begins] = kept.states[slots[kept.column, begins]]
        for which, is_known in ((counts < MANY, False), (counts >= MANY, True)):
            rows = (which & passes & (batch.units < unit)).repeat(counts)
            kept.is_known[slots[kept.column, rows]] = is_known
            if is_known:
                kept.states[slots[kept.column, rows]] = x[rows]

    def stages(self, present: tuple[int, ...]) -> list[Stage]:
        """How the chains of a step pass their units: together wherever these are equal; cut where states are kept."""
        if present not in self._stages:
            units = {chain: self._chains[chain].units for chain in present}
            cuts = {*self._ledger.kept, *(1 + 2 * start for start in self._ledger.starts[1:])}
            found = list[Stage]()
            for at in range(max(map(len, units.values()))):
                groups = dict[str, tuple[int, ...]]()
                for chain, names in units.items():
                    if at < len(names):
                        groups[names[at]] = (*groups.get(names[at], ()), chain)
                partition = tuple(groups.values())
                if found and found[-1].groups == partition and at not in cuts:
                    found[-1] = found[-1]._replace(stop=at + 1)
                else:
                    found.append(Stage(at, at + 1, partition))
            self._stages[present] = found
        return self._stages[present]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Their logits: [logits, vocabulary] float32."""
        parts = self._by_head(hidden)
        if len(parts) == 1:
            return parts[0][0].compute_logits(hidden[:, :-1].contiguous())
        logits = torch.empty(len(hidden), self._configs[0].model.vocabulary)
        for model, rows in parts:
            logits[rows] = model.compute_logits(hidden[rows, :-1].contiguous())
        return logits

    def score(self, hidden: Tensor, tokens: list[int], kept_rows: list[int]) -> tuple[list[float], Tensor]:
        """One log-probability a row, and the logits of some."""
        values, kept = [0.0] * len(tokens), torch.empty(len(kept_rows), self._configs[0].model.vocabulary)
        for model, rows in self._by_head(hidden):
            places = {row: at for at, row in enumerate(rows.tolist())}
            mine = [at for at, row in enumerate(kept_rows) if row in places]
            own = [places[kept_rows[at]] for at in mine]
            found, logits = model.score(hidden[rows, :-1].contiguous(), [tokens[row] for row in places], own)
            kept[mine] = logits
            for row, value in zip(places, found, strict=True):
                values[row] = value
        return values, kept

    def sample(self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]) -> SampledTokens:
        """One token a row."""
        return self._chains[0].model.sample(logits, sampling, uniforms)

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Each row's token under the raw distribution."""
        return self._chains[0].model.logprobs(logits, tokens)

    def _by_head(self, hidden: Tensor) -> list[tuple[NativeModel, Tensor]]:
        """Rows by the head that they go to, and a model that has it."""
        owners, heads = hidden[:, -1].numpy().astype(np.int64), dict[str, list[int]]()
        for chain in sorted(set(owners.tolist())):
            heads.setdefault(self._chains[chain].units[-1], []).append(chain)
        if len(heads) == 1:
            return [(self._chains[owners[0]].model, torch.arange(len(hidden)))]
        found = [(self._chains[chains[0]].model, np.isin(owners, chains)) for chains in heads.values()]
        return [(model, torch.from_numpy(mask.nonzero()[0])) for model, mask in found]

    def _run(self, stage: Stage, group: tuple[int, ...], part: _Part, whole: tuple[SlotIds, _Floats, _Floats]) -> None:
        (table, x, hidden), (batch, layout) = whole, part
        self.unit_calls += stage.stop - stage.start
        self.unit_rows += (stage.stop - stage.start) * len(layout.rows)
        mine = (x, hidden) if layout.is_all else (x[layout.rows], hidden[layout.logits])
        self._chains[group[0]].model.run(batch, table, mine, (stage.start, stage.stop), layout.segments)
        if not layout.is_all:
            x[layout.rows], hidden[layout.logits] = mine

    def _parts(self, batch: StepBatch, group: tuple[int, ...], is_due: NDArray[np.bool_]) -> list[_Part]:
        """The sequences of some chains, chain after chain, so that an adapter's rows lie side by side.

        They are cut where a block would run over its limit of rows; a sequence that alone is more stays in one piece.
        """
        chosen = np.concatenate([((batch.chains == chain) & is_due).nonzero()[0] for chain in group])
        most = self._configs[0].options.block_rows
        if most is None or len(batch.tokens) <= most:
            return [self._part(batch, group, chosen)] if len(chosen) else []
        cuts, rows = [0], 0
        for at, count in enumerate(np.diff(batch.query_starts)[chosen].tolist()):
            if rows and rows + count > most:
                cuts.append(at)
                rows = 0
            rows += count
        return [self._part(batch, group, piece) for piece in np.split(chosen, cuts[1:]) if len(piece)]

    def _part(self, batch: StepBatch, group: tuple[int, ...], chosen: Ints) -> _Part:
        layout = self._layout(batch, group, chosen)
        if layout.is_all:
            return _Part(batch, layout)
        part = StepBatch(
            tokens=batch.tokens[layout.rows],
            positions=batch.positions[layout.rows],
            slots=batch.slots[layout.rows],
            table_rows=batch.table_rows[chosen],
            query_starts=layout.starts,
            context_lens=batch.context_lens[chosen],
            num_logits=batch.num_logits[chosen],
            num_single=0,
            logit_rows=layout.logit_rows,
            chains=batch.chains[chosen],
        )
        return _Part(part, layout)

    def _layout(self, batch: StepBatch, group: tuple[int, ...], chosen: Ints) -> _Layout:
        """Where each sequence writes one token it is the same step after step, and made once."""
        if len(batch.tokens) > len(batch.table_rows):
            return self._lay_out(batch, group, chosen)
        key = (group, chosen.tobytes(), batch.chains.tobytes(), batch.logit_rows.tobytes())
        if key not in self._layouts:
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._lay_out(batch, group, chosen)
        return self._layouts[key]

    def _lay_out(self, batch: StepBatch, group: tuple[int, ...], chosen: Ints) -> _Layout:
        counts = np.diff(batch.query_starts)[chosen]
        starts = np.concatenate([[0], counts.cumsum()])
        is_all = len(group) == 1 and len(chosen) == len(batch.table_rows) and (np.diff(batch.logit_rows) > 0).all()
        rows = np.arange(starts[-1]) + (batch.query_starts[chosen] - starts[:-1]).repeat(counts)
        places = np.full(len(batch.tokens), -1)
        places[rows] = np.arange(len(rows))
        where = places[batch.logit_rows]
        logits = np.flatnonzero(where >= 0)
        logits = logits[where[logits].argsort(kind="stable")]
        segments = list[Segment]()
        for chain in group:
            adapter, mine = self._chains[chain].adapter, (batch.chains[chosen] == chain).nonzero()[0]
            if adapter is not None and len(mine):
                start, stop = int(starts[mine[0]]), int(starts[mine[-1] + 1])
                first, last = np.searchsorted(where[logits], [start, stop]).tolist()
                segments.append(Segment(start, stop, first, last, adapter))
        return _Layout(rows, starts, logits, where[logits], segments, bool(is_all))

    def _load(self, config: WorkerConfig) -> _Chain:
        folder, shape, name = config.folder, config.model, config.name
        weights = load_weights(folder, shape, torch.float32, torch.device("cpu"), name, merges=False)
        digests = unit_digests(folder, shape.num_layers)
        model = NativeModel(
            self._library, shape, weights, self._cache, self._threads, packing=self._packing, keys=digests
        )
        added = load_adapter(folder, shape, name)
        deltas = layer_deltas(added, shape) if added else [None] * 4 * shape.num_layers
        ropes = [
            f"{weights.ropes[kind].frequencies.tolist()} {window}"
            for kind, window in zip(shape.ropes, shape.windows, strict=True)
        ]
        last = shape.num_layers - 1
        units = [digests[0]]
        for at, rope in enumerate(ropes):
            units += [f"{digests[1 + 2 * at]} {rope} {at == last}", f"{digests[2 + 2 * at]} {at == last}"]
        head = f"{digests[-1]} {digests[0] if shape.ties_embeddings else ''}"
        adapter = self._packing.adapter(deltas) if added else None
        return _Chain(model, (*units, head), _lineage(config, weights, (digests, ropes, deltas)), config, adapter)


def _lineage(
    config: WorkerConfig, weights: Weights, parts: tuple[Sequence[str], Sequence[str], Sequence[LowRank | None]]
) -> Lineage:
    """What a chain computes, by the contents of its blocks, its layers' rotations and what an adapter adds."""
    shape, (digests, ropes, deltas) = config.model, parts
    asked = shape.num_heads * shape.head_dim  # rows of queries, before those of keys and values
    units, keys = [digests[0]], list[str]()
    for at, (layer, rope) in enumerate(zip(weights.layers, ropes, strict=True)):
        added = [_content(*([low.down, low.up] if low else [])) for low in deltas[4 * at : 4 * at + 4]]
        units += [f"{digests[1 + 2 * at]} {rope} {added[:2]}", f"{digests[2 + 2 * at]} {added[2:]}"]
        low = deltas[4 * at]
        adds = [low.down, low.up[asked:]] if low and low.up[asked:].any() else []
        own = [None if part is None else part[asked:] for part in (layer.qkv, layer.qkv_bias)]
        keys.append(f"{rope} {_content(layer.norm, layer.key_norm, *own, *adds)}")
    return Lineage((*units, f"{digests[-1]} head"), tuple(keys), 2 * shape.num_layers - 1)


def _content(*tensors: Tensor | None) -> str:
    return content_digest(*[part.contiguous().numpy().data.cast("B") if part is not None else b"-" for part in tensors])
