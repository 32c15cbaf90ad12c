"""The engine protocol: how atts samples from and scores with a model, with the engine's
description, counters and checks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import zip_longest
from numbers import Integral
from operator import add, sub
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, cast, runtime_checkable

import anyio

from atts.concurrency import clock
from atts.core import Completion, Message, SampleRequest, ScoreRequest, Scores, TokenIds
from atts.errors import (
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    UnsupportedByEngine,
    UsageError,
)

_Request = TypeVar("_Request", SampleRequest, ScoreRequest)
_Answer = TypeVar("_Answer", Completion, Scores)
_Value = TypeVar("_Value")
_MOST_IDS = 1 << 31
EngineState = Literal["new", "open", "closed"]
Capability = Literal["sample", "score", "rate", "draw", "entropy", "reward", "thinking"]
"""The abilities that an engine may have.

"sample": it generates tokens after given token ids. "score": it returns the log-probability of
every token of a suffix. "rate": it scores a suffix of one token, if the token is among the most
likely ones; this is enough for a one-digit rating.

"draw": while scoring, it also samples from the distributions that it computes
(`ScoreRequest.draw`), and it continues completions that another engine began
(`SampleRequest.num_begun`). "entropy": it returns the negative entropy of its distribution at every
token of a suffix (`ScoreRequest.entropies`).

"reward": a reward model answers requests with `ScoreRequest.texts`. "thinking": it closes a think
block that has used up its token budget (`SampleRequest.thinking_budget`).
"""


class Tokenizer(Protocol):
    """The tokenizer of a model, with its chat template."""

    @property
    def digest(self) -> str:
        """Return a hash of the vocabulary, merges and special tokens. If two tokenizers have the
        same digest, each id means the same token in both.
        """
        ...

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text` without adding special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        ...

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the ids of a conversation, up to the position at which the assistant's answer
        begins.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The identity and properties of an engine, as recorded in manifests and calibration data."""

    name: str
    model: str
    # digest of the tokenizer; models with equal digests use the same token ids for the same text
    tokenizer: str
    context_length: int
    end_ids: TokenIds
    vocabulary: int
    engine: str = ""  # kind of the engine with its major and minor version, such as "local 0.1"
    dtype: str = "float32"
    # True if the engine computes scores and drawn tokens in a lower precision than sampled tokens
    rounds_scores: bool = False
    # "raw": log-probabilities before the temperature is applied; "processed": after it; "none":
    # the completions have none
    logprobs: Literal["raw", "processed", "none"] = "raw"
    capabilities: frozenset[Capability] = frozenset({"sample", "score"})
    # floating-point operations that decoding one token takes; 0 if unknown
    flops_per_token: float = 0.0
    weights: str = ""  # digest of the weight files; empty if the files are not on this machine
    # digest of the chat template; empty if the engine does not render conversations
    chat_template: str = ""
    # Log-probabilities of a fixed text, used to recognise the model. If they change, the server has
    # loaded another model.
    known_logprobs: tuple[float, ...] = ()
    # Results of the requests that probe a server, as pairs such as ("scores", "yes: 12 finite
    # scores, ...").
    findings: tuple[tuple[str, str], ...] = ()

    def fingerprint(self) -> dict[str, object]:
        """Return the fields that must be the same for two engines. Only then may a gate calibrated
        with scores of one engine judge scores of the other.
        """
        fields_to_match: dict[str, object] = {}
        for name in ("engine", "model", "tokenizer", "dtype", "logprobs"):
            fields_to_match[name] = getattr(self, name)
        for name, finding in self.findings:
            if name in _LASTING:
                fields_to_match[f"probe.{name}"] = finding.split(":")[0]
        for name in ("weights", "chat_template"):
            value = getattr(self, name)
            if value:
                fields_to_match[name] = value
        return fields_to_match


# The probes whose results depend only on the server and its model, not on the time or the load.
_LASTING = (
    "tokenizer",
    "scores",
    "planted",
    "convention",
    "rating",
)


_SAME_MODEL_NATS = 0.2


def is_other_model(was: Sequence[float], now: Sequence[float]) -> bool:
    """Return True if two lists of log-probabilities of the same text come from two different
    models.

    If both lists come from the same model, they differ by a few hundredths of a nat per token,
    because the server batches requests differently. Different models differ by far more. The result
    is False if one of the lists is empty.

    >>> is_other_model([-1.0, -9.0], [-1.02, -9.1]), is_other_model([-1.0, -9.0], [-1.3, -8.0])
    (False, True)
    >>> is_other_model([-1e308], [1e308]), is_other_model([-1.0], [math.nan])
    (True, True)
    """
    if not was or not now:
        return False
    if len(was) != len(now):
        return True
    # If the numbers are very large, `math.dist` returns infinity and raises no error. With NaN,
    # `<=` is false, so the models count as different.
    return not math.dist(was, now) / math.sqrt(len(was)) <= _SAME_MODEL_NATS


