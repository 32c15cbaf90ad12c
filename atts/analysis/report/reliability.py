"""Reliability of p-values where outcomes are known: how often answers are right by the p-value of
their chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from atts.analysis.report.run_data import GateStep
from atts.calibration import pooled_auroc
from atts.evaluators import Estimate, share_estimate

_BINS = 5


@dataclass(frozen=True, slots=True)
class RightBin:
    """Chunks whose p-values lie between `low` and `high`, and how many of their answers are right."""

    low: float
    high: float
    right: Estimate


@dataclass(frozen=True, slots=True)
class LabelledScores:
    """How right answers become rarer as p-values grow.

    `auroc` is the chance that of two chunks, one of a wrong and one of a right answer, the wrong
    one's has the larger p-value: 0.5 says that scores know nothing of answers.
    """

    labelled: int
    auroc: float
    bins: tuple[RightBin, ...]


def labelled_scores(labels: Sequence[tuple[GateStep, bool]]) -> LabelledScores | None:
    """Shares of right answers over equal numbers of chunks, by p-value; None where no chunk is
    labelled.
    """
    known = sorted(
        ((step.decision.p, right, step) for step, right in labels if step.decision.p is not None),
        key=itemgetter(0),
    )
    if not known:
        return None
    values = np.array([p for p, _, _ in known], float)
    wrong = np.array([not right for _, right, _ in known], float)
    auroc = (
        pooled_auroc(values, wrong, np.zeros(len(known), np.int64))
        if 0 < wrong.mean() < 1
        else math.nan
    )
    parts = np.array_split(np.arange(len(known)), min(_BINS, len(known)))
    return LabelledScores(
        len(known), auroc, tuple(_bin([known[at] for at in part]) for part in parts)
    )


def _bin(rows: Sequence[tuple[float, bool, GateStep]]) -> RightBin:
    counts = dict[str, tuple[int, int]]()
    for _, right, step in rows:
        had, of = counts.get(step.decision.question, (0, 0))
        counts[step.decision.question] = (had + right, of + 1)
    return RightBin(rows[0][0], rows[-1][0], share_estimate(counts.values()))
