"""Tests of a server's capabilities, and later checks that the server has not changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import anyio

from atts.concurrency import collect, task_group
from atts.core import Message, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Capability, EngineSpec, first_values, is_other_model
from atts.errors import (
    BadReply,
    ContextOverflow,
    EngineError,
    FingerprintError,
    UnsupportedByEngine,
)
from atts.sampling import Seed
from atts.servers.dialect import (
    DialectClient,
    Identity,
    LogProbs,
    NoVisibleText,
    Rater,
    RawCompletion,
    Scorer,
)

# Two requests to the same model may give log-probs that differ by up to this number of nats,
# because the server batches the requests differently.
TOLERANCE = 0.05
_TEXTS = ("Let x = 2.\n\nThen 12345 + 678 = 13023.", "\n\n  two  spaces", "naïve \\boxed{42} π")
_QUESTION = "Start at 17. +5, -8, +11. What is the result?"
# The test texts contain mistakes and sudden changes of subject, because there the log-probs of
# different models differ most.
_MISTAKES = "So only: 17 plus 5 is 23.\n\nSo only: 23 minus 8 is 16.\n\n"
_FIXED_TEXT = (
    f"{_MISTAKES}So only: 16 plus 11 is 26.\n\n"
    "The answer is \\boxed{26}. Canberra is the capital of Australia, and 17 * 23 = 391."
)
_TOKENS = 12
# A token limit, large enough for a model to reason about the question and then answer it.
_REASONING_TOKENS = 2048
_GREEDY = Sampling(temperature=0.0)
_HOT = Sampling(temperature=2.0)

Answer = Literal["yes", "no", "unknown"]
Convention = Literal["raw", "processed", "unknown"]


class OtherTokenizer(FingerprintError):
    """Error for a server whose tokenizer returns other ids for a text than atts's tokenizer does."""

    def __init__(self, engine: str, text: str, theirs: TokenIds, ours: TokenIds) -> None:
        super().__init__(f"engine {engine}", [(repr(text), theirs, ours)])
        seen = (
            f"for {text[:24]!r} the server returns the ids {_first_ids(theirs)}, but the tokenizer "
            f"returns {_first_ids(ours)}"
        )
        problem = f"the tokenizer does not belong to the served model: {seen}"
        self.args = (
            f"engine {engine}: {problem}. To name the tokenizer of the served model, "
            "add ?tokenizer=FOLDER at the end of its address",
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test of a server, with a description of what the test saw."""

    name: str
    answer: Answer
    seen: str
    needed: Capability | None = None

    def __str__(self) -> str:
        return f"{self.answer:8}{self.name}: {self.seen}"


@dataclass(frozen=True, slots=True)
class Known:
    """The results of all tests of a server, and measured values that show later whether its model
    has changed.
    """

    findings: tuple[Finding, ...]
    hot_convention: Literal["raw", "processed"]
    """The kind of log-probs that come with tokens sampled at temperatures other than 0 and 1: raw,
    or processed by the sampling settings. If the kind was not measured, this is the dialect's
    value.
    """
    text: TokenIds
    """The ids with which the server continued the probe's prompt at temperature 0."""
    values: tuple[float, ...]
    """The log-probs of the ids in `text`. They are scores if the server can score, and otherwise
    the log-probs that came with the sampled ids.
    """
    convention: Convention = "unknown"
    """The measured kind of log-probs that come with sampled tokens: raw, or processed by the
    sampling settings. "unknown" if the kind could not be measured.
    """
    fingerprint: tuple[float, ...] = ()
    """Log-probs of a test text, as `ServerProbe.fingerprint` returned them when the engine opened.
    If they differ at a later check, the server has another model.
    """


class Seen(NamedTuple):
    """Measurements of a later check, to be compared with the values in `Known`."""

    values: tuple[float, ...]
    convention: Convention
    fingerprint: tuple[float, ...] = ()


class ServerProbe:
    """Tests of one server, each of which sends a few cheap requests."""

    def __init__(self, requests: DialectClient) -> None:
        self._requests = requests
        self._client = requests.client
        self._dialect = requests.dialect
        self._spec = requests.spec
        self._tokenizer = requests.tokenizer
        self._prompt = self._tokenizer.render([Message("user", _QUESTION)])

    async def run(self) -> Known:
        """Run the tests of all capabilities that the server's dialect claims.

        :raises FingerprintError: if the server has another tokenizer.
        :raises EngineError: if a request fails whose reply all later tests need.
        """
        findings = [Finding("engine", "yes", f"{self._spec.engine}, model {self._spec.model}")]
        if self._dialect.speaks == "text":
            await self._look_at_text(findings)
            return Known(tuple(findings), "raw", (), ())
        findings.append(await self._see_tokenizer())
        written = await self._requests.sample_raw(self._request(_GREEDY))
        evidence = "their log-probs" if written.logprobs else "no log-probs"
        findings.append(
            Finding(
                "ids",
                "yes",
                f"the server returned {len(written.ids)} token ids with {evidence}",
                "sample",
            )
        )
        findings.append(await self._see_stop(written.ids))
        findings.append(await self._see_seeds())
        values = _known_logprobs(written)
        convention: Convention = "unknown"
        fingerprint: tuple[float, ...] = ()
        if isinstance(self._dialect, Scorer):
            scoring, values = await self._see_scores(written)
            findings.extend(scoring)
            if values:
                convention = await self._measure_convention()
                fingerprint = await self.fingerprint()
                findings.append(await self._see_speculation(written.ids))
        else:
            fingerprint = await self.fingerprint()
        if isinstance(self._dialect, Rater):
            findings.append(await self._see_rating())
        sampled = self._dialect.logprobs if convention == "unknown" else convention
        findings.append(_convention_finding(sampled, convention))
        findings.append(await self._see_abort())
        known: Literal["raw", "processed"] = "processed" if sampled == "processed" else "raw"
        return Known(tuple(findings), known, written.ids, values, convention, fingerprint)

    async def again(self, known: Known) -> Seen:
        """Measure the fingerprint and the kind of log-probs again, to detect that the server has
        changed.
        """
        seen = await self.glance(known)
        if isinstance(self._dialect, Scorer) and self._dialect.speaks != "text":
            return seen._replace(convention=await self._measure_convention())
        return seen

    async def glance(self, known: Known) -> Seen:
        """Measure the fingerprint again with only one short request, to disturb a run in progress
        as little as possible.

        A server with a text dialect gets no request, because it has no log-probs to compare, and
        hosted models cost money.
        """
        if self._dialect.speaks == "text":
            return Seen(known.values, "unknown")
        if known.fingerprint:
            return Seen(known.values, "unknown", await self.fingerprint())
        written = await self._requests.sample_raw(self._request(_GREEDY))
        return Seen(_known_logprobs(written) if written.ids == known.text else (), "unknown")

    async def fingerprint(self) -> tuple[float, ...]:
        """Return log-probs that differ between models, so that another model under the same name is
        detected.

        If the server can score, the log-probs are the scores of a fixed text. Otherwise the server
        continues a text full of mistakes, and the log-probs are those of the continuation.
        """
        if not isinstance(self._dialect, Scorer):
            prefix = self._prompt + tuple(self._tokenizer.encode(_MISTAKES))
            request = replace(self._request(_GREEDY), ids=prefix)
            written = await self._requests.sample_raw(request)
            return tuple(round(value, 4) for value in _known_logprobs(written))
        text = tuple(self._tokenizer.encode(_FIXED_TEXT))
        scores = await self._requests.score(ScoreRequest(self._prompt, text))
        return tuple(round(max(_FLOOR, value), 4) for value in scores.logprobs)

    def _request(self, sampling: Sampling, seed: int = 0, tokens: int = _TOKENS) -> SampleRequest:
        return SampleRequest(self._prompt, tokens, sampling, Seed(run=seed, purpose="probe"))

    async def _look_at_text(self, findings: list[Finding]) -> None:
        """Run the tests for a server that takes messages and returns text, and append the results
        to `findings`.
        """
        seen = "the server takes and returns text, so its tokenizer does not matter"
        findings.append(Finding("tokenizer", "unknown", seen))
        written = await self._see_text(findings)
        if written is None:
            seen = "not tested, because the model thinks before it writes"
            findings.append(Finding("stop", "unknown", seen))
            findings.append(Finding("seeds", "unknown", seen))
        else:
            findings.append(await self._see_stop(written.ids))
            findings.append(await self._see_seeds())
        if isinstance(self._dialect, Rater):
            findings.append(await self._see_rating())
        findings.append(_convention_finding(self._dialect.logprobs, "unknown"))
        findings.append(await self._see_abort())

    async def _see_text(self, findings: list[Finding]) -> RawCompletion | None:
        """Test that the model writes text within a few tokens at temperature 0, and return it.

        The result is None if the server hides the model's reasoning, or if the model rejects
        temperature 0. The test is then repeated with a larger token limit, and in the second case
        at temperature 1.
        """
        sampling = _GREEDY
        try:
            written = await self._requests.sample_raw(self._request(sampling))
        except NoVisibleText:
            pass
        except EngineError as error:
            if error.retryable or "temperature" not in str(error):
                raise
            sampling = Sampling()
        else:
            seen = f"the server returned {len(written.ids)} token ids without log-probabilities"
            findings.append(Finding("ids", "yes", seen, "sample"))
            return written
        seen = await self._see_answer(sampling)
        findings.append(Finding("ids", "yes", seen, "sample"))
        return None

    async def _see_answer(self, sampling: Sampling) -> str:
        """Let the model reason and then answer, and describe in one sentence what the server
        returned.
        """
        room = self._spec.context_length - len(self._prompt)
        tokens = min(_REASONING_TOKENS, room)
        while True:
            try:
                written = await self._requests.sample_raw(self._request(sampling, tokens=tokens))
            except NoVisibleText as error:
                return f"{error.problem}; allow chunks more than {tokens} tokens"
            except ContextOverflow:
                # Some servers do not report their context length. The real context may then be too
                # small for this test, so try fewer tokens.
                if tokens <= _TOKENS:
                    raise
                tokens //= 4
            else:
                return (
                    f"the server returned {len(written.ids)} token ids after reasoning that it "
                    "does not show"
                )

    async def _see_tokenizer(self) -> Finding:
        try:
            for text in _TEXTS:
                theirs = await self._dialect.tokenize(self._client, text)
                ours = self._tokenizer.encode(text)
                if theirs != ours:
                    raise OtherTokenizer(self._client.name, text, theirs, ours)
        except (EngineError, ValueError) as error:
            return Finding(
                "tokenizer",
                "unknown",
                f"the server does not return the token ids of a text ({error})",
            )
        return Finding(
            "tokenizer",
            "yes",
            f"the server and the tokenizer give the same token ids for {len(_TEXTS)} texts",
        )

    async def _see_stop(self, ids: TokenIds) -> Finding:
        """Test that the server stops at a stop string.

        The stop string is taken from the middle of the text that the server wrote at temperature 0.
        """
        middle = len(ids) // 2
        stop = self._tokenizer.decode(ids[middle : middle + 1])
        if not stop or "\ufffd" in stop:
            return Finding(
                "stop", "unknown", "no part of the sampled text can serve as a stop string"
            )
        cut = await self._requests.sample_raw(replace(self._request(_GREEDY), stop=(stop,)))
        if len(cut.ids) < len(ids) or cut.finish == "stop":
            return Finding(
                "stop", "yes", f"the server stopped at {stop!r} after {len(cut.ids)} tokens"
            )
        seen = (
            f"the server wrote {len(cut.ids)} tokens and did not stop at {stop!r}; atts "
            "discards the later tokens, but you pay for them"
        )
        return Finding("stop", "no", seen)

    async def _see_seeds(self) -> Finding:
        request = self._request(Sampling(temperature=1.5), seed=7)
        first = await self._requests.sample_raw(request)
        again = await self._requests.sample_raw(request)
        if first.ids == again.ids:
            return Finding("seeds", "yes", "two requests with the same seed gave the same text")
        seen = (
            "two requests with the same seed gave different texts, so a run cannot be "
            "repeated token for token"
        )
        return Finding("seeds", "no", seen)

    async def _see_scores(self, written: RawCompletion) -> tuple[list[Finding], tuple[float, ...]]:
        """Test the scores of a text that the server wrote. Return the findings, and the scores of
        its tokens.

        The text is scored twice, and once more after its middle token was replaced by an improbable
        one, which must score lower.
        """
        ids = written.ids
        middle = len(ids) // 2
        strange = self._strange_token(ids[middle])
        planted = (*ids[:middle], strange, *ids[middle + 1 :])
        try:
            first = await self._requests.score(ScoreRequest(self._prompt, ids))
            again = await self._requests.score(ScoreRequest(self._prompt, ids))
            spoilt = await self._requests.score(ScoreRequest(self._prompt, planted))
        except (BadReply, UnsupportedByEngine) as error:
            return [Finding("scores", "no", str(error), "score")], ()
        findings = [self._compare_scores(written, first, again)]
        gain = spoilt.logprobs[middle] - first.logprobs[middle]
        seen = (
            f"replacing the greedy token by an unlikely one changes the score by {gain:+.2f} nats"
        )
        findings.append(Finding("planted", "yes" if gain < 0 else "no", seen, "score"))
        later = max(again.cached_tokens, spoilt.cached_tokens)
        seen = (
            f"the first scoring request reused {first.cached_tokens} cached tokens, and a later one "
            f"reused {later}"
        )
        findings.append(Finding("cache", "yes" if later else "unknown", seen))
        return findings, first.logprobs

    async def _see_rating(self) -> Finding:
        """Test that the server lists the most likely next tokens."""
        try:
            words = await self._requests.ratings(self._prompt)
        except EngineError as error:
            if error.retryable and not isinstance(error, BadReply):
                raise
            seen = f"the server does not return the most likely tokens ({error})"
            return Finding("rating", "no", seen, "rate")
        return Finding(
            "rating",
            "yes",
            f"the server returned {len(words)} likely words with log-probabilities",
            "rate",
        )

    async def _see_speculation(self, greedy: TokenIds) -> Finding:
        """Test that the server's speculative decoding does not change the distribution of sampled
        tokens. The test is skipped if the server reports that it does not speculate.
        """
        speculation = await self._dialect.speculation(self._client)
        if speculation == "":
            return Finding("speculation", "yes", "the server does not speculate")
        try:
            test = await check_losslessness(self._requests, self._prompt, greedy, self._spec)
        except (BadReply, UnsupportedByEngine) as error:
            return Finding("speculation", "unknown", str(error))
        seen = f"{speculation or 'the server does not report whether it speculates'}; {test}"
        return Finding("speculation", "no" if test.trouble else "yes", seen, "sample")

    def _strange_token(self, token: int) -> int:
        """Return a token id that is far from the given id and is not an end token."""
        size = self._spec.vocabulary
        for step in range(size):
            candidate = (token + size // 2 + step) % size
            if candidate != token and candidate not in self._spec.end_ids:
                return candidate
        raise AssertionError("a vocabulary has at least two tokens that are not end tokens")

    def _compare_scores(self, written: RawCompletion, first: Scores, again: Scores) -> Finding:
        drift = _distance(first.logprobs, again.logprobs)
        if drift > TOLERANCE:
            seen = f"the scores of a chunk with and without the cache differ by {drift:.3f} nats"
            return Finding("scores", "no", seen, "score")
        # At temperature 0, the log-probs that come with sampled tokens are raw, as scores are. So
        # both must agree.
        difference = _distance(first.logprobs, _known_logprobs(written))
        if difference > 2 * TOLERANCE:
            seen = (
                f"scores of a sampled text differ by {difference:.3f} nats from the "
                "log-probabilities that came with the text"
            )
            return Finding("scores", "no", seen, "score")
        nats = max(drift, difference)
        seen = (
            f"{len(first.logprobs)} scores are finite and agree within {nats:.4f} nats with scores "
            "from a second request and with sampled log-probabilities"
        )
        return Finding("scores", "yes", seen, "score")

    async def _measure_convention(self) -> Convention:
        """Measure whether log-probs that come with sampled tokens are raw or processed. To do so,
        compare them with raw scores of the same tokens at a high temperature.
        """
        hot = await self._requests.sample_raw(self._request(_HOT, 3))
        sampled = _known_logprobs(hot)
        if len(sampled) != len(hot.ids):
            return "unknown"
        scores = await self._requests.score(ScoreRequest(self._prompt, hot.ids))
        if all(value > -TOLERANCE for value in scores.logprobs):
            # All tokens have a probability near 1. Temperature does not change this, so raw and
            # processed log-probs cannot be distinguished.
            return "unknown"
        return "raw" if _distance(scores.logprobs, sampled) <= 2 * TOLERANCE else "processed"

    async def _see_abort(self) -> Finding:
        """Test that the server stops working on a cancelled request: its count of running requests
        must fall.
        """
        before = await self._dialect.running(self._client)
        if before is None:
            return Finding(
                "abort", "unknown", "the server does not report how many requests are running"
            )
        room = self._spec.context_length - len(self._prompt)
        request = self._request(_HOT, 11, min(2048, room))
        most = before
        is_over = anyio.Event()

        async def write() -> None:
            await self._requests.sample_raw(request)
            is_over.set()

        async with task_group() as group:
            group.start_soon(write)
            with anyio.move_on_after(1.0):
                while most <= before and not is_over.is_set():
                    most = max(most, await self._dialect.running(self._client) or 0)
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        if most <= before:
            return Finding("abort", "unknown", "the request ended before it could be cancelled")
        cancelled_at = anyio.current_time()
        with anyio.move_on_after(5.0):
            while (await self._dialect.running(self._client) or 0) >= most:  # noqa: ASYNC110  # it can only be polled
                await anyio.sleep(0.02)
            seconds = anyio.current_time() - cancelled_at
            return Finding(
                "abort",
                "yes",
                f"the server stopped working on a cancelled request after {seconds:.2f} s",
            )
        seen = "a cancelled request was still running after 5 s, so cancelled rollouts keep the server busy"
        return Finding("abort", "no", seen)


def refuse_broken(name: str, findings: tuple[Finding, ...], needs: frozenset[Capability]) -> None:
    """Check that no test of a needed capability failed.

    :raises UnsupportedByEngine: a test failed; the message names each failed test.
    """
    reasons = [
        f"{finding.name}: {finding.seen}"
        for finding in findings
        if finding.answer == "no" and finding.needed in needs
    ]
    if reasons:
        raise UnsupportedByEngine(
            name,
            "; ".join(reasons),
            "Use a server that passes these tests, or a method that does not need them",
        )


def require_unchanged(
    name: str,
    was: Identity,
    now: Identity,
    known: Known,
    seen: Seen,
) -> None:
    """Check that a server's identity and measurements are the same as when the engine opened.

    :raises UnsupportedByEngine: the server has changed.
    """
    changes: list[str] = []

    def compare(what: str, old: object, new: object) -> None:
        if old != new:
            changes.append(f"{what} was {old} and is now {new}")

    compare("engine", was.engine, now.engine)
    compare("model", was.model, now.model)
    compare("context_length", was.context_length, now.context_length)
    if "unknown" not in (known.convention, seen.convention):
        compare("log-probs", known.convention, seen.convention)
    if _distance(known.values, seen.values) > 2 * TOLERANCE:
        old = first_values(known.values)
        compare("log-probs of a known text", old, first_values(seen.values))
    if is_other_model(known.fingerprint, seen.fingerprint):
        old = first_values(known.fingerprint)
        compare("log-probs of a fixed text", old, first_values(seen.fingerprint))
    if changes:
        advice = "Serve the old model again, or start a new run on the new model"
        raise UnsupportedByEngine(
            name, f"the server changed while in use ({'; '.join(changes)})", advice
        )


def _convention_finding(sampled: LogProbs, measured: Convention) -> Finding:
    if sampled == "none":
        return Finding("convention", "yes", "sampled text comes without log-probabilities")
    if measured == "unknown":
        return Finding(
            "convention",
            "unknown",
            f"log-probabilities of sampled tokens should be {sampled}, but this was not measured",
        )
    return Finding("convention", "yes", f"log-probabilities of sampled tokens are {sampled}")


def _known_logprobs(written: RawCompletion) -> tuple[float, ...]:
    return tuple(value for value in written.logprobs if value is not None)


def _distance(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    """Return the largest absolute difference between two sequences, compared position by position.

    The result is infinity if the sequences have different lengths.
    """
    if len(left) != len(right):
        return math.inf
    # Skip equal values, because the difference of two infinities is NaN.
    return max((abs(a - b) for a, b in zip(left, right, strict=True) if a != b), default=0.0)


def _first_ids(ids: TokenIds) -> str:
    more = " ..." if len(ids) > 6 else ""
    return " ".join(map(str, ids[:6])) + more


# This test of a server's own speculation compares each token of a sampled text with a token from a
# one-token request after the same beginning. Servers do not speculate in one-token requests. If
# speculation is lossless, both tokens have the same distribution, so the difference of their
# log-probabilities is positive as often as negative. The sum of these differences, divided by the
# root of the sum of their squares, then has about a standard normal distribution for every model.

_SAMPLED_TEXTS = 8
_WARM = Sampling(temperature=0.7)
# The test fails if the deviation is more than this number of standard errors. With lossless
# speculation, this happens in a few of a million tests.
_MOST_DEVIATIONS = 5.0
# While the deviation is between this number of standard errors and the limit, another batch of texts
# follows, up to `_MOST_BATCHES`. With lossless speculation, one of twenty tests needs a second batch.
_SUSPICIOUS = 2.0
_MOST_BATCHES = 5
# A single sampled token may be so unlikely that it proves an error. At temperature T, a token that is
# G nats less likely than another one has at most probability exp(-G / T). Summed over the vocabulary
# and over all sampled tokens, this bounds the probability that a lossless server ever samples such a
# token. The test fails for a G at which the bound is below this number.
_IMPOSSIBLE = 1e-6
# Two tokens count as equally likely if their log-probs differ by at most this number of nats.
# Rounding may then decide which of them a server chooses at temperature 0.
_TIE = 0.1
# Lower log-probs, such as minus infinity, are replaced by this number of nats, so that differences
# stay finite.
_FLOOR = -30.0


class Lossless(NamedTuple):
    """Result of testing whether speculative decoding leaves a server's token distribution
    unchanged.
    """

    # number of tokens in the sampled texts, each of which is compared with a token from a one-token
    # request
    tokens: int
    # Mean difference in nats: log-prob of the token from the one-token request, minus log-prob of
    # the text's token.
    deficit: float
    # the sum of all differences, divided by its standard error
    deviation: float
    # largest difference of one token in nats
    largest: float
    # a difference above this number of nats is impossible on a lossless server
    possible: float
    # At temperature 0, a one-token request may give a likelier token than the text has at the same
    # position. This is the largest difference between the log-probs of two such tokens, in nats.
    greedy_gap: float

    @property
    def trouble(self) -> str:
        """Describe how the sampled texts differ from the model's distribution, or return "" if they
        do not.
        """
        problems: list[str] = []
        if abs(self.deviation) > _MOST_DEVIATIONS:
            direction = "less" if self.deficit > 0 else "more"
            problems.append(
                f"{self.tokens} tokens sampled at temperature {_WARM.temperature:g} are "
                f"on average {abs(self.deficit):.2f} nats {direction} likely than tokens requested "
                f"one at a time ({abs(self.deviation):.1f} standard errors)"
            )
        if self.largest > self.possible:
            problems.append(
                f"a token sampled at temperature {_WARM.temperature:g} is {self.largest:.0f} nats "
                "less likely than another token in its place, which is practically impossible"
            )
        if self.greedy_gap > _TIE:
            problems.append(
                f"the greedy text has a token that is {self.greedy_gap:.2f} nats less likely than "
                f"the most likely token"
            )
        return " and ".join(problems)

    def __str__(self) -> str:
        if self.trouble:
            return (
                f"the sampled tokens do not follow the model's distribution: {self.trouble}; serve "
                "the model without speculation"
            )
        return (
            f"{self.tokens} sampled tokens follow the model's distribution ({self.deviation:+.1f} "
            f"standard errors), and each greedy token is the most likely one"
        )


async def check_losslessness(
    requests: DialectClient, prompt: TokenIds, greedy: TokenIds, spec: EngineSpec
) -> Lossless:
    """Test whether a server's speculative decoding is lossless.

    Each token of a sampled text is compared with a token from a one-token request after the same
    prefix. Servers do not speculate in one-token requests. The texts follow a prompt that repeats
    itself, if the context has room for it, because n-grams and suffixes propose tokens only where a
    text repeats itself.

    :raises EngineError: the server fails.
    """
    repeated = prompt + greedy + prompt
    if len(repeated) + _TOKENS > spec.context_length:
        repeated = prompt
    pairs: list[tuple[float, float]] = []
    differences: list[float] = []
    deviation = largest = possible = 0.0
    for batch in range(_MOST_BATCHES):
        numbers = range(batch * _SAMPLED_TEXTS, (batch + 1) * _SAMPLED_TEXTS)
        texts = await collect([partial(_pairs, requests, repeated, number) for number in numbers])
        pairs += [pair for text in texts for pair in text]
        differences = [max(_FLOOR, alone) - max(_FLOOR, in_text) for alone, in_text in pairs]
        root = math.sqrt(sum(value * value for value in differences))
        deviation = sum(differences) / root if root else 0.0
        largest = max((alone - in_text for alone, in_text in pairs if alone > in_text), default=0.0)
        possible = _WARM.temperature * math.log(spec.vocabulary * max(1, len(pairs)) / _IMPOSSIBLE)
        if not _SUSPICIOUS < abs(deviation) <= _MOST_DEVIATIONS or largest > possible:
            break
    gaps = await collect(
        [
            partial(_greedy_gap, requests, prompt + greedy[:length], greedy[length])
            for length in range(len(greedy))
        ]
    )
    return Lossless(
        tokens=len(pairs),
        deficit=sum(differences) / max(1, len(pairs)),
        deviation=deviation,
        largest=largest,
        possible=possible,
        greedy_gap=max(gaps),
    )


async def _pairs(
    requests: DialectClient, prompt: TokenIds, number: int
) -> list[tuple[float, float]]:
    """Sample a text, and return a pair of log-probs for each position.

    At each position, a one-token request samples another token. The pair contains the log-prob of
    this token and the log-prob of the token in the text. `number` makes the seeds of the text.
    """
    seed = Seed(run=100 + number, purpose="probe")
    ids = (await requests.sample_raw(SampleRequest(prompt, _TOKENS, _WARM, seed))).ids
    if not ids:
        return []
    scores = (await requests.score(ScoreRequest(prompt, ids))).logprobs

    async def draw_alone(position: int) -> float:
        before = prompt + ids[:position]
        other_seed = replace(seed, sample=1 + position)
        request = SampleRequest(before, 1, _WARM, other_seed)
        token = (await requests.sample_raw(request)).ids[:1]
        return (await requests.score(ScoreRequest(before, token))).logprobs[0]

    drawn = await collect([partial(draw_alone, position) for position in range(len(ids))])
    return list(zip(drawn, scores, strict=True))


async def _greedy_gap(requests: DialectClient, ids: TokenIds, token: int) -> float:
    """Return by how many nats `token` is less likely than the token that a one-token request
    returns at temperature 0.

    Servers do not speculate in one-token requests, so the returned token should be the most likely
    one.
    """
    request = SampleRequest(ids, 1, _GREEDY, Seed(purpose="probe"))
    alone = (await requests.sample_raw(request)).ids[0]
    if alone == token:
        return 0.0
    best, in_text = await collect(
        [partial(requests.score, ScoreRequest(ids, (each,))) for each in (alone, token)]
    )
    return best.logprobs[0] - in_text.logprobs[0]
