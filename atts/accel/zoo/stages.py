"""Stages of a model: ranges of its layers in workers, and the messages they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.accel.options import StageOptions
from atts.accel.zoo.many_models import Layers, adapted_rows, bounds_of
from atts.errors import EngineError, UnsupportedByEngine
from atts.local.batch import Floats, Ints, StepBatch, part_of
from atts.local.cache import SlotIds
from atts.local.cpu.model import NativeModel, PackedAdapter
from atts.local.loader import layer_deltas, load_adapter
from atts.local.messages import FailureReply, WorkerConfig

Held = NDArray[np.uint8]
"""Keys and values of some slots in some layers, as bytes."""
News = tuple[Ints, Ints, SlotIds]
"""Slots that are new in a table, by row and column."""


class StageSetup(NamedTuple):
    """Setup of a worker: some layers of a model, with as many slots and threads as its other
    workers.

    Models of a zoo share ranges: `name` names their common blocks, and each model adds its own
    parts.
    """

    config: WorkerConfig
    layers: range
    replicas: int = 1  # number of workers that have these layers
    name: str = ""
    chain: int = 0  # index of the zoo's model
    is_shared: bool = False  # whether models of a zoo share the layers

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the model's last layer, which computes the requested rows
        only.
        """
        return self.layers.stop == self.config.model.num_layers

    def __str__(self) -> str:
        return f"the stage of layers {self.layers.start} to {self.layers.stop - 1}"


class RangeStep(NamedTuple):
    """One worker's part of a step in one of its ranges."""

    name: str
    entries: Ints  # entries of the visit's batch
    brought: Sequence[tuple[Ints, Held]] = ()  # keys and values from another worker, by slots
    # earlier rows whose keys and values are computed again
    again: Sequence[tuple[StepBatch, Floats]] = ()


class StageCall(NamedTuple):
    """Sequences of a step that pass through consecutive ranges of a worker."""

    batch: StepBatch
    rows: Floats
    shape: tuple[int, ...]  # shape of the slot table
    news: News  # entries of the slot table that changed since the last visit
    steps: Sequence[RangeStep]


class StageReply(NamedTuple):
    """The rows after each range, or the error that stopped them, and the time of each range."""

    rows: Sequence[Floats] | Exception
    seconds: Sequence[float]


class Wanted(NamedTuple):
    """Request to a worker for its keys and values of some slots, which another worker lacks."""

    name: str
    slots: Ints


class Leave(NamedTuple):
    """Command to unload a range from a worker."""

    name: str


class StageModel:
    """Some layers of a model, with their keys and values."""

    def __init__(self, setup: StageSetup, model: Layers, cache: Tensor) -> None:
        self.setup = setup
        self.cache = cache
        self._model = model
        # embeddings, norms and heads of shared layers are in the loop's process
        alone = not setup.is_shared
        self._units = (
            int(setup.layers.start > 0 or not alone),
            1 + 2 * len(setup.layers) + (setup.is_last and alone),
        )

    def join(self, setup: StageSetup) -> None:
        """Add a model that has these layers.

        :raises EngineError: the model's own parts cannot be loaded.
        """

    def held(self, slots: Ints) -> Held:
        """Return the keys and values in these slots."""
        return self.cache[:, :, torch.from_numpy(slots)].view(torch.uint8).numpy(force=True)

    def take(self, slots: Ints, contents: Held) -> None:
        """Store keys and values from another worker in these slots."""
        self.cache[:, :, torch.from_numpy(slots)] = (
            torch.from_numpy(contents).view(self.cache.dtype).to(self.cache)
        )

    def run(self, batch: StepBatch, table: SlotIds, rows: Floats) -> Floats:
        """Return the rows after these layers: all rows, or only the requested ones after the last
        layer.
        """
        if not self.setup.is_last:
            every = np.arange(len(batch.tokens))
            batch = replace(batch, num_logits=np.diff(batch.query_starts), logit_rows=every)
        hidden = np.empty((len(batch.logit_rows), rows.shape[1]), dtype=np.float32)
        self._through(batch, table, (rows, hidden))
        return hidden

    def _through(self, batch: StepBatch, table: SlotIds, rows: tuple[Floats, Floats]) -> None:
        self._model.through(batch, table, rows, self._units)


