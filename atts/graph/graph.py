"""The task graph, which solves problems with limits on the work in flight, and measures the time of
every call.

The first classes are the limits: slots and tokens of engines, concurrency slots of rollouts, and
attempts at calls. The next classes are the scopes of problems and rollouts, which make calls and
wait for siblings. The class `Graph` is at the end.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from operator import attrgetter
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    TypeVarTuple,
    Unpack,
    get_args,
)

import anyio

from atts.concurrency import SlotQueue, TaskGroup, backoff, clock, task_group
from atts.core import (
    HOLD,
    RELEASE,
    CallSpan,
    ProblemSpan,
    ProblemStatus,
    RolloutSpan,
    RolloutStatus,
)
from atts.errors import (
    ATTSError,
    EngineError,
    ModelLoadError,
    OptionError,
    OutOfMemory,
    UnsupportedByEngine,
    UnusableScores,
    counted,
)

# A problem is opened only while fewer than this number of ended rollouts per concurrency slot wait
# for grading or other work without an engine.
CONCLUDING_PER_PLACE = 4


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits on the calls and KV tokens in flight at one engine; None means no limit.

    :raises OptionError: a limit is below 1.
    """

    slots: Annotated[int | None, "calls in flight"] = None
    # limit on the tokens in the KV cache: the sum of prompt tokens and `max_tokens` over all calls
    # in flight
    tokens: Annotated[int | None, "KV tokens in flight"] = None

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise OptionError(
                    name,
                    f"a limit of {value} allows no calls; give at least 1, or None for no limit",
                )


