"""One request on its way through the step loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atts.core import Ending, SampleRequest, ScoreRequest
from atts.local.prefix import Node
from atts.seeds import uniforms
from atts.tokenizing import StopMatcher

_PRIORITY_STEP = 256
"""How many earlier requests one step of priority overtakes: finite, so that nobody waits for ever."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's ids, its place in the cache, and what has come of it so far."""

    ticket: int
    request: SampleRequest | ScoreRequest
    order: tuple[int, int]  # smaller goes first; fixed at arrival, so age wins in the end
    arrived: float
    ids: list[int]  # given ids, then the generated ones
    limit: int  # most tokens that will ever need a slot
    first_scored: int  # index of the first token to score; for sampling, past the end
    uniforms: NDArray[np.float64] | None = None
    stop: StopMatcher | None = None
    logprobs: list[float] = field(default_factory=list[float])
    # set by the scheduler
    row: int = -1  # of the slot table; -1 while waiting
    node: Node | None = None  # deepest locked node
    computed: int = 0  # tokens whose keys and values are cached
    owned: int = 0  # slots of the row from here on are this sequence's own, those before the tree's
    capacity: int = 0  # slots in the row
    cached_tokens: int = 0
    known_logits: Tensor | None = None  # after the last cached token, where the cache remembers them
    is_decoding: bool = False  # only its newest token is left to feed; set by the loop, cleared when it gives way
    is_gone: bool = False  # cancelled while waiting
    was_admitted: bool = False

    @property
    def is_scoring(self) -> bool:
        """Whether its given ids are to be scored, rather than continued."""
        return self.uniforms is None


def sampling_sequence(ticket: int, request: SampleRequest, arrived: float) -> Sequence:
    """A sampling request, with the uniforms that belong to it drawn."""
    ids = list(request.ids)
    total = len(ids) + request.max_tokens
    return Sequence(
        ticket,
        request,
        _order(ticket, request.priority),
        arrived,
        ids,
        limit=total - 1,  # the last token is never fed
        first_scored=total,
        uniforms=_uniforms(request),
        stop=StopMatcher(request.stop) if request.stop else None,
    )


def scoring_sequence(ticket: int, request: ScoreRequest, arrived: float) -> Sequence:
    """A scoring request."""
    ids = [*request.prefix, *request.suffix]
    order = _order(ticket, request.priority)
    return Sequence(ticket, request, order, arrived, ids, limit=len(ids), first_scored=len(request.prefix))


def ending(sequence: Sequence, token: int, pieces: tuple[bytes, ...], end_ids: frozenset[int]) -> Ending | None:
    """Why the sequence ends with this, its newest token; None when it goes on."""
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampled sequences grow"
    if token in end_ids:
        return "end"
    if token in request.stop_ids:
        return "delimiter"
    if sequence.stop is not None and token < len(pieces) and sequence.stop.feed(pieces[token]):
        return "delimiter"
    return "length" if len(sequence.logprobs) == request.max_tokens else None


def _order(ticket: int, priority: int) -> tuple[int, int]:
    return ticket + priority * _PRIORITY_STEP, ticket


def _uniforms(request: SampleRequest) -> NDArray[np.float64]:
    if request.sampling.temperature == 0:
        return np.zeros(request.max_tokens)
    return uniforms(request.seed, request.max_tokens)
