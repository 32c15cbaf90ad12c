"""Record a run's events, and make its engine calls.

A recorder writes events to the journal and returns recorded calls from it. An engine call for a
rollout has limits, retries, checks and a record of the reply. A run can be ended early: on request,
or when a comparison with an earlier run is decided.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import sys
import threading
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, cast, get_args

import anyio
import anyio.lowlevel
import msgspec

from atts import concurrency, errors
from atts.calibration import DriftEvent
from atts.concurrency import clock
from atts.core import (
    CallSpan,
    Chunk,
    Combine,
    CombinePlan,
    Completion,
    Decision,
    Outcome,
    Role,
    Rollout,
    RolloutSpan,
    SampleRequest,
    ScoreRequest,
    Scores,
    Turn,
)
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
from atts.evaluators import ConfidenceSequence, Estimate, Sequential, share_estimate
from atts.graph import Caller
from atts.journal import (
    COMPARED,
    CallFailed,
    Combining,
    Decided,
    Drifted,
    Event,
    FailureKind,
    FinishedProblem,
    Journal,
    Json,
    JudgedUnit,
    Manifest,
    Observed,
    OpenProblem,
    RolloutFinished,
    RolloutStarted,
    RunState,
    Sampled,
    Scored,
    SharedReplies,
    TurnFinished,
    Warned,
    feature_numbers,
    recorded_features,
    reply_key,
    run_number,
)
from atts.ledger import Account, most_of, taken_by
from atts.pipelines import Features, Gate, Planner, RoundGate, RunLength
from atts.run.result import RunResult

Signals = Literal["handle", "ignore"]


class Stop:
    """A handle that ends a run, for a signal, a button or a caller's budget.

    After the first request no engine call begins, and those in flight finish and are recorded. A
    second request cancels them.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.calls = 0  # calls in flight
        self._changed = anyio.Event()

    def request(self) -> None:
        """Request the end of the run; a second request ends it at once.

        This must be called from the run's thread.
        """
        self.asked += 1
        self.report()

    @contextmanager
    def counted(self) -> Generator[None, None, None]:
        """Count work that is finished instead of cut when the run is asked to end."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.asked:
                self.report()

    async def finished(self) -> None:
        """Wait for a request to end the run, then until no call is in flight or for a second request."""
        while not self.asked or (self.calls and self.asked < 2):
            await self._changed.wait()

    def report(self) -> None:
        """Wake up `finished` to check again."""
        self._changed.set()
        self._changed = anyio.Event()


async def watch_signals(stop: Stop, asked: Callable[[int], None]) -> None:
    """Turn Ctrl-C and SIGTERM into requests to end while this runs; outside the main thread, do
    nothing.

    The earlier handlers are restored afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    schedule = concurrency.loop_caller()
    received = deque[int]()
    arrived = anyio.Event()

    def deliver(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # This runs between any two instructions, so it must not use objects of the event loop.
        schedule(lambda: arrived.set())

    # Handlers are set directly: when asyncio's or anyio's receivers end, they put Python's own
    # handler in place for a moment. A press in that moment raised KeyboardInterrupt inside the
    # event loop, whose worker threads were then never stopped, and the process never ended.
    numbers = [signal.SIGINT] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, deliver) for number in numbers}
    try:
        while True:
            while received:
                number = received.popleft()
                stop.request()
                asked(number)
            arrived = anyio.Event()
            # A signal that came before this line has scheduled a call, which sets the new event.
            await arrived.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Earlier votes to compare a running run with, and the condition to stop.

    The order of problems must not depend on the votes; a random order by a seed is suitable.
    """

    against: str
    votes: Mapping[str, float] = field(repr=False)  # keyed by problem; each in [0, 1]
    points: float = 0.0  # differences of at most this many points count as alike


class SequentialComparison:
    """A comparison that gets problems as they end, and tests them in the order of the dataset.

    Short problems end first, which would bias the test. So a problem counts only once all problems
    before it have ended; a failed problem delays those after it until a session has solved it.
    """

    def __init__(
        self, rule: StopWhen | None, state: RunState, record: Callable[[Warned], object]
    ) -> None:
        self._rule = rule
        self._state = state
        self._record = record
        self.answer = None if rule is None else Sequential("undecided", 0, -1.0, 1.0, rule.points)
        self.spared = 0  # number of problems that were not needed
        # created only if needed, because it holds a capital for each of thousands of candidates
        self._sequence = None if rule is None else ConfidenceSequence()
        self._order = list[str]()
        self._next = 0
        self._over: dict[str, float | None] = {}  # None: the answer was not graded

    def needs(self, problem: str) -> bool:
        """Register the next problem of the dataset; return whether to solve it, which is True for
        all that were started.
        """
        if self._rule is not None:
            self._order.append(problem)
            self._look(self._rule)
        if (
            self._is_settled
            and problem not in self._state.open
            and problem not in self._state.finished
        ):
            self.spared += 1
            return False
        return True

    def end(self, line: FinishedProblem) -> None:
        """Record that a problem has ended for good."""
        if self._rule is not None:
            self._over[line.problem] = None if line.verdict is None else float(line.is_correct)
            self._look(self._rule)

    def tell(self) -> str:
        """Return the text of the comparison, and record it once; "" if there is no comparison."""
        if self._rule is None:
            return ""
        words = (
            f"against {self._rule.against}: {self.answer}; the seed draws the order of problems. "
            "The interval of this difference is valid after every problem; other intervals are "
            "not"
        )
        if COMPARED not in self._state.said:
            self._state.said.add(COMPARED)
            self._record(Warned(COMPARED, words))
        return words

    @property
    def _is_settled(self) -> bool:
        return self.answer is not None and self.answer.settled != "undecided"

    def _look(self, rule: StopWhen) -> None:
        while (
            self._next < len(self._order)
            and self._order[self._next] in self._over
            and not self._is_settled
        ):
            name = self._order[self._next]
            self._next += 1
            right = self._over[name]
            if right is not None and name in rule.votes:
                assert self._sequence is not None, "the run must have a stopping rule"
                self._sequence.add(right - rule.votes[name])
                self.answer = self._sequence.answer(rule.points)
                if self._is_settled:
                    self.tell()


RecallTiming = Literal["instant", "recorded"]
"""The speed of recalled calls: they return at once, or after the time that they took.

