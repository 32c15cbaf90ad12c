"""Several models of a zoo in one step: each block runs once for the rows of all models that share it.

A model is a chain of units: its embedding, attention and feed-forward block of each layer, its head. Two chains share a
unit where they have the same block in the same place; rows are summed in the same order whatever runs beside them, so
that a model's numbers are those it computes alone, to the bit. What adapters add is computed for their rows only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.decode import SampledTokens, SamplingBatch
from atts.local.allocator import SlotIds
from atts.local.batch import Ints, StepBatch
from atts.local.loader import layer_deltas, load_adapter, load_weights
from atts.local.messages import WorkerConfig
from atts.local.native_model import NativeModel, Segment
from atts.local.packing import PackedAdapter, Packing
from atts.stored_blocks import unit_digests

_Floats = NDArray[np.float32]


class Stage(NamedTuple):
    """Units that the same chains pass together, from one up to another."""

    start: int
    stop: int
    groups: tuple[tuple[int, ...], ...]


class _Part(NamedTuple):
    """The rows of some chains: as a batch of their own, and where they stand in the whole one."""

    batch: StepBatch
    rows: Ints
    logits: Ints
    segments: list[Segment]
    is_all: bool


class _Chain(NamedTuple):
    model: NativeModel
    units: tuple[str, ...]  # what each is called: equal where chains can pass it together
    config: WorkerConfig
    adapter: PackedAdapter | None


class ChainModel:
    """Runs steps of sequences of several models over one cache; a `Model` whose hidden states end with their chain.

    A chain's weights are loaded when it is first asked; those of blocks that another chain has are not kept twice.
    """

    def __init__(self, library: ctypes.CDLL, cache: Tensor, threads: int, first: WorkerConfig) -> None:
        self._library, self._cache, self._threads = library, cache, threads
        self._packing = Packing(library)
        self._configs = [first]
        self._chains: dict[int, _Chain] = {}
        self._stages: dict[tuple[int, ...], list[Stage]] = {}
        self.unit_rows = self.unit_calls = 0  # rows taken through units, and how often a unit was run

    def add(self, config: WorkerConfig) -> None:
        """One more chain; its number follows the last one's."""
        self._configs.append(config)

    @property
    def device_name(self) -> str:
        """What computes."""
        return f"{self._chain(0).model.device_name}, shared blocks"

    @property
    def num_bytes(self) -> int:
        """Bytes of packed weights, shared ones once."""
        return self._packing.num_bytes

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`, and their chains: [logits, hidden_size + 1]."""
        present = tuple(np.unique(batch.chains).tolist())
        width = self._chain(present[0]).config.model.hidden_size
        x = np.empty((len(batch.tokens), width), dtype=np.float32)
        hidden = np.empty((len(batch.logit_rows), width), dtype=np.float32)
        parts = dict[tuple[int, ...], _Part]()
        for stage in self.stages(present):
            for group in stage.groups:
                if group not in parts:
                    parts[group] = self._part(batch, group)
                self._run(stage, group, parts[group], (table, x, hidden))
        owners = np.repeat(batch.chains, np.diff(batch.query_starts))[batch.logit_rows]
        return torch.from_numpy(np.concatenate([hidden, owners[:, None].astype(np.float32)], axis=1))

    def stages(self, present: tuple[int, ...]) -> list[Stage]:
        """How the chains of a step pass their units: together wherever these are equal."""
        if present not in self._stages:
            units = {chain: self._chain(chain).units for chain in present}
            found = list[Stage]()
            for at in range(max(map(len, units.values()))):
                groups = dict[str, tuple[int, ...]]()
                for chain, names in units.items():
                    if at < len(names):
                        groups[names[at]] = (*groups.get(names[at], ()), chain)
                partition = tuple(groups.values())
                if found and found[-1].groups == partition:
                    found[-1] = found[-1]._replace(stop=at + 1)
                else:
                    found.append(Stage(at, at + 1, partition))
            self._stages[present] = found
        return self._stages[present]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Their logits: [logits, vocabulary] float32."""
        logits = torch.empty(len(hidden), self._configs[0].model.vocabulary)
        for model, rows in self._by_head(hidden):
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
        return self._chain(0).model.sample(logits, sampling, uniforms)

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Each row's token under the raw distribution."""
        return self._chain(0).model.logprobs(logits, tokens)

    def _by_head(self, hidden: Tensor) -> list[tuple[NativeModel, Tensor]]:
        """Rows by the head that they go to, and a model that has it."""
        owners = hidden[:, -1].to(torch.int64)
        heads = dict[str, list[int]]()
        for chain in set(owners.tolist()):
            heads.setdefault(self._chain(chain).units[-1], []).append(chain)
        found = [(self._chain(chains[0]).model, torch.isin(owners, torch.tensor(chains))) for chains in heads.values()]
        return [(model, mask.nonzero().squeeze(-1)) for model, mask in found]

    def _run(self, stage: Stage, group: tuple[int, ...], part: _Part, whole: tuple[SlotIds, _Floats, _Floats]) -> None:
        chain, (table, x, hidden) = self._chain(group[0]), whole
        self.unit_calls += stage.stop - stage.start
        self.unit_rows += (stage.stop - stage.start) * len(part.rows)
        mine = (x, hidden) if part.is_all else (x[part.rows], hidden[part.logits])
        chain.model.run(part.batch, table, mine, (stage.start, stage.stop), part.segments)
        if not part.is_all:
            x[part.rows], hidden[part.logits] = mine

    def _part(self, batch: StepBatch, group: tuple[int, ...]) -> _Part:
        """The sequences of some chains, chain after chain, so that an adapter's rows lie side by side."""
        chosen = np.concatenate([(batch.chains == chain).nonzero()[0] for chain in group])
        counts = np.diff(batch.query_starts)[chosen]
        starts = np.concatenate([[0], counts.cumsum()])
        rows = np.arange(starts[-1]) + (batch.query_starts[chosen] - starts[:-1]).repeat(counts)
        places = np.full(len(batch.tokens), -1)
        places[rows] = np.arange(len(rows))
        where = places[batch.logit_rows]
        logits = np.flatnonzero(where >= 0)
        logits = logits[where[logits].argsort(kind="stable")]
        part = StepBatch(
            tokens=batch.tokens[rows],
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            table_rows=batch.table_rows[chosen],
            query_starts=starts,
            context_lens=batch.context_lens[chosen],
            num_logits=batch.num_logits[chosen],
            num_single=0,
            logit_rows=where[logits],
            chains=batch.chains[chosen],
        )
        is_all = len(group) == 1 and len(rows) == len(batch.tokens) and bool((logits == np.arange(len(logits))).all())
        return _Part(part, rows, logits, self._segments(part, group), is_all)

    def _segments(self, part: StepBatch, group: Sequence[int]) -> list[Segment]:
        found = list[Segment]()
        for chain in group:
            adapter = self._chain(chain).adapter
            if adapter is not None:
                mine = (part.chains == chain).nonzero()[0]
                start, stop = int(part.query_starts[mine[0]]), int(part.query_starts[mine[-1] + 1])
                logits = np.searchsorted(part.logit_rows, [start, stop]).tolist()
                found.append(Segment(start, stop, logits[0], logits[1], adapter))
        return found

    def _chain(self, number: int) -> _Chain:
        if number not in self._chains:
            self._chains[number] = self._load(self._configs[number])
        return self._chains[number]

    def _load(self, config: WorkerConfig) -> _Chain:
        folder, shape, name = config.folder, config.model, config.name
        weights = load_weights(folder, shape, torch.float32, torch.device("cpu"), name, merges=False)
        digests = unit_digests(folder, shape.num_layers)
        model = NativeModel(
            self._library, shape, weights, self._cache, self._threads, packing=self._packing, keys=digests
        )
        added = load_adapter(folder, shape, name)
        adapter = self._packing.adapter(layer_deltas(added, shape)) if added else None
        ropes = [
            f"{weights.ropes[kind].frequencies.tolist()} {window}"
            for kind, window in zip(shape.ropes, shape.windows, strict=True)
        ]
        last = shape.num_layers - 1
        units = [digests[0]]
        for at, rope in enumerate(ropes):
            units += [f"{digests[1 + 2 * at]} {rope} {at == last}", f"{digests[2 + 2 * at]} {at == last}"]
        head = f"{digests[-1]} {digests[0] if shape.ties_embeddings else ''}"
        return _Chain(model, (*units, head), config, adapter)
