"""The recorded runs that plans are made from: every complete rollout turn by turn, every call's
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from atts.analysis.turns import tokens_written
from atts.core import Outcome, Turn, TurnKey, Usage
from atts.errors import UsageError
from atts.evaluators import answer_classes, group
from atts.journal import CallSpan, Decided, FinishedProblem, RecordedRun, RunState, open_run


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What one turn took. `seconds` from the call being possible to its end, its queue at the
    engines included.
    """

    draft_tokens: int
    target_tokens: int
    scored_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CompleteRollout:
    """One rollout that ran to its end; `label` is the class of its answer, None without one."""

    sample: int
    turns: tuple[TurnCost, ...]
    label: Hashable | None
    is_right: bool | None  # None where that could not be told


@dataclass(frozen=True, slots=True)
class GradedCase:
    """One graded problem with the rollouts of it that ran to their end."""

    problem: str
    rollouts: tuple[CompleteRollout, ...]
    vote: float


@dataclass(slots=True)
class PlanData:
    """One run, finished or not."""

    run: RecordedRun
    cases: list[GradedCase] = field(default_factory=list[GradedCase])
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    # in the order of deciding
    decided: dict[TurnKey, Decided] = field(default_factory=dict[TurnKey, Decided])
    # that did work, on the run's clock
    nodes: list[CallSpan] = field(default_factory=list[CallSpan])
    censored: int = 0  # rollouts that settled votes ended
    usage: Usage = Usage()  # censored rollouts included

    @property
    def method(self) -> str:
        """What was run."""
        return str(self.run.setting("method") or "?")

    @property
    def rate(self) -> float:
        """What was asked for."""
        value = self.run.setting("rate")
        return float(value) if isinstance(value, int | float) else float("nan")


def read_plan_data(directory: Path) -> PlanData:
    """A run directory, finished or not.

    :raises JournalError: it holds no run, or one that cannot be read.
    :raises UsageError: none of its problems is over and graded.
    """
    data = PlanData(open_run(directory))
    state = RunState()
    seconds: dict[TurnKey, float] = defaultdict(float)
    for entry in data.run.entries():
        outcome = state.apply(entry)
        if outcome is not None and outcome.is_complete:
            data.outcomes.append(outcome)
        match entry.event:
            case CallSpan(source="live", status="done") as node:
                data.nodes.append(state.clock.aligned(node, entry.at))
                seconds[node.problem, node.sample, node.turn] += node.ended - node.ready
            case Decided(decision) as decided if decision.action != "verify":
                data.decided[decision.turn_key] = decided
            case _:
                pass
    for outcome in data.outcomes:
        data.usage += outcome.usage
        _add_case(data, outcome, state.finished[outcome.problem.id], seconds)
    if not data.cases:
        raise UsageError(
            f"{directory}: no problem is over and graded, so there is nothing to plan from; run "
            f"some first"
        )
    return data


def _add_case(
    data: PlanData, outcome: Outcome, brief: FinishedProblem, seconds: Mapping[TurnKey, float]
) -> None:
    """Take in a graded problem with at least one rollout that ran to its end."""
    if brief.verdict is None:
        return
    complete = brief.complete_samples
    data.censored += len(brief.samples) - len(complete)
    turns = {rollout.sample: rollout.turns for rollout in outcome.rollouts}
    labels = answer_classes(
        [one.answer for one in complete], partial(group, kind=outcome.problem.kind)
    )
    rollouts = tuple(
        CompleteRollout(
            one.sample,
            _costs(brief.problem, one.sample, turns[one.sample], seconds),
            label,
            None if one.verdict == "unscored" else one.verdict == "correct",
        )
        for one, label in zip(complete, labels, strict=True)
    )
    if rollouts:
        data.cases.append(GradedCase(brief.problem, rollouts, float(brief.is_correct)))


def _costs(
    problem: str, sample: int, turns: Sequence[Turn], seconds: Mapping[TurnKey, float]
) -> tuple[TurnCost, ...]:
    return tuple(
        TurnCost(
            tokens_written(turn, "draft"),
            tokens_written(turn, "target"),
            scored_tokens=turn.scored_tokens,
            seconds=seconds.get((problem, sample, turn.index), 0.0),
        )
        for turn in turns
    )
