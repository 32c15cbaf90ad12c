"""The recording of a run's events, and the engine calls of a run.

A recorder writes events to the journal, and returns the results of recorded calls from the journal.
Each engine call is limited, retried after a failure, checked and recorded. A run can be ended early
by a request, or as soon as a comparison with an earlier run is decided.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import sys
import threading
from array import array
from collections import defaultdict, deque
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
from atts.errors import (
    BadReply,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    UnusableScores,
    counted,
)
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
    """A handle that asks a run to end, for use by a signal, a button or a caller's budget.

    After the first request no engine call begins, and the calls in flight finish and are recorded.
    A second request cancels the calls in flight.
    """

    def __init__(self) -> None:
        self.asked = 0
        # number of engine calls in flight and of problems being graded; the end of a run waits for
        # them
        self.calls = 0
        self._changed = anyio.Event()

    def request(self) -> None:
        """Ask the run to end; a second request ends it at once.

        Call this only in the run's thread.
        """
        self.asked += 1
        self.report()

    @contextmanager
    def counted(self) -> Generator[None, None, None]:
        """Count a call as in flight during the block. A run that was asked to end waits for the
        calls in flight.
        """
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.asked:
                self.report()

    async def finished(self) -> None:
        """Wait until the run has been asked to end, and then until no call is in flight or a second
        request comes.
        """
        while not self.asked or (self.calls and self.asked < 2):
            await self._changed.wait()

    def report(self) -> None:
        """Wake `finished`, so that it checks the requests and the calls in flight again."""
        self._changed.set()
        self._changed = anyio.Event()


async def watch_signals(stop: Stop, asked: Callable[[int], None]) -> None:
    """Turn Ctrl-C and SIGTERM into requests to end the run, until cancelled; outside the main
    thread, do nothing.

    At the end, the earlier signal handlers are restored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    schedule = concurrency.loop_caller()
    received = deque[int]()
    arrived = anyio.Event()

    def deliver(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # A signal handler may run between any two instructions. So it does not set the event
        # itself, but asks the event loop to call the function that sets it.
        schedule(lambda: arrived.set())

    # Do not use the signal receivers of asyncio or anyio. When they end, Python's default handler
    # is active for a moment. A Ctrl-C in this moment raised KeyboardInterrupt inside the event
    # loop. The loop's worker threads were then never stopped, so the process did not exit.
    numbers = [signal.SIGINT] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, deliver) for number in numbers}
    try:
        while True:
            while received:
                number = received.popleft()
                stop.request()
                asked(number)
            arrived = anyio.Event()
            # A signal that came after the inner loop is not lost. The function that it scheduled
            # reads the variable `arrived` later, so it sets this new event.
            await arrived.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class StopWhen:
    """The votes of an earlier run, and the rule that ends this run as soon as a comparison with
    those votes is decided.

    The order of the problems must not depend on the votes. A random order with a fixed seed is
    suitable.
    """

    against: str
    # keyed by problem: 1 if the earlier run's vote was correct, 0 if wrong; for several results of
    # a problem, their share of correct results
    votes: Mapping[str, float] = field(repr=False)
    # largest difference of the two accuracies, in percentage points, at which the runs count as
    # equal
    points: float = 0.0


class SequentialComparison:
    """A comparison with an earlier run, updated after each problem in the order of the dataset.

    Problems with short solutions end first, which would bias the test. So the test uses a problem
    only after all problems before it in the dataset have ended. A failed problem delays all
    problems after it, until a later session has solved it.
    """

    def __init__(
        self, rule: StopWhen | None, state: RunState, record: Callable[[Warned], object]
    ) -> None:
        self._rule = rule
        self._state = state
        self._record = record
        self.answer = None if rule is None else Sequential("undecided", 0, -1.0, 1.0, rule.points)
        # number of problems that were skipped, because the comparison was already decided
        self.spared = 0
        # Only a run with a stopping rule needs the test. The test keeps thousands of numbers in
        # memory.
        self._sequence = None if rule is None else ConfidenceSequence()
        self._order = list[str]()
        self._next = 0
        # keyed by ended problem: 1 if this run's vote is correct, 0 if it is wrong, None if it was
        # not graded
        self._over: dict[str, float | None] = {}

    def needs(self, problem: str) -> bool:
        """Register the next problem of the dataset. Return False if the comparison is already
        decided, so that the problem can be skipped.
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
        """Register the final result of a problem, and update the comparison."""
        if self._rule is not None:
            self._over[line.problem] = None if line.verdict is None else float(line.is_correct)
            self._look(self._rule)

    def tell(self) -> str:
        """Return a sentence with the result of the comparison, or "" if there is no comparison. The
        first call in a run also records the sentence as a warning.
        """
        if self._rule is None:
            return ""
        words = (
            f"against {self._rule.against}: {self.answer}; the seed determines the order of the "
            "problems. The interval of this difference is valid after every problem; all other "
            "intervals are valid only for a number of problems fixed in advance"
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
"""The time at which a call returns if an earlier session recorded its reply. "instant": at once.
"recorded": after as many seconds as the call took in the earlier session.

