"""The progress of a run: a listener that counts events, and snapshots of its statistics."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from atts.core import Role, Usage
from atts.evaluators import Estimate, accuracy_estimate
from atts.journal import (
    CallFailed,
    Decided,
    Drifted,
    Event,
    Graded,
    JudgedUnit,
    Observed,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    RolloutSpan,
    Sampled,
    Scored,
    TurnFinished,
    Warned,
    judged,
)
from atts.run.calls import CallBegun, EngineAwaited, EscalationCounter, Notice, RunBegun

Stage = Literal["draft", "score", "target", "wait"]
"""Activity of a rollout: the draft writes, the target scores, the target writes, or the rollout
waits for an engine.
"""
RunState = Literal["loading", "running", "draining", "over"]
"""The phase of a run: its engines are being opened, its rollouts run, its last calls are being
saved, or it has ended.
"""
Flow = Literal["draft", "target", "scored"]
"""The kinds of tokens that are counted separately: written by the draft, written by the target, and
scored by the target.
"""
WINDOW_SECONDS = 15.0
_ENOUGH = 0.01  # the remaining time is estimated only after this share of the rollouts has ended
# number of rollouts, the latest that ended, whose durations are kept for the estimate
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """The progress of a run at one moment. Counts include earlier sessions; speeds and the
    remaining time are of this session only.

    `rate` is the fraction of judged chunks that were escalated, with an interval clustered by
    problem. `accuracy` is the fraction of problems whose vote is correct. Each interval is valid at
    one moment that was chosen in advance, but the intervals of all moments are not valid together.
    """

    state: RunState
    directory: Path | None
    judged_unit: JudgedUnit
    problems: int | None  # None if the number of problems is not known in advance
    done: int
    failed: int  # number of finished problems with at least one failed rollout
    lost: int  # number of failed rollouts in finished problems
    open: int
    stages: Mapping[Stage, int]
    rollouts_done: int
    accepted: int
    escalated: int
    forced: int  # number of chunks that were escalated because they had no usable score
    # number of chunks that a model wrote, but that were not kept in the rollout's text
    rejected: int
    rate: Estimate
    nominal: float | None
    accuracy: Estimate
    graded: int
    tokens: Mapping[Flow, int]  # number of tokens of calls that have ended, by kind of token
    usage: Usage  # usage of finished problems only, as in the summary of the run
    speeds: Mapping[Flow, float]  # tokens per second of recent calls, by kind of token
    models: Mapping[Literal["draft", "target"], str]
    seconds: float  # running time in seconds, summed over all sessions
    left: float | None  # estimated remaining seconds; None until enough rollouts have ended
    alarms: int
    failed_calls: int
    awaited: Mapping[Role, int]  # number of calls that wait for a lost engine, keyed by role
    note: str = ""

    @property
    def target_share(self) -> float:
        """Return the fraction of the written tokens that the target wrote, as in the run's
        summary.
        """
        return self.usage.target_share

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as plain data for JSON."""
        plain = asdict(
            replace(
                self,
                stages=dict(self.stages),
                tokens=dict(self.tokens),
                speeds=dict(self.speeds),
                awaited=dict(self.awaited),
            )
        )
        rates = {"rate": self.rate.as_json(), "accuracy": self.accuracy.as_json()}
        directory = None if self.directory is None else str(self.directory)
        return {**plain, **rates, "directory": directory, "target_share": self.target_share}


class _Ended(NamedTuple):
    """A call that ended: its end time, the number of its tokens, and its duration."""

    moment: float
    tokens: int
    seconds: float


@dataclass(slots=True)
class _Throughput:
    """Token counts for one kind of token: the total of all calls, and the total of the calls that
    ended recently.

    Tokens are counted when a call ends. So the speed is measured over the last `WINDOW_SECONDS` or,
    if a recent call took longer, over the duration of the longest recent call. Otherwise a call of
    five minutes would count all its tokens as written in the last 15 seconds.
    """

    total: int = 0
    recent: deque[_Ended] = field(default_factory=deque[_Ended])
    in_window: int = 0
    longest: float = 0.0

    def add(self, call: _Ended) -> None:
        self.recent.append(call)
        self.in_window += call.tokens
        self.total += call.tokens
        self.longest = max(self.longest, call.seconds)

    def per_second(self, now: float, since: float) -> float:
        while self.recent and self.recent[0].moment < now - self.window:
            gone = self.recent.popleft()
            self.in_window -= gone.tokens
            if gone.seconds == self.longest:
                self.longest = max((call.seconds for call in self.recent), default=0.0)
        return self.in_window / max(1.0, min(self.window, now - since))

    @property
    def window(self) -> float:
        """Return the length, in seconds, of the past period in which the speed is measured."""
        return max(WINDOW_SECONDS, self.longest)


