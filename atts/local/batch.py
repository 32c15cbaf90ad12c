"""The work of one step: the scheduler's plan, and the flat arrays that are fed to a model.

The first part of the file defines the state of a request: its ids, its slots in the cache, and its
results so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atts.core import Ending, SampleRequest, ScoreRequest, TokenIds
from atts.local.cache import PrefixNode, SlotIds
from atts.models.tokenizers import StopMatcher
from atts.sampling import uniforms

_PRIORITY_STEP = 256
"""The number of earlier requests that a request may overtake per unit of priority. The number is
limited, so that no request waits forever. A smaller priority number means a higher priority.
"""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The vocabulary as a step loop needs it: the bytes of each token id, and the ids of the end
    tokens.
    """

    pieces: tuple[bytes, ...]
    end_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of a request: its token ids, its slots in the KV cache, and its results so far."""

    request_id: int
    request: SampleRequest | ScoreRequest
    # Requests with a smaller `order` run first. The order is fixed on arrival, so every request
    # eventually comes before all newer requests.
    order: tuple[int, int]
    arrived: float
    ids: list[int]  # token ids of the request, followed by the generated token ids
    max_slots: int  # largest number of cache slots that the sequence can need, one slot per token
    # index in `ids` of the first token to score; a sampling request scores no token, so its index
    # is past the end
    first_scored: int
    uniforms: NDArray[np.float64] | None = None
    stop: StopMatcher | None = None
    model: int = 0  # index of the model that serves the request, if the loop has several models
    logprobs: list[float] = field(default_factory=list[float])
    # The scheduler sets the fields from here to `cached_logits`. Only `num_computed` is also
    # increased by the step loop.
    rope_row: int = 0  # row of position 0 in the table of rotary angles; above 0 in long requests
    row: int = -1  # index of the sequence's row in the slot table; -1 while the request waits
    # prefix-tree node where the shared prefix of this sequence ends; locked against eviction
    node: PrefixNode | None = None
    num_computed: int = 0  # number of tokens whose keys and values are in the KV cache
    # The first `num_shared` slots of the row belong to the prefix tree. This sequence owns the
    # other slots of the row.
    num_shared: int = 0
    capacity: int = 0  # number of slots in the sequence's row, including shared slots
    cached_tokens: int = 0
    # logits after the last id of the request, if all ids were cached and the prefix tree has these
    # logits
    cached_logits: Tensor | None = None
    # True if a step has to feed only the newest token. The loop sets this flag, and preemption
    # clears it.
    is_decoding: bool = False
    is_finished: bool = False  # whether the sequence is finished or cancelled
    # number of times that the scheduler gave the sequence a row; above 1 if it was preempted
    num_admissions: int = 0
    # While this sequence scores a text, the engine may also draw tokens after that text. They are
    # collected in a separate sequence, `drawn`, which is hidden from the scheduler.
    drawn: Sequence | None = None
    # for a completion that is drawn while a text is scored: the reason why it ended, or None while
    # it has not ended
    ended: Ending | None = None

    @property
    def kind(self) -> int:
        """Return a number that identifies the sequence's model and rotary frequencies. Only
        sequences with the same number can share keys and values.
        """
        return self.kind_of(self.model)

    def kind_of(self, model: int) -> int:
        """Return the `kind` that this sequence would have if the model with index `model` computed
        it.
        """
        return 2 * model + (self.rope_row > 0)

    @property
    def is_scoring(self) -> bool:
        """Return whether the request scores its token ids; otherwise, it samples a continuation of
        them.
        """
        return self.uniforms is None

    @property
    def wants_entropies(self) -> bool:
        """Return whether the request wants entropies instead of log-probabilities."""
        return isinstance(self.request, ScoreRequest) and self.request.entropies

    def begin_scores(self, known: list[float]) -> None:
        """Start scoring the request's suffix. `known` lists the log-probabilities of the suffix's
        first tokens, which are not computed again.
        """
        assert isinstance(self.request, ScoreRequest), "only scoring requests have ids to score"
        self.logprobs = known
        self.first_scored = len(self.request.prefix) + len(known)


def new_sequence(
    request_id: int,
    request: SampleRequest | ScoreRequest,
    arrived: float,
    pieces: tuple[bytes, ...] = (),
) -> Sequence:
    """Return the initial state of a request, with the uniform random numbers for sampling its
    tokens.
    """
    order = (request_id + request.priority * _PRIORITY_STEP, request_id)
    if isinstance(request, ScoreRequest):
        ids = [*request.prefix, *request.suffix]
        scored_from = len(request.prefix)
        drawn = new_sequence(request_id, request.draw, arrived, pieces) if request.draw else None
        return Sequence(
            request_id,
            request,
            order,
            arrived,
            ids,
            len(ids),
            first_scored=scored_from,
            drawn=drawn,
        )
    total = len(request.ids) + request.max_tokens
    return Sequence(
        request_id,
        request,
        order,
        arrived,
        ids=list(request.ids),
        max_slots=total - 1,  # the last token is never fed to the model, so it needs no slot
        first_scored=total,
        uniforms=_uniforms(request),
        stop=_stop_matcher(request, pieces) if request.stop else None,
    )


def ending(
    sequence: Sequence, token: int, pieces: tuple[bytes, ...], end_ids: frozenset[int]
) -> Ending | None:
    """Return the reason why the sequence ends with `token`, its newest token; None if it continues.
    Also pass the token to the sequence's stop-string matcher.
    """
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampling requests get new tokens"
    if token in end_ids:
        return "end"
    if token in request.stop_ids:
        return "delimiter"
    if sequence.stop is not None and token < len(pieces) and sequence.stop.feed(pieces[token]):
        return "delimiter"
    return "length" if len(sequence.logprobs) == request.max_tokens else None


def going_on(sequence: Sequence, tokens: TokenIds, table: TokenTable) -> int:
    """Return how many of the tokens come before the first token that ends the answer."""
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampling requests get new tokens"
    ends = (
        at for at, token in enumerate(tokens) if token in table.end_ids or token in request.stop_ids
    )
    count = next(ends, len(tokens))
    if sequence.stop is None:
        return count
    known = len(table.pieces)
    return sequence.stop.going_on(
        [table.pieces[each] if each < known else b"" for each in tokens[:count]]
    )


def _uniforms(request: SampleRequest) -> NDArray[np.float64]:
    if request.sampling.temperature == 0:
        return np.zeros(request.max_tokens)
    return uniforms(request.seed, request.num_begun + request.max_tokens)[request.num_begun :]


def _stop_matcher(request: SampleRequest, pieces: tuple[bytes, ...]) -> StopMatcher:
    """Return a matcher for the stop strings. It has already read the beginning of the answer, which
    is part of the request's ids.
    """
    matcher = StopMatcher(request.stop)
    for token in request.ids[len(request.ids) - request.num_begun :]:
        matcher.feed(pieces[token] if token < len(pieces) else b"")
    return matcher


Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Draws = tuple[Sequence, list[int], list[float]]
"""The result of sampling for one sequence in one step: the sequence, its sampled tokens, and the
log-probability of each token.
"""
MANY = 4
"""Smallest number of tokens in a step for which the attention of a sequence is computed by the
kernel for many rows. For fewer tokens, a model may use another kernel.
"""


class PrefillChunk(NamedTuple):
    """A range of a request's token ids that one step feeds, from index `start` up to, but not
    including, `stop`.
    """

    sequence: Sequence
    start: int
    stop: int
    # first position of this chunk whose logits are needed for sampling, scoring or the cache;
    # `stop` if none is needed
    logits_from: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The sequences that one step computes, in three lists. Sequences in `decoding` feed their
    newest token and any proposed tokens. Chunks in `prefills` feed some of a request's ids, and
    sequences in `ready` feed nothing.
    """

    decoding: list[Sequence]
    prefills: list[PrefillChunk]  # chunks with a single token come first
    # sequences that are sampled without a forward pass, because all their ids and the logits after
    # the last id are cached
    ready: list[Sequence]
    # for each sequence in `decoding`, the tokens proposed for it; empty in a step without proposals
    proposals: list[TokenIds]

    @property
    def size(self) -> int:
        """Return the number of sequences in the step."""
        return len(self.decoding) + len(self.prefills) + len(self.ready)

    def sequences(self) -> list[Sequence]:
        """Return the sequences in the step: first the ready sequences, then the decoding ones, then
        the sequences of the prefill chunks.
        """
        return [*self.ready, *self.decoding, *(chunk.sequence for chunk in self.prefills)]

    def halves(self) -> Iterator[StepPlan]:
        """Yield two plans without proposals: each has half of this plan's sequences. The second
        plan omits sequences that lost their row in the slot table while the first plan ran.
        """
        sequences = self.sequences()
        for part in (sequences[: self.size // 2], sequences[self.size // 2 :]):
            chosen = {sequence for sequence in part if sequence.row >= 0}
            yield StepPlan(
                [sequence for sequence in self.decoding if sequence in chosen],
                [chunk for chunk in self.prefills if chunk.sequence in chosen],
                [sequence for sequence in self.ready if sequence in chosen],
                [],
            )

    @property
    def num_rows(self) -> int:
        """Return the number of tokens that decoding sequences feed, including proposed tokens."""
        return len(self.decoding) + sum(map(len, self.proposals))

    def widths(self) -> list[int]:
        """Return for each sequence the number of positions at which this step samples a token.
        Ready sequences come first, then decoding sequences, then those whose prompt ends in this
        step.
        """
        spans = [1 + len(proposal) for proposal in self.proposals] or [1] * len(self.decoding)
        return [1] * len(self.ready) + spans + [1] * len(self.started())

    def spans(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield (sequence, position, token) for each token that a decoding sequence feeds."""
        for sequence, proposal in zip(self.decoding, self.proposals, strict=True):
            for position, token in enumerate((sequence.ids[-1], *proposal), sequence.num_computed):
                yield sequence, position, token

    def started(self) -> list[Sequence]:
        """Return the sampling sequences whose prompt is complete after this step."""
        return [
            c.sequence
            for c in self.prefills
            if c.logits_from < c.stop and not c.sequence.is_scoring
        ]

    def scored(self) -> list[PrefillChunk]:
        """Return the prefill chunks of scoring requests that need logits."""
        return [c for c in self.prefills if c.logits_from < c.stop and c.sequence.is_scoring]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step as flat arrays, one sequence after another. Sequences that feed a
    single token come first.

    Each layer writes the keys and values of all tokens to the cache before it computes any
    attention. So a sequence may read slots that another sequence fills in the same step.
    """

    tokens: Ints  # [tokens] token ids to feed
    positions: Ints  # [tokens] each token's row in the table of rotary angles
    slots: Ints  # [tokens] cache slot for each token's keys and values
    table_rows: Ints  # [sequences] each sequence's row in the slot table
    # [sequences + 1] index in `tokens` of each sequence's first token, then the number of tokens
    query_starts: Ints
    # [sequences] number of each sequence's tokens that are cached after this step
    context_lens: Ints
    # [sequences] number of rows of logits that each sequence needs; they belong to its last tokens
    num_logits: Ints
    num_single: int  # number of sequences that feed exactly one token; they come first
    # [logits] index in `tokens` of each token whose hidden state the model returns
    logit_rows: Ints
    # The chunks to score come last in the batch. The first number counts their tokens, and the
    # second one counts their rows of logits.
    num_scored: tuple[int, int] = (0, 0)
    # [sequences] index of the model that computes each sequence; empty if the loop has one model
    models: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class Bursts(Protocol):
    """An interface for bursts. A burst merges several plain steps into one, and samples the same
    tokens as these steps.
    """

    def turns(self, plan: StepPlan) -> int:
        """Return how many steps may be merged into a burst; 1 means that no steps can be merged."""
        ...

    def draw(self, plan: StepPlan, batch: StepBatch, turns: int) -> tuple[list[Draws], Tensor]:
        """Run a burst. Return the sampled tokens, the same number for each sequence, and the logits
        after the burst's first step.
        """
        ...


def step_batch(plan: StepPlan, table: SlotIds) -> StepBatch:
    """Return the flat arrays of a planned step. In `logit_rows`, rows for sampling come before rows
    for scoring.

    A sequence with proposed tokens has several rows in the batch, one per token; all of them use
    the same row of the slot table. A row's result is the same as if the sequence's earlier rows had
    been computed in earlier steps. It has the same bits if the kernel computes each row separately.
    """
    fed = list(plan.spans()) if plan.proposals else _newest(plan.decoding)
    if not plan.prefills:
        return _decoding_batch(fed, table)
    ids = chain(
        [token for *_, token in fed], *[s.ids[start:stop] for s, start, stop, _ in plan.prefills]
    )
    numbers = [(s.row, at, at + 1, at, False, s.rope_row, s.model) for s, at, _ in fed]
    numbers += [
        (s.row, start, stop, first, s.is_scoring, s.rope_row, s.model)
        for s, start, stop, first in plan.prefills
    ]
    columns = np.array(numbers, dtype=np.int64).T.copy()
    rows, begins, lengths, logits_from, is_scoring, ropes, models = columns
    counts = lengths - begins
    num_logits = lengths - logits_from
    starts = np.zeros(len(numbers) + 1, dtype=np.int64)
    counts.cumsum(out=starts[1:])
    tokens = np.fromiter(ids, dtype=np.int64, count=int(starts[-1]))
    positions = np.arange(len(tokens)) + (begins - starts[:-1]).repeat(counts)
    sampled = starts[1:][(is_scoring == 0) & (num_logits > 0)] - 1
    num_scored = num_logits * is_scoring
    scored = np.arange(num_scored.sum()) + (starts[1:] - num_scored.cumsum()).repeat(num_scored)
    last = len(is_scoring) - int(is_scoring[::-1].cumprod().sum())
    return StepBatch(
        tokens=tokens,
        positions=positions + ropes.repeat(counts),
        slots=table.take((rows * table.shape[1]).repeat(counts) + positions).astype(np.int64),
        table_rows=rows,
        query_starts=starts,
        context_lens=lengths,
        num_logits=num_logits,
        num_single=int((counts == 1).sum()),
        logit_rows=np.concatenate([sampled, scored]),
        num_scored=(int(counts[last:].sum()), int(num_logits[last:].sum())),
        models=models,
    )


def picked(batch: StepBatch, entries: Ints) -> tuple[StepBatch, Ints, Ints]:
    """Return a smaller batch with the sequences at the indices `entries`. Also return two index
    arrays: they say which rows and which logit rows of `batch` the smaller batch has. In `entries`,
    sequences that feed a single token must come first.
    """
    begins = batch.query_starts[entries]
    counts = batch.query_starts[entries + 1] - begins
    starts = np.zeros(len(entries) + 1, dtype=np.int64)
    counts.cumsum(out=starts[1:])
    rows = np.arange(starts[-1]) + (begins - starts[:-1]).repeat(counts)
    where = np.full(len(batch.tokens), -1)
    where[rows] = np.arange(len(rows))
    where = where[batch.logit_rows]
    logits = (where >= 0).nonzero()[0]
    part = StepBatch(
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        table_rows=batch.table_rows[entries],
        query_starts=starts,
        context_lens=batch.context_lens[entries],
        num_logits=batch.num_logits[entries],
        num_single=int((counts == 1).sum()),
        logit_rows=where[logits],
        models=batch.models[entries] if len(batch.models) else batch.models,
    )
    return part, rows, logits


def part_of(batch: StepBatch, entries: Ints) -> tuple[StepBatch, Ints, Ints]:
    """Return a batch with the sequences at the ascending indices `entries`. Also return two index
    arrays: they say which rows and which logit rows of `batch` it has. If all sequences are chosen,
    return `batch` itself.
    """
    if len(entries) < len(batch.table_rows):
        return picked(batch, entries)
    return batch, np.arange(len(batch.tokens)), np.arange(len(batch.logit_rows))


_Fed = tuple[Sequence, int, int]
"""A row of a decoding step: the sequence, the position of the token to feed, and the token's id."""


def _newest(sequences: list[Sequence]) -> list[_Fed]:
    """Return one row per sequence; the row feeds the sequence's newest token."""
    return [(sequence, sequence.num_computed, sequence.ids[-1]) for sequence in sequences]


def _decoding_batch(fed: list[_Fed], table: SlotIds) -> StepBatch:
    """Return the batch of a step in which every row feeds one token, as in most steps."""
    numbers = [(s.row, s.rope_row, position, token, s.model) for s, position, token in fed]
    rows, ropes, positions, tokens, models = np.array(numbers, dtype=np.int64).T.copy()
    plain = single_rows(tokens, positions, rows, table)
    return replace(plain, positions=positions + ropes, models=models)


class StepBatches:
    """A builder of step batches. While the same sequences decode in each step, it updates the
    previous batch instead of building another.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Sequence], list[int], StepBatch] | None = None

    def of(self, plan: StepPlan, table: SlotIds) -> StepBatch:
        """Return the plan's batch, whose arrays the next call may overwrite."""
        if plan.proposals or not all(map(is_last, plan.prefills)):
            self._kept = None
            return step_batch(plan, table)
        sequences = plan.decoding + [chunk.sequence for chunk in plan.prefills]
        rows = [sequence.row for sequence in sequences]
        if self._kept is None or self._kept[:2] != (sequences, rows):
            self._kept = sequences, rows, _decoding_batch(_newest(sequences), table)
            return self._kept[2]
        batch = self._kept[2]
        positions = np.array([sequence.num_computed for sequence in sequences])
        batch.tokens[:] = [sequence.ids[-1] for sequence in sequences]
        np.add(positions, 1, out=batch.context_lens)
        np.add(positions, [sequence.rope_row for sequence in sequences], out=batch.positions)
        batch.slots[:] = table[rows, positions]
        return batch


def is_last(chunk: PrefillChunk) -> bool:
    """Return whether the chunk is only the last prompt token of a sampling request. Such a chunk
    can be computed like a decoding row.
    """
    sequence, start, stop, first = chunk
    return stop - start == 1 and first == start and not sequence.is_scoring


def single_rows(
    tokens: Ints, positions: Ints, rows: Ints, table: SlotIds, num_logits: Ints | None = None
) -> StepBatch:
    """Return a batch in which each row feeds one token. By default, every row needs logits."""
    count = len(tokens)
    starts = np.arange(count + 1)
    return StepBatch(
        tokens=tokens,
        positions=positions,
        slots=table[rows, positions].astype(np.int64),
        table_rows=rows,
        query_starts=starts,
        context_lens=positions + 1,
        num_logits=np.ones(count, dtype=np.int64) if num_logits is None else num_logits,
        num_single=count,
        logit_rows=starts[:-1] if num_logits is None else num_logits.nonzero()[0],
    )