def first_values(logprobs: Sequence[float]) -> str:
    """Return the first three log-probabilities as a string.

    >>> first_values([-1.5, -0.25])
    '(-1.500, -0.250, ...)'
    """
    return "(" + ", ".join(f"{value:.3f}" for value in logprobs[:3]) + ", ...)"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine's counters, which are all 0 when the engine opens."""

    requests: int = 0
    in_flight: int = 0
    cancelled: int = 0
    failed: int = 0
    sampled_tokens: int = 0
    # prompt tokens that the engine computed; tokens from a cache are not counted
    prefilled_tokens: int = 0
    scored_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    # seconds that requests waited in the engine's queue, summed over all requests
    queue_seconds: float = 0.0


@dataclass(slots=True)
class EngineCounters:
    """The counters that an open engine updates. `EngineStats` is a copy of their current values."""

    requests: int = 0
    in_flight: int = 0
    cancelled: int = 0
    failed: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    scored_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    queue_seconds: float = 0.0

    def sampled(self, request: SampleRequest, done: Completion) -> None:
        """Count a sample request that was answered."""
        self.sampled_tokens += len(done.ids)
        self.cached_tokens += done.cached_tokens
        self.prefilled_tokens += max(0, len(request.ids) - done.cached_tokens)

    def scored(self, request: ScoreRequest, done: Scores) -> None:
        """Count a score request that was answered."""
        self.scored_tokens += len(done.logprobs)
        self.cached_tokens += done.cached_tokens
        self.prefilled_tokens += max(
            0, len(request.prefix) + len(request.suffix) - done.cached_tokens
        )

    def snapshot(self, *, busy_for: float = 0.0) -> EngineStats:
        """Return a copy of the current values. `busy_for` is the length, in seconds, of the current
        busy period, which has not ended yet.
        """
        values: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(EngineStats)
        }
        values["busy_seconds"] = self.busy_seconds + busy_for
        return EngineStats(**values)


class Engine(Protocol):
    """A model that samples and scores; it is opened by `async with`, and many tasks may call it
    concurrently.

    If the scope that awaits a call is cancelled, the engine stops working on the call. Concurrent
    requests change the engine's speed, but never its distributions. Stop strings are searched only
    in the generated text, never across its boundary with the prompt. Closing twice is allowed, and
    a closed engine raises EngineUnavailable.

    `atts.testing.check_engine` tests whether an engine keeps these promises.
    """

    @property
    def spec(self) -> EngineSpec:
        """Return the engine's description, which is available once the engine is open."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which pipelines use to render prompts and to decode ids."""
        ...

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids of the request by sampling tokens.

        :raises ContextOverflow: the ids plus `max_tokens` exceed the context.
        :raises UsageError: empty ids, or `max_tokens` below 1.
        :raises EngineError: the engine failed; `retryable` says whether another attempt may help.
        """
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the log-probabilities of a non-empty suffix. The errors are those of `sample`."""
        ...

    def stats(self) -> EngineStats:
        """Return the current values of the counters."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None: ...


GIVE_UP_AFTER = 3600.0
"""Default number of seconds that a run waits for a server that no longer answers."""


@runtime_checkable
class Returning(Protocol):
    """An engine that may become available again after it was lost, such as a server that is
    restarted.
    """

    async def comes_back(self) -> bool:
        """Wait until a lost engine is available again, and return True if it is. The engine's
        options limit how long to wait.
        """
        ...


@runtime_checkable
class Stepping(Protocol):
    """An engine that processes all its calls together in steps, and counts these steps.

    A call to such an engine may wait long before it is processed. This wait is not a failure as
    long as the engine takes steps, so a call's deadline is measured from the latest step.
    """

    def steps_taken(self) -> int:
        """Return how many steps the engine has taken."""
        ...


class EngineAround:
    """A wrapper that forwards every call to an inner engine. Subclasses observe, record or modify
    the calls. If `lifetime` is "own", opening and closing the wrapper also opens and closes the
    inner engine. If it is "lent", the wrapper never opens or closes the inner engine.
    """

    def __init__(self, engine: Engine, lifetime: Literal["own", "lent"]) -> None:
        self._engine = engine
        self._lifetime = lifetime

    @property
    def inner(self) -> Engine:
        """Return the wrapped engine, to which calls are forwarded."""
        return self._engine

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def stats(self) -> EngineStats:
        """Return the inner engine's counters. They do not include calls that a wrapper answered
        without the inner engine.
        """
        return self._engine.stats()

    async def sample(self, request: SampleRequest) -> Completion:
        """Pass a sample request to the inner engine through `around`."""
        return await self.around(request, self._engine.sample)

    async def score(self, request: ScoreRequest) -> Scores:
        """Pass a score request to the inner engine through `around`."""
        return await self.around(request, self._engine.score)

    def speculated(self) -> Speculated | None:
        """Return the inner engine's counters of speculative decoding."""
        return speculated_by(self._engine)

    async def comes_back(self) -> bool:
        """Wait until the inner engine is available again; return False at once if it cannot become
        available.
        """
        return isinstance(self._engine, Returning) and await self._engine.comes_back()

    async def around(
        self, request: _Request, call: Callable[[_Request], Awaitable[_Answer]]
    ) -> _Answer:
        """Send a sample or score request to the inner engine. Subclasses override this method to
        observe, record or modify calls.
        """
        return await call(request)

    async def __aenter__(self) -> Self:
        if self._lifetime == "own":
            await self._engine.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        return await self._engine.__aexit__(kind, error, trace) if self._lifetime == "own" else None


