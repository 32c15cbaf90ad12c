"""How far a run is: one listener that adds up its events, and a frozen picture of the sums at any moment."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from atts.evaluators import Estimate, mean_estimate
from atts.journal import (
    CallFailed,
    Decided,
    Drifted,
    Event,
    Graded,
    Observed,
    OutcomeReached,
    ProblemStarted,
    RolloutSpan,
    Sampled,
    Scored,
    TurnFinished,
    Warned,
    judged,
)
from atts.run.handed import Handed
from atts.run.recorder import CallBegun, Heard, RunBegun

Stage = Literal["draft", "score", "target", "wait"]
"""What a rollout is at: its draft writes, the target judges, the target writes, or it waits for an engine."""
Flow = Literal["draft", "target", "scored"]
"""Tokens per second are counted of: what the draft writes, what the target writes, what it scores."""
WINDOW_SECONDS = 15.0
_ENOUGH = 0.01  # the part of the work that must be done before the rest is foretold


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment; counts are of all sessions, speeds and the time left of this one.

    `rate` is the share of chunks handed over, clustered by problem; `accuracy` that of votes. Both have intervals that
    hold at a moment fixed beforehand, not at every look.
    """

    state: Literal["running", "draining", "over"]
    directory: Path | None
    problems: int | None  # None: they stream in
    done: int
    failed: int
    open: int
    stages: Mapping[Stage, int]
    rollouts_done: int
    accepted: int
    escalated: int
    forced: int  # of the escalated: without a score to go by
    rejected: int  # chunks that were thrown away
    rate: Estimate
    nominal: float | None
    accuracy: Estimate
    graded: int
    tokens: Mapping[Flow, int]
    speeds: Mapping[Flow, float]  # tokens per second, lately
    models: Mapping[Literal["draft", "target"], str]
    seconds: float  # all sessions together
    left: float | None  # seconds, once enough is done to tell
    alarms: int
    failed_calls: int
    note: str = ""

    @property
    def target_share(self) -> float:
        """The target's part of all tokens written."""
        written = self.tokens["draft"] + self.tokens["target"]
        return self.tokens["target"] / written if written else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        found = asdict(replace(self, stages=dict(self.stages), tokens=dict(self.tokens), speeds=dict(self.speeds)))
        rates = {"rate": self.rate.as_json(), "accuracy": self.accuracy.as_json()}
        directory = None if self.directory is None else str(self.directory)
        return {**found, **rates, "directory": directory, "target_share": self.target_share}


@dataclass(slots=True)
class _Speed:
    """Amounts of the last seconds."""

    recent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    amount: int = 0

    def add(self, now: float, amount: int) -> None:
        self.recent.append((now, amount))
        self.amount += amount

    def per_second(self, now: float, since: float) -> float:
        while self.recent and self.recent[0][0] < now - WINDOW_SECONDS:
            self.amount -= self.recent.popleft()[1]
        return self.amount / max(1.0, min(WINDOW_SECONDS, now - since))


