"""How a toy model writes and scores: the engine's work, without the engine."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from atts.core import Completion, Ending, SampleRequest, ScoreRequest, TokenIds
from atts.seeds import uniforms
from atts.testing.grammar import Reader
from atts.testing.language import ToyModel
from atts.tokenizing import StopMatcher


class Writer:
    """A toy model with a memory of where recent requests ended; the memory saves time and changes nothing."""

    def __init__(self, model: ToyModel, memory: int = 1024) -> None:
        self.model = model
        self._memory = memory
        self._readers: OrderedDict[TokenIds, Reader] = OrderedDict()

    def write(self, request: SampleRequest) -> Completion:
        """Continue a text: one uniform of the request's stream per position."""
        model, end = self.model, self.model.tokenizer.end_id
        reader = self._read(request.ids).copy()
        draws = uniforms(request.seed, request.max_tokens).tolist()
        stops = StopMatcher(request.stop)
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Ending = "length"
        for uniform in draws:
            law = model.law(reader)
            index = law.shape(request.sampling).draw(uniform)
            ids.append(index)
            logprobs.append(law.logprob(index))
            if index == end:
                ended = "end"
                break
            model.advance(reader, index)
            if stops.feed(model.tokenizer.pieces[index]) or index in request.stop_ids:
                ended = "delimiter"
                break
        kept = tuple(ids)
        if ended != "end":
            self._remember(request.ids + kept, reader)
        return Completion(kept, model.tokenizer.decode(kept), ended, tuple(logprobs))

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """The raw log-probability of every token of the suffix."""
        reader = self._read(request.prefix).copy()
        logprobs: list[float] = []
        for index in request.suffix:
            logprobs.append(self.model.law(reader).logprob(index))
            self.model.advance(reader, index)
        self._remember(request.prefix + request.suffix, reader)
        return tuple(logprobs)

    def _read(self, ids: TokenIds) -> Reader:
        reader = self._readers.get(ids)
        if reader is None:
            reader = self.model.read(ids)
            self._remember(ids, reader)
        return reader

    def _remember(self, ids: TokenIds, reader: Reader) -> None:
        self._readers[ids] = reader
        if len(self._readers) > self._memory:
            self._readers.popitem(last=False)


class PrefixMemory:
    """What a cache would hold: the ids each rollout last went through, the least recent forgotten first."""

    def __init__(self, rollouts: int = 4096) -> None:
        self._rollouts = rollouts
        self._seen: OrderedDict[str, TokenIds] = OrderedDict()

    def cached(self, rollout: str, ids: TokenIds) -> int:
        """How many leading ids need no computing; never all of them, for the last one gives the next law."""
        seen = self._seen.get(rollout, ())
        limit = min(len(seen), len(ids) - 1)
        if seen[:limit] == ids[:limit]:
            return limit
        return next(i for i in range(limit) if seen[i] != ids[i])

    def keep(self, rollout: str, ids: TokenIds) -> None:
        """Remember a rollout's latest ids; a request without a rollout leaves nothing behind."""
        if not rollout:
            return
        self._seen[rollout] = ids
        self._seen.move_to_end(rollout)
        if len(self._seen) > self._rollouts:
            self._seen.popitem(last=False)


def drifted(logprobs: Sequence[float], factor: float) -> tuple[float, ...]:
    """Log-probabilities as a drifted scorer gives them: perplexity to the power `factor`."""
    return tuple(value * factor if math.isfinite(value) else value for value in logprobs)