def stepping(engine: Engine) -> Stepping | None:
    """Return the engine that counts steps: this engine, or one inside its wrappers. Return None if
    no such engine counts steps.
    """
    # Every request to a server calls this function. `isinstance` with the protocol would take ten
    # times as long as `hasattr`.
    while not hasattr(engine, "steps_taken"):
        if not isinstance(engine, EngineAround):
            return None
        engine = engine.inner
    return cast(Stepping, engine)


def check_sample(request: SampleRequest, spec: EngineSpec) -> None:
    """Raise an error for a sample request that no engine can serve. Every engine calls this
    function first.

    :raises UsageError: empty ids, an id outside the vocabulary, or an impossible limit or
        temperature.
    :raises ContextOverflow: the ids plus `max_tokens` exceed the context.
    """
    sampling = request.sampling
    if request.max_tokens < 1:
        raise UsageError(f"max_tokens is {request.max_tokens}, expected at least 1")
    if not 0 <= request.num_begun < len(request.ids):
        raise UsageError(
            f"num_begun is {request.num_begun}, expected 0 to {len(request.ids) - 1}, fewer than "
            "the request's ids"
        )
    shares = 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
    if not (0 <= sampling.temperature < math.inf and shares and 0 <= sampling.top_k < _MOST_IDS):
        raise UsageError(
            f"{sampling}: expected temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, top_k >= 0"
        )
    for stop in request.stop:
        if not stop:
            raise UsageError("an empty stop string would end every text immediately; leave it out")
        try:
            stop.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the stop string {stop!r} contains half a character (a lone surrogate)"
            ) from None
    _check_ids(spec, len(request.ids) + request.max_tokens, (request.ids, "the prompt"))


def check_score(request: ScoreRequest, spec: EngineSpec) -> None:
    """Raise an error for a score request that no engine can serve.

    The errors are those of `check_sample`.
    """
    prefix = request.prefix
    suffix = request.suffix
    _check_ids(spec, len(prefix) + len(suffix), (prefix, "the prefix"), (suffix, "the suffix"))


def _check_ids(spec: EngineSpec, needed: int, *parts: tuple[TokenIds, str]) -> None:
    for ids, what in parts:
        if not ids:
            raise UsageError(f"{what} is empty, but a request needs at least one id")
        kinds = set[type](map(type, ids))
        # Most ids are plain `int`. Comparing types is fast, but `issubclass` with the abstract
        # class `Integral` is slow.
        is_plain = kinds == {int}
        if not is_plain and (
            bool in kinds or not all(issubclass(kind, Integral) for kind in kinds)
        ):
            raise UsageError(f"{what} contains ids that are not whole numbers")
        if min(ids) < 0 or max(ids) >= spec.vocabulary:
            raise UsageError(
                f"{what} contains an id outside 0..{spec.vocabulary - 1}; check that the ids come "
                "from the engine's tokenizer"
            )
    if needed > spec.context_length:
        raise ContextOverflow(spec.name, needed, spec.context_length)


