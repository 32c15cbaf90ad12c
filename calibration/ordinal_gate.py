"""Ordinal gate: accept unscored where the draft's evidence suffices, verify where it is unclear,
else escalate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from atts.calibration.actions import ActionRule
from atts.calibration.online import Calibrator
from atts.calibration.ordinal import LEVELS, OrdinalModel, Row, fit_ordinal
from atts.calibration.ordinal_sets import LevelSets
from atts.core import Action, Decision, Features, Origin
from atts.errors import CalibrationInputError

Source = Literal["gold", "vote", "score"]
"""Where labels come from: reference answers of a calibration run, the settled vote of a live one,
or the scores.
"""

FEATURES = ("rank", "draft_logprob", "length", "turn", "answered", "agreement", "support")

_FIRST_FIT = 60
_REFIT_GROWTH = 1.25
_KEPT = 20_000


def feature_row(evidence: Features, p: float | None = None) -> Row:
    """The features named in `FEATURES`; `p` is the chunk's p-value once the target has scored it.

    "agreement" is the share of answered siblings behind the leading answer, "support" the same with
    the sign of whether this chunk's own answer is that one. Both are missing until a sibling has
    answered.
    """
    answered = evidence.answered > 0
    sign = (1.0 if evidence.agrees else -1.0) if evidence.has_answer else 0.0
    return (
        p,
        evidence.draft_logprob if math.isfinite(evidence.draft_logprob) else None,
        math.log1p(evidence.tokens),
        math.log1p(evidence.turn),
        math.log1p(evidence.answered),
        evidence.agreement if answered else None,
        sign * evidence.agreement if answered else None,
    )


class OrdinalStage:
    """A cumulative-logit model, refitted as labels arrive; sets and actions are calibrated on
    labels it had not seen.

    A set holds the level of a chunk often enough over all chunks, the unclear ones included. What
    is done on the model's word alone is tested by itself: see `ActionRule`. Every label first
    enters both with the probabilities of a model that did not know it, then the data of the next
    fit. Refits happen after 60 labels and whenever there are a quarter more.
    """

    __slots__ = (
        "_features",
        "_labels",
        "_next_fit",
        "_rows",
        "accept",
        "escalate",
        "model",
        "sets",
    )

    def __init__(self, features: Sequence[str], alpha: float) -> None:
        self._features = tuple(features)
        self._rows = list[Row]()
        self._labels = list[str]()
        self._next_fit = _FIRST_FIT
        self.model: OrdinalModel | None = None
        self.sets = LevelSets(alpha)
        self.accept = ActionRule(alpha)
        self.escalate = ActionRule(alpha)

    def learn(self, row: Row, level: str, question: str) -> None:
        """Take one labelled chunk."""
        if law := self._law(row):
            self.sets.learn(law, LEVELS.index(level), question)
            self.accept.learn(law[0], level != "accept", question)
            self.escalate.learn(law[-1], level != "escalate", question)
        self._rows.append(tuple(row))
        self._labels.append(level)
        if len(self._rows) >= self._next_fit:
            self._next_fit = math.ceil(len(self._rows) * _REFIT_GROWTH)
            del self._rows[:-_KEPT], self._labels[:-_KEPT]
            self.model = fit_ordinal(self._rows, self._labels, self._features)

    def levels(self, row: Row) -> tuple[Action, ...]:
        """The conformal set of a chunk; every level while nothing was fitted, or the row lacks what
        no row lacked.
        """
        law = self._law(row)
        window = self.sets.levels(law) if law else range(len(LEVELS))
        return LEVELS[window.start : window.stop]

    def action(self, row: Row) -> Action:
        """What may be done with a chunk on the model's word; "verify" where that was not found to
        be safe.
        """
        law = self._law(row)
        if law and law[0] >= self.accept.threshold:
            return "accept"
        return "escalate" if law and law[-1] >= self.escalate.threshold else "verify"

    @property
    def guarantee(self) -> str:
        """What sets and actions promise, in words."""
        return f"{self.sets.guarantee}; accepted so: {self.accept.guarantee}; handed over so: {self.escalate.guarantee}"

    def _law(self, row: Row) -> tuple[float, ...]:
        """The probability of each level; empty before a fit, and where a feature is missing that
        never was in the fit.

        A model cannot tell what it means that such a feature is missing.
        """
        if self.model is None:
            return ()
        known = self.model.sometimes_missing
        is_familiar = all(value is not None or place in known for place, value in enumerate(row))
        return self.model.probabilities(row) if is_familiar else ()


class OrdinalLearner:
    """Two stages of the same question: before the target has scored a chunk, and after, when its
    rank is known too.
    """

    __slots__ = ("after", "before", "source")

    def __init__(self, alpha: float = 0.1, source: Source = "vote") -> None:
        """`alpha` is how often a set may miss the true level, `source` who says what that is.

        :raises CalibrationInputError: for alpha outside (0, 1).
        """
        self.before = OrdinalStage(FEATURES[1:], alpha)
        self.after = OrdinalStage(FEATURES, alpha)
        self.source: Source = source

    def learn(self, row: Row, level: str, question: str = "") -> None:
        """Take one labelled chunk, its features as `feature_row` gives them.

        :raises CalibrationInputError: for an unknown level or a row that is not one.
        """
        if level not in LEVELS or len(row) != len(FEATURES):
            raise CalibrationInputError(
                "label or features", (level, len(row)), f"of {LEVELS}, {len(FEATURES)} features"
            )
        self.before.learn(row[1:], level, question)
        if row[0] is not None:
            self.after.learn(row, level, question)

    def levels(self, row: Row) -> tuple[Action, ...]:
        """The conformal set of a chunk: with its rank if the row has one, without if not."""
        return self.before.levels(row[1:]) if row[0] is None else self.after.levels(row)

    def action(self, row: Row) -> Action:
        """What may be done with a chunk on the model's word: with its rank if the row has one,
        without if not.
        """
        return self.before.action(row[1:]) if row[0] is None else self.after.action(row)

    @property
    def guarantee(self) -> str:
        """What sets and actions promise, and by whose labels."""
        before = self.before.guarantee
        after = self.after.guarantee
        return f"before the score, {before}; after it, {after}; labels by {self.source}"

    @property
    def voided_by(self) -> str:
        """What makes that promise empty."""
        return self.before.sets.voided_by


class OrdinalGate:
    """Decides on the levels' word where that was tested to be wrong seldom enough, and with the
    calibrator elsewhere.

    `preview` is asked before the target has scored the chunk: "accept" skips verification,
    "escalate" goes straight to the target, anything else asks for the score. `decide` then adds the
    chunk's rank. Every decision counts for the calibrator's rate, by whichever rule, so its
    feedback makes up for what was skipped or handed over.
    """

    __slots__ = ("calibrator", "learner")

    def __init__(self, calibrator: Calibrator, learner: OrdinalLearner) -> None:
        """:raises CalibrationInputError: for a calibrator with a cap: what goes over unscored would
        pass it.
        """
        if calibrator.cap is not None:
            raise CalibrationInputError(
                "cap of an ordinal gate's calibrator", str(calibrator.cap), "none"
            )
        self.calibrator = calibrator
        self.learner = learner

    def preview(self, features: Features) -> Decision:
        """Whether the chunk needs a score at all."""
        row = feature_row(features)
        levels = self.learner.levels(row)
        action = self.learner.action(row)
        origin: Origin = "gate" if action == "verify" else "evidence"
        decision = features.decision(
            action, float(self.calibrator.rate), _why(levels), origin=origin
        )
        return replace(decision, level=action, levels=levels)

    def decide(self, features: Features, score: float) -> Decision:
        """What to do with a chunk of this score.

        :raises CalibrationInputError: if it is not a score.
        """
        place = (features.question, features.turn, features.sample, features.issue)
        said = self.calibrator.decide(
            score, *place, left=features.left, length=features.tokens or None
        )
        row = feature_row(features, said.p)
        levels = self.learner.levels(row)
        action = self.learner.action(row)
        if action != "verify":
            return replace(said, action=action, level=action, levels=levels, why=_why(levels))
        return replace(said, level=action, levels=levels, why=f"{_why(levels)}; {said.why}")

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Count what was really done, and store the score if there is one."""
        self.calibrator.observe(decision, escalated)

    def forget(self, question: str) -> None:
        """The question is over: the calibrator keeps nothing that served its decisions only."""
        self.calibrator.forget(question)

    def learn(self, features: Features, p: float | None, level: str) -> None:
        """Take the label of a finished chunk; `p` is the p-value its decision carried."""
        self.learner.learn(feature_row(features, p), level, features.question)


def _why(levels: Sequence[Action]) -> str:
    return f"levels {{{', '.join(levels)}}}"
