"""Write a run's events to the journal, and return recorded calls from it."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from atts.calibration import DriftEvent
from atts.concurrency import clock
from atts.core import (
    CallSpan,
    Chunk,
    Combine,
    CombinePlan,
    Decision,
    Outcome,
    Role,
    Rollout,
    RolloutSpan,
    Turn,
)
from atts.evaluators import Estimate, share_estimate
from atts.journal import (
    Combining,
    Decided,
    Drifted,
    Event,
    Journal,
    JudgedUnit,
    Manifest,
    Observed,
    OpenProblem,
    RolloutFinished,
    RolloutStarted,
    TurnFinished,
    Warned,
    feature_numbers,
    recorded_features,
)
from atts.pipelines import Features, Gate, Planner, RoundGate, RunLength
from atts.run.result import RunResult
from atts.run.stopping import Stop

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
    rollout: str  # the hint in the request
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
                f"was still busy {seconds:g} s after the end; the data that it had not sent are "
                "lost"
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

    Of the rollouts that took some number of decisions, a share took another one; the product of
    these shares is Kaplan and Meier's estimate of a rollout's length. A finished problem ends all
    of its rollouts. Recent rollouts have more weight, because with problems sorted by difficulty,
    future rollouts are like the latest ones.
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
        # The weight of the present. It grows with each problem that ends instead of each rollout,
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
        """Count a decision, unless it only asks for a score; each turn counts once."""
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
        # a gate of rounds does not observe what was done, so its decision itself counts
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
