"""The conformance suite, with checks of an engine's answers and of its behaviour under load."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial, wraps
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeVar

import anyio
import anyio.lowlevel

from atts.concurrency import collect, task_group
from atts.core import Completion, Message, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.engine import Capability, Engine, EngineStats
from atts.errors import (
    CheckFailed,
    ContextOverflow,
    EngineUnavailable,
    OptionError,
    UnsupportedByEngine,
    UsageError,
    counted,
)
from atts.sampling import Seed

_Result = TypeVar("_Result")
PLAIN = Sampling()
GREEDY = Sampling(temperature=0.0)
# settings with a temperature so high that even a confident model draws different tokens
LOOSE = Sampling(temperature=1.5)


class Broken(Exception):
    """Error in a check, because the engine broke the promise that the check tests. The message
    becomes a line of the report.
    """


class NotApplicable(Exception):
    """Error in a check that does not apply to this engine. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The sizes and time limits of the conformance suite.

    The defaults suit engines that write some thousand tokens per second.

    - `tolerance`: largest difference in nats between the log-probs of a token when it is sampled and
      when it is scored.
    - `tie`: if the log-probs of the two best tokens differ by at most this number of nats, either
      token counts as the greedy one.
    - `tokens`: token limit of ordinary requests.
    - `long_tokens`: token limit of requests that will be cancelled, or that should reach the
      model's end token.
    - `draws`: number of single tokens to sample for a test of the sampling distribution.
    - `timeout_seconds`: time limit of each check.
    - `settle_seconds`: time within which the engine must stop working on cancelled requests.
    - `boundary`: largest context length that a check fills completely.
    - `seeding`: "none" if the engine does not promise the same text for the same seed. In this case
      the checks compare only greedy texts, up to the first tie.
    - `skip`: names of checks to skip.
    """

    tolerance: float = 1e-3
    tie: float = 1e-4
    tokens: int = 24
    long_tokens: int = 256
    draws: int = 96
    timeout_seconds: float = 60.0
    settle_seconds: float = 2.0
    boundary: int = 2048
    seeding: Literal["exact", "none"] = "exact"
    skip: frozenset[str] = frozenset()
    questions: tuple[str, ...] = (
        "Start at 17. +5, -8, +11. What is the result?",
        "Which is larger, 2 to the power of 5 or 5 squared? Think step by step.",
        "Write a short sentence about the sea.",
    )


Need = Capability | Literal["seeds", "factory"]
Check = Callable[["Probe"], Awaitable[None]]
_registered: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_registered)
"""All checks, keyed by name, in the order in which they run. The first line of a check's docstring
is the promise that it tests.
"""


OPENING = "opening"
"""The name of the first check. If it fails, the engine cannot be used, so no other check can run.
"""


def check(*needs: Need) -> Callable[[Check], Check]:
    """Register a function as a check, under the function's name. The check is skipped for engines
    that lack one of the capabilities in `needs`.
    """

    def register(function: Check) -> Check:
        @wraps(function)
        async def checked(probe: Probe) -> None:
            probe.need(*needs)
            await function(probe)

        _registered[function.__name__.removeprefix("check_")] = checked
        return checked

    return register


class Probe:
    """The engine under test, with methods that send requests to it for the checks."""

    def __init__(
        self, engine: Engine, options: CheckOptions, factory: Callable[[], Engine] | None = None
    ) -> None:
        self.engine = engine
        self.options = options
        self.factory = factory

    @cached_property
    def prompts(self) -> tuple[TokenIds, ...]:
        """Return the test questions as token ids, rendered by the engine's tokenizer."""
        return tuple(
            self.engine.tokenizer.render([Message("user", text)]) for text in self.options.questions
        )

    @property
    def prompt(self) -> TokenIds:
        """Return the first test question as token ids."""
        return self.prompts[0]

    def request(self, prompt: int = 0, seed: int = 0, sampling: Sampling = PLAIN) -> SampleRequest:
        """Return a request whose answer is reproducible. The request is greedy if the engine does
        not promise the same text for the same seed.
        """
        name = Seed(run=20_250_918, problem=f"check {prompt}", sample=seed)
        sampling = sampling if self.options.seeding == "exact" else GREEDY
        return SampleRequest(self.prompts[prompt], self.options.tokens, sampling, name)

    def requests(self, seeds: int, sampling: Sampling = PLAIN) -> list[SampleRequest]:
        """Return one request for each prompt and each of `seeds` different seeds."""
        return [
            self.request(p, seed, sampling)
            for p in range(len(self.prompts))
            for seed in range(seeds)
        ]

    def long(self, request: SampleRequest) -> SampleRequest:
        """Return the request with `long_tokens` as its token limit, or less if the context is too
        short.
        """
        room = self.engine.spec.context_length - len(request.ids)
        return replace(request, max_tokens=min(self.options.long_tokens, room))

    async def sample_all(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample all requests concurrently, and return the completions in the order of the
        requests.
        """
        return await collect([partial(self.engine.sample, request) for request in requests])

    async def score(
        self, prefix: TokenIds, suffix: TokenIds, rollout: str = ""
    ) -> tuple[float, ...]:
        """Score a suffix, and check that each token has a log-probability that is neither NaN nor
        positive.
        """
        logprobs = (await self.engine.score(ScoreRequest(prefix, suffix, rollout))).logprobs
        require(
            len(logprobs) == len(suffix),
            f"scoring {len(suffix)} tokens gave {len(logprobs)} log-probs",
        )
        # Comparisons with NaN are false, so `not value <= 1e-6` also finds NaN, but `value > 1e-6`
        # would not.
        wrong = [value for value in logprobs if not value <= 1e-6]
        require(not wrong, f"scored log-probs must be numbers and at most 0, got {wrong[:3]}")
        return logprobs

    def new_engine(self) -> Engine:
        """Return a second engine, which is not open yet. Only checks that need a factory may call
        this.
        """
        assert self.factory is not None, (
            "a check that opens a second engine must list `factory` among its needs"
        )
        return self.factory()

    def can(self, capability: Capability) -> bool:
        """Return True if the engine's spec lists this capability."""
        return capability in self.engine.spec.capabilities

    def need(self, *needs: Need) -> None:
        """Skip the check unless the engine and the options support everything in `needs`."""
        missing = {"sample", "score", "draw"}.intersection(needs) - self.engine.spec.capabilities
        if missing:
            raise NotApplicable(
                f"the engine does not have the capability {' or '.join(sorted(missing))}"
            )
        if "seeds" in needs and self.options.seeding != "exact":
            raise NotApplicable("the engine does not promise the same text for the same seed")
        if "factory" in needs and self.factory is None:
            raise NotApplicable(
                "the check needs a second engine; pass a function that returns a new engine, "
                "not an open engine"
            )

    def require_close(self, what: str, ours: Iterable[float], theirs: Iterable[float]) -> None:
        """Fail the check unless two lists of log-probabilities agree at every position, within
        `tolerance`.
        """
        for position, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            close = abs(left - right) <= self.options.tolerance
            require(
                close,
                f"{what}: at token {position} the log-prob is {left:.6f}, expected {right:.6f} "
                f"(+-{self.options.tolerance:g})",
            )

    async def require_same(
        self, what: str, request: SampleRequest, ours: TokenIds, theirs: TokenIds
    ) -> None:
        """Fail the check unless two answers to a request have the same tokens.

        If the answers to a greedy request differ, but the best tokens at the first difference are
        tied, the check does not fail.
        """
        if ours == theirs:
            return
        same = first_difference(ours, theirs)
        greedy = request.sampling.temperature == 0 and self.can("score")
        if greedy and same < min(len(ours), len(theirs)):
            before = request.ids + ours[:same]
            (left,) = await self.score(before, (ours[same],))
            (right,) = await self.score(before, (theirs[same],))
            if abs(left - right) <= self.options.tie:
                return
        fail(
            f"{what}: from token {same} on, the ids are {tail(ours, same)}, expected "
            f"{tail(theirs, same)}"
        )


def require(kept: bool, message: str) -> None:
    """Fail the check if `kept` is false; the message says how the promise was broken."""
    if not kept:
        raise Broken(message)


def fail(message: str) -> NoReturn:
    """Fail the check with this message."""
    raise Broken(message)


async def refused(
    what: str, error: type[Exception], call: Callable[[], Awaitable[_Result]]
) -> None:
    """Fail the check unless a call raises exactly the expected kind of error."""
    try:
        result = await call()
    except error:
        return
    except Exception as other:
        raise Broken(
            f"{what}: expected {error.__name__}, got {type(other).__name__}: {other}"
        ) from other
    fail(f"{what}: expected {error.__name__}, got {str(result)[:120]}")


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the index of the first difference between two sequences of ids, or the shorter length
    if there is none.
    """
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def tail(ids: TokenIds, start: int) -> str:
    """Return up to four ids, beginning at position `start`, as a string for a message."""
    more = ", ..." if len(ids) > start + 4 else ""
    return f"[{', '.join(str(index) for index in ids[start : start + 4])}{more}]"


_TEXTS = (
    "Let x = 2.\n\nThen x + 1 = 3.\n",
    "  two  spaces,\ttab; \\boxed{42}",
    "naïve π ≤ 4 · 数 🙂",
)


_ASKED = {
    "engine": ("spec", "tokenizer", "sample", "score", "stats"),
    "tokenizer": ("digest", "encode", "decode", "render"),
}


@check()
async def check_opening(probe: Probe) -> None:
    """The engine opens and closes, and the engine and its tokenizer have all required members."""
    for whose, part in (("engine", probe.engine), ("tokenizer", probe.engine.tokenizer)):
        missing = [name for name in _ASKED[whose] if not hasattr(part, name)]
        require(
            not missing,
            f"the {whose} lacks {', '.join(missing)}; see `atts.engine.{whose.capitalize()}`",
        )


@check()
async def check_spec(probe: Probe) -> None:
    """The spec describes this engine and its tokenizer."""
    spec = probe.engine.spec
    tokenizer = probe.engine.tokenizer
    require(spec.context_length > 0, f"context_length is {spec.context_length}")
    require(spec.vocabulary > 0, f"vocabulary is {spec.vocabulary}")
    require(bool(spec.capabilities), "the spec lists no capabilities")
    require(
        bool(spec.name and spec.model and spec.engine),
        "the spec must have a name, a model and an engine",
    )
    outside = [index for index in spec.end_ids if not 0 <= index < spec.vocabulary]
    require(not outside, f"end ids {outside} are outside the vocabulary of {spec.vocabulary}")
    require(
        spec.tokenizer == tokenizer.digest,
        f"spec.tokenizer is {spec.tokenizer!r}, but the tokenizer's digest is {tokenizer.digest!r}",
    )


@check()
async def check_tokenizer(probe: Probe) -> None:
    """Decoding returns the encoded text, and rendering returns only ids of the vocabulary."""
    tokenizer = probe.engine.tokenizer
    vocabulary = probe.engine.spec.vocabulary
    for text in _TEXTS:
        ids = tokenizer.encode(text)
        require(tokenizer.decode(ids) == text, f"{text!r} is decoded as {tokenizer.decode(ids)!r}")
        require(
            all(0 <= index < vocabulary for index in ids),
            f"{text!r} has ids outside 0..{vocabulary - 1}",
        )
    for prompt in probe.prompts:
        require(bool(prompt), "render returned no ids")
        require(
            all(0 <= index < vocabulary for index in prompt),
            f"render returned ids outside 0..{vocabulary - 1}",
        )
    require(
        len(set(probe.prompts)) == len(probe.prompts),
        "render returned the same ids for different questions",
    )


@check("sample")
async def check_ids(probe: Probe) -> None:
    """A completion has valid ids, the text of these ids, and a log-prob for each id or for none."""
    for request in probe.requests(1):
        written = await probe.engine.sample(request)
        _require_sound(probe, written)
        positions = range(0, len(written.ids) - 1, 3)
        later = [
            replace(request, ids=request.ids + written.ids[:n], max_tokens=1 + n % 4)
            for n in positions
        ]
        for completion in await probe.sample_all(later):
            _require_sound(probe, completion)


def _require_sound(probe: Probe, completion: Completion) -> None:
    ids = completion.ids
    logprobs = completion.logprobs
    end = set(probe.engine.spec.end_ids)
    require(bool(ids), "a completion has no tokens")
    require(
        all(0 <= index < probe.engine.spec.vocabulary for index in ids),
        f"ids outside the vocabulary: {ids}",
    )
    text = probe.engine.tokenizer.decode([index for index in ids if index not in end])
    require(completion.text == text, f"text is {completion.text!r}, but its ids decode to {text!r}")
    silent = not logprobs and probe.engine.spec.logprobs == "none"
    require(
        silent or len(logprobs) == len(ids),
        f"{counted(len(logprobs), 'log-prob')} for {counted(len(ids), 'id')}",
    )
    wrong = [value for value in logprobs if not (math.isfinite(value) and value <= 1e-6)]
    require(not wrong, f"log-probs must be finite and at most 0, got {wrong[:3]}")


@check("sample")
async def check_length(probe: Probe) -> None:
    """No text exceeds its token limit, and `ended` is "length" only if the limit ended the text."""
    for limit in (1, 2, 5):
        for completion in await probe.sample_all(
            [replace(r, max_tokens=limit) for r in probe.requests(2)]
        ):
            count = len(completion.ids)
            require(count <= limit, f"{count} tokens were returned, at most {limit} were requested")
            require(
                completion.ended in ("length", "end"),
                f"ended is {completion.ended!r}, although the request has no stop string",
            )
            if completion.ended == "length":
                require(
                    count == limit,
                    f'ended is "length", although the text has only {count} of {limit} tokens',
                )


@check("sample")
async def check_stop(probe: Probe) -> None:
    """A text ends with the token that completes a stop string; the string may span two tokens."""
    stops = 0
    for request in (probe.request(0, 0, GREEDY), *probe.requests(1), *probe.requests(1, LOOSE)):
        free = await probe.engine.sample(request)
        for what, stop, count in _stops(probe, free.ids):
            stops += 1
            cut = await probe.engine.sample(replace(request, stop=(stop,)))
            name = f"stop string {stop!r} {what}"
            what_differs = f"{name} ({len(cut.ids)} tokens returned, expected {count})"
            await probe.require_same(what_differs, request, cut.ids, free.ids[:count])
            require(
                cut.ended == "delimiter",
                f'{name}: ended is {cut.ended!r}, expected "delimiter"',
            )
            _require_sound(probe, cut)
    if not stops:
        raise NotApplicable("no sampled text has a part that can serve as a stop string")


def _stops(probe: Probe, ids: TokenIds) -> list[tuple[str, str, int]]:
    """Return stop strings that occur in a text, each with a description and the number of tokens
    after which the text must end.

    One stop string spans two tokens, and another is the beginning of a longer token. A text may
    contain only one of them, or neither.
    """
    stops: dict[str, tuple[str, int]] = {}
    before = ""
    for count in range(1, len(ids) + 1):
        text = probe.engine.tokenizer.decode(ids[:count])
        new = text[len(before) :]
        if new and text.startswith(before) and "\ufffd" not in text:
            crossing = before[-1:] + new[0]
            leading = new[0]
            if before and crossing not in before:
                stops.setdefault("across two tokens", (crossing, count))
            if len(new) > 1 and leading not in before:
                stops["within a token"] = (leading, count)
        before = text
    return [(what, stop, count) for what, (stop, count) in stops.items()]


@check("sample")
async def check_stop_ids(probe: Probe) -> None:
    """A text ends with the stop id, which is the last of the completion's ids."""
    for request in probe.requests(1):
        free = await probe.engine.sample(request)
        stop = free.ids[len(free.ids) // 2]
        if stop in probe.engine.spec.end_ids:
            continue
        cut = await probe.engine.sample(replace(request, stop_ids=(stop,)))
        expected = free.ids[: free.ids.index(stop) + 1]
        what = f"stop id {stop} ({len(cut.ids)} tokens returned, expected {len(expected)})"
        await probe.require_same(what, request, cut.ids, expected)
        require(
            cut.ended == "delimiter",
            f'stop id {stop}: ended is {cut.ended!r}, expected "delimiter"',
        )


@check("sample")
async def check_end(probe: Probe) -> None:
    """The model's end token is the last id of a completion, and is not part of its text."""
    end = set(probe.engine.spec.end_ids)
    seen = 0
    for completion in await probe.sample_all(
        [probe.long(request) for request in probe.requests(2)]
    ):
        inner = [index for index in completion.ids[:-1] if index in end]
        require(not inner, f"the model wrote more tokens after its end token {inner[:1]}")
        ended = completion.ids[-1] in end
        require(
            (completion.ended == "end") == ended,
            f"ended is {completion.ended!r}, which contradicts the last token id, "
            f"{completion.ids[-1]}",
        )
        if ended:
            seen += 1
            _require_sound(probe, completion)
    if not seen:
        raise NotApplicable(
            f"the model did not finish any text within {probe.options.long_tokens} tokens"
        )


@check("sample", "score")
async def check_alignment(probe: Probe) -> None:
    """Scoring a sampled text, whole or in parts, returns the same log-probs as sampling."""
    settings = (Sampling(), Sampling(temperature=0.7, top_p=0.9), GREEDY)
    for request in [
        replace(r, sampling=sampling) for sampling in settings for r in probe.requests(1)
    ]:
        written = await probe.engine.sample(request)
        whole = await probe.score(request.ids, written.ids)
        probe.require_close(
            f"scored and sampled log-probs differ ({request.sampling})", whole, written.logprobs
        )
        cut = len(written.ids) // 2
        if cut:
            rest = await probe.score(request.ids + written.ids[:cut], written.ids[cut:])
            probe.require_close(
                "scores of a text scored in two parts differ from scores of the whole text",
                rest,
                whole[cut:],
            )


@check("sample", "score")
async def check_improbable(probe: Probe) -> None:
    """An improbable token scores lower than the greedy token, and earlier scores stay the same."""
    written = await probe.engine.sample(probe.request(0, 0, GREEDY))
    position = len(written.ids) // 2
    plain = await probe.score(probe.prompt, written.ids)
    lower = 0
    for step in range(1, 9):
        planted = (written.ids[position] + step * 37) % probe.engine.spec.vocabulary
        if planted == written.ids[position]:
            continue
        spoilt = await probe.score(
            probe.prompt, (*written.ids[:position], planted, *written.ids[position + 1 :])
        )
        probe.require_close(
            "an improbable token changed the scores of earlier tokens",
            spoilt[:position],
            plain[:position],
        )
        gain = spoilt[position] - plain[position]
        require(
            gain <= probe.options.tolerance,
            f"token {planted} scores {gain:.4f} nats higher than the greedy token, although the "
            "greedy token is the most probable",
        )
        lower += gain < -probe.options.tie
    require(
        lower > 0,
        "none of eight arbitrary tokens scores lower than the greedy token; check that the engine "
        "scores the correct position",
    )


@check("sample")
async def check_greedy(probe: Probe) -> None:
    """Temperature 0 gives one text for all seeds; top-k 1, top-p 0 and min-p 1 give the same text."""
    request = probe.request(0, 0, GREEDY)
    best = (await probe.engine.sample(request)).ids
    same = {
        "temperature 0 with another seed": GREEDY,
        "top_k 1": Sampling(top_k=1),
        "top_p 1e-9": Sampling(top_p=1e-9),
        "min_p 1": Sampling(min_p=1.0),
    }
    for number, (what, sampling) in enumerate(same.items(), start=1):
        again = await probe.engine.sample(replace(probe.request(0, number), sampling=sampling))
        what_differs = f"{what} gives a different text from temperature 0"
        await probe.require_same(what_differs, request, again.ids, best)
    cut = len(best) // 2
    if cut:
        rest = replace(
            probe.request(0, 9, GREEDY), ids=probe.prompt + best[:cut], max_tokens=len(best) - cut
        )
        await probe.require_same(
            "a greedy text sampled in two requests differs from the text sampled in one request",
            rest,
            (await probe.engine.sample(rest)).ids,
            best[cut:],
        )


@check("sample", "seeds")
async def check_seeds(probe: Probe) -> None:
    """A seed gives the same text alone, together with other requests, and in any order."""
    requests = probe.requests(4, LOOSE)
    alone = [await probe.engine.sample(request) for request in requests]
    together = await probe.sample_all(requests)
    order = list(range(len(requests)))
    random.Random(7).shuffle(order)
    company = [
        replace(requests[0], seed=replace(requests[0].seed, run=n), max_tokens=1 + n)
        for n in range(4)
    ]
    shuffled = await probe.sample_all([*company, *(requests[n] for n in order)])
    back = dict(zip(order, shuffled[len(company) :], strict=True))
    for number, request in enumerate(requests):
        for what, other in (
            ("together with other requests", together[number]),
            ("in another order", back[number]),
        ):
            require(
                other.ids == alone[number].ids,
                f"{request.seed}: the tokens of a request sampled {what} differ from the tokens of "
                "the same request sampled alone",
            )
            probe.require_close(
                f"the log-probs of a request sampled {what} differ from the log-probs of the same "
                "request sampled alone",
                other.logprobs,
                alone[number].logprobs,
            )


@check("sample", "seeds")
async def check_seed_fields(probe: Probe) -> None:
    """Seeds that differ in a single field give different texts."""
    base = probe.request(0, 0, LOOSE)
    changes: dict[str, list[Any]] = {
        "run": [1, 2, 3, 4], "problem": ["a", "b", "c", "d"], "sample": [1, 2, 3, 4], "turn": [1, 2, 3, 4],
        "role": ["target", "a", "b", "c"], "attempt": [1, 2, 3, 4],
    }  # fmt: skip
    first = await probe.engine.sample(base)
    for field, values in changes.items():
        others = [replace(base, seed=replace(base.seed, **{field: value})) for value in values]
        texts = {completion.ids for completion in await probe.sample_all(others)}
        require(
            texts != {first.ids},
            f"the engine ignores {field!r}: seeds that differ only in this field give the same "
            "text",
        )


@check("sample", "score")
async def check_distribution(probe: Probe) -> None:
    """The frequency of a sampled token agrees with its log-prob, also at a low temperature."""
    written = await probe.engine.sample(probe.request(0, 1, GREEDY))
    # Use the position whose token has a probability closest to exp(-0.5), about 0.6. Errors of
    # sampling show best at such a token, because it is neither rare nor certain.
    position = min(range(len(written.ids)), key=lambda n: abs(written.logprobs[n] + 0.5))
    ids = probe.prompt + written.ids[:position]
    token = written.ids[position]
    (logprob,) = await probe.score(ids, (token,))
    drawn = await _draws(probe, ids, Sampling())
    _require_share(f"token {token}", drawn.count(token), len(drawn), math.exp(logprob))
    for temperature in (1.0, 0.25):
        drawn = await _draws(probe, ids, Sampling(temperature=temperature, top_k=2))
        scores = sorted(
            [((await probe.score(ids, (index,)))[0], index) for index in set(drawn)], reverse=True
        )
        if len(scores) < 2:
            continue  # the second likeliest token is so rare that no draw gave it
        tied = scores[-1][0] >= scores[1][0] - probe.options.tie
        require(tied, f"sampling with top_k 2 gave {len(scores)} different tokens")
        lead = (scores[0][0] - scores[1][0]) / temperature
        if len(scores) == 2:
            what = f"the more likely of two tokens at temperature {temperature:g}"
            _require_share(what, drawn.count(scores[0][1]), len(drawn), 1 / (1 + math.exp(-lead)))


async def _draws(probe: Probe, ids: TokenIds, sampling: Sampling) -> list[int]:
    one = replace(probe.request(), ids=ids, max_tokens=1, sampling=sampling)
    seeds = [replace(one.seed, sample=100 + number) for number in range(probe.options.draws)]
    return [
        completion.ids[0]
        for completion in await probe.sample_all([replace(one, seed=seed) for seed in seeds])
    ]


def _require_share(what: str, seen: int, draws: int, share: float) -> None:
    # With 4.5 standard errors, a correct engine fails in about one of 100,000 checks.
    slack = 4.5 * math.sqrt(share * (1 - share) / draws) + 1 / draws
    require(
        abs(seen / draws - share) <= slack,
        f"{what}: sampled {seen} times in {draws} requests, but its probability is {share:.3f}",
    )


@check("sample")
async def check_hints(probe: Probe) -> None:
    """`rollout` and `priority` are only hints: wrong or missing hints change no answer."""
    honest = [await probe.engine.sample(request) for request in probe.requests(1)]
    # All requests get the rollout name "same", although their texts are unrelated. This hint is
    # wrong, but must not change an answer.
    for number, request in enumerate(probe.requests(1)):
        hinted = await probe.engine.sample(replace(request, rollout="same", priority=3 - number))
        what = "a request with the rollout name of another text got a different answer"
        await probe.require_same(what, request, hinted.ids, honest[number].ids)
        if not probe.can("score"):
            continue
        for rollout in ("same", "never seen"):
            scored = await probe.score(request.ids, hinted.ids, rollout)
            probe.require_close(
                f"a request with the wrong rollout name {rollout!r} got different scores",
                scored,
                hinted.logprobs,
            )


@check("sample", "score", "draw", "seeds")
async def check_drawing(probe: Probe) -> None:
    """Tokens sampled while scoring are the sampled answer's first tokens, and can be continued."""
    for request in probe.requests(1, LOOSE):
        whole = await probe.engine.sample(request)
        other = await probe.engine.sample(replace(request, seed=replace(request.seed, attempt=1)))
        mixed = whole.ids[: len(whole.ids) // 2] + other.ids
        scores = await probe.engine.score(ScoreRequest(request.ids, mixed, draw=request))
        begun = scores.beginning
        if begun is None:
            fail('the spec lists "draw", but scoring returned no sampled tokens')
        same = min(first_difference(whole.ids, mixed) + 1, len(whole.ids))
        what = "tokens sampled while scoring differ from tokens of a sampling request"
        await probe.require_same(what, request, begun.ids, whole.ids[:same])
        plain = await probe.score(request.ids, mixed)
        probe.require_close(
            "scores change if the scoring request also samples tokens", scores.logprobs, plain
        )
        if len(begun.ids) == len(whole.ids):
            require(
                begun.ended == whole.ended,
                f"ended is {begun.ended!r} for tokens sampled while scoring, but {whole.ended!r} "
                "for the same tokens of a sampling request",
            )
            continue
        left = request.max_tokens - len(begun.ids)
        rest = replace(
            request, ids=request.ids + begun.ids, max_tokens=left, num_begun=len(begun.ids)
        )
        done = await probe.engine.sample(rest)
        await probe.require_same(
            "a text that continues the tokens sampled while scoring differs from the text sampled "
            "in one request",
            request,
            begun.ids + done.ids,
            whole.ids,
        )
        require(
            done.ended == whole.ended,
            f"ended is {done.ended!r} if sampling continues the tokens sampled while scoring, but "
            f"{whole.ended!r} if the whole text is sampled in one request",
        )


@check("score")
async def check_score_company(probe: Probe) -> None:
    """Scores do not depend on other requests that are scored at the same time."""
    pairs = [(prompt, other[-8:]) for prompt in probe.prompts for other in probe.prompts]
    alone = [await probe.score(prefix, suffix) for prefix, suffix in pairs]
    together = await collect([partial(probe.score, prefix, suffix) for prefix, suffix in pairs])
    for left, right in zip(alone, together, strict=True):
        probe.require_close(
            "scores change if other requests are scored at the same time", right, left
        )


@check()
async def check_context(probe: Probe) -> None:
    """A request that exceeds the context raises ContextOverflow; a request that fits works."""
    limit = probe.engine.spec.context_length
    full = (probe.prompt * (1 + limit // len(probe.prompt)))[:limit]
    if probe.can("sample"):
        for ids, tokens in ((full, 1), (full[:-1], 2), (probe.prompt, limit)):
            call = partial(probe.engine.sample, SampleRequest(ids, tokens))
            await refused(
                f"a request with {len(ids)} prompt ids and {tokens} new tokens in a context of "
                f"{limit} tokens",
                ContextOverflow,
                call,
            )
        if limit <= probe.options.boundary:
            await probe.engine.sample(SampleRequest(full[:-2], 2))
    if probe.can("score"):
        long = ScoreRequest(full, probe.prompt[:1])
        what = f"a request to score {limit + 1} ids in a context of {limit} tokens"
        await refused(what, ContextOverflow, partial(probe.engine.score, long))
        if limit <= probe.options.boundary:
            await probe.score(full[:-1], full[-1:])


@check()
async def check_refusals(probe: Probe) -> None:
    """Invalid requests raise UsageError, and none of them counts as in flight afterwards."""
    engine = probe.engine
    prompt = probe.prompt
    unknown = probe.engine.spec.vocabulary
    good = probe.request()
    bad = {
        "no ids": replace(good, ids=()),
        "an id beyond the vocabulary": replace(good, ids=(*prompt, unknown)),
        "a negative id": replace(good, ids=(*prompt, -1)),
        "no tokens": replace(good, max_tokens=0),
        "an empty stop string": replace(good, stop=("",)),
        "a negative temperature": replace(good, sampling=Sampling(temperature=-1.0)),
        "top_p 0": replace(good, sampling=Sampling(top_p=0.0)),
        "min_p 2": replace(good, sampling=Sampling(min_p=2.0)),
        "a negative top_k": replace(good, sampling=Sampling(top_k=-1)),
    }
    if probe.can("sample"):
        for what, request in bad.items():
            await refused(f"sampling with {what}", UsageError, partial(engine.sample, request))
    if probe.can("score"):
        for what, prefix, suffix in (
            ("an empty prefix", (), prompt),
            ("an empty suffix", prompt, ()),
            ("an id beyond the vocabulary", prompt, (unknown,)),
            ("a negative id", (-1,), prompt),
        ):
            await refused(
                f"scoring {what}", UsageError, partial(engine.score, ScoreRequest(prefix, suffix))
            )
    if engine.stats().in_flight:
        fail(
            "after all invalid requests were refused, the engine still counts "
            f"{counted(engine.stats().in_flight, 'request')} in flight"
        )


@check()
async def check_capabilities(probe: Probe) -> None:
    """A call of a capability that the spec does not list raises UnsupportedByEngine."""
    engine = probe.engine
    missing = {"sample", "score"} - engine.spec.capabilities
    if not missing:
        raise NotApplicable("the engine has all capabilities")
    if "sample" in missing:
        await refused("sampling", UnsupportedByEngine, partial(engine.sample, probe.request()))
    if "score" in missing:
        await refused(
            "scoring",
            UnsupportedByEngine,
            partial(engine.score, ScoreRequest(probe.prompt, probe.prompt)),
        )


@check("sample")
async def check_order(probe: Probe) -> None:
    """If many requests are sent at once, each of them gets its own answer."""
    requests = [replace(r, max_tokens=4) for r in probe.requests(24, LOOSE)]
    answers = await probe.sample_all(requests)
    for number in range(0, len(requests), 11):
        again = await probe.engine.sample(requests[number])
        what = f"request {number} of {len(requests)} got a different answer when it was sent alone"
        await probe.require_same(what, requests[number], answers[number].ids, again.ids)


@check()
async def check_stats(probe: Probe) -> None:
    """Counters are exact and never decrease, and at the end no request is in flight."""
    engine = probe.engine
    before = engine.stats()
    require(
        before.in_flight == 0,
        f"the engine counts {counted(before.in_flight, 'request')} in flight before the first "
        "request is sent",
    )
    sampled = scored = requests = 0
    if probe.can("sample"):
        written = await probe.sample_all(probe.requests(2))
        sampled = sum(len(completion.ids) for completion in written)
        requests = len(written)
    middle = engine.stats()
    if probe.can("score"):
        await collect([partial(probe.score, prompt, prompt[:5]) for prompt in probe.prompts])
        scored = sum(len(prompt[:5]) for prompt in probe.prompts)
        requests = requests + len(probe.prompts)
    after = engine.stats()
    _require_growth(before, middle)
    _require_growth(middle, after)
    require(
        after.in_flight == 0,
        f"the engine counts {counted(after.in_flight, 'request')} in flight after it answered the "
        "last request",
    )
    for name, grown in (
        ("requests", requests),
        ("sampled_tokens", sampled),
        ("scored_tokens", scored),
    ):
        found = getattr(after, name) - getattr(before, name)
        require(found == grown, f"the counter {name} grew by {found}, expected {grown}")


def _require_growth(before: EngineStats, after: EngineStats) -> None:
    for field in fields(EngineStats):
        old = getattr(before, field.name)
        new = getattr(after, field.name)
        require(new >= 0, f"the counter {field.name} is negative ({new})")
        require(
            new >= old or field.name == "in_flight",
            f"the counter {field.name} fell from {old} to {new}",
        )


@check("factory")
async def check_closing(probe: Probe) -> None:
    """An engine may be closed twice, and calls to a closed engine raise EngineUnavailable."""
    engine = probe.new_engine()
    async with engine:
        await _use(engine, probe)
    await engine.__aexit__(None, None, None)
    if probe.can("sample"):
        await refused(
            "sampling on a closed engine",
            EngineUnavailable,
            partial(engine.sample, probe.request()),
        )
    if probe.can("score"):
        request = ScoreRequest(probe.prompt, probe.prompt)
        await refused(
            "scoring on a closed engine", EngineUnavailable, partial(engine.score, request)
        )


async def _use(engine: Engine, probe: Probe) -> None:
    if probe.can("sample"):
        await engine.sample(replace(probe.request(), max_tokens=2))
    else:
        await engine.score(ScoreRequest(probe.prompt, probe.prompt[:2]))


@check("sample", "factory")
async def check_isolation(probe: Probe) -> None:
    """Calls and the closing of a second engine do not change the answers of the first."""
    settings = (LOOSE, GREEDY, Sampling(temperature=0.3, top_k=2))
    requests = [request for sampling in settings for request in probe.requests(2, sampling)]
    requests = [replace(r, stop=("e",) * (number % 2)) for number, r in enumerate(requests)]
    alone = [(await probe.engine.sample(request)).ids for request in requests]
    other = probe.new_engine()
    async with other:
        calls = [
            partial(engine.sample, request)
            for request in requests
            for engine in (probe.engine, other)
        ]
        beside = [completion.ids for completion in await collect(calls)]
    after = [completion.ids for completion in await probe.sample_all(requests)]
    for number, request in enumerate(requests):
        for what, answers in (
            ("the answer changed while requests with other settings ran", beside[::2]),
            ("a second engine gave another answer", beside[1::2]),
            ("the answer changed after a second engine was closed", after),
        ):
            await probe.require_same(what, request, answers[number], alone[number])


@dataclass(slots=True)
class _Cancelled:
    """Counts of calls, summed over all rounds of cancellation."""

    calls: int = 0
    returned: int = 0
    running: int = 0  # calls in flight when they were cancelled, as counted by the engine
    late: int = 0  # number of sampling calls that returned an answer although they were cancelled


@check("sample")
async def check_cancellation(probe: Probe) -> None:
    """Cancelled calls end at once, whether queued or running, and later requests are served."""
    expected = await probe.engine.sample(probe.request())
    seen = _Cancelled()
    before = probe.engine.stats().cancelled
    for number, delay in enumerate((0.0, 0.002, 0.02, 0.1)):
        await _cancel_some(probe, delay, seen)
        await _settle(probe)
        again = await probe.engine.sample(probe.request())
        what = f"the answer changed after {number + 1} rounds of cancellation"
        await probe.require_same(what, probe.request(), again.ids, expected.ids)
    # A cancelled call may still return an answer that was computed already. But if all cancelled
    # calls return answers, the engine has ignored the cancellations.
    ignored = seen.running and seen.late >= seen.running
    require(
        not ignored,
        "the engine ignored cancellations: although cancelled in flight, it answered "
        f"{counted(seen.running, 'request')}",
    )
    cancelled = probe.engine.stats().cancelled - before
    what = (
        f"of {counted(seen.calls, 'call')}, the engine answered {seen.returned} and counted "
        f"{cancelled} as cancelled, so some answered calls also count as cancelled"
    )
    require(seen.returned + cancelled <= seen.calls, what)


async def _cancel_some(probe: Probe, delay: float, seen: _Cancelled) -> None:
    """Start many long requests, and cancel them after a delay, when some are queued, some run, and
    some have finished.
    """
    requests = [
        replace(probe.long(request), rollout=str(request.seed)) for request in probe.requests(8)
    ]

    async def one(request: SampleRequest) -> None:
        seen.calls += 1
        written = await probe.engine.sample(request)
        seen.returned += 1
        seen.late += scope.cancel_called
        if probe.can("score"):
            seen.calls += 1
            await probe.engine.score(ScoreRequest(request.ids, written.ids, request.rollout))
            seen.returned += 1

    cancelled_at = 0.0
    with anyio.CancelScope() as scope:
        async with task_group() as group:
            for request in requests:
                group.start_soon(one, request)
            await anyio.sleep(delay)
            # First let those calls return whose answers have been computed, so that they do not
            # count as late.
            await anyio.lowlevel.checkpoint()
            cancelled_at = anyio.current_time()
            seen.running += probe.engine.stats().in_flight
            scope.cancel()
    took = anyio.current_time() - cancelled_at
    limit = probe.options.settle_seconds
    require(
        took <= limit, f"cancelled requests returned only after {took:.2f} s (limit {limit:g} s)"
    )


async def _settle(probe: Probe) -> None:
    """Fail the check if the engine still counts requests in flight after `settle_seconds`."""
    with anyio.move_on_after(probe.options.settle_seconds):
        while probe.engine.stats().in_flight:  # noqa: ASYNC110  # an engine has no event to wait for
            await anyio.sleep(0.005)
    left = probe.engine.stats().in_flight
    require(
        not left,
        f"the engine still has {counted(left, 'request')} in flight "
        f"{probe.options.settle_seconds:g} s after their cancellation",
    )


DEFAULTS = CheckOptions()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str
    status: Literal["kept", "broken", "skipped"]
    why: str = ""

    def __str__(self) -> str:
        promise = (CHECKS[self.check].__doc__ or "").split("\n", 1)[0]
        return f"{self.status:8}{self.check}: {self.why or promise}"


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The results of all checks, in the order in which the checks ran. `str` lists them."""

    engine: str
    results: tuple[CheckResult, ...]

    @property
    def broken(self) -> tuple[CheckResult, ...]:
        """Return the results of the checks whose promise was broken."""
        return tuple(result for result in self.results if result.status == "broken")

    def listed(self, results: Iterable[CheckResult]) -> str:
        """Return the given results as a list under a headline."""
        headline = (
            f"engine {self.engine}: {len(self.broken)} of {len(self.results)} promises broken"
        )
        return "\n  ".join([headline, *map(str, results)])

    def __str__(self) -> str:
        return self.listed(self.results)


async def check_engine(
    engine: Engine | Callable[[], Engine],
    *,
    options: CheckOptions = DEFAULTS,
    broken: Literal["raise", "report"] = "raise",
) -> ConformanceReport:
    """Check every promise of `atts.engine.Engine` on a live engine. An engine that cannot be opened
    is reported too.

    If you can, pass a function that returns a new, unopened engine at each call. Then closing and
    isolation are checked too, and an engine that broke a promise is replaced for the next checks.
    If you pass an open engine, it stays open.

    >>> from atts.testing import ScriptedEngine, run_virtual
    >>> report = run_virtual(check_engine, ScriptedEngine)
    >>> len(report.broken)
    0

    :raises CheckFailed: promises were broken, and `broken` is "raise"; the message lists these
        promises.
    :raises OptionError: `options.skip` names a check that does not exist.
    """
    for name in options.skip:
        if name not in CHECKS:
            raise OptionError(name, "there is no such check to skip", tuple(CHECKS))
    report = await _check_all(engine, options)
    if report.broken and broken == "raise":
        raise CheckFailed(report.listed(report.broken))
    return report


async def _check_all(
    engine: Engine | Callable[[], Engine], options: CheckOptions
) -> ConformanceReport:
    factory = engine if callable(engine) else None
    results: list[CheckResult] = []
    name = getattr(engine, "__name__", type(engine).__name__)
    remaining = list(CHECKS)
    while remaining:
        try:
            async with nullcontext(engine) if not callable(engine) else engine() as opened:
                probe = Probe(opened, options, factory)
                while remaining:
                    results.append(await _run(remaining.pop(0), probe))
                    if factory and results[-1].status == "broken":
                        # The failed check may have left the engine in a bad state, so leave the
                        # loop and open a new engine.
                        break
                name = opened.spec.name
        except Exception as error:  # noqa: BLE001  # as in `_run`
            results.append(
                CheckResult(OPENING, "broken", f"raised {type(error).__name__}: {error}")
            )
        if any(result.check == OPENING and result.status == "broken" for result in results):
            results += [
                CheckResult(
                    each,
                    "skipped",
                    "not checked, because the engine could not be opened or lacks required members",
                )
                for each in remaining
            ]
            break
    return ConformanceReport(name, tuple(results))


async def _run(name: str, probe: Probe) -> CheckResult:
    options = probe.options
    if name in options.skip:
        return CheckResult(name, "skipped", "skipped by the caller's options")
    try:
        with anyio.fail_after(options.timeout_seconds):
            await CHECKS[name](probe)
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Broken as flaw:
        return CheckResult(name, "broken", str(flaw))
    except TimeoutError:
        return CheckResult(
            name, "broken", f"the check did not finish within {options.timeout_seconds:g} s"
        )
    except Exception as error:  # noqa: BLE001  # an engine may fail in any way; the report says how
        return CheckResult(name, "broken", f"raised {type(error).__name__}: {error}")
    return CheckResult(name, "kept")