class Pool(SlotQueue):
    """The slots and KV tokens of one engine. The pool also counts the seconds in which calls used
    slots, and the seconds in which calls waited for a slot.
    """

    __slots__ = ("busy_seconds", "name", "queue_seconds")

    def __init__(self, name: str, limit: Limit) -> None:
        super().__init__(limit.slots, limit.tokens)
        self.name = name
        # seconds in which slots of the engine were in use, summed over the slots
        self.busy_seconds = 0.0
        self.queue_seconds = 0.0

    def _refuse(self, tokens: int) -> None:
        """Raise an error for a call that needs more tokens than the engine's limit.

        :raises OutOfMemory: always.
        """
        raise OutOfMemory(
            self.name,
            f"a call needs {tokens} KV tokens, but the limit is {self.tokens}",
            "Raise the engine's token limit, or use shorter chunks or a shorter context",
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Rules for repeating failed calls and rollouts, and for ending the whole run.

    After a retryable error (`ATTSError.retryable`) the call is repeated. If it still fails, the
    rollout is repeated. If that fails too, the failure is recorded, and other rollouts continue.

    The run ends after an error that would happen in every rollout, such as a wrong option or a full
    disk. It also ends after `failures_in_row` consecutive failed rollouts, for example because a
    server was lost.

    :raises OptionError: a count is below 1, or a delay is negative.
    """

    calls: int = 3
    rollouts: int = 1
    # Seconds before a failed call is repeated for the first time. Each further wait is twice as
    # long. Every wait is also multiplied by a pseudo-random factor.
    delay_seconds: float = 0.5
    failures_in_row: int | None = 32

    def __post_init__(self) -> None:
        counts = {
            "calls": self.calls,
            "rollouts": self.rollouts,
            "failures_in_row": self.failures_in_row,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise OptionError(name, f"{value} is below 1")
        if self.delay_seconds < 0:
            raise OptionError("delay_seconds", f"{self.delay_seconds} is negative; give 0 or more")

    def retries(self, error: Exception, attempt: int, attempts: int) -> bool:
        """Return True if the failed call or rollout should be attempted again.

        `attempt` is the index of the failed attempt, counted from 0, and `attempts` is the largest
        number of attempts.
        """
        return attempt + 1 < attempts and isinstance(error, ATTSError) and error.retryable

    def delay(self, attempt: int, salt: int) -> float:
        """Return the seconds to wait before the next attempt.

        The delay depends on `salt`. Callers that failed together pass different salts, so they do
        not retry together. The same salt gives the same delay.
        """
        return backoff(attempt + 1, self.delay_seconds, salt=salt)

    def is_fatal(self, error: Exception) -> bool:
        """Return True if the error would also occur in every other rollout, so that the whole run
        should end.
        """
        if isinstance(error, EngineError):
            return isinstance(error, UnsupportedByEngine | ModelLoadError | UnusableScores)
        return isinstance(error, ATTSError | AssertionError)


class AdmissionGroup(Protocol):
    """The interface of a group of rollouts that one problem submitted together. `Admission` uses it
    to start the rollouts and to close the group.
    """

    @property
    def unit(self) -> int:
        """Return how many concurrency slots one call of `start` needs.

        The result is 1, or the number of rollouts in the group if they all start together.
        """
        ...

    @property
    def unstarted(self) -> int:
        """Return how many rollouts have yet to start; 0 if the group is closed."""
        ...

    def start(self) -> None:
        """Start the next rollout, or all rollouts of the group if they start together. The caller
        has already reserved their concurrency slots.
        """
        ...

    def close(self, why: str) -> None:
        """Start no more rollouts of the group, and cancel the rollouts that are running."""
        ...


@dataclass(slots=True, eq=False)
class Admission:
    """The queue of rollouts that wait for one of the `places` concurrency slots.

    Waiting groups of rollouts are started in the order of (priority, problem, submission). The next
    problem is opened only when a slot is free, no rollout waits, and not too many ended rollouts
    wait for grading. So the number of open problems stays in proportion to the rollouts in flight,
    and a slow grader delays the opening of problems.
    """

    places: int
    in_flight: int = 0
    # number of ended rollouts that wait for grading or other work without an engine
    concluding: int = 0
    open: int = 0  # number of open problems
    # Number of open problems that have not requested rollouts yet. One concurrency slot is kept
    # free for each of them.
    opening: int = 0
    _queue: list[tuple[int, int, int, AdmissionGroup]] = field(
        default_factory=list[tuple[int, int, int, AdmissionGroup]]
    )
    _submitted: int = 0
    _opened: int = 0
    _waiting_for_room: list[anyio.Event] = field(default_factory=list[anyio.Event])

    def __post_init__(self) -> None:
        if self.places < 1:
            raise OptionError(
                "rollouts", f"at least 1 rollout must be in flight, but the limit is {self.places}"
            )

    @property
    def waiting(self) -> int:
        """Return how many submitted rollouts have not started."""
        return sum(group.unstarted for *_, group in self._queue)

    def opened(self) -> int:
        """Count a newly opened problem, and return how many problems have been opened so far."""
        self.open += 1
        self.opening += 1
        self._opened += 1
        return self._opened

    def submit(self, group: AdmissionGroup, priority: int, problem: int) -> None:
        """Queue a group of rollouts, and start as many queued rollouts as there are free slots.

        :raises OptionError: the rollouts of a group start together, but their number exceeds the
            limit on rollouts in flight.
        """
        if group.unit > self.places:
            raise OptionError(
                "admit",
                f"{counted(group.unit, 'rollout')} must start together, but only "
                f"{counted(self.places, 'rollout')} may be in flight; raise the limit on rollouts "
                "in flight",
            )
        self._submitted += 1
        heappush(self._queue, (priority, problem, self._submitted, group))
        self.dispatch()

    def release(self, places: int) -> None:
        """Give back the slots of ended rollouts, and start waiting rollouts in the freed slots."""
        self.in_flight -= places
        self.dispatch()

    def dispatch(self) -> None:
        """Start waiting rollouts while slots are free. If slots remain, wake the task that opens
        problems.
        """
        queue = self._queue
        while queue:
            group = queue[0][3]
            if not group.unstarted:
                heappop(queue)
                continue
            unit = group.unit
            if self.in_flight + unit > self.places:
                return
            self.in_flight += unit
            group.start()
        if self._waiting_for_room and self.has_room():
            self._waiting_for_room[0].set()

    def has_room(self) -> bool:
        """Return True if another problem may be opened now."""
        if self.in_flight + self.opening >= self.places or self.open >= 2 * self.places:
            return False
        if self.concluding >= CONCLUDING_PER_PLACE * self.places:
            return False
        return not any(group.unstarted for *_, group in self._queue)

    async def room(self) -> None:
        """Wait until another problem may be opened."""
        while not self.has_room():
            event = anyio.Event()
            self._waiting_for_room.append(event)
            try:
                await event.wait()
            finally:
                self._waiting_for_room.remove(event)


T = TypeVar("T")
V = TypeVar("V")
Args = TypeVarTuple("Args")
Admit = Literal["each", "together"]
Sink = Callable[[object], object]
"""A callback that receives each event of a graph when the event happens. It must not block, and its
return value is ignored.
"""
_UNKNOWN = -1.0  # value of a span's time that is not known yet


def _no_clock() -> float:
    raise AssertionError("only a running graph has a clock")


@dataclass(slots=True, eq=False)
class GraphState:
    """The state that all scopes of one graph share: the clock, the engines' slots, the sink and the
    totals.
    """

    pools: dict[str, Pool]
    strict: bool  # True if a call to an engine without a limit is an error
    policy: RetryPolicy
    sink: Sink | None
    last_id: int
    now: Callable[[], float] = _no_clock
    nodes: int = 0
    problems_done: int = 0
    rollouts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(RolloutStatus), 0)
    )
    failures_in_row: int = 0
    sibling_seconds: float = 0.0

    def pool(self, engine: str) -> Pool:
        """Return the slots of an engine. If the graph was created without limits, every engine has
        unlimited slots.

        :raises OptionError: the graph has limits, but none for this engine.
        """
        if engine not in self.pools:
            if self.strict:
                raise OptionError(
                    engine, "the graph does not have a limit for this engine", list(self.pools)
                )
            # `enter_loop` prepares the queue of waiting calls. Without a limit no call waits, so
            # the new pool does not need it.
            self.pools[engine] = Pool(engine, Limit())
        return self.pools[engine]

    def enter_loop(self) -> None:
        """Prepare the clock and the pools for the running event loop."""
        self.now = clock()
        for pool in self.pools.values():
            pool.enter_loop()

    def emit(self, event: object) -> None:
        """Pass an event to the sink."""
        if self.sink is not None:
            self.sink(event)

    def close_rollout(self, span: RolloutSpan) -> None:
        """Count a rollout that ended, and pass its span to the sink."""
        self.rollouts[span.status] += 1
        self.sibling_seconds += span.waited
        self.emit(span)

    def has_given_up(self, status: RolloutStatus) -> bool:
        """Update the count of consecutive failed rollouts, and return True if it has reached the
        policy's limit.
        """
        if status == "failed":
            self.failures_in_row += 1
        elif status == "done":
            self.failures_in_row = 0
        limit = self.policy.failures_in_row
        return limit is not None and self.failures_in_row >= limit


@dataclass(slots=True, eq=False)
class Run:
    """The state of one call of `Graph.run`; `cancel_scope` contains everything that the run
    started.
    """

    state: GraphState
    admission: Admission
    cancel_scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # the cancel scope of the task that opens new problems
    intake: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # all groups of rollouts that have not ended, in the order of their requests (a dict without
    # values)
    groups: dict[AdmissionGroup, None] = field(default_factory=dict[AdmissionGroup, None])
    error: Exception | None = None  # the first error that ended the run
    stopped: str = ""
    why: str = ""

    def fail(self, error: Exception) -> None:
        """End the run with an error, which `Graph.run` then raises. If the run has already failed,
        the first error is kept.
        """
        if self.error is None:
            self.error = error
            self.cancel("failed")

    def cancel(self, why: str) -> None:
        """Cancel the run, including all of its problems."""
        self.why = self.why or why
        self.stopped = self.stopped or why
        self.cancel_scope.cancel()

    def stop(self, why: str) -> None:
        """Open no more problems, and end all rollouts. Each open problem still computes its result
        from the rollouts that it has.
        """
        self.stopped = self.stopped or why
        self.intake.cancel()
        for group in list(self.groups):
            group.close(why)


class Caller:
    """Base class of the scopes of rollouts and problems, which make engine calls. Calls of one
    caller may run concurrently.
    """

    __slots__ = ("_declared", "_ready", "_state", "frontier", "problem", "promised", "sample")

    def __init__(
        self, state: GraphState, problem: str, sample: int, frontier: tuple[int, ...]
    ) -> None:
        self.problem = problem
        self.sample = sample
        self._state = state
        # ids of the ended calls on which the next call depends in the task graph
        self.frontier = frontier
        # The problem's first engine call sets this event; the graph may then open the next problem.
        self._declared: anyio.Event | None = None
        # Time at which the rollout began to wait for its siblings, in seconds. None if it has not
        # waited since its last call.
        self._ready: float | None = None
        # the score that this rollout has requested and for which its siblings wait; None if there
        # is none
        self.promised: Arrival | None = None

    def emit(self, event: object) -> None:
        """Pass an event to the graph's sink."""
        self._state.emit(event)

    async def call(
        self,
        stage: str,
        function: Callable[[Unpack[Args]], Awaitable[T]],
        *args: *Args,
        engine: str = "",
        turn: int = 0,
        tokens: int = 0,
        priority: int = 0,
        record: Callable[[CallSpan, T], Awaitable[object]] | None = None,
    ) -> T:
        """Wait until the engine has a free slot and `tokens` free KV tokens, then call
        `function(*args)` as a node of the graph.

        `engine` names the engine whose limit applies; the default is the name of the stage.
        `function` must not itself make calls through the graph. If `record` is given, it receives
        the span and the result of a successful call, and the sink does not receive the span. The
        slot is given back when `record` returns.

        :raises Exception: the function's last error, after all attempts that the policy allows, or
            an error of `record`.
        :raises OptionError: the graph has no such engine.
        :raises OutOfMemory: `tokens` exceeds the engine's limit.
        """
        if self._declared is not None:
            self._declared.set()
        state = self._state
        now = state.now
        engine = engine or stage
        pool = state.pools.get(engine) or state.pool(engine)
        attempt = 0
        while True:
            node = state.last_id + 1
            state.last_id = node
            queued = now()
            ready = queued if self._ready is None else self._ready
            self._ready = None
            span = CallSpan(
                node,
                stage,
                engine,
                self.problem,
                self.sample,
                turn,
                ready=ready,
                queued=queued,
                started=queued,
                ended=_UNKNOWN,
                after=self.frontier,
                attempt=attempt,
                tokens=tokens,
            )
            has_slot = pool.take_nowait(tokens)
            is_recorded = False
            try:
                if not has_slot:
                    await pool.take(tokens, priority)
                    has_slot = True
                    span.started = now()
                result = await function(*args)
                if record is not None:
                    # The engine has finished the call. The span ends now, so it does not include
                    # the time in which `record` writes to the disk.
                    is_recorded = True
                    span.ended = now()
                    await record(span, result)
                return result
            except Exception as error:
                span.status = "failed"
                # `record` already has the result of this call, so the call must not be repeated.
                if is_recorded or not state.policy.retries(error, attempt, state.policy.calls):
                    raise
            except BaseException:
                span.status = "cancelled"
                raise
            finally:
                self._close(span, pool, has_slot, is_recorded)
            if self.promised is not None:
                # The call failed. Wake the siblings that wait for its score, so that each of them
                # requests the score itself.
                self.promised.event.set()
            await anyio.sleep(state.policy.delay(attempt, node))
            attempt += 1

    def _close(self, span: CallSpan, pool: Pool, has_slot: bool, is_recorded: bool) -> None:
        """Give back the call's slot, and add the call's times to the totals.

        The span is passed to the sink, unless `record` has received it.
        """
        state = self._state
        if span.ended == _UNKNOWN:
            span.ended = state.now()
        if has_slot:
            pool.give(span.tokens)
            pool.busy_seconds += span.ended - span.started
        else:
            span.started = span.ended
        pool.queue_seconds += span.started - span.queued
        state.nodes += 1
        if span.status == "cancelled":
            pass  # a cancelled call has no result, so the next call does not depend on it
        elif self.frontier is span.after:
            # No other call of this caller ended during this call. So the next call depends only on
            # this call.
            self.frontier = (span.node,)
        else:
            # Another call of this caller ended during this call. So the next call depends on both.
            others = [node for node in self.frontier if node not in span.after]
            self.frontier = (*others, span.node)
        if state.sink is not None and not is_recorded:
            state.sink(span)


@dataclass(frozen=True, slots=True)
class RolloutResult(Generic[T]):
    """The result of one rollout.

    `value` is what the rollout's function returned or, if the rollout failed or was cancelled, what
    the function saved last.
    """

    sample: int
    status: RolloutStatus
    value: T | None = None
    error: Exception | None = None
    why: str = ""


class RolloutScope(Caller, Generic[T]):
    """The argument of a rollout's function. It identifies the rollout, and makes its engine
    calls.
    """

    __slots__ = ("_group", "attempt", "saved", "waited")

    def __init__(self, group: Group[T], sample: int) -> None:
        super().__init__(group.run.state, group.problem, sample, group.frontier)
        self._group = group
        self.attempt = 0
        # The value that the rollout's function saved last. After a failed attempt, the next attempt
        # can continue from this value.
        self.saved: T | None = None
        self.waited = 0.0  # seconds in which the rollout waited for its siblings

    def save(self, value: T) -> None:
        """Save a value. It becomes the rollout's result if the rollout fails or is cancelled."""
        self.saved = value

    async def meet(self, value: V) -> Mapping[int, V]:
        """Wait until every running sibling has also called `meet`, and return all values passed in
        this round, keyed by sample.

        `meet` is a barrier for rollouts that are admitted together. In the task graph, this
        rollout's next call depends on all calls of the round.

        :raises OptionError: the rollouts are not admitted together.
        """
        if self._group.admit != "together":
            raise OptionError(
                "admit",
                "rollouts that wait for each other must be admitted together, not one by one",
            )
        since = self._state.now()
        current = self._group.round
        current.values[self.sample] = value
        current.nodes.extend(self.frontier)
        try:
            if not self._group.close_round():
                await current.closed.wait()
        finally:
            self.waited += self._state.now() - since
        self.frontier = current.frontier
        self._ready = since
        return current.values

    async def wait(self, arrival: Arrival, turn: int) -> None:
        """Wait for a score that a sibling has requested. The graph shows the wait as a node with no
        compute time.

        The node depends on the sibling's calls, so the graph has an edge between the two rollouts.
        If the sibling's call fails, the wait ends at once, even if the call is then retried.
        """
        since = self._state.now()
        try:
            await arrival.event.wait()
        finally:
            until = self._state.now()
            self.waited += until - since
            self._emit_wait(HOLD, turn, since, until, (*self.frontier, *arrival.nodes))

    def emit_release(self, ended: float, released: float, after: tuple[int, ...]) -> None:
        """Report how long this finished rollout kept its concurrency slot because its siblings were
        still running.
        """
        since = ended if self._ready is None else self._ready
        self._emit_wait(RELEASE, -1, since, released, after)

    def _emit_wait(
        self, stage: str, turn: int, since: float, until: float, after: tuple[int, ...]
    ) -> None:
        """Record a wait for siblings as a node with no compute time."""
        state = self._state
        node = state.last_id + 1
        state.last_id = node
        span = CallSpan(
            node,
            stage,
            "",
            self.problem,
            self.sample,
            turn,
            ready=since,
            queued=until,
            started=until,
            ended=until,
            after=after,
            attempt=self.attempt,
        )
        state.emit(span)


@dataclass(slots=True, eq=False)
class Arrival:
    """A value that one rollout has requested. The rollout's siblings wait for the value."""

    event: anyio.Event = field(default_factory=anyio.Event)
    nodes: tuple[int, ...] = ()  # ids of the calls from whose results the value was computed


@dataclass(slots=True)
class Round:
    """One round of a group. It ends when each running rollout of the group has called `meet`.

    Once the round is closed, `values` has the values of all rollouts, and `frontier` has the ids of
    all calls that the round waited for.
    """

    opened_with: tuple[int, ...]
    values: dict[int, Any] = field(default_factory=dict[int, Any])
    nodes: list[int] = field(default_factory=list[int])
    frontier: tuple[int, ...] = ()
    closed: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True, eq=False)
