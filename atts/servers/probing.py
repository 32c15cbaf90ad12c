"""Probe of a server: which claims of its dialect hold, and the values by which it is recognised later."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import anyio

from atts.concurrency import collect, task_group
from atts.core import Message, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Capability
from atts.errors import BadReply, EngineError, FingerprintError, UnsupportedByEngine
from atts.sampling import Seed
from atts.servers.dialect import DialectClient, Identity, LogProbs, Rater, RawCompletion, Scorer

_COMPARED_TEXTS = 8
_TOKENS = 12
_WARM = Sampling(temperature=0.7)
_GREEDY = Sampling(temperature=0.0)
_MOST_DEVIATIONS = 5.0  # an honest server passes it about once in a million times
_NEAR = 0.1  # nats between two tokens that either may be the likeliest one


class Lossless(NamedTuple):
    """What a server was seen to write: in how far it is what its own law says."""

    tokens: int  # sampled in texts, each beside one drawn alone
    worse: float  # nats by which they are less likely than those, on average
    # of that from 0, in standard errors; below 0 where texts are likelier than they may be
    deviation: float
    # the most nats by which a token of a greedy text is less likely than the likeliest
    misled: float

    @property
    def trouble(self) -> str:
        """What is wrong with it; "" if nothing is."""
        found = list[str]()
        if abs(self.deviation) > _MOST_DEVIATIONS:
            words = f"{self.tokens} tokens sampled at temperature {_WARM.temperature:g} are {abs(self.worse):.2f} nats "
            words += (
                f"{'less' if self.worse > 0 else 'more'} likely than such as are drawn one by one"
            )
            found.append(f"{words} ({abs(self.deviation):.1f} deviations)")
        if self.misled > _NEAR:
            found.append(
                f"its greedy text has a token {self.misled:.2f} nats less likely than the likeliest"
            )
        return " and ".join(found)

    def __str__(self) -> str:
        if self.trouble:
            return f"what it writes is not what its law says: {self.trouble}; serve it without speculation"
        return f"{self.tokens} sampled tokens follow its law ({self.deviation:+.1f} deviations), greedy ones are best"


async def see_lossless(requests: DialectClient, prompt: TokenIds, greedy: TokenIds) -> Lossless:
    """Look at texts sampled after the prompt, and at one that was written greedily.

    :raises EngineError: the server fails.
    """
    texts = await collect(
        [partial(_differences, requests, prompt, number) for number in range(_COMPARED_TEXTS)]
    )
    found = [value for text in texts for value in text]
    gaps = await collect(
        [partial(_gap, requests, prompt + greedy[:n], greedy[n]) for n in range(len(greedy))]
    )
    root = math.sqrt(sum(value * value for value in found))
    return Lossless(
        len(found), sum(found) / max(1, len(found)), sum(found) / root if root else 0.0, max(gaps)
    )


async def _differences(requests: DialectClient, prompt: TokenIds, number: int) -> list[float]:
    """For each token of a text, how much likelier one drawn alone in its place is."""
    seed = Seed(run=100 + number, purpose="probe")
    ids = (await requests.sample_raw(SampleRequest(prompt, _TOKENS, _WARM, seed))).ids
    if not ids:
        return []
    scores = (await requests.score(ScoreRequest(prompt, ids))).logprobs

    async def alone(place: int) -> float:
        before = prompt + ids[:place]
        own = replace(seed, sample=1 + place)
        token = (await requests.sample_raw(SampleRequest(before, 1, _WARM, own))).ids[:1]
        return (await requests.score(ScoreRequest(before, token))).logprobs[0]

    drawn = await collect([partial(alone, place) for place in range(len(ids))])
    floor = -30.0  # a token of no mass at all counts as this
    return [max(floor, other) - max(floor, own) for other, own in zip(drawn, scores, strict=True)]


async def _gap(requests: DialectClient, ids: TokenIds, token: int) -> float:
    """How much less likely a token of a greedy text is than the one that is written greedily alone."""
    alone = await requests.sample_raw(SampleRequest(ids, 1, _GREEDY, Seed(purpose="probe")))
    if alone.ids[0] == token:
        return 0.0
    pairs = await collect(
        [partial(requests.score, ScoreRequest(ids, (each,))) for each in (alone.ids[0], token)]
    )
    best, own = (scores.logprobs[0] for scores in pairs)
    return best - own


_TEXTS = ("Let x = 2.\n\nThen 12345 + 678 = 13023.", "\n\n  two  spaces", "naïve \\boxed{42} π")
_QUESTION = "Start at 17. +5, -8, +11. What is the result?"
_TOKENS = 12
_GREEDY = Sampling(temperature=0.0)
_HOT = Sampling(temperature=2.0)
TOLERANCE = 0.05  # nats; servers that batch differently differ by this much

Answer = Literal["yes", "no", "unknown"]
Seen = Literal["raw", "processed", "unknown"]


class OtherTokenizer(FingerprintError):
    """The server reads text as other ids than the tokenizer that was given."""

    def __init__(self, engine: str, text: str, theirs: TokenIds, ours: TokenIds) -> None:
        super().__init__(f"engine {engine}", [(repr(text), theirs, ours)])
        seen = f"of {text[:24]!r} the server makes {_few(theirs)}, the tokenizer {_few(ours)}"
        problem = f"the tokenizer is not that of the model served: {seen}"
        self.args = (
            f"engine {engine}: {problem}. Name that model's: --tokenizer FOLDER, or "
            f"?tokenizer=FOLDER in its name",
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: whether it holds, and what was seen."""

    name: str
    answer: Answer
    seen: str
    needed: Capability | None = None

    def __str__(self) -> str:
        return f"{self.answer:8}{self.name}: {self.seen}"