class SharedLayers(StageModel):
    """Layers that several models of a zoo share: rows of all models are computed together, and each
    adapter is applied to its own rows.
    """

    def __init__(self, setup: StageSetup, model: NativeModel, cache: Tensor) -> None:
        super().__init__(setup, model, cache)
        self._native = model
        self._adapters = dict[int, PackedAdapter]()

    def join(self, setup: StageSetup) -> None:
        """Add a model.

        :raises EngineError: the model's adapter cannot be used.
        """
        config = setup.config
        layers = setup.layers
        if added := load_adapter(config.folder, config.model, config.name):
            deltas = layer_deltas(added, config.model)[4 * layers.start : 4 * layers.stop]
            if any(deltas):
                self._adapters[setup.chain] = self._native.packing.adapter(deltas)

    def _through(self, batch: StepBatch, table: SlotIds, rows: tuple[Floats, Floats]) -> None:
        order = batch.logit_rows.argsort(kind="stable")
        batch = replace(batch, logit_rows=batch.logit_rows[order])
        hidden = np.empty_like(rows[1])
        adapted = adapted_rows(batch, bounds_of(batch), self._adapters)
        self._native.through(batch, table, (rows[0], hidden), self._units, adapted)
        rows[1][order] = hidden


BuildStage = Callable[[StageSetup], StageModel]


class StageServer:
    """Ranges of layers by name, in a worker's process or actor, or in the loop's own process."""

    def __init__(self, build: BuildStage) -> None:
        self._build = build
        self._held: dict[str, StageModel] = {}
        # the slot table, as far as it was received
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def answer(self, message: Any) -> object:
        """Answer a message. The answer to a range that is to be loaded is None, or the error."""
        match message:
            case list():
                return self._load(message)
            case StageCall():
                return self._visited(message)
            case Wanted(name, slots):
                return self._held[name].held(slots)
            case _:
                del self._held[message.name]
                return None

    def _load(self, setups: Sequence[StageSetup]) -> FailureReply | None:
        """Load a range for all of these models, or for none if one fails."""
        name = setups[0].name
        try:
            stage = self._held.get(name) or self._build(setups[0])
            for setup in setups:
                stage.join(setup)
        except EngineError as error:
            return FailureReply.of(error)
        self._held[name] = stage
        return None

    def _visited(self, visit: StageCall) -> StageReply:
        if self._table.shape != visit.shape:
            self._table = np.zeros(visit.shape, dtype=np.int32)
        self._table[visit.news[:2]] = visit.news[2]
        outputs = list[Floats]()
        seconds = list[float]()
        for step in visit.steps:
            began = perf_counter()
            stage = self._held[step.name]
            try:
                outputs.append(self._run(stage, step, visit))
            except MemoryError:
                return StageReply(MemoryError(f"{stage.setup} cannot allocate memory"), seconds)
            except Exception as error:  # noqa: BLE001  raised where the step began
                return StageReply(
                    RuntimeError(f"{stage.setup}: {type(error).__name__}: {error}"), seconds
                )
            seconds.append(perf_counter() - began)
        return StageReply(outputs, seconds)

    def _run(self, stage: StageModel, step: RangeStep, visit: StageCall) -> Floats:
        batch, at, _ = part_of(visit.batch, step.entries)
        for slots, brought in step.brought:
            stage.take(slots, brought)
        for earlier, fed in step.again:
            stage.run(earlier, self._table, fed)
        rows = stage.run(batch, self._table, visit.rows[at])
        if not stage.setup.is_last:
            visit.rows[at] = rows
        return rows


def stage_setups(config: WorkerConfig, options: StageOptions) -> list[StageSetup]:
    """Divide a model's layers into stages of about equal size in bytes; the first stage also has
    the embedding and the head.

    :raises UnsupportedByEngine: the number of stages exceeds the number of layers.
    """
    model = config.model
    stages = options.stages
    replicas = options.replicas
    if stages > model.num_layers:
        problem = f"a model of {model.num_layers} layers cannot have {stages} stages"
        raise UnsupportedByEngine(config.name, problem, f"Write stages={model.num_layers} or less")
    words = model.vocabulary * model.hidden_size
    layer = (model.matrix_weights - words) / model.num_layers
    outer = (
        words if model.ties_embeddings else 2 * words
    ) / layer  # size of embedding and head, in layers
    first = round((model.num_layers + outer) / stages - outer)
    first = max(1, min(first, model.num_layers - stages + 1)) if stages > 1 else model.num_layers
    rest = model.num_layers - first
    ends = [0, *(first + rest * at // max(1, stages - 1) for at in range(stages))]
    layers = [range(*each) for each in pairwise(ends)]
    return [
        StageSetup(config, each, n, str(each.start))
        for each, n in zip(layers, (1, *replicas), strict=True)
    ]