@dataclass(slots=True)
class _Durations:
    """The durations of this session's rollouts, from which the durations of unfinished rollouts are
    estimated.

    This is the Kaplan-Meier estimator. It takes into account that a rollout in flight lasts longer
    than its present age. Fast rollouts end first, so the mean of the ended rollouts alone would be
    too low. There is no data beyond the greatest age, so a rollout of that age is assumed to be
    half done.
    """

    ended: deque[float] = field(default_factory=lambda: deque[float](maxlen=_REMEMBERED))
    num_ended: int = 0

    def add(self, seconds: float) -> None:
        self.ended.append(seconds)
        self.num_ended += 1

    def mean(self, ages: Sequence[float]) -> float:
        """Return the estimated mean duration of a rollout; `ages` are the present ages of rollouts
        in flight.
        """
        return self._beyond([0.0], ages)[0]

    def residuals(self, ages: Sequence[float]) -> list[float]:
        """Return the expected remaining seconds of each rollout in flight."""
        return self._beyond(ages, ages)

    def _beyond(self, starts: Sequence[float], ages: Sequence[float]) -> list[float]:
        """Return, for each age in `starts`, how many more seconds a rollout of that age is expected
        to run. `ages` are the present ages of the rollouts in flight.
        """
        last = max([*self.ended, *ages], default=0.0)
        times = [(seconds, True) for seconds in self.ended] + [(age, False) for age in ages]
        # If two times are equal, the rollout that ended comes before the rollout in flight, as the
        # estimator requires.
        times.sort(key=lambda time: (time[0], not time[1]))
        # The survival curve: each item has a time in seconds and the share of rollouts that last
        # longer. The share is constant until the time of the next item.
        steps: list[tuple[float, float]] = [(0.0, 1.0)]
        share = 1.0
        for number, (seconds, has_ended) in enumerate(times):
            if has_ended:
                share *= 1 - 1 / (len(times) - number)
                steps.append((seconds, share))
        # for each time of the survival curve: the area under the curve from this time to the last
        # time
        areas = [share * last] * len(steps)
        until = last
        area = share * last
        for number in range(len(steps) - 1, -1, -1):
            begin, height = steps[number]
            area += height * (until - begin)
            areas[number] = area
            until = begin
        lengths = list[float]()
        begins = [begin for begin, _ in steps]
        for start in starts:
            number = bisect_right(begins, start) - 1
            begin, height = steps[number]
            rest = areas[number] - height * (start - begin)
            lengths.append(max(0.0, rest / height) if height > 0 else 0.0)
        return lengths


def _opening(addresses: Sequence[str]) -> str:
    """Describe the opening of engines: models are loaded, but servers are only checked.

    >>> _opening(["hf:Qwen/Qwen3-1.7B", "vllm:http://a:8000"])
    'loading hf:Qwen/Qwen3-1.7B and checking vllm:http://a:8000'
    """
    parts = list[str]()
    last = ""
    for address in dict.fromkeys(addresses):
        # In the address of an engine in Ray actors, the actors load the model.
        is_server = "://" in address and not address.startswith("ray:")
        verb = "checking" if is_server else "loading"
        parts.append(address if verb == last else f"{verb} {address}")
        last = verb
    return " and ".join(parts)


