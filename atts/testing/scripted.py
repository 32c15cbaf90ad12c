"""A scripted engine for tests: a toy language model with simulated queues, latencies and faults.

The first part of the file defines faults: calls that fail, hang or return impossible answers. A
seed decides which calls have a fault.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal, Self, TypeVar, get_args

import anyio
import anyio.lowlevel

from atts.concurrency import SlotQueue
from atts.core import Completion, Recent, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import BaseEngine, Capability, Engine, EngineAround, EngineSpec
from atts.errors import EngineTimeout, EngineUnavailable, OptionError, UsageError
from atts.sampling import Seed
from atts.testing.toy_model import (
    DRAFT,
    TARGET,
    PrefixMemory,
    Selector,
    ToyModel,
    ToyTokenizer,
    Writer,
)

FaultKind = Literal[
    "refused", "slow", "dropped", "timeout", "wrong_length", "nan", "empty", "hang", "wrong_ids"
]
"""Kinds of simulated faults of an engine.

refused: the call fails at once. slow: the answer comes after a delay. dropped: the connection
breaks while the answer arrives. timeout: the call fails after a delay. hang: the answer never
arrives.

The other kinds return impossible answers. wrong_length: one log-prob is missing. nan: a log-prob is
NaN. empty: the answer has no tokens. wrong_ids: a token id is outside the vocabulary; answers to
scoring calls have no ids, so they get a positive log-prob instead.
"""
# Largest number of scoring requests for which attempts are counted. Older requests are forgotten,
# because they are probably finished.
_REMEMBERED = 4096
_Kind = TypeVar("_Kind", bound=str)


def check_shares(shares: Mapping[_Kind, float], kinds: tuple[_Kind, ...]) -> None:
    """Check that all kinds of faults are known, and that their probabilities are valid.

    :raises OptionError: a kind is unknown, or the shares are not probabilities or sum to more than
        1.
    """
    for kind in shares:
        if kind not in kinds:
            raise OptionError("faults", f"{kind!r} is unknown", kinds)
    if (
        not all(0 <= share <= 1 for share in shares.values())
        or math.fsum(shares.values()) > 1 + 1e-9
    ):
        raise OptionError(
            "faults", f"the shares must be probabilities that sum to at most 1, got {dict(shares)}"
        )


def drawn(shares: Mapping[_Kind, float], uniform: float) -> _Kind | None:
    """Choose a kind of fault with the uniform random number `uniform`, in [0, 1). Return None for
    no fault.
    """
    for kind, share in shares.items():
        uniform -= share
        if uniform < 0:
            return kind
    return None


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that an engine simulates.

    `shares` maps each kind of fault to the fraction of calls that have it, 0 to 1. `calls` maps the
    index of a call (from 0, in order of arrival) to its fault, and overrides `shares`.
    `delay_seconds` is the delay of the kinds slow, dropped and timeout.

    With `shares`, a request's seed, ids and rollout decide its fault, so the same requests fail in
    any order of calls. A retry gets its own fault, or none.

    :raises OptionError: a kind is unknown, or the shares are not probabilities or sum to more than
        1.
    """

    shares: Mapping[FaultKind, float] = field(default_factory=dict[FaultKind, float])
    calls: Mapping[int, FaultKind] = field(default_factory=dict[int, FaultKind])
    seed: int = 0
    delay_seconds: float = 1.0
    only: Literal["sample", "score", "both"] = "both"

    def __post_init__(self) -> None:
        check_shares(
            {**dict.fromkeys(self.calls.values(), 0.0), **self.shares}, get_args(FaultKind)
        )


NO_FAULTS = Faults()


class FaultSchedule:
    """A counter of the calls to an open engine, which decides which fault each call gets."""

    def __init__(self, faults: Faults, engine: str) -> None:
        self._faults = faults
        self._engine = engine
        self._calls = 0
        self._asked: Recent[tuple[str, int, int], int] = Recent(_REMEMBERED)

    def pick(self, request: SampleRequest | ScoreRequest) -> FaultKind | None:
        """Return the kind of fault that the next call gets; None for no fault."""
        faults = self._faults
        number = self._calls
        self._calls += 1
        verb = "sample" if isinstance(request, SampleRequest) else "score"
        if faults.only not in ("both", verb):
            return None
        if number in faults.calls:
            return faults.calls[number]
        if not faults.shares:
            return None
        return drawn(faults.shares, self._name(request).key() / 2**128)

    def _name(self, request: SampleRequest | ScoreRequest) -> Seed:
        if isinstance(request, SampleRequest):
            seed = request.seed
            return replace(
                seed, purpose=f"fault {self._faults.seed} {seed.purpose} {hash(request.ids)}"
            )
        # The fault depends on hashes of the ids. Python hashes tuples of ints equally in every
        # process, so the faults are reproducible.
        key = (
            request.rollout,
            hash(request.prefix),
            hash(request.suffix),
        )
        self._asked[key] = attempt = self._asked.get(key, -1) + 1
        return Seed(run=self._faults.seed, problem=repr(key), attempt=attempt, purpose="fault")

    async def before(self, kind: FaultKind | None) -> None:
        """Simulate the part of a fault that comes before the answer is computed: an error, a delay
        or a hang.

        :raises EngineUnavailable: the kind is refused or dropped.
        :raises EngineTimeout: the kind is timeout.
        """
        if kind == "refused":
            raise EngineUnavailable(self._engine, "the call was refused", "Try again later")
        if kind == "hang":
            await anyio.sleep_forever()
        if kind in ("slow", "dropped", "timeout"):
            await anyio.sleep(self._faults.delay_seconds)
        if kind == "dropped":
            raise EngineUnavailable(
                self._engine, "the connection was lost in the middle of an answer", "Try again"
            )
        if kind == "timeout":
            raise EngineTimeout(
                self._engine, f"no answer within {self._faults.delay_seconds:g} s", "Try again"
            )