@dataclass(frozen=True, slots=True)
class Known:
    """What a probe learnt, and the values by which a server is known again."""

    findings: tuple[Finding, ...]
    sampled: Literal["raw", "processed"]  # the log-probs of sampled tokens
    text: TokenIds  # written greedily after the probe's prompt
    # their log-probs: scored, or as sampled where the server cannot score
    values: tuple[float, ...]
    convention: Seen = "unknown"  # as measured


class ServerProbe:
    """Looks at one server, a few cheap calls long."""

    def __init__(self, requests: DialectClient) -> None:
        self._requests = requests
        self._client = requests.client
        self._dialect = requests.dialect
        self._spec = requests.spec
        self._tokenizer = requests.tokenizer
        self._prompt = self._tokenizer.render([Message("user", _QUESTION)])

    async def run(self) -> Known:
        """Look at everything.

        :raises FingerprintError: the server's tokenizer is another than ours.
        :raises EngineError: it fails at something without which nothing can be said.
        """
        findings = [Finding("engine", "yes", f"{self._spec.engine}, model {self._spec.model}")]
        findings.append(await self._see_tokenizer())
        written = await self._requests.sample_raw(self._request(_GREEDY))
        with_them = "their log-probs" if written.logprobs else "no log-probs"
        findings.append(
            Finding("ids", "yes", f"{len(written.ids)} ids came back with {with_them}", "sample")
        )
        findings.append(await self._see_stop(written.ids))
        findings.append(await self._see_seeds())
        values = _sent(written)
        convention: Seen = "unknown"
        if isinstance(self._dialect, Scorer):
            found, values = await self._see_scores(written)
            findings.extend(found)
            convention = await self._convention() if values else "unknown"
            if values:
                findings.append(await self._see_speculation(written.ids))
        if isinstance(self._dialect, Rater):
            findings.append(await self._see_rating())
        sampled = self._dialect.logprobs if convention == "unknown" else convention
        findings.append(_convention_seen(sampled, convention))
        findings.append(await self._see_abort())
        known: Literal["raw", "processed"] = "processed" if sampled == "processed" else "raw"
        return Known(tuple(findings), known, written.ids, values, convention)

    async def again(self, known: Known) -> tuple[tuple[float, ...], Seen]:
        """The values and the convention of what is known, asked for again."""
        if isinstance(self._dialect, Scorer):
            scores = await self._requests.score(ScoreRequest(self._prompt, known.text))
            return scores.logprobs, await self._convention()
        written = await self._requests.sample_raw(self._request(_GREEDY))
        return _sent(written) if written.ids == known.text else (), "unknown"

    def _request(self, sampling: Sampling, seed: int = 0, tokens: int = _TOKENS) -> SampleRequest:
        return SampleRequest(self._prompt, tokens, sampling, Seed(run=seed, purpose="probe"))

    async def _see_tokenizer(self) -> Finding:
        if self._dialect.speaks == "text":
            return Finding(
                "tokenizer",
                "unknown",
                "text goes both ways: its tokens are the server's own affair",
            )
        try:
            for text in _TEXTS:
                theirs = await self._dialect.tokenize(self._client, text)
                ours = self._tokenizer.encode(text)
                if theirs != ours:
                    raise OtherTokenizer(self._client.name, text, theirs, ours)
        except (EngineError, ValueError) as error:
            return Finding("tokenizer", "unknown", f"the server does not tokenize for us ({error})")
        return Finding("tokenizer", "yes", f"the server's ids of {len(_TEXTS)} texts are ours")

    async def _see_stop(self, ids: TokenIds) -> Finding:
        place = len(ids) // 2
        stop = self._tokenizer.decode(ids[place : place + 1])
        if not stop or "\ufffd" in stop:
            return Finding("stop", "unknown", "no text to stop at was written")
        cut = await self._requests.sample_raw(replace(self._request(_GREEDY), stop=(stop,)))
        if len(cut.ids) < len(ids) or cut.finish == "stop":
            return Finding("stop", "yes", f"it stopped at {stop!r} after {len(cut.ids)} tokens")
        return Finding(
            "stop",
            "no",
            f"it wrote {len(cut.ids)} tokens past {stop!r}: they are cut off here, and paid for",
        )

    async def _see_seeds(self) -> Finding:
        first, again = [
            await self._requests.sample_raw(self._request(Sampling(temperature=1.5), 7))
            for _ in range(2)
        ]
        if first.ids == again.ids:
            return Finding("seeds", "yes", "a seed gave the same text twice")
        return Finding(
            "seeds",
            "no",
            "a seed gave two texts: runs on this server cannot be repeated token for token",
        )

    async def _see_scores(self, written: RawCompletion) -> tuple[list[Finding], tuple[float, ...]]:
        """A greedy text is scored, again, and with a strange token planted in it."""
        ids = written.ids
        try:
            first = await self._requests.score(ScoreRequest(self._prompt, ids))
            again = await self._requests.score(ScoreRequest(self._prompt, ids))
            place = len(ids) // 2
            strange = self._strange(ids[place])
            spoilt = await self._requests.score(
                ScoreRequest(self._prompt, (*ids[:place], strange, *ids[place + 1 :]))
            )
        except (BadReply, UnsupportedByEngine) as error:
            return [Finding("scores", "no", str(error), "score")], ()
        findings = [self._compare(written, first, again)]
        gain = spoilt.logprobs[place] - first.logprobs[place]
        seen = f"a planted token scores {gain:.2f} nats against the greedy one"
        findings.append(Finding("planted", "yes" if gain < 0 else "no", seen, "score"))
        later = max(again.cached_tokens, spoilt.cached_tokens)
        seen = f"{first.cached_tokens}, then {later} cached tokens while scoring"
        findings.append(Finding("cache", "yes" if later else "unknown", seen))
        return findings, first.logprobs

    async def _see_rating(self) -> Finding:
        """One token with its alternatives."""
        try:
            words = await self._requests.ratings(self._prompt)
        except EngineError as error:
            if error.retryable and not isinstance(error, BadReply):
                raise
            return Finding(
                "rating", "no", f"it does not tell the likeliest tokens ({error})", "rate"
            )
        return Finding("rating", "yes", f"{len(words)} likely words with log-probs", "rate")

    async def _see_speculation(self, greedy: TokenIds) -> Finding:
        """Whether the server speculates, and if so whether its texts still follow the law that it
        scores by.
        """
        told = await self._dialect.speculation(self._client)
        if told == "":
            return Finding("speculation", "yes", "the server does not speculate")
        try:
            seen = await see_lossless(self._requests, self._prompt, greedy)
        except (BadReply, UnsupportedByEngine) as error:
            return Finding("speculation", "unknown", str(error))
        words = f"{told or 'it does not say whether it speculates'}; {seen}"
        return Finding("speculation", "no" if seen.trouble else "yes", words, "sample")

    def _strange(self, token: int) -> int:
        """An id far from the given one, and no end."""
        size = self._spec.vocabulary
        candidates = ((token + size // 2 + step) % size for step in range(size))
        return next(
            index for index in candidates if index != token and index not in self._spec.end_ids
        )

    def _compare(self, written: RawCompletion, first: Scores, again: Scores) -> Finding:
        drift = _distance(first.logprobs, again.logprobs)
        if drift > TOLERANCE:
            return Finding(
                "scores",
                "no",
                f"the same chunk scored {drift:.3f} nats otherwise from the cache",
                "score",
            )
        # at temperature 0 both are of the raw distribution
        off = _distance(first.logprobs, _sent(written))
        if off > 2 * TOLERANCE:
            return Finding(
                "scores",
                "no",
                f"scores are {off:.3f} nats from the log-probs sampled with",
                "score",
            )
        return Finding(
            "scores",
            "yes",
            f"{len(first.logprobs)} finite scores, within {max(drift, off):.4f} nats",
            "score",
        )

    async def _convention(self) -> Seen:
        """Whether log-probs of hot samples are of the raw distribution: compared with scores, which
        are.
        """
        hot = await self._requests.sample_raw(self._request(_HOT, 3))
        sampled = _sent(hot)
        if len(sampled) != len(hot.ids):
            return "unknown"
        scores = await self._requests.score(ScoreRequest(self._prompt, hot.ids))
        if all(value > -TOLERANCE for value in scores.logprobs):
            return "unknown"  # so sure of itself that heat changes nothing
        return "raw" if _distance(scores.logprobs, sampled) <= 2 * TOLERANCE else "processed"

    async def _see_abort(self) -> Finding:
        """A long request, cancelled, must leave the server's count of running requests."""
        before = await self._dialect.running(self._client)
        if before is None:
            return Finding("abort", "unknown", "the server does not say how many requests run")
        room = self._spec.context_length - len(self._prompt)
        request = self._request(_HOT, 11, min(2048, room))
        most = before
        over = anyio.Event()

        async def write() -> None:
            await self._requests.sample_raw(request)
            over.set()

        async with task_group() as group:
            group.start_soon(write)
            with anyio.move_on_after(1.0):
                while most <= before and not over.is_set():
                    most = max(most, await self._dialect.running(self._client) or 0)
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        if most <= before:
            return Finding("abort", "unknown", "the request was over before it could be cancelled")
        began = anyio.current_time()
        with anyio.move_on_after(5.0):
            while (await self._dialect.running(self._client) or 0) >= most:  # noqa: ASYNC110  # it can only be polled
                await anyio.sleep(0.02)
            return Finding(
                "abort",
                "yes",
                f"the slot was free {anyio.current_time() - began:.2f} s after the cancel",
            )
        return Finding(
            "abort",
            "no",
            "a cancelled request still runs after 5 s: rollouts given up keep the server busy",
        )


def refuse(name: str, findings: tuple[Finding, ...], needs: frozenset[Capability]) -> None:
    """Refuse a server that was seen not to do what is needed.

    :raises UnsupportedByEngine: with every reason.
    """
    reasons = [
        f"{found.name}: {found.seen}"
        for found in findings
        if found.answer == "no" and found.needed in needs
    ]
    if reasons:
        raise UnsupportedByEngine(
            name, "; ".join(reasons), "Use a server that can, or a pipeline that needs less"
        )


def same_as_before(
    name: str,
    was: Identity,
    now: Identity,
    known: Known,
    values: tuple[float, ...],
    convention: Seen,
) -> None:
    """Compare a server with the one that was opened, by what it says and by `ServerProbe.again`.

    :raises UnsupportedByEngine: it is another.
    """
    pairs: list[tuple[str, object, object]] = [
        (field, getattr(was, field), getattr(now, field))
        for field in ("engine", "model", "context_length")
    ]
    if "unknown" not in (known.convention, convention):
        pairs.append(("log-probs", known.convention, convention))
    if len(known.values) != len(values) or _distance(known.values, values) > 2 * TOLERANCE:
        pairs.append(("log-probs of a known text", _short(known.values), _short(values)))
    changes = [f"{what} was {old}, is {new}" for what, old, new in pairs if old != new]
    if changes:
        advice = "Serve the old one again, or start a run of its own on the new one"
        raise UnsupportedByEngine(
            name, f"the server changed while in use ({'; '.join(changes)})", advice
        )


def _convention_seen(sampled: LogProbs, measured: Seen) -> Finding:
    if sampled == "none":
        return Finding("convention", "yes", "no log-probs come with sampled text")
    seen = f"sampled log-probs are {sampled}" + (" (not measured)" if measured == "unknown" else "")
    return Finding("convention", "yes" if measured != "unknown" else "unknown", seen)


def _sent(written: RawCompletion) -> tuple[float, ...]:
    """The log-probs that came."""
    return tuple(value for value in written.logprobs if value is not None)


def _distance(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    if len(left) != len(right):
        return float("inf")
    return max((abs(a - b) for a, b in zip(left, right, strict=True) if a != b), default=0.0)


def _few(ids: TokenIds) -> str:
    return " ".join(map(str, ids[:6])) + " ..." * (len(ids) > 6)


def _short(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values[:3]) + ", ...)"
