"""Ordinal fit: ordered levels of chunks learnt from the draft's own evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atts.calibration.actions import ActionRule
from atts.calibration.ordinal import LEVELS, OrdinalModel, Row, fit_ordinal
from atts.calibration.ordinal_sets import LevelSets
from atts.core import Action, Features
from atts.errors import CalibrationInputError

FEATURES = ("draft_logprob", "length", "turn", "answered", "agreement", "support")
"""What `feature_row` makes of a chunk's evidence, in this order."""

_FIRST_FIT = 60
_REFIT_GROWTH = 1.25
_KEPT = 20_000


def feature_row(evidence: Features) -> Row:
    """Return the features named in `FEATURES`.

    "agreement" is the share of answered siblings behind the leading answer, "support" the same with
    the sign of whether this chunk's own answer is that one. Both are missing until a sibling has
    answered.
    """
    answered = evidence.answered > 0
    sign = (1.0 if evidence.agrees else -1.0) if evidence.has_answer else 0.0
    return (
        evidence.draft_logprob if math.isfinite(evidence.draft_logprob) else None,
        math.log1p(evidence.tokens),
        math.log1p(evidence.turn),
        math.log1p(evidence.answered),
        evidence.agreement if answered else None,
        sign * evidence.agreement if answered else None,
    )


class OrdinalFit:
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
        """`alpha` is how often a set may miss the true level, and an action be wrong.

        :raises CalibrationInputError: for alpha outside (0, 1).
        """
        self._features = tuple(features)
        self._rows = list[Row]()
        self._labels = list[str]()
        self._next_fit = _FIRST_FIT
        self.model: OrdinalModel | None = None
        self.sets = LevelSets(alpha)
        self.accept = ActionRule(alpha)
        self.escalate = ActionRule(alpha)

    def learn(self, row: Row, level: str, question: str) -> None:
        """Take one labelled chunk.

        :raises CalibrationInputError: for an unknown level, or a row of other features.
        """
        if level not in LEVELS or len(row) != len(self._features):
            raise CalibrationInputError(
                "label or features",
                (level, len(row)),
                f"one of {LEVELS} and {len(self._features)} features",
            )
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
