"""Ranges of a model's layers, each with its keys and values in a worker of its own: what it holds, is told and does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.errors import EngineError, UnsupportedByEngine
from atts.local.allocator import SlotIds
from atts.local.batch import Floats, Ints, RangedModel, StepBatch
from atts.local.messages import FailureReply, WorkerConfig

Held = NDArray[np.uint8]
"""Keys and values of some slots in some layers, as bytes."""


class StageSetup(NamedTuple):
    """What a worker is to hold: some layers of a model, all of which have as many slots and threads."""

    config: WorkerConfig
    layers: range
    replicas: int = 1  # workers that hold them

    @property
    def is_last(self) -> bool:
        """Whether it ends with the model's last norm."""
        return self.layers.stop == self.config.model.num_layers

    def __str__(self) -> str:
        return f"the stage of layers {self.layers.start} to {self.layers.stop - 1}"


BuildStage = Callable[[StageSetup], tuple[RangedModel, Tensor]]


class StageStep(NamedTuple):
    """What a worker is to do of a step."""

    batch: StepBatch
    rows: Floats
    brought: Sequence[tuple[Ints, Held]] = ()  # keys and values that another worker has, by slots
    again: Sequence[tuple[StepBatch, Floats]] = ()  # earlier rows whose keys and values are computed anew
    shape: tuple[int, ...] = ()  # of the slot table
    slots: tuple[Ints, Ints, SlotIds] | None = None  # that are new in it, by row and column


class StageDone(NamedTuple):
    """The rows behind a worker's layers, or what hindered them; and how long it took."""

    rows: Floats | Exception
    seconds: float


class HeldLayers:
    """Some layers of a model, and the slot table as far as it was told."""

    def __init__(self, setup: StageSetup, model: RangedModel, cache: Tensor) -> None:
        self._setup, self._model, self._cache = setup, model, cache
        self._units = (min(1, setup.layers.start), 1 + 2 * len(setup.layers) + setup.is_last)
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def answer(self, message: StageStep | Ints) -> StageDone | Held:
        """What a step's rows are behind these layers; for slots, the keys and values there."""
        if not isinstance(message, StageStep):
            return self._cache[:, :, torch.from_numpy(message)].view(torch.uint8).numpy(force=True)
        began = perf_counter()
        try:
            found: Floats | Exception = self._step(message)
        except MemoryError:
            found = MemoryError(f"{self._setup} cannot allocate memory")
        except Exception as error:  # noqa: BLE001  raised where the step began
            found = RuntimeError(f"{self._setup}: {type(error).__name__}: {error}")
        return StageDone(found, perf_counter() - began)

    def _step(self, step: StageStep) -> Floats:
        if self._table.shape != step.shape:
            self._table = np.zeros(step.shape, dtype=np.int32)
        if step.slots is not None:
            self._table[step.slots[:2]] = step.slots[2]
        for slots, held in step.brought:
            self._cache[:, :, torch.from_numpy(slots)] = torch.from_numpy(held).view(self._cache.dtype).to(self._cache)
        for batch, earlier in step.again:
            self.run(batch, self._table, earlier)
        return self.run(step.batch, self._table, step.rows)

    def run(self, batch: StepBatch, table: SlotIds, rows: Floats) -> Floats:
        """The rows behind these layers: all of them, behind the last those asked for."""
        if not self._setup.is_last:
            every = np.arange(len(batch.tokens))
            batch = replace(batch, num_logits=np.diff(batch.query_starts), logit_rows=every)
        hidden = np.empty((len(batch.logit_rows), rows.shape[1]), dtype=np.float32)
        self._model.through(batch, table, (rows, hidden), self._units)
        return hidden


class StageServer:
    """What runs in a stage's process or actor."""

    def __init__(self, build: BuildStage) -> None:
        self._build = build
        self._held: HeldLayers | None = None

    def answer(self, message: Any) -> object:
        """The first message says what is to be loaded: None, or why it cannot be; then see `HeldLayers`."""
        if self._held is not None:
            return self._held.answer(message)
        try:
            self._held = HeldLayers(message, *self._build(message))
        except EngineError as error:
            return FailureReply.of(error)
        gc.freeze()  # what is loaded stays, and need not be looked through for garbage
        return None


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
    return [StageSetup(config, each, count) for each, count in zip(layers, (1, *replicas), strict=True)]
