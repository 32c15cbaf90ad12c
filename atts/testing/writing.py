"""Sampling and scoring with the toy model: an engine's work, without the engine."""

from __future__ import annotations

from dataclasses import replace

from atts.core import Beginning, Completion, Ending, Recent, SampleRequest, ScoreRequest, TokenIds
from atts.models.tokenizers import StopMatcher
from atts.sampling import uniforms
from atts.testing.grammar import ReadingState
from atts.testing.language import ToyModel


class Writer:
    """A toy model with a memory of where recent requests ended; the memory saves time and changes
    nothing.
    """

    def __init__(self, model: ToyModel, memory: int = 1024) -> None:
        self.model = model
        self._states: Recent[TokenIds, ReadingState] = Recent(memory)

    def write(self, request: SampleRequest) -> Completion:
        """Continue a text: one uniform of the request's stream per position."""
        model = self.model
        end = self.model.tokenizer.end_id
        state = self._read(request.ids).copy()
        draws = uniforms(request.seed, request.begun + request.max_tokens)[request.begun :].tolist()
        stops = StopMatcher(request.stop)
        for index in request.ids[len(request.ids) - request.begun :]:
            stops.feed(model.tokenizer.pieces[index])
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Ending = "length"
        for uniform in draws:
            distribution = model.distribution(state)
            index = distribution.under(request.sampling).draw(uniform)
            ids.append(index)
            logprobs.append(distribution.logprob(index))
            if index == end:
                ended = "end"
                break
            model.advance(state, index)
            if stops.feed(model.tokenizer.pieces[index]) or index in request.stop_ids:
                ended = "delimiter"
                break
        kept = tuple(ids)
        if ended != "end":
            self._states[request.ids + kept] = state
        return Completion(kept, model.tokenizer.decode(kept), ended, tuple(logprobs))

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """The raw log-probability of every token of the suffix."""
        state = self._read(request.prefix).copy()
        logprobs: list[float] = []
        for index in request.suffix:
            logprobs.append(self.model.distribution(state).logprob(index))
            self.model.advance(state, index)
        self._states[request.prefix + request.suffix] = state
        return tuple(logprobs)

    def begin(self, request: SampleRequest, suffix: TokenIds) -> Beginning:
        """What the request is answered with, up to and with the first token that is not the
        suffix's.
        """
        whole = self.write(replace(request, max_tokens=min(request.max_tokens, len(suffix) + 1)))
        stood = next(
            (
                i
                for i, (own, other) in enumerate(zip(whole.ids, suffix, strict=False))
                if own != other
            ),
            None,
        )
        count = len(whole.ids) if stood is None else stood + 1
        is_all = count == len(whole.ids) and (
            whole.ended != "length" or count == request.max_tokens
        )
        return Beginning(whole.ids[:count], whole.logprobs[:count], whole.ended if is_all else None)

    def _read(self, ids: TokenIds) -> ReadingState:
        state = self._states.get(ids)
        if state is None:
            state = self._states[ids] = self.model.read(ids)
        return state


class PrefixMemory:
    """What a cache would hold: the ids each rollout last went through, the least recent forgotten
    first.
    """

    def __init__(self, rollouts: int = 4096) -> None:
        self._seen: Recent[str, TokenIds] = Recent(rollouts)

    def cached(self, rollout: str, ids: TokenIds) -> int:
        """How many leading ids need no computing; never all of them, for the last one gives the
        next distribution.
        """
        seen = self._seen.get(rollout, ())
        limit = min(len(seen), len(ids) - 1)
        if seen[:limit] == ids[:limit]:
            return limit
        return next(i for i in range(limit) if seen[i] != ids[i])

    def keep(self, rollout: str, ids: TokenIds) -> None:
        """Remember a rollout's latest ids; a request without a rollout leaves nothing behind."""
        if rollout:
            self._seen[rollout] = ids