class BaseEngine(ABC):
    """A base class for engines, which checks and counts the requests. Subclasses set `_spec` and
    `_tokenizer`, and implement the answers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: EngineState = "new"
        self._spec: EngineSpec | None = None
        self._tokenizer: Tokenizer | None = None
        self._counts = EngineCounters()
        # A placeholder, because perhaps no event loop runs yet. `open` replaces it with the clock
        # of the event loop.
        self._clock: Callable[[], float] = lambda: 0.0
        self._busy_since = 0.0
        self._idle_since = 0.0

    @property
    def spec(self) -> EngineSpec:
        """Return the engine's description, which is available once the engine is open."""
        return opened(self._spec, self._name)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which is available once the engine is open."""
        return opened(self._tokenizer, self._name)

    def stats(self) -> EngineStats:
        """Return the current values of the counters. The engine counts as busy while any request is
        in flight.
        """
        busy_for = 0.0
        if self._counts.in_flight:
            busy_for = self._clock() - self._busy_since
        return self._counts.snapshot(busy_for=busy_for)

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids; see `atts.engine.Engine`."""
        self._admit("sample")
        check_sample(request, self.spec)
        done = await self._counted(request, self._sample)
        self._counts.sampled(request, done)
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix; see `atts.engine.Engine`."""
        if request.entropies:
            self._admit("entropy")
        elif request.texts:
            self._admit("reward")
        else:
            is_rating = len(request.suffix) == 1 and "rate" in self.spec.capabilities
            self._admit("rate" if is_rating else "score")
        check_score(request, self.spec)
        done = await self._counted(request, self._score)
        self._counts.scored(request, done)
        return done

    async def open(self) -> None:
        """Open the engine, so that it accepts requests."""
        self._clock = clock()
        self._state = "open"

    async def __aenter__(self) -> Self:
        if self._state == "closed":
            raise not_open(self._name, self._state)
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        self._state = "closed"
        await self._close()
        return None

    async def comes_back(self) -> bool:
        """Return False, because most engines cannot become available again after they are lost."""
        return False

    async def _close(self) -> None:  # noqa: B027  # some engines hold nothing
        """Release the engine's resources; calling this twice is allowed."""

    @abstractmethod
    async def _sample(self, request: SampleRequest) -> Completion: ...

    @abstractmethod
    async def _score(self, request: ScoreRequest) -> Scores: ...

    def _admit(self, verb: Capability) -> None:
        if self._state != "open":
            raise not_open(self._name, self._state)
        if verb not in self.spec.capabilities:
            what = {"entropy": "give entropies", "reward": "give rewards"}.get(verb, verb)
            raise UnsupportedByEngine(self._name, f"{self.spec.engine} cannot {what}")

    async def _counted(
        self, request: _Request, answer: Callable[[_Request], Awaitable[_Answer]]
    ) -> _Answer:
        """Answer a request with `answer`, and count the request as in flight, failed or
        cancelled.
        """
        counts = self._counts
        counts.requests += 1
        if not counts.in_flight:
            self._busy_since = self._clock()
        counts.in_flight += 1
        try:
            return await answer(request)
        except anyio.get_cancelled_exc_class():
            counts.cancelled += 1
            raise
        except EngineError:
            counts.failed += 1
            raise
        finally:
            counts.in_flight -= 1
            if not counts.in_flight:
                self._idle_since = self._clock()
                counts.busy_seconds += self._idle_since - self._busy_since


def not_open(name: str, state: EngineState) -> EngineUnavailable:
    """Return the error for a request to an engine that is not open."""
    if state == "closed":
        return EngineUnavailable(name, "the engine is closed", "Make a new engine")
    return EngineUnavailable(
        name, "the engine is not open yet", "Call the engine inside `async with engine:`"
    )


def opened(value: _Value | None, name: str) -> _Value:
    """Return `value`, or raise an error if `value` is None because the engine `name` is not open.

    :raises EngineUnavailable: the engine is not open.
    """
    if value is None:
        raise not_open(name, "new")
    return value