"recorded" is for virtual time: the whole run, including finished problems, is repeated without
engine work and with the same schedule. So even decisions that depend on the order of arrival are
the same as in an uninterrupted run.
"""

CallKind = Literal["draft", "target", "score"]
"""The kind of a call: the draft writes, the target writes, or the target scores."""


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """A model wrote a chunk, which may still be discarded.

    This event is reported live only, because the journal has the call itself.
    """

    problem: str
    sample: int
    turn: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call to an engine began; reported live only. `stage` is "score" if the target judges, else
    the writer.
    """

    problem: str
    rollout: str  # the hint in the request that names the rollout
    stage: CallKind
    input_tokens: int = 0  # input tokens of the prompt, or of the text with the part to be scored
    max_tokens: int = 0  # most tokens that may be written; 0 if the target judges


@dataclass(frozen=True, slots=True)
class EngineAwaited:
    """One more call waits for a lost engine, or one call fewer if `more` is -1; reported live only."""

    role: Role
    more: Literal[1, -1]


@dataclass(frozen=True, slots=True)
class RunBegun:
    """A session begins, with the amount of work and the part done by earlier sessions; reported
    live only.
    """

    problems: int | None  # None if the problems stream in
    done: int
    samples: int  # largest number of samples of a problem
    seconds: float  # seconds of earlier sessions
    draft: str  # name of the model
    target: str
    directory: Path | None
    judged_unit: JudgedUnit = "chunks"
    manifest: Manifest = field(default_factory=Manifest)


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A session has ended by itself, with the current result of the run; reported live only."""

    result: RunResult


Notice = Event | ChunkWritten | CallBegun | EngineAwaited | RunBegun | RunEnded
"""All events that a listener receives during a run."""


class Listener(Protocol):
    """A listener to a run; its methods must not block, and an error that it raises ends the run."""

    def recalled(self, event: Event) -> None:
        """Handle an event of an earlier session; these come in order, before all events of this
        session.
        """
        ...

    def notify(self, event: Notice) -> None:
        """Handle an event when it happens."""
        ...


CLOSING_SECONDS = 60.0
"""The seconds that the end of a run waits for its listeners to send their data."""

_log = logging.getLogger("atts.run")


class Background:
    """A listener that works in a separate thread and never affects the run.

    The first failure is logged as a warning and ends the listener's work; the run continues without it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs = queue.SimpleQueue[Callable[[], None] | None]()
        self._has_failed = threading.Event()
        self._thread: threading.Thread | None = None

    def recalled(self, event: Event) -> None:
        """Pass an event of an earlier session to the thread."""
        self._guarded(lambda: self.remember(event))

    def notify(self, event: Notice) -> None:
        """Pass an event to the thread, which does everything that may take long."""
        self._guarded(lambda: self.hear(event))

    def remember(self, event: Event) -> None:
        """Note an event of an earlier session."""

    def hear(self, event: Notice) -> None:
        """Note an event of this session."""

    def finish(self) -> None:
        """Complete all open work at the end of the run; called last, in the thread."""

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Close the listener, and wait at most `seconds` for everything to be sent; any thread may
        call this.
        """
        if self._thread is None:
            return
        self._jobs.put(self.finish)
        self._jobs.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(
                f"was still busy {seconds:g} s after the end of the run; unsent data are lost"
            )

    def later(self, job: Callable[[], None]) -> None:
        """Let the thread do a job after all earlier jobs."""
        if self._has_failed.is_set():
            return
        if self._thread is None:
            # The thread is a daemon, so that a tracker whose server hangs does not keep the program
            # from ending.
            self._thread = threading.Thread(target=self._work, name=f"log-{self.name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._guarded(job)

    def _guarded(self, job: Callable[[], None]) -> None:
        if self._has_failed.is_set():
            return
        # A tracker may raise an error that is not an Exception, such as SystemExit for a missing
        # key.
        try:
            job()
        except BaseException as error:  # whatever a tracker raises, the run continues
            if isinstance(error, KeyboardInterrupt):
                raise
            self._fail(f"failed and gets no further data: {type(error).__name__}: {error}")

    def _fail(self, what: str) -> None:
        if not self._has_failed.is_set():
            self._has_failed.set()
            _log.warning("--log %s %s; the run itself is not affected", self.name, what)


class EscalationCounter:
    """The count of judged and escalated chunks by problem.

    `atts.journal.judged` defines which chunks count.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self.unscored = 0  # chunks of all problems that were judged without a score

    def count(self, decision: Decision, escalated: bool) -> None:
        """Count a judged chunk, and whether it was really escalated."""
        num_escalated, num_judged = self._counts.get(decision.question, (0, 0))
        self._counts[decision.question] = (num_escalated + escalated, num_judged + 1)
        self.unscored += decision.origin == "forced"

    def of(self, problem: str) -> tuple[int, int]:
        """Return how many of this problem's judged chunks were escalated, and how many were judged."""
        return self._counts.get(problem, (0, 0))

    def forget(self, problem: str) -> None:
        """Drop the counts of a finished problem."""
        self._counts.pop(problem, None)

    @property
    def totals(self) -> tuple[int, int]:
        """Return the numbers of escalated and judged chunks of all problems that were not dropped."""
        num_escalated = sum(escalated for escalated, _ in self._counts.values())
        num_judged = sum(judged for _, judged in self._counts.values())
        return num_escalated, num_judged

    @property
    def rate(self) -> Estimate:
        """Return the share of escalated chunks, clustered by problem."""
        return share_estimate(self._counts.values())