class Progress:
    """A listener (`atts.run.Listener`) that tracks the progress of a run; `snapshot` may be called
    at any time.

    Handling an event costs only a comparison or two and an addition. The intervals are computed in
    `snapshot`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, loading: Sequence[str] = ()
    ) -> None:
        """Create a tracker with all counts at 0; `loading` names the engines that are opened before
        the run.
        """
        self._clock = clock
        # warnings about the open engines: a short context, or a slow model
        self.warnings: list[str] = []
        self._began = clock()
        self._begun = RunBegun(None, 0, 1, 0.0, draft="", target="", directory=None)
        self._state: RunState = "loading" if loading else "running"
        self._note = _opening(loading)
        # for each problem with an outcome: the number of its rollouts
        self._over: dict[str, int] = {}
        self._usage: dict[str, Usage] = {}  # usage of finished problems, keyed by problem
        # ids of finished problems with at least one failed rollout
        self._incomplete: set[str] = set()
        self._lost: dict[str, set[int]] = {}  # sample indices of failed rollouts, keyed by problem
        self._open: set[str] = set()
        # for each open problem: the number of its rollouts that have ended
        self._ended: Counter[str] = Counter()
        # the present activity of each rollout, keyed by the rollout's name
        self._stages: dict[str, Stage] = {}
        self._escalations = EscalationCounter()
        self._graded: dict[str, bool | None] = {}
        self._counts: Counter[str] = Counter()
        self._awaited: Counter[Role] = Counter()
        self._nominal: float | None = None
        self._flows: dict[Flow, _Throughput] = {flow: _Throughput() for flow in get_args(Flow)}
        # start time of each rollout in flight, keyed by the rollout's name
        self._since: dict[str, float] = {}
        self._most_in_flight = 1
        self._durations = _Durations()

    def recalled(self, event: Event) -> None:
        """Count an event of an earlier session. The speeds do not include it."""
        self.notify(event)

    def notify(self, event: Notice) -> None:
        """Count an event of this session."""
        match event:
            case CallBegun():
                self._stages[event.rollout] = event.stage
                self._since.setdefault(event.rollout, self._clock())
                self._most_in_flight = max(self._most_in_flight, len(self._since))
            case EngineAwaited():
                self._awaited[event.role] += event.more
            case Sampled():
                self._called(event.rollout, event.seconds, event.role, len(event.completion.ids))
            case Scored():
                self._called(event.rollout, event.seconds, "scored", len(event.scores.logprobs))
            case Decided() | Observed():
                self._decided(event)
            case TurnFinished():
                self._counts["rejected"] += len(event.turn.discarded)
            case RolloutSpan():
                self._rollout_ended(event)
            case RunBegun():
                self._run_begun(event)
            case ProblemStarted():
                self._open.add(event.problem.id)
            case Graded(sample=None):
                self._graded[event.problem] = (
                    None if event.status == "unscored" else event.status == "correct"
                )
            case RolloutFinished():
                self._rollout_finished(event)
            case OutcomeReached():
                self._problem_ended(event)
            case CallFailed():
                self._counts["failed calls"] += 1
                self._called(event.rollout, event.seconds)
            case Warned(code="context" | "speed"):
                self.warnings.append(event.text)
            case Warned(code="interrupted"):
                self._state = "draining"
                self._note = event.text
            case Drifted():
                self._counts["alarms"] += 1
            case _:
                pass

    def over(self) -> None:
        """Mark the run as ended."""
        self._state = "over"

    def snapshot(self) -> ProgressSnapshot:
        """Return a snapshot of the run's progress."""
        now = self._clock()
        begun = self._begun
        escalated, judged_chunks = self._escalations.totals
        verdicts = list(self._graded.values())
        stages = Counter(self._stages.values())
        return ProgressSnapshot(
            state=self._state,
            directory=begun.directory,
            judged_unit=begun.judged_unit,
            problems=begun.problems,
            done=len(self._over),
            failed=len(self._incomplete),
            lost=sum(map(len, self._lost.values())),
            open=len(self._open),
            stages={stage: stages[stage] for stage in get_args(Stage)},
            rollouts_done=sum(self._over.values()) + sum(self._ended.values()),
            accepted=judged_chunks - escalated,
            escalated=escalated,
            forced=self._counts["forced"],
            rejected=self._counts["rejected"],
            rate=self._escalations.rate,
            nominal=self._nominal,
            accuracy=accuracy_estimate(verdicts),
            graded=len(verdicts),
            tokens={flow: tokens.total for flow, tokens in self._flows.items()},
            usage=self._total_usage(),
            speeds={
                flow: tokens.per_second(now, self._began) for flow, tokens in self._flows.items()
            },
            models={"draft": begun.draft, "target": begun.target},
            seconds=begun.seconds + now - self._began,
            left=self._left(now),
            alarms=self._counts["alarms"],
            failed_calls=self._counts["failed calls"],
            awaited={role: count for role, count in self._awaited.items() if count},
            note=self._note,
        )

    def _total_usage(self) -> Usage:
        # Plain numbers are added faster than `Usage` objects. A snapshot is taken several times per
        # second, and a run may have tens of thousands of problems.
        usages = self._usage.values()
        return Usage(
            draft_tokens=sum([usage.draft_tokens for usage in usages]),
            target_tokens=sum([usage.target_tokens for usage in usages]),
        )

    def _left(self, now: float) -> float | None:
        """Estimate the remaining seconds of the run; return None while too few rollouts have ended.

        Rollouts in flight count as partly done work. If only ended rollouts counted, the first
        estimates would be many times too long, because at first many rollouts run and few have
        ended.
        """
        total = self._begun.problems
        durations = self._durations
        if total is None or self._state == "over" or not durations.ended:
            return None
        ages = [now - since for since in self._since.values()]
        unstarted = (total - len(self._over)) * self._rollouts_per_problem()
        unstarted = max(0.0, unstarted - sum(self._ended.values()) - len(ages))
        ended = durations.num_ended
        if ended < _ENOUGH * (ended + len(ages) + unstarted):
            return None
        residuals = durations.residuals(ages)
        places = max(len(ages), self._most_in_flight if unstarted else 1)
        work = sum(residuals) + unstarted * durations.mean(ages)
        return max(work / places, max(residuals, default=0.0))

    def _rollouts_per_problem(self) -> float:
        """Return the mean number of rollouts per finished problem, or the configured number if no
        problem is finished.
        """
        if not self._over:
            return self._begun.samples
        return sum(self._over.values()) / len(self._over)

    def _run_begun(self, event: RunBegun) -> None:
        """Start the measurements of speed and remaining time, because a session begins."""
        self._begun = event
        self._began = self._clock()
        self._flows = {flow: _Throughput(tokens.total) for flow, tokens in self._flows.items()}
        self._stages.clear()
        # open problems of an earlier session are replayed, so their ended rollouts are counted
        # again
        self._ended.clear()
        # A problem with a failed rollout runs again in this session, so it counts as open.
        self._open |= self._incomplete
        while self._incomplete:
            problem = self._incomplete.pop()
            del self._over[problem]
            del self._usage[problem]
        self._state = "running"
        self._note = ""
        self._since.clear()
        self._durations = _Durations()

    def _called(
        self, rollout: str, seconds: float, flow: Flow | None = None, tokens: int = 0
    ) -> None:
        if flow is not None:
            self._flows[flow].add(_Ended(self._clock(), tokens, seconds))
        if rollout in self._stages:
            self._stages[rollout] = "wait"

    def _decided(self, event: Decided | Observed) -> None:
        if isinstance(event, Decided) and not math.isnan(event.decision.rate):
            self._nominal = event.decision.rate
        for decision, is_escalated in judged(event):
            self._escalations.count(decision, is_escalated)
            self._counts["forced"] += is_escalated and decision.origin == "forced"

    def _rollout_ended(self, event: RolloutSpan) -> None:
        name = f"{event.problem}/{event.sample}"
        self._stages.pop(name, None)
        began = self._since.pop(name, None)
        if began is not None:
            self._durations.add(self._clock() - began)
        # A sample index above those of the rollouts belongs to the target's comparison of the
        # answers.
        is_rollout = event.sample < self._begun.samples
        if is_rollout and event.problem in self._open and event.status != "cancelled":
            self._ended[event.problem] += 1

    def _rollout_finished(self, event: RolloutFinished) -> None:
        if event.finish == "failed":
            self._lost.setdefault(event.problem, set()).add(event.sample)
        elif event.problem in self._lost:
            self._lost[event.problem].discard(event.sample)

    def _problem_ended(self, event: OutcomeReached) -> None:
        self._open.discard(event.problem)
        self._ended.pop(event.problem, None)
        self._over[event.problem] = len(event.samples)
        self._usage[event.problem] = event.usage
        is_complete = event.status != "failed" and not self._lost.get(event.problem)
        if is_complete:
            self._incomplete.discard(event.problem)
        else:
            self._incomplete.add(event.problem)