class Group(Generic[T]):
    """The rollouts that a problem requested with one call of `ProblemScope.rollouts`. They are
    settled or closed together, never one by one.

    The problem waits for `done` inside the task group `tasks`.
    """

    run: Run
    problem: str
    # ids of the calls on which the first call of each rollout depends in the task graph
    frontier: tuple[int, ...]
    function: Callable[[RolloutScope[T]], Awaitable[T]]
    samples: range
    admit: Admit
    settle: Callable[[RolloutResult[T]], bool] | None
    # The reason why the group was closed; "" while the group is open. No rollout of a closed group
    # starts.
    why: str = field(init=False)
    queued: float = field(init=False)
    tasks: TaskGroup | None = None
    results: dict[int, RolloutResult[T]] = field(default_factory=dict[int, RolloutResult[Any]])
    last_nodes: list[int] = field(default_factory=list[int])
    done: anyio.Event = field(default_factory=anyio.Event)
    round: Round = field(init=False)
    _context: Context = field(default_factory=copy_context)
    _next: int = 0
    _ended: list[tuple[RolloutScope[T], RolloutSpan]] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.why = self.run.stopped
        self.queued = self.run.state.now()
        self.round = Round(self.frontier)

    @property
    def unit(self) -> int:
        """Return how many concurrency slots one call of `start` needs.

        The result is 1, or the number of rollouts in the group if they all start together.
        """
        return len(self.samples) if self.admit == "together" else 1

    @property
    def unstarted(self) -> int:
        """Return how many rollouts have yet to start; 0 if the group is closed."""
        return 0 if self.why else len(self.samples) - self._next

    def start(self) -> None:
        """Start the next rollout, or all rollouts of the group if they are admitted together."""
        assert self.tasks is not None, (
            "rollouts must be submitted inside the task group of their graph"
        )
        for _ in range(self.unit):
            sample = self.samples[self._next]
            self._next += 1
            # The task of another problem may call this method. So start the rollout with the
            # context variables of this group's problem.
            self._context.run(self.tasks.start_soon, self._rollout, sample)

    def close(self, why: str) -> None:
        """Start no more rollouts of the group, and cancel the rollouts that are running. If the
        group is closed twice, the first reason is kept.
        """
        if not self.why:
            self.why = why
            if self.tasks is not None:
                self.tasks.cancel_scope.cancel()

    def is_cut_short(self) -> bool:
        """Return True if at least one rollout of the group was cancelled or has not ended."""
        if len(self.results) < len(self.samples):
            return True
        return any(result.status == "cancelled" for result in self.results.values())

    def gathered(self) -> list[RolloutResult[T]]:
        """Return one result per sample, in order. Rollouts that never started are included."""
        results: list[RolloutResult[T]] = []
        for sample in self.samples:
            result = self.results.get(sample) or RolloutResult(sample, self._interruption())
            if result.status in ("settled", "cancelled"):
                result = replace(result, why=self.why)
            results.append(result)
        return results

    def _interruption(self) -> RolloutStatus:
        return "settled" if self.why == "settled" else "cancelled"

    async def _rollout(self, sample: int) -> None:
        started = self.run.state.now()
        scope = RolloutScope(self, sample)
        status: RolloutStatus = "cancelled"
        value: T | None = None
        error: Exception | None = None
        try:
            value = await self._attempts(scope)
            status = "done"
        except Exception as failure:  # noqa: BLE001 - any error ends this rollout only
            status = "failed"
            error = failure
        except BaseException:
            status = self._interruption()
            raise
        finally:
            value = scope.saved if value is None else value
            self._end(scope, RolloutResult(sample, status, value, error), started)

    async def _attempts(self, scope: RolloutScope[T]) -> T:
        policy = self.run.state.policy
        while True:
            try:
                return await self.function(scope)
            except Exception as error:
                if policy.is_fatal(error):
                    raise
                if not policy.retries(error, scope.attempt, policy.rollouts):
                    raise
            await anyio.sleep(policy.delay(scope.attempt, scope.sample))
            scope.attempt += 1

    def _end(self, scope: RolloutScope[T], result: RolloutResult[T], started: float) -> None:
        now = self.run.state.now()
        error = result.error
        span = RolloutSpan(
            scope.problem,
            scope.sample,
            result.status,
            queued=self.queued,
            started=started,
            ended=now,
            released=now,
            attempts=scope.attempt + 1,
            waited=scope.waited,
            error="" if error is None else f"{type(error).__name__}: {error}",
        )
        self.results[result.sample] = result
        self.last_nodes.extend(scope.frontier)
        try:
            self._react_to(result)
        finally:
            if self.admit == "together":
                self._ended.append((scope, span))
                self._leave_round(scope)
            else:
                self.run.admission.release(1)
                self.run.state.close_rollout(span)
            if len(self.results) == len(self.samples):
                self.done.set()

    def _react_to(self, result: RolloutResult[T]) -> None:
        """End the run if this result is a fatal error. If `settle` says that this result settles
        the problem, end only the group.
        """
        error = result.error
        state = self.run.state
        has_given_up = state.has_given_up(result.status)
        if error is not None and (has_given_up or state.policy.is_fatal(error)):
            if has_given_up:
                error.add_note(
                    f"the run stopped after {counted(state.failures_in_row, 'failed rollout')} in "
                    "a row"
                )
            self.run.fail(error)
            return
        if self.settle is None or self.why:
            return
        if result.status in ("done", "failed") and self.settle(result):
            self.close("settled")

    # The methods below are for groups with `admit` "together". Their rollouts start together, wait
    # for each other in rounds, and give back their slots together.

    def close_round(self) -> bool:
        """Close the round if every running rollout has called `meet`, and wake the rollouts that
        wait in it.
        """
        current = self.round
        if not current.values or len(current.values) < len(self.samples) - len(self.results):
            return False
        current.values = dict(sorted(current.values.items()))
        current.frontier = tuple(dict.fromkeys(current.nodes))
        current.closed.set()
        self.round = Round(current.frontier)
        return True

    def _leave_round(self, scope: RolloutScope[T]) -> None:
        current = self.round
        current.values.pop(scope.sample, None)
        if scope.frontier is not current.opened_with:
            # The rollout made calls in this round before it ended. So the siblings' next calls
            # depend on these calls.
            current.nodes.extend(scope.frontier)
        self.close_round()

    def release(self) -> None:
        """Give back the concurrency slots of rollouts that were admitted together.

        Each of these rollouts has kept its slot until now, even if it had already finished.
        """
        if self.admit != "together" or not self._next:
            return
        released = self.run.state.now()
        self.run.admission.release(len(self.samples))
        after = tuple(dict.fromkeys(self.last_nodes))
        for scope, span in self._ended:
            if span.status in ("done", "failed"):
                span.waited += released - span.ended
                scope.emit_release(span.ended, released, after)
            span.released = released
            self.run.state.close_rollout(span)