@dataclass(frozen=True, slots=True)
class Speculated:
    """Counters of speculative decoding since the engine was opened, or the difference between two
    snapshots of them.
    """

    # Number of verified proposals. A step that verifies proposals for several sequences adds one
    # for each sequence.
    rounds: int = 0
    proposed: int = 0  # tokens in all proposals
    accepted: int = 0  # proposed tokens that the target accepted
    # For each position in a proposal: the number of proposals whose earlier tokens were all
    # accepted.
    tested_at: tuple[int, ...] = ()
    # For each position in a proposal: the number of proposals whose tokens up to this position were
    # all accepted.
    accepted_at: tuple[int, ...] = ()
    seconds: float = 0.0  # seconds that making the proposals took
    # how often the length of a proposal was chosen: once for each sequence in each step
    choices: int = 0
    # Sum of all chosen proposal lengths, in tokens. So chosen / choices is the mean length.
    chosen: int = 0
    # Sums over the steps for which tokens and seconds were predicted. The fields `expected_*` have
    # the predicted numbers, and the fields `came_*` the measured numbers.
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    came_tokens: int = 0
    came_seconds: float = 0.0
    # For the same tokens: predicted seconds without speculation, minus the measured seconds with
    # speculation.
    saved_seconds: float = 0.0
    silence: str = ""  # the reason why the engine proposed no tokens; empty if it proposed some

    def __add__(self, other: Speculated) -> Speculated:
        return self._with(other, add)

    def __sub__(self, other: Speculated) -> Speculated:
        return self._with(other, sub)

    @property
    def accepted_share(self) -> tuple[float, ...]:
        """Return the fraction of tested tokens that the target accepted, separately for each
        position in a proposal.
        """
        return tuple(
            accepted / tested
            for accepted, tested in zip(self.accepted_at, self.tested_at, strict=True)
            if tested
        )

    def __str__(self) -> str:
        """Summarise the counters in one line.

        >>> print(Speculated(100, 300, 240, (100, 90, 80), (90, 80, 70), choices=200, chosen=320))
        300 tokens proposed, 80 % accepted (by position in a proposal 0.90 0.89 0.88), 1.6 proposed per step
        """
        if not self.proposed:
            # Without proposed tokens, the counters say nothing about speculation, so print only the
            # reason.
            return ", ".join(filter(None, ("no tokens proposed", self.silence)))
        shares = " ".join(f"{share:.2f}" for share in self.accepted_share[:8])
        accepted = 100 * self.accepted / self.proposed
        words = [
            f"{self.proposed:,} tokens proposed",
            f"{accepted:.0f} % accepted (by position in a proposal {shares})",
        ]
        if self.choices:
            words.append(f"{self.chosen / self.choices:.1f} proposed per step")
        if self.came_seconds:
            plain = self.came_seconds + self.saved_seconds
            change = "faster" if self.saved_seconds >= 0 else "slower"
            words.append(
                f"{abs(self.saved_seconds):.1f} s {change} than the {plain:.1f} s expected "
                f"without speculation"
            )
        return ", ".join(words)

    def _with(self, other: Speculated, sign: Any) -> Speculated:
        def both(mine: Any, theirs: Any) -> Any:
            if isinstance(mine, str):
                return mine or theirs
            if isinstance(mine, tuple):
                return tuple(sign(a, b) for a, b in zip_longest(mine, theirs, fillvalue=0))
            return sign(mine, theirs)

        counters = Speculated(*map(both, astuple(self), astuple(other)))
        return replace(counters, silence="") if counters.proposed else counters


@runtime_checkable
class Speculating(Protocol):
    """An engine that may use speculative decoding and counts its proposals."""

    def speculated(self) -> Speculated | None:
        """Return the counters so far, or None if the engine never speculates."""
        ...


def speculated_by(engine: object) -> Speculated | None:
    """Return the engine's counters of speculative decoding, or None if the engine has none."""
    # Every request to a server calls this function. `isinstance` with the protocol would take ten
    # times as long as `hasattr`.
    return cast(Speculating, engine).speculated() if hasattr(engine, "speculated") else None


def speculated_since(before: Speculated | None, engine: object) -> Speculated | None:
    """Return how much the engine's speculation counters have grown since `before`. Return None if
    the engine has no such counters. Also return None if no token was proposed and the reason for
    this is unknown.
    """
    now = speculated_by(engine)
    more = now - (before or Speculated()) if now is not None else None
    return more if more is not None and (more.proposed or more.silence) else None


def together(one: Speculated | None, other: Speculated | None) -> Speculated | None:
    """Return the sum of two sets of speculation counters. A set that is None is left out."""
    return one + other if one and other else one or other


def counters_of(stats: Any) -> Speculated:
    """Return a copy of the current speculation counters in `stats`."""
    values: dict[str, Any] = {
        field.name: getattr(stats, field.name) for field in fields(Speculated)
    }
    values["tested_at"] = tuple(values["tested_at"])
    values["accepted_at"] = tuple(values["accepted_at"])
    return Speculated(**values)
