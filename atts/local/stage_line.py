"""A model in stages: several steps are on their way through them at once; workers with the same layers share each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atts.errors import EngineError, EngineUnavailable
from atts.local import ray_stages, stage_process
from atts.local.allocator import SlotIds
from atts.local.batch import Floats, Ints, ModelAround, RangedModel, StepBatch, Tap, picked
from atts.local.cache import SPARE_SLOTS
from atts.local.messages import FailureReply
from atts.local.ray_stages import RayStage
from atts.local.stage_process import StageProcess
from atts.local.stage_rows import KeptRows, StageCosts, StageShare
from atts.local.stages import BuildStage, Held, HeldLayers, StageDone, StageSetup, StageStep

StageWorker = StageProcess | RayStage
"""It answers each message before it is sent the next."""


class _Part(NamedTuple):
    """Sequences of a step that one worker computes: which of the step's rows and logit rows theirs are."""

    batch: StepBatch
    rows: Ints
    logits: Ints

    def pick(self, entries: Ints) -> _Part:
        """Some of them."""
        batch, rows, logits = picked(self.batch, entries)
        return _Part(batch, self.rows[rows], self.logits[logits])


class _Holder:
    """A worker as its stage knows it."""

    def __init__(self, number: int, worker: StageWorker) -> None:
        self.number, self.worker = number, worker
        self.part: _Part | None = None  # what it works on
        self.sent = 0.0
        self._told: SlotIds = np.zeros((0, 0), dtype=np.int32)

    def new_slots(self, batch: StepBatch, table: SlotIds) -> tuple[Ints, Ints, SlotIds]:
        """What it was not told yet of the sequences in a step."""
        if self._told.shape != table.shape:
            self._told = np.zeros_like(table)
        used, longest = np.unique(batch.table_rows), int(batch.context_lens.max())
        rows, columns = (table[used, :longest] != self._told[used, :longest]).nonzero()
        found = used[rows], columns, table[used[rows], columns]
        self._told[found[:2]] = found[2]
        return found


@dataclass(slots=True, eq=False)
class Flight:
    """A step on its way."""

    batch: StepBatch
    table: SlotIds
    rows: Floats
    at: int = 0  # how many ranges are behind it
    error: Exception | None = None


