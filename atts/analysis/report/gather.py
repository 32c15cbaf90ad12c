"""Reads a run directory once, keeping what reports are made from."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from atts.analysis.report.nodes import NodeClock, is_live
from atts.analysis.report.pages import Pages
from atts.core import Decision, Finish, Outcome, Problem, Role, Rollout, Turn, Usage, is_censored
from atts.errors import JournalError
from atts.journal import (
    FACTS,
    JOURNAL,
    MANIFEST,
    CallFailed,
    CallSpan,
    Decided,
    Drifted,
    Entry,
    Event,
    FinishedProblem,
    Manifest,
    Observed,
    ProblemSpan,
    ProblemStarted,
    RunState,
    SessionClosed,
    SessionOpened,
    Warned,
    load_manifest,
    read_entries,
)
from atts.journal.events import VerdictStatus

AUDIT = 4000
"""Steps of the gate that a report takes again; after them what was done is enough, where it is told."""
_FACTS = frozenset(FACTS)
_ANSWER_NEAR = 300  # characters at the end of a rollout in which an answer nobody extracted would stand


@dataclass(frozen=True, slots=True)
class Asked:
    """One step of the gate: it was asked for a decision, or told what was done."""

    step: Literal["decided", "observed"]
    decision: Decision
    escalated: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout, its texts let go."""

    sample: int
    finish: Finish
    answer: str | None
    verdict: VerdictStatus | None
    rule: str
    decisions: int
    escalated: int
    usage: Usage
    flags: tuple[str, ...]
    written: tuple[tuple[int, int], ...]  # tokens by the draft and by the target, turn by turn

    @property
    def is_censored(self) -> bool:
        """Nobody knows what it would have answered."""
        return is_censored(self.answer, self.finish)


@dataclass(frozen=True, slots=True)
class Solved:
    """One finished problem, its texts let go."""

    problem: Problem
    status: str
    answer: str | None
    why: str
    agreement: float
    usage: Usage
    verdict: VerdictStatus | None
    rule: str
    samples: tuple[Sample, ...]
    seconds: float | None = None


@dataclass(slots=True)
class Evidence:
    """What a run directory says; `solved` is in the order in which problems were started."""

    directory: Path
    manifest: Manifest
    pages: Pages
    solved: dict[str, Solved] = field(default_factory=dict[str, Solved])
    steps: list[Asked] = field(default_factory=list[Asked])
    nodes: list[CallSpan] = field(default_factory=list[CallSpan])
    warned: list[Warned] = field(default_factory=list[Warned])
    drifted: list[Drifted] = field(default_factory=list[Drifted])
    failed_calls: Counter[str] = field(default_factory=Counter[str])
    sessions: int = 0
    killed: int = 0  # sessions that ended without a word
    ended: SessionClosed | None = None
    seconds: float = 0.0
    parts: list[int] = field(default_factory=lambda: [0])  # where the steps of each merged run begin
    started: list[str] = field(default_factory=list[str])  # problems, in the order of the dataset

    @property
    def done(self) -> list[Asked]:
        """What was done with every chunk a gate decided on, in order; decisions where nobody was told."""
        observed = [step for step in self.steps if step.step == "observed"]
        return observed or [step for step in self.steps if step.step == "decided"]


def gather(directory: Path, page_bytes: int) -> Evidence:
    """Read the journal of a run, alive or over; `page_bytes` is the most that the pages of all problems may take.

    :raises JournalError: there is none, or it cannot be read.
    """
    manifest = load_manifest(directory / MANIFEST)
    if manifest is None or not (directory / JOURNAL).exists():
        raise JournalError(directory, "there is no run here", "Give the directory of `atts eval --out DIRECTORY`")
    evidence = Evidence(directory, manifest, Pages(page_bytes, manifest.problems or 0))
    reading = _Reading(evidence)
    for entry in read_entries(directory / JOURNAL, kinds=reading.wanted, plain=reading.plain):
        reading.take(entry)
    return reading.close()


