"""The scheduler, which chooses the requests that run, the tokens of each step, and the sequences to
preempt when slots are scarce.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from typing import Literal

from atts.local.batch import PrefillChunk, Sequence, StepPlan
from atts.local.cache import PrefixMatch, PrefixNode, PrefixTree, SlotAllocator, SlotIds
from atts.local.seams import SlotStore

# A decoding sequence reserves this many cache slots at once, because adjacent slots are read
# faster.
_SLOT_RUN = 32
# Before another sequence is admitted, this many cache slots per running sequence must be free or
# evictable.
_HEADROOM = 16
# A request waits if a running sequence will soon compute at least this many of its tokens. The
# request then reads these tokens from the cache.
WORTH_WAITING = 8
CacheAction = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits on the size of a step and of the cache."""

    kv_tokens: int
    max_batch: int
    chunk_tokens: int
    context_length: int
    # Requests with more tokens than this use other rotary frequencies; None if the model has only
    # one set of frequencies.
    long_after: int | None = None
    # first row of the frequencies for long requests in the table of rotary angles
    rope_rows: int = 0


class Scheduler:
    """A scheduler that serves the oldest requests first, for sampling and for scoring alike. A long
    prompt is fed in chunks over several steps. These steps also decode, so decoding never waits for
    a long prompt.

    Every request that fits into the context is finished eventually, because younger requests give
    up their slots for older ones.

    The schedulers of `atts.accel.zoo` override `_candidates`, `_prefill_stop`, `_reachable`,
    `_try_admit`, `_useful_kinds` and `_may_give_way`.
    """

    def __init__(
        self, config: SchedulerConfig, tree: PrefixTree, store: SlotStore | None = None
    ) -> None:
        self._config = config
        self.tree = tree
        self.store: SlotStore = store or SlotAllocator(config.kv_tokens)
        self._chunk_tokens = config.chunk_tokens
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: list[Sequence] = []  # sorted by `Sequence.order`, oldest first
        self._unfinished: dict[int, Sequence] = {}
        self._free_rows = list(range(config.max_batch - 1, -1, -1))
        width = min(config.context_length, config.kv_tokens) + 1
        # shape [rows, tokens]; the cache slot of each token of each sequence
        self.table: SlotIds = self.store.new_table(config.max_batch, width)
        self.num_preempted = 0
        self.num_evicted = 0
        # sequences that were admitted for the first time since the step loop last cleared this
        # list; sequences that return after a preemption are not added
        self.newly_admitted: list[Sequence] = []

    @property
    def num_unfinished(self) -> int:
        """Return the number of requests that are waiting or running."""
        return len(self._unfinished)

    @property
    def num_locked(self) -> int:
        """Return the number of slots that running sequences read or write. All other slots are
        free, or can be freed by eviction.
        """
        return max(0, self.store.num_used - self.tree.num_evictable)

    def sequence(self, request_id: int) -> Sequence:
        """Return the unfinished request with this id."""
        return self._unfinished[request_id]

    def is_unfinished(self, request_id: int) -> bool:
        """Return whether the request with this id is waiting or running."""
        return request_id in self._unfinished

    def running(self) -> list[Sequence]:
        """Return the running sequences, oldest first."""
        return list(self._running)

    def add(self, sequence: Sequence) -> None:
        """Add a request to the queue."""
        self._unfinished[sequence.request_id] = sequence
        if self._config.long_after is not None and sequence.max_slots > self._config.long_after:
            sequence.rope_row = self._config.rope_rows
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def cancel(self, request_id: int) -> bool:
        """End a request now, and keep its computed tokens in the cache. Return False if it had
        already ended.
        """
        sequence = self._unfinished.get(request_id)
        if sequence is None:
            return False
        self.finish(sequence)
        return True

    def finish(self, sequence: Sequence, *, cache: CacheAction = "keep") -> None:
        """End a request. If `cache` is "keep", its computed tokens stay in the prefix tree; if it
        is "drop", its own slots are freed.
        """
        del self._unfinished[sequence.request_id]
        sequence.is_finished = True
        if sequence.row >= 0:
            self._release(sequence, cache=cache)

    def shrink(self) -> bool:
        """Halve the largest number of tokens per step, and preempt the younger half of the running
        sequences. If the limit is already one token, restore the full limit and return False.
        """
        if self._chunk_tokens <= 1:
            # Steps cannot get smaller, and even such a step failed. So the full size is restored.
            self._chunk_tokens = self._config.chunk_tokens
            return False
        self._chunk_tokens //= 2
        for sequence in self._running[max(1, len(self._running) // 2) :][::-1]:
            self._preempt(sequence)
        return True

    def schedule(self) -> StepPlan:
        """Admit waiting requests that fit into the cache, then plan the next step, oldest requests
        first.
        """
        if self._waiting:
            self._admit()
        plan = StepPlan([], [], [], [])
        chosen = self._candidates()
        num_decoding = sum([sequence.is_decoding for sequence in chosen])
        budget = max(self._chunk_tokens - num_decoding, (self._chunk_tokens + 3) // 4)
        for sequence in chosen:
            computed = sequence.num_computed
            if sequence.is_decoding:
                if computed < sequence.capacity or self._reserve(sequence, computed + 1):
                    plan.decoding.append(sequence)
            elif sequence.row < 0:
                continue  # an older sequence preempted this sequence earlier in this loop
            elif computed == len(sequence.ids):
                plan.ready.append(sequence)
            else:
                stop = self._prefill_stop(sequence, min(len(sequence.ids), computed + budget))
                if stop > computed and self._reserve(sequence, stop):
                    budget -= stop - computed
                    logits_from = _logits_from(sequence, stop)
                    plan.prefills.append(PrefillChunk(sequence, computed, stop, logits_from))
        # Chunks of a single token come first, because kernels compute them like tokens of decoding
        # sequences.
        plan.prefills.sort(
            key=lambda chunk: (chunk.stop - chunk.start > 1, chunk.sequence.is_scoring)
        )
        return plan

    def _candidates(self) -> list[Sequence]:
        """Return the running sequences that the next step may compute, oldest first."""
        return self._running.copy()

    def _prefill_stop(self, sequence: Sequence, stop: int) -> int:
        """Return the position up to which a request's ids may be fed in this step; it is at most
        `stop`.
        """
        return stop

    def widen(self, sequence: Sequence, count: int) -> int:
        """Reserve slots for up to `count` tokens after a decoding sequence's newest token. Return
        how many of these tokens have a slot.

        New slots are reserved only while many are free, and no sequence is preempted for them.
        """
        most = min(sequence.num_computed + 1 + min(count, _SLOT_RUN), sequence.max_slots)
        if most > sequence.capacity and self._has_plenty():
            self._reserve(sequence, most)
        return min(most, sequence.capacity) - sequence.num_computed - 1

    def cache_prefix(self, sequence: Sequence) -> PrefixNode:
        """Add the computed tokens of a sequence to the prefix tree. For tokens that the tree
        already had, the sequence frees its own slots and reads the tree's slots.
        """
        row = self.table[sequence.row]
        node = sequence.node
        shared = sequence.num_shared
        assert node is not None, "a running sequence must have locked a node of the prefix tree"
        computed = sequence.num_computed
        match = self.tree.insert(
            tuple(sequence.ids[node.depth : computed]), row[node.depth : computed], node
        )
        self.tree.lock(match.node, node)
        known = node.depth + match.length
        if known > shared:
            self.store.free([row[shared:known]])
            row[shared : node.depth] = node.slots[len(node.slots) - (node.depth - shared) :]
            row[node.depth : known] = match.slots
        sequence.node = match.node
        sequence.num_shared = computed
        return match.node

    def _admit(self) -> None:
        """Give rows of the slot table to waiting sequences, including preempted ones, oldest first,
        as long as there is room.
        """
        deferred: list[Sequence] = []
        most = self._config.max_batch
        while (
            self._waiting
            and self._free_rows
            and len(self._running) < self._chunk_tokens
            and len(deferred) < most
        ):
            _, sequence = self._waiting[0]
            if sequence.is_finished:
                heapq.heappop(self._waiting)
                continue
            match = self._match_prefix(sequence)
            if self._should_wait(sequence, self._reachable(sequence, match)):
                deferred.append(sequence)
            elif not self._try_admit(sequence, match):
                break
            heapq.heappop(self._waiting)
        for sequence in deferred:
            heapq.heappush(self._waiting, (sequence.order, sequence))

    def _match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest cached prefix of a waiting request, up to the first token to score. For
        a scoring request, also load the cached scores.

        Cached scores are not used if the request also samples tokens or wants entropies. Such a
        request needs the distribution at every position.
        """
        ids = tuple(sequence.ids)
        root = self.tree.root(sequence.kind)
        if sequence.is_scoring and sequence.drawn is None and not sequence.wants_entropies:
            sequence.begin_scores([])
            match = self.tree.match(ids, len(ids) - 1, root)
            sequence.begin_scores(self.tree.scores(match.node, sequence.first_scored))
            if match.length <= sequence.first_scored:
                return match
        return self.tree.match(ids, min(len(ids), sequence.first_scored), root)

    def _reachable(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Return how many ids at the start of a waiting request need not be computed."""
        return match.length

    def _num_reusable(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Return how many of a request's tokens can be read from the cache. If the whole prompt is
        cached, but its last logits are not, the last token must be computed again.
        """
        is_whole = match.length == min(len(sequence.ids), sequence.first_scored)
        return match.length - (is_whole and self.tree.logits(match.node) is None)

    def _try_admit(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Give a waiting request a row of the slot table, with the cached slots of its prefix.
        Return False if there is not enough room yet.
        """
        self.tree.lock(match.node)
        known = self._num_reusable(sequence, match)
        logits = (
            self.tree.logits(match.node)
            if known == min(len(sequence.ids), sequence.first_scored)
            else None
        )
        if not self._has_room(len(sequence.ids) - known):
            self.tree.unlock(match.node)
            return False
        sequence.row = self._free_rows.pop()
        sequence.node = match.node
        sequence.cached_logits = logits
        self.table[sequence.row, :known] = match.slots[:known]
        sequence.num_computed = known
        sequence.num_shared = known
        sequence.capacity = known
        sequence.num_admissions += 1
        if sequence.num_admissions == 1:
            sequence.cached_tokens = known
            self.newly_admitted.append(sequence)
        if self._running and sequence.order < self._running[-1].order:
            insort(self._running, sequence, key=lambda other: other.order)
        else:
            self._running.append(sequence)
        return True

    def _has_room(self, count: int) -> bool:
        if not self._running:
            return True
        count += _HEADROOM
        most = len(self._running) * (self._config.context_length + _HEADROOM)
        # `most` is at least the exact sum below. If there is room for `most`, which is the usual
        # case, the sum is not computed.
        if self._can_free(count + most):
            return True
        return self._can_free(
            count + sum(max(0, len(s.ids) - s.capacity) + _HEADROOM for s in self._running)
        )

    def _can_free(self, count: int) -> bool:
        """Return whether `count` slots are free or can be freed by eviction."""
        return self.store.num_free + self.tree.num_evictable >= count

    def _should_wait(self, sequence: Sequence, known: int) -> bool:
        """Return whether the request should wait for a running sequence that is still computing the
        same beginning of the text. It waits only if this saves it at least `WORTH_WAITING` tokens.
        """
        wanted = known + WORTH_WAITING
        if wanted > min(len(sequence.ids), sequence.first_scored):
            return False
        kinds = self._useful_kinds(sequence)
        start = sequence.ids[:wanted]
        return any(
            other.ids[:wanted] == start
            for other in self._running
            if other.kind in kinds and not other.is_decoding and other.num_computed < len(other.ids)
        )

    def _useful_kinds(self, sequence: Sequence) -> set[int]:
        """Return the kinds (`Sequence.kind`) of sequences whose keys and values this sequence can
        read.
        """
        return {sequence.kind}

    def _reserve(self, sequence: Sequence, stop: int) -> bool:
        """Reserve slots for a sequence's tokens before position `stop`. If there are not enough
        slots, preempt the sequence and return False.
        """
        need = stop - sequence.capacity
        if need <= 0:
            return True
        count = need
        if self._has_plenty():
            count = min(max(need, _SLOT_RUN), sequence.max_slots - sequence.capacity)
        if not self._make_room(count, sequence):
            self._preempt(sequence)
            return False
        self.table[sequence.row, sequence.capacity : sequence.capacity + count] = (
            self.store.allocate(count)
        )
        sequence.capacity += count
        return True

    def _has_plenty(self) -> bool:
        """Return whether every running sequence could get `_SLOT_RUN` more slots."""
        return self._can_free(_SLOT_RUN * len(self._running))

    def _make_room(self, count: int, sequence: Sequence) -> bool:
        """Make `count` slots free: first evict cached tokens, then preempt sequences that are
        younger than `sequence`, youngest first. Return False if this does not suffice.
        """
        if count <= self.store.num_free:
            return True
        younger = [
            each
            for each in self._running
            if each.order > sequence.order and self._may_give_way(each)
        ]
        while not self._evict_until_free(count):
            if not younger:
                return False
            self._preempt(younger.pop())
        return True

    def _may_give_way(self, sequence: Sequence) -> bool:
        """Return whether a running sequence may be preempted now. By default, it always may."""
        return True

    def _evict_until_free(self, count: int) -> bool:
        while self.store.num_free < count and (
            evicted := self.tree.evict(count - self.store.num_free)
        ):
            self.num_evicted += sum(len(run) for run in evicted)
            self.store.free(evicted)
        return self.store.num_free >= count

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue. It keeps its generated tokens, and its keys
        and values stay in the cache.
        """
        self.num_preempted += 1
        sequence.is_decoding = False
        if sequence.is_scoring:
            sequence.begin_scores([])
        self._release(sequence, cache="keep")
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def _release(self, sequence: Sequence, *, cache: CacheAction) -> None:
        """Release a sequence's slots and its row in the slot table. If `cache` is "keep", its keys
        and values stay in the prefix tree.
        """
        if cache == "keep" and sequence.num_computed > sequence.num_shared:
            self.cache_prefix(sequence)
        assert sequence.node is not None, (
            "a running sequence must have locked a node of the prefix tree"
        )
        self.tree.unlock(sequence.node)
        self.store.free([self.table[sequence.row, sequence.num_shared : sequence.capacity]])
        self._free_rows.append(sequence.row)
        self._running.remove(sequence)
        sequence.row = -1
        sequence.node = None
        sequence.cached_logits = None
        sequence.num_computed = 0
        sequence.num_shared = 0
        sequence.capacity = 0


def _logits_from(sequence: Sequence, stop: int) -> int:
    """Return the first position before `stop` whose logits are needed; `stop` if none is needed."""
    if sequence.is_scoring:
        return min(stop, max(sequence.num_computed, sequence.first_scored - 1))
    return stop - (stop == len(sequence.ids))
