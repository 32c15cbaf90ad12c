"""The step loop: take orders, plan, run the model, draw or score, report; forward only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from atts.core import SampleRequest
from atts.decode import Drawn, Laws, batch_laws
from atts.local.batch import Model
from atts.local.messages import Cancel, Close, Failed, LoopStats, Order, Reply, Report, Sampled, Scored, Submit
from atts.local.scheduler import Part, Plan, Scheduler, step_batch
from atts.local.sequence import Sequence, ending, sampling_sequence, scoring_sequence

_REPORT_SECONDS = 0.2
"""How stale the counters may get while nothing is finished."""


class Inbox(Protocol):
    """Where orders come from."""

    def take(self, *, wait: bool) -> list[Order]:
        """All orders so far; with `wait`, at least one."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How token ids read: the bytes of each, and which of them end a text."""

    vocabulary: int
    pieces: tuple[bytes, ...]
    end_ids: frozenset[int]


class StepLoop:
    """Owns the scheduler and the model; runs in one thread until told to close."""

    def __init__(self, model: Model, scheduler: Scheduler, reading: Reading, tell: Callable[[Report], None]) -> None:
        self._model, self._scheduler, self._reading, self._tell = model, scheduler, reading, tell
        self._stats = LoopStats()
        self._replies: list[Reply] = []
        self._told = 0.0  # when the last report went out
        self._laws: tuple[tuple[int, ...], Laws] = ((), batch_laws([], 1))
        self._is_closing = False

    def run(self, inbox: Inbox) -> None:
        """Step as long as there is work, sleep while there is none, return when told to close."""
        while True:
            if not self._scheduler.num_unfinished:
                self._report()
            self._take(inbox.take(wait=not self._scheduler.num_unfinished))
            if self._is_closing:
                return
            if self._scheduler.num_unfinished:
                self.step()
            if self._replies or perf_counter() - self._told > _REPORT_SECONDS:
                self._report()

    def step(self) -> None:
        """One step of the model, for all sequences whose turn it is."""
        began = perf_counter()
        plan = self._scheduler.plan()
        self._tally(plan, began)
        try:
            self._compute(plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._shrink()
        self._stats.busy_seconds += perf_counter() - began

    def fail_all(self, failure: Failed) -> None:
        """Tell every caller that nothing more will come."""
        self._replies.append(failure)
        self._report()

    def _take(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case Submit(ticket, request):
                    self._stats.requests += 1
                    arrived = perf_counter()
                    if isinstance(request, SampleRequest):
                        self._scheduler.add(sampling_sequence(ticket, request, arrived))
                    else:
                        self._scheduler.add(scoring_sequence(ticket, request, arrived))
                case Cancel(ticket):
                    self._stats.cancelled += self._scheduler.cancel(ticket)
                case Close():
                    self._is_closing = True

    def _compute(self, plan: Plan) -> None:
        """Feed the plan's tokens, then draw and score; no sequence changes before all is computed."""
        hidden = None
        if plan.decoding or plan.parts:
            hidden = self._model.forward(step_batch(plan, self._scheduler.table), self._scheduler.table)
        asked = [part for part in plan.parts if part.wanted < part.stop]
        starting = [part.sequence for part in asked if not part.sequence.is_scoring]
        scoring = [part for part in asked if part.sequence.is_scoring]
        count = len(plan.decoding) + len(starting)
        logits = self._drawing_logits(plan.ready, hidden, count)
        sequences = plan.ready + plan.decoding + starting
        drawn = self._draw(sequences, logits)
        scored = self._score(scoring, hidden[count:]) if hidden is not None and scoring else []
        for sequence in plan.decoding:
            sequence.computed += 1
        for part in plan.parts:
            part.sequence.computed = part.stop
        if drawn is not None:
            results = zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
            for index, (token, logprob) in enumerate(results):
                if index >= len(sequences) - len(starting) and not math.isnan(logprob):
                    self._share(sequences[index], logits[index])
                self._grow(sequences[index], token, logprob)
        self._score_firsts(scoring)
        for part, logprobs, last in scored:
            self._note_scores(part, logprobs, last)

    def _drawing_logits(self, ready: list[Sequence], hidden: Tensor | None, count: int) -> Tensor:
        """Logits to draw from: remembered ones first, then those of the forward."""
        known = [sequence.known_logits for sequence in ready if sequence.known_logits is not None]
        assert len(known) == len(ready), "a ready sequence has its logits"
        parts = [torch.stack(known)] if known else []
        if hidden is not None and count:
            parts.append(self._model.head(hidden[:count]))
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(0)

    def _draw(self, sequences: list[Sequence], logits: Tensor) -> Drawn | None:
        if not sequences:
            return None
        uniforms = [float(s.uniforms[len(s.logprobs)]) for s in sequences if s.uniforms is not None]
        return self._model.draw(logits, self._batch_laws(sequences, logits), uniforms)

    def _batch_laws(self, sequences: list[Sequence], logits: Tensor) -> Laws:
        """Settings as tensors, made anew only when the batch changed."""
        key = tuple([sequence.ticket for sequence in sequences])
        if key != self._laws[0]:
            settings = [s.request.sampling for s in sequences if isinstance(s.request, SampleRequest)]
            self._laws = key, batch_laws(settings, logits.shape[-1], logits.device)
        return self._laws[1]

    def _score(self, parts: list[Part], hidden: Tensor) -> list[tuple[Part, list[float], Tensor | None]]:
        """Per part: the log-probs of the tokens after its positions, and the logits of a suffix's end when reached."""
        targets: list[int] = []
        ends: list[int] = []
        firsts = [0]
        for part in parts:
            ids = part.sequence.ids
            targets += ids[part.wanted + 1 : part.stop + 1]
            if part.stop == len(ids):
                ends.append(len(targets))
                targets.append(0)  # nothing follows the end, so any will do
            firsts.append(len(targets))
        values, kept = self._model.score(hidden, targets, ends)
        last = dict(zip(ends, kept, strict=True))
        return [
            (part, values[first:stop], last.get(stop - 1))
            for part, first, stop in zip(parts, firsts[:-1], firsts[1:], strict=True)
        ]

    def _share(self, sequence: Sequence, logits: Tensor) -> None:
        """Let siblings start from what was given, without even a forward of its last token."""
        self._scheduler.settle(sequence)
        assert sequence.node is not None, "a running sequence holds a lock"
        self._scheduler.tree.keep_logits(sequence.node, logits.clone())

    def _grow(self, sequence: Sequence, token: int, logprob: float) -> None:
        if math.isnan(logprob):
            self._fail(sequence)
            return
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        self._stats.sampled_tokens += 1
        ended = ending(sequence, token, self._reading.pieces, self._reading.end_ids)
        sequence.is_decoding = ended is None
        if ended is not None:
            ids = tuple(sequence.ids[-len(sequence.logprobs) :])
            self._replies.append(Sampled(sequence.ticket, ids, ended, tuple(sequence.logprobs), sequence.cached_tokens))
            self._scheduler.finish(sequence)

    def _score_firsts(self, parts: list[Part]) -> None:
        """Suffixes that begin where the cache remembers logits have their first token scored by those."""
        known = [
            (part.sequence, part.sequence.known_logits)
            for part in parts
            if part.start == part.sequence.first_scored and part.sequence.known_logits is not None
        ]
        if known:
            tokens = [sequence.ids[sequence.first_scored] for sequence, _ in known]
            values = self._model.logprobs(torch.stack([logits for _, logits in known]), tokens)
            for (sequence, _), value in zip(known, values, strict=True):
                sequence.logprobs.append(value)
            self._stats.free_tokens += len(known)

    def _note_scores(self, part: Part, logprobs: list[float], last: Tensor | None) -> None:
        sequence = part.sequence
        is_done = last is not None
        sequence.logprobs += logprobs[:-1] if is_done else logprobs
        if math.isnan(sum(sequence.logprobs)):
            self._fail(sequence)
        elif last is not None:
            self._scheduler.settle(sequence)
            assert sequence.node is not None, "a running sequence holds a lock"
            self._scheduler.tree.keep_logits(sequence.node, last.clone())
            self._stats.scored_tokens += len(sequence.logprobs)
            self._replies.append(Scored(sequence.ticket, tuple(sequence.logprobs), sequence.cached_tokens))
            self._scheduler.finish(sequence)

    def _fail(self, sequence: Sequence) -> None:
        advice = "Check the weights; in half precision try float32"
        self._replies.append(Failed(sequence.ticket, "broken", "the model's logits are not numbers (NaN)", advice))
        self._scheduler.finish(sequence, cache="drop")
        self._stats.failed += 1

    def _shrink(self) -> None:
        """Out of memory: smaller steps from now on; when they cannot get smaller, those in flight fail."""
        self._stats.shrunk += 1
        if self._scheduler.shrink():
            return
        advice = "Lower kv_tokens, max_batch or chunk_tokens, or use a smaller model"
        for sequence in self._scheduler.running():
            self._replies.append(Failed(sequence.ticket, "memory", "a step does not fit into memory", advice))
            self._scheduler.finish(sequence, cache="drop")
            self._stats.failed += 1

    def _tally(self, plan: Plan, now: float) -> None:
        stats = self._stats
        stats.steps += 1
        stats.step_sequences += plan.size
        stats.largest_batch = max(stats.largest_batch, plan.size)
        stats.free_tokens += len(plan.ready)
        for sequence, start, stop, _ in plan.parts:
            fed = max(0, min(stop, sequence.first_scored) - start)
            stats.prefilled_tokens += fed - (not sequence.is_scoring and bool(sequence.logprobs))
        for sequence in self._scheduler.admitted:
            waited = now - sequence.arrived
            stats.cached_tokens += sequence.cached_tokens
            stats.queue_seconds += waited
            stats.longest_queue_seconds = max(stats.longest_queue_seconds, waited)
        self._scheduler.admitted.clear()

    def stats(self) -> LoopStats:
        """The counters now."""
        pool, tree = self._scheduler.pool, self._scheduler.tree
        return replace(
            self._stats,
            in_flight=self._scheduler.num_unfinished,
            kv_used=pool.used,
            kv_locked=pool.used - tree.evictable,
            kv_peak=pool.peak,
            preempted=self._scheduler.num_preempted,
            evicted_tokens=self._scheduler.num_evicted,
        )

    def _report(self) -> None:
        replies, self._replies = tuple(self._replies), []
        self._told = perf_counter()
        self._tell(Report(replies, self.stats()))


def is_out_of_memory(error: Exception) -> bool:
    """Whether numpy, torch or a GPU's allocator refused; torch on a CPU says so in words only."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