# After this share of a run's rollouts has ended, earlier observations count for 1/e. With a longer
# memory, the estimate would be wrong for sorted problems, whose late rollouts differ from early
# ones.
_MEMORY = 0.125


class RunLengthEstimate(RunLength):
    """Estimate of the remaining decisions of a run of known size, from the decisions that its
    rollouts took so far.

    For each number of decisions n, the estimate uses the share of rollouts with n decisions that
    took a further one. The product of these shares is Kaplan and Meier's estimate of a rollout's
    length. A finished problem ends all of its rollouts. Recent rollouts have more weight, because
    problems may be sorted by difficulty, and then future rollouts are like recent rollouts.
    """

    __slots__ = (
        "_decided",
        "_ended",
        "_growth",
        "_is_known",
        "_open",
        "_samples",
        "_there",
        "_weight",
        "_went_on",
    )

    def __init__(self, problems: int | None, samples: int) -> None:
        rollouts = (problems or 0) * samples
        self._samples = samples
        self._is_known = rollouts > 0
        self._decided = 0
        # Three lists by the number of decisions: open rollouts that took exactly so many, the weight
        # of those that ended there, and the weight of those that took another.
        self._there = [rollouts]
        self._ended = [0.0]
        self._went_on = [0.0]
        # The weight of new observations. It grows with each problem that ends instead of each rollout,
        # because the rollouts of a problem are stopped together in an arbitrary order.
        self._weight = 1.0
        self._growth = 1 + 1 / max(1.0, _MEMORY * rollouts) if rollouts else 1.0
        self._open = dict[str, dict[int, int]]()  # decisions of the rollouts that have not ended

    @property
    def share(self) -> float | None:
        """Return the share of decisions left: 1 until a rollout has ended."""
        if not self._is_known:
            return None
        if not any(self._ended):
            return 1.0
        left = 0.0  # decisions of all open rollouts
        to_come = 0.0  # expected decisions of a rollout that took this many
        for place in reversed(range(len(self._there))):
            known = self._went_on[place] + self._ended[place]
            to_come = (1 + to_come) * (self._went_on[place] / known if known else 1.0)
            left += to_come * self._there[place]
        left = max(1.0, left)
        return left / (left + self._decided)

    def count(self, decision: Decision) -> None:
        """Count a decision, unless it only requests a score; each turn counts once."""
        if decision.action == "verify":
            return
        rollouts = self._open.get(decision.question) or self._rollouts(decision.question)
        for made in range(rollouts.get(decision.sample, 0), decision.turn + 1):
            if made + 1 == len(self._there):
                self._there.append(0)
                self._ended.append(0.0)
                self._went_on.append(0.0)
            self._there[made] -= 1
            self._there[made + 1] += 1
            self._went_on[made] += self._weight
            rollouts[decision.sample] = made + 1
            self._decided += 1

    def end(self, problem: str, sample: int) -> None:
        """Record that one of this problem's rollouts has ended."""
        self._end_all([self._rollouts(problem).pop(sample, 0)])

    def conclude(self, problem: str) -> None:
        """Record that all rollouts of this problem have ended."""
        self._end_all(list(self._rollouts(problem).values()))
        del self._open[problem]
        self._weight *= self._growth**self._samples  # the weight grows to e^8 in a whole run

    def _end_all(self, lengths: Sequence[int]) -> None:
        for made in lengths:
            self._there[made] -= 1
            self._ended[made] += self._weight

    def _rollouts(self, problem: str) -> dict[int, int]:
        return self._open.setdefault(problem, dict.fromkeys(range(self._samples), 0))


