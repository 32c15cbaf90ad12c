"""Reads of a run what plans are made from: every rollout turn by turn, every call's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atts.core import Outcome, Role, Turn, is_censored
from atts.errors import JournalError, UsageError
from atts.evaluators import group
from atts.journal import (
    JOURNAL,
    MANIFEST,
    CallSpan,
    Decided,
    FinishedProblem,
    Manifest,
    Place,
    RunState,
    load_manifest,
    read_entries,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what it took. `seconds` from the call being possible to its end, its queue at the engines included."""

    draft_tokens: int
    target_tokens: int
    scored_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """One rollout that ran to its end; `label` is the class of its answer, None without one."""

    sample: int
    steps: tuple[Step, ...]
    label: Hashable | None
    right: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One graded problem."""

    problem: str
    lines: tuple[Line, ...]
    vote: float


@dataclass(slots=True)
class Record:
    """One run."""

    directory: Path
    manifest: Manifest
    cases: list[Case] = field(default_factory=list[Case])
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    order: list[Place] = field(default_factory=list[Place])
    told: dict[Place, Mapping[str, float]] = field(default_factory=dict[Place, Mapping[str, float]])
    nodes: list[tuple[int, CallSpan]] = field(default_factory=list[tuple[int, CallSpan]])  # with their session
    spared: int = 0  # rollouts that settled votes ended
    written: tuple[int, int] = (0, 0)  # tokens by draft and target, spared rollouts included

    @property
    def method(self) -> str:
        """What was run."""
        return str(self.setting("method") or "?")

    @property
    def rate(self) -> float:
        """What was asked for."""
        value = self.setting("rate")
        return float(value) if isinstance(value, int | float) else float("nan")

    def setting(self, name: str) -> Any:
        """A value of the configuration, None where the run has none of that name."""
        held = self.manifest.configuration.get(name)
        return held.value if held else None

    def policy(self, *path: str) -> Any:
        """A value of the policy that was run."""
        value: Any = self.setting("policy")
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def read_record(directory: Path) -> Record:
    """A run directory, finished or not.

    :raises JournalError: it holds no run, or one that cannot be read.
    :raises UsageError: none of its problems is over and graded.
    """
    manifest = load_manifest(directory / MANIFEST)
    if manifest is None or not (directory / JOURNAL).exists():
        raise JournalError(directory, "there is no run here", "Give the directory of `atts eval --out DIRECTORY`")
    record, state = Record(directory, manifest), RunState()
    seconds: dict[Place, float] = defaultdict(float)
    for entry in read_entries(directory / JOURNAL):
        event = entry.event
        outcome = state.apply(entry)
        if outcome is not None and outcome.status != "failed":
            record.outcomes.append(outcome)
        if isinstance(event, CallSpan) and event.source == "live" and event.status == "done":
            record.nodes.append((entry.session, event))
            seconds[event.problem, event.sample, event.turn] += event.ended - event.ready
        elif isinstance(event, Decided) and event.decision.action != "verify":
            place = (event.decision.question, event.decision.sample, event.decision.turn)
            record.order.append(place)
            record.told[place] = event.features
    for outcome in record.outcomes:
        _take(record, outcome, state.finished[outcome.problem.id], seconds)
    if not record.cases:
        raise UsageError(
            f"{directory}: no problem is over and graded, so there is nothing to plan from; run some first"
        )
    return record


def _take(record: Record, outcome: Outcome, brief: FinishedProblem, seconds: Mapping[Place, float]) -> None:
    """A problem with at least one rollout that ran to its end."""
    verdicts = {one.sample: one.verdict for one in brief.samples}
    usage = outcome.usage
    record.written = (record.written[0] + usage.draft_tokens, record.written[1] + usage.target_tokens)
    if brief.verdict is None:
        return
    ended = [rollout for rollout in outcome.rollouts if not is_censored(rollout.answer, rollout.finish)]
    record.spared += len(outcome.rollouts) - len(ended)
    texts = list(dict.fromkeys(rollout.answer for rollout in ended if rollout.answer is not None))
    classes = dict(zip(texts, group(texts, outcome.problem.kind), strict=True))
    lines = [
        Line(
            rollout.sample,
            tuple(
                _step(turn, seconds.get((rollout.problem, rollout.sample, turn.index), 0.0)) for turn in rollout.turns
            ),
            None if rollout.answer is None else classes[rollout.answer],
            verdicts.get(rollout.sample) == "correct",
        )
        for rollout in ended
    ]
    if lines:
        record.cases.append(Case(outcome.problem.id, tuple(lines), float(brief.is_correct)))


def _step(turn: Turn, seconds: float) -> Step:
    scored = 0
    if turn.score is not None:
        drafted = [chunk for chunk in (*turn.discarded, *turn.chunks) if chunk.author == "draft"]
        scored = len(drafted[0].target_ids) if drafted else 0
    return Step(_written(turn, "draft"), _written(turn, "target"), scored, seconds)


def _written(turn: Turn, author: Role) -> int:
    return sum(len(chunk.logprobs) for chunk in (*turn.discarded, *turn.chunks) if chunk.author == author)
