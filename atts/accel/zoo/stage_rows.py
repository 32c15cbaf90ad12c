"""Ranges of layers: which workers have one, and which worker has whose keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.accel.zoo.placement import Demand, Instance, dispatched
from atts.accel.zoo.stage_workers import WorkerHandle
from atts.accel.zoo.stages import Held, StageSetup
from atts.errors import EngineError, EngineUnavailable
from atts.local.batch import MANY, Floats, Ints, StepBatch
from atts.local.cache import SlotIds
from atts.local.devices import SPARE_SLOTS
from atts.local.messages import FailureReply

_NONE: Ints = np.zeros(0, dtype=np.int64)
Bring = Callable[[int, Ints], Held]
"""Asks a worker for its keys and values of some slots."""
_LATEST = 0.1
"""How much the latest time counts; what a hop takes at least rises by a hundredth of that a step.
"""


class StageShare(NamedTuple):
    """What one worker does of a step."""

    worker: int
    entries: Ints  # of the batch
    brought: Sequence[tuple[Ints, Held]] = ()  # keys and values that others have, by slots
    again: Sequence[tuple[StepBatch, Floats]] = ()  # what it computes anew first
    slots: Ints = _NONE  # whose keys and values it has then


class StageCosts:
    """Seconds that a stage's workers take, as they were measured."""

    def __init__(self, setup: StageSetup) -> None:
        model = setup.config.model
        number = 4 if setup.config.options.dtype == "float32" else 2
        # of a token
        self._bytes = 2 * len(setup.layers) * model.num_kv_heads * model.head_dim * number
        self._row = [1e-4, 1e-4]
        self._byte = 1e-9  # rows alone and among many
        self._hops: dict[int, float] = {}

    def heard(self, worker: int, rows: int, sequences: int, seconds: tuple[float, float]) -> None:
        """Learn what a part of a step took: from its sending to its answer, and within the worker."""
        (whole, inside) = seconds
        is_many = rows >= MANY * sequences
        self._row[is_many] += _LATEST * (inside / rows - self._row[is_many])
        self._hops[worker] = min(whole - inside, (1 + _LATEST / 100) * self._hops.get(worker, inf))

    def brought(self, size: int, seconds: float) -> None:
        """Learn how long keys and values took half of their way."""
        self._byte += _LATEST * (2 * seconds / size - self._byte)

    def instance(self, worker: int, own: tuple[int, bool], lacks: int, wait: float) -> Instance:
        """Describe a worker for one sequence: what is fed, moved and computed again there, in
        seconds.
        """
        hop = self._hops.get(worker, 0.0)
        (fed, is_there) = own
        move = 2 * hop + lacks * self._bytes * self._byte if is_there else inf
        return Instance(
            wait, fed * self._row[fed >= MANY], not lacks, move, lacks * self._row[1], hop
        )


class _Sequences(NamedTuple):
    """Those of a step."""

    # [sequences, 3] row of the slot table, where position 0 is in the tables of angles, model
    whose: Ints
    entries: Ints  # of the batch: whose each is
    fed: Ints
    slots: Ints  # [sequences, positions]
    # [workers, sequences, positions] of keys and values before what is fed
    lacks: NDArray[np.bool_]