class HeldStage:
    """A stage's workers; they share the sequences of one step at a time.

    A sequence stays where its keys and values are, unless it is through sooner elsewhere, once these are brought there
    or computed anew. What a worker that is gone was to do, and had, the others compute.
    """

    def __init__(self, setup: StageSetup, make: Callable[[StageSetup], StageWorker]) -> None:
        """Have the workers that `make` starts begin to load; as many are started anew for those that are gone, at most.

        :raises EngineError: there can be none.
        """
        self._setup, self._make, self._kept, self._spare = setup, make, None, setup.replicas
        self._holders = list[_Holder]()
        self.loading = {make(setup): number for number in range(setup.replicas)}
        for worker in self.loading:
            worker.send(setup)
        self._left, self._found = list[_Part](), np.zeros((0, 0), dtype=np.float32)
        self.flight: Flight | None = None
        self._costs = StageCosts(setup)
        if setup.replicas > 1:
            options, width = setup.config.options, setup.config.model.hidden_size
            assert options.kv_tokens is not None, "the first stage knows how many there are"
            self._kept = KeptRows(setup.replicas, options.kv_tokens + SPARE_SLOTS, width)

    def load(self) -> None:
        """Wait for all of them.

        :raises EngineError: one could not be loaded.
        """
        for worker in list(self.loading):
            self._join(worker)

    def _join(self, worker: StageWorker) -> None:
        number, failure = self.loading.pop(worker), worker.take()
        if isinstance(failure, FailureReply):
            raise failure.error(self._setup.config.name)
        self._holders.append(_Holder(number, worker))

    @property
    def busy(self) -> list[StageWorker]:
        """Those that work on a step."""
        return [holder.worker for holder in self._holders if holder.part is not None]

    def enter(self, flight: Flight) -> None:
        """Begin with a step."""
        self.flight, batch = flight, flight.batch
        count = len(batch.logit_rows) if self._setup.is_last else len(batch.tokens)
        self._found = np.empty((count, flight.rows.shape[1]), dtype=np.float32)
        if self._kept is not None:
            self._kept.note(batch, flight.rows)
        self._left = [_Part(batch, np.arange(len(batch.tokens)), np.arange(len(batch.logit_rows)))]
        self._begin(flight)

    def collect(self, answered: Sequence[object]) -> None:
        """Take what is done; a step that is, is behind this stage.

        :raises EngineUnavailable: it has no worker left.
        """
        for worker in [worker for worker in self.loading if worker in answered]:
            with suppress(EngineError):  # the others go on
                self._join(worker)
        flight = self.flight
        if flight is None:
            return
        for holder in [holder for holder in self._holders if holder.worker in answered]:
            self._take(holder, flight)
        if not self.busy and self._left and flight.error is None:
            self._begin(flight)
        if not self.busy and (flight.error or not self._left):
            flight.rows, flight.at, self.flight = self._found, flight.at + 1, None

    def _take(self, holder: _Holder, flight: Flight) -> None:
        part, holder.part = holder.part, None
        assert part is not None, "it has one"
        try:
            done: StageDone = holder.worker.take()
        except EngineUnavailable as error:
            self._lose(holder, part, error)
            return
        if isinstance(done.rows, Exception):
            flight.error = done.rows
            if self._kept is not None:  # whatever it did of it
                self._kept.held[holder.number, flight.table[part.batch.table_rows]] = False
            return
        self._found[part.logits if self._setup.is_last else part.rows] = done.rows
        seconds = perf_counter() - holder.sent, done.seconds
        self._costs.heard(holder.number, len(part.rows), len(part.batch.table_rows), seconds)

    def _lose(self, holder: _Holder, part: _Part | None, error: EngineUnavailable) -> None:
        """One that is gone; the others are to do its part."""
        holder.worker.close()
        self._holders.remove(holder)
        if self._kept is None or not self._holders:
            raise error
        self._kept.held[holder.number] = False
        if self._spare:
            with suppress(EngineError):  # the others go on
                worker, self._spare = self._make(self._setup), self._spare - 1
                worker.send(self._setup)
                self.loading[worker] = holder.number
        if part is not None:
            self._left.append(part)

    def _begin(self, flight: Flight) -> None:
        """Give every worker a share of what is left to do."""
        part, kept = self._left.pop(), self._kept
        if kept is None:
            self._send(self._holders[0], part, StageStep(part.batch, flight.rows), flight.table)
            return
        holders = {holder.number: holder for holder in self._holders}
        shares = kept.divided(part.batch, flight.table, self._costs, list(holders))
        try:
            gifts = [self._brought(share, holders) for share in shares]
        except _Lost:  # what it had as well
            self._left.append(part)
            return
        for share, brought in zip(shares, gifts, strict=True):
            own = part.pick(share.entries)
            kept.held[share.worker, np.append(share.slots, own.batch.slots)] = True
            step = StageStep(own.batch, flight.rows[own.rows], brought, share.again)
            self._send(holders[share.worker], own, step, flight.table)

    def _brought(self, share: StageShare, holders: dict[int, _Holder]) -> list[tuple[Ints, Held]]:
        """The keys and values that a worker lacks and others have."""
        found = list[tuple[Ints, Held]]()
        for number, slots in share.wanted:
            began = perf_counter()
            try:
                holders[number].worker.send(slots)
                held: Held = holders[number].worker.take()
            except EngineUnavailable as error:
                self._lose(holders[number], None, error)
                raise _Lost from error
            self._costs.brought(held.nbytes, perf_counter() - began)
            found.append((slots, held))
        return found

    def _send(self, holder: _Holder, part: _Part, step: StageStep, table: SlotIds) -> None:
        told = step._replace(shape=table.shape, slots=holder.new_slots(part.batch, table))
        try:
            holder.sent = perf_counter()
            holder.worker.send(told)
        except EngineUnavailable as error:
            self._lose(holder, part, error)
        else:
            holder.part = part


