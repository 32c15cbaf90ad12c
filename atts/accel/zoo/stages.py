"""Stages (the ranges of a model's layers that workers compute), and the messages that workers
answer.
"""

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
from atts.errors import EngineError, UnsupportedByEngine, counted
from atts.local.batch import Floats, Ints, StepBatch, part_of
from atts.local.cache import SlotIds
from atts.local.cpu.model import NativeModel, PackedAdapter
from atts.local.loader import layer_deltas, load_adapter
from atts.local.messages import FailureReply, WorkerConfig

Held = NDArray[np.uint8]
"""Keys and values of some slots in some layers, as raw bytes."""
News = tuple[Ints, Ints, SlotIds]
"""Changed entries of a slot table: their row indices, their column indices, and the new slots."""


class StageSetup(NamedTuple):
    """The settings with which a worker loads one range of layers. All workers of a model have the
    same number of slots and threads.

    Models of a zoo may share a range. `name` then identifies their common blocks. Each model has
    its own settings, because it may also have parts that it does not share, such as an adapter.
    """

    config: WorkerConfig
    layers: range
    replicas: int = 1  # number of workers that load these layers and share their work
    name: str = ""
    chain: int = 0  # number of this model in the loop; the first model has the number 0
    is_shared: bool = False  # whether models of a zoo may share these layers

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the model's last layer, which computes only the rows that
        need logits.
        """
        return self.layers.stop == self.config.model.num_layers

    def __str__(self) -> str:
        return f"the stage of layers {self.layers.start} to {self.layers.stop - 1}"


class RangeStep(NamedTuple):
    """The part of a step that a worker computes in one range of layers."""

    name: str
    entries: Ints  # indices of the sequences in the call's batch that pass through this range
    # pairs: some slots, and the keys and values of these slots, copied from another worker
    brought: Sequence[tuple[Ints, Held]] = ()
    # batches of earlier tokens whose keys and values this worker computes again; each batch comes
    # with the hidden states that enter the range of layers
    again: Sequence[tuple[StepBatch, Floats]] = ()


class StageCall(NamedTuple):
    """A message that makes a worker compute sequences of a step, in one or several consecutive
    ranges.
    """

    batch: StepBatch
    rows: Floats
    shape: tuple[int, ...]  # shape of the loop's slot table
    news: News  # entries of the slot table that changed since the last call to this worker
    steps: Sequence[RangeStep]


class StageReply(NamedTuple):
    """The answer to a `StageCall`. It has the hidden states after each range of layers, or the
    error that stopped the computation, and the seconds that each range took.
    """

    rows: Sequence[Floats] | Exception
    seconds: Sequence[float]


class Wanted(NamedTuple):
    """A request for a worker's keys and values in some slots, because another worker needs these
    keys and values.
    """

    name: str
    slots: Ints


class Leave(NamedTuple):
    """A command that makes a worker unload a range of layers."""

    name: str


class StageModel:
    """The layers of one range, with their KV cache."""

    def __init__(self, setup: StageSetup, model: Layers, cache: Tensor) -> None:
        self.setup = setup
        self.cache = cache
        self._model = model
        # If models share these layers, the loop's process computes the embeddings, last norms and
        # heads instead.
        alone = not setup.is_shared
        self._units = (
            int(setup.layers.start > 0 or not alone),
            1 + 2 * len(setup.layers) + (setup.is_last and alone),
        )

    def join(self, setup: StageSetup) -> None:
        """Prepare these layers for another model that contains them. This class has nothing to
        prepare.

        :raises EngineError: the model's own parts, such as its adapter, cannot be loaded.
        """

    def held(self, slots: Ints) -> Held:
        """Return the keys and values of all layers in these slots, as bytes."""
        return self.cache[:, :, torch.from_numpy(slots)].view(torch.uint8).numpy(force=True)

    def take(self, slots: Ints, contents: Held) -> None:
        """Write keys and values from another worker into these slots."""
        self.cache[:, :, torch.from_numpy(slots)] = (
            torch.from_numpy(contents).view(self.cache.dtype).to(self.cache)
        )

    def run(self, batch: StepBatch, table: SlotIds, rows: Floats) -> Floats:
        """Compute these layers, and return the hidden states after them.

        After the model's last layer, only rows that need logits are returned.
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
    """Layers that several models of a zoo share.

    The rows of all models are computed together. Each adapter is applied only to its model's rows.
    """

    def __init__(self, setup: StageSetup, model: NativeModel, cache: Tensor) -> None:
        super().__init__(setup, model, cache)
        self._native = model
        self._adapters = dict[int, PackedAdapter]()

    def join(self, setup: StageSetup) -> None:
        """Prepare these layers for a model that contains them: load its adapter if it has one.

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
    """The ranges of layers that one worker has loaded, and the function that answers the worker's
    messages.

    The worker is a process, a Ray actor or the loop's own process.
    """

    def __init__(self, build: BuildStage) -> None:
        self._build = build
        self._held: dict[str, StageModel] = {}
        # this worker's copy of the loop's slot table; each `StageCall` brings the entries that
        # changed
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def answer(self, message: Any) -> object:
        """Answer a message.

        A request to load a range is answered with None, or with the error.
        """
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
        """Load a range for all these models.

        If one model fails, the range is loaded for none of them.
        """
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
    """Divide a model's layers into stages of about equal size.

    The first stage also has the embedding and the head.

    :raises UnsupportedByEngine: the number of stages exceeds the number of layers.
    """
    model = config.model
    stages = options.stages
    replicas = options.replicas
    if stages > model.num_layers:
        count = counted(model.num_layers, "layer")
        problem = f"a model with {count} cannot be split into {stages} stages"
        raise UnsupportedByEngine(config.name, problem, f"Use at most stages={model.num_layers}")
    words = model.vocabulary * model.hidden_size
    layer = (model.matrix_weights - words) / model.num_layers
    # number of weights of embedding and head together, divided by the number of weights of a layer
    outer = (words if model.ties_embeddings else 2 * words) / layer
    first = round((model.num_layers + outer) / stages - outer)
    first = max(1, min(first, model.num_layers - stages + 1)) if stages > 1 else model.num_layers
    rest = model.num_layers - first
    ends = [0, *(first + rest * at // max(1, stages - 1) for at in range(stages))]
    layers = [range(*each) for each in pairwise(ends)]
    return [
        StageSetup(config, each, n, str(each.start))
        for each, n in zip(layers, (1, *replicas), strict=True)
    ]