class KvResidency:
    """What went into a stage by slots, so that any of its workers can go on from it; and who has."""

    def __init__(self, workers: int, slots: int, width: int) -> None:
        self.rows = np.zeros((slots, width), dtype=np.float32)
        # of how many rows of its sequence each was, MANY at most
        self._together = np.ones(slots, dtype=np.int64)
        self.held: NDArray[np.bool_] = np.zeros((workers, slots), dtype=np.bool_)

    def note(self, batch: StepBatch, rows: Floats) -> None:
        """Note what goes in now; no worker has it yet."""
        counts = np.diff(batch.query_starts)
        self.rows[batch.slots] = rows
        self._together[batch.slots] = np.minimum(counts, MANY).repeat(counts)
        self.held[:, batch.slots] = False

    def has(self, worker: int, batch: StepBatch, table: SlotIds) -> NDArray[np.bool_]:
        """Say of which entries of a batch a worker has all that was before."""
        step = self._lacking(batch, table)
        found: NDArray[np.bool_] = ~step.lacks[worker].any(axis=1)[step.entries]
        return found

    def divided(
        self,
        batch: StepBatch,
        table: SlotIds,
        costs: StageCosts,
        waits: dict[int, float],
        bring: Bring,
    ) -> list[StageShare]:
        """Divide the sequences of a step among workers: each goes where it is through first.

        `waits` says when each worker begins; then when it is through.

        :raises EngineUnavailable: a worker that is to give keys and values is gone.
        """
        step = self._lacking(batch, table)
        workers = list(waits)
        chosen = np.zeros_like(step.fed)
        is_moved = np.zeros(len(step.fed), dtype=np.bool_)
        missing = step.lacks.sum(-1)
        is_lost = np.logical_and.reduce(step.lacks).any(axis=1).tolist()
        for at in np.argsort(-step.fed, kind="stable").tolist():
            own = int(step.fed[at]), not is_lost[at]
            instances = [
                costs.instance(one, own, int(missing[one, at]), waits[one]) for one in workers
            ]
            best = dispatched(instances)
            chosen[at], found = workers[best], instances[best]
            waits[workers[best]], is_moved[at] = (
                found.cost - found.hop,
                found.move <= found.recompute,
            )
        return [
            self._share(one, step, chosen == one, is_moved, bring)
            for one in workers
            if one in chosen
        ]

    def _lacking(self, batch: StepBatch, table: SlotIds) -> _Sequences:
        rows, entries = np.unique(batch.table_rows, return_inverse=True)
        counts = np.diff(batch.query_starts)
        firsts = batch.context_lens - counts
        begins = np.full(len(rows), table.shape[1])
        whose = np.zeros((len(rows), 3), dtype=np.int64)
        np.minimum.at(begins, entries, firsts)
        whose[:, 0], whose[entries, 1] = rows, batch.positions[batch.query_starts[:-1]] - firsts
        if len(batch.models):
            whose[entries, 2] = batch.models
        slots = table[rows, : max(1, int(begins.max()))].astype(np.int64)
        lacks = (np.arange(slots.shape[1]) < begins[:, None]) & ~self.held[:, slots]
        return _Sequences(
            whose, entries, np.bincount(entries, counts).astype(np.int64), slots, lacks
        )

    def _share(
        self,
        worker: int,
        step: _Sequences,
        mine: NDArray[np.bool_],
        is_moved: NDArray[np.bool_],
        bring: Bring,
    ) -> StageShare:
        lacking = step.lacks[worker] & mine[:, None]
        again = list[tuple[StepBatch, Floats]]()
        entries = mine[step.entries].nonzero()[0]
        if not lacking.any():
            return StageShare(worker, entries)
        is_brought = lacking & is_moved[:, None]
        done = np.zeros(len(self.rows), dtype=np.bool_)
        moved = np.unique(step.slots[is_brought])
        done[moved] = True
        for at in (lacking & ~is_moved[:, None]).any(1).nonzero()[0].tolist():
            missing = (lacking[at] & ~done[step.slots[at]]).nonzero()[0]
            done[step.slots[at][missing]] = True
            if len(missing):
                again.append(self._again(step.whose[at], step.slots[at], missing))
        brought = list[tuple[Ints, Held]]()
        # as they were chosen: what is heard while one is asked counts later
        for other, lacks in enumerate(step.lacks):
            theirs = np.intersect1d(moved, step.slots[is_brought & ~lacks])
            if len(theirs):
                brought.append((theirs, bring(other, theirs)))
                moved = np.setdiff1d(moved, theirs)
        return StageShare(worker, entries, brought, again, done.nonzero()[0])

    def _again(self, whose: Ints, slots: Ints, missing: Ints) -> tuple[StepBatch, Floats]:
        """Return earlier rows of a sequence in runs as they were fed: the same to the bit.

        `whose`: its row of the table, its turn among angles, and its model. A run of which a part
        alone is missing is filled up with rows that are written to a slot that is never read.
        """
        kinds = self._together[slots[missing]]
        is_new = np.append(True, (np.diff(missing) != 1) | (np.diff(kinds) != 0))
        inside = np.arange(len(missing)) - is_new.nonzero()[0][is_new.cumsum() - 1]
        begins = (is_new | ((kinds < MANY) & (inside % kinds == 0))).nonzero()[0]
        real = np.diff(np.append(begins, len(missing)))
        order = np.argsort(np.maximum(real, kinds[begins]) > 1, kind="stable")
        firsts = missing[begins][order]
        real = real[order]
        counts = np.maximum(real, kinds[begins][order])
        starts = np.append(0, counts.cumsum())
        inside = np.arange(starts[-1]) - starts[:-1].repeat(counts)
        positions = firsts.repeat(counts) + inside
        is_real = inside < real.repeat(counts)
        written = np.full(len(positions), len(self.rows) - 1)
        written[is_real] = slots[positions[is_real]]
        batch = StepBatch(
            tokens=np.zeros_like(positions),
            positions=positions + whose[1],
            slots=written,
            table_rows=np.full(len(counts), whose[0]),
            query_starts=starts,
            context_lens=firsts + counts,
            num_logits=np.zeros_like(counts),
            num_single=int((counts == 1).sum()),
            logit_rows=np.zeros(0, dtype=np.int64),
            models=np.full(len(counts), whose[2]),
        )
        return batch, self.rows[written]


