"""Split-conformal thresholds of stored scores, and how much those are worth."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atts.calibration.rates import Rate, check_fraction, exact_rate
from atts.errors import CalibrationInputError
from atts.sampling import beta_quantile

Scores = Sequence[float] | NDArray[np.float64]


def split_rank(n: int, rate: Rate) -> int:
    """k = ceil((n + 1)(1 - rate)) in exact arithmetic; k > n means that n scores cannot promise
    this rate.

    >>> split_rank(9, 0.3), split_rank(8, 0.1)
    (7, 9)
    """
    return math.ceil((n + 1) * (1 - exact_rate(rate)))


def split_threshold(stored: Scores, rate: Rate) -> float:
    """The k-th smallest stored score: escalating iff s > threshold happens with probability in
    (rate - 1/(n+1), rate].

    The lower end needs scores without ties. +inf (never escalate) where n is too small, -inf at
    rate 1.

    :raises CalibrationInputError: if a score is NaN, or they are not one list of numbers.
    """
    return _kth(stored, split_rank(len(stored), rate))


def coverage_interval(n: int, k: int, confidence: float = 0.9) -> tuple[float, float]:
    """Where the true kept fraction of the k-th smallest of n scores lies: central interval of
    Beta(k, n + 1 - k).
    """
    check_fraction("confidence", confidence)
    if not 1 <= k <= n:
        raise CalibrationInputError("rank", k, f"between 1 and {n}")
    low, high = beta_quantile([(1 - confidence) / 2, (1 + confidence) / 2], k, n + 1 - k)
    return float(low), float(high)


def long_run(n: int, rate: Rate) -> tuple[float, float]:
    """Where the long-run rate of the split threshold of n independent scores lies (90 %)."""
    low, high = coverage_interval(n, min(n, max(1, split_rank(n, rate))))
    return 1 - high, 1 - low


def _kth(stored: Scores, k: int) -> float:
    ordered = np.sort(np.asarray(stored, float))
    if ordered.ndim != 1:
        raise CalibrationInputError("stored scores", ordered.shape, "one list of numbers")
    if len(ordered) and np.isnan(ordered[-1]):
        raise CalibrationInputError("stored score", math.nan, "a number")
    if k > len(ordered):
        return math.inf
    return float(ordered[k - 1]) if k >= 1 else -math.inf


Clusters = Mapping[Any, Scores]


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """How many scores there are, in how many questions, and how many independent ones they are
    worth.
    """

    scores: int
    clusters: int
    icc: float  # intraclass correlation; NaN when it cannot be estimated
    effective: float

    def __str__(self) -> str:
        scores = f"{self.scores:,} score{'s' * (self.scores != 1)}"
        questions = f"{self.clusters:,} question{'s' * (self.clusters != 1)}"
        icc = "unknown" if math.isnan(self.icc) else f"{self.icc:.2f}"
        worth = (
            f"worth about {self.effective:,.0f} independent one{'s' * (round(self.effective) != 1)}"
        )
        return f"{scores} in {questions}, intraclass correlation {icc}, {worth}"


def by_cluster(scores: Scores, labels: Sequence[Hashable]) -> dict[Hashable, NDArray[np.float64]]:
    """The scores of each cluster, in order of first appearance.

    :raises CalibrationInputError: if scores and labels differ in number.
    """
    if len(scores) != len(labels):
        raise CalibrationInputError("labels", len(labels), f"one per score, {len(scores)}")
    parts = dict[Hashable, list[float]]()
    for score, label in zip(scores, labels, strict=True):
        parts.setdefault(label, []).append(float(score))
    return {label: np.array(values) for label, values in parts.items()}


def summarise(clusters: Clusters) -> ClusterSummary:
    """Size, one-way intraclass correlation and effective size N / (1 + (k - 1) ICC), k the
    size-weighted mean size.

    Infinite scores carry no correlation and are left out of it. With one cluster, or clusters of
    one, the correlation is NaN; one cluster is then worth one score, clusters of one are worth what
    they are.
    """
    values = [np.asarray(scores, float) for scores in clusters.values() if len(scores)]
    sizes = np.array([len(scores) for scores in values], float)
    total = int(sizes.sum())
    finite = [scores[np.isfinite(scores)] for scores in values]
    rho = _icc([scores for scores in finite if len(scores)])
    if math.isnan(rho):
        return ClusterSummary(total, len(values), rho, float(len(values)))
    typical = float((sizes**2).sum() / sizes.sum())
    effective = total / (1 + (typical - 1) * max(0.0, rho))
    return ClusterSummary(total, len(values), rho, effective)


def _icc(clusters: list[NDArray[np.float64]]) -> float:
    sizes = np.array([len(scores) for scores in clusters], float)
    groups = len(clusters)
    total = sizes.sum()
    if groups < 2 or total == groups:
        return math.nan
    means = np.array([scores.mean() for scores in clusters])
    grand = float((sizes * means).sum() / total)
    between = float((sizes * (means - grand) ** 2).sum()) / (groups - 1)
    within = sum(float(((scores - scores.mean()) ** 2).sum()) for scores in clusters) / (
        total - groups
    )
    k = (total - (sizes**2).sum() / total) / (groups - 1)
    spread = between + (k - 1) * within
    return float((between - within) / spread) if spread > 0 else math.nan
