"""Models whose layers are in workers: one in stages, and several of a zoo that share ranges of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from atts.errors import EngineError
from atts.local.allocator import SlotIds
from atts.local.batch import Floats, ModelAround, RangedModel, StepBatch, Tap, picked
from atts.local.block_names import half_names
from atts.local.cache import allocate_cache, default_tokens
from atts.local.chains import ChainModel, adapted_rows, bounds_of
from atts.local.loader import layer_deltas, load_adapter, load_ropes, load_weights
from atts.local.messages import WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.native_model import NativeModel
from atts.local.packing import PackedAdapter, Packing
from atts.local.slot_ledger import SlotLedger
from atts.local.stage_line import Flight, HeldLine
from atts.local.stages import BuildStage, HeldLayers, StageSetup


def most_steps(config: WorkerConfig) -> int:
    """How many steps may be on their way at once."""
    return config.options.stage_steps or config.options.stages


class StagedModel(ModelAround):
    """A model whose layers behind the first are elsewhere; every number is what it would be here."""

    def __init__(self, setup: StageSetup, model: RangedModel, line: HeldLine, cache: Tensor) -> None:
        """`cache` is the first stage's; states that are returned are of its type, where it is."""
        super().__init__(model)
        self._first, self._line, self._like = HeldLayers(setup, model, cache), line, cache
        self._config = setup.config
        self.most_steps, self.close = most_steps(setup.config), line.close

    @property
    def device_name(self) -> str:
        """Where it computes."""
        options = self._config.options
        replicas = f" with {options.stage_replicas} replicas" * (options.stage_replicas != "1")
        return f"{self._model.device_name}, {options.stages} stages{replicas}"

    def begin(self, batch: StepBatch, table: SlotIds) -> Flight:
        """Take a step through the first stage and send it on; what hinders it is raised at its end.

        :raises EngineUnavailable: a stage has no worker left.
        """
        flight = Flight.of(batch, table, self._config.model.hidden_size)
        try:
            flight.rows = self._first.run(batch, table, flight.rows)
        except Exception as error:  # noqa: BLE001  raised where the step ends
            flight.error = error
        else:
            self._line.begin(flight)
        return flight

    def end(self, flight: Flight) -> Tensor:
        """What `forward` says of a step that was begun."""
        return torch.from_numpy(self._line.end(flight)).to(self._like)

    def forward(self, batch: StepBatch, table: SlotIds, tap: Tap | None = None) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`: [logits, hidden_size]."""
        assert tap is None, "options that listen between layers are refused"
        return self.end(self.begin(batch, table))


class SharedLayers:
    """Layers that several models of a zoo have: rows of all of them at once, to which each one's adapter adds."""

    def __init__(self, model: NativeModel, packing: Packing) -> None:
        self._model, self._packing = model, packing
        self._adapters = dict[int, PackedAdapter]()

    def add(self, setup: StageSetup) -> None:
        """One more model.

        :raises EngineError: its adapter cannot be used.
        """
        config, layers = setup.config, setup.layers
        if added := load_adapter(config.folder, config.model, config.name):
            deltas = layer_deltas(added, config.model)[4 * layers.start : 4 * layers.stop]
            if any(deltas):
                self._adapters[setup.chain] = self._packing.adapter(deltas)

    def through(self, batch: StepBatch, table: SlotIds, rows: tuple[Floats, Floats], units: tuple[int, int], /) -> None:
        """Take all rows of a step, and those of its `logit_rows`, on through some units."""
        order = batch.logit_rows.argsort(kind="stable")
        batch, hidden = replace(batch, logit_rows=batch.logit_rows[order]), np.empty_like(rows[1])
        adapted = adapted_rows(batch, bounds_of(batch), self._adapters)
        self._model.through(batch, table, (rows[0], hidden), units, adapted)
        rows[1][order] = hidden


def shared_layers(setup: StageSetup, library: ctypes.CDLL) -> tuple[SharedLayers, Tensor]:
    """Layers of a zoo's models, and their cache.

    :raises EngineError: they cannot be loaded.
    """
    config, layers, device = setup.config, setup.layers, torch.device("cpu")
    own = replace(config, model=replace(config.model.part(layers), vocabulary=0))
    weights = load_weights(
        config.folder, config.model, torch.float32, device, config.name, merges=False, layers=layers, words=False
    )
    cache, packing = allocate_cache(own, torch.float32, device, config.options.kv_tokens), Packing(library)
    return SharedLayers(
        NativeModel(library, own.model, weights, cache, config.options.threads or 1, packing=packing), packing
    ), cache


class StagedChains(ChainModel):
    """Models of a zoo whose layers are in workers, ranges that several have in common; words, norms and heads are here.

    Prompts are each model's own: none is lent to another.
    """

    def __init__(self, library: ctypes.CDLL, cache: Tensor, config: WorkerConfig, line: HeldLine) -> None:
        """`cache` is that of no layers."""
        self._line, self._ends, self.cache, self.close = line, _ends(config), cache, line.close
        super().__init__(library, cache, config.options.threads or 1, config, SlotLedger(1, config.model.hidden_size))
        self.most_steps = most_steps(config)

    def open(self, number: int, divide: Callable[[list[int]], None] = lambda parents: None) -> None:
        """Load a model's words and head when it is first asked, and have workers load the layers that they lack."""
        if number in self._chains:
            return
        config, first = self._configs[number], self._configs[0]
        chain = self._load(config)
        own = replace(config, options=first.options, pieces=(), depth=0)
        copies, layers = min(first.options.replicas_of_stages), [*pairwise(self._ends)]
        names = [f"{start} {' '.join(chain.units[1 + 2 * start : 1 + 2 * stop])}" for start, stop in layers]
        setups = [StageSetup(own, range(*each), copies, name, number) for each, name in zip(layers, names, strict=True)]
        self._line.add(setups, number)
        try:
            self._line.load()
        except EngineError:
            self._line.forget(number)
            raise
        self._chains[number] = chain
        self._enter(number)

    @property
    def device_name(self) -> str:
        """What computes."""
        return f"{super().device_name} in {len(self._line.nodes)} processes"

    def begin(self, batch: StepBatch, table: SlotIds) -> Flight:
        """Send a step on its way.

        :raises EngineUnavailable: a range has no worker left.
        """
        flight = Flight.of(batch, table, self._configs[0].model.hidden_size)
        words = np.array([hash(self._chains[chain].units[0]) for chain in batch.chains.tolist()])
        for word in np.unique(words):
            entries = (words == word).nonzero()[0]
            part, rows, _ = picked(batch, entries)
            own = flight.rows[rows]
            self._chains[int(batch.chains[entries[0]])].model.through(part, table, (own, own), (0, 1))
            flight.rows[rows] = own
        self._line.begin(flight)
        return flight

    def end(self, flight: Flight) -> Tensor:
        """What `forward` says of a step that was begun."""
        hidden, batch = self._line.end(flight), flight.batch
        owners = batch.chains.repeat(np.diff(batch.query_starts))[batch.logit_rows]
        for head in set(self._heads[owners].tolist()):
            rows = (self._heads[owners] == head).nonzero()[0]
            own = hidden[rows]
            self._chains[head].model.through(batch, flight.table, (own, own), (1, 2))
            hidden[rows] = own
        if self._has_one_head:
            return torch.from_numpy(hidden)
        return torch.from_numpy(np.concatenate([hidden, owners[:, None].astype(np.float32)], axis=1))

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`, as `ChainModel` says them."""
        return self.end(self.begin(batch, table[0]))


def _ends(config: WorkerConfig) -> list[int]:
    """Where ranges begin and end: about as many layers in each, and wherever models of the zoo part or meet."""
    layers, stages = config.model.num_layers, min(config.options.stages, config.model.num_layers)
    names = list[list[str]]()
    for folder in sorted(config.folder.parent.glob("[!.]*")):
        try:
            model = read_model_config(folder, config.name)
            halves = half_names(folder, model, load_ropes(folder, model, config.name))
        except EngineError:
            continue  # it is not opened, or has ranges of its own
        names += [halves] * (model.num_layers == layers)
    alike = [
        [[own[at] for own in names].index(name) for name in [own[at] for own in names]] for at in range(2 * layers)
    ]
    pairs = [alike[at : at + 2] for at in range(0, 2 * layers, 2)]
    partings = {at for at in range(1, layers) if pairs[at] != pairs[at - 1]}
    return sorted({0, layers, *(round(layers * at / stages) for at in range(1, stages)), *partings})


def staged_chains(config: WorkerConfig, library: ctypes.CDLL, build: BuildStage, threads: int) -> StagedChains:
    """A model of a zoo in ranges of layers, which others may join.

    :raises EngineError: it cannot be loaded.
    """
    device, replicas = torch.device("cpu"), sum(config.options.replicas_of_stages)
    tokens = config.options.kv_tokens or default_tokens(config, torch.float32, device)
    config = replace(config, options=replace(config.options, kv_tokens=tokens, threads=threads), depth=0)
    line = HeldLine(config, build, 1 + replicas)
    try:
        line.start_here()
        for _ in range(replicas):
            line.start("a worker with layers of it")
        empty = replace(config, model=config.model.part(range(0)))
        return StagedChains(library, allocate_cache(empty, torch.float32, device, tokens), config, line)
    except BaseException:
        line.close()
        raise
