"""The step loop, which takes commands, and schedules, runs and commits one step after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atts.core import Beginning, SampleRequest
from atts.errors import EngineUnavailable
from atts.local.batch import (
    Bursts,
    Draws,
    PrefillChunk,
    Sequence,
    StepBatches,
    StepPlan,
    TokenTable,
    ending,
    new_sequence,
)
from atts.local.devices import is_out_of_memory
from atts.local.logit_sampling import (
    SamplingBatch,
    batch_sampling,
    negative_entropies,
    spread_rows,
)
from atts.local.messages import (
    Cancel,
    Close,
    Command,
    FailureKind,
    FailureReply,
    Inbox,
    LoopReport,
    LoopStats,
    Reply,
    SampleReply,
    ScoreReply,
    ShareCores,
    Submit,
)
from atts.local.proposals import Proposals
from atts.local.scheduler import Scheduler
from atts.local.seams import Model

_NOT_NUMBERS = (
    "the model's logits are NaN",
    "Check the weights, or try float32 if the model runs in half precision",
)
_batch_sampling = lru_cache(256)(batch_sampling)
# Entropies are computed for at most this many rows at once. With a vocabulary of 152,000 tokens,
# the logits of these rows take 39 MB in float64.
_ENTROPY_ROWS = 32
_REPORT_SECONDS = 0.2
"""Seconds after which a running loop reports its counters even if no request has finished."""


ScoredChunk = tuple[PrefillChunk, list[float], Tensor | None]


class StepResults(NamedTuple):
    """The results of one step, before they are added to the sequences."""

    sampled: list[Draws]
    # logits after the last token of each prompt that this step fed to its end
    started: dict[Sequence, Tensor]
    scored: list[ScoredChunk]
    # score of a text's first token, for each text whose first score came from cached logits without
    # a forward pass
    firsts: list[tuple[Sequence, float]]
    drawn: list[DrawnTokens]  # tokens that the model drew at the positions of texts to score


class StepLoop:
    """A loop that runs steps with a scheduler and a model, in one thread, until it is closed."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        token_table: TokenTable,
        send: Callable[[LoopReport], None],
        proposals: Proposals | None = None,
        *,
        bursts: Bursts | None = None,
    ) -> None:
        """Create a loop. If `bursts` is given, it may merge several plain steps into one."""
        self._model = model
        self._scheduler = scheduler
        self._token_table = token_table
        self._send = send
        self._proposals = proposals or Proposals(scheduler)
        self._bursts = bursts
        self._stats = LoopStats()
        self._replies: list[Reply] = []
        self._reported_at = 0.0
        self._sampling: tuple[list[Sequence], SamplingBatch] = ([], batch_sampling([], 1))
        self._batches = StepBatches()
        self._is_closing = False
        # sets the number of threads when other loops open, close, or change between busy and idle;
        # the builder of the loop replaces this function
        self.share_cores: Callable[[ShareCores], None] = lambda shared: None

    def run(self, inbox: Inbox) -> None:
        """Run steps while there are requests, and wait for commands while there are none. Return
        after the command to close.
        """
        while True:
            if not self._scheduler.num_unfinished:
                self._report()
            self._handle(inbox.take(wait=not self._scheduler.num_unfinished))
            if self._is_closing:
                return
            if self._scheduler.num_unfinished:
                self.step()
            if self._replies or perf_counter() - self._reported_at > _REPORT_SECONDS:
                self._report()

    def step(self) -> None:
        """Run one step with the sequences that the scheduler chooses."""
        began = perf_counter()
        plan = self._scheduler.schedule()
        self._count(plan, began)
        self._proposals.propose(plan)
        self._attempt(plan)
        self._stats.busy_seconds += perf_counter() - began
        self._proposals.observed(plan)

    def fail_all(self, failure: FailureReply) -> None:
        """Send a failure to all callers; afterwards, the loop serves no more requests."""
        self._replies.append(failure)
        self._report()

    def _handle(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._take(command)

    def _take(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel(request_id):
                self._stats.cancelled += self._scheduler.cancel(request_id)
            case ShareCores():
                self.share_cores(command)
            case Close():
                self._is_closing = True
            case _:
                raise AssertionError(f"a loop has no command {command!r}")

    def _submit(self, command: Submit) -> None:
        self._stats.requests += 1
        try:
            self._scheduler.add(self._new_sequence(command))
        except Exception as error:  # noqa: BLE001  reported to this request's caller alone
            problem = f"the engine cannot take this request ({type(error).__name__}: {error})"
            failure = FailureReply(command.request_id, "broken", problem, "Other requests continue")
            self._replies.append(failure)
            self._stats.failed += 1

    def _new_sequence(self, command: Submit) -> Sequence:
        pieces = self._token_table.pieces
        sequence = new_sequence(command.request_id, command.request, perf_counter(), pieces)
        sequence.model = command.model
        return sequence

    def _attempt(self, plan: StepPlan) -> None:
        """Run a plan and commit its results. If this fails, try again without proposals. If memory
        still runs out, make later steps smaller. After any other failure, run each half of the plan
        separately, so that in the end only the request that causes the failure fails.
        """
        if not plan.size:
            return
        try:
            results = self._run(plan)
        # A process that computes a part of the model has ended, so no later step can succeed.
        except EngineUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  reported to the callers whose requests it concerns
            if plan.proposals:
                self._proposals.give_way(plan, shorten=is_out_of_memory(error))
                self._attempt(plan)
            elif is_out_of_memory(error):
                self._shrink()
            elif plan.size > 1:
                for half in plan.halves():
                    self._attempt(half)
            else:
                self._break(plan.sequences()[0], error)
        else:
            self._commit(plan, results)

    def _run(self, plan: StepPlan) -> StepResults:
        """Feed the plan's tokens to the model, then sample and score. The sequences do not change
        before `_commit`.
        """
        steps = 1 if self._bursts is None else self._bursts.turns(plan)
        if steps > 1:
            return self._run_several(plan, steps)
        hidden = self._forward(plan) if plan.decoding or plan.prefills else None
        started = plan.started()
        chunks = plan.scored()
        sequences = plan.ready + plan.decoding + started
        # number of rows of `hidden` from which tokens are sampled; rows for scoring follow them
        count = plan.num_rows + len(started)
        logits = self._sampling_logits(plan.ready, hidden, count)
        sampled = self._sample(sequences, plan.widths(), logits) if sequences else []
        first_logits = dict(zip(started, logits[len(logits) - len(started) :], strict=True))
        firsts = self._score_first_tokens(chunks)
        if hidden is None or not chunks:
            return StepResults(sampled, first_logits, [], firsts, [])
        scored = self._score(chunks, hidden[count:])
        drawn = list(draw_scored(self._model, chunks, hidden[count:]))
        return StepResults(sampled, first_logits, scored, firsts, drawn)

    def _run_several(self, plan: StepPlan, steps: int) -> StepResults:
        """Run several steps merged into a burst. The logits in the result are those after the
        burst's first step.
        """
        assert self._bursts is not None, "only an engine with bursts may run several steps at once"
        batch = self._batches.of(plan, self._scheduler.table)
        drawn, logits = self._bursts.draw(plan, batch, steps)
        more = len(drawn[0][1]) - 1
        self._stats.steps += more
        self._stats.step_sequences += more * plan.size
        started = dict(zip(plan.started(), logits[len(plan.decoding) :], strict=True))
        return StepResults(drawn, started, [], [], [])

    def _forward(self, plan: StepPlan) -> Tensor:
        """Run the model on the plan's tokens, and return the hidden states of the rows that need
        logits.
        """
        table = self._scheduler.table
        return self._model.forward(self._batches.of(plan, table), table)

    def _commit(self, plan: StepPlan, results: StepResults) -> None:
        """Add a step's results to its sequences. If this raises an error for one sequence, only
        this sequence fails.
        """
        for sequence in plan.decoding:
            sequence.num_computed += 1
        for chunk in plan.prefills:
            chunk.sequence.num_computed = chunk.stop
        for sequence, tokens, logprobs in results.sampled:
            if len(tokens) == 1 and sequence.is_decoding:
                self._guarded(sequence, self._append, (tokens[0], logprobs[0]))
            else:
                outcome = tokens, logprobs, results.started.get(sequence)
                self._guarded(sequence, self._commit_sampled, outcome)
        for sequence, value in results.firsts:
            sequence.logprobs.append(value)
        self._stats.free_tokens += len(results.firsts)
        for draws in results.drawn:
            table = self._token_table
            self._guarded(draws.sequence, extend_drawn, (draws, table.pieces, table.end_ids))
        for chunk, logprobs, last in results.scored:
            self._guarded(chunk.sequence, self._commit_scores, (logprobs, last))

    def _guarded(
        self, sequence: Sequence, commit: Callable[..., object], results: tuple[object, ...]
    ) -> None:
        try:
            commit(sequence, *results)
        except Exception as error:
            # The error came from releasing the sequence's cache slots, so the cache may be
            # inconsistent.
            if sequence.is_finished:
                raise
            self._break(sequence, error)

    def _break(self, sequence: Sequence, error: Exception) -> None:
        problem = f"the step of this request failed ({type(error).__name__}: {error})"
        self._fail(
            sequence,
            "broken",
            problem,
            "Other requests continue; if every request fails like this, restart the engine",
        )

    def _sampling_logits(self, ready: list[Sequence], hidden: Tensor | None, count: int) -> Tensor:
        """Return the logits from which to sample: the cached logits of ready sequences, then the
        logits of the first `count` rows of `hidden`.
        """
        cached = [
            sequence.cached_logits for sequence in ready if sequence.cached_logits is not None
        ]
        assert len(cached) == len(ready), (
            "a sequence that is sampled without a forward pass must have cached logits"
        )
        parts = [torch.stack(cached)] if cached else []
        if hidden is not None and count:
            parts.append(self._model.compute_logits(hidden[:count]))
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sample(self, sequences: list[Sequence], widths: list[int], logits: Tensor) -> list[Draws]:
        """Sample one token per row of logits, with the uniform random number for the row's
        position. A sequence with a proposal has several rows.
        """
        sampling = self._sampling_batch(sequences, logits)
        if logits.shape[0] == len(sequences):
            ones = [s.uniforms.item(len(s.logprobs)) for s in sequences if s.uniforms is not None]
            drawn, raw = self._model.sample(logits, sampling, ones).lists()
            return [
                (s, [token], [value]) for s, token, value in zip(sequences, drawn, raw, strict=True)
            ]
        rows = torch.from_numpy(np.repeat(np.arange(len(sequences)), widths))
        uniforms = list[float]()
        for sequence, width in zip(sequences, widths, strict=True):
            assert sequence.uniforms is not None, "only sampling requests draw tokens"
            written = len(sequence.logprobs)
            uniforms += sequence.uniforms[written : written + width].tolist()
        drawn, raw = self._model.sample(logits, spread_rows(sampling, rows), uniforms).lists()
        tokens = iter(drawn)
        values = iter(raw)
        return [
            (s, list(islice(tokens, n)), list(islice(values, n)))
            for s, n in zip(sequences, widths, strict=True)
        ]

    def _sampling_batch(self, sequences: list[Sequence], logits: Tensor) -> SamplingBatch:
        """Return the sampling settings of these sequences as tensors. The tensors are reused as
        long as the sequences stay the same.
        """
        if sequences != self._sampling[0]:
            settings = tuple(
                [s.request.sampling for s in sequences if isinstance(s.request, SampleRequest)]
            )
            self._sampling = sequences, _batch_sampling(settings, logits.shape[-1], logits.device)
        return self._sampling[1]

    def _score(self, chunks: list[PrefillChunk], hidden: Tensor) -> list[ScoredChunk]:
        """Return for each chunk the scores of its tokens: log-probabilities, or negative entropies
        if the request wants them. If the request's suffix ends in the chunk, also return the logits
        after the suffix.
        """
        targets: list[int] = []
        ends: list[int] = []
        firsts = [0]
        for chunk in chunks:
            ids = chunk.sequence.ids
            targets += ids[chunk.logits_from + 1 : chunk.stop + 1]
            if chunk.stop == len(ids):
                ends.append(len(targets))
                # `Model.score` needs a token for each row, but no token follows the end of the
                # text. This score is not used.
                targets.append(0)
            firsts.append(len(targets))
        values, kept = self._model.score(hidden, targets, ends)
        for chunk, first, stop in zip(chunks, firsts[:-1], firsts[1:], strict=True):
            if chunk.sequence.wants_entropies:
                values[first:stop] = self._entropies(hidden[first:stop])
        last = dict(zip(ends, kept, strict=True))
        return [
            (chunk, values[first:stop], last.get(stop - 1))
            for chunk, first, stop in zip(chunks, firsts[:-1], firsts[1:], strict=True)
        ]

    def _entropies(self, hidden: Tensor) -> list[float]:
        """Return the negative entropy of each row's distribution. The logits are computed for a few
        rows at a time, to save memory.
        """
        values: list[float] = []
        for first in range(0, len(hidden), _ENTROPY_ROWS):
            rows = hidden[first : first + _ENTROPY_ROWS]
            values += negative_entropies(self._model.compute_logits(rows)).tolist()
        return values

    def _commit_sampled(
        self, sequence: Sequence, tokens: list[int], logprobs: list[float], started: Tensor | None
    ) -> None:
        """Append the sampled tokens that are accepted. If the prompt is complete after this step,
        first cache the prompt and the logits after it, so that sibling rollouts can use them.
        """
        if started is not None and not math.isnan(logprobs[0]):
            self._cache(sequence, started)
        accepted = self._proposals.verify(sequence, tokens) if len(tokens) > 1 else 0
        for place in range(accepted + 1):
            # the keys and values of the token before this one are cached: it was an accepted
            # proposal or part of a burst
            sequence.num_computed += place > 0
            if not self._append(sequence, tokens[place], logprobs[place]):
                break

    def _append(self, sequence: Sequence, token: int, logprob: float) -> bool:
        """Append a token, and return whether the sequence continues. If the sequence ends, queue
        its reply and release its slots.
        """
        if math.isnan(logprob):
            self._fail(sequence, "broken", *_NOT_NUMBERS)
            return False
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        self._stats.sampled_tokens += 1
        ended = ending(sequence, token, self._token_table.pieces, self._token_table.end_ids)
        sequence.is_decoding = ended is None
        if ended is not None:
            ids = tuple(sequence.ids[-len(sequence.logprobs) :])
            own = tuple(sequence.logprobs)
            self._replies.append(
                SampleReply(sequence.request_id, ids, ended, own, sequence.cached_tokens)
            )
            self._scheduler.finish(sequence)
        return ended is None

    def _score_first_tokens(self, chunks: list[PrefillChunk]) -> list[tuple[Sequence, float]]:
        """Return the score of each suffix's first token. Suffixes are left out if the logits before
        this token are not cached.
        """
        known = [
            (chunk.sequence, chunk.sequence.cached_logits)
            for chunk in chunks
            if chunk.start == chunk.sequence.first_scored
            and chunk.sequence.cached_logits is not None
        ]
        if not known:
            return []
        tokens = [sequence.ids[sequence.first_scored] for sequence, _ in known]
        rows = torch.stack([logits for _, logits in known])
        values = self._model.logprobs(rows, tokens)
        for index, (sequence, _) in enumerate(known):
            if sequence.wants_entropies:
                values[index] = negative_entropies(rows[index : index + 1]).item()
        return [(sequence, value) for (sequence, _), value in zip(known, values, strict=True)]

    def _commit_scores(
        self, sequence: Sequence, logprobs: list[float], last: Tensor | None
    ) -> None:
        """Add a chunk's scores to its sequence. If the suffix is complete, `last` contains the
        logits after it, and the reply is queued.
        """
        sequence.logprobs += logprobs if last is None else logprobs[:-1]
        if math.isnan(sum(sequence.logprobs)):
            self._fail(sequence, "broken", *_NOT_NUMBERS)
        elif last is not None:
            self._cache(sequence, last)
            self._stats.scored_tokens += len(sequence.logprobs)
            scores = tuple(sequence.logprobs)
            drawn = beginning(sequence)
            self._replies.append(
                ScoreReply(sequence.request_id, scores, sequence.cached_tokens, drawn)
            )
            self._scheduler.finish(sequence)

    def _cache(self, sequence: Sequence, logits: Tensor) -> None:
        """Add the computed part of a sequence to the prefix tree, so that other requests can start
        from it. Also store `logits`, which follow its last token, so that these requests need not
        compute that token again.
        """
        node = self._scheduler.cache_prefix(sequence)
        self._scheduler.tree.keep_logits(node, logits.clone())
        if sequence.is_scoring and not sequence.wants_entropies:
            self._scheduler.tree.keep_scores(node, sequence.logprobs)

    def _fail(self, sequence: Sequence, kind: FailureKind, problem: str, advice: str) -> None:
        self._replies.append(FailureReply(sequence.request_id, kind, problem, advice))
        self._scheduler.finish(sequence, cache="drop")
        self._stats.failed += 1

    def _shrink(self) -> None:
        """Make all later steps smaller, because memory ran out. If steps cannot get smaller, fail
        the running requests.
        """
        self._stats.shrunk += 1
        if self._scheduler.shrink():
            return
        advice = "Lower kv_tokens, max_batch or chunk_tokens, or use a smaller model"
        for sequence in self._scheduler.running():
            self._fail(sequence, "memory", "a step does not fit into memory", advice)

    def _count(self, plan: StepPlan, now: float) -> None:
        stats = self._stats
        stats.steps += 1
        stats.step_sequences += plan.size
        stats.largest_batch = max(stats.largest_batch, plan.size)
        stats.free_tokens += len(plan.ready)
        for sequence, start, stop, _ in plan.prefills:
            fed = max(0, min(stop, sequence.first_scored) - start)
            stats.prefilled_tokens += fed - (not sequence.is_scoring and bool(sequence.logprobs))
        for sequence in self._scheduler.newly_admitted:
            waited = now - sequence.arrived
            stats.cached_tokens += sequence.cached_tokens
            stats.free_tokens += len(sequence.logprobs) if sequence.is_scoring else 0
            stats.queue_seconds += waited
            stats.longest_queue_seconds = max(stats.longest_queue_seconds, waited)
        self._scheduler.newly_admitted.clear()

    def stats(self) -> LoopStats:
        """Return a copy of the current counters."""
        store = self._scheduler.store
        return replace(
            self._stats,
            in_flight=self._scheduler.num_unfinished,
            kv_used=store.num_used,
            kv_locked=self._scheduler.num_locked,
            kv_peak=store.peak_used,
            preempted=self._scheduler.num_preempted,
            evicted_tokens=self._scheduler.num_evicted,
            speculation=self._proposals.report(),
        )

    def _report(self) -> None:
        replies = tuple(self._replies)
        self._replies = []
        self._reported_at = perf_counter()
        self._send(LoopReport(replies, self.stats()))


class DrawnTokens(NamedTuple):
    """Tokens that the model sampled at consecutive positions of a text to score. Each token is
    sampled given the text before its position.
    """

    sequence: Sequence  # sequence whose text is scored
    first: int  # index in the text of the first of these positions; 0 is the text's first token
    tokens: list[int]
    logprobs: list[float]


def draw_scored(model: Model, chunks: list[PrefillChunk], hidden: Tensor) -> Iterator[DrawnTokens]:
    """Sample a token at every position of the chunks whose request also wants a completion. At each
    position, use the random number that an ordinary sampling request would use there.
    """
    row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        rows = hidden[row : row + chunk.stop - chunk.logits_from]
        row += len(rows)
        drawn = sequence.drawn
        request = drawn.request if drawn else None
        if (
            drawn is None
            or drawn.is_finished
            or drawn.uniforms is None
            or not isinstance(request, SampleRequest)
        ):
            continue
        logits = model.compute_logits(rows)
        first = chunk.logits_from + 1 - sequence.first_scored
        if first == 1 and sequence.cached_logits is not None:
            logits = torch.cat([sequence.cached_logits[None].to(logits.device), logits])
            first = 0
        uniforms = drawn.uniforms[first : first + len(logits)].tolist()
        logits = logits[: len(uniforms)]
        batch = batch_sampling([request.sampling], logits.shape[-1], logits.device)
        sampled = model.sample(
            logits, spread_rows(batch, torch.zeros(len(uniforms), dtype=torch.int64)), uniforms
        )
        yield DrawnTokens(sequence, first, *sampled.lists())


def extend_drawn(
    sequence: Sequence, draws: DrawnTokens, pieces: tuple[bytes, ...], end_ids: frozenset[int]
) -> None:
    """Append the sampled tokens to the completion of a scoring request. Stop after the first token
    that differs from the scored text or ends the completion.
    """
    _, first, tokens, logprobs = draws
    drawn = sequence.drawn
    text = sequence.ids[sequence.first_scored :]
    assert drawn is not None, (
        "tokens may be sampled while scoring only if the request asks for a completion"
    )
    for place in range(len(drawn.logprobs), first + len(tokens)):
        token = tokens[place - first]
        drawn.ids.append(token)
        drawn.logprobs.append(logprobs[place - first])
        drawn.ended = ending(drawn, token, pieces, end_ids)
        drawn.is_finished = drawn.ended is not None or place >= len(text) or token != text[place]
        if drawn.is_finished:
            return


def beginning(sequence: Sequence) -> Beginning | None:
    """Return the sampled beginning of a scoring request's completion, or None if it is empty."""
    drawn = sequence.drawn
    if drawn is None or not drawn.logprobs:
        return None
    return Beginning(tuple(drawn.ids[-len(drawn.logprobs) :]), tuple(drawn.logprobs), drawn.ended)
