"""A model in stages: ranges of its layers, each with its keys and values in a worker of its own; rows hop between them.

The step loop's side has the embedding, the first layers and the head; a step passes all stages, one after the other.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from atts.errors import EngineUnavailable, UnsupportedByEngine
from atts.local.allocator import SlotIds
from atts.local.batch import Floats, Ints, ModelAround, RangedModel, StepBatch, Tap
from atts.local.messages import GONE, FailureReply, WorkerConfig, write
from atts.processes import python_command

_END_SECONDS = 1.0
"""For a process that ends because another is gone."""


class StageSetup(NamedTuple):
    """What a worker is to hold: some layers of a model, all of which have as many slots and threads."""

    config: WorkerConfig
    layers: range

    @property
    def is_last(self) -> bool:
        """Whether it ends with the model's last norm."""
        return self.layers.stop == self.config.model.num_layers

    def __str__(self) -> str:
        return f"the stage of layers {self.layers.start} to {self.layers.stop - 1}"


BuildStage = Callable[[StageSetup], RangedModel]


class StageStep(NamedTuple):
    """A step on its way from one stage to the next."""

    batch: StepBatch | None  # None behind the last
    shape: tuple[int, ...]  # of the slot table
    slots: tuple[Ints, Ints, SlotIds]  # that are new in it, by row and column
    rows: Floats | Exception


class HeldLayers:
    """Some layers of a model, and the slot table as far as it was told."""

    def __init__(self, setup: StageSetup, model: RangedModel) -> None:
        self._setup, self._model = setup, model
        self._units = (min(1, setup.layers.start), 1 + 2 * len(setup.layers) + setup.is_last)
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def step(self, step: StageStep) -> StageStep:
        """The step with its rows behind these layers; what hinders one stage passes through the others."""
        batch, (rows, columns, slots) = step.batch, step.slots
        if self._table.shape != step.shape:
            self._table = np.zeros(step.shape, dtype=np.int32)
        self._table[rows, columns] = slots
        if batch is None or isinstance(step.rows, Exception):
            return step
        try:
            found: Floats | Exception = self.run(batch, self._table, step.rows)
        except MemoryError:
            found = MemoryError(f"{self._setup} cannot allocate memory")
        except Exception as error:  # noqa: BLE001  raised where the step began
            found = RuntimeError(f"{self._setup}: {type(error).__name__}: {error}")
        return step._replace(batch=None if self._setup.is_last else batch, rows=found)

    def run(self, batch: StepBatch, table: SlotIds, rows: Floats) -> Floats:
        """The rows behind these layers: all of them, behind the last those asked for."""
        if not self._setup.is_last:
            every = np.arange(len(batch.tokens))
            batch = replace(batch, num_logits=np.diff(batch.query_starts), logit_rows=every)
        hidden = np.empty((len(batch.logit_rows), rows.shape[1]), dtype=np.float32)
        self._model.through(batch, table, (rows, hidden), self._units)
        return hidden


class StageLine(Protocol):
    """The stages behind the first, in their order."""

    close: Callable[[], object]  # end them; twice is fine

    def load(self) -> None:
        """Wait until their models are loaded, which began before.

        :raises EngineError: one could not be.
        """
        ...

    def passed(self, step: StageStep) -> StageStep:
        """The step behind all of them.

        :raises EngineUnavailable: one is gone.
        """
        ...