"recorded" is for tests with a simulated clock. The whole run, including finished problems, is
repeated without engines and with the same schedule. So even decisions that depend on the order of
arrival are the same as in an uninterrupted run.
"""

CallKind = Literal["draft", "target", "score"]
"""The kind of an engine call: the draft or the target writes a chunk, or the target scores a chunk.
"""


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """A model wrote a chunk, which may still be discarded.

    Only listeners get this event; the journal records the engine call instead.
    """

    problem: str
    sample: int
    turn: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call to an engine began. Only listeners get this event; it is not in the journal.

    `stage` is "score" if the target scores a text. Otherwise it is the role of the model that
    writes.
    """

    problem: str
    rollout: str  # name of the rollout ("problem/sample"), which the engine also gets
    stage: CallKind
    # number of tokens of the prompt, or of the whole text if the call scores a text
    input_tokens: int = 0
    max_tokens: int = 0  # largest number of tokens that the call may write; 0 for scoring


@dataclass(frozen=True, slots=True)
class EngineAwaited:
    """The number of calls that wait for a lost engine grew or fell by one (`more` is 1 or -1). The
    event is not in the journal.
    """

    role: Role
    more: Literal[1, -1]


@dataclass(frozen=True, slots=True)
class RunBegun:
    """A session of a run begins. The event says how much work the run has, and how much of it
    earlier sessions have done.
    """

    problems: int | None  # None if the number of problems is not known in advance
    done: int
    samples: int  # largest number of rollouts of one problem
    seconds: float  # total running time of earlier sessions, in seconds
    draft: str
    target: str
    directory: Path | None
    judged_unit: JudgedUnit = "chunks"
    manifest: Manifest = field(default_factory=Manifest)


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A session ended without an error. The event has the run's result so far."""

    result: RunResult


Notice = Event | ChunkWritten | CallBegun | EngineAwaited | RunBegun | RunEnded
"""All events that a listener can receive during a run."""


class Listener(Protocol):
    """An object that receives the events of a run. Its methods must not block, and an error that
    they raise ends the run.
    """

    def recalled(self, event: Event) -> None:
        """Handle an event that an earlier session recorded. All of these calls come before the
        first `notify`.
        """
        ...

    def notify(self, event: Notice) -> None:
        """Handle an event of this session when it happens."""
        ...


CLOSING_SECONDS = 60.0
"""The largest number of seconds that a run waits at its end, so that its listeners can send their
last data.
"""

_log = logging.getLogger("atts.run")


class Background:
    """A listener that works in a separate thread, so that it can neither block nor fail the run.

    After its first failure the listener logs a warning and stops, and the run continues without it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs = queue.SimpleQueue[Callable[[], None] | None]()
        self._has_failed = threading.Event()
        self._thread: threading.Thread | None = None

    def recalled(self, event: Event) -> None:
        """Queue an event of an earlier session for the thread."""
        self._guarded(lambda: self.remember(event))

    def notify(self, event: Notice) -> None:
        """Queue an event of this session for the thread, because handling it may take long."""
        self._guarded(lambda: self.hear(event))

    def remember(self, event: Event) -> None:
        """Handle an event of an earlier session; this runs in the thread."""

    def hear(self, event: Notice) -> None:
        """Handle an event of this session; this runs in the thread."""

    def finish(self) -> None:
        """Complete all open work at the end of the run. This is the last method that the thread
        calls.
        """

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Close the listener, and wait at most `seconds` until all its data is sent. Any thread may
        call this.
        """
        if self._thread is None:
            return
        self._jobs.put(self.finish)
        self._jobs.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(
                f"was still sending data {seconds:g} s after the end of the run; unsent data is "
                "lost"
            )

    def later(self, job: Callable[[], None]) -> None:
        """Queue a function that the thread calls after all functions queued before."""
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
        except BaseException as error:  # the run continues after any error that a tracker raises
            if isinstance(error, KeyboardInterrupt):
                raise
            self._fail(f"failed, so atts sends it no more data: {type(error).__name__}: {error}")

    def _fail(self, what: str) -> None:
        if not self._has_failed.is_set():
            self._has_failed.set()
            _log.warning("--log %s %s; the run itself is not affected", self.name, what)


