"""What a server dialect must provide, and the client that speaks one and believes only possible replies."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import anyio

from atts.concurrency import collect
from atts.core import (
    Completion,
    Ending,
    Recent,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import EngineSpec, Tokenizer
from atts.errors import BadReply, UnsupportedByEngine
from atts.servers.client import Call, Client
from atts.servers.options import RemoteOptions
from atts.servers.replies import ModelRow, ModelRows, Tokenized, decode, is_logprob, is_score
from atts.servers.transport import HttpReply

LogProbs = Literal["raw", "processed", "none"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers at a URL."""

    engine: str  # kind and major.minor version, such as "vllm 0.33"
    version: str
    model: str
    context_length: int
    tokenizer: str = ""  # where the server took it from, when it says
    routes: frozenset[str] = frozenset()  # optional ones that are open


@dataclass(frozen=True, slots=True)
class RawCompletion:
    """A server's completion before it was checked; a log-prob is None where the raw one was not
    sent.
    """

    ids: TokenIds
    logprobs: tuple[float | None, ...]
    finish: Literal["stop", "length"]
    cached_tokens: int = 0


class Dialect(ABC):
    """How one kind of server is spoken to.

    Reading raises ValueError on a reply of another shape; the engine makes it a BadReply. What only
    some servers can do is in `Scorer`, `Forcer` and `Rater`.
    """

    name: str
    speaks: Literal["ids", "text"] = "ids"
    spare: int = 1  # places of the context that the server needs for itself
    logprobs: LogProbs = "raw"  # what comes with sampled tokens, unless the probe finds otherwise
    cuts_logprobs = False  # whether processed ones are of what top-k, top-p and min-p leave
    priority_sign = 1  # -1 where a higher number means sooner

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._model = ""

    @abstractmethod
    async def identify(self, client: Client, model: str) -> Identity:
        """Ask who is there; remembers model and routes for the calls to come.

        :raises UnsupportedByEngine: another kind of server, or it does not have that model.
        """

    @abstractmethod
    def sampling(self, request: SampleRequest, rid: str) -> Call:
        """The call that continues these ids."""

    @abstractmethod
    def sampled(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Its reply."""

    def abort(self, rid: str) -> Call | None:
        """The call that frees a request; None where closing the connection is all there is."""
        return None

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """The server's own ids of a text, no special token added; never asked where text is spoken."""
        raise AssertionError("no ids are spoken")

    async def running(self, client: Client) -> int | None:
        """How many requests the server is working on; None when it does not say."""
        return None

    async def speculation(self, client: Client) -> str | None:
        """How the server speculates, in words: "" where it does not, None where it does not say."""
        return None

    def _priority(self, request: SampleRequest | ScoreRequest) -> dict[str, int]:
        """The field for a request's priority, in the server's direction; nothing where priorities
        are not sent.
        """
        priority = request.priority if self._options.priorities == "send" else 0
        return {"priority": self.priority_sign * priority} if priority else {}


class Scorer(Dialect):
    """A dialect that can score a given suffix."""

    @abstractmethod
    def scoring(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """The call that scores the suffix."""

    @abstractmethod
    def scored(self, reply: bytes, request: ScoreRequest) -> Scores | None:
        """Its reply; None when scores are missing because they were cached, and skipping the cache
        would help.
        """


class Forcer(Dialect):
    """A dialect without scores that can be made to write a given token, which tells its
    log-probability.
    """

    @abstractmethod
    def forcing(self, ids: TokenIds, token: int) -> Call:
        """The call that writes this very token."""

    @abstractmethod
    def forced(self, reply: bytes, token: int) -> float:
        """Its reply."""


class Rater(Dialect):
    """A dialect that tells the likeliest next tokens with their log-probabilities: enough for a
    rating of one digit.
    """

    @abstractmethod
    def rating(self, ids: TokenIds, rid: str) -> Call:
        """The call for one token and its alternatives."""

    @abstractmethod
    def rated(self, reply: bytes) -> dict[str, float]:
        """Its reply: log-probability by text."""


def sampling_fields(sampling: Sampling, *, no_top_k: int = 0) -> dict[str, float]:
    """The sampling distribution in the names all servers share; every field is sent, for defaults
    differ.
    """
    top_k = sampling.top_k or no_top_k
    return {
        "temperature": sampling.temperature,
        "top_k": top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def seed_of(request: SampleRequest, bits: int) -> int:
    """The request's seed as the server takes it."""
    return request.seed.key() & ((1 << bits) - 1)


def json_of(client: Client, reply: HttpReply, kind: Any) -> Any:
    """What a 200 says, as a value of that type.

    :raises ValueError: it is no such value.
    :raises EngineError: any other status.
    """
    if reply.status != 200:
        raise client.refusal(reply)
    return decode(reply.body, kind)


async def json_at(client: Client, path: str, kind: Any, body: dict[str, Any] | None = None) -> Any:
    """The JSON at a path."""
    return json_of(client, await client.look(path, body), kind)


def choose_model(client: Client, models: Sequence[ModelRow], wanted: str) -> ModelRow:
    """The row of /v1/models that is meant; the only one when none is named.

    :raises UnsupportedByEngine: it is not there, or several are and none is named.
    """
    names = [row.id for row in models]
    if wanted:
        for row in models:
            if wanted in (row.id, row.root):
                return row
        raise UnsupportedByEngine(
            client.name, f"{client.url} has no model {wanted!r}", f"It has {', '.join(names)}"
        )
    base = [row for row in models if not row.parent]
    if len(base) != 1:
        raise UnsupportedByEngine(
            client.name, f"{client.url} has {len(base)} models", f"Name one: {', '.join(names)}"
        )
    return base[0]


def short(version: str) -> str:
    """major.minor of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


async def served(client: Client, model: str) -> ModelRow:
    """The row of /v1/models that is meant; see `choose_model`."""
    return choose_model(client, (await json_at(client, "/v1/models", ModelRows)).data, model)


async def tokens_of(client: Client, body: dict[str, Any]) -> TokenIds:
    """What /tokenize makes of a text."""
    found: Tokenized = await json_at(client, "/tokenize", Tokenized, body)
    return found.tokens


async def in_queue(client: Client, running: str, waiting: str = "") -> int | None:
    """Requests at work and waiting, from the gauges of that name at /metrics; None when they are
    not there.
    """
    text = (await client.look("/metrics")).body.decode(errors="replace")
    found = metric(text, running)
    return None if found is None else found + (metric(text, waiting) or 0 if waiting else 0)


def metric(text: str, name: str) -> int | None:
    """The sum of one gauge or counter in Prometheus' text format; None when it is not there."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    counts = [
        re.fullmatch(r"\d{1,15}(\.\d{0,15})?(e\+0\d)?", line.rsplit(" ", 1)[-1]) for line in lines
    ]
    return sum(int(float(count[0])) for count in counts if count) if lines and all(counts) else None


T = TypeVar("T")
_KEPT_RATINGS = 256


class DialectClient:
    """Speaks one dialect over one HTTP client; `sampled` says what the log-probs of hot samples
    are.
    """

    def __init__(
        self, client: Client, dialect: Dialect, spec: EngineSpec, tokenizer: Tokenizer
    ) -> None:
        self.client = client
        self.dialect = dialect
        self.spec = spec
        self.tokenizer = tokenizer
        self.sampled: Literal["raw", "processed"] = (
            "processed" if dialect.logprobs == "processed" else "raw"
        )
        self._name = client.name
        self._ratings = _RatingCache(self._rate)

    async def sample(self, request: SampleRequest) -> Completion:
        """A completion as the engine protocol wants it.

        :raises BadReply: what came cannot be true.
        """
        sampled, place, ended = await self._sampled(request)
        logprobs = () if self.spec.logprobs == "none" else await self._raw(sampled, request, place)
        ids = sampled.ids[:place]
        # an end token is the last one
        text = self.tokenizer.decode(ids[:-1] if ended == "end" else ids)
        return Completion(ids, text, ended, logprobs[:place], sampled.cached_tokens)

    async def sample_raw(self, request: SampleRequest) -> RawCompletion:
        """A completion as sent, believable as far as it goes."""
        return (await self._sampled(request))[0]

    async def score(self, request: ScoreRequest) -> Scores:
        """The suffix's log-probs; where the server only rates, those of a one-token suffix.

        :raises UnsupportedByEngine: the server can neither.
        :raises BadReply: what came cannot be true.
        """
        if not isinstance(self.dialect, Scorer):
            return await self._rated(request)
        found = await self._score_once(self.dialect, request, "read")
        # the server scored or wrote this very chunk before, and read it from its cache
        if found is None:
            self.client.traffic.uncached += 1
            found = await self._score_once(self.dialect, request, "skip")
        if found is None:
            raise BadReply(self._name, "scores are missing although the cache was not read")
        return found

    async def ratings(self, ids: TokenIds) -> dict[str, float]:
        """The likeliest next words and their log-probs, asked for once: one reply holds all ten
        digits of a rating.

        :raises UnsupportedByEngine: the server does not tell.
        """
        return await self._ratings.of(ids)

    def _sampled(self, request: SampleRequest) -> Awaitable[tuple[RawCompletion, int, Ending]]:
        """What came, the place where it ends and why; what ends for no reason is asked for again."""
        make = partial(self._sampling, request)
        read = partial(self._believed, request)
        return self.client.ask(
            make, read, self.dialect.abort, len(request.ids) + request.max_tokens
        )

    def _sampling(self, request: SampleRequest, rid: str) -> Call:
        """The call, the model's own ends among the ids that stop it."""
        wire = SampleRequest(  # `replace` takes as long as writing the JSON
            request.ids,
            request.max_tokens,
            request.sampling,
            request.seed,
            stop=request.stop,
            stop_ids=(*request.stop_ids, *self.spec.end_ids),
            rollout=request.rollout,
            priority=request.priority,
        )
        return self.dialect.sampling(wire, rid)

    def _believed(self, request: SampleRequest, reply: bytes) -> tuple[RawCompletion, int, Ending]:
        sampled = self._read(self.dialect.sampled, reply, request)
        check_completion(sampled, request, self.spec)
        return (sampled, *find_end(sampled, request, self.spec, self.tokenizer))

    async def _raw(
        self, sampled: RawCompletion, request: SampleRequest, place: int
    ) -> tuple[float, ...]:
        """Raw log-probs of the ids that count: as sent where those are raw, else asked for."""
        known = [value for value in sampled.logprobs[:place] if value is not None]
        law = (
            request.sampling
            if self.dialect.cuts_logprobs
            else Sampling(request.sampling.temperature)
        )
        # at 0 servers take the best at temperature 1
        is_raw = law.temperature == 0.0 or law == Sampling()
        processed = self.sampled == "processed" and not is_raw
        if len(known) == place and not processed:
            return tuple(known)
        if request.logprobs == "unneeded":
            return ()
        ids = sampled.ids[:place]
        if isinstance(self.dialect, Scorer):
            return (
                await self.score(ScoreRequest(request.ids, ids, request.rollout, request.priority))
            ).logprobs
        missing = [number for number, value in enumerate(sampled.logprobs[:place]) if value is None]
        if processed or not isinstance(self.dialect, Forcer):
            raise UnsupportedByEngine(
                self._name, "it sends no raw log-probabilities", "Sample at temperature 1"
            )
        force = partial(self._force, self.dialect)
        forced = await collect(
            [partial(force, request.ids + ids[:number], ids[number]) for number in missing]
        )
        return (*known, *forced)  # they are missing from one place on

    async def _force(self, forcer: Forcer, ids: TokenIds, token: int) -> float:
        def make(rid: str) -> Call:
            return forcer.forcing(ids, token)

        def read(reply: bytes) -> float:
            value = self._read(forcer.forced, reply, token)
            if not is_logprob(value):
                raise BadReply(self._name, f"a log-probability of {value}")
            return value

        return await self.client.ask(make, read, self.dialect.abort, len(ids) + 1)

    async def _score_once(
        self, scorer: Scorer, request: ScoreRequest, cache: Literal["read", "skip"]
    ) -> Scores | None:
        def read(reply: bytes) -> Scores | None:
            scores = self._read(scorer.scored, reply, request)
            if scores is not None and len(scores.logprobs) != len(request.suffix):
                raise BadReply(
                    self._name, f"{len(scores.logprobs)} scores for {len(request.suffix)} tokens"
                )
            if scores is not None and not all(map(is_score, scores.logprobs)):
                raise BadReply(self._name, "a score is above 0 or not a number")
            return scores

        tokens = len(request.prefix) + len(request.suffix)
        return await self.client.ask(
            lambda rid: scorer.scoring(request, rid, cache), read, self.dialect.abort, tokens
        )

    async def _rated(self, request: ScoreRequest) -> Scores:
        if len(request.suffix) != 1:
            advice = "Use a method that rates (spec-reason), or a target on vLLM or SGLang"
            problem = f"it can rate by one token, not score {len(request.suffix)}"
            raise UnsupportedByEngine(self._name, problem, advice)
        word = self.tokenizer.decode(request.suffix).strip()
        return Scores(((await self.ratings(request.prefix)).get(word, float("-inf")),))

    async def _rate(self, ids: TokenIds) -> dict[str, float]:
        rater = self.dialect
        if not isinstance(rater, Rater):
            raise UnsupportedByEngine(self._name, f"{rater.name} can neither score nor rate")

        def read(reply: bytes) -> dict[str, float]:
            found = self._read(rater.rated, reply)
            if not found:
                raise BadReply(self._name, "it names no likely tokens")
            return found

        return await self.client.ask(
            partial(rater.rating, ids), read, self.dialect.abort, len(ids) + 1
        )

    def _read(self, reading: Callable[..., T], *args: Any) -> T:
        try:
            return reading(*args)
        except ValueError as error:
            problem = f"the reply has another shape than {self.dialect.name}'s ({error})"
            raise BadReply(self._name, problem) from error


class _RatingCache:
    """The likeliest next words of a text, remembered for a while; who asks meanwhile waits for the
    first to ask.
    """

    def __init__(self, ask: Callable[[TokenIds], Awaitable[dict[str, float]]]) -> None:
        self._ask = ask
        self._kept: Recent[TokenIds, dict[str, float]] = Recent(_KEPT_RATINGS)
        self._asking: dict[TokenIds, anyio.Event] = {}

    async def of(self, ids: TokenIds) -> dict[str, float]:
        """The words; an asker who fails or is cancelled leaves the question to the next."""
        while ids not in self._kept:
            if (asked := self._asking.get(ids)) is not None:
                await asked.wait()
                continue
            self._asking[ids] = anyio.Event()
            try:
                self._kept[ids] = await self._ask(ids)
            finally:
                self._asking.pop(ids).set()
        return self._kept[ids]


def check_completion(sampled: RawCompletion, request: SampleRequest, spec: EngineSpec) -> None:
    """Believe ids and log-probs only where they can be true.

    :raises BadReply: they cannot.
    """
    ids = sampled.ids
    flaw = ""
    wrong = [value for value in sampled.logprobs if value is not None and not is_logprob(value)]
    if not ids:
        flaw = "it wrote nothing"
    elif len(ids) > request.max_tokens:
        flaw = f"it wrote {len(ids)} tokens, {request.max_tokens} were allowed"
    elif min(ids) < 0 or max(ids) >= spec.vocabulary:
        flaw = f"an id outside 0..{spec.vocabulary - 1} came back"
    elif len(sampled.logprobs) != len(ids) and (sampled.logprobs or spec.logprobs != "none"):
        flaw = f"{len(sampled.logprobs)} log-probabilities came with {len(ids)} ids"
    elif wrong:
        flaw = "a log-probability is above 0 or not a number"
    if flaw:
        raise BadReply(spec.name, flaw)


def find_end(
    sampled: RawCompletion, request: SampleRequest, spec: EngineSpec, tokenizer: Tokenizer
) -> tuple[int, Ending]:
    """How many of the ids belong to the completion, and why it ended there.

    Servers may run past a stop (several tokens a step) or not know a stop id: what counts is where
    the text completes one. One that stopped early must have had a reason.

    :raises BadReply: it stopped, and there is none.
    """
    ids = sampled.ids
    found: list[tuple[int, Ending]] = []
    if not {*spec.end_ids, *request.stop_ids}.isdisjoint(ids):
        places = (
            place
            for place, token in enumerate(ids)
            if token in spec.end_ids or token in request.stop_ids
        )
        first = next(places)
        found.append((first + 1, "end" if ids[first] in spec.end_ids else "delimiter"))
    stopped = _stop_place(ids[: found[0][0]] if found else ids, request.stop, tokenizer)
    if stopped and (not found or stopped < found[0][0]):
        return stopped, "delimiter"
    if found:
        return found[0]
    if sampled.finish == "length" and (len(ids) == request.max_tokens or spec.logprobs == "none"):
        # where text is spoken, a server's tokens may be without text, and then no ids stand for
        # them
        return len(ids), "length"
    problem = f"it stopped after {len(ids)} of {request.max_tokens} tokens without a stop or an end among them"
    raise BadReply(
        spec.name,
        f"{problem} (the last id is {ids[-1]})",
        "Is it an end id that the tokenizer lacks?",
    )


def _stop_place(ids: TokenIds, stops: tuple[str, ...], tokenizer: Tokenizer) -> int:
    """The least number of ids whose text holds a stop string, found by halving, for a text only
    grows; 0: none does.
    """

    def holds(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(stop in text for stop in stops)

    if not stops or not holds(len(ids)):
        return 0
    low = 0
    high = len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
