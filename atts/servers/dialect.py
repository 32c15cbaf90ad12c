"""Base classes of server dialects, and a client that sends requests in a dialect and checks the
replies.
"""

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
from atts.errors import BadReply, EngineError, OptionError, UnsupportedByEngine, counted
from atts.servers.client import (
    Call,
    Client,
    HttpReply,
    ModelRow,
    ModelRows,
    Tokenized,
    are_logprobs,
    are_scores,
    decode,
)
from atts.servers.options import RemoteOptions

T = TypeVar("T")
LogProbs = Literal["raw", "processed", "none"]
_KEPT_RATINGS = 256
# Largest number of problems whose order of arrival is stored. Requests of problems that came
# earlier get priority.
_KEPT_ARRIVALS = 65_536


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that a server reports: its engine, version, model, context length and
    tokenizer.
    """

    engine: str  # name and short version of the server's software, such as "vllm 0.33"
    version: str
    model: str
    context_length: int
    tokenizer: str = ""  # folder or hub id of the server's tokenizer, if the server reports it
    routes: frozenset[str] = frozenset()  # names of the optional HTTP routes that the server has


@dataclass(frozen=True, slots=True)
class RawCompletion:
    """A completion as the server sent it, before its values are checked.

    A log-prob is None if the server did not send it.
    """

    ids: TokenIds
    logprobs: tuple[float | None, ...]
    finish: Literal["stop", "length"]
    cached_tokens: int = 0


class NoVisibleText(EngineError):
    """Error for a model that spent all its tokens on reasoning that the server does not show."""

    def __init__(self, engine: str, tokens: int) -> None:
        super().__init__(
            engine,
            f"the model spent all {tokens} tokens on reasoning, which the server does not return",
            "Allow more tokens per chunk, or use a server that returns the reasoning",
        )


class Dialect(ABC):
    """The API of one kind of server: how requests are written and replies are read.

    A dialect with `speaks = "ids"` exchanges token ids. It defines `name`, `schemes`, `identify`,
    `sample_call`, `read_sample` and `tokenize`. A dialect that exchanges text extends `TextDialect`
    (`atts.servers.chat`) and needs no `tokenize`.

    The methods `read_...` raise ValueError if a reply has an unexpected form, and the client
    converts this error to BadReply. Capabilities that only some servers have are in `Scorer`,
    `TopScorer`, `Forcer` and `Rater`.
    """

    name: str
    schemes: tuple[str, ...]
    """The address schemes that select this dialect, such as "vllm" in "vllm:http://HOST:PORT"."""
    found_at: str = ""
    """A path that `auto` requests to detect this dialect, because its servers answer with status
    200. "" means that the dialect cannot be detected.
    """
    speaks: Literal["ids", "text"] = "ids"
    spare: int = 1
    """The prompt and the reply together must be shorter than the server's context length by at
    least this number of tokens.
    """
    logprobs: LogProbs = "raw"
    """The kind of log-probs that come with sampled tokens: raw, processed by the sampling settings,
    or none. The probe measures which kind a server sends, and corrects this value if necessary.
    """
    cuts_logprobs = False
    """True if processed log-probs are computed after top-k, top-p and min-p. False if only the
    temperature has been applied.
    """
    priority_sign = 1
    """1 if the server first handles requests with small priority numbers, or -1 if it first handles
    those with large ones.
    """
    takes_thinking_budget = False
    """True if servers of this dialect can close a model's think block when its thinking budget is
    used up.
    """

    def __init__(self, options: RemoteOptions) -> None:
        if options.thinking == "send" and not self.takes_thinking_budget:
            raise OptionError(
                "thinking",
                f"servers of dialect {self.name} do not accept a thinking budget; leave thinking "
                "out, and atts will close the think block itself",
            )
        self._options = options
        self._model = ""
        self._arrivals = Recent[str, int](_KEPT_ARRIVALS)
        self._num_arrived = 0

    @abstractmethod
    async def identify(self, client: Client, model: str) -> Identity:
        """Request the server's identity, and store its model name and routes for later calls.

        :raises UnsupportedByEngine: the server has another dialect, or does not have the model.
        """

    @abstractmethod
    def sample_call(self, request: SampleRequest, rid: str) -> Call:
        """Return the HTTP call that asks the server to continue the token ids of a request."""

    @abstractmethod
    def read_sample(self, reply: bytes, request: SampleRequest) -> RawCompletion:
        """Read the completion in the reply to a `sample_call`."""

    def abort(self, rid: str) -> Call | None:
        """Return the HTTP call that aborts a request. Return None if the server has no such call;
        closing a request's connection then aborts the request.
        """
        return None

    async def tokenize(self, client: Client, text: str) -> TokenIds:
        """Request the token ids of a text from the server's tokenizer, without special tokens.

        The probe compares them with the ids of atts's own tokenizer. Every dialect with `speaks =
        "ids"` overrides this method. It is never called for the other dialects.

        :raises UnsupportedByEngine: the dialect has no such call; the probe then reports that the
            tokenizer was not compared.
        """
        raise UnsupportedByEngine(
            client.name,
            f"dialect {self.name} has no method tokenize, which atts needs to compare the server's "
            "token ids with its own",
            f"Override tokenize in {type(self).__name__}",
        )

    async def running(self, client: Client) -> int | None:
        """Return how many requests the server is processing, or None if it does not report this."""
        return None

    async def drafted(self, client: Client) -> DraftCounts | None:
        """Return the counts of draft tokens that the server's own speculation has proposed and
        accepted, or None if it does not report them.
        """
        return None

    async def speculation(self, client: Client) -> str | None:
        """Describe the server's speculative decoding. Return "" if it is off, or None if the server
        does not report it.
        """
        return None

    def _priority(self, request: SampleRequest | ScoreRequest) -> dict[str, int]:
        """Return the body field with a request's priority, or an empty dict if priorities are not
        sent.

        A request without a priority gets one from its problem: 1 for the first problem that arrived,
        2 for the second, and so on. The server then finishes earlier problems first, so that few
        problems are unfinished at a time.
        """
        if self._options.priorities != "send":
            return {}
        priority = request.priority
        problem = request.rollout.rpartition("/")[0]
        if not priority and problem:
            if problem not in self._arrivals:
                self._num_arrived += 1
                self._arrivals[problem] = self._num_arrived
            priority = self._arrivals[problem]
        return {"priority": self.priority_sign * priority} if priority else {}

    @property
    def closes_thinking(self) -> bool:
        """Return whether the server enforces thinking budgets. If not, atts does."""
        return self._options.thinking == "send"


class Scorer(Dialect):
    """A dialect whose servers can return the log-probs of given tokens after a prefix."""

    @abstractmethod
    def score_call(self, request: ScoreRequest, rid: str, cache: Literal["read", "skip"]) -> Call:
        """Return the HTTP call that scores the suffix of a request."""

    @abstractmethod
    def read_scores(self, reply: bytes, request: ScoreRequest) -> Scores | None:
        """Read the scores in the reply to a `score_call`.

        The result is None if the server took the tokens from its cache and so computed no scores.
        The request must then be repeated with `cache` set to "skip".
        """


class TopScorer(Scorer):
    """A dialect whose servers can also list the most likely tokens at every position of a given
    text.
    """

    @abstractmethod
    def top_call(self, ids: TokenIds, top: int) -> Call:
        """Return the HTTP call that lists the `top` most likely tokens at every position."""

    @abstractmethod
    def read_top(self, reply: bytes, ids: TokenIds) -> list[dict[int, float]]:
        """Read the reply to a `top_call`: for each position after the first, a dict from token id
        to log-probability.
        """


class Forcer(Dialect):
    """A dialect whose servers cannot score a text, but can be forced to write a given token, and
    then return its log-probability.
    """

    @abstractmethod
    def force_call(self, ids: TokenIds, token: int) -> Call:
        """Return the HTTP call that forces the server to write `token` next."""

    @abstractmethod
    def read_forced(self, reply: bytes, token: int) -> float:
        """Read the token's log-probability in the reply to a `force_call`."""


class Rater(Dialect):
    """A dialect whose servers list the most likely next tokens.

    This is enough to let a model rate a text with a single digit.
    """

    @abstractmethod
    def rating_call(self, ids: TokenIds, rid: str) -> Call:
        """Return the HTTP call that requests one token and the most likely alternatives to it."""

    @abstractmethod
    def read_ratings(self, reply: bytes) -> dict[str, float]:
        """Read the reply to a `rating_call`: a dict from each listed string to its
        log-probability.
        """


def sampling_fields(sampling: Sampling, *, no_top_k: int = 0) -> dict[str, float]:
    """Return the sampling settings as body fields. The field names are the same on all servers.

    Every field is sent, because servers have different defaults.
    """
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or no_top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def seed_of(request: SampleRequest, bits: int) -> int:
    """Return a request's seed as an integer of at most `bits` bits, because servers limit its
    size.
    """
    return request.seed.key() & ((1 << bits) - 1)


def json_of(client: Client, reply: HttpReply, kind: Any) -> Any:
    """Read the JSON of a reply with status 200 as a value of the type `kind`.

    :raises ValueError: if the reply is not such a value.
    :raises EngineError: for any other status.
    """
    if reply.status != 200:
        raise client.refusal(reply)
    return decode(reply.body, kind)


async def json_at(client: Client, path: str, kind: Any, body: dict[str, Any] | None = None) -> Any:
    """Send a request to a path, and return the JSON of its reply as a value of the type `kind`.

    The request is a POST if it has a body, or else a GET.
    """
    return json_of(client, await client.look(path, body), kind)


def choose_model(client: Client, models: Sequence[ModelRow], wanted: str) -> ModelRow:
    """Return the row of the model named `wanted` from the rows of /v1/models.

    If `wanted` is empty, return the row of the only base model.

    :raises UnsupportedByEngine: the named model has no row, or no model is named and there are
        several rows.
    """
    names = [row.id for row in models]
    if wanted:
        for row in models:
            if wanted in (row.id, row.root):
                return row
        raise UnsupportedByEngine(
            client.name,
            f"{client.url} has no model {wanted!r}",
            f"Models of the server: {', '.join(names)}",
        )
    # The server also lists its LoRA adapters. Each of them names its base model as parent, and a
    # base model has no parent.
    base = [row for row in models if not row.parent]
    if len(base) != 1:
        raise UnsupportedByEngine(
            client.name,
            f"{client.url} has {len(base)} models",
            f"Name one of these models: {', '.join(names)}",
        )
    return base[0]


def short_version(version: str) -> str:
    """Shorten a version such as "0.29.1+cu128" to its major and minor number, "0.29"."""
    return ".".join(version.split("+")[0].split(".")[:2])


async def served_model(client: Client, model: str) -> ModelRow:
    """Request the list of models at /v1/models, and return the row of the model; see
    `choose_model`.
    """
    models: ModelRows = await json_at(client, "/v1/models", ModelRows)
    return choose_model(client, models.data, model)


async def tokens_of(client: Client, body: dict[str, Any]) -> TokenIds:
    """Request the token ids of a text from the server's path /tokenize."""
    tokenized: Tokenized = await json_at(client, "/tokenize", Tokenized, body)
    return tokenized.tokens


async def in_queue(client: Client, running: str, waiting: str = "") -> int | None:
    """Return the sum of two gauges at /metrics, which count the running and the waiting requests.
    Return None if the server lacks the gauge `running`.
    """
    text = (await client.look("/metrics")).body.decode(errors="replace")
    at_work = metric(text, running)
    if at_work is None or not waiting:
        return at_work
    return at_work + (metric(text, waiting) or 0)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of a server's speculative decoding since the server started."""

    rounds: int  # how often the server proposed a few tokens for one sequence
    proposed: int
    # for the first, second and later positions in a proposal: how many proposed tokens were
    # accepted
    accepted: tuple[int, ...]

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Return how much the counters have grown since an earlier reading of the same server."""
        before = (*earlier.accepted, *[0] * len(self.accepted))
        return DraftCounts(
            self.rounds - earlier.rounds,
            self.proposed - earlier.proposed,
            tuple(now - then for now, then in zip(self.accepted, before, strict=False)),
        )


def metrics_by_place(text: str, name: str) -> tuple[int, ...]:
    """Return the values of a Prometheus counter with a label `position`, for the positions 0, 1, 2
    and so on.

    Each value is summed over all engines of the server.
    """
    counts = dict[int, int]()
    for line in text.splitlines():
        label = re.search(r'position="(\d{1,3})"', line)
        if line.startswith(name + "{") and label is not None:
            value = metric(line, name)
            place = int(label[1])
            counts[place] = counts.get(place, 0) + (value or 0)
    return tuple(counts.get(place, 0) for place in range(max(counts, default=-1) + 1))


def metric(text: str, name: str) -> int | None:
    """Return the value of a gauge or counter in Prometheus's text format, summed over its labels.
    Return None if it is missing or its value is malformed.
    """
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    total = 0
    for line in lines:
        # Accept only short numbers. A faulty server may send a number such as 1e+0999999, which
        # takes long to convert.
        count = re.fullmatch(r"\d{1,15}(\.\d{0,15})?(e\+0\d)?", line.rsplit(" ", 1)[-1])
        if count is None:
            return None
        total += int(float(count[0]))
    return total if lines else None


class DialectClient:
    """Client that sends requests in a server's dialect and checks all replies.

    `hot_convention` says whether the log-probs of tokens sampled at temperatures other than 0 and 1
    are raw or processed. The probe measures which of the two they are.
    """

    def __init__(
        self, client: Client, dialect: Dialect, spec: EngineSpec, tokenizer: Tokenizer
    ) -> None:
        self.client = client
        self.dialect = dialect
        self.spec = spec
        self.tokenizer = tokenizer
        self.hot_convention: Literal["raw", "processed"] = (
            "processed" if dialect.logprobs == "processed" else "raw"
        )
        self._name = client.name
        self._ratings = _RatingCache(self._rate)

    async def sample(self, request: SampleRequest) -> Completion:
        """Request a completion, check it, and return it with raw log-probs.

        :raises BadReply: if the reply cannot be correct.
        """
        sampled, length, ended = await self._sampled(request)
        if self.spec.logprobs == "none":
            logprobs: tuple[float, ...] = ()
        else:
            logprobs = await self._raw(sampled, request, length)
        ids = sampled.ids[:length]
        # If `ended` is "end", the last id is an end token, which has no text.
        text = self.tokenizer.decode(ids[:-1] if ended == "end" else ids)
        return Completion(ids, text, ended, logprobs[:length], sampled.cached_tokens)

    async def sample_raw(self, request: SampleRequest) -> RawCompletion:
        """Request a completion and check it, but return it with its log-probs as the server sent
        them.
        """
        sampled, _, _ = await self._sampled(request)
        return sampled

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the log-probs of the suffix's tokens. If the server can rate but not score, the
        suffix must consist of one token.

        :raises UnsupportedByEngine: if the server can neither score nor rate.
        :raises BadReply: if the reply cannot be correct.
        """
        if not isinstance(self.dialect, Scorer):
            return await self._rated(request)
        scores = await self._score_once(self.dialect, request, "read")
        if scores is None:
            # The reply has no scores, because the server took the chunk from its cache. Count this,
            # and request the scores again without the cache.
            self.client.traffic.uncached += 1
            scores = await self._score_once(self.dialect, request, "skip")
        if scores is None:
            raise BadReply(
                self._name,
                "the reply has no scores, although the request asked the server not "
                "to use its cache",
            )
        return scores

    async def top_tokens(
        self, prefix: TokenIds, suffix: TokenIds, top: int
    ) -> list[dict[int, float]]:
        """Return the `top` most likely tokens at each position of the suffix, as a dict from token
        id to log-prob. The most likely token comes first.

        :raises UnsupportedByEngine: if the server does not list likely tokens.
        :raises BadReply: if the reply cannot be correct.
        """
        lister = self.dialect
        if not isinstance(lister, TopScorer):
            raise UnsupportedByEngine(
                self._name,
                f"servers of dialect {lister.name} cannot list the most likely tokens of a text",
            )
        ids = prefix + suffix

        def read(reply: bytes) -> list[dict[int, float]]:
            rows: list[dict[int, float]] = self._read(lister.read_top, reply, ids)
            if len(rows) != len(ids) - 1:
                raise BadReply(
                    self._name,
                    f"the reply lists likely tokens at {len(rows)} positions, expected "
                    f"{len(ids) - 1}",
                )
            kept = list[dict[int, float]]()
            for row in rows[len(prefix) - 1 :]:
                if not row or not are_scores(tuple(row.values())):
                    raise BadReply(
                        self._name,
                        "a list of likely tokens is empty or has an invalid log-probability",
                    )
                likeliest = sorted(row, key=row.__getitem__, reverse=True)[:top]
                kept.append({token: row[token] for token in likeliest})
            return kept

        # The limit on the reply's size depends on this number of tokens: each position has its own
        # token and `top` others.
        size = len(ids) * (1 + top)
        return await self.client.ask(
            lambda rid: lister.top_call(ids, top), read, self.dialect.abort, size
        )

    async def ratings(self, ids: TokenIds) -> dict[str, float]:
        """Return the most likely next words after a prefix, as a dict from word to log-prob.

        Repeated calls with the same ids send only one request, because one reply contains all ten
        digits that a rating can be.

        :raises UnsupportedByEngine: the server does not list likely words.
        """
        return await self._ratings.of(ids)

    def _sampled(self, request: SampleRequest) -> Awaitable[tuple[RawCompletion, int, Ending]]:
        """Request a completion, and return it with the number of its valid ids and the reason why
        it ended.

        A valid completion ends with a stop string, an end token or the requested length. Any other
        reply is rejected and requested again.
        """
        make = partial(self._sampling, request)
        read = partial(self._believed, request)
        tokens = len(request.ids) + request.max_tokens
        return self.client.ask(make, read, self.dialect.abort, tokens)

    def _sampling(self, request: SampleRequest, rid: str) -> Call:
        """Return the call for a completion. The model's end tokens are added to the request's stop
        ids.
        """
        # Make the request field by field, because `dataclasses.replace` takes as long as encoding
        # the request as JSON.
        sent = SampleRequest(
            request.ids,
            request.max_tokens,
            request.sampling,
            request.seed,
            stop=request.stop,
            stop_ids=(*request.stop_ids, *self.spec.end_ids),
            rollout=request.rollout,
            priority=request.priority,
            thinking_budget=request.thinking_budget,
        )
        return self.dialect.sample_call(sent, rid)

    def _believed(self, request: SampleRequest, reply: bytes) -> tuple[RawCompletion, int, Ending]:
        sampled = self._read(self.dialect.read_sample, reply, request)
        check_reply(sampled, request, self.spec)
        length, ended = find_end(sampled, request, self.spec, self.tokenizer)
        return sampled, length, ended

    async def _raw(
        self, sampled: RawCompletion, request: SampleRequest, length: int
    ) -> tuple[float, ...]:
        """Return the raw log-probs of a completion's first `length` ids.

        If the server did not send raw log-probs, they are requested by scoring the ids. If the
        caller does not need them, the result is empty.
        """
        sent = sampled.logprobs[:length]
        is_whole = len(sent) == length and None not in sent
        is_processed = self.hot_convention == "processed" and not self._is_raw(request.sampling)
        if is_whole and not is_processed:
            return sent  # type: ignore[return-value]  # None is not among them
        if request.logprobs == "unneeded":
            return ()
        ids = sampled.ids[:length]
        if isinstance(self.dialect, Scorer):
            scored = ScoreRequest(request.ids, ids, request.rollout, request.priority)
            return (await self.score(scored)).logprobs
        if is_processed or not isinstance(self.dialect, Forcer):
            raise UnsupportedByEngine(
                self._name,
                "the server does not return raw log-probabilities, which do not depend on the "
                "temperature",
                "Sample at temperature 1",
            )
        known = [value for value in sent if value is not None]
        force = partial(self._force, self.dialect)
        # If one log-prob is missing, all later ones are missing too. So request one score for each
        # position after the known ones.
        forced = await collect(
            [
                partial(force, request.ids + ids[:number], ids[number])
                for number in range(len(known), length)
            ]
        )
        return (*known, *forced)

    def _is_raw(self, sampling: Sampling) -> bool:
        """Return whether these sampling settings leave log-probs unchanged, so that processed and
        raw ones are the same.
        """
        # For temperature 0, servers do not change the distribution, but only choose its most likely
        # token. So processed log-probs equal raw ones.
        if sampling.temperature == 0.0:
            return True
        if self.dialect.cuts_logprobs:
            return sampling == Sampling()
        return sampling.temperature == 1.0

    async def _force(self, forcer: Forcer, ids: TokenIds, token: int) -> float:
        def make(rid: str) -> Call:
            return forcer.force_call(ids, token)

        def read(reply: bytes) -> float:
            value = self._read(forcer.read_forced, reply, token)
            if not are_logprobs((value,)):
                raise BadReply(self._name, f"the reply has an invalid log-probability, {value}")
            return value

        return await self.client.ask(make, read, self.dialect.abort, len(ids) + 1)

    async def _score_once(
        self, scorer: Scorer, request: ScoreRequest, cache: Literal["read", "skip"]
    ) -> Scores | None:
        def make(rid: str) -> Call:
            return scorer.score_call(request, rid, cache)

        def read(reply: bytes) -> Scores | None:
            scores = self._read(scorer.read_scores, reply, request)
            if scores is None:
                return None
            if len(scores.logprobs) != len(request.suffix):
                here, there = len(scores.logprobs), len(request.suffix)
                raise BadReply(
                    self._name,
                    f"the reply has {counted(here, 'score')} for {counted(there, 'token')}",
                )
            if not are_scores(scores.logprobs):
                raise BadReply(self._name, "a score in the reply is above 0 or not a number")
            return scores

        tokens = len(request.prefix) + len(request.suffix)
        return await self.client.ask(make, read, self.dialect.abort, tokens)

    async def _rated(self, request: ScoreRequest) -> Scores:
        if len(request.suffix) != 1:
            advice = "Use a method that only rates (spec-reason), or a target on vLLM or SGLang"
            problem = (
                f"the server can only score a single token (a rating), not {len(request.suffix)} "
                f"tokens"
            )
            raise UnsupportedByEngine(self._name, problem, advice)
        word = self.tokenizer.decode(request.suffix).strip()
        ratings = await self.ratings(request.prefix)
        return Scores((ratings.get(word, float("-inf")),))

    async def _rate(self, ids: TokenIds) -> dict[str, float]:
        rater = self.dialect
        if not isinstance(rater, Rater):
            raise UnsupportedByEngine(
                self._name, f"servers of dialect {rater.name} can neither score nor rate"
            )

        def read(reply: bytes) -> dict[str, float]:
            words = self._read(rater.read_ratings, reply)
            if not words:
                raise BadReply(self._name, "the reply lists no likely tokens")
            return words

        make = partial(rater.rating_call, ids)
        return await self.client.ask(make, read, self.dialect.abort, len(ids) + 1)

    def _read(self, reading: Callable[..., T], *args: Any) -> T:
        try:
            return reading(*args)
        except ValueError as error:
            problem = f"the reply does not have the format of dialect {self.dialect.name} ({error})"
            raise BadReply(self._name, problem) from error


class _RatingCache:
    """Cache of the most likely next words, keyed by the token ids before them.

    If several callers ask for the same ids at the same time, only one request is sent.
    """

    def __init__(self, ask: Callable[[TokenIds], Awaitable[dict[str, float]]]) -> None:
        self._ask = ask
        self._kept: Recent[TokenIds, dict[str, float]] = Recent(_KEPT_RATINGS)
        self._asking: dict[TokenIds, anyio.Event] = {}

    async def of(self, ids: TokenIds) -> dict[str, float]:
        """Return the most likely words after a prefix, from the cache if possible.

        If the caller that sends the request fails or is cancelled, the next waiting caller sends it
        again.
        """
        while ids not in self._kept:
            asked = self._asking.get(ids)
            if asked is not None:
                await asked.wait()
                continue
            self._asking[ids] = anyio.Event()
            try:
                self._kept[ids] = await self._ask(ids)
            finally:
                self._asking.pop(ids).set()
        return self._kept[ids]


def check_reply(sampled: RawCompletion, request: SampleRequest, spec: EngineSpec) -> None:
    """Check that a reply has a valid number of ids and log-probs with possible values.

    :raises BadReply: an id or a log-prob is impossible.
    :raises NoVisibleText: the model used all its tokens for reasoning that the server does not
        show.
    """
    ids = sampled.ids
    logprobs = sampled.logprobs
    if not ids and sampled.finish == "length" and spec.logprobs == "none":
        raise NoVisibleText(spec.name, request.max_tokens)
    if not ids:
        raise BadReply(spec.name, "the reply has no tokens")
    if len(ids) > request.max_tokens:
        problem = f"the reply has {len(ids)} tokens, but only {request.max_tokens} were requested"
        raise BadReply(spec.name, problem)
    if min(ids) < 0 or max(ids) >= spec.vocabulary:
        raise BadReply(
            spec.name, f"the reply has a token id that is not between 0 and {spec.vocabulary - 1}"
        )
    if len(logprobs) != len(ids) and (logprobs or spec.logprobs != "none"):
        found = counted(len(logprobs), "log-probability", "log-probabilities")
        problem = f"the reply has {found} for {counted(len(ids), 'id')}"
        raise BadReply(spec.name, problem)
    if not are_logprobs(logprobs):
        raise BadReply(spec.name, "a log-probability in the reply is above 0 or not a number")


def find_end(
    sampled: RawCompletion, request: SampleRequest, spec: EngineSpec, tokenizer: Tokenizer
) -> tuple[int, Ending]:
    """Return how many of a completion's ids are valid, and why it ended.

    A server may write past a stop string if it generates several tokens per step, or may not know a
    stop id. The completion is therefore cut after the id that completes a stop string, or after the
    first end id.

    :raises BadReply: if the server stopped before the requested length without a stop string or an
        end id.
    """
    ids = sampled.ids
    length = len(ids)
    ended: Ending | None = None
    enders = {*spec.end_ids, *request.stop_ids}
    if not enders.isdisjoint(ids):
        first = next(index for index, token in enumerate(ids) if token in enders)
        length = first + 1
        ended = "end" if ids[first] in spec.end_ids else "delimiter"
    stopped = _stop_length(ids[:length], request.stop, tokenizer)
    if stopped and (ended is None or stopped < length):
        return stopped, "delimiter"
    if ended is not None:
        return length, ended
    # In a text dialect, the server also counts tokens without text, for which atts has no ids. The
    # number of ids may then be below the limit.
    is_full = len(ids) == request.max_tokens or spec.logprobs == "none"
    if sampled.finish == "length" and is_full:
        return len(ids), "length"
    problem = (
        f"the server stopped after {len(ids)} of {request.max_tokens} tokens without a stop "
        "string or an end token"
    )
    raise BadReply(
        spec.name,
        f"{problem} (the last id is {ids[-1]})",
        "Check whether this id is an end token that the tokenizer does not know",
    )


def _stop_length(ids: TokenIds, stops: tuple[str, ...], tokenizer: Tokenizer) -> int:
    """Return the smallest number of leading ids whose text contains a stop string, or 0 if the text
    of all ids contains none.

    The search is a bisection, because adding ids never makes the text shorter.
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
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
