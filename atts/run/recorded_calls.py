"""Recorded engine calls: each is journalled once with its result, and recalled instead of repeated.

A pipeline is plain code that knows nothing of this. After a crash it simply runs again from the
start: every call that was recorded returns its recorded result at once, so it comes to where it was
with no work done twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import anyio

from atts import errors
from atts.concurrency import clock
from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores, request_key
from atts.engine import Engine, Returning
from atts.errors import EngineError, EngineUnavailable
from atts.graph import Caller, CallSpan
from atts.journal import (
    CallFailed,
    FailureKind,
    OpenProblem,
    Sampled,
    Scored,
)
from atts.pipelines import AdmittedEngine, Stage, check_completion, check_scores
from atts.run.recorder import CallBegun, EngineAwaited, Recorder
from atts.run.stopping import Stop

RecallTiming = Literal["instant", "recorded"]
"""How fast recalled calls return: at once, or in the time they took.

"recorded" is for virtual time: the whole run, finished problems included, is lived through again
without engine work, so the schedule is what it was, and even decisions that depend on the order of
arrival come out as if nothing had been.
"""

Request = TypeVar("Request", SampleRequest, ScoreRequest)
Result = TypeVar("Result", Completion, Scores)
Call = Sampled | Scored | CallFailed


class _Reply(NamedTuple, Generic[Request, Result]):
    """What one call came to, on its way into the journal."""

    request: Request
    key: str
    result: Result
    seconds: float
    source: Literal["live", "recalled"]


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """What an earlier session recorded of one problem, and where further steps are recorded."""

    recorder: Recorder
    recorded: OpenProblem
    stop: Stop
    timing: RecallTiming
    now: Callable[[], float] = field(default_factory=clock)


class RecordedEngine(AdmittedEngine):
    """An engine whose calls are recorded for one problem; without a scope they are not admitted by
    the task graph.
    """

    def __init__(
        self,
        engine: Engine,
        role: Role,
        scope: Caller | None,
        timeout_seconds: float,
        steps: RecordedSteps,
    ) -> None:
        super().__init__(engine, role, scope, timeout_seconds)
        self._steps = steps
        self._problem = steps.recorded.problem.id
        self.recalls = bool(steps.recorded.calls)
        # samples and turns of recorded completions
        self._written: set[tuple[int, int]] | None = None

    def recorded(self, request: ScoreRequest) -> Scores | None:
        """What an earlier session recorded of this call, which is not used up by that."""
        calls = self._find(request_key(self._role, request), request)
        return calls[0].scores if calls and isinstance(calls[0], Scored) else None

    def recorded_length(self, request: SampleRequest) -> int:
        """How many tokens an earlier session asked for here, which is not used up by that; 0 if it
        did not.
        """
        if not self.recalls or self._steps.timing == "recorded":
            return 0
        calls = self._steps.recorded.calls
        if self._written is None:
            events = (event for found in calls.values() for event in found)
            self._written = {
                (one.sample, one.turn)
                for one in events
                if isinstance(one, Sampled) and one.role == self._role
            }
        if (request.seed.sample, request.seed.turn) not in self._written:
            return 0
        lengths = range(request.max_tokens, 0, -1)
        return next(
            (
                n
                for n in lengths
                if calls.get(request_key(self._role, replace(request, max_tokens=n)))
            ),
            0,
        )

    async def _call(
        self,
        stage: Stage,
        ask: Callable[[Request], Awaitable[Result]],
        request: Request,
        turn: int,
        tokens: int,
    ) -> Result:
        key = request_key(self._role, request)
        if self._scope is None:
            reply = await self._attempt(key, stage, ask, request)
            await self._keep(None, reply)
        else:
            reply = await self._scope.call(
                stage, self._once, key, stage, ask, request,
                engine=self._role, turn=turn, tokens=tokens, priority=request.priority, record=self._keep,
            )  # fmt: skip
        return reply.result

    async def _once(
        self, key: str, stage: Stage, ask: Callable[[Request], Awaitable[Result]], request: Request
    ) -> _Reply[Request, Result]:
        """An attempt; the next one follows when an engine that was lost is there again, or will not
        be.
        """
        try:
            return await self._attempt(key, stage, ask, request)
        except EngineUnavailable:
            if isinstance(self._engine, Returning):
                self._steps.recorder.tell(EngineAwaited(self._role, 1))
                try:
                    await self._engine.comes_back()
                finally:
                    self._steps.recorder.tell(EngineAwaited(self._role, -1))
            raise

    async def _attempt(
        self, key: str, stage: Stage, ask: Callable[[Request], Awaitable[Result]], request: Request
    ) -> _Reply[Request, Result]:
        steps = self._steps
        if self.recalls and (recorded := self._find(key, request)):
            return _Reply(
                request, key, await self._recalled(recorded.popleft(), request), 0.0, "recalled"
            )
        stop = steps.stop
        if stop.asked:
            await anyio.sleep_forever()  # no call begins any more
        since = steps.now()
        stop.calls += 1
        try:
            steps.recorder.tell(CallBegun(self._problem, request.rollout, stage))
            result = await ask(request)
        except EngineError as error:
            self._record_failure(key, request.rollout, error, steps.now() - since)
            raise
        finally:
            stop.calls -= 1
            if stop.asked:
                stop.report()
        return _Reply(request, key, result, steps.now() - since, "live")

    def _find(self, key: str, request: SampleRequest | ScoreRequest) -> deque[Call] | None:
        calls = self._steps.recorded.calls
        found = calls.get(key)
        # recorded before there were
        if not found and isinstance(request, ScoreRequest) and request.draw:
            found = calls.get(request_key(self._role, replace(request, draw=None)))
        return found

    async def _recalled(self, call: Call, request: Request) -> Any:
        """The recorded result; one that was recorded although it is invalid fails as it did."""
        if self._steps.timing == "recorded":
            await anyio.sleep(call.seconds)
        if isinstance(call, CallFailed):
            raise _failure(call)
        if isinstance(call, Sampled) and isinstance(request, SampleRequest):
            check_completion(call.completion, request, self.spec)
            return call.completion
        assert isinstance(call, Scored), "a key is of one kind of request"
        assert isinstance(request, ScoreRequest), "a key is of one kind of request"
        check_scores(call.scores, request, self.spec)
        return call.scores

    async def _keep(self, span: CallSpan | None, reply: _Reply[Any, Any]) -> None:
        """Record a call that succeeded, and wait until it is written: until then its slot is taken."""
        recorder = self._steps.recorder
        request = reply.request
        if reply.source == "recalled":
            if span is not None:
                span.source = "recalled"
                recorder.record(span)
            return
        what = (self._problem, reply.key, reply.result, self._role, request.rollout)
        if isinstance(request, SampleRequest):
            seed = request.seed
            recorder.record(
                Sampled(*what, seed.sample, seed.turn, seed.attempt, reply.seconds), span
            )
        else:
            recorder.record(Scored(*what, reply.seconds), span)
        if recorder.awaits_disk:
            # what is recorded is always returned, and so counted
            with anyio.CancelScope(shield=True):
                await recorder.saved()

    def _record_failure(self, key: str, rollout: str, error: EngineError, seconds: float) -> None:
        """Failures a pipeline may go on from are steps as well; the others come again by
        themselves.
        """
        kind = _kind(error)
        if kind is not None:
            why = (kind, error.engine, str(error))
            event = CallFailed(
                self._problem, key, self._role, *why, rollout=rollout, seconds=seconds
            )
            self._steps.recorder.record(event)


def _kind(error: EngineError) -> FailureKind | None:
    kinds: tuple[FailureKind, ...] = get_args(FailureKind)
    return next((name for name in kinds if isinstance(error, getattr(errors, name))), None)


def _failure(event: CallFailed) -> EngineError:
    kind: type[EngineError] = getattr(errors, event.error)
    return kind(event.engine, event.text.removeprefix(f"engine {event.engine}: "))