class ProblemScope(Caller):
    """One open problem. All its rollouts and calls end before its result is returned."""

    __slots__ = ("cancel_scope", "declared", "index", "is_opening", "order", "run", "why")

    def __init__(self, run: Run, problem: str, index: int, order: int) -> None:
        super().__init__(run.state, problem, -1, ())
        self.index = index
        # Number of this problem in the order of opening, from 1. Rollouts of problems that were
        # opened earlier start first.
        self.order = order
        self.why = ""
        self.cancel_scope = anyio.CancelScope()
        # True until the problem requests rollouts or ends. Until then, one concurrency slot is kept
        # free for it.
        self.is_opening = True
        self._declared = self.declared = anyio.Event()
        self.run = run

    def cancel(self, why: str) -> None:
        """Cancel this problem's function, its rollouts and their calls; other problems continue."""
        self.why = self.why or why
        self.cancel_scope.cancel()

    @contextmanager
    def concluding(self, rollouts: int) -> Generator[None]:
        """Add `rollouts` to the number of ended rollouts that wait for grading, or for other work
        outside engines, until the block ends.

        If too many ended rollouts wait, no new problem is opened, so that finished work does not
        pile up behind a slow grader.
        """
        admission = self.run.admission
        admission.concluding += rollouts
        try:
            yield
        finally:
            admission.concluding -= rollouts
            admission.dispatch()

    async def rollouts(
        self,
        function: Callable[[RolloutScope[T]], Awaitable[T]],
        samples: int | range,
        *,
        settle: Callable[[RolloutResult[T]], bool] | None = None,
        timeout_seconds: float | None = None,
        admit: Admit = "each",
        priority: int = 0,
    ) -> list[RolloutResult[T]]:
        """Run `function` once per sample, and return all results in the order of the samples.

        Rollouts start when concurrency slots are free; rollouts of earlier problems start first.
        `settle` gets the result of each rollout that was not cancelled. When `settle` returns true,
        the rollouts that are still running are cancelled, with the status "settled".
        `timeout_seconds` counts from this call. If `admit` is "together", all rollouts start at
        once, may `meet` in rounds, and keep their slots until the last rollout has ended.

        :raises OptionError: there are no samples, or more samples are admitted together than the
            graph has slots.
        :raises Exception: an error of `settle`.
        """
        wanted = range(samples) if isinstance(samples, int) else samples
        if not wanted:
            raise OptionError("samples", f"at least 1 rollout is needed, but {samples!r} was given")
        group = Group(
            self.run, self.problem, self.frontier, function, wanted, admit=admit, settle=settle
        )
        try:
            await self._gather(group, timeout_seconds, priority)
        finally:
            group.release()
        self.frontier = tuple(dict.fromkeys(group.last_nodes)) or self.frontier
        return group.gathered()

    async def _gather(self, group: Group[T], timeout_seconds: float | None, priority: int) -> None:
        run = self.run
        async with task_group() as tasks:
            group.tasks = tasks
            if timeout_seconds is not None:
                tasks.cancel_scope.deadline = anyio.current_time() + timeout_seconds
            run.groups[group] = None
            try:
                if not group.why:
                    self._declare()
                    run.admission.submit(group, priority, self.order)
                    await group.done.wait()
            finally:
                del run.groups[group]
                if group.is_cut_short():
                    # A time-out cancels the tasks, but does not call `close`. So close the group
                    # here, with the reason.
                    is_late = anyio.current_time() >= tasks.cancel_scope.deadline
                    group.close("deadline" if is_late else "cancelled")

    def end(self, status: ProblemStatus, started: float, error: Exception | None) -> None:
        """Record the end of the problem, and allow the next problem to be opened."""
        admission = self.run.admission
        state = self.run.state
        self._declare()
        admission.open -= 1
        admission.dispatch()
        state.problems_done += 1
        words = "" if error is None else f"{type(error).__name__}: {error}"
        state.emit(ProblemSpan(self.problem, self.index, status, started, state.now(), words))

    def _declare(self) -> None:
        if self.is_opening:
            self.is_opening = False
            self.run.admission.opening -= 1
        self.declared.set()