class ProblemsLeft(RunLengthEstimate):
    """The count of the remaining decisions of a run of known size that decides once on each
    problem.
    """

    __slots__ = ("_made", "_problems")

    def __init__(self, problems: int | None) -> None:
        super().__init__(problems, samples=1)
        self._problems = problems
        self._made = 0

    @property
    def share(self) -> float | None:
        """Return the share of problems that are not decided yet; None if their number is unknown."""
        if not self._problems:
            return None
        return max(1, self._problems - self._made) / self._problems

    def count(self, decision: Decision) -> None:
        """Count a decision unless it only asks for a score."""
        self._made += decision.action != "verify"

    def end(self, problem: str, sample: int) -> None:
        """Ignore the end of a rollout, because problems are counted instead."""

    def conclude(self, problem: str) -> None:
        """Ignore the end of a problem, because it was counted when it was decided."""


class Recorder:
    """A recorder that passes all events to the journal and to the listeners, in the same order."""

    def __init__(
        self,
        journal: Journal | None,
        listeners: Sequence[Listener],
        escalations: EscalationCounter,
        left: RunLengthEstimate,
    ) -> None:
        self._journal = journal
        self._left = left
        self._tells = [listener.notify for listener in listeners]
        self._escalations = escalations
        # waits until all recorded events are in the file
        self.saved = _nothing_to_save if journal is None else journal.saved
        # a call ends when its line is written
        self.awaits_disk = journal is not None and journal.durability == "always"
        # a decision that is not recorded yet, because its observation may follow at once
        self._decided: Decided | None = None

    def record(self, event: Event, second: CallSpan | Observed | None = None) -> None:
        """Record an event, and a `second` event on the same line of the journal.

        :raises StorageError: the disk refuses.
        """
        waiting = self._decided
        self._decided = None
        if waiting is not None:
            self.record(waiting)
        if self._journal is not None:
            self._journal.record(event, second)
        for tell in self._tells:
            tell(event)
            if second is not None:
                tell(second)

    def decided(self, event: Decided) -> None:
        """Record a decision, once its observation follows or another event is recorded."""
        waiting = self._decided
        self._decided = None
        if waiting is not None:
            self.record(waiting)
        # Requests for a score are not counted; skipping the call saves time, because this happens
        # for every chunk.
        if event.decision.action != "verify":
            self._left.count(event.decision)
        # A gate of rounds observes no outcomes, so its decision itself counts.
        if event.asked == "round":
            self._escalations.count(event.decision, event.decision.escalate)
            self.record(event)
        else:
            self._decided = event

    def relived(self, decision: Decision) -> None:
        """Count a recorded decision at the moment when a repeated schedule makes it again."""
        self._left.count(decision)

    def observed(self, decision: Decision, escalated: bool) -> None:
        """Record what was done with a decision, on the line of the decision if nothing was recorded
        since.
        """
        self._escalations.count(decision, escalated)
        event = self._decided
        observed = Observed(decision, escalated)
        if event is None or event.decision is not decision:
            return self.record(observed)
        self._decided = None
        return self.record(event, observed)

    def tell(self, event: Notice) -> None:
        """Report an event to the listeners that the journal does not keep."""
        for tell in self._tells:
            tell(event)

    def on_graph(self, event: object) -> None:
        """Receive the events of the task graph."""
        if isinstance(event, RolloutSpan):
            self._left.end(event.problem, event.sample)
        if isinstance(event, Event):
            self.record(event)


