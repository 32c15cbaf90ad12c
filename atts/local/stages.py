"""Stages of a model: ranges of its layers in workers, with their keys and values, and the messages they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.errors import EngineError, UnsupportedByEngine
from atts.local.allocator import SlotIds
from atts.local.batch import Floats, Ints, Layers, StepBatch, part_of
from atts.local.messages import FailureReply, WorkerConfig

Held = NDArray[np.uint8]
"""Keys and values of some slots in some layers, as bytes."""


class StageSetup(NamedTuple):
    """What a worker is to hold: some layers of a model, which have as many slots and threads as its others.

    Models of a zoo share ranges: `name` is that of what they have alike, and each model adds what is its own.
    """

    config: WorkerConfig
    layers: range
    replicas: int = 1  # workers that hold them
    name: str = ""
    chain: int = 0  # which of the zoo's models it is

    @property
    def is_last(self) -> bool:
        """Whether it ends with the model's last layer, behind which are those rows alone that are asked for."""
        return self.layers.stop == self.config.model.num_layers

    def __str__(self) -> str:
        return f"the stage of layers {self.layers.start} to {self.layers.stop - 1}"


class SharedByModels(Layers, Protocol):
    """Layers of one model, or of several of a zoo."""

    def add(self, setup: StageSetup) -> None:
        """One more model: what adapters add for its rows."""
        ...


BuildStage = Callable[[StageSetup], tuple[Layers, Tensor]]


class RangeStep(NamedTuple):
    """What a worker is to do of a step in one of its ranges."""

    name: str
    entries: Ints  # of the visit's batch
    brought: Sequence[tuple[Ints, Held]] = ()  # keys and values that another worker has, by slots
    again: Sequence[tuple[StepBatch, Floats]] = ()  # earlier rows whose keys and values are computed anew
    shape: tuple[int, ...] = ()  # of the slot table
    slots: tuple[Ints, Ints, SlotIds] | None = None  # that are new in it, by row and column


class Visit(NamedTuple):
    """Sequences of a step that pass one or more of a worker's ranges, each as many of them as its way leads through."""

    batch: StepBatch
    rows: Floats
    steps: Sequence[RangeStep]


class Visited(NamedTuple):
    """The rows behind each of the ranges, or what hindered them; and how long each took."""

    rows: Sequence[Floats] | Exception
    seconds: Sequence[float]


class Wanted(NamedTuple):
    """Keys and values of some slots that another worker lacks."""

    name: str
    slots: Ints


class Leave(NamedTuple):
    """A range that is a worker's no longer."""

    name: str


class HeldLayers:
    """Some layers of a model, and the slot table as far as it was told."""

    def __init__(self, setup: StageSetup, model: Layers, cache: Tensor) -> None:
        self.setup, self._model, self._cache = setup, model, cache
        shares = setup.config.shares  # the words of a zoo's models, their heads and norms are beside the loop
        self._units = int(shares or setup.layers.start > 0), 1 + 2 * len(setup.layers) + (setup.is_last and not shares)
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def join(self, setup: StageSetup) -> None:
        """One more model that has these layers.

        :raises EngineError: what is its own cannot be loaded.
        """
        cast(SharedByModels, self._model).add(setup)

    def held(self, slots: Ints) -> Held:
        """The keys and values there."""
        return self._cache[:, :, torch.from_numpy(slots)].view(torch.uint8).numpy(force=True)

    def step(self, step: RangeStep, batch: StepBatch, rows: Floats) -> Floats:
        """What a step's rows are behind these layers."""
        if self._table.shape != step.shape:
            self._table = np.zeros(step.shape, dtype=np.int32)
        if step.slots is not None:
            self._table[step.slots[:2]] = step.slots[2]
        for slots, held in step.brought:
            self._cache[:, :, torch.from_numpy(slots)] = torch.from_numpy(held).view(self._cache.dtype).to(self._cache)
        for earlier, fed in step.again:
            self.run(earlier, self._table, fed)
        return self.run(batch, self._table, rows)

    def run(self, batch: StepBatch, table: SlotIds, rows: Floats) -> Floats:
        """The rows behind these layers: all of them, behind the last those asked for."""
        if not self.setup.is_last:
            every = np.arange(len(batch.tokens))
            batch = replace(batch, num_logits=np.diff(batch.query_starts), logit_rows=every)
        hidden = np.empty((len(batch.logit_rows), rows.shape[1]), dtype=np.float32)
        self._model.through(batch, table, (rows, hidden), self._units)
        return hidden


class StageServer:
    """What runs in a worker's process or actor, or beside the loop: ranges of layers by their names."""

    def __init__(self, build: BuildStage) -> None:
        self._build = build
        self._held: dict[str, HeldLayers] = {}

    def answer(self, message: Any) -> object:
        """What is said of a message; to what is to be held None, or why it cannot be."""
        match message:
            case StageSetup():
                return self._load(message)
            case Visit():
                return self._visited(message)
            case Wanted(name, slots):
                return self._held[name].held(slots)
            case _:
                del self._held[message.name]
                return None

    def _load(self, setup: StageSetup) -> FailureReply | None:
        try:
            if setup.name not in self._held:
                self._held[setup.name] = HeldLayers(setup, *self._build(setup))
            if setup.config.shares:
                self._held[setup.name].join(setup)
        except EngineError as error:
            return FailureReply.of(error)
        return None

    def _visited(self, visit: Visit) -> Visited:
        found, seconds = list[Floats](), list[float]()
        for step in visit.steps:
            began, held = perf_counter(), self._held[step.name]
            try:
                batch, at, _ = part_of(visit.batch, step.entries)
                found.append(held.step(step, batch, visit.rows[at]))
                if not held.setup.is_last:
                    visit.rows[at] = found[-1]
            except MemoryError:
                return Visited(MemoryError(f"{held.setup} cannot allocate memory"), seconds)
            except Exception as error:  # noqa: BLE001  raised where the step began
                return Visited(RuntimeError(f"{held.setup}: {type(error).__name__}: {error}"), seconds)
            seconds.append(perf_counter() - began)
        return Visited(found, seconds)


def stage_setups(config: WorkerConfig) -> list[StageSetup]:
    """The layers of each stage, all stages of about as many bytes; the first also has the embedding and the head.

    :raises UnsupportedByEngine: there are more stages than layers.
    """
    model, stages, replicas = config.model, config.options.stages, config.options.replicas_of_stages
    if stages > model.num_layers:
        problem = f"its {model.num_layers} layers make no {stages} stages"
        raise UnsupportedByEngine(config.name, problem, f"Write stages={model.num_layers} or less")
    words = model.vocabulary * model.hidden_size
    layer = (model.matrix_weights - words) / model.num_layers
    outer = (words if model.ties_embeddings else 2 * words) / layer  # in layers
    first = round((model.num_layers + outer) / stages - outer)
    first = max(1, min(first, model.num_layers - stages + 1)) if stages > 1 else model.num_layers
    rest = model.num_layers - first
    ends = [first + rest * at // max(1, stages - 1) for at in range(stages)]
    layers = [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    return [
        StageSetup(config, each, count, str(each.start)) for each, count in zip(layers, (1, *replicas), strict=True)
    ]