class HasId(Protocol):
    """The type of objects with an id, such as `core.Problem`."""

    @property
    def id(self) -> str:
        """Return the id."""
        ...


P = TypeVar("P", bound=HasId)

# The next problem is opened after this number of seconds, even if the last opened problem has
# neither called an engine nor requested rollouts.
OPENING_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class EngineUse:
    """A snapshot of one engine's slots. It has the number of slots in use, the number of waiting
    calls, and the seconds of use, summed over slots.
    """

    slots: int | None
    tokens: int | None
    in_use: int
    tokens_in_use: int
    waiting: int
    busy_seconds: float
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class GraphStats:
    """A snapshot of a graph. Its sums and counts begin when the graph is created."""

    seconds: float  # seconds in which at least one run of the graph was in progress
    problems_open: int
    problems_done: int
    rollouts_waiting: int
    rollouts_in_flight: int
    rollouts: Mapping[str, int]  # number of ended rollouts, keyed by status
    nodes: int
    # total seconds that rollouts spent waiting for their sibling rollouts
    sibling_seconds: float
    engines: Mapping[str, EngineUse]

    def busy_share(self, engine: str) -> float:
        """Return the fraction of time that the engine's slots were in use, averaged over its slots,
        0 to 1.

        The result is NaN if slots are unlimited or no time has passed.
        """
        use = self.engines[engine]
        if not use.slots or not self.seconds:
            return math.nan
        return use.busy_seconds / (use.slots * self.seconds)