class EscalationCounter:
    """Counts of judged and of escalated chunks, per problem. `atts.journal.judged` defines which
    chunks count.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        # number of chunks of all problems that the gate decided on without a usable score
        self.unscored = 0

    def count(self, decision: Decision, escalated: bool) -> None:
        """Count a judged chunk; `escalated` says whether the gate escalated it."""
        num_escalated, num_judged = self._counts.get(decision.question, (0, 0))
        self._counts[decision.question] = (num_escalated + escalated, num_judged + 1)
        self.unscored += decision.origin == "forced"

    def of(self, problem: str) -> tuple[int, int]:
        """Return a problem's number of escalated chunks and its number of judged chunks."""
        return self._counts.get(problem, (0, 0))

    def forget(self, problem: str) -> None:
        """Drop the counts of a problem."""
        self._counts.pop(problem, None)

    @property
    def totals(self) -> tuple[int, int]:
        """Return the number of escalated chunks and the number of judged chunks, over all
        problems.
        """
        num_escalated = sum(escalated for escalated, _ in self._counts.values())
        num_judged = sum(judged for _, judged in self._counts.values())
        return num_escalated, num_judged

    @property
    def rate(self) -> Estimate:
        """Return the fraction of judged chunks that were escalated, with an interval clustered by
        problem.
        """
        return share_estimate(self._counts.values())


# The weight of a rollout's end falls to 1/e while this share of the run's rollouts ends after it.
# If problems are sorted by difficulty, late rollouts differ from early rollouts. A longer memory
# would then give a wrong estimate.
_MEMORY = 0.125


