"""Doubly robust estimate: the worth of another policy's rollouts, from a run that left some to
chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atts.evaluators import Estimate
from atts.sampling import student_quantile

_FOLDS = 2
_PRIOR = 4.0  # rollouts by which a rare kind of turn leans to the average


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """One decision of a rollout: what was done, how likely that was, and what the other policy does
    there.
    """

    turn: int
    escalated: bool
    propensity: float  # of what was done, by the run's own chance
    wanted: bool  # whether the other policy escalates


@dataclass(frozen=True, slots=True)
class LoggedRollout:
    """The decisions of a rollout in order, and whether its answer was right."""

    problem: str
    turns: Sequence[LoggedTurn]
    right: float


@dataclass(frozen=True, slots=True)
class Valued:
    """The estimate, how many rollouts as drawn by the other policy it is worth, and what it leaves
    out.
    """

    accuracy: Estimate  # of single rollouts
    effective: float
    rollouts: int


def doubly_robust(rollouts: Iterable[LoggedRollout], level: float = 0.95) -> Valued | None:
    """The share of right rollouts under the other policy; None without rollouts of two problems.

    What was not done is filled in by a model (the share of right rollouts after such a decision at
    that turn, in the other half of the problems), and its errors are made good by the rollouts that
    happened to do as the other policy does, each weighed by the inverse of how likely that was.
    Either the model or the likelihoods may be wrong, and the estimate still has no bias; they are
    the run's own, so they are right. The interval is Student's t over problems, with one as rare as
    the rarest added: large weights are rare, and those that did not come are missing.
    """
    by_problem: dict[str, list[LoggedRollout]] = defaultdict(list)
    for rollout in rollouts:
        by_problem[rollout.problem].append(rollout)
    names = sorted(by_problem)
    if len(names) < 2:
        return None
    folds = [names[fold::_FOLDS] for fold in range(_FOLDS)]
    values = list[float]()
    weights = list[float]()
    for fold, held in enumerate(folds):
        others = [
            one
            for number, part in enumerate(folds)
            if number != fold
            for name in part
            for one in by_problem[name]
        ]
        model = _shares(others)
        for name in held:
            found = [_value(one, model) for one in by_problem[name]]
            values.append(math.fsum(value for value, _ in found) / len(found))
            weights.extend(weight for _, weight in found)
    mean = float(np.mean(values))
    count = len(values)
    squares = (np.array(values) - mean) ** 2
    # one more problem as rare as the rarest
    variance = float(squares.sum() + squares.max()) / (count - 1)
    half = student_quantile((1 + level) / 2, count - 1) * math.sqrt(variance / count)
    total = math.fsum(weights)
    effective = total**2 / math.fsum(weight**2 for weight in weights) if total else 0.0
    ends = max(0.0, mean - half), min(1.0, mean + half)
    return Valued(
        Estimate(mean, *ends, count, len(weights), "doubly robust", level=level),
        effective,
        len(weights),
    )


def _shares(rollouts: Sequence[LoggedRollout]) -> Mapping[tuple[int, bool], float]:
    """By turn and action, the share of right rollouts; where there is none, the share of all."""
    average = math.fsum(one.right for one in rollouts) / max(1, len(rollouts))
    seen: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for one in rollouts:
        for turn in one.turns:
            seen[turn.turn, turn.escalated].append(one.right)
    found = defaultdict[tuple[int, bool], float](lambda: average)
    found.update(
        {key: (math.fsum(v) + _PRIOR * average) / (len(v) + _PRIOR) for key, v in seen.items()}
    )
    return found


def _value(rollout: LoggedRollout, model: Mapping[tuple[int, bool], float]) -> tuple[float, float]:
    """The rollout's contribution, and its weight once all its decisions are those of the other
    policy.
    """
    if not rollout.turns:
        return rollout.right, 1.0
    value = 0.0
    weight = 1.0
    for turn in rollout.turns:
        value += weight * model[turn.turn, turn.wanted]
        weight *= (turn.escalated == turn.wanted) / turn.propensity
        value -= weight * model[turn.turn, turn.escalated]
    return value + weight * rollout.right, weight