def spoilt(kind: str | None, answer: _Answer, vocabulary: int) -> _Answer:
    """Return the answer, corrupted if `kind` is a fault that corrupts answers, and unchanged
    otherwise.
    """
    logprobs: tuple[float, ...] = answer.logprobs
    if kind == "wrong_length":
        return replace(answer, logprobs=logprobs[:-1])
    if kind == "nan":
        return replace(answer, logprobs=(*logprobs[:-1], math.nan))
    if kind == "empty":
        nothing = replace(answer, logprobs=())
        return replace(nothing, ids=(), text="") if isinstance(nothing, Completion) else nothing
    if kind == "wrong_ids":
        if isinstance(answer, Completion):
            return replace(answer, ids=(*answer.ids[:-1], vocabulary + 7))
        return replace(answer, logprobs=(*logprobs[:-1], 1.0))
    return answer


class FaultyEngine(EngineAround):
    """A wrapper that simulates faults of any engine.

    Opening and closing the wrapper also opens and closes the inner engine.
    """

    def __init__(self, engine: Engine, faults: Faults) -> None:
        super().__init__(engine, "own")
        self._faults = faults
        self._schedule: FaultSchedule | None = None

    async def around(
        self, request: _Request, call: Callable[[_Request], Awaitable[_Answer]]
    ) -> _Answer:
        """Choose a fault for this call, call the inner engine, and return its answer with the fault
        applied.
        """
        if self._schedule is None:
            raise UsageError("a faulty engine must be opened with `async with` before it is called")
        kind = self._schedule.pick(request)
        await self._schedule.before(kind)
        return spoilt(kind, await call(request), self.spec.vocabulary)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._schedule = FaultSchedule(self._faults, self.spec.name)
        return self


_Request = TypeVar("_Request", SampleRequest, ScoreRequest)
_Answer = TypeVar("_Answer", Completion, Scores)


@dataclass(frozen=True, slots=True)
class Latency:
    """The time, in seconds, that the engine takes for a request. Under `run_virtual`, this is
    virtual time.

    The time of each request is multiplied by a random log-normal factor. `jitter` is the standard
    deviation of the factor's logarithm. The factor depends only on the request and on `seed`, so it
    is reproducible.
    """

    per_sample: float = 0.0
    per_score: float = 0.0
    sampled_token: float = 0.0
    scored_token: float = 0.0
    prefilled_token: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def spread(self, key: Seed) -> float:
        """Return the random factor that multiplies the time of a request."""
        if not self.jitter:
            return 1.0
        first = (key.key() % 2**64 + 0.5) / 2**64
        second = (key.key() >> 64) / 2**64
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
        return math.exp(self.jitter * normal)


NO_LATENCY = Latency()


@dataclass(frozen=True, slots=True)
class ScoreDrift:
    """A simulated drift of the scores. Log-probabilities are multiplied by `factor`, so a factor
    above 1 raises the perplexity.

    If `when` is "calls", the drift begins after `after` scoring calls. If it is "steps", only
    suffixes that follow at least `after` steps of the rollout get changed scores.
    """

    after: int = 0
    factor: float = 1.0
    when: Literal["calls", "steps"] = "calls"

    def __post_init__(self) -> None:
        if self.when not in ("calls", "steps"):
            raise OptionError("drift", f"{self.when!r} is unknown", ("calls", "steps"))


NO_DRIFT = ScoreDrift()