class RunLengthEstimate(RunLength):
    """An estimate of how many gate decisions a run still has to make, from the number of decisions
    in each rollout so far.

    For each n, the estimate finds the fraction of rollouts that made another decision after n
    decisions. Products of these fractions are the Kaplan-Meier estimate of the distribution of the
    number of decisions per rollout. When a problem finishes, all of its rollouts end. The estimate
    needs the total number of rollouts.

    Recent rollouts have more weight: if problems are sorted by difficulty, future rollouts resemble
    the recent ones.
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
        # Item n of `_there`: number of rollouts that have not ended and have n decisions so far.
        # Item n of `_ended`: weighted number of rollouts that ended after n decisions. Item n of
        # `_went_on`: weighted number of rollouts that had a further decision after n decisions.
        self._there = [rollouts]
        self._ended = [0.0]
        self._went_on = [0.0]
        # Weight of the next observation in these sums. The weight grows only when a problem ends,
        # because the rollouts of one problem are stopped together in an arbitrary order.
        self._weight = 1.0
        self._growth = 1 + 1 / max(1.0, _MEMORY * rollouts) if rollouts else 1.0
        # keyed by problem and sample: number of decisions so far, for each rollout that has not
        # ended
        self._open = dict[str, dict[int, int]]()

    @property
    def share(self) -> float | None:
        """Return the estimated fraction (0 to 1) of all decisions that are still to come.

        The result is 1 until a rollout has ended, and None if the number of rollouts is unknown.
        """
        if not self._is_known:
            return None
        if not any(self._ended):
            return 1.0
        left = 0.0  # expected number of decisions that all rollouts together still need
        # expected number of further decisions of a rollout that has `place` decisions
        to_come = 0.0
        for place in reversed(range(len(self._there))):
            known = self._went_on[place] + self._ended[place]
            to_come = (1 + to_come) * (self._went_on[place] / known if known else 1.0)
            left += to_come * self._there[place]
        left = max(1.0, left)
        return left / (left + self._decided)

    def count(self, decision: Decision) -> None:
        """Count a gate decision. A decision that only requests a score is ignored, and each turn
        counts once.
        """
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
        """Record that this rollout has ended."""
        self._end_all([self._rollouts(problem).pop(sample, 0)])

    def conclude(self, problem: str) -> None:
        """Record that all rollouts of this problem have ended."""
        self._end_all(list(self._rollouts(problem).values()))
        del self._open[problem]
        # The weight of later observations grows: at the end of a run, it is about e^8.
        self._weight *= self._growth**self._samples

    def _end_all(self, lengths: Sequence[int]) -> None:
        for made in lengths:
            self._there[made] -= 1
            self._ended[made] += self._weight

    def _rollouts(self, problem: str) -> dict[int, int]:
        return self._open.setdefault(problem, dict.fromkeys(range(self._samples), 0))


class ProblemsLeft(RunLengthEstimate):
    """A count of the decisions that a run still has to make, for gates that make one decision per
    problem.
    """

    __slots__ = ("_made", "_problems")

    def __init__(self, problems: int | None) -> None:
        super().__init__(problems, samples=1)
        self._problems = problems
        self._made = 0

    @property
    def share(self) -> float | None:
        """Return the fraction (0 to 1) of problems without a decision, or None if the number of
        problems is unknown.
        """
        if not self._problems:
            return None
        return max(1, self._problems - self._made) / self._problems

    def count(self, decision: Decision) -> None:
        """Count a gate decision. A decision that only requests a score is ignored."""
        self._made += decision.action != "verify"

    def end(self, problem: str, sample: int) -> None:
        """Ignore the end of a rollout, because only decisions about problems count."""

    def conclude(self, problem: str) -> None:
        """Ignore the end of a problem, because it was counted when the gate decided about it."""


class Recorder:
    """A recorder that passes every event to the journal and to the listeners, in the same order."""

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
        # a function that waits until all recorded events are in the journal's file
        self.saved = _nothing_to_save if journal is None else journal.saved
        # True if an engine call returns only after its reply is on the disk
        self.awaits_disk = journal is not None and journal.durability == "always"
        # The last decision of the gate, which is not recorded yet. If the next event is the
        # observation of this decision, both are recorded on one line of the journal.
        self._decided: Decided | None = None
        # number of recorded tokens of each problem that is not complete
        self.saved_tokens = defaultdict[str, int](int)

    def record(self, event: Event, second: CallSpan | Observed | None = None) -> None:
        """Write an event to the journal and pass it to the listeners. If `second` is given, write
        both events to one journal line.

        :raises StorageError: the journal cannot be written.
        """
        waiting = self._decided
        self._decided = None
        if waiting is not None:
            self.record(waiting)
        if self._journal is not None:
            self._journal.record(event, second)
            if isinstance(event, Sampled):
                self.saved_tokens[event.problem] += len(event.completion.ids)
        for tell in self._tells:
            tell(event)
            if second is not None:
                tell(second)

    def decided(self, event: Decided) -> None:
        """Keep a gate's decision in memory until its outcome is observed, so that both are written
        to one journal line. If another event comes first, the decision is written before it.
        """
        waiting = self._decided
        self._decided = None
        if waiting is not None:
            self.record(waiting)
        # A decision with the action "verify" only requests a score, and `count` would ignore it.
        # There is one for every chunk, so skipping the call saves time.
        if event.decision.action != "verify":
            self._left.count(event.decision)
        # A gate that ranks all chunks of a round does not observe outcomes. So its decision itself
        # is counted as the outcome.
        if event.asked == "round":
            self._escalations.count(event.decision, event.decision.escalate)
            self.record(event)
        else:
            self._decided = event

    def relived(self, decision: Decision) -> None:
        """Count a decision that an earlier session recorded, when this session repeats the same
        step.
        """
        self._left.count(decision)

    def observed(self, decision: Decision, escalated: bool) -> None:
        """Record whether the gate escalated a judged chunk. If no other event came after the gate's
        decision, write the decision and this outcome to one journal line.
        """
        self._escalations.count(decision, escalated)
        event = self._decided
        observed = Observed(decision, escalated)
        if event is None or event.decision is not decision:
            return self.record(observed)
        self._decided = None
        return self.record(event, observed)

    def tell(self, event: Notice) -> None:
        """Pass an event to the listeners, but do not record it in the journal."""
        for tell in self._tells:
            tell(event)

    def on_graph(self, event: object) -> None:
        """Handle an event of the task graph: record it if it is an event of the journal, and count
        rollouts that ended.
        """
        if isinstance(event, RolloutSpan):
            self._left.end(event.problem, event.sample)
        if isinstance(event, Event):
            self.record(event)


async def _nothing_to_save() -> None:
    """Return at once; used if there is no journal."""


class ProblemRecord:
    """A listener of one problem's pipeline, which records rollouts and turns in the journal. Events
    that an earlier session recorded are not recorded again.
    """

    def __init__(self, recorder: Recorder, recorded: OpenProblem) -> None:
        self._recorder = recorder
        self._problem = recorded.problem.id
        self._started = set(recorded.rollouts)
        self._recalled = recorded.turns
        self._turns: dict[int, int] = {}

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Pass a chunk that a model wrote to the run's listeners."""
        self._recorder.tell(ChunkWritten(self._problem, rollout.sample, len(rollout.turns), chunk))

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Record a turn. If it is the first turn of a rollout, record the rollout's start before
        it.
        """
        if rollout.sample not in self._started:
            self._start(rollout)
        self._turns[rollout.sample] = turn.index + 1
        recalled = self._recalled.get(rollout.sample)
        if recalled and _timeless(recalled[0]) == _timeless(turn):
            recalled.popleft()
            return
        if recalled:
            text = (
                f"turn {turn.index} differs from the one that an earlier session recorded, and "
                "replaces it"
            )
            self._recorder.record(Warned("recall-differs", text, self._problem, rollout.sample))
            self._tell_again(rollout, turn.index)
        self._recorder.record(TurnFinished(self._problem, rollout.sample, turn))

    def finished(self, outcome: Outcome) -> None:
        """Record the end of every rollout, and any turns that the pipeline did not report
        before.
        """
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
        """Record this session's turns before index `end`, so that they replace those of an earlier
        session. Begin at the first turn that differs from the earlier session's turn.
        """
        replaced = self._recalled.pop(rollout.sample, ())
        begin = min((turn.index for turn in replaced), default=end)
        for turn in rollout.turns[begin:end]:
            self._recorder.record(TurnFinished(self._problem, rollout.sample, turn))

    def _start(self, rollout: Rollout) -> None:
        self._started.add(rollout.sample)
        self._recorder.record(RolloutStarted(self._problem, rollout.sample, rollout.prompt))


def _timeless(turn: Turn) -> str:
    """Return a string for comparing turns of different sessions. The string leaves out two fields
    of the decision that may differ between sessions: `issue` and `origin`.

    Strings are compared, and not turns, because a turn may contain NaN, and NaN is not equal to
    NaN.
    """
    plain = replace(turn.decision, issue=None, origin="gate") if turn.decision else None
    return repr(replace(turn, decision=plain))


@dataclass(frozen=True, slots=True)
class ProblemLog:
    """The recorded results of one problem's engine and gate calls, and the recorder for new calls.
    A call that was recorded gets its recorded result when it is repeated.
    """

    recorder: Recorder
    recorded: OpenProblem
    stop: Stop
    timing: RecallTiming
    now: Callable[[], float] = field(default_factory=clock)


class AlarmWatch:
    """A watch that records new drift alarms. Alarms of earlier sessions are already in the
    journal.
    """

    def __init__(self, alarms: Callable[[], Sequence[DriftEvent]], recorder: Recorder) -> None:
        self._alarms = alarms
        self._recorder = recorder
        self._seen = len(alarms())

    def look(self) -> None:
        """Record the alarms that came since the last call."""
        alarms = self._alarms()
        for alarm in alarms[self._seen :]:
            self._recorder.record(
                Drifted(alarm.kind, alarm.p, alarm.scores, alarm.action, alarm.message)
            )
        self._seen = len(alarms)


class RecordedPlanner:
    """A planner that returns the recorded plan of a problem. If there is none, it asks the real
    planner, and records the plan.
    """

    def __init__(self, planner: Planner, log: ProblemLog) -> None:
        self._planner = planner
        self._log = log

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return the recorded plan; if there is none, record and return the real planner's plan."""
        recorded = self._log.recorded
        if recorded.combine_plan is None:
            recorded.combine_plan = self._planner.plan(kind, share, answers)
            self._log.recorder.record(Combining(recorded.problem.id, recorded.combine_plan))
        return recorded.combine_plan


