"""Rates that were not run: their estimated cost, and bounds on their accuracy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from atts.analysis.plan.plan_data import GradedCase, PlanData
from atts.analysis.policy_replay import ReplayedProblem, replay_policy
from atts.analysis.recorded_gate import fresh_calibrator
from atts.calibration import Mode
from atts.pipelines import ConformalGate, Policy

RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class UntriedRate:
    """A rate that was not run: the gate decides again on the recorded scores.

    Rollouts in which it decides as recorded are known; what the others would have answered is not.
    `low` is the vote's accuracy if each of them were wrong in the same way, `high` if each were
    right. The target's tokens assume that it writes as much per takeover as it did.
    """

    rate: float
    realised: float
    off_policy: float  # the share of rollouts whose end is unknown
    low: float
    high: float
    target_tokens: float  # per problem


def untried_rates(data: PlanData, rates: Sequence[float] = RATES) -> tuple[UntriedRate, ...]:
    """Bounds for each rate; none where the run's gate was not the conformal one."""
    if data.run.setting("gate") != "ConformalGate" or data.method != "atts":
        return ()
    turns = [
        turn for outcome in data.outcomes for rollout in outcome.rollouts for turn in rollout.turns
    ]
    decisions = [turn.decision for turn in turns if turn.decision is not None]
    escalated = sum(decision.escalate for decision in decisions)
    if not escalated:
        return ()
    tokens = data.usage.target_tokens / escalated * len(decisions) / len(data.outcomes)
    return tuple(
        _untried(data, rate, tokens) for rate in rates if not math.isclose(rate, data.rate)
    )


def _untried(data: PlanData, rate: float, target_tokens: float) -> UntriedRate:
    """One rate; `target_tokens` are those of a problem whose every chunk escalates."""
    mode: Mode = data.run.setting("mode") or "question-turn"
    samples = max((len(outcome.rollouts) for outcome in data.outcomes), default=1)
    gate = ConformalGate(fresh_calibrator(data.run, rate, mode))
    policy = Policy(samples=samples, turns=max(1, data.run.policy.get("turns") or 1))
    done = replay_policy(data.outcomes, gate, policy, _apart, decided=data.decided)
    cases = {case.problem: case for case in data.cases}
    bounds = [_bounds(one, cases[one.problem]) for one in done.problems if one.problem in cases]
    low, high = (math.fsum(pair[end] for pair in bounds) / len(bounds) for end in (0, 1))
    return UntriedRate(rate, done.rate, done.off_policy, low, high, done.rate * target_tokens)


def _bounds(replayed: ReplayedProblem, case: GradedCase) -> tuple[float, float]:
    """The vote if all that is unknown were wrong alike, and if it were right; a vote nothing
    strayed from stands.
    """
    strayed = {
        rollout.sample for rollout in replayed.rollouts if rollout.off_policy_from is not None
    }
    if not strayed:
        return case.vote, case.vote
    known = [rollout for rollout in case.rollouts if rollout.sample not in strayed]
    unknown = len(replayed.rollouts) - len(known)
    right = _largest(rollout.label for rollout in known if rollout.is_right)
    wrong = _largest(
        rollout.label for rollout in known if not rollout.is_right and rollout.label is not None
    )
    return _share(right, wrong + unknown), _share(right + unknown, wrong)


def _largest(labels: Iterable[Hashable]) -> int:
    return max(Counter(labels).values(), default=0)


def _share(right: int, wrong: int) -> float:
    """A tie goes to either."""
    return 0.5 if right == wrong and right else float(right > wrong)


def _apart(answers: Sequence[str]) -> list[int]:
    """No two answers alike: the replay's own vote is not used."""
    return list(range(len(answers)))
