"""The state of one request in the step loop: its ids, its slots in the cache, its results so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atts.core import Ending, SampleRequest, ScoreRequest, TokenIds
from atts.local.cache import PrefixNode
from atts.models.tokenizers import StopMatcher
from atts.sampling import uniforms

_PRIORITY_STEP = 256
"""The number of earlier requests that one step of priority overtakes. It is finite, so that no
request waits forever.
"""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The loop's table of tokens: the bytes of each token id, and the ids that end a text."""

    pieces: tuple[bytes, ...]
    end_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of a request: its ids, its slots in the cache, and its results so far."""

    request_id: int
    request: SampleRequest | ScoreRequest
    # smaller goes first; fixed at arrival, so an old request comes before all newer ones in the end
    order: tuple[int, int]
    arrived: float
    ids: list[int]  # the given ids, then the generated ones
    max_slots: int  # most tokens that will ever need a slot
    # index of the first token without a known score; for sampling, an index past the end
    first_scored: int
    uniforms: NDArray[np.float64] | None = None
    stop: StopMatcher | None = None
    model: int = 0  # index of the model in a loop with several models
    logprobs: list[float] = field(default_factory=list[float])
    # set by the scheduler
    rope_row: int = 0  # row of position 0 in the tables of angles
    row: int = -1  # row in the slot table; -1 while waiting
    node: PrefixNode | None = None  # deepest node on which the sequence has a lock
    num_computed: int = 0  # tokens whose keys and values are cached
    # number of leading slots of the row that belong to the prefix tree; the other slots are the
    # sequence's own
    num_shared: int = 0
    capacity: int = 0  # number of slots in the row
    cached_tokens: int = 0
    # logits after the last cached token, if the prefix tree has them
    cached_logits: Tensor | None = None
    # whether only the newest token has to be fed; set by the loop, cleared by preemption
    is_decoding: bool = False
    is_finished: bool = False  # whether it is finished or cancelled
    num_admissions: int = 0  # number of times that it got a row; more than one if it was preempted
    # the completion that is drawn along the text that this sequence scores; it is not scheduled
    # itself
    drawn: Sequence | None = None
    ended: Ending | None = None  # why the drawn completion ended, if it did

    @property
    def kind(self) -> int:
        """Return a number that differs between sequences that cannot share keys and values.
        Sequences cannot share them if their models or rotary frequencies differ.
        """
        return self.kind_of(self.model)

    def kind_of(self, model: int) -> int:
        """Return the kind that this sequence would have with another model."""
        return 2 * model + (self.rope_row > 0)

    @property
    def is_scoring(self) -> bool:
        """Return whether the given ids are scored instead of continued."""
        return self.uniforms is None

    @property
    def wants_entropies(self) -> bool:
        """Return whether the request wants entropies instead of log-probabilities."""
        return isinstance(self.request, ScoreRequest) and self.request.entropies

    def begin_scores(self, known: list[float]) -> None:
        """Begin scoring at the first token without a known log-probability; `known` are the values
        before it.
        """
        assert isinstance(self.request, ScoreRequest), "only given ids are scored"
        self.logprobs = known
        self.first_scored = len(self.request.prefix) + len(known)


def new_sequence(
    request_id: int,
    request: SampleRequest | ScoreRequest,
    arrived: float,
    pieces: tuple[bytes, ...] = (),
) -> Sequence:
    """Return the state of a new request, with the uniform numbers for its draws."""
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
        max_slots=total - 1,  # the last token is never fed
        first_scored=total,
        uniforms=_uniforms(request),
        stop=_stop_matcher(request, pieces) if request.stop else None,
    )


def ending(
    sequence: Sequence, token: int, pieces: tuple[bytes, ...], end_ids: frozenset[int]
) -> Ending | None:
    """Return why the sequence ends with its newest token, or None if it continues."""
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampled sequences grow"
    if token in end_ids:
        return "end"
    if token in request.stop_ids:
        return "delimiter"
    if sequence.stop is not None and token < len(pieces) and sequence.stop.feed(pieces[token]):
        return "delimiter"
    return "length" if len(sequence.logprobs) == request.max_tokens else None


def going_on(sequence: Sequence, tokens: TokenIds, table: TokenTable) -> int:
    """Count the tokens from the first one on that can be appended before one ends the sequence."""
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampled sequences grow"
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
    """Return a matcher for the stop strings, which has already read the text written before."""
    matcher = StopMatcher(request.stop)
    for token in request.ids[len(request.ids) - request.num_begun :]:
        matcher.feed(pieces[token] if token < len(pieces) else b"")
    return matcher
