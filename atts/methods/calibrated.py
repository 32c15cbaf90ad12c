"""Gates made from calibrations: frozen, warming, certified, and one that skips scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from atts.calibration import (
    DEFAULTS,
    FEATURES,
    Calibrator,
    Candidate,
    Certificate,
    Mode,
    OrdinalFit,
    StoredScores,
    Tuning,
    certify,
    certify_net,
    feature_row,
    lost_answers,
    net_losses,
)
from atts.core import Action, Decision, Outcome
from atts.errors import CalibrationInputError
from atts.pipelines import CertifiedGate, ConformalGate, Features, Meanwhile, WarmingGate, WarmScore

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


Row = Sequence[float | None]


class SkippingGate(ConformalGate):
    """Ordered levels from the draft's own evidence: kept unseen, scored, or handed over unseen; the
    rank decides else.

    The level of a scored chunk is told by its score: "escalate" where the calibrator rejects it,
    "accept" where its rank is well below that, "verify" between. No right answer has to be known,
    and no vote is waited for. A seeded fraction of all chunks (`audit`) is scored whatever the
    evidence says: these teach the levels. Of the chunks kept unseen, and of those handed over
    unseen, a score would have said otherwise of at most `alpha`. That is tested, question by
    question, before the first is (`atts.calibration.ordinal`): it takes some 80 questions at .05
    where the evidence tells everything, and more where it does not. A chunk kept unseen joins the
    stored scores as a best one, one handed over as a worst: else the rate would be that of the
    unclear ones.
    """

    needs_draft_logprobs = True

    def __init__(self, calibrator: Calibrator, alpha: float = 0.05, audit: float = 0.15) -> None:
        """:raises CalibrationInputError: for an alpha outside (0, 1), or an audit that is no
        fraction.
        """
        if not 0 < audit <= 1:
            raise CalibrationInputError(
                "audit", audit, "a fraction above 0: without it nothing is learnt"
            )
        super().__init__(calibrator)
        self.fit = OrdinalFit(FEATURES, alpha)
        self._stored = calibrator
        self._audit = audit
        # evidence of chunks whose score may teach
        self._asked: dict[tuple[str, int, int, int | None], Row] = {}

    def preview(self, features: Features) -> Decision:
        """Return whether the chunk needs a score at all."""
        decision = super().preview(features)
        if features.is_scored:
            return decision
        sure = features.draft_evidence
        if math.isnan(sure):
            # an unknown draft must not look like a sure one: the target judges the chunk
            return decision
        # on a scale where 0.999 and 0.9999 are as far apart as 0.9 and 0.99
        if math.isfinite(sure):
            sure = -math.log(max(-sure, 1e-6))
        row = feature_row(replace(features, draft_evidence=sure))
        if self._teaches(features):
            self._asked[features.question, features.sample, features.turn, decision.issue] = row
            return decision
        levels = self.fit.levels(row)
        action = self.fit.action(row)
        if action == "verify":
            return replace(decision, level=action, levels=levels)
        why = f"{action} by the draft's evidence, not scored"
        return replace(
            decision, action=action, level=action, levels=levels, why=why, origin="evidence"
        )

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Feed the calibrator, and the levels where this chunk teaches."""
        row = self._asked.pop(
            (decision.question, decision.sample, decision.turn, decision.issue), None
        )
        if decision.score is None and decision.level in ("accept", "escalate"):
            scale = self._stored.scale
            best, worst = (
                (scale.low, scale.high) if scale.worse == "higher" else (scale.high, scale.low)
            )
            decision = replace(decision, score=best if decision.level == "accept" else worst)
        elif row is not None and decision.p is not None:
            self.fit.learn(row, self._level(decision), decision.question)
        super().observe(decision, escalated)

    def forget(self, question: str) -> None:
        """Drop chunks of this question that were announced and never decided on.

        Rollouts that failed leave such chunks.
        """
        self._asked = {chunk: row for chunk, row in self._asked.items() if chunk[0] != question}
        super().forget(question)

    def _teaches(self, features: Features) -> bool:
        """Return whether the chunk teaches: every one until something may be done unseen, then an
        audit.
        """
        if math.isinf(self.fit.accept.threshold) and math.isinf(self.fit.escalate.threshold):
            return True
        return features.uniform(self._stored.seed, "audit") < self._audit

    def _level(self, decision: Decision) -> Action:
        rate = float(self._stored.rate)
        if decision.escalate:
            return "escalate"
        clear = 1 - rate - min(rate, 1 - rate) / 4
        return "accept" if decision.p is not None and decision.p <= clear else "verify"
