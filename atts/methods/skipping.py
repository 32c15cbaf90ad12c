"""Skipping gate: a conformal gate that learns from the scores it asks for which chunks need none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from atts.calibration import FEATURES, Calibrator, OrdinalFit, feature_row
from atts.core import Action, Decision
from atts.errors import CalibrationInputError
from atts.pipelines import ConformalGate, Features

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
        """Whether the chunk needs a score at all."""
        decision = super().preview(features)
        if features.is_scored:
            return decision
        sure = features.draft_logprob
        # on a scale where 0.999 and 0.9999 are as far apart as 0.9 and 0.99
        if math.isfinite(sure):
            sure = -math.log(max(-sure, 1e-6))
        row = feature_row(replace(features, draft_logprob=sure))
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
        """Chunks of this question that were announced and never decided on, as of rollouts that
        failed, are let go.
        """
        self._asked = {place: row for place, row in self._asked.items() if place[0] != question}
        super().forget(question)

    def _teaches(self, features: Features) -> bool:
        """Every chunk until something may be done unseen, then an audit that no evidence decides."""
        if math.isinf(self.fit.accept.threshold) and math.isinf(self.fit.escalate.threshold):
            return True
        return features.uniform(self._stored.seed, "audit") < self._audit

    def _level(self, decision: Decision) -> Action:
        rate = float(self._stored.rate)
        if decision.escalate:
            return "escalate"
        clear = 1 - rate - min(rate, 1 - rate) / 4
        return "accept" if decision.p is not None and decision.p <= clear else "verify"
