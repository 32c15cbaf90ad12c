"""Split-conformal thresholds on a fixed set of stored scores, with their exact finite-sample
guarantees.

Everywhere a larger score is worse, and `rate` is the fraction to escalate (the paper's alpha is 1 -
rate).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atts.calibration.exact_rate import Rate, check_fraction, exact_rate
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