class Progress:
    """A listener (`atts.run.Listener`) that knows how far the run is; `snapshot` says it at any time.

    Events cost it a dictionary look-up and an addition; intervals are computed when somebody looks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._begun = RunBegun(None, 0, 1, 0.0, "", "", None)
        self._state: Literal["running", "draining", "over"] = "running"
        self._note = ""
        self._statuses: dict[str, str] = {}
        self._open: set[str] = set()
        self._ended: Counter[str] = Counter()  # rollouts of open problems
        self._rollouts_before = 0  # of problems that are over
        self._at: dict[str, Stage] = {}  # by rollout
        self._handed = Handed()
        self._graded: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._nominal: float | None = None
        self._tokens: dict[Flow, int] = dict.fromkeys(get_args(Flow), 0)
        self._speeds: dict[Flow, _Speed] = {flow: _Speed() for flow in self._tokens}
        self._done_at_start = 0.0
        self._takes: Mapping[type[Any], Callable[[Any], None]] = {
            RunBegun: self._run_begun, CallBegun: self._call_begun, ProblemStarted: self._problem_started,
            Sampled: self._sampled, Scored: self._scored, CallFailed: self._call_failed, Decided: self._decided,
            Observed: self._judged, TurnFinished: self._turn,
            RolloutSpan: self._rollout_timed, Graded: self._verdict, OutcomeReached: self._outcome,
            Warned: self._warned, Drifted: self._drifted,
        }  # fmt: skip

    def recalled(self, event: Event) -> None:
        """What an earlier session did counts; how fast it did it does not."""
        self.heard(event)

    def heard(self, event: Heard) -> None:
        """Take an event in."""
        take = self._takes.get(type(event))
        if take is not None:
            take(event)

    def over(self) -> None:
        """Nothing more will come."""
        self._state = "over"

    def snapshot(self) -> Snapshot:
        """The run as it stands."""
        now, begun = self._clock(), self._begun
        escalated, asked = self._handed.totals
        verdicts = list(self._graded.values())
        stages = Counter(self._at.values())
        return Snapshot(
            self._state,
            begun.directory,
            begun.problems,
            len(self._statuses),
            sum(status == "failed" for status in self._statuses.values()),
            len(self._open),
            {stage: stages[stage] for stage in get_args(Stage)},
            self._rollouts_before + sum(self._ended.values()),
            asked - escalated,
            escalated,
            self._counts["forced"],
            self._counts["rejected"],
            self._handed.rate,
            self._nominal,
            mean_estimate(verdicts, len(verdicts)),
            len(verdicts),
            dict(self._tokens),
            {flow: speed.per_second(now, self._began) for flow, speed in self._speeds.items()},
            {"draft": begun.draft, "target": begun.target},
            begun.seconds + now - self._began,
            self._left(now),
            self._counts["alarms"],
            self._counts["failed calls"],
            self._note,
        )

    def _done(self) -> float:
        """Problems, open ones by the share of their rollouts that ended."""
        samples = max(1, self._begun.samples)
        return len(self._statuses) + sum(min(1.0, ended / samples) for ended in self._ended.values())

    def _left(self, now: float) -> float | None:
        total = self._begun.problems
        done = self._done() - self._done_at_start
        if total is None or self._state == "over" or done < max(0.5, _ENOUGH * (total - self._done_at_start)):
            return None
        return (total - self._done()) * (now - self._began) / done

    def _run_begun(self, event: RunBegun) -> None:
        """Speeds and the time left are of what happens from here on."""
        self._begun, self._began = event, self._clock()
        self._speeds = {flow: _Speed() for flow in self._tokens}
        self._at.clear()
        self._ended.clear()  # open problems are lived through again
        self._state, self._note = "running", ""
        self._done_at_start = self._done()

    def _call_begun(self, event: CallBegun) -> None:
        self._at[event.rollout] = event.stage

    def _problem_started(self, event: ProblemStarted) -> None:
        self._open.add(event.problem.id)

    def _sampled(self, event: Sampled) -> None:
        self._flow(event.role, len(event.completion.ids))
        self._wait(event.rollout)

    def _scored(self, event: Scored) -> None:
        self._flow("scored", len(event.scores.logprobs))
        self._wait(event.rollout)

    def _call_failed(self, event: CallFailed) -> None:
        self._counts["failed calls"] += 1
        self._wait(event.rollout)

    def _wait(self, rollout: str) -> None:
        if rollout in self._at:
            self._at[rollout] = "wait"

    def _flow(self, flow: Flow, amount: int) -> None:
        self._tokens[flow] += amount
        self._speeds[flow].add(self._clock(), amount)

    def _decided(self, event: Decided) -> None:
        if event.decision.rate == event.decision.rate:  # not nan
            self._nominal = event.decision.rate
        self._judged(event)

    def _judged(self, event: Decided | Observed) -> None:
        self._handed.heard(event)
        for decision, was_handed in judged(event):
            self._counts["forced"] += was_handed and decision.origin == "forced"

    def _turn(self, event: TurnFinished) -> None:
        self._counts["rejected"] += len(event.turn.discarded)

    def _rollout_timed(self, event: RolloutSpan) -> None:
        self._at.pop(f"{event.problem}/{event.sample}", None)
        if event.problem in self._open and event.status != "cancelled":
            self._ended[event.problem] += 1

    def _verdict(self, event: Graded) -> None:
        if event.sample is None and event.status != "unscored":
            self._graded[event.problem] = float(event.status == "correct")

    def _outcome(self, event: OutcomeReached) -> None:
        self._open.discard(event.problem)
        self._ended.pop(event.problem, None)
        self._rollouts_before += len(event.samples)
        self._statuses[event.problem] = event.status

    def _warned(self, event: Warned) -> None:
        if event.code == "interrupted":
            self._state, self._note = "draining", event.text

    def _drifted(self, event: Drifted) -> None:
        self._counts["alarms"] += 1