class ScriptedEngine(BaseEngine):
    """An engine that runs a toy model, with reproducible seeds and exact log-probabilities.

    The arguments add latency, a queue, faults and drift. Without latency, a call takes no time, but
    still lets other tasks run once. If `concurrency` is None, calls never queue.

    >>> from atts.core import Message
    >>> from atts.testing.clock import run_virtual
    >>> async def main() -> str:
    ...     async with ScriptedEngine("target", latency=Latency(sampled_token=0.01), concurrency=2) as engine:
    ...         ids = engine.tokenizer.render([Message("user", "Start at 4. +3, -2. What is the result?")])
    ...         return (await engine.sample(SampleRequest(ids, 200))).text
    >>> run_virtual(main).split()[-1]
    '\\\\boxed{5}'

    :raises OptionError: the role is unknown, or `concurrency` is below 1.
    """

    def __init__(
        self,
        role: Role = "draft",
        *,
        model: ToyModel | None = None,
        latency: Latency = NO_LATENCY,
        concurrency: int | None = None,
        faults: Faults = NO_FAULTS,
        drift: ScoreDrift = NO_DRIFT,
        context_length: int = 8192,
        capabilities: frozenset[Capability] = frozenset({"sample", "score", "draw", "entropy"}),
        selector: Selector | None = None,
    ) -> None:
        if role not in ("draft", "target"):
            raise OptionError("role", f"{role!r} is unknown", ("draft", "target"))
        if concurrency is not None and concurrency < 1:
            raise OptionError(
                "concurrency",
                f"a concurrency of {concurrency} would serve no request; give at least 1, or "
                "None for no limit",
            )
        super().__init__(role)
        self._model = model or ToyModel(DRAFT if role == "draft" else TARGET, ToyTokenizer())
        self._writer = Writer(self._model, selector=selector)
        self._cache = PrefixMemory()
        self._latency = latency
        self._slots = SlotQueue(concurrency)
        self._drift = drift
        self._faults = FaultSchedule(faults, role)
        self._spec = _spec_of(role, self._model, context_length, capabilities)
        self._tokenizer = self._model.tokenizer
        self._scored = 0

    @property
    def tokenizer(self) -> ToyTokenizer:
        """Return the toy language's tokenizer."""
        return self._model.tokenizer

    async def _sample(self, request: SampleRequest) -> Completion:
        return await self._serve(request, self._write)

    async def _score(self, request: ScoreRequest) -> Scores:
        return await self._serve(request, self._rate)

    async def _serve(
        self, request: _Request, work: Callable[[_Request], Awaitable[_Answer]]
    ) -> _Answer:
        """Wait for a slot, compute the answer, and return it with the fault that was chosen for
        this call.
        """
        fault = self._faults.pick(request)
        asked = self._clock()
        if not self._slots.take_nowait():
            await self._slots.take(priority=request.priority)
        try:
            self._counts.queue_seconds += self._clock() - asked
            await self._faults.before(fault)
            answer = await work(request)
        finally:
            self._slots.give()
        return spoilt(fault, answer, self.spec.vocabulary)

    async def _write(self, request: SampleRequest) -> Completion:
        written = self._writer.write(request)
        cached = self._cache.cached(request.rollout, request.ids)
        prefilled = len(request.ids) - cached
        sampled = len(written.ids)
        times = self._latency
        seconds = (
            times.per_sample + times.sampled_token * sampled + times.prefilled_token * prefilled
        )
        await self._wait(seconds, replace(request.seed, purpose=f"latency {times.seed}"))
        self._cache.keep(request.rollout, request.ids + written.ids)
        self._counts.steps += sampled
        return replace(written, cached_tokens=cached)

    async def _rate(self, request: ScoreRequest) -> Scores:
        logprobs = self._writer.score(request)
        if self._has_drifted(request):
            factor = self._drift.factor
            logprobs = tuple(
                value * factor if math.isfinite(value) else value for value in logprobs
            )
        self._scored += 1
        cached = self._cache.cached(request.rollout, request.prefix)
        prefilled = len(request.prefix) - cached
        scored = len(request.suffix)
        times = self._latency
        seconds = times.per_score + times.scored_token * scored + times.prefilled_token * prefilled
        # The latency depends on hashes of the ids. Python hashes tuples of ints equally in every
        # process, so the latencies are reproducible.
        name = f"{hash(request.prefix)} {hash(request.suffix)}"
        await self._wait(seconds, Seed(run=times.seed, problem=name, purpose="latency"))
        self._cache.keep(request.rollout, request.prefix + request.suffix)
        self._counts.steps += 1
        draws = request.draw is not None and "draw" in self.spec.capabilities
        begun = (
            self._writer.begin(request.draw, request.suffix)
            if draws and request.draw is not None
            else None
        )
        return Scores(logprobs, cached, begun)

    async def _wait(self, seconds: float, key: Seed) -> None:
        if seconds > 0:
            await anyio.sleep(seconds * self._latency.spread(key))
        else:
            await anyio.lowlevel.checkpoint()

    def _has_drifted(self, request: ScoreRequest) -> bool:
        if self._drift.factor == 1.0:
            return False
        if self._drift.when == "calls":
            return self._scored >= self._drift.after
        return self._model.read(request.prefix).steps >= self._drift.after


def _spec_of(
    role: Role, model: ToyModel, context_length: int, capabilities: frozenset[Capability]
) -> EngineSpec:
    """Return the spec of an engine that runs this toy model.

    The model's name is a hash of its skill.
    """
    return EngineSpec(
        name=role,
        model=f"toy {blake2b(repr(model.skill).encode(), digest_size=6).hexdigest()}",
        tokenizer=model.tokenizer.digest,
        context_length=context_length,
        end_ids=(model.tokenizer.end_id,),
        vocabulary=model.tokenizer.vocabulary,
        engine="scripted 0.1",
        dtype="float64",
        capabilities=capabilities,
    )
