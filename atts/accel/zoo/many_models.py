"""The models of one loop: loaded from a zoo with each block once, and their heads by rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from atts.accel.zoo.shared_worker import AddModel
from atts.accel.zoo.slots import Lineage, OnSplit, alone
from atts.local.batch import Floats, Ints, StepBatch
from atts.local.cache import SlotIds
from atts.local.cpu.model import NativeModel
from atts.local.cpu.weights import PackedAdapter, Packing
from atts.local.loader import LowRank, Rope, Weights, layer_deltas, load_adapter, load_weights
from atts.local.logit_sampling import SampledTokens, SamplingBatch
from atts.local.loop import StepLoop
from atts.local.messages import Command, LoopReport, Submit, WorkerConfig
from atts.local.model_config import ModelConfig
from atts.local.scheduler import Scheduler
from atts.local.seams import HookedModel, Model
from atts.local.sequence import Sequence, TokenTable
from atts.models.stored_blocks import content_digest, unit_digests


class Layers(Protocol):
    """Computation of rows in some of a model's units: its embedding (0), the halves of its layers,
    its last norm.
    """

    def through(
        self,
        batch: StepBatch,
        table: SlotIds,
        rows: tuple[Floats, Floats],
        units: tuple[int, int],
        /,
    ) -> None:
        """Run the batch through these layers. `rows` belong to the batch's tokens and to its
        `logit_rows`; the last layer continues with the latter alone.
        """
        ...


class RangedModel(HookedModel, Layers, Protocol):
    """A whole model that does."""


M = TypeVar("M", bound=RangedModel)
M_co = TypeVar("M_co", bound=RangedModel, covariant=True)


class Chain(NamedTuple, Generic[M_co]):
    """A model in a loop of several."""

    model: M_co
    units: tuple[str, ...]  # names of the units: equal if chains can pass them together
    lineage: Lineage = Lineage((), (), 0)
    adapter: PackedAdapter | None = None


class ManyModels(Generic[M]):
    """Models of one loop by their numbers, each loaded when it is first asked, and their heads.

    Where heads differ the model of each row of states is in one more column.
    """

    def __init__(self, load: Callable[[WorkerConfig], Chain[M]], first: WorkerConfig) -> None:
        self._load = load
        self._configs = [first]
        self._chains: dict[int, Chain[M]] = {}
        self.open(0)
        self._model = self._chains[0].model

    def add(self, config: WorkerConfig) -> None:
        """Take one more model; its number follows the last one's."""
        self._configs.append(config)

    def open(self, number: int, divide: OnSplit = alone) -> None:
        """Load a model when it is first asked; `divide` hears which of the ledger's old columns
        each is from then on.

        :raises EngineError: it cannot be loaded; all is as it was.
        """
        if number not in self._chains:
            chain = self._load(self._configs[number])
            self._relate(number, chain, divide)
            self._chains[number] = chain
            self._heads = self._alike(-1)
            self._has_one_head = len({chain.units[-1] for chain in self._chains.values()}) == 1

    def _alike(self, unit: int) -> Ints:
        """Return for each model, by its number, one that has the same unit."""
        found = np.zeros(1 + max(self._chains), dtype=np.int64)
        known = dict[str, int]()
        for at, chain in self._chains.items():
            found[at] = known.setdefault(chain.units[unit], at)
        return found

    def _relate(self, number: int, chain: Chain[M], divide: OnSplit) -> None:
        """See that a model can be run with the others."""

    def _owned(self, hidden: Floats, owners: Ints) -> Tensor:
        """Return rows behind the last norms of these models."""
        if self._has_one_head:
            return torch.from_numpy(hidden)
        return torch.from_numpy(
            np.concatenate([hidden, owners[:, None].astype(np.float32)], axis=1)
        )

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on; a step takes those of the first model."""
        self._model.use_threads(threads)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return their logits: [logits, vocabulary] float32."""
        if self._has_one_head:
            return self._model.compute_logits(hidden)
        logits = torch.empty(len(hidden), self._configs[0].model.vocabulary)
        for model, rows in self._by_head(hidden):
            logits[rows] = model.compute_logits(hidden[rows, :-1].contiguous())
        return logits

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Score one token a row; return also the logits of some rows."""
        if self._has_one_head:
            return self._model.score(hidden, tokens, kept_rows)
        values = np.empty(len(tokens))
        asked = np.array(kept_rows, dtype=np.int64)
        kept = torch.empty(len(kept_rows), self._configs[0].model.vocabulary)
        for model, rows in self._by_head(hidden):
            mine = np.isin(asked, rows)
            own = [tokens[row] for row in rows]
            found, logits = model.score(
                hidden[rows, :-1].contiguous(), own, rows.searchsorted(asked[mine]).tolist()
            )
            values[rows], kept[mine.nonzero()[0]] = found, logits
        return values.tolist(), kept

    def _by_head(self, hidden: Tensor) -> list[tuple[M, Ints]]:
        """Divide rows by the head that they go to, each with a model that has it."""
        heads = self._heads[hidden[:, -1].numpy().astype(np.int64)]
        return [
            (self._chains[head].model, (heads == head).nonzero()[0])
            for head in sorted(set(heads.tolist()))
        ]

    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Draw one token a row."""
        return self._model.sample(logits, sampling, uniforms)

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Score each row's token under the raw distribution."""
        return self._model.logprobs(logits, tokens)


