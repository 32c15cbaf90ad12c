"""Split-conformal thresholds of stored scores, and the effective number of those scores."""

# Everywhere in this package a larger score is worse, and `rate` is the fraction to escalate. The
# paper's alpha is 1 - rate and appears in formulas only.

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
Clusters = Mapping[Any, Scores]


def split_rank(n: int, rate: Rate) -> int:
    """Return k = ceil((n + 1)(1 - rate)) in exact arithmetic.

    A new exchangeable score is above the k-th smallest of n stored scores with probability at most
    `rate` (Vovk et al., "Algorithmic Learning in a Random World", 2005; Lei et al., 2018). If k >
    n, so few scores cannot guarantee this rate.

    >>> split_rank(9, 0.3), split_rank(8, 0.1)
    (7, 9)
    """
    return math.ceil((n + 1) * (1 - exact_rate(rate)))


def split_threshold(stored: Scores, rate: Rate) -> float:
    """Return the k-th smallest stored score: escalate a score iff it is above.

    A new exchangeable score escalates with probability in (rate - 1/(n+1), rate], over the draw of
    stored and new scores; the lower end needs scores without ties. The threshold is +inf (never
    escalate) if n is too small, and -inf at rate 1.

    :raises CalibrationInputError: if a score is NaN, or the scores are not one list of numbers.
    """
    k = split_rank(len(stored), rate)
    ordered = np.sort(np.asarray(stored, float))
    if ordered.ndim != 1:
        raise CalibrationInputError("stored scores", ordered.shape, "one list of numbers")
    # NaN sorts last, so if there is a NaN, the last score is one.
    if len(ordered) and np.isnan(ordered[-1]):
        raise CalibrationInputError("stored score", math.nan, "a number")
    if k > len(ordered):
        return math.inf
    if k < 1:
        return -math.inf
    return float(ordered[k - 1])


def coverage_interval(n: int, k: int, confidence: float = 0.9) -> tuple[float, float]:
    """Return the interval of the fraction accepted when the k-th smallest of n scores is the
    threshold.

    For independent continuous scores that fraction has the distribution Beta(k, n + 1 - k) over
    draws of the stored scores (Vovk, "Conditional validity of inductive conformal predictors",
    2012); the interval is the central one. With ties the accepted fraction can only be larger.
    """
    check_fraction("confidence", confidence)
    if not 1 <= k <= n:
        raise CalibrationInputError("rank", k, f"between 1 and {n}")
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = beta_quantile(tails, k, n + 1 - k)
    return float(low), float(high)


def long_run(n: int, rate: Rate) -> tuple[float, float]:
    """Return the 90 % interval of the long-run rate at the split threshold of n independent scores."""
    rank = min(n, max(1, split_rank(n, rate)))
    low, high = coverage_interval(n, rank)
    return 1 - high, 1 - low


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """The number of scores, the number of their questions, and the effective sample size."""

    scores: int
    clusters: int
    icc: float  # intraclass correlation; NaN when it cannot be estimated
    effective: float

    def __str__(self) -> str:
        scores = f"{self.scores:,} score{'s' * (self.scores != 1)}"
        questions = f"{self.clusters:,} question{'s' * (self.clusters != 1)}"
        icc = "unknown" if math.isnan(self.icc) else f"{self.icc:.2f}"
        plural = "s" * (round(self.effective) != 1)
        worth = f"worth about {self.effective:,.0f} independent one{plural}"
        return f"{scores} in {questions}, intraclass correlation {icc}, {worth}"


def by_cluster(scores: Scores, labels: Sequence[Hashable]) -> dict[Hashable, NDArray[np.float64]]:
    """Return the scores of each cluster, in order of first appearance.

    :raises CalibrationInputError: if scores and labels differ in number.
    """
    if len(scores) != len(labels):
        raise CalibrationInputError("labels", len(labels), f"one per score, {len(scores)}")
    clusters = dict[Hashable, list[float]]()
    for score, label in zip(scores, labels, strict=True):
        clusters.setdefault(label, []).append(float(score))
    return {label: np.array(values) for label, values in clusters.items()}


def summarise(clusters: Clusters) -> ClusterSummary:
    """Return size, one-way intraclass correlation and effective sample size.

    The effective size is N / (1 + (k - 1) ICC), by Kish's design effect, where k is the
    size-weighted mean cluster size. That many independent scores would leave a mean or a threshold
    equally uncertain. It assumes that clusters are independent and that their members correlate
    alike.

    The correlation leaves out infinite scores. It is NaN for a single cluster, which counts as one
    score, and for clusters of one score, which count in full.
    """
    values = [np.asarray(scores, float) for scores in clusters.values() if len(scores)]
    sizes = np.array([len(scores) for scores in values], float)
    total = int(sizes.sum())
    finite = [scores[np.isfinite(scores)] for scores in values]
    icc = _intraclass_correlation([scores for scores in finite if len(scores)])
    if math.isnan(icc):
        return ClusterSummary(total, len(values), icc, float(len(values)))
    typical_size = float((sizes**2).sum() / sizes.sum())
    # A negative estimate is noise: the effective size cannot exceed the number of scores.
    effective = total / (1 + (typical_size - 1) * max(0.0, icc))
    return ClusterSummary(total, len(values), icc, effective)


def _intraclass_correlation(clusters: list[NDArray[np.float64]]) -> float:
    """Return the one-way ANOVA estimate for clusters of unequal size (Donner, 1986), or NaN."""
    sizes = np.array([len(scores) for scores in clusters], float)
    groups = len(clusters)
    total = sizes.sum()
    if groups < 2 or total == groups:
        return math.nan
    means = np.array([scores.mean() for scores in clusters])
    grand = float((sizes * means).sum() / total)
    between = float((sizes * (means - grand) ** 2).sum()) / (groups - 1)
    squares = sum(float(((scores - scores.mean()) ** 2).sum()) for scores in clusters)
    within = squares / (total - groups)
    k = (total - (sizes**2).sum() / total) / (groups - 1)
    spread = between + (k - 1) * within
    if spread <= 0:
        return math.nan
    return float((between - within) / spread)