class RecordedGate:
    """A gate that first returns all recorded decisions, and then asks the real gate. The real gate
    must already have replayed the recorded decisions.
    """

    def __init__(self, gate: Gate, steps: ProblemLog, alarms: AlarmWatch) -> None:
        self._gate = gate
        self._steps = steps
        self._recorded = steps.recorded.gate
        self._alarms = alarms

    def _recall(self, calls: deque[Decided | Observed]) -> Decision:
        """Remove the next recorded decision from the queue, and return it."""
        decision = calls.popleft().decision
        self._steps.recorder.relived(decision)
        return decision

    def preview(self, features: Features) -> Decision:
        """Return the recorded preview; if there is none, return the real gate's preview."""
        calls = self._recorded.get((features.sample, features.turn))
        if calls and isinstance(calls[0], Decided) and calls[0].asked == "preview":
            return self._recall(calls)
        # The earlier session decided on this chunk after scoring. So request the score again;
        # `decide` then returns the recorded decision.
        if calls:
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
        """Return the recorded decision; if there is none, return the real gate's decision."""
        calls = self._recorded.get((features.sample, features.turn))
        if calls and isinstance(calls[0], Decided):
            return self._recall(calls)
        decision = self._gate.decide(features, score)
        self._steps.recorder.decided(Decided(decision, feature_numbers(features)))
        return decision

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Pass the observation to the real gate, unless an earlier session has recorded it."""
        calls = self._recorded.get((decision.sample, decision.turn))
        if calls and isinstance(calls[0], Observed):
            calls.popleft()
            return
        self._gate.observe(decision, escalated)
        self._steps.recorder.observed(decision, escalated)
        self._alarms.look()


class RecordedRoundGate:
    """A gate that decides about whole rounds, and returns recorded decisions where they exist.

    The real gate still ranks the chunks of every round. It must do so, because it carries each
    round's rounding error over to the problem's next round.
    """

    def __init__(self, gate: RoundGate, steps: ProblemLog) -> None:
        self._gate = gate
        self._recorded = steps.recorded.gate
        self._recorder = steps.recorder

    def decide_round(self, round_: Sequence[tuple[Features, float]]) -> list[Decision]:
        """Return one decision per rollout of the round: the recorded decision, or the real gate's
        decision if none is recorded.
        """
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
    """Repeat one recorded call of a gate. After all recorded calls have been repeated in order, the
    gate has the same state as at the end of the earlier session.
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
"""The reaction to many consecutive chunks without a usable score: "stop" ends the run and keeps its
results, and "escalate" lets the run continue, with these chunks rewritten by the target.
"""

# With the reaction "stop", a run ends after this number of consecutive scoring calls without a
# usable score. The retries of a call are not counted separately.
IN_A_ROW = 12
_PROBE_TEXT = "2 + 2 = 4, so the answer is 4."
_ADVICE = (
    "Check the target's log; an overflow in float16 can cause this. Everything so far is saved, "
    "and the same command continues the run. With --on-unscored escalate, the target "
    "rewrites every chunk without a score"
)


