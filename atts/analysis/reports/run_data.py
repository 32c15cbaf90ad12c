"""Read all data that a report needs from a run's journal in one pass."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from atts.analysis.reports.pages import Pages
from atts.analysis.steps import GateStep, StepLog, Steps
from atts.core import Decision, Outcome, Problem, Rollout
from atts.journal import (
    FACTS,
    CallFailed,
    CallSpan,
    Decided,
    Drifted,
    Entry,
    Event,
    FinishedProblem,
    FinishedSample,
    Observed,
    ProblemSpan,
    ProblemStarted,
    RecordedRun,
    RunState,
    SessionOpened,
    Warned,
    open_run,
)

AUDIT = 4000
"""The number of the gate's steps that a report takes again; later steps are used as recorded."""
TIMED = 100_000
"""The number of calls whose times a report analyses; more would fill the memory."""
_KINDS: tuple[type[Event], ...] = (
    *FACTS, Decided, Observed, CallSpan, ProblemSpan, CallFailed, Warned, Drifted,
)  # fmt: skip
# characters at the end of a rollout that are searched for an answer that was not extracted
_TAIL = 300


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """One rollout without its texts."""

    brief: FinishedSample
    decisions: int
    escalated: int
    tokens: int  # written by both models
    target_tokens: int  # tokens of the rollout that the target wrote
    flags: tuple[str, ...]
    # the tokens that each turn added, by the draft and by the target; plain numbers, because a
    # report holds all turns of a run
    drafted_by_turn: array[int]
    target_by_turn: array[int]

    @property
    def turns(self) -> int:
        """Return the number of turns."""
        return len(self.drafted_by_turn)


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """One finished problem without its texts."""

    problem: Problem
    brief: FinishedProblem
    rollouts: tuple[RolloutFacts, ...]

    def graded(self, brief: FinishedProblem) -> ProblemFacts:
        """Return the rollouts with the verdicts of later sessions."""
        rollouts = tuple(
            replace(rollout, brief=sample)
            for rollout, sample in zip(self.rollouts, brief.samples, strict=True)
        )
        return replace(self, brief=brief, rollouts=rollouts)


@dataclass(slots=True)
class RunData:
    """The contents of a run directory; `problems` are the finished ones, in the order in which they
    started.
    """

    run: RecordedRun
    pages: Pages
    problems: dict[str, ProblemFacts] = field(default_factory=dict[str, ProblemFacts])
    steps: StepLog = field(default_factory=StepLog)
    nodes: list[CallSpan] = field(default_factory=list[CallSpan])  # the first `TIMED` calls
    calls: int = 0
    warned: list[Warned] = field(default_factory=list[Warned])
    drifted: list[Drifted] = field(default_factory=list[Drifted])
    failed_calls: Counter[str] = field(default_factory=Counter[str])
    # indices at which the steps of each merged run begin
    parts: list[int] = field(default_factory=lambda: [0])
    state: RunState = field(default_factory=RunState)

    @property
    def done(self) -> Steps:
        """Return the action on every judged chunk, in order."""
        return self.steps.of_kind("observed") or self.steps.of_kind("decided")

    def take(self, entry: Entry) -> None:
        """Add the next entry of the journal."""
        outcome = self.state.apply(entry)
        match entry.event:
            case SessionOpened(session=session) if session in self.run.part_starts:
                self.parts.append(len(self.steps))
            case Decided(decision, features) if decision.action != "verify":
                self.steps.append(
                    GateStep("decided", decision, decision.escalate, features.get("left"))
                )
            case Observed(decision, escalated):
                self.steps.append(GateStep("observed", decision, escalated))
            case CallSpan(source="live", status="done" | "failed") as node:
                self.calls += 1
                if self.calls <= TIMED:
                    self.nodes.append(self.state.clock.aligned(node, entry.at))
            case CallFailed(error=error):
                self.failed_calls[error] += 1
            case Warned() as warned:
                self.warned.append(warned)
            case Drifted() as drifted:
                self.drifted.append(drifted)
            case _:
                pass
        if outcome is not None:
            self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        brief = self.state.finished[outcome.problem.id]
        rollouts = tuple(
            _rollout(rollout, sample, outcome.problem)
            for rollout, sample in zip(outcome.rollouts, brief.samples, strict=True)
        )
        self.problems[outcome.problem.id] = ProblemFacts(outcome.problem, brief, rollouts)
        self.pages.add(
            outcome, {rollout.brief.sample: rollout.flags for rollout in rollouts}, brief
        )


def read_run_data(directory: Path, page_bytes: int) -> RunData:
    """Read the journal of a run, finished or not; `page_bytes` is the most bytes for the pages of
    all problems.

    :raises JournalError: there is none, or it cannot be read.
    """
    run = open_run(directory)
    data = RunData(run, Pages(page_bytes, run.manifest.problems or 0))
    kinds = set(_KINDS)
    started = list[str]()
    for entry in run.entries(kinds):
        data.take(entry)
        if isinstance(entry.event, ProblemStarted):
            started.append(entry.event.problem.id)
        elif isinstance(entry.event, Observed) and len(data.steps) >= AUDIT:
            kinds.discard(Decided)
    finished = data.state.finished
    data.problems = {
        name: data.problems[name].graded(finished[name]) for name in started if name in finished
    }
    return data


def _rollout(rollout: Rollout, brief: FinishedSample, problem: Problem) -> RolloutFacts:
    decisions = [turn.decision for turn in rollout.turns if turn.decision is not None]
    return RolloutFacts(
        brief,
        len(decisions),
        sum(decision.escalate for decision in decisions),
        tokens=rollout.usage.draft_tokens + rollout.usage.target_tokens,
        target_tokens=rollout.usage.target_tokens,
        flags=tuple(_flags(rollout, problem, decisions)),
        drafted_by_turn=array("I", (turn.tokens_written("draft") for turn in rollout.turns)),
        target_by_turn=array("I", (turn.tokens_written("target") for turn in rollout.turns)),
    )


def _flags(rollout: Rollout, problem: Problem, decisions: Sequence[Decision]) -> Iterable[str]:
    """Return the flags of a rollout that a reader should know before believing its answer."""
    if rollout.finish == "failed":
        yield "failed"
    if rollout.is_fallback_answer:
        yield "fallback answer"
    if any(decision.origin == "forced" for decision in decisions):
        yield "forced"
    if any(decision.score is not None and math.isinf(decision.score) for decision in decisions):
        yield "infinite score"
    if rollout.answer is None and rollout.finish not in ("settled", "cancelled", "failed"):
        tail = rollout.text[-_TAIL:]
        yield "cut" if rollout.finish in ("turns", "tokens") else "no answer"
        if problem.answer and re.search(rf"(?<![\w.]){re.escape(problem.answer)}(?!\w)", tail):
            yield "reference in text"
