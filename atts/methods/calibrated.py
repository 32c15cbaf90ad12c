"""Gates made from calibrations: frozen, warming, certified, and one that skips scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atts.calibration import (
    DEFAULTS,
    Calibrator,
    Candidate,
    Certificate,
    Mode,
    StoredScores,
    Tuning,
    certify,
    certify_net,
    lost_answers,
    net_losses,
)
from atts.core import Outcome
from atts.errors import CalibrationInputError
from atts.pipelines import CertifiedGate, ConformalGate, Meanwhile, WarmingGate, WarmScore

Right = Callable[[Outcome], bool]


@dataclass(frozen=True, slots=True)
class LabelledRun:
    """What a policy came to on the calibration problems: one gate at one rate."""

    gate: str
    rate: float
    outcomes: Sequence[Outcome]


def frozen_gate(rate: float, stored: StoredScores, seed: int = 0) -> ConformalGate:
    """Return a gate that ranks against stored scores and learns nothing, so it can be tested and
    deployed.

    :raises CalibrationInputError: no score is stored.
    """
    return ConformalGate(Calibrator(rate, "split", stored=stored, seed=seed, drift="report"))


def warming_gate(
    scores: int,
    rate: float,
    mode: Mode = "question-turn",
    seed: int = 0,
    meanwhile: Meanwhile = "accept",
    tuning: Tuning = DEFAULTS,
) -> WarmingGate:
    """Return a conformal gate whose stored scores are the first ones of its run.

    :raises OptionError: fewer than one score, or an unknown `meanwhile`.
    """

    def make(warmup: Sequence[WarmScore]) -> ConformalGate:
        stored = StoredScores(
            tuple(one.score for one in warmup),
            tuple(one.question for one in warmup),
            tuple(one.turn for one in warmup),
        )
        return ConformalGate(Calibrator(rate, mode, stored=stored, seed=seed, tuning=tuning))

    return WarmingGate(scores, make, meanwhile)


@dataclass(frozen=True, slots=True)
class GradedPolicy:
    """A policy on labelled problems: of each by name whether it was right, and the target tokens of
    one.
    """

    gate: str
    rate: float
    right: Mapping[str, bool]
    cost: float


def certify_runs(
    target: Sequence[Outcome],
    runs: Sequence[LabelledRun],
    right: Right,
    epsilon: float,
    delta: float = 0.1,
) -> Certificate:
    """Certify the cheapest policy that loses at most `epsilon` of the answers the target has
    correct.

    All runs are of the same problems, problem by problem, with gates that learn nothing from one
    problem for the next. The cost is target tokens per problem. A gate's rates are tested from the
    highest down until one fails, so lower ones need not have been run.

    :raises CalibrationInputError: no runs, or runs of other problems than the target's.
    """
    return _certified(target, runs, right, epsilon, delta, net=False)


def certify_net_runs(
    target: Sequence[Outcome],
    runs: Sequence[LabelledRun],
    right: Right,
    epsilon: float,
    delta: float = 0.1,
) -> Certificate:
    """Certify the cheapest policy that is correct at most `epsilon` less often than the target
    alone.

    What two runs lose to each other by sampling cancels, so that a policy as good as the target can
    be certified.

    :raises CalibrationInputError: as `certify_runs`.
    """
    return _certified(target, runs, right, epsilon, delta, net=True)


def _certified(
    target: Sequence[Outcome],
    runs: Sequence[LabelledRun],
    right: Right,
    epsilon: float,
    delta: float,
    *,
    net: bool,
) -> Certificate:
    alone, *policies = (
        GradedPolicy(
            run.gate,
            run.rate,
            {one.problem.id: right(one) for one in run.outcomes},
            _cost(run.outcomes),
        )
        for run in (LabelledRun("target-only", 1.0, target), *runs)
    )
    return certify_graded(alone, policies, epsilon, delta, net=net)


def _cost(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.usage.target_tokens for outcome in outcomes) / max(1, len(outcomes))


def certify_graded(
    target: GradedPolicy,
    policies: Sequence[GradedPolicy],
    epsilon: float,
    delta: float = 0.1,
    *,
    net: bool,
) -> Certificate:
    """Certify the cheapest policy by its net losses, or by the answers that it loses.

    :raises CalibrationInputError: no policies, or other problems than the target's.
    """
    names = sorted(target.right)
    candidates: list[Candidate] = []
    for policy in policies:
        if policy.right.keys() != target.right.keys():
            missing = len(target.right.keys() ^ policy.right.keys())
            raise CalibrationInputError(
                "labelled run", f"{missing} other problems", "the problems of the target alone"
            )
        pair = [[one.right[name] for name in names] for one in (target, policy)]
        losses = (net_losses if net else lost_answers)(*pair)
        candidates.append(Candidate(policy.gate, policy.rate, losses.tolist(), policy.cost))
    return (certify_net if net else certify)(candidates, epsilon, delta)


def certified_gate(certificate: Certificate, stored: StoredScores, seed: int = 0) -> CertifiedGate:
    """Return the gate of the certified policy, as it was tested.

    :raises CalibrationInputError: the certificate certifies none; its words say how many problems
        it would take.
    """
    if certificate.chosen is None:
        raise CalibrationInputError(
            "certificate", certificate.guarantee, "one that certifies a policy"
        )
    promise = (certificate.guarantee, certificate.voided_by)
    return CertifiedGate(frozen_gate(certificate.chosen.rate, stored, seed), promise)
