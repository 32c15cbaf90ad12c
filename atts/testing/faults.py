"""Fault injection: engine calls that fail, hang or answer nonsense, on a seeded schedule."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeVar, get_args

import anyio

from atts.core import Completion, Recent, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineAround
from atts.errors import EngineTimeout, EngineUnavailable, OptionError, UsageError
from atts.sampling import Seed

FaultKind = Literal[
    "refused", "slow", "dropped", "timeout", "wrong_length", "nan", "empty", "hang", "wrong_ids"
]
"""refused: turned away at once. slow: answers late. dropped: fails mid-answer. timeout: gives up
late. hang: for ever.

The others answer what cannot be true: a log-prob too few, a NaN among them, nothing at all, ids no
vocabulary has (a score has no ids: a positive log-prob).
"""
_REMEMBERED = 4096  # scores whose attempts are counted: retries come soon
_Kind = TypeVar("_Kind", bound=str)
_Request = TypeVar("_Request", SampleRequest, ScoreRequest)
_Answer = TypeVar("_Answer", Completion, Scores)


def check_shares(shares: Mapping[_Kind, float], kinds: tuple[_Kind, ...]) -> None:
    """Refuse shares of faults that are not probabilities, and unknown kinds.

    :raises OptionError: an unknown kind, or shares that are not probabilities or sum to more than 1.
    """
    for kind in shares:
        if kind not in kinds:
            raise OptionError("faults", f"{kind!r} is unknown", kinds)
    if (
        not all(0 <= share <= 1 for share in shares.values())
        or math.fsum(shares.values()) > 1 + 1e-9
    ):
        raise OptionError(
            "faults", f"shares {dict(shares)} are not probabilities that sum to at most 1"
        )


def drawn(shares: Mapping[_Kind, float], uniform: float) -> _Kind | None:
    """Return the kind of fault that a uniform number falls on, if any."""
    for kind, share in shares.items():
        uniform -= share
        if uniform < 0:
            return kind
    return None


@dataclass(frozen=True, slots=True)
class Faults:
    """The calls that fail, and how: a share of all calls by kind, and fixed call numbers first.

    The shares are drawn from the request itself (seed, ids, rollout): the same calls fail under any
    schedule. A retry fares otherwise if it changes the seed's attempt; scores are distinguished by
    how often they were asked. Calls are numbered from 0 in order of arrival. `delay_seconds` is how
    late the slow, dropped and timed-out answer.

    :raises OptionError: an unknown kind, or shares that are not probabilities or sum to more than 1.
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
    """The faults of one engine's life: it counts calls, and decides the fault of each."""

    def __init__(self, faults: Faults, engine: str) -> None:
        self._faults = faults
        self._engine = engine
        self._calls = 0
        self._asked: Recent[tuple[str, int, int], int] = Recent(_REMEMBERED)

    def pick(self, request: SampleRequest | ScoreRequest) -> FaultKind | None:
        """Return the fault of this call, if it has one."""
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
        # hashes of ints are the same in every run
        key = (
            request.rollout,
            hash(request.prefix),
            hash(request.suffix),
        )
        self._asked[key] = attempt = self._asked.get(key, -1) + 1
        return Seed(run=self._faults.seed, problem=repr(key), attempt=attempt, purpose="fault")

    async def before(self, kind: FaultKind | None) -> None:
        """Fail, wait or hang, as the fault has it, before an answer is made.

        :raises EngineUnavailable: refused or dropped.
        :raises EngineTimeout: timed out.
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
    """Return the answer as it arrives with a fault of this kind."""
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
    """Any engine, made to fail on a schedule.

    Opening and closing it opens and closes the engine inside.
    """

    def __init__(self, engine: Engine, faults: Faults) -> None:
        super().__init__(engine, "own")
        self._faults = faults
        self._schedule: FaultSchedule | None = None

    async def around(
        self, request: _Request, call: Callable[[_Request], Awaitable[_Answer]]
    ) -> _Answer:
        """Return the inner engine's answer, or what the schedule has instead."""
        if self._schedule is None:
            raise UsageError("a faulty engine must be opened with `async with` before it is called")
        kind = self._schedule.pick(request)
        await self._schedule.before(kind)
        return spoilt(kind, await call(request), self.spec.vocabulary)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._schedule = FaultSchedule(self._faults, self.spec.name)
        return self