_use = attrgetter(*(field.name for field in fields(EngineUse)))


@dataclass(frozen=True, slots=True)
class ProblemResult(Generic[T]):
    """The result of one problem; `value` is what the problem's function returned."""

    index: int
    problem: str
    status: ProblemStatus
    value: T | None = None
    error: Exception | None = None
    why: str = ""


class Graph:
    """A graph that solves problems while it limits the work of each engine.

    `rollouts` is the largest number of rollouts in flight over all problems, and `limits` bounds
    the calls and tokens at each engine. `sink` gets every `CallSpan`, `RolloutSpan` and
    `ProblemSpan` when it ends. A graph can run more than once, and several runs can use it at the
    same time. If `shared_graph` is given, this graph uses the concurrency slots and limits of that
    graph. It still has its own sink and node numbers, and is stopped separately.

    :raises OptionError: a limit below 1.
    """

    def __init__(
        self,
        *,
        rollouts: int = 64,
        limits: Mapping[str, Limit] | None = None,
        policy: RetryPolicy | None = None,
        sink: Sink | None = None,
        first_node: int = 0,
        shared_graph: Graph | None = None,
    ) -> None:
        if shared_graph is None:
            pools = {name: Pool(name, limit) for name, limit in (limits or {}).items()}
            is_strict = bool(pools)
            admission = Admission(rollouts)
        else:
            pools = shared_graph._state.pools
            is_strict = shared_graph._state.strict
            admission = shared_graph._admission
        self._state: GraphState = GraphState(
            pools, is_strict, policy or RetryPolicy(), sink, first_node - 1
        )
        self._admission: Admission = admission
        self._runs: list[Run] = []
        self._seconds = 0.0
        self._began = 0.0

    async def run(
        self,
        problems: Iterable[P],
        solve: Callable[[P, ProblemScope], Awaitable[T]],
        *,
        timeout_seconds: float | None = None,
    ) -> list[ProblemResult[T]]:
        """Solve every problem, and return the results in the order of the problems.

        The list ends with the last opened problem if the run ends early: by `stop`, by `cancel`, or
        by the time-out. The time-out acts like `stop("deadline")`.

        :raises Exception: the first fatal error (`RetryPolicy.is_fatal`), after everything else was
            cancelled.
        """
        results: list[ProblemResult[T]] = []
        await self.drive(problems, solve, results.append, timeout_seconds=timeout_seconds)
        return sorted(results, key=lambda result: result.index)

    async def drive(
        self,
        problems: Iterable[P],
        solve: Callable[[P, ProblemScope], Awaitable[T]],
        finished: Callable[[ProblemResult[T]], None],
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        """Solve every problem like `run`, but pass each result to `finished` when its problem ends,
        instead of returning a list.

        :raises Exception: the first fatal error, or an error of `finished`.
        """
        self._state.enter_loop()
        if not self._runs:
            self._began = self._state.now()
        run = Run(self._state, self._admission)
        self._runs.append(run)
        try:
            async with task_group() as tasks:
                run.cancel_scope = tasks.cancel_scope
                if timeout_seconds is not None:
                    tasks.start_soon(_stop_after, run, timeout_seconds)
                async with task_group() as solving:
                    with run.intake:
                        await self._open(run, solving, problems, solve, finished)
                # All problems have ended, so cancel the timer of `timeout_seconds`.
                tasks.cancel_scope.cancel()
        finally:
            self._runs.remove(run)
            if not self._runs:
                self._seconds += self._state.now() - self._began
        if run.error is not None:
            raise run.error

    def stop(self, why: str) -> None:
        """Open no more problems, and end all rollouts with the status "cancelled". Each open
        problem still computes its result from the rollouts that it has.
        """
        for run in self._runs:
            run.stop(why)

    def cancel(self, why: str) -> None:
        """Cancel all runs of the graph at once; open problems get the status "cancelled"."""
        for run in self._runs:
            run.cancel(why)

    def stats(self) -> GraphStats:
        """Return a snapshot of the graph's state and counts."""
        state = self._state
        admission = self._admission
        return GraphStats(
            seconds=self._seconds + (state.now() - self._began if self._runs else 0.0),
            problems_open=admission.open,
            problems_done=state.problems_done,
            rollouts_waiting=admission.waiting,
            rollouts_in_flight=admission.in_flight,
            rollouts=MappingProxyType(dict(state.rollouts)),
            nodes=state.nodes,
            sibling_seconds=state.sibling_seconds,
            engines=MappingProxyType(
                {name: EngineUse(*_use(pool)) for name, pool in state.pools.items()}
            ),
        )

    async def _open(
        self,
        run: Run,
        tasks: TaskGroup,
        problems: Iterable[P],
        solve: Callable[[P, ProblemScope], Awaitable[T]],
        finished: Callable[[ProblemResult[T]], None],
    ) -> None:
        """Open the problems one by one.

        A problem is opened when the limits allow it, and the previous problem has called an engine
        or submitted rollouts. If the previous problem does neither within `OPENING_SECONDS`, the
        next one no longer waits for it.
        """
        for index, problem in enumerate(problems):
            await self._admission.room()
            scope = ProblemScope(run, problem.id, index, self._admission.opened())
            tasks.start_soon(_solve, scope, problem, solve, finished)
            with anyio.move_on_after(OPENING_SECONDS):
                await scope.declared.wait()


async def _solve(
    scope: ProblemScope,
    problem: P,
    solve: Callable[[P, ProblemScope], Awaitable[T]],
    finished: Callable[[ProblemResult[T]], None],
) -> None:
    started = scope.run.state.now()
    status: ProblemStatus = "cancelled"
    value: T | None = None
    error: Exception | None = None
    try:
        with scope.cancel_scope:
            value = await solve(problem, scope)
            status = "done"
    except Exception as failure:  # noqa: BLE001 - a failed problem does not end the others
        status = "failed"
        error = failure
        if scope.run.state.policy.is_fatal(failure):
            scope.run.fail(failure)
    finally:
        scope.end(status, started, error)
        why = (scope.why or scope.run.why) if status == "cancelled" else ""
        finished(ProblemResult(scope.index, scope.problem, status, value, error, why))


async def _stop_after(run: Run, seconds: float) -> None:
    await anyio.sleep(seconds)
    run.stop("deadline")