async def _nothing_to_save() -> None:
    """Return at once, because there is no journal."""


class ProblemRecord:
    """The pipeline's listener for one problem, which records rollouts and turns in the journal.

    Events that an earlier session recorded are not recorded again.
    """

    def __init__(self, recorder: Recorder, recorded: OpenProblem) -> None:
        self._recorder = recorder
        self._problem = recorded.problem.id
        self._started = set(recorded.rollouts)
        self._recalled = recorded.turns
        self._turns: dict[int, int] = {}

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Pass the chunk to the listeners."""
        self._recorder.tell(ChunkWritten(self._problem, rollout.sample, len(rollout.turns), chunk))

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Record the turn, and before the first turn also the rollout."""
        if rollout.sample not in self._started:
            self._start(rollout)
        self._turns[rollout.sample] = turn.index + 1
        recalled = self._recalled.get(rollout.sample)
        if recalled and _timeless(recalled[0]) == _timeless(turn):
            recalled.popleft()
            return
        if recalled:
            text = f"turn {turn.index} differs from that of an earlier session, and replaces it"
            self._recorder.record(Warned("recall-differs", text, self._problem, rollout.sample))
            self._tell_again(rollout, turn.index)
        self._recorder.record(TurnFinished(self._problem, rollout.sample, turn))

    def finished(self, outcome: Outcome) -> None:
        """Record the end of every rollout, and turns that the pipeline has not reported."""
        for rollout in outcome.rollouts:
            if rollout.sample not in self._started:
                self._start(rollout)
            for turn in rollout.turns[self._turns.get(rollout.sample, 0) :]:
                self.turned(rollout, turn)
            self._tell_again(rollout, len(rollout.turns))
            self._recorder.record(
                RolloutFinished(
                    self._problem,
                    rollout.sample,
                    rollout.finish or "cancelled",
                    turns=len(rollout.turns),
                    answer=rollout.answer,
                    usage=rollout.usage,
                    error=rollout.error,
                    is_fallback_answer=rollout.is_fallback_answer,
                )
            )

    def _tell_again(self, rollout: Rollout, end: int) -> None:
        """Record this session's turns before `end` again, from the lowest index at which the
        journal has a turn that this session did not repeat.
        """
        replaced = self._recalled.pop(rollout.sample, ())
        begin = min((turn.index for turn in replaced), default=end)
        for turn in rollout.turns[begin:end]:
            self._recorder.record(TurnFinished(self._problem, rollout.sample, turn))

    def _start(self, rollout: Rollout) -> None:
        self._started.add(rollout.sample)
        self._recorder.record(RolloutStarted(self._problem, rollout.sample, rollout.prompt))


