"""Decides what the next step computes: who is admitted, which tokens are fed, who gives way when slots run short."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from atts.local.batch import Slots, StepBatch
from atts.local.pool import SlotPool
from atts.local.prefix import Match, PrefixTree
from atts.local.sequence import Sequence

_RUN = 32  # slots taken at a time while decoding: neighbours in memory are read faster, and calls are few
_WORTH_WAITING = 8  # tokens a sibling must be about to share before a request waits for it
_HEADROOM = 16  # slots kept free per running sequence when another is admitted


class Part(NamedTuple):
    """The tokens `start` to `stop` of a sequence's given ids, fed in one step."""

    sequence: Sequence
    start: int
    stop: int
    wanted: int  # positions from here on are drawn after, score what follows them, or are kept for who goes on


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does: `decoding` feed their newest token, `parts` some of what they were given, `ready` nothing."""

    decoding: list[Sequence]
    parts: list[Part]  # those of a single token first
    ready: list[Sequence]  # their logits are remembered, no forward is needed

    @property
    def size(self) -> int:
        """How many sequences it serves."""
        return len(self.decoding) + len(self.parts) + len(self.ready)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be in one step and in the cache."""

    kv_tokens: int
    max_batch: int
    chunk_tokens: int
    context_length: int


class Scheduler:
    """Oldest first, whatever the kind; decoding never waits for prefills, which are cut into chunks.

    A request that fits the context always gets done: younger ones give their slots up for it.
    """

    def __init__(self, limits: Limits, tree: PrefixTree) -> None:
        self._limits, self._tree = limits, tree
        self._pool = SlotPool(limits.kv_tokens)
        self._chunk = limits.chunk_tokens
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: list[Sequence] = []  # by order
        self._by_ticket: dict[int, Sequence] = {}
        self._rows = list(range(limits.max_batch - 1, -1, -1))
        width = min(limits.context_length, limits.kv_tokens) + 1
        self.table: Slots = np.zeros((limits.max_batch, width), dtype=np.int32)
        self.num_preempted = self.num_evicted = 0
        self.admitted: list[Sequence] = []  # first-time admissions since the reader last cleared it

    @property
    def pool(self) -> SlotPool:
        """The slots of the cache."""
        return self._pool

    @property
    def tree(self) -> PrefixTree:
        """What the cache remembers."""
        return self._tree

    @property
    def num_unfinished(self) -> int:
        """How many requests are waiting or running."""
        return len(self._by_ticket)

    def running(self) -> list[Sequence]:
        """The requests that have a row, oldest first."""
        return list(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self._by_ticket[sequence.ticket] = sequence
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def cancel(self, ticket: int) -> bool:
        """Forget a request at once, keeping what was computed of it as cache; whether it was unfinished."""
        sequence = self._by_ticket.get(ticket)
        if sequence is None:
            return False
        self.finish(sequence)
        return True

    def finish(self, sequence: Sequence, *, cache: str = "keep") -> None:
        """The request is done: its slots become cache, or are freed at once where `cache` is "drop"."""
        del self._by_ticket[sequence.ticket]
        sequence.is_gone = True
        if sequence.row >= 0:
            self._release(sequence, cache=cache)

    def shrink(self) -> bool:
        """Feed half as many tokens and sequences a step from now on; False when that is no longer possible."""
        if self._chunk <= 1:
            return False
        self._chunk //= 2
        for sequence in self._running[max(1, len(self._running) // 2) :][::-1]:
            self._preempt(sequence)
        return True

    def plan(self) -> Plan:
        """Admit what fits, then choose the tokens of the next step, for the oldest first."""
        if self._waiting:
            self._admit()
        decoding: list[Sequence] = []
        singles: list[Part] = []
        longer: list[Part] = []
        ready: list[Sequence] = []
        num_decoding = sum([sequence.is_decoding for sequence in self._running])
        budget = max(self._chunk - num_decoding, (self._chunk + 3) // 4)
        for sequence in self._running.copy():
            if sequence.is_decoding:
                if sequence.computed < sequence.capacity or self._reserve(sequence, sequence.computed + 1):
                    decoding.append(sequence)
            elif sequence.row < 0:
                continue  # gave way to an older one
            elif sequence.computed == len(sequence.ids):
                ready.append(sequence)
            else:
                stop = min(len(sequence.ids), sequence.computed + budget)
                if stop > sequence.computed and self._reserve(sequence, stop):
                    start = sequence.computed
                    budget -= stop - start
                    (singles if stop - start == 1 else longer).append(
                        Part(sequence, start, stop, _wanted(sequence, stop))
                    )
        return Plan(decoding, singles + longer, ready)

    def settle(self, sequence: Sequence) -> None:
        """Share what is computed of this sequence with all others, and read what they computed alike."""
        row, node, owned = self.table[sequence.row], sequence.node, sequence.owned
        assert node is not None, "a running sequence holds a lock"
        found = self._tree.insert(
            tuple(sequence.ids[node.end : sequence.computed]), row[node.end : sequence.computed], node
        )
        self._tree.lock(found.node, node)
        known = node.end + found.length
        if known > owned:
            self._pool.give([row[owned:known]])
            row[owned : node.end] = node.slots[len(node.slots) - (node.end - owned) :]
            row[node.end : known] = found.slots
        sequence.node, sequence.owned = found.node, sequence.computed

    def _admit(self) -> None:
        deferred: list[Sequence] = []
        while (
            self._waiting and self._rows and len(self._running) < self._chunk and len(deferred) < self._limits.max_batch
        ):
            _, sequence = self._waiting[0]
            if sequence.is_gone:
                heapq.heappop(self._waiting)
                continue
            ids = tuple(sequence.ids)
            found = self._tree.match(ids, min(len(ids), sequence.first_scored))
            if self._is_worth_waiting(sequence, found):
                deferred.append(sequence)
            elif not self._enter(sequence, found):
                break
            heapq.heappop(self._waiting)
        for sequence in deferred:
            heapq.heappush(self._waiting, (sequence.order, sequence))

    def _enter(self, sequence: Sequence, found: Match) -> bool:
        """Give a waiting request a row and all the cache knows of its ids; False when there is no room for it yet."""
        self._tree.lock(found.node)
        known = found.length
        logits = None
        if known == min(len(sequence.ids), sequence.first_scored):
            logits = self._tree.logits(found.node)
            known -= logits is None  # without them the last position must be computed again
        if not self._fits(len(sequence.ids) - known):
            self._tree.unlock(found.node)
            return False
        sequence.row, sequence.node, sequence.known_logits = self._rows.pop(), found.node, logits
        self.table[sequence.row, :known] = found.slots[:known]
        sequence.computed = sequence.owned = sequence.capacity = known
        if not sequence.was_admitted:
            sequence.was_admitted, sequence.cached_tokens = True, known
            self.admitted.append(sequence)
        if self._running and sequence.order < self._running[-1].order:
            insort(self._running, sequence, key=lambda other: other.order)
        else:
            self._running.append(sequence)
        return True

    def _fits(self, count: int) -> bool:
        if not self._running:
            return True
        room = self._pool.free + self._tree.evictable - count - _HEADROOM
        most = len(self._running) * (self._limits.context_length + _HEADROOM)
        if room >= most:  # mostly: then nobody needs to be counted
            return True
        return room >= sum(max(0, len(s.ids) - s.capacity) + _HEADROOM for s in self._running)

    def _is_worth_waiting(self, sequence: Sequence, found: Match) -> bool:
        """Whether a running prefill is about to compute a good part of this request's ids."""
        wanted = found.length + _WORTH_WAITING
        if wanted > min(len(sequence.ids), sequence.first_scored):
            return False
        start = sequence.ids[:wanted]
        return any(s.ids[:wanted] == start for s in self._running if not s.is_decoding and s.computed < len(s.ids))

    def _reserve(self, sequence: Sequence, stop: int) -> bool:
        """See that the row has slots up to `stop`; failing that, the sequence itself gives way."""
        need = stop - sequence.capacity
        if need <= 0:
            return True
        count = need
        if self._pool.free + self._tree.evictable >= _RUN * len(self._running):
            count = min(max(need, _RUN), sequence.limit - sequence.capacity)
        if not self._make_room(count, sequence):
            self._preempt(sequence)
            return False
        self.table[sequence.row, sequence.capacity : sequence.capacity + count] = self._pool.take(count)
        sequence.capacity += count
        return True

    def _make_room(self, count: int, sequence: Sequence) -> bool:
        if count <= self._pool.free:
            return True
        for victim in self._victims(sequence):
            self.evict(count - self._pool.free)
            if self._pool.free >= count:
                return True
            if victim is not None:
                self._preempt(victim)
        return False

    def _victims(self, sequence: Sequence) -> Iterator[Sequence | None]:
        """None first: eviction may do; then the younger sequences, youngest first; None again for what they freed."""
        yield None
        yield from [other for other in reversed(self._running) if other.order > sequence.order]
        yield None

    def evict(self, count: int) -> None:
        """Forget cached sequences nobody reads until `count` more slots are free, or none is left."""
        freed = self._tree.evict(count)
        self.num_evicted += sum(len(run) for run in freed)
        self._pool.give(freed)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; what it generated stays, what it computed may be found in the cache again."""
        self.num_preempted += 1
        sequence.is_decoding = False
        if sequence.is_scoring:
            sequence.logprobs.clear()
        self._release(sequence, cache="keep")
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def _release(self, sequence: Sequence, *, cache: str) -> None:
        if cache == "keep" and sequence.computed > sequence.owned:
            self.settle(sequence)
        assert sequence.node is not None, "a running sequence holds a lock"
        self._tree.unlock(sequence.node)
        self._pool.give([self.table[sequence.row, sequence.owned : sequence.capacity]])
        self._rows.append(sequence.row)
        self._running.remove(sequence)
        sequence.row, sequence.node, sequence.known_logits = -1, None, None
        sequence.computed = sequence.owned = sequence.capacity = 0


def _wanted(sequence: Sequence, stop: int) -> int:
    """The first position before `stop` whose hidden state anybody asks for; `stop` when none is."""
    if sequence.is_scoring:
        return min(stop, max(sequence.computed, sequence.first_scored - 1))
    return stop - (stop == len(sequence.ids))


def step_batch(plan: Plan, table: Slots) -> StepBatch:
    """The plan as arrays; wanted are the tokens that are drawn after, decoding ones first, then those that score."""
    if not plan.parts:
        return _decoding_batch(plan.decoding, table)
    parts = [*[Part(s, s.computed, len(s.ids), s.computed) for s in plan.decoding], *plan.parts]
    ids = chain.from_iterable([s.ids[start:stop] for s, start, stop, _ in parts])
    numbers = [(s.row, start, stop, wanted, s.is_scoring) for s, start, stop, wanted in parts]
    rows, begins, lengths, wanted, is_scoring = np.array(numbers, dtype=np.int64).T.copy()
    counts, tails = lengths - begins, lengths - wanted
    starts = np.zeros(len(parts) + 1, dtype=np.int64)
    counts.cumsum(out=starts[1:])
    tokens = np.fromiter(ids, dtype=np.int64, count=int(starts[-1]))
    positions = np.arange(len(tokens)) + (begins - starts[:-1]).repeat(counts)
    slots = table.take((rows * table.shape[1]).repeat(counts) + positions).astype(np.int64)
    drawn = starts[1:][(is_scoring == 0) & (tails > 0)] - 1
    scores = tails * is_scoring
    scored = np.arange(scores.sum()) + (starts[1:] - scores.cumsum()).repeat(scores)
    num_single = int((counts == 1).sum())
    return StepBatch(
        tokens, positions, slots, rows, starts, lengths, tails, num_single, np.concatenate([drawn, scored])
    )


def _decoding_batch(sequences: list[Sequence], table: Slots) -> StepBatch:
    """The common case, one token each, without the bookkeeping of chunks."""
    count = len(sequences)
    tokens = np.array([sequence.ids[-1] for sequence in sequences], dtype=np.int64)
    positions = np.array([sequence.computed for sequence in sequences], dtype=np.int64)
    rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
    starts = np.arange(count + 1)
    slots = table[rows, positions].astype(np.int64)
    ones = np.ones(count, dtype=np.int64)
    return StepBatch(tokens, positions, slots, rows, starts, positions + 1, ones, count, starts[:-1])