_LOOKS = 4  # number of checks whether the engine makes progress, within the time limit of a call

Request = TypeVar("Request", SampleRequest, ScoreRequest)
Result = TypeVar("Result", Completion, Scores)
RecordedCall = Sampled | Scored | CallFailed


@dataclass(slots=True)
class _Call(Generic[Request, Result]):
    """The state of one engine call; `seconds` and `source` are set when the reply arrives."""

    kind: CallKind
    request: Request
    key: str  # hash of the request's content; equal requests have equal keys
    ask: Callable[[Request], Awaitable[Result]]
    check: Callable[[Result, Request, EngineSpec], None]
    seconds: float = 0.0
    source: Literal["live", "recalled"] = "live"


def _begun(problem: str, call: _Call[Any, Any]) -> CallBegun:
    """Return the event that tells listeners that a call has begun."""
    request = call.request
    if isinstance(request, SampleRequest):
        tokens = len(request.ids)
        return CallBegun(problem, request.rollout, call.kind, tokens, request.max_tokens)
    tokens = len(request.prefix) + len(request.suffix)
    return CallBegun(problem, request.rollout, call.kind, tokens)


class Deadlines:
    """The deadlines of all calls in flight from a run to one engine.

    An engine that processes all its calls together in steps may leave a call waiting for a long
    time. This is not a fault as long as the engine takes steps, so the deadline is measured from
    the latest step.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.seconds = seconds
        # cancel scopes of the calls in flight, which have the deadlines
        self.scopes = set[anyio.CancelScope]()
        self._engine = stepping(engine)
        self.are_moving = self._engine is not None
        # word in the error message of a late call: what did not come within the time limit
        self.awaited = "step" if self.are_moving else "answer"

    async def keep(self) -> None:
        """Set new deadlines for all calls in flight whenever the engine has completed steps.

        One task watches all calls, because a task for each call would cost more than the call
        itself.
        """
        assert self._engine is not None, "call this method only if `are_moving` is true"
        # number of steps that the engine had made at the last check; None before the first check
        steps: int | None = None
        while True:
            await anyio.sleep(self.seconds / _LOOKS)
            if not self.scopes:
                # no call is in flight, so the engine may be closed and cannot report its steps
                continue
            try:
                taken = self._engine.steps_taken()
            except EngineError:
                continue  # the engine was lost, so each of its calls raises an error itself
            before = steps
            steps = taken
            if before is not None and taken != before:
                deadline = anyio.current_time() + self.seconds
                for scope in self.scopes:
                    scope.deadline = deadline


class EngineCalls:
    """The engine that a pipeline calls for one rollout. It wraps a real engine. A call passes
    through these methods, and each method has one task:

        sample, score      name the call and count the tokens that it may need
        scope.call         waits for a slot, times the call, retries it (`atts.graph`)
        _outlast_outage    waits for an engine that was lost
        _recall_or_ask     returns the reply that an earlier session recorded, if there is one
        _ask_within_caps   waits for room in the caps, and reserves the call's largest possible cost
        _ask_live          counts the call as in flight, reports it, records its failure
        _ask_in_time       sets the deadline and checks the reply
        _record            records the reply before the slot is given back

    So a pipeline needs no code for these tasks. After a crash, the pipeline runs again from the
    start. Every recorded call then returns its recorded result at once, so no work is repeated.

    Without a `scope`, the task graph does not limit the calls. Without a `log`, the calls are
    neither recorded nor counted against caps. The caller opens and closes the given engine; the
    engine's spec must not change in between.

    :raises BadReply: in `sample` and `score`: the reply contradicts itself or the request.
    :raises EngineTimeout: in the same methods: the reply did not come in time.
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
        # the (sample, turn) pairs whose completion an earlier session recorded; computed at the
        # first use
        self._recorded_turns: set[tuple[int, int]] | None = None

    async def sample(self, request: SampleRequest) -> Completion:
        """Wait until the engine has room for the call, then sample a completion from the engine."""
        key = request_key(self._role, request)
        call = _Call(self._role, request, key, self._engine.sample, check_completion)
        return await self._admit(call, request.seed.turn, len(request.ids) + request.max_tokens)

    async def score(self, request: ScoreRequest) -> Scores:
        """Wait until the engine has room for the call, then score the suffix with the engine."""
        key = request_key(self._role, request)
        call = _Call("score", request, key, self._engine.score, check_scores)
        tokens = len(request.prefix) + len(request.suffix)
        if self._unscored is None:
            return await self._admit(call, request.turn, tokens)
        try:
            scores = await self._admit(call, request.turn, tokens)
        except BadReply as error:
            # A recorded failure is not counted, because the target may have been repaired since
            # then.
            if call.source == "live":
                await self._unscored.unusable(self._engine, error)
            raise
        if call.source == "live":
            self._unscored.in_a_row = 0
        return scores

    async def _admit(self, call: _Call[Request, Result], turn: int, tokens: int) -> Result:
        """Run the call as a node of the task graph. The graph waits for a slot, times the call and
        retries it.
        """
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
        """Make the call. If the engine was lost, wait until it is available again, and only then
        raise the error. The next attempt then finds the engine.
        """
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
        """Return the recorded result of the call. If none is recorded, make the call."""
        recorded = log.recorded.calls.get(call.key) if self.has_recorded_calls else None
        if not recorded:
            if log.stop.asked:
                # the run is ending, so this call does not begin, but waits until it is cancelled
                await anyio.sleep_forever()
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
        # Calls of different kinds have different keys. So the recorded result has the type that
        # this call returns.
        reply = cast(Result, result)
        call.check(reply, call.request, self.spec)
        return reply

    async def _ask_within_caps(
        self, account: Account, log: ProblemLog, call: _Call[Request, Result]
    ) -> Result:
        """Make the call within the run's spending caps. Its largest possible spending is reserved
        before the call, and its real spending is charged after the call.

        A call that waits for room in the caps does not count as in flight. A call that fails or is
        cancelled is charged its largest possible spending.
        """
        most = most_of(self._role, call.request, account.prices)
        await account.room(most)
        if log.stop.asked:
            # the run began to end while this call waited for room within the caps
            await anyio.sleep_forever()
        with account.reserved_now(most) as reservation:
            reply = await self._ask_live(log, call)
            account.count(reply)
            reservation.answered(taken_by(self._role, call.request, reply, account.prices))
        return reply

    async def _ask_live(self, log: ProblemLog, call: _Call[Request, Result]) -> Result:
        """Make the call while it counts as in flight and listeners know of it. Record it if it
        fails.
        """
        stop = log.stop
        # set again, because the first attempt of a repeated call may have set "recalled"
        call.source = "live"
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
        """Make the call within the deadline, and check the engine's reply."""
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
        # The deadline of `move_on_after` raises no error, so the engine raised this error itself.
        except TimeoutError as error:
            late = error
        problem = f"no {deadlines.awaited} arrived within {deadlines.seconds:g} s"
        raise EngineTimeout(self.spec.name, problem) from late

    async def _record(
        self, log: ProblemLog, call: _Call[Any, Any], span: CallSpan | None, result: Any
    ) -> None:
        """Record a successful call, and wait until the record is written. The call keeps its slot
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
            # The journal already has the reply. So even a cancelled call waits for the disk, and
            # then returns and counts the reply.
            with anyio.CancelScope(shield=True):
                await recorder.saved()

    def _record_failure(
        self, log: ProblemLog, call: _Call[Any, Any], error: EngineError, seconds: float
    ) -> None:
        """Record a failure after which a pipeline may continue. Any other failure would happen
        again when the run is repeated, so it is not recorded.
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
        """Return the scores that an earlier session recorded for this call, or None. Reading them
        does not remove the record, which later answers the call itself.
        """
        calls = self._recorded(request)
        if calls and isinstance(calls[0], Scored):
            return calls[0].scores
        return None

    def recorded_length(self, request: SampleRequest) -> int:
        """Find this request, with the same or a smaller token limit, among an earlier session's
        requests. Return the largest of the recorded token limits.

        The result is 0 if no such request was recorded, or if recorded replies are not returned at
        once. Reading the limit does not remove the record, which later answers the call itself.
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
        """Return the engine's counters. They include neither calls answered from the journal nor
        calls that ended before they reached the engine.
        """
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
    """Return a key that identifies a request by its content, role and rollout.

    The key covers everything that can change the reply. The priority cannot, so it is left out.
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
            " "
            f"{(draw.num_begun, draw.max_tokens, draw.sampling, draw.seed, draw.stop, draw.stop_ids)!r}"
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
    # The ids of engines for chat servers are encoded pieces of text, so they may need more than 64
    # bits.
    try:
        hasher.update(array("q", ids).tobytes())
    except OverflowError:
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
    """Check that the parts of a completion fit each other and the request.

    :raises BadReply: if the parts do not agree.
    """
    ids = completion.ids
    logprobs = completion.logprobs
    may_lack = spec.logprobs == "none" or request.logprobs == "unneeded"
    if len(logprobs) != len(ids) and (logprobs or not may_lack):
        found = counted(len(logprobs), "log-probability", "log-probabilities")
        raise BadReply(spec.name, f"the reply has {found} for {counted(len(ids), 'token id')}")
    if len(ids) > request.max_tokens:
        raise BadReply(
            spec.name,
            f"the reply has {len(ids)} tokens, but at most {request.max_tokens} were requested",
        )
    if ids and not 0 <= min(ids) <= max(ids) < spec.vocabulary:
        raise BadReply(spec.name, "the reply has a token id outside the model's vocabulary")
    if any(map(math.isnan, logprobs)):
        raise BadReply(spec.name, "a log-probability in the reply is not a number")