def _timeless(turn: Turn) -> str:
    """Return a turn as text, without the issue number and the origin of its decision.

    The comparison uses text because a rate may be NaN.
    """
    plain = replace(turn.decision, issue=None, origin="gate") if turn.decision else None
    return repr(replace(turn, decision=plain))


@dataclass(frozen=True, slots=True)
class ProblemLog:
    """The record of one problem from earlier sessions, to which further calls are added."""

    recorder: Recorder
    recorded: OpenProblem
    stop: Stop
    timing: RecallTiming
    now: Callable[[], float] = field(default_factory=clock)


class AlarmWatch:
    """A watch that records new alarms; those of earlier sessions are already in the journal."""

    def __init__(self, alarms: Callable[[], Sequence[DriftEvent]], recorder: Recorder) -> None:
        self._alarms = alarms
        self._recorder = recorder
        self._seen = len(alarms())

    def look(self) -> None:
        """Record the new alarms."""
        alarms = self._alarms()
        for alarm in alarms[self._seen :]:
            self._recorder.record(
                Drifted(alarm.kind, alarm.p, alarm.scores, alarm.action, alarm.message)
            )
        self._seen = len(alarms)


class RecordedPlanner:
    """A planner that returns recorded plans if there are any."""

    def __init__(self, planner: Planner, log: ProblemLog) -> None:
        self._planner = planner
        self._log = log

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return the recorded plan, or the planner's; see `atts.pipelines.Combiner`."""
        recorded = self._log.recorded
        if recorded.combine_plan is None:
            recorded.combine_plan = self._planner.plan(kind, share, answers)
            self._log.recorder.record(Combining(recorded.problem.id, recorded.combine_plan))
        return recorded.combine_plan


class RecordedGate:
    """A gate that returns recorded decisions if there are any.

    The real gate must have replayed these decisions before.
    """

    def __init__(self, gate: Gate, steps: ProblemLog, alarms: AlarmWatch) -> None:
        self._gate = gate
        self._steps = steps
        self._recorded = steps.recorded.gate
        self._alarms = alarms

    def _recall(self, calls: deque[Decided | Observed]) -> Decision:
        """Return the next recorded decision, and count it."""
        decision = calls.popleft().decision
        self._steps.recorder.relived(decision)
        return decision

    def preview(self, features: Features) -> Decision:
        """Return the recorded preview, or the gate's; see `atts.pipelines.Gate`."""
        calls = self._recorded.get((features.sample, features.turn))
        if calls and isinstance(calls[0], Decided) and calls[0].asked == "preview":
            return self._recall(calls)
        if calls:  # the recorded decision came after a request for a score
            return replace(
                calls[0].decision,
                action="verify",
                score=None,
                p=None,
                why="recalled",
                origin="recalled",
            )
        decision = self._gate.preview(features)
        if decision.action != "verify" or decision.issue is not None:
            self._steps.recorder.decided(Decided(decision, feature_numbers(features), "preview"))
        return decision

    def decide(self, features: Features, score: float) -> Decision:
        """Return the recorded decision, or the gate's; see `atts.pipelines.Gate`."""
        calls = self._recorded.get((features.sample, features.turn))
        if calls and isinstance(calls[0], Decided):
            return self._recall(calls)
        decision = self._gate.decide(features, score)
        self._steps.recorder.decided(Decided(decision, feature_numbers(features)))
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Let the gate observe, unless an earlier session did; see `atts.pipelines.Gate`."""
        calls = self._recorded.get((decision.sample, decision.turn))
        if calls and isinstance(calls[0], Observed):
            calls.popleft()
            return
        self._gate.observe(decision, escalated)
        self._steps.recorder.observed(decision, escalated)
        self._alarms.look()


class RecordedRoundGate:
    """A gate that ranks rounds and returns recorded decisions if there are any.

    The real gate ranks every round again, because it carries over rounding errors, but recorded
    decisions are returned.
    """

    def __init__(self, gate: RoundGate, steps: ProblemLog) -> None:
        self._gate = gate
        self._recorded = steps.recorded.gate
        self._recorder = steps.recorder

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Return, for each member, the recorded decision or that of the gate."""
        decisions: list[Decision] = []
        for (features, _), decision in zip(round_, self._gate.decide_round(round_), strict=True):
            calls = self._recorded.get((features.sample, features.turn))
            if calls and isinstance(calls[0], Decided):
                decision = calls.popleft().decision
                self._recorder.relived(decision)
                decisions.append(decision)
            else:
                self._recorder.decided(Decided(decision, feature_numbers(features), "round"))
                decisions.append(decision)
        return decisions


