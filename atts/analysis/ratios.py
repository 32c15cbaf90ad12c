"""The interval of a ratio of totals over problems: how much one run costs beside another."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atts.sampling import student_quantile

Floats = NDArray[np.float64]
Ends = tuple[float, float]


def cost_ratio(cost: float, beside: float) -> float:
    """One cost over another; infinite where the other took nothing, undefined where neither took
    anything.
    """
    return cost / beside if beside else math.inf if cost else math.nan


def ratio_interval(first: Floats, second: Floats, level: float = 0.95) -> Ends:
    """Where the ratio of the second's mean cost to the first's may lie, one pair of costs from 0 up
    a problem.

    The wider of two, at either end: Fieller's holds where costs have long tails, the jackknife's of
    the logarithm where most problems cost the second run nothing; a bootstrap ends too early in
    both (`scripts/bench statistics`). The upper end is infinite where the first's own mean may be
    0. One problem has no interval.
    """
    if len(first) < 2 or not first.any():
        return math.nan, math.nan
    if not second.any():
        return 0.0, 0.0
    reach = student_quantile((1 + level) / 2, len(first) - 1)
    both = _fieller(first, second, reach), _jackknife(first, second, reach)
    return min(low for low, _ in both), max(high for _, high in both)


def _fieller(first: Floats, second: Floats, reach: float) -> Ends:
    """The ratios r from 0 up at which the mean of second - r first is within `reach` standard
    errors of 0.
    """
    unit = reach**2 / len(first)
    (spread, shared), (_, other) = unit * np.cov(first, second)
    square = float(first.mean() ** 2 - spread)
    half = float(first.mean() * second.mean() - shared)
    rest = float(second.mean() ** 2 - other)
    root = math.sqrt(max(0.0, half**2 - square * rest))
    if square > 0:
        return max(0.0, (half - root) / square), (half + root) / square
    return rest / (half + root) if rest > 0 else 0.0, math.inf


def _jackknife(first: Floats, second: Floats, reach: float) -> Ends:
    """Around the logarithm of the ratio, by how it moves when any one problem is left out."""
    n = len(first)
    without = np.maximum(second.sum() - second, 0.0), first.sum() - first
    if any(
        not np.all(left > 1e-12 * whole.sum())
        for left, whole in zip(without, (second, first), strict=True)
    ):
        return 0.0, math.inf  # one problem is all there was of it
    logs = np.log(without[0] / without[1])
    half = reach * math.sqrt((n - 1) * float(logs.var()))
    ratio = float(second.sum() / first.sum())
    return ratio * math.exp(-half), ratio * math.exp(half)