class StagedModel(ModelAround):
    """A model whose layers behind the first are elsewhere; every number is what it would be here."""

    def __init__(self, setup: StageSetup, model: RangedModel, line: StageLine, like: Tensor) -> None:
        """States that are returned are on the device and of the type that `like` is."""
        super().__init__(model)
        self._first, self._line, self._like = HeldLayers(setup, model), line, like
        self._width = setup.config.model.hidden_size
        self._told: SlotIds = np.zeros((0, 0), dtype=np.int32)
        self._stages = setup.config.options.stages

    @property
    def device_name(self) -> str:
        """Where it computes."""
        return f"{self._model.device_name}, {self._stages} stages"

    def forward(self, batch: StepBatch, table: SlotIds, tap: Tap | None = None) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`: [logits, hidden_size]."""
        assert tap is None, "options that listen between layers are refused"
        rows = self._first.run(batch, table, np.empty((len(batch.tokens), self._width), dtype=np.float32))
        done = self._line.passed(StageStep(batch, table.shape, self._new_slots(batch, table), rows))
        if isinstance(done.rows, Exception):
            raise done.rows
        return torch.from_numpy(done.rows).to(self._like)

    def _new_slots(self, batch: StepBatch, table: SlotIds) -> tuple[Ints, Ints, SlotIds]:
        """What the stages were not told yet of the sequences in a step."""
        if self._told.shape != table.shape:
            self._told = np.zeros_like(table)
        used, longest = np.unique(batch.table_rows), int(batch.context_lens.max())
        rows, columns = (table[used, :longest] != self._told[used, :longest]).nonzero()
        found = used[rows], columns, table[used[rows], columns]
        self._told[found[:2]] = found[2]
        return found


def stage_setups(config: WorkerConfig) -> list[StageSetup]:
    """The layers of each stage, all stages of about as many bytes; the first also has the embedding and the head.

    :raises UnsupportedByEngine: there are more stages than layers.
    """
    model, stages = config.model, config.options.stages
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
    return [StageSetup(config, range(start, stop)) for start, stop in zip([0, *ends], ends, strict=False)]


class ProcessLine:
    """The stages as processes of which each writes to the next, as a shell's pipeline does."""

    def __init__(self, setups: Sequence[StageSetup]) -> None:
        """Have all of them begin to load.

        :raises EngineUnavailable: the system starts no process.
        """
        self._setups, self._processes = setups, list[subprocess.Popen[bytes]]()
        self._name = setups[0].config.name
        self.close: Callable[[], object] = weakref.finalize(self, _end, self._processes)
        command, pipe = python_command("atts.local.stage_child", str(os.getpid())), subprocess.PIPE
        try:
            for _ in setups:
                before = self._processes[-1].stdout if self._processes else None
                self._processes.append(subprocess.Popen(command, stdin=before or pipe, stdout=pipe, process_group=0))
                if before is not None:
                    before.close()
        except OSError as error:
            raise EngineUnavailable(self._name, f"its stages' processes cannot be started ({error})") from error
        self._talk(list(setups))

    def load(self) -> None:
        """Wait until their models are loaded, which began before.

        :raises EngineError: one could not be.
        """
        failure = self._talk(None)
        if isinstance(failure, FailureReply):
            raise failure.error(self._name)

    def passed(self, step: StageStep) -> StageStep:
        """The step behind all of them.

        :raises EngineUnavailable: one is gone.
        """
        done = self._talk(step)
        assert isinstance(done, StageStep), "loaded stages answer steps"
        return done

    def _talk(self, message: object) -> object:
        first, last = self._processes[0].stdin, self._processes[-1].stdout
        assert first is not None, "asked for a pipe"
        assert last is not None, "asked for a pipe"
        try:
            write(first, message)
            return pickle.load(last)
        except GONE as error:
            raise self._lost() from error

    def _lost(self) -> EngineUnavailable:
        """Which of them is gone: the others end because of it."""
        codes = dict[int, str]()
        for setup, process in zip(self._setups, self._processes, strict=True):
            with suppress(subprocess.TimeoutExpired):
                codes.setdefault(process.wait(_END_SECONDS), str(setup))
        code = min(codes, default=0)
        advice = "A negative code is a signal; -9 is often the system running out of memory"
        return EngineUnavailable(self._name, f"{codes.get(code, 'a stage')} ended with exit code {code}", advice)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """When their user is gone, or Python ends."""
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what is left to write is for a process that is gone
                    stream.close()
