"""Make an engine call for a rollout, with limits, retries, checks and a record of the reply."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast, get_args

import anyio
import anyio.lowlevel
import msgspec

from atts import errors
from atts.core import Completion, Role, SampleRequest, ScoreRequest, Scores
from atts.engine import (
    Engine,
    EngineAround,
    EngineSpec,
    EngineStats,
    Returning,
    Tokenizer,
    stepping,
)
from atts.errors import BadReply, EngineError, EngineTimeout, EngineUnavailable, UnusableScores
from atts.graph import Caller, CallSpan
from atts.journal import (
    CallFailed,
    FailureKind,
    Json,
    Sampled,
    Scored,
    SharedReplies,
    reply_key,
    run_number,
)
from atts.ledger import Account, most_of, taken_by
from atts.run.recording import CallBegun, CallKind, EngineAwaited, ProblemLog

OnUnscored = Literal["stop", "escalate"]
"""The action if many chunks in a row have no usable score: the run stops and keeps its work, or it
continues and the target rewrites these chunks.
"""

# calls in a row without a usable score, after which the run stops; each is retried like any other
# call
IN_A_ROW = 12
_PROBE_TEXT = "2 + 2 = 4, so the answer is 4."
_ADVICE = (
    "Look at the target's log: overflow in float16 gives such numbers. All work is kept, and the "
    "same command continues. With --on-unscored escalate the target rewrites every chunk without "
    "a score"
)


_LOOKS = 4  # number of checks of an engine's steps within the time limit of a call

Request = TypeVar("Request", SampleRequest, ScoreRequest)
Result = TypeVar("Result", Completion, Scores)
RecordedCall = Sampled | Scored | CallFailed


@dataclass(slots=True)
class _Call(Generic[Request, Result]):
    """The state of one call; `seconds` and `source` are set when the reply comes back."""

    kind: CallKind
    request: Request
    key: str  # names the request by its content, so a repeated request has the same key
    ask: Callable[[Request], Awaitable[Result]]
    check: Callable[[Result, Request, EngineSpec], None]
    seconds: float = 0.0
    source: Literal["live", "recalled"] = "live"


def _begun(problem: str, call: _Call[Any, Any]) -> CallBegun:
    """Return the event that tells listeners that a call begins."""
    request = call.request
    if isinstance(request, SampleRequest):
        tokens = len(request.ids)
        return CallBegun(problem, request.rollout, call.kind, tokens, request.max_tokens)
    tokens = len(request.prefix) + len(request.suffix)
    return CallBegun(problem, request.rollout, call.kind, tokens)


class Deadlines:
    """The deadlines of all calls in flight at one engine of a run.

    A call may wait long for its turn at an engine that computes all calls in common steps. That is
    not a fault while the engine makes steps, so its deadline counts from the newest step.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.seconds = seconds
        self.scopes = set[anyio.CancelScope]()  # cancel scopes of the calls in flight
        self._engine = stepping(engine)
        self.are_moving = self._engine is not None
        # what a late call waits for, as its error names it
        self.awaited = "step" if self.are_moving else "answer"

    async def keep(self) -> None:
        """Move the deadlines whenever the engine has made steps; the engine must count its steps.

        One task does so for all calls, because a task for each call would cost more than the call
        itself.
        """
        assert self._engine is not None, "`are_moving` says whether there is anything to do"
        steps: int | None = None  # number of steps at the last check
        while True:
            await anyio.sleep(self.seconds / _LOOKS)
            if not self.scopes:
                continue  # an engine without calls may not be open
            try:
                taken = self._engine.steps_taken()
            except EngineError:
                continue  # the engine was lost, so its calls fail by themselves
            before = steps
            steps = taken
            if before is not None and taken != before:
                deadline = anyio.current_time() + self.seconds
                for scope in self.scopes:
                    scope.deadline = deadline


