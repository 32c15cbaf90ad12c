"""The executor that sends the rows of a step to workers in turn, each of which computes some ranges
of layers.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.accel.options import StageWorker
from atts.accel.zoo import stage_workers
from atts.accel.zoo.placement import Demand, Instance, dispatched, placed
from atts.accel.zoo.stage_workers import Worker, WorkerHandle, WorkerHere
from atts.accel.zoo.stages import (
    BuildStage,
    Held,
    Leave,
    RangeStep,
    StageCall,
    StageReply,
    StageSetup,
    Wanted,
)
from atts.errors import EngineError, EngineUnavailable
from atts.local.batch import MANY, Floats, Ints, StepBatch, part_of
from atts.local.cache import SlotIds
from atts.local.devices import SPARE_SLOTS
from atts.local.messages import FailureReply, WorkerConfig

_NONE: Ints = np.zeros(0, dtype=np.int64)
Bring = Callable[[int, Ints], Held]
"""Function that takes a worker's number and an array of slots, and returns the worker's keys and
values in these slots.
"""
_LATEST = 0.1
"""Weight of the newest measurement in a running mean.

After each answer, the smallest measured time of a message is raised by a hundredth of this value
(0.1 %). So very old measurements lose their effect.
"""


class StageShare(NamedTuple):
    """The part of a step that one worker computes in one range of layers."""

    worker: int
    entries: Ints  # indices of the batch's sequences that this worker computes
    # pairs: some slots, and the keys and values of these slots, copied from another worker
    brought: Sequence[tuple[Ints, Held]] = ()
    # batches of earlier tokens whose keys and values this worker computes again; each batch comes
    # with the hidden states that enter the range of layers
    again: Sequence[tuple[StepBatch, Floats]] = ()
    # slots whose keys and values this worker copies or computes again in this step
    slots: Ints = _NONE


class StageCosts:
    """Times measured on the workers of one range of layers: for computing rows, for copying keys
    and values, and for messages.
    """

    def __init__(self, setup: StageSetup) -> None:
        model = setup.config.model
        number = 2 if setup.config.options.dtype == "bfloat16" else 4
        # size in bytes of one token's keys and values in this range of layers
        self._bytes = 2 * len(setup.layers) * model.num_kv_heads * model.head_dim * number
        # seconds to compute one row (token): first with few rows per sequence, then with many
        self._row = [1e-4, 1e-4]
        self._byte = 1e-9  # seconds to copy one byte of keys and values from one worker to another
        # for each worker: the smallest measured time in seconds between a message and its answer,
        # without the time of computing
        self._hops: dict[int, float] = {}

    def heard(self, worker: int, rows: int, sequences: int, seconds: tuple[float, float]) -> None:
        """Update the measured times of computing and of messages after a worker's answer.

        `seconds` is a pair: the time from the message to its answer, and the worker's computing
        time.
        """
        whole, inside = seconds
        is_many = rows >= MANY * sequences
        self._row[is_many] += _LATEST * (inside / rows - self._row[is_many])
        self._hops[worker] = min(whole - inside, (1 + _LATEST / 100) * self._hops.get(worker, inf))

    def brought(self, size: int, seconds: float) -> None:
        """Update the mean time in which one byte is copied from one worker to another.

        `seconds` is the time in which a worker sent `size` bytes of keys and values to the loop. It
        counts twice, because the loop must also send them to the other worker.
        """
        self._byte += _LATEST * (2 * seconds / size - self._byte)

    def instance(self, worker: int, own: tuple[int, bool], lacks: int, wait: float) -> Instance:
        """Estimate how soon a worker could compute one sequence's new tokens.

        `lacks` is the number of earlier tokens whose keys and values the worker must first copy or
        recompute.
        """
        hop = self._hops.get(worker, 0.0)
        fed, is_there = own
        move = 2 * hop + lacks * self._bytes * self._byte if is_there else inf
        return Instance(
            wait, fed * self._row[fed >= MANY], not lacks, move, lacks * self._row[1], hop
        )


class _Sequences(NamedTuple):
    """The sequences of one step. For each worker, it also says at which earlier positions the
    worker lacks the keys and values.
    """

    # [sequences, 3]: for each sequence, its row in the slot table, its offset in the tables of
    # rotary angles, and the number of its model
    whose: Ints
    entries: Ints  # for each entry of the batch, the index of its sequence in `whose`
    fed: Ints
    slots: Ints  # [sequences, positions]: the cache slot of each earlier position
    # [workers, sequences, positions]: True if the worker lacks the keys and values of this earlier
    # position
    lacks: NDArray[np.bool_]


class KvResidency:
    """Records, for one range of layers, the slots whose keys and values each worker has.

    It also stores the hidden states that enter the range, one for each slot. From them, any worker
    can compute the keys and values again.
    """

    def __init__(self, workers: int, slots: int, width: int) -> None:
        self.rows = np.zeros((slots, width), dtype=np.float32)
        # for each slot: how many tokens of its sequence were computed together in the step that
        # filled the slot, counted up to MANY
        self._together = np.ones(slots, dtype=np.int64)
        self.held: NDArray[np.bool_] = np.zeros((workers, slots), dtype=np.bool_)

    def note(self, batch: StepBatch, rows: Floats) -> None:
        """Store the hidden states of new tokens, and record that no worker has the tokens' keys and
        values.
        """
        counts = np.diff(batch.query_starts)
        self.rows[batch.slots] = rows
        self._together[batch.slots] = np.minimum(counts, MANY).repeat(counts)
        self.held[:, batch.slots] = False

    def has(self, worker: int, batch: StepBatch, table: SlotIds) -> NDArray[np.bool_]:
        """Return, for each entry (sequence) of a batch, whether a worker has the keys and values of
        all its earlier tokens.
        """
        step = self._lacking(batch, table)
        has_all: NDArray[np.bool_] = ~step.lacks[worker].any(axis=1)[step.entries]
        return has_all

    def divided(
        self,
        batch: StepBatch,
        table: SlotIds,
        costs: StageCosts,
        waits: dict[int, float],
        bring: Bring,
    ) -> list[StageShare]:
        """Divide the sequences of a step among workers.

        Each sequence goes to the worker that would finish it first. `waits` has the seconds until
        each worker is free; this function adds the time of the new work to it.

        :raises EngineUnavailable: a worker has ended, and its keys and values were needed.
        """
        step = self._lacking(batch, table)
        workers = list(waits)
        chosen = np.zeros_like(step.fed)
        is_moved = np.zeros(len(step.fed), dtype=np.bool_)
        missing = step.lacks.sum(-1)
        is_lost = np.logical_and.reduce(step.lacks).any(axis=1).tolist()
        for at in np.argsort(-step.fed, kind="stable").tolist():
            fed = int(step.fed[at])
            is_there = not is_lost[at]
            instances = [
                costs.instance(one, (fed, is_there), int(missing[one, at]), waits[one])
                for one in workers
            ]
            best = dispatched(instances)
            worker = workers[best]
            instance = instances[best]
            chosen[at] = worker
            waits[worker] = instance.cost - instance.hop
            is_moved[at] = instance.move <= instance.recompute
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
        whose[:, 0] = rows
        whose[entries, 1] = batch.positions[batch.query_starts[:-1]] - firsts
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
        # `bring` may also receive other pending answers, which change which worker has which slots.
        # This step ignores such changes: `step.lacks` was computed before.
        for other, lacks in enumerate(step.lacks):
            theirs = np.intersect1d(moved, step.slots[is_brought & ~lacks])
            if len(theirs):
                brought.append((theirs, bring(other, theirs)))
                moved = np.setdiff1d(moved, theirs)
        return StageShare(worker, entries, brought, again, done.nonzero()[0])

    def _again(self, whose: Ints, slots: Ints, missing: Ints) -> tuple[StepBatch, Floats]:
        """Return a batch that computes keys and values at earlier positions of a sequence again.

        Positions that were computed together are computed together again, so that the results are
        identical to the bit. If only some positions of such a group are missing, rows whose results
        are never read complete the group. `whose` has three numbers: the sequence's row in the slot
        table, its offset in the tables of rotary angles, and the number of its model.
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
    """A range of layers, with the models that contain it and the workers that have loaded it."""

    def __init__(self, setup: StageSetup, nodes: int) -> None:
        self.setup = setup
        self.members = dict[int, StageSetup]()
        self.homes = list[int]()  # numbers of the workers that should load and keep this range
        self.holders = set[int]()
        self.loading = Counter[int]()
        self.failure: EngineError | None = None
        self.costs = StageCosts(setup)
        self.seconds = 0.0
        options = setup.config.options
        self.kept: KvResidency | None = None
        if setup.replicas > 1 or setup.is_shared:
            assert options.kv_tokens is not None, (
                "the size of the KV cache must be known when the first stage is created"
            )
            self.kept = KvResidency(
                nodes, options.kv_tokens + SPARE_SLOTS, setup.config.model.hidden_size
            )

    def join(self, node: WorkerHandle, setups: Sequence[StageSetup]) -> None:
        """Ask a worker to load this range for these models."""
        self.failure = None
        self.loading[node.number] += 1
        node.ask([*setups], partial(self._joined, node.number))

    def _joined(self, number: int, answer: FailureReply | EngineUnavailable | None) -> None:
        self.loading[number] -= 1
        if isinstance(answer, FailureReply):
            self.failure = answer.error(self.setup.config.name)
        # The worker has answered all requests to load this range, so it has the range now.
        elif answer is None and not self.loading[number]:
            self.holders.add(number)
        self.loading += Counter()

    def leave(self, number: int) -> None:
        """Record that a worker no longer has this range."""
        self.holders.discard(number)
        if self.kept is not None:
            self.kept.held[number] = False

    def forget(self, number: int, slots: SlotIds) -> None:
        """Record that a worker no longer has the keys and values of these slots."""
        if self.kept is not None:
            self.kept.held[number, slots] = False

    def heard(self, number: int, rows: int, sequences: int, seconds: tuple[float, float]) -> None:
        """Update the measured times of computing and of messages after a worker's answer.

        `seconds` is a pair: the time from the message to its answer, and the worker's computing
        time.
        """
        self.costs.heard(number, rows, sequences, seconds)
        self.seconds += seconds[1]

    def demand(self, seconds: float) -> Demand:
        """Return the size and the load of this range of layers. The size is its number of layers.

        The load is the configured number of workers, less the mean share of the last `seconds`
        seconds in which they did not compute this range.
        """
        size = len(self.setup.layers)
        busy = self.seconds / seconds / max(1, len(self.holders))
        return Demand(size, self.setup.replicas - 1 + min(1.0, max(0.01 * size, busy)))