class ZooLoader:
    """Loads models of a zoo over one cache, of as many layers as that has; weights of equal blocks
    are kept once.
    """

    def __init__(self, library: ctypes.CDLL, cache: Tensor, threads: int) -> None:
        self._library = library
        self._cache = cache
        self._threads = threads
        self._packing = Packing(library)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of packed weights; shared weights count once."""
        return self._packing.num_bytes

    def __call__(self, config: WorkerConfig) -> Chain[NativeModel]:
        """Load a model.

        :raises EngineError: it cannot be loaded.
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
    """Name each layer's rotation and window."""
    return [
        f"{content_name(None, ropes[kind].frequencies, ropes[kind].scales)} {window}"
        for kind, window in zip(shape.ropes, shape.windows, strict=True)
    ]


def half_names(folder: Path, shape: ModelConfig, ropes: Mapping[str, Rope]) -> list[str]:
    """Name the halves of a stored model's layers: equal where they compute the same.

    :raises ZooError: the manifest cannot be read.
    """
    names = rope_names(shape, ropes)
    return [
        f"{digest} {names[at // 2]}"
        for at, digest in enumerate(unit_digests(folder, shape.num_layers)[1:-1])
    ]


def key_names(
    shape: ModelConfig, weights: Weights, ropes: Many[str], deltas: Many[LowRank | None]
) -> tuple[str, ...]:
    """Name what makes each layer's keys and values: rotation, norms, its rows of the first product."""
    asked = shape.num_heads * shape.head_dim
    found = list[str]()  # rows of queries, before those of keys and values
    for rope, layer, low in zip(ropes, weights.layers, deltas[::4], strict=True):
        own = [None if part is None else part[asked:] for part in (layer.qkv, layer.qkv_bias)]
        added = low and replace(low, up=low.up[asked:])
        found.append(f"{rope} {content_name(added, layer.norm, layer.key_norm, *own)}")
    return tuple(found)


def content_name(low: LowRank | None, *tensors: Tensor | None) -> str:
    """Name numbers by their content: equal for equal ones; an adapter that adds nothing is none."""
    added = (low.down, low.up) if low and low.up.any() else ()
    parts = [
        part.contiguous().numpy().data.cast("B") if part is not None else b"-"
        for part in (*added, *tensors)
    ]
    return content_digest(*parts)


class LoopModels(Model, Protocol):
    """Several models that one loop runs as if they were one."""

    def add(self, config: WorkerConfig) -> None:
        """Take one more model; its number follows the last one's."""
        ...

    def open(self, number: int, divide: OnSplit = ...) -> None:
        """Load a model when it is first asked."""
        ...


class ManyModelsLoop(StepLoop):
    """A step loop whose requests name one of several models."""

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
        """Do nothing: there are no columns of slots here."""
