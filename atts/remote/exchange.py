"""One request to one server and its believable answer: the dialect's words, checked, in the protocol's terms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, TypeVar

from atts.core import Completion, Ending, SampleRequest, ScoreRequest, Scores, TokenIds
from atts.engine import EngineSpec, Tokenizer
from atts.errors import BadReply, UnsupportedByEngine
from atts.remote.client import Call, Client
from atts.remote.dialects import Dialect, Forcer, Rater, Sampled, Scorer
from atts.remote.rating import Ratings
from atts.remote.settling import check_sampled, place_of_end, settle
from atts.tasks import collect

T = TypeVar("T")


class Exchange:
    """Speaks one dialect over one client; `sampled` is what the log-probs that come with hot samples are."""

    def __init__(self, client: Client, dialect: Dialect, spec: EngineSpec, tokenizer: Tokenizer) -> None:
        self.client = client
        self.dialect = dialect
        self.spec = spec
        self.tokenizer = tokenizer
        self.sampled: Literal["raw", "processed"] = "processed" if dialect.logprobs == "processed" else "raw"
        self._name = client.name
        self._scorer = dialect if isinstance(dialect, Scorer) else None
        self._forcer = dialect if isinstance(dialect, Forcer) else None
        self._rater = dialect if isinstance(dialect, Rater) else None
        self._ratings = Ratings(self._rate)

    async def sample(self, request: SampleRequest) -> Completion:
        """A completion as the engine protocol wants it.

        :raises BadReply: what came cannot be true.
        """
        (sampled, place, ended), spec = await self._sampled(request), self.spec
        logprobs = () if spec.logprobs == "none" else await self._raw(sampled, request, place)
        return settle(sampled, logprobs, place, ended, spec, self.tokenizer)

    async def sample_raw(self, request: SampleRequest) -> Sampled:
        """A completion as sent, believable as far as it goes."""
        return (await self._sampled(request))[0]

    async def score(self, request: ScoreRequest) -> Scores:
        """The suffix's log-probs; where the server only rates, those of a one-token suffix.

        :raises UnsupportedByEngine: the server can neither.
        :raises BadReply: what came cannot be true.
        """
        if self._scorer is None:
            return await self._rated(request)
        found = await self._score_once(self._scorer, request, "read")
        if found is None:  # the server scored or wrote this very chunk before, and read it from its cache
            self.client.traffic.uncached += 1
            found = await self._score_once(self._scorer, request, "skip")
        if found is None:
            raise BadReply(self._name, "scores are missing although the cache was not read")
        return found

    async def ratings(self, ids: TokenIds) -> dict[str, float]:
        """The likeliest next words and their log-probs.

        :raises UnsupportedByEngine: the server does not tell.
        """
        return await self._ratings.of(ids)

    def _sampled(self, request: SampleRequest) -> Awaitable[tuple[Sampled, int, Ending]]:
        """What came, the place where it ends and why; what ends for no reason is asked for again."""
        return self.client.ask(partial(self._sampling, request), partial(self._believed, request), self.dialect.abort)

    def _sampling(self, request: SampleRequest, rid: str) -> Call:
        """The call, the model's own ends among the ids that stop it."""
        wire = SampleRequest(  # `replace` takes as long as writing the JSON
            request.ids, request.max_tokens, request.sampling, request.seed, request.stop,
            (*request.stop_ids, *self.spec.end_ids), request.rollout, request.priority,
        )  # fmt: skip
        return self.dialect.sampling(wire, rid)

    def _believed(self, request: SampleRequest, reply: Any) -> tuple[Sampled, int, Ending]:
        sampled = self._read(self.dialect.sampled, reply, request)
        check_sampled(sampled, request, self.spec)
        return (sampled, *place_of_end(sampled, request, self.spec, self.tokenizer))

    async def _raw(self, sampled: Sampled, request: SampleRequest, place: int) -> tuple[float, ...]:
        """Raw log-probs of the ids that count: as sent where those are raw, else asked for."""
        known = [value for value in sampled.logprobs[:place] if value is not None]
        heated = request.sampling.temperature not in (0.0, 1.0)  # at 0 servers take the best at temperature 1
        processed = heated and self.sampled == "processed"
        if len(known) == place and not processed:
            return tuple(known)
        ids = sampled.ids[:place]
        if self._scorer is not None:
            return (await self.score(ScoreRequest(request.ids, ids, request.rollout, request.priority))).logprobs
        missing = [number for number, value in enumerate(sampled.logprobs[:place]) if value is None]
        if processed or self._forcer is None:
            raise UnsupportedByEngine(self._name, "it sends no raw log-probabilities", "Sample at temperature 1")
        force = partial(self._force, self._forcer)
        forced = await collect([partial(force, request.ids + ids[:number], ids[number]) for number in missing])
        return (*known, *forced)  # they are missing from one place on

    async def _force(self, forcer: Forcer, ids: TokenIds, token: int) -> float:
        def make(rid: str) -> Call:
            return forcer.forcing(ids, token)

        def read(reply: Any) -> float:
            value = self._read(forcer.forced, reply, token)
            if not -1e6 < value <= 1e-4:
                raise BadReply(self._name, f"a log-probability of {value}")
            return value

        return await self.client.ask(make, read, self.dialect.abort)

    async def _score_once(self, scorer: Scorer, request: ScoreRequest, cache: Literal["read", "skip"]) -> Scores | None:
        def read(reply: Any) -> Scores | None:
            scores = self._read(scorer.scored, reply, request)
            if scores is not None and len(scores.logprobs) != len(request.suffix):
                raise BadReply(self._name, f"{len(scores.logprobs)} scores for {len(request.suffix)} tokens")
            if scores is not None and not all(value <= 1e-4 for value in scores.logprobs):
                raise BadReply(self._name, "a score is above 0 or not a number")
            return scores

        return await self.client.ask(lambda rid: scorer.scoring(request, rid, cache), read, self.dialect.abort)

    async def _rated(self, request: ScoreRequest) -> Scores:
        if len(request.suffix) != 1:
            advice = "Use a method that rates (spec-reason), or a target on vLLM or SGLang"
            problem = f"it can rate by one token, not score {len(request.suffix)}"
            raise UnsupportedByEngine(self._name, problem, advice)
        word = self.tokenizer.decode(request.suffix).strip()
        return Scores(((await self.ratings(request.prefix)).get(word, float("-inf")),))

    async def _rate(self, ids: TokenIds) -> dict[str, float]:
        rater = self._rater
        if rater is None:
            raise UnsupportedByEngine(self._name, f"{self.dialect.name} can neither score nor rate")

        def read(reply: Any) -> dict[str, float]:
            found = self._read(rater.rated, reply)
            if not found or not all(value <= 1e-4 for value in found.values()):
                raise BadReply(self._name, "it names no likely tokens, or gives them impossible log-probabilities")
            return found

        return await self.client.ask(partial(rater.rating, ids), read, self.dialect.abort)

    def _read(self, reading: Callable[..., T], *args: Any) -> T:
        try:
            return reading(*args)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            problem = f"the reply has another shape than {self.dialect.name}'s ({type(error).__name__}: {error})"
            raise BadReply(self._name, problem) from error
