"""Steps that are taken once: engine calls are recorded, and recalled instead of repeated.

A pipeline is plain code that knows nothing of this. After a crash it simply runs again from the start: every call that
was recorded returns its recorded result at once, so it comes to where it was with no work done twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import anyio

from atts import errors
from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineAround
from atts.errors import EngineError
from atts.journal import CallFailed, Decided, Observed, OpenProblem, Sampled, Scored, sample_key, score_key
from atts.journal.events import FailureKind
from atts.run.recorder import CallBegun, Recorder
from atts.run.stopping import Stop

Pace = Literal["instant", "recorded"]
"""How fast recalled calls return: at once, or in the time they took.

"recorded" is for virtual time: the whole run, finished problems included, is lived through again without engine work,
so the schedule is what it was, and even decisions that depend on the order of arrival come out as if nothing had been.
"""

T = TypeVar("T")
Call = Sampled | Scored | CallFailed


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


class StepEngine(EngineAround):
    """An engine whose calls are recorded for one problem; it is opened and closed by whoever owns the real one."""

    def __init__(self, engine: Engine, role: Role, keeper: Keeper) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._keeper = keeper

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

        begun = CallBegun(problem, request.rollout, self._role)
        return await self._live(key, begun, lambda: self._engine.sample(request), event)

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

        begun = CallBegun(problem, request.rollout, "score")
        return await self._live(key, begun, lambda: self._engine.score(request), event)

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
        self,
        key: str,
        begun: CallBegun,
        call: Callable[[], Awaitable[T]],
        event: Callable[[T, float], Sampled | Scored],
    ) -> T:
        keeper = self._keeper
        await keeper.stop.pass_or_wait()
        with keeper.stop.counted():
            since = anyio.current_time()
            keeper.recorder.tell(begun)
            try:
                done = await call()
            except EngineError as error:
                self._note_failure(key, begun.rollout, error, anyio.current_time() - since)
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