# Some servers report probability 0 for an unlikely token, so this is allowed for some tokens. If
# all tokens of a text of at least `_WHOLE_TEXT` tokens have a log-probability below `_ABSURD`, the
# cause is an overflow.
_WHOLE_TEXT = 4
_ABSURD = -1000.0


def check_scores(scores: Scores, request: ScoreRequest, spec: EngineSpec) -> None:
    """Check that there is one log-probability per suffix token, and that none is above 0; -inf is
    allowed.

    :raises BadReply: the number of log-probabilities is wrong, or a log-probability is
        impossible, or the tokens that were sampled while scoring are impossible.
    """
    logprobs = scores.logprobs
    if len(logprobs) != len(request.suffix):
        raise BadReply(
            spec.name,
            f"the reply has {len(logprobs)} log-probabilities for {len(request.suffix)} tokens",
        )
    # rounding may make a log-probability slightly larger than 0
    if max(logprobs) > 1e-4 or any(map(math.isnan, logprobs)):
        raise BadReply(spec.name, "a log-probability in the reply is above 0 or not a number")
    if len(logprobs) >= _WHOLE_TEXT and max(logprobs) < _ABSURD:
        raise BadReply(spec.name, "every token of the text has probability 0")
    begun = scores.beginning
    draw = request.draw
    if begun is None:
        return
    ids = begun.ids
    # The tokens drawn while scoring must be the first tokens of the scored text. Only the last
    # drawn token may differ from the scored text.
    follows = ids[:-1] == request.suffix[: len(ids) - 1]
    if draw is None or not follows or not 0 < len(ids) == len(begun.logprobs):
        raise BadReply(
            spec.name,
            "the tokens that the engine sampled while scoring do not match the scored text",
        )
    # If no end was drawn, the completion continues, so at least one of its `max_tokens` must be
    # left.
    most = draw.max_tokens - (begun.ended is None)
    if len(ids) > most or not 0 <= ids[-1] < spec.vocabulary:
        raise BadReply(
            spec.name,
            "the tokens that the engine sampled while scoring cannot be the beginning of the "
            "requested completion",
        )