_LOOKED_AT = 256
"""Number of steps after which the placement of ranges of layers on workers is checked again."""
_FEWER = 0.8
"""Ranges of layers are moved to other workers only if this clearly reduces how often sequences
change workers. This is the largest allowed ratio of the new frequency to the old one.
"""


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step in progress.

    `levels` has, for each entry (sequence) of the batch, the index of the range of layers that
    computes the entry now or next.
    """

    batch: StepBatch
    table: SlotIds
    rows: Floats
    hidden: Floats  # hidden states after the last range, for the rows whose logits are needed
    chains: Ints
    levels: Ints
    visits: int = 0  # number of messages to workers for this step that are not answered yet
    error: Exception | None = None

    @classmethod
    def of(cls, batch: StepBatch, table: SlotIds, width: int) -> InFlightStep:
        """Create a step whose entries (sequences) all wait for their first range of layers.

        If the batch names no models, all entries belong to the first model.
        """
        entries = len(batch.table_rows)
        rows = len(batch.tokens)
        logits = len(batch.logit_rows)
        chains, levels = np.zeros((2, entries), dtype=np.int64)
        states, hidden = (np.empty((count, width), dtype=np.float32) for count in (rows, logits))
        return cls(
            batch, table, states, hidden, batch.models if len(batch.models) else chains, levels
        )


class _Stop(NamedTuple):
    """The entries (sequences) of a step that one worker computes in one range of layers.

    It also has the indices, in the step, of their rows and of their logit rows.
    """

    held: LayerRange
    entries: Ints
    batch: StepBatch
    rows: Ints
    logits: Ints


class StageExecutor:
    """Runs steps of one or several models whose ranges of layers are in workers.

    A sequence usually stays in one worker for all consecutive ranges that the worker has. It may
    move to another worker if that would finish sooner. The new worker then copies or recomputes the
    sequence's keys and values. If a worker ends, its replacement or other workers continue its
    work.
    """

    def __init__(
        self,
        config: WorkerConfig,
        build: BuildStage,
        most: int,
        *,
        worker: StageWorker = "process",
        is_shared: bool = False,
    ) -> None:
        """Create an executor with at most `most` workers.

        If `is_shared` is true, models of a zoo may share ranges of layers. The hidden states that
        enter a range are stored, so that another worker can recompute keys and values. They are not
        stored if only one worker can have the range.
        """
        self._config = config
        self._build = build
        self._is_shared = is_shared
        self._most = most
        self._kind = stage_workers.KINDS[worker]
        self._workers = list[Worker]()
        self.close: Callable[[], object] = weakref.finalize(self, _end, self._workers)
        self.nodes = list[WorkerHandle]()
        self._spare = Counter[int]()
        self.ranges = dict[str, LayerRange]()
        # for each model, under its number: its ranges of layers in order
        self.paths = dict[int, list[LayerRange]]()
        # For each pair of consecutive ranges, by their names: number of sequences that were passed
        # from the first to the second, summed over the steps.
        self.handed = Counter[tuple[str, str]]()
        self._flights = list[InFlightStep]()
        self._steps = 0
        self._since = perf_counter()

    def start(self, label: str) -> int:
        """Start another worker, and return its number.

        If the worker ends, a replacement is started, but only once.

        :raises EngineError: the worker cannot be started.
        """
        number = len(self.nodes)
        self.nodes.append(self._started(number, label))
        self._spare[number] = 1
        return number

    def start_here(self) -> None:
        """Add a worker that runs in this process."""
        self.nodes.append(WorkerHandle(len(self.nodes), "", WorkerHere(self._build)))

    def _started(self, number: int, label: str) -> WorkerHandle:
        self._workers.append(self._kind(self._config.name, label, self._build))
        return WorkerHandle(number, label, self._workers[-1])

    def add(
        self, setups: Sequence[StageSetup], chain: int = 0, homes: Sequence[list[int]] = ()
    ) -> None:
        """Add a model's ranges of layers in order, and make workers load them.

        `homes` has the workers of each range. By default, `placement.placed` chooses the workers.
        """
        path = self.paths[chain] = list[LayerRange]()
        for setup in setups:
            if setup.name not in self.ranges:
                self.ranges[setup.name] = LayerRange(setup, self._most)
            stage_range = self.ranges[setup.name]
            stage_range.members[chain] = setup
            path.append(stage_range)
        wanted = (
            {stage_range.setup.name: home for stage_range, home in zip(path, homes, strict=True)}
            if homes
            else self._placed()
        )
        for stage_range in path:
            stage_range.homes = stage_range.homes or wanted[stage_range.setup.name]
            for number in stage_range.homes:
                known = number in stage_range.holders
                stage_range.join(
                    self.nodes[number],
                    [stage_range.members[chain]] if known else list(stage_range.members.values()),
                )

    def load(self, chain: int = 0) -> None:
        """Wait until workers have loaded all new ranges of a model.

        :raises EngineError: a range cannot be loaded; the model was removed again.
        """
        path = self.paths[chain]
        while any(held.loading for held in path):
            self._go_on(None)
        if failures := [held.failure for held in path if held.failure]:
            self._forget(chain)
            raise failures[0]

    def _forget(self, chain: int) -> None:
        for held in self.paths.pop(chain):
            held.failure = None
            del held.members[chain]
            if held.members:
                self._fill(held)
            else:
                del self.ranges[held.setup.name]
                self._let_go(held, held.holders.copy())

    def _fill(self, layer_range: LayerRange) -> None:
        """Make each worker that should have a range load it, unless the worker has it or is loading
        it.
        """
        for home in layer_range.homes:
            if home not in layer_range.holders and not layer_range.loading[home]:
                layer_range.join(self.nodes[home], list(layer_range.members.values()))

    def _let_go(self, layer_range: LayerRange, numbers: set[int]) -> None:
        """Make some workers unload a range."""
        for number in numbers:
            layer_range.leave(number)
            self.nodes[number].ask(Leave(layer_range.setup.name), lambda answer: None)

    def _placed(self) -> dict[str, list[int]]:
        """Choose workers for all ranges with `placement.placed`.

        The choice needs the free space of each worker. All workers get the same space: the smallest
        in which the configured number of copies of every range fits.
        """
        seconds = max(1e-3, perf_counter() - self._since)
        alive = [node for node in self.nodes if node.error is None]
        demands = {name: held.demand(seconds) for name, held in self.ranges.items()}
        known = Counter(
            pair
            for path in self.paths.values()
            for pair in pairwise([held.setup.name for held in path])
        )
        copies = {name: min(held.setup.replicas, len(alive)) for name, held in self.ranges.items()}
        room = sum(demands[name].bytes * count for name, count in copies.items()) / len(alive)
        while True:
            try:
                places = placed(demands, self.handed + known, [room] * len(alive))
            except ValueError:
                places = {}
            if all(len(places.get(name, ())) >= count for name, count in copies.items()):
                return {name: [alive[at].number for at in homes] for name, homes in places.items()}
            room *= 1.1

    def place(self) -> None:
        """Move ranges to other workers if sequences would then change workers clearly less often.

        Then halve the counts of earlier passages from range to range, so that old steps lose
        weight.
        """
        wanted = self._placed()
        crossing = self.crossing({name: held.homes for name, held in self.ranges.items()})
        if self.crossing(wanted) <= _FEWER * crossing - 1:
            for name, held in self.ranges.items():
                for number in set(wanted[name]) - set(held.homes) - held.holders:
                    held.join(self.nodes[number], list(held.members.values()))
                held.homes = wanted[name]
        self.handed = Counter({pair: count // 2 for pair, count in self.handed.items()})
        self._since = perf_counter()
        for held in self.ranges.values():
            held.seconds = 0.0

    def crossing(self, homes: Mapping[str, Sequence[int]]) -> int:
        """Count how often sequences would have changed workers so far if each range had been on the
        workers in `homes`.

        A sequence may change workers between any two consecutive ranges, in every step.
        """
        return sum(
            count for (one, two), count in self.handed.items() if not {*homes[one]} & {*homes[two]}
        )

    def begin(self, flight: InFlightStep) -> None:
        """Begin a step without waiting for its results.

        :raises EngineUnavailable: no worker is left for a range.
        """
        for chain, count in Counter(flight.chains.tolist()).items():
            for one, two in pairwise(self.paths[chain]):
                self.handed[one.setup.name, two.setup.name] += count
        self._flights.append(flight)
        self._steps += 1
        if self._is_shared and self._steps % _LOOKED_AT == 0:
            self.place()
        self._go_on(0.0)

    def end(self, flight: InFlightStep) -> Floats:
        """Wait for a step that was begun, and return its results.

        If an error stopped the step, raise this error.

        :raises EngineUnavailable: no worker is left for a range.
        """
        while flight in self._flights:
            self._go_on(None)
        if flight.error is not None:
            raise flight.error
        return flight.hidden

    def _go_on(self, seconds: float | None) -> None:
        asked = [node for node in self.nodes if node.is_asked]
        alive = [node for node in self.nodes if node.error is None and self._spare[node.number]]
        idle = [node for node in alive if not node.is_asked]
        answered = self._kind.ready(
            [node.worker for node in (*asked, *idle)], seconds if asked else 0.0
        )
        for node in (*asked, *idle):
            if node.worker in answered:
                node.receive()
        for node in self.nodes:
            if node.error is not None:
                self._mend(node, node.error)
            node.go()
        for held in self.ranges.values():
            if held.holders >= set(held.homes):
                self._let_go(held, held.holders - set(held.homes))
        for flight in [each for each in self._flights if not each.visits]:
            if flight.error or all(
                flight.levels == [len(self.paths[chain]) for chain in flight.chains.tolist()]
            ):
                self._flights.remove(flight)
            else:
                self._send(flight)

    def _mend(self, node: WorkerHandle, error: EngineUnavailable) -> None:
        """Replace a worker that has ended.

        If its replacement has ended too, give its ranges of layers to other workers.
        """
        number = node.number
        lost = list[LayerRange]()
        for held in self.ranges.values():
            if number in held.holders and held.kept is None:
                raise error
            held.leave(number)
            lost += [held] * (number in held.homes)
        if not lost:
            return
        if self._spare[number]:
            self._spare[number] -= 1
            self.nodes[number] = self._started(number, node.label)
        for held in lost:
            if self.nodes[number] is node:
                held.homes.remove(number)
                others = [
                    each.number for each in self.nodes if each.error is None and self._is_shared
                ]
                held.homes += others[:1] if not held.homes else []
                if not held.homes:
                    raise error
            self._fill(held)

    def _send(self, flight: InFlightStep) -> None:
        """Send every entry (sequence) of a step to a worker that has loaded the entry's next range
        of layers.

        If this range is still being loaded, the entry waits.

        :raises EngineUnavailable: no worker could load a range.
        """
        waits = {node.number: node.wait for node in self.nodes}
        starts = defaultdict[int, dict[LayerRange, StageShare]](dict)
        for held, entries in self._before(flight, flight.levels, np.arange(len(flight.levels))):
            if held.failure and not held.holders and not held.loading:
                problem = f"{held.setup} could not be loaded again ({held.failure.problem})"
                raise EngineUnavailable(self._config.name, problem)
            try:
                for share in self._divided(held, flight, entries, waits) if held.holders else ():
                    starts[share.worker][held] = share._replace(entries=entries[share.entries])
            except EngineUnavailable:
                # A worker has ended. The step's work is divided again after the worker was
                # replaced.
                return
        for number, own in starts.items():
            self._visit(flight, self.nodes[number], own, waits[number] - self.nodes[number].wait)

    def _before(
        self, flight: InFlightStep, levels: Ints, entries: Ints
    ) -> list[tuple[LayerRange, Ints]]:
        """Group these entries (sequences) by the next range of layers that each of them needs."""
        found = dict[LayerRange, list[int]]()
        chains = flight.chains.tolist()
        places = levels.tolist()
        for at in entries.tolist():
            path = self.paths[chains[at]]
            if places[at] < len(path):
                found.setdefault(path[places[at]], []).append(at)
        return [(held, np.array(own)) for held, own in found.items()]

    def _divided(
        self, held: LayerRange, flight: InFlightStep, entries: Ints, waits: dict[int, float]
    ) -> list[StageShare]:
        """Divide the entries (sequences) of a range among workers.

        `waits` has the seconds until each worker is free; this function adds the time of the new
        work to it.
        """
        if held.kept is None:
            return [StageShare(next(iter(held.holders)), np.arange(len(entries)))]
        own = {number: waits[number] for number in held.holders}
        batch = part_of(flight.batch, entries)[0]
        shares = held.kept.divided(batch, flight.table, held.costs, own, partial(self._bring, held))
        waits.update(own)
        return shares

    def _bring(self, held: LayerRange, number: int, slots: Ints) -> Held:
        """Request the keys and values of some slots from a worker, and measure how long the answer
        takes.
        """
        began = perf_counter()
        gift: Held = self.nodes[number].at_once(Wanted(held.setup.name, slots))
        held.costs.brought(gift.nbytes, perf_counter() - began)
        return gift

    def _visit(
        self,
        flight: InFlightStep,
        node: WorkerHandle,
        starts: Mapping[LayerRange, StageShare],
        seconds: float,
    ) -> None:
        """Send a worker its entries (sequences) of a step.

        The worker computes each entry in all consecutive ranges that it has.
        """
        entries = np.sort(np.concatenate([share.entries for share in starts.values()]))
        batch, rows, _ = part_of(flight.batch, entries)
        table = flight.table
        steps = list[RangeStep]()
        stops = list[tuple[_Stop, Ints]]()
        for stop in self._way(flight, node.number, entries):
            share = starts.get(stop.held, StageShare(node.number, stop.entries))
            own = entries.searchsorted(stop.entries)
            steps.append(RangeStep(stop.held.setup.name, own, share.brought, share.again))
            stops.append((stop, share.slots))
        flight.visits += 1
        visit = StageCall(batch, flight.rows[rows], table.shape, node.news(batch, table), steps)
        node.ask(visit, partial(self._visited, flight, node, stops), seconds)

    def _way(self, flight: InFlightStep, number: int, entries: Ints) -> Iterator[_Stop]:
        """Yield the ranges of layers that a worker computes for a step, in order. Each comes with
        the entries (sequences) that the worker computes in this range.

        An entry leaves the worker before a range that the worker has not loaded. It also leaves if
        the worker lacks some of its keys and values for the range.
        """
        levels = flight.levels.copy()
        stays = np.zeros(len(flight.levels), dtype=np.bool_)
        stays[entries] = True
        while stays.any():
            level = levels[stays].min()
            for held, own in self._before(flight, levels, (stays & (levels == level)).nonzero()[0]):
                yield _Stop(held, own, *part_of(flight.batch, own))
                levels[own] += 1
                stays[own] = False
                for after, more in self._before(flight, levels, own):
                    if number in after.holders and after.kept is not None:
                        stays[more] = after.kept.has(
                            number, part_of(flight.batch, more)[0], flight.table
                        )

    def _visited(
        self,
        flight: InFlightStep,
        node: WorkerHandle,
        stops: Sequence[tuple[_Stop, Ints]],
        answer: StageReply | EngineUnavailable,
    ) -> None:
        """Store a worker's results for each range of layers.

        If the worker has ended, store nothing. The entries are then sent to a worker again,
        beginning with the same range.
        """
        flight.visits -= 1
        if isinstance(answer, EngineUnavailable):
            return
        if isinstance(answer.rows, Exception):
            flight.error = answer.rows
            # The failed worker may have computed any part of its work. So none of these slots is
            # recorded as valid on this worker.
            for stop, _ in stops:
                stop.held.forget(node.number, flight.table[stop.batch.table_rows])
            return
        hop = perf_counter() - node.sent - sum(answer.seconds)
        for (stop, had), rows, seconds in zip(stops, answer.rows, answer.seconds, strict=True):
            held = stop.held
            if held.kept is not None:
                held.kept.note(stop.batch, flight.rows[stop.rows])
                # A worker that must unload the range loses these slots. So record the slots only if
                # the worker still has the range.
                if node.number in held.holders:
                    held.kept.held[node.number, np.append(had, stop.batch.slots)] = True
            held.heard(node.number, len(stop.rows), len(stop.entries), (seconds + hop, seconds))
            if held.setup.is_last:
                flight.hidden[stop.logits] = rows
            else:
                flight.rows[stop.rows] = rows
            flight.levels[stop.entries] += 1


def _end(workers: Sequence[Worker]) -> None:
    """Close the workers. Python calls this function when their owner is deleted or Python exits."""
    for worker in workers:
        worker.close()