class LayerRange:
    """A range of layers: the models that have it, the workers that hold it, and what went into it."""

    def __init__(self, setup: StageSetup, nodes: int) -> None:
        self.setup = setup
        self.members = dict[int, StageSetup]()
        self.homes = list[int]()  # the workers that are to hold it
        self.holders = set[int]()
        self.loading = Counter[int]()
        self.failure: EngineError | None = None
        self.costs = StageCosts(setup)
        self.seconds = 0.0
        options = setup.config.options
        self.kept: KvResidency | None = None
        if setup.replicas > 1 or setup.is_shared:
            assert options.kv_tokens is not None, "who begins knows how many there are"
            self.kept = KvResidency(
                nodes, options.kv_tokens + SPARE_SLOTS, setup.config.model.hidden_size
            )

    def join(self, node: WorkerHandle, setups: Sequence[StageSetup]) -> None:
        """Have a worker load it, or what some models add to it; it holds it from then on."""
        self.failure = None
        self.loading[node.number] += 1
        node.ask([*setups], partial(self._joined, node.number))

    def _joined(self, number: int, answer: FailureReply | EngineUnavailable | None) -> None:
        self.loading[number] -= 1
        if isinstance(answer, FailureReply):
            self.failure = answer.error(self.setup.config.name)
        elif (
            answer is None and not self.loading[number]
        ):  # what is still to come must not be behind its leaving
            self.holders.add(number)
        self.loading += Counter()

    def leave(self, number: int) -> None:
        """Take the range from a worker."""
        self.holders.discard(number)
        if self.kept is not None:
            self.kept.held[number] = False

    def forget(self, number: int, slots: SlotIds) -> None:
        """Forget what a worker has there."""
        if self.kept is not None:
            self.kept.held[number, slots] = False

    def heard(self, number: int, rows: int, sequences: int, seconds: tuple[float, float]) -> None:
        """Learn what a part of a step took: from its sending to its answer, and within the worker."""
        self.costs.heard(number, rows, sequences, seconds)
        self.seconds += seconds[1]

    def demand(self, seconds: float) -> Demand:
        """Return its size in layers and the workers that it takes, by its work in so many seconds."""
        size = len(self.setup.layers)
        busy = self.seconds / seconds / max(1, len(self.holders))
        return Demand(size, self.setup.replicas - 1 + min(1.0, max(0.01 * size, busy)))
