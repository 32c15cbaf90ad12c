"""Steps that are taken once: engine calls and gate decisions are recorded, and recalled instead of repeated.

A pipeline is plain code that knows nothing of this. After a crash it simply runs again from the start: every call that
was recorded returns its recorded result at once, so it comes to where it was with no work done twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self, TypeVar, get_args

import anyio

from atts import errors
from atts.core import Completion, Decision, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineSpec, EngineStats, Tokenizer
from atts.errors import EngineError
from atts.journal import CallFailed, Decided, Observed, OpenProblem, Sampled, Scored, sample_key, score_key
from atts.journal.events import FailureKind
from atts.pipelines import Features, Gate, RoundGate
from atts.run.recorder import Recorder
from atts.run.stopping import Stop

Pace = Literal["instant", "recorded"]
"""How fast recalled calls return: at once, or in the time they took.

"recorded" is for virtual time: the whole run, finished problems included, is lived through again without engine work,
so the schedule is what it was, and even decisions that depend on the order of arrival come out as if nothing had been.
"""

T = TypeVar("T")
Call = Sampled | Scored | CallFailed
_TOLD = ("attempt", "tokens", "draft_logprob", "has_answer", "answered", "agreement", "agrees")


@dataclass(frozen=True, slots=True)
class Keeper:
    """What the steps of one problem share."""

    recorder: Recorder
    recorded: OpenProblem
    stop: Stop
    pace: Pace

    @property
    def problem(self) -> str:
        """Whose steps they are."""
        return self.recorded.problem.id

    def recall(self, key: str) -> Call | None:
        """The next recorded result of this call."""
        found = self.recorded.calls.get(key)
        return found.popleft() if found else None

    def gate_calls(self, sample: int, turn: int) -> deque[Decided | Observed]:
        """What is left of the recorded gate calls of one turn."""
        return self.recorded.gate.get((sample, turn)) or deque()


class StepEngine:
    """An engine whose calls are recorded for one problem; it is opened and closed by whoever owns the real one."""

    def __init__(self, engine: Engine, role: Role, keeper: Keeper) -> None:
        self._engine = engine
        self._role: Role = role
        self._keeper = keeper

    @property
    def spec(self) -> EngineSpec:
        """The real engine's."""
        return self._engine.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The real engine's."""
        return self._engine.tokenizer

    def stats(self) -> EngineStats:
        """The real engine's: recalled calls cost it nothing."""
        return self._engine.stats()

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids, or recall how they were continued; see `atts.engine.Engine`.

        :raises StorageError: the result cannot be recorded.
        """
        key, seed, problem = sample_key(self._role, request), request.seed, self._keeper.problem
        recalled = await self._recall(key)
        if isinstance(recalled, Sampled):
            return recalled.completion

        def event(done: Completion, seconds: float) -> Sampled:
            place = (seed.sample, seed.turn, seed.attempt)
            return Sampled(problem, key, done, self._role, request.rollout, *place, seconds=seconds)

        return await self._live(key, request.rollout, lambda: self._engine.sample(request), event)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix, or recall its scores; see `atts.engine.Engine`.

        :raises StorageError: the result cannot be recorded.
        """
        key, problem = score_key(self._role, request), self._keeper.problem
        recalled = await self._recall(key)
        if isinstance(recalled, Scored):
            return recalled.scores

        def event(done: Scores, seconds: float) -> Scored:
            return Scored(problem, key, done, self._role, request.rollout, seconds)

        return await self._live(key, request.rollout, lambda: self._engine.score(request), event)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return None

    async def _recall(self, key: str) -> Call | None:
        recalled = self._keeper.recall(key)
        if recalled is None:
            return None
        if self._keeper.pace == "recorded":
            await anyio.sleep(recalled.seconds)
        self._keeper.recorder.last_call = "recalled"
        if isinstance(recalled, CallFailed):
            raise _failure(recalled)
        return recalled

    async def _live(
        self, key: str, rollout: str, call: Callable[[], Awaitable[T]], event: Callable[[T, float], Sampled | Scored]
    ) -> T:
        keeper = self._keeper
        await keeper.stop.pass_or_wait()
        with keeper.stop.counted():
            since = anyio.current_time()
            try:
                done = await call()
            except EngineError as error:
                self._note_failure(key, rollout, error, anyio.current_time() - since)
                raise
            keeper.recorder.record(event(done, anyio.current_time() - since))
            await keeper.recorder.saved()
        keeper.recorder.last_call = "live"
        return done

    def _note_failure(self, key: str, rollout: str, error: EngineError, seconds: float) -> None:
        """Failures a pipeline may go on from are steps as well; the others come again by themselves."""
        keeper = self._keeper
        kind = _kind(error)
        if kind is not None:
            event = CallFailed(keeper.problem, key, self._role, kind, error.engine, str(error), rollout, seconds)
            keeper.recorder.record(event)