def replay_event(gate: Gate, event: Decided | Observed) -> None:
    """Repeat a recorded call of a gate; after all calls in the recorded order the gate has its
    earlier state.
    """
    decision = event.decision
    if isinstance(event, Observed):
        gate.observe(decision, event.escalated)
        return
    features = recorded_features(decision.question, decision.turn, decision.sample, event.features)
    if event.asked == "preview":
        gate.preview(features)
    elif decision.score is not None:
        gate.decide(replace(features, issue=decision.issue), decision.score)


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
    "same command continues the run. With --on-unscored escalate the target rewrites every chunk without "
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
    key: str  # names the request by the request's content, so a repeated request has the same key
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
        except TimeoutError as error:  # the engine itself raised this error
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

        The number is 0 if there was no such request, or if recalled calls do not return at once. The
        recorded request may differ from this request only in its length. This method keeps the
        record, because the call itself needs it later.
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

    :raises BadReply: if the parts do not agree.
    """
    ids = completion.ids
    logprobs = completion.logprobs
    may_lack = spec.logprobs == "none" or request.logprobs == "unneeded"
    if len(logprobs) != len(ids) and (logprobs or not may_lack):
        raise BadReply(
            spec.name, f"the reply has {len(logprobs)} log-probabilities for {len(ids)} ids"
        )
    if len(ids) > request.max_tokens:
        raise BadReply(
            spec.name, f"the reply has {len(ids)} tokens, {request.max_tokens} were requested"
        )
    if ids and not 0 <= min(ids) <= max(ids) < spec.vocabulary:
        raise BadReply(spec.name, "the reply has an id outside the vocabulary")
    if any(map(math.isnan, logprobs)):
        raise BadReply(spec.name, "a log-probability is not a number")


# A token outside the likely ones may have probability 0. But if none of many tokens is likely, the
# cause is an overflow.
_WHOLE_TEXT = 4
_ABSURD = -1000.0


def check_scores(scores: Scores, request: ScoreRequest, spec: EngineSpec) -> None:
    """Check that there is one log-probability per suffix token, and none above 0; -inf is allowed.

    :raises BadReply: the number of log-probabilities is wrong, or a value or the drawn beginning is
        impossible.
    """
    logprobs = scores.logprobs
    if len(logprobs) != len(request.suffix):
        raise BadReply(
            spec.name,
            f"the reply has {len(logprobs)} log-probabilities for {len(request.suffix)} tokens",
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
            spec.name,
            "the tokens that the engine drew while scoring do not begin like the scored text",
        )
    most = draw.max_tokens - (begun.ended is None)  # a completion that has not ended continues
    if len(ids) > most or not 0 <= ids[-1] < spec.vocabulary:
        raise BadReply(
            spec.name,
            "the tokens that the engine drew while scoring are not the beginning of the requested "
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
    """Return the identity of an engine's results, as in manifests, without the engine's address."""
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

    When the count reaches its limit, the target gets a last scoring request for a fixed text. So the
    error can report whether the target can score any text.
    """

    def __init__(self, reaction: OnUnscored) -> None:
        self._reaction = reaction
        self.in_a_row = 0  # every usable score sets this count back to 0
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
        return f"the engine does not score a fixed sentence either ({reason})"
    return "the engine scores a fixed sentence, so the cause is in the chunks or in the load"