class EngineCalls:
    """An engine for the calls of one rollout. Each method adds one concern and calls the next
    method:

        sample, score      name the call and count the tokens that it may need
        scope.call         waits for a slot, times the call, tries it again (`atts.graph`)
        _outlast_outage    waits for an engine that was lost
        _recall_or_ask     returns what an earlier session recorded
        _ask_within_caps   waits for room in the caps, and reserves the most that the call can take
        _ask_live          counts the call in flight, reports it, records its failure
        _ask_in_time       sets the deadline and checks the reply
        _record            records the reply before the slot is given back

    A pipeline is plain code that does not know about these concerns. After a crash it runs again
    from the start: every recorded call returns its recorded result at once, so the pipeline reaches
    the same point without repeating work. Without a `scope` calls are not admitted by the task
    graph, without a `log` they are neither recorded nor counted against caps. The engine inside is
    opened and closed by its owner, and its spec must not change meanwhile.

    :raises BadReply: by `sample` and `score`: the reply contradicts itself or the request.
    :raises EngineTimeout: by the same methods: the reply did not come in time.
    """

    def __init__(
        self,
        engine: Engine,
        role: Role,
        scope: Caller | None,
        timeout_seconds: float,
        log: ProblemLog | None = None,
        deadlines: Deadlines | None = None,
        unscored: UnscoredWatch | None = None,
        account: Account | None = None,
    ) -> None:
        self.spec: EngineSpec = engine.spec
        self.tokenizer: Tokenizer = engine.tokenizer
        self.has_recorded_calls = log is not None and bool(log.recorded.calls)
        self._engine = engine
        self._role: Role = role
        self._scope = scope
        self._log = log
        self._deadlines = deadlines or Deadlines(engine, timeout_seconds)
        self._unscored = unscored
        self._account = account
        # samples and turns of recorded completions, computed on first use
        self._recorded_turns: set[tuple[int, int]] | None = None

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids, once the engine has room for them."""
        key = request_key(self._role, request)
        call = _Call(self._role, request, key, self._engine.sample, check_completion)
        return await self._admit(call, request.seed.turn, len(request.ids) + request.max_tokens)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix, once the engine has room for it."""
        key = request_key(self._role, request)
        call = _Call("score", request, key, self._engine.score, check_scores)
        tokens = len(request.prefix) + len(request.suffix)
        if self._unscored is None:
            return await self._admit(call, request.turn, tokens)
        try:
            scores = await self._admit(call, request.turn, tokens)
        except BadReply as error:
            # a failure of an earlier session does not predict one of this session
            if call.source == "live":
                await self._unscored.unusable(self._engine, error)
            raise
        if call.source == "live":
            self._unscored.in_a_row = 0
        return scores

    async def _admit(self, call: _Call[Request, Result], turn: int, tokens: int) -> Result:
        """Make the call a node of the task graph, which waits for a slot, is timed, and is retried."""
        log = self._log
        if self._scope is not None:
            return await self._scope.call(
                call.kind,
                self._ask_in_time if log is None else partial(self._outlast_outage, log),
                call,
                engine=self._role,
                turn=turn,
                tokens=tokens,
                priority=call.request.priority,
                record=None if log is None else partial(self._record, log, call),
            )
        if log is None:
            return await self._ask_in_time(call)
        result = await self._recall_or_ask(log, call)
        await self._record(log, call, None, result)
        return result

    async def _outlast_outage(self, log: ProblemLog, call: _Call[Request, Result]) -> Result:
        """Wait for an engine that was lost, so that the next attempt finds it."""
        try:
            return await self._recall_or_ask(log, call)
        except EngineUnavailable:
            if isinstance(self._engine, Returning):
                log.recorder.tell(EngineAwaited(self._role, 1))
                try:
                    await self._engine.comes_back()
                finally:
                    log.recorder.tell(EngineAwaited(self._role, -1))
            raise

    async def _recall_or_ask(self, log: ProblemLog, call: _Call[Request, Result]) -> Result:
        """Return the recorded result of the call, or make the call."""
        recorded = log.recorded.calls.get(call.key) if self.has_recorded_calls else None
        if not recorded:
            if log.stop.asked:
                await anyio.sleep_forever()  # the run is ending, so no further call begins
            if self._account is None:
                return await self._ask_live(log, call)
            return await self._ask_within_caps(self._account, log, call)
        event = recorded.popleft()
        call.source = "recalled"
        if log.timing == "recorded":
            await anyio.sleep(event.seconds)
        if isinstance(event, CallFailed):
            raise _recorded_error(event)
        result = event.completion if isinstance(event, Sampled) else event.scores
        # a key names one kind of request, so the recorded result is of this call's kind
        reply = cast(Result, result)
        call.check(reply, call.request, self.spec)
        return reply

    async def _ask_within_caps(
        self, account: Account, log: ProblemLog, call: _Call[Request, Result]
    ) -> Result:
        """Reserve the largest possible spending of the call, make the call, and charge its real
        spending.

        A call that waits for room is not in flight. A call that fails or is cancelled is charged in
        full.
        """
        most = most_of(self._role, call.request, account.prices)
        await account.room(most)
        if log.stop.asked:
            await anyio.sleep_forever()  # the run was asked to end while the call waited for room
        with account.reserved_now(most) as reservation:
            reply = await self._ask_live(log, call)
            account.count(reply)
            reservation.answered(taken_by(self._role, call.request, reply, account.prices))
        return reply

    async def _ask_live(self, log: ProblemLog, call: _Call[Request, Result]) -> Result:
        """Count the call in flight, report it, and record it if it fails."""
        stop = log.stop
        call.source = "live"  # an earlier attempt may have set this to "recalled"
        since = log.now()
        stop.calls += 1
        try:
            log.recorder.tell(_begun(log.recorded.problem.id, call))
            result = await self._ask_in_time(call)
            call.seconds = log.now() - since
            return result
        except EngineError as error:
            self._record_failure(log, call, error, log.now() - since)
            raise
        finally:
            stop.calls -= 1
            if stop.asked:
                stop.report()

    async def _ask_in_time(self, call: _Call[Request, Result]) -> Result:
        """Ask the engine within the deadline, and check what it replies."""
        late: TimeoutError | None = None
        deadlines = self._deadlines
        try:
            with anyio.move_on_after(deadlines.seconds) as scope:
                deadlines.scopes.add(scope)
                try:
                    reply = await call.ask(call.request)
                finally:
                    deadlines.scopes.discard(scope)
                call.check(reply, call.request, self.spec)
                return reply
        except TimeoutError as error:  # the engine itself raised this
            late = error
        problem = f"no {deadlines.awaited} within {deadlines.seconds:g} s"
        raise EngineTimeout(self.spec.name, problem) from late

    async def _record(
        self, log: ProblemLog, call: _Call[Any, Any], span: CallSpan | None, result: Any
    ) -> None:
        """Record a successful call, and wait until the record is written; the call keeps its slot
        until then.
        """
        recorder = log.recorder
        request = call.request
        problem = log.recorded.problem.id
        if call.source == "recalled":
            if span is not None:
                span.source = "recalled"
                recorder.record(span)
            return
        if isinstance(request, SampleRequest):
            seed = request.seed
            sampled = Sampled(
                problem,
                call.key,
                result,
                self._role,
                request.rollout,
                sample=seed.sample,
                turn=seed.turn,
                attempt=seed.attempt,
                seconds=call.seconds,
            )
            recorder.record(sampled, span)
        else:
            scored = Scored(
                problem, call.key, result, self._role, request.rollout, seconds=call.seconds
            )
            recorder.record(scored, span)
        if recorder.awaits_disk:
            # a recorded reply is always returned and counted
            with anyio.CancelScope(shield=True):
                await recorder.saved()

    def _record_failure(
        self, log: ProblemLog, call: _Call[Any, Any], error: EngineError, seconds: float
    ) -> None:
        """Record a failure after which a pipeline may continue; other failures happen again in a
        repeated run.
        """
        kind = _failure_kind(error)
        if kind is not None:
            event = CallFailed(
                log.recorded.problem.id,
                call.key,
                self._role,
                kind,
                error.engine,
                str(error),
                rollout=call.request.rollout,
                seconds=seconds,
            )
            log.recorder.record(event)

    def recorded_scores(self, request: ScoreRequest) -> Scores | None:
        """Return the record of this call by an earlier session, without using it up."""
        calls = self._recorded(request)
        if calls and isinstance(calls[0], Scored):
            return calls[0].scores
        return None

    def recorded_length(self, request: SampleRequest) -> int:
        """Return how many tokens an earlier session requested here, at most those of the request.

        It is 0 if there was no such request, or if recalled calls do not return at once. The
        recorded request may differ from this one in its length only. It stays recorded, so that the
        call itself still finds it.
        """
        if not self.has_recorded_calls or self._log is None or self._log.timing == "recorded":
            return 0
        if self._recorded_turns is None:
            self._recorded_turns = set()
            for calls in self._log.recorded.calls.values():
                for event in calls:
                    if isinstance(event, Sampled) and event.role == self._role:
                        self._recorded_turns.add((event.sample, event.turn))
        if (request.seed.sample, request.seed.turn) not in self._recorded_turns:
            return 0
        for length in range(request.max_tokens, 0, -1):
            if self._recorded(replace(request, max_tokens=length)):
                return length
        return 0

    def _recorded(self, request: SampleRequest | ScoreRequest) -> deque[RecordedCall] | None:
        if self._log is None:
            return None
        return self._log.recorded.calls.get(request_key(self._role, request))

    def stats(self) -> EngineStats:
        """Return the inner engine's counters, which exclude calls that never reached it."""
        return self._engine.stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