class _Reading:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._state = RunState()
        self._clock = NodeClock()
        self._firsts = set(_first_sessions(evidence.manifest))
        self._seconds: dict[str, float] = {}
        self._takers: dict[type[Event], Callable[[Any, float], None]] = {
            SessionOpened: self._opened,
            ProblemStarted: lambda event, _: evidence.started.append(event.problem.id),
            Decided: self._decided,
            CallFailed: lambda event, _: evidence.failed_calls.update((event.error,)),
            Warned: lambda event, _: evidence.warned.append(event),
            Drifted: lambda event, _: evidence.drifted.append(event),
            ProblemSpan: lambda event, _: self._seconds.update({event.problem: event.ended - event.started}),
        }
        # there are more of these than of all else together: no event is made of them, their fields will do
        self.plain: dict[type[Event], Callable[[float, Mapping[str, Any]], None]] = {
            CallSpan: self._node,
            Observed: self._observed,
        }
        self.wanted = {*FACTS, *self._takers, *self.plain}

    def take(self, entry: Entry) -> None:
        """One entry, in order; the state hears of facts only, for all the rest costs time and changes no outcome."""
        event = entry.event
        kind = type(event)
        self._clock.hear(entry)
        taker = self._takers.get(kind)
        if taker is not None:
            taker(event, entry.at)
        if kind in _FACTS:
            outcome = self._state.apply(entry)
            if outcome is not None:
                self._solved(outcome)

    def _opened(self, event: SessionOpened, at: float) -> None:
        found = self._evidence
        found.killed += found.sessions > 0 and self._state.ended is None
        found.sessions += 1
        if event.session in self._firsts:
            found.parts.append(len(found.steps))

    def _node(self, at: float, line: Mapping[str, Any]) -> None:
        self._clock.tick(at)
        if is_live(line) and line.get("status") != "cancelled":
            self._evidence.nodes.append(self._clock.node(at, line))

    def _decided(self, event: Decided, at: float) -> None:
        if event.decision.action != "verify":
            self._evidence.steps.append(Asked("decided", event.decision, event.decision.escalate))

    def _observed(self, at: float, line: Mapping[str, Any]) -> None:
        self._clock.tick(at)
        steps = self._evidence.steps
        steps.append(Asked("observed", line["decision"], line["escalated"]))
        if len(steps) >= AUDIT:
            self.wanted.discard(Decided)

    def close(self) -> Evidence:
        """What was found, later verdicts taken in."""
        found, state = self._evidence, self._state
        found.ended, found.seconds = state.ended, self._clock.seconds
        found.solved = {
            name: replace(_graded(found.solved[name], state.finished[name]), seconds=self._seconds.get(name))
            for name in found.started
            if name in found.solved
        }
        return found

    def _solved(self, outcome: Outcome) -> None:
        brief = self._state.finished[outcome.problem.id]
        votes = list(outcome.votes.values())
        solved = Solved(
            outcome.problem,
            outcome.status,
            outcome.answer,
            outcome.why,
            max(votes) / math.fsum(votes) if votes and math.fsum(votes) else 0.0,
            outcome.usage,
            None,
            "",
            tuple(_sample(rollout, outcome.problem) for rollout in outcome.rollouts),
        )
        self._evidence.solved[outcome.problem.id] = solved = _graded(solved, brief)
        self._evidence.pages.add(outcome, {line.sample: line.flags for line in solved.samples}, brief)


def _first_sessions(manifest: Manifest) -> Iterator[int]:
    """The session with which each merged run but the first begins."""
    held = manifest.configuration.get("merged")
    merged: Any = held.value if held is not None else ()
    session = 1
    for part in merged[:-1]:
        session += int(part["sessions"])
        yield session


def _graded(solved: Solved, brief: FinishedProblem) -> Solved:
    samples = tuple(
        replace(line, verdict=one.verdict, rule=one.rule)
        for line, one in zip(solved.samples, brief.samples, strict=True)
    )
    return replace(solved, samples=samples, verdict=brief.verdict, rule=brief.rule)


def _sample(rollout: Rollout, problem: Problem) -> Sample:
    decisions = [turn.decision for turn in rollout.turns if turn.decision is not None]
    return Sample(
        rollout.sample,
        rollout.finish or "cancelled",
        rollout.answer,
        None,
        "",
        len(decisions),
        sum(decision.escalate for decision in decisions),
        rollout.usage,
        tuple(_flags(rollout, problem, decisions)),
        tuple((_written(turn, "draft"), _written(turn, "target")) for turn in rollout.turns),
    )


def _written(turn: Turn, author: Role) -> int:
    """Tokens this model wrote in the turn, discarded ones included."""
    return sum(len(chunk.logprobs) for chunk in (*turn.discarded, *turn.chunks) if chunk.author == author)


def _flags(rollout: Rollout, problem: Problem, decisions: Sequence[Decision]) -> Iterable[str]:
    """What a reader should know of this rollout before believing its answer."""
    if rollout.finish in ("turns", "tokens"):
        yield f"{rollout.finish[:-1]} cap"
    if rollout.finish == "failed":
        yield "failed"
    if any(decision.origin == "forced" for decision in decisions):
        yield "forced"
    if any(decision.score is not None and math.isinf(decision.score) for decision in decisions):
        yield "infinite score"
    if rollout.answer is None and rollout.finish not in ("settled", "cancelled", "failed"):
        tail = rollout.text[-_ANSWER_NEAR:]
        yield "cut box" if re.search(r"\\boxed\s*\{[^{}]*$", tail) else "no answer"
        if problem.answer and re.search(rf"(?<![\w.]){re.escape(problem.answer)}(?!\w)", tail):
            yield "reference in text"