class _Lost(Exception):
    """A worker is gone that was asked for what it has."""


class HeldLine:
    """The stages behind the first; every one takes one step at a time."""

    def __init__(self, setups: Sequence[StageSetup], build: BuildStage) -> None:
        """Have all workers, of the kind that the setups name, begin to load.

        :raises EngineError: there can be none.
        """
        is_here, workers = setups[0].config.options.stage_worker == "process", list[StageWorker]()
        self._ready: Any = stage_process.ready if is_here else ray_stages.ready
        self.close: Callable[[], object] = weakref.finalize(self, _end, workers)

        def make(setup: StageSetup) -> StageWorker:  # does not know the line, which so ends when its user does
            worker = stage_process.StageProcess(setup) if is_here else ray_stages.RayStage(setup, build)
            workers.append(worker)
            return worker

        self._flights, self._stages = list[Flight](), [HeldStage(setup, make) for setup in setups]

    def load(self) -> None:
        """Wait until their models are loaded, which began before.

        :raises EngineError: one could not be.
        """
        for stage in self._stages:
            stage.load()

    def begin(self, flight: Flight) -> None:
        """Send a step on, behind those that are on their way.

        :raises EngineUnavailable: a stage has no worker left.
        """
        self._flights.append(flight)
        self._go_on(0.0)

    def end(self, flight: Flight) -> None:
        """Wait until it is behind all of them.

        :raises EngineUnavailable: a stage has no worker left.
        """
        while flight in self._flights:
            self._go_on(None)

    def _go_on(self, seconds: float | None) -> None:
        busy = [worker for stage in self._stages for worker in (*stage.busy, *stage.loading)]
        answered = self._ready(busy, seconds) if busy else []
        for stage in self._stages:
            stage.collect(answered)
        for flight in list(self._flights):
            if flight.at == len(self._stages):
                self._flights.remove(flight)
            elif self._stages[flight.at].flight is None:
                if flight.error is None:
                    self._stages[flight.at].enter(flight)
                else:
                    self._flights.remove(flight)


class StagedModel(ModelAround):
    """A model whose layers behind the first are elsewhere; every number is what it would be here."""

    def __init__(self, setup: StageSetup, model: RangedModel, line: HeldLine, cache: Tensor) -> None:
        """`cache` is the first stage's; states that are returned are of its type, where it is."""
        super().__init__(model)
        self._first, self._line, self._like = HeldLayers(setup, model, cache), line, cache
        self._width = setup.config.model.hidden_size
        self._options = setup.config.options

    @property
    def device_name(self) -> str:
        """Where it computes."""
        replicas = f" with {self._options.stage_replicas} replicas" * (self._options.stage_replicas != "1")
        return f"{self._model.device_name}, {self._options.stages} stages{replicas}"

    @property
    def most_steps(self) -> int:
        """How many steps may be on their way at once."""
        return self._options.stage_steps or self._options.stages

    def begin(self, batch: StepBatch, table: SlotIds) -> Flight:
        """Take a step through the first stage and send it on; what hinders it is raised at its end.

        :raises EngineUnavailable: a stage has no worker left.
        """
        flight = Flight(batch, table, np.empty((len(batch.tokens), self._width), dtype=np.float32))
        try:
            flight.rows = self._first.run(batch, table, flight.rows)
        except Exception as error:  # noqa: BLE001  raised where the step ends
            flight.error = error
        else:
            self._line.begin(flight)
        return flight

    def end(self, flight: Flight) -> Tensor:
        """What `forward` says of a step that was begun."""
        self._line.end(flight)
        if flight.error is not None:
            raise flight.error
        return torch.from_numpy(flight.rows).to(self._like)

    def forward(self, batch: StepBatch, table: SlotIds, tap: Tap | None = None) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`: [logits, hidden_size]."""
        assert tap is None, "options that listen between layers are refused"
        return self.end(self.begin(batch, table))


def _end(workers: Sequence[StageWorker]) -> None:
    """When their user is gone, or Python ends."""
    for worker in workers:
        worker.close()