def request_key(role: Role, request: SampleRequest | ScoreRequest) -> str:
    """Return a key of a request with its role and rollout.

    It depends on everything that decides the answer, so not on the priority.
    """
    if isinstance(request, SampleRequest):
        settings = (
            request.rollout,
            request.max_tokens,
            request.sampling,
            request.seed,
            request.stop,
            request.stop_ids,
        )
        text = f"{role} {settings!r}{request.num_begun or ''}"
        if request.thinking_budget:
            text += f" thinking {request.thinking_budget}"
        ids = request.ids
    else:
        draw = request.draw
        drawn = (
            f" {(draw.num_begun, draw.max_tokens, draw.sampling, draw.seed, draw.stop, draw.stop_ids)!r}"
            if draw
            else ""
        )
        text = f"{role} scores {request.rollout!r} after {len(request.prefix)}{drawn}"
        if request.entropies:
            text += " entropies"
        if request.texts:
            text += f" rewards {request.texts!r}"
        ids = request.prefix + request.suffix
    hasher = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12)
    try:
        hasher.update(array("q", ids).tobytes())
    except OverflowError:  # text-only engines use ids that encode whole texts
        hasher.update(repr(ids).encode())
    return hasher.hexdigest()


def _failure_kind(error: EngineError) -> FailureKind | None:
    kinds: tuple[FailureKind, ...] = get_args(FailureKind)
    for kind in kinds:
        if isinstance(error, getattr(errors, kind)):
            return kind
    return None