class SharingEngine(EngineAround):
    """An open engine that shares replies between the runs of a sweep or of a pilot. It may answer a
    request with a reply that another run received.

    Seeds depend on the run's seed, the problem, the sample and the turn. So two runs that send the
    same request to the same model would get the same reply anyway. If a server is not
    deterministic, the shared reply is still a sample from the model's distribution. So a stored
    reply may be reused for every request with the same content.
    """

    def __init__(self, engine: Engine, role: Role, replies: SharedReplies, run: str) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._replies = replies
        self._run = run_number(run)
        self._identity = engine_identity(engine.spec)

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the stored reply to a request. If there is none, ask the engine, and store its
        reply if it is valid.
        """
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
        """Return whether the run would accept the reply. An invalid reply is not stored, because
        the run will repeat the request.
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
    """Return the engine's properties that determine its results, in the form that manifests use.
    The address is not among them.
    """
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
    """A counter of consecutive scoring calls without a usable score, over all rollouts of a run.

    When the count reaches its limit, the target is asked to score a fixed text. The run's error
    then says whether the target can score any text at all.
    """

    def __init__(self, reaction: OnUnscored) -> None:
        self._reaction = reaction
        # number of scoring calls without a usable score since the last usable score
        self.in_a_row = 0
        self._asking = anyio.Lock()
        self._diagnosis: str | None = None

    async def unusable(self, engine: Engine, error: BadReply) -> None:
        """Count a call without a usable score.

        :raises UnusableScores: if too many calls in a row had no usable score.
        """
        self.in_a_row += 1
        if self._reaction == "escalate" or self.in_a_row < IN_A_ROW:
            return
        async with self._asking:
            if self._diagnosis is None:
                self._diagnosis = await _diagnosed(engine)
        problem = (
            f"{self.in_a_row} chunks in a row came back without a usable score ({error.problem}); "
            f"{self._diagnosis}"
        )
        raise UnusableScores(engine.spec.name, problem, _ADVICE) from error


async def _diagnosed(engine: Engine) -> str:
    """Ask the engine to score a fixed sentence, and return a description of what happened."""
    first, *rest = engine.tokenizer.encode(_PROBE_TEXT)
    request = ScoreRequest((first,), tuple(rest))
    try:
        with anyio.fail_after(60):
            check_scores(await engine.score(request), request, engine.spec)
    except (EngineError, TimeoutError) as error:
        reason = error.problem if isinstance(error, EngineError) else "no answer within 60 s"
        return f"the engine cannot score a fixed test sentence either ({reason})"
    return "the engine can score a fixed test sentence, so the cause is the chunks or the load"