def _kind(error: EngineError) -> FailureKind | None:
    kinds: tuple[FailureKind, ...] = get_args(FailureKind)
    return next((name for name in kinds if isinstance(error, getattr(errors, name))), None)


def _failure(event: CallFailed) -> EngineError:
    kind: type[EngineError] = getattr(errors, event.error)
    return kind(event.engine, event.text.removeprefix(f"engine {event.engine}: "))


class StepGate:
    """A gate whose decisions stand once they are recorded. The real one must have been reminded of them before."""

    def __init__(self, gate: Gate, keeper: Keeper) -> None:
        self._gate = gate
        self._keeper = keeper

    def preview(self, features: Features) -> Decision:
        """As the gate, or as recorded; see `atts.pipelines.Gate`."""
        calls = self._keeper.gate_calls(features.sample, features.turn)
        if calls and isinstance(calls[0], Decided) and calls[0].asked == "preview":
            return _decision(calls)
        if calls:  # what was recorded came after a score had been asked for
            return replace(calls[0].decision, action="verify", score=None, p=None, why="recalled")
        decision = self._gate.preview(features)
        if decision.action != "verify" or decision.issue is not None:
            self._keeper.recorder.record(Decided(decision, _told(features), "preview"))
        return decision

    def decide(self, features: Features, score: float) -> Decision:
        """As the gate, or as recorded; see `atts.pipelines.Gate`."""
        calls = self._keeper.gate_calls(features.sample, features.turn)
        if calls and isinstance(calls[0], Decided):
            return _decision(calls)
        decision = self._gate.decide(features, score)
        self._keeper.recorder.record(Decided(decision, _told(features)))
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Teach the gate, unless it was taught before; see `atts.pipelines.Gate`."""
        calls = self._keeper.gate_calls(decision.sample, decision.turn)
        if calls and isinstance(calls[0], Observed):
            calls.popleft()
            return
        self._gate.observe(decision, escalated)
        self._keeper.recorder.record(Observed(decision, "yes" if escalated else "no"))


class StepRoundGate:
    """The same for rounds: the real gate ranks every round anew, for what it carries over; recorded decisions stand."""

    def __init__(self, gate: RoundGate, keeper: Keeper) -> None:
        self._gate = gate
        self._keeper = keeper

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """As the gate, or as recorded, member by member."""
        decisions: list[Decision] = []
        for (features, _), decision in zip(round_, self._gate.decide_round(round_), strict=True):
            calls = self._keeper.gate_calls(features.sample, features.turn)
            if calls and isinstance(calls[0], Decided):
                decisions.append(_decision(calls))
            else:
                self._keeper.recorder.record(Decided(decision, _told(features), "round"))
                decisions.append(decision)
        return decisions


def remind(gate: Gate, event: Decided | Observed) -> None:
    """Let a gate live through a recorded call again: called in the recorded order, it is then what it was."""
    decision = event.decision
    if isinstance(event, Observed):
        gate.observe(decision, event.escalated == "yes")
        return
    told = {name: event.features.get(name, 0.0) for name in _TOLD}
    features = Features(
        decision.question,
        decision.turn,
        decision.sample,
        attempt=int(told["attempt"]),
        tokens=int(told["tokens"]),
        draft_logprob=told["draft_logprob"],
        has_answer=bool(told["has_answer"]),
        answered=int(told["answered"]),
        agreement=told["agreement"],
        agrees=bool(told["agrees"]),
    )
    if event.asked == "preview":
        gate.preview(features)
    elif decision.score is not None:
        gate.decide(replace(features, issue=decision.issue), decision.score)


def _decision(calls: deque[Decided | Observed]) -> Decision:
    return calls.popleft().decision


def _told(features: Features) -> dict[str, float]:
    return {name: float(getattr(features, name)) for name in _TOLD}