def _recorded_error(event: CallFailed) -> EngineError:
    kind: type[EngineError] = getattr(errors, event.error)
    return kind(event.engine, event.text.removeprefix(f"engine {event.engine}: "))


def check_completion(completion: Completion, request: SampleRequest, spec: EngineSpec) -> None:
    """Check that the parts of a completion agree with each other and with the request.

    :raises BadReply: if they do not.
    """
    ids = completion.ids
    logprobs = completion.logprobs
    may_lack = spec.logprobs == "none" or request.logprobs == "unneeded"
    if len(logprobs) != len(ids) and (logprobs or not may_lack):
        raise BadReply(spec.name, f"{len(logprobs)} log-probabilities came with {len(ids)} ids")
    if len(ids) > request.max_tokens:
        raise BadReply(
            spec.name, f"{len(ids)} tokens came back, but only {request.max_tokens} were allowed"
        )
    if ids and not 0 <= min(ids) <= max(ids) < spec.vocabulary:
        raise BadReply(spec.name, "an id outside the vocabulary came back")
    if any(map(math.isnan, logprobs)):
        raise BadReply(spec.name, "a log-probability is not a number")


# A token outside the likely ones may have probability 0. But if none of many tokens is likely, the
# cause is an overflow.
_WHOLE_TEXT = 4
_ABSURD = -1000.0


def check_scores(scores: Scores, request: ScoreRequest, spec: EngineSpec) -> None:
    """Check that there is one log-probability per suffix token, and none above 0; -inf is allowed.

    :raises BadReply: if the reply is anything else.
    """
    logprobs = scores.logprobs
    if len(logprobs) != len(request.suffix):
        raise BadReply(
            spec.name,
            f"{len(logprobs)} log-probabilities came back for {len(request.suffix)} tokens",
        )
    if max(logprobs) > 1e-4 or any(map(math.isnan, logprobs)):  # rounding may exceed 0 a little
        raise BadReply(spec.name, "a log-probability is above 0 or not a number")
    if len(logprobs) >= _WHOLE_TEXT and max(logprobs) < _ABSURD:
        raise BadReply(spec.name, "every token of the text has probability 0")
    begun = scores.beginning
    draw = request.draw
    if begun is None:
        return
    ids = begun.ids
    # the tokens drawn while scoring follow the scored text, except for its last token
    follows = ids[:-1] == request.suffix[: len(ids) - 1]
    if draw is None or not follows or not 0 < len(ids) == len(begun.logprobs):
        raise BadReply(
            spec.name, "the tokens that it drew while scoring do not begin like the scored text"
        )
    most = draw.max_tokens - (begun.ended is None)  # a completion that has not ended continues
    if len(ids) > most or not 0 <= ids[-1] < spec.vocabulary:
        raise BadReply(
            spec.name,
            "the tokens that it drew while scoring are not the beginning of the requested "
            "completion",
        )


class SharingEngine(EngineAround):
    """An open engine in one role of one run, whose replies other runs of a set may reuse.

    Seeds depend on the run's seed, the problem, the sample and the turn, so two runs with the same
    request to the same model would get the same reply. If a server is not deterministic, the reply
    is still a draw from the model's distribution. So only the request decides whether a run may
    reuse a reply.
    """

    def __init__(self, engine: Engine, role: Role, replies: SharedReplies, run: str) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._replies = replies
        self._run = run_number(run)
        self._identity = engine_identity(engine.spec)

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return a stored reply, or ask the engine and store its reply."""
        kind = Completion if isinstance(request, SampleRequest) else Scores
        key = request_key(self._role, request)
        needed = request.logprobs if isinstance(request, SampleRequest) else "raw"
        for logprobs in dict.fromkeys(("raw", needed)):
            shared = self._replies.find(reply_key(self._identity, key, logprobs))
            if shared is not None:
                await anyio.lowlevel.checkpoint()
                return _decoder(kind)(self._replies.read(shared))
        since = anyio.current_time()
        answer = await call(request)
        if self._is_valid(request, answer):
            seconds = anyio.current_time() - since
            self._replies.add(
                reply_key(self._identity, key, needed),
                self._run,
                seconds,
                msgspec.msgpack.encode(answer),
            )
        return answer

    def _is_valid(self, request: SampleRequest | ScoreRequest, answer: Any) -> bool:
        """Return whether the run will accept the reply; a run asks again for a reply that it
        refuses.
        """
        try:
            if isinstance(request, SampleRequest):
                check_completion(answer, request, self.spec)
            else:
                check_scores(answer, request, self.spec)
        except EngineError:
            return False
        return True


@cache
def _decoder(kind: type) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


def engine_identity(spec: EngineSpec) -> dict[str, Json]:
    """Return the identity of an engine's results, as in manifests, without the place where it runs."""
    identity: dict[str, Json] = {
        name: getattr(spec, name)
        for name in (
            "engine",
            "model",
            "tokenizer",
            "dtype",
            "logprobs",
            "context_length",
            "end_ids",
            "vocabulary",
        )
    }
    for name, finding in spec.fingerprint().items():
        if name.startswith("probe."):
            identity[name] = str(finding)
    if spec.weights:
        identity["weights"] = spec.weights
    return identity


class UnscoredWatch:
    """A counter of scoring calls without a usable score, over all rollouts of a run.

    When the count is full, the target is asked once more, about a fixed
    text, so that the error can say whether it scores anything at all.
    """

    def __init__(self, reaction: OnUnscored) -> None:
        self._reaction = reaction
        self.in_a_row = 0  # set back to 0 by every usable score
        self._asking = anyio.Lock()
        self._diagnosis: str | None = None

    async def unusable(self, engine: Engine, error: BadReply) -> None:
        """Count a call without a usable score.

        :raises UnusableScores: if there were too many in a row.
        """
        self.in_a_row += 1
        if self._reaction == "escalate" or self.in_a_row < IN_A_ROW:
            return
        async with self._asking:
            if self._diagnosis is None:
                self._diagnosis = await _diagnosed(engine)
        problem = (
            f"{self.in_a_row} chunks in a row came back without a usable score "
            f"({error.problem}); {self._diagnosis}"
        )
        raise UnusableScores(engine.spec.name, problem, _ADVICE) from error


async def _diagnosed(engine: Engine) -> str:
    """Return a text on whether the engine can score a fixed text."""
    first, *rest = engine.tokenizer.encode(_PROBE_TEXT)
    request = ScoreRequest((first,), tuple(rest))
    try:
        with anyio.fail_after(60):
            check_scores(await engine.score(request), request, engine.spec)
    except (EngineError, TimeoutError) as error:
        reason = error.problem if isinstance(error, EngineError) else "no answer within 60 s"
        return f"a fixed sentence is not scored either ({reason})"
    return "a fixed sentence is scored, so the cause is in these chunks or in the load"
