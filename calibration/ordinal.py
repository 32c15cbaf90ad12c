"""Proportional-odds regression: probabilities of ordered levels from features that may be missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from atts.core import Action
from atts.errors import CalibrationInputError

LEVELS: tuple[Action, ...] = ("accept", "verify", "escalate")
"""From needing no help to needing it all."""

Row = Sequence[float | None]
"""One chunk's features; None where a feature does not exist (no sibling has answered yet)."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OrdinalModel:
    """P(level <= k) = logistic(cut_k - weights . x), x the standardised features with an indicator per missing one."""

    levels: tuple[str, ...]
    features: tuple[str, ...]
    centre: tuple[float, ...]
    spread: tuple[float, ...]
    sometimes_missing: tuple[int, ...]  # places of the features that have an indicator
    weights: tuple[float, ...]
    cuts: tuple[float, ...]
    rows: int

    def lean(self, row: Row) -> float:
        """The linear part: larger leans to the last level.

        :raises CalibrationInputError: if the row has not one entry per feature, or one is not finite.
        """
        if len(row) != len(self.features):
            raise CalibrationInputError("features", len(row), f"{len(self.features)}: {', '.join(self.features)}")
        total = 0.0
        for value, centre, spread, weight in zip(row, self.centre, self.spread, self.weights, strict=False):
            if value is not None:
                if not math.isfinite(value):
                    raise CalibrationInputError("feature", value, "a finite number or None")
                total += weight * (value - centre) / spread
        for weight, place in zip(self.weights[len(self.features) :], self.sometimes_missing, strict=True):
            total += weight * (row[place] is None)
        return total

    def probabilities(self, row: Row) -> tuple[float, ...]:
        """The probability of each level, in order; they sum to 1."""
        lean = self.lean(row)
        upto = [_logistic(cut - lean) for cut in self.cuts] + [1.0]
        return tuple(max(0.0, high - low) for low, high in zip([0.0, *upto], upto, strict=False))


def fit_ordinal(
    rows: Sequence[Row],
    labels: Sequence[str],
    features: Sequence[str],
    levels: Sequence[str] = LEVELS,
    ridge: float = 1.0,
) -> OrdinalModel:
    """Fit by penalised maximum likelihood.

    `ridge` pulls the weights of the standardised features to 0, so that separable data have an answer; half an
    observation of every level at the mean features keeps the cuts finite where a level is rare or absent.

    :raises CalibrationInputError: without rows, for an unknown label, a row of another length, or a negative ridge.
    """
    if not rows or len(rows) != len(labels):
        raise CalibrationInputError("rows", len(rows), f"one per label, {len(labels)}, and at least one")
    if ridge < 0:
        raise CalibrationInputError("ridge", ridge, "a number from 0")
    unknown = [label for label in labels if label not in levels]
    if unknown:
        raise CalibrationInputError("label", unknown[0], f"one of {', '.join(levels)}")
    table, centre, spread, missing = _standardised(rows, features)
    target = np.array([levels.index(label) for label in labels])
    # The pseudo-observations: every level once, at the centre of the features.
    table = np.vstack([table, np.zeros((len(levels), table.shape[1]))])
    target = np.concatenate([target, np.arange(len(levels))])
    weights = np.concatenate([np.ones(len(labels)), np.full(len(levels), 0.5)])
    coefficients, cuts = _maximise(table, target, weights, len(levels), ridge)
    return OrdinalModel(
        tuple(levels), tuple(features), centre, spread, missing, weights=coefficients, cuts=cuts, rows=len(rows)
    )


def _standardised(
    rows: Sequence[Row], features: Sequence[str]
) -> tuple[Floats, tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Columns of mean 0 and spread 1, missing entries at 0, followed by the indicators of what is missing."""
    if any(len(row) != len(features) for row in rows):
        raise CalibrationInputError("row", "of another length", f"{len(features)}: {', '.join(features)}")
    table = np.array([[math.nan if value is None else float(value) for value in row] for row in rows])
    if np.isinf(table).any():
        raise CalibrationInputError("feature", math.inf, "a finite number or None")
    absent = np.isnan(table)
    known = (~absent).sum(axis=0)
    sums = np.where(absent, 0.0, table).sum(axis=0)
    centre = sums / np.maximum(known, 1)
    deviation = np.where(absent, 0.0, table - centre)
    spread = np.sqrt((deviation**2).sum(axis=0) / np.maximum(known, 1))
    spread[spread < 1e-12] = 1.0
    missing = tuple(int(place) for place in np.flatnonzero(absent.any(axis=0)))
    filled = np.hstack([deviation / spread, absent[:, list(missing)].astype(float)])
    return filled, tuple(map(float, centre)), tuple(map(float, spread)), missing


def _maximise(
    table: Floats, target: NDArray[np.int64], weights: Floats, levels: int, ridge: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    columns, cuts = table.shape[1], levels - 1

    def loss(parameters: Floats) -> tuple[float, Floats]:
        beta = parameters[:columns]
        steps = np.exp(np.minimum(parameters[columns + 1 :], 50.0))
        bounds = np.concatenate([[-np.inf], parameters[columns] + np.concatenate([[0.0], np.cumsum(steps)]), [np.inf]])
        lean = table @ beta
        upper, lower = bounds[target + 1] - lean, bounds[target] - lean
        value, d_upper, d_lower = _log_interval(upper, lower)
        gradient = np.empty_like(parameters)
        gradient[:columns] = (weights * (d_upper + d_lower)) @ table + ridge * beta
        by_cut = np.zeros(cuts)
        for cut in range(cuts):
            by_cut[cut] = -float(
                (weights * d_upper)[target == cut].sum() + (weights * d_lower)[target == cut + 1].sum()
            )
        gradient[columns] = by_cut.sum()
        for step in range(cuts - 1):
            gradient[columns + 1 + step] = by_cut[step + 1 :].sum() * steps[step]
        return float(-(weights * value).sum() + ridge * (beta @ beta) / 2), gradient

    start = np.zeros(columns + cuts)
    start[columns:] = _starting_cuts(target, weights, levels)
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    solution = np.asarray(found.x, float)
    ends = solution[columns] + np.concatenate([[0.0], np.cumsum(np.exp(solution[columns + 1 :]))])
    return tuple(map(float, solution[:columns])), tuple(map(float, ends))


def _log_interval(upper: Floats, lower: Floats) -> tuple[Floats, Floats, Floats]:
    """log(logistic(upper) - logistic(lower)) with its derivatives, stable in both tails."""
    gap = np.maximum(upper - lower, 1e-10)
    ratio = np.exp(-gap)  # 0 at an open end
    value = scipy.special.log_expit(upper) + scipy.special.log_expit(-lower) + np.log1p(-ratio)
    inside = ratio / -np.expm1(-gap)
    return value, scipy.special.expit(-upper) + inside, -scipy.special.expit(lower) - inside


def _starting_cuts(target: NDArray[np.int64], weights: Floats, levels: int) -> Floats:
    """The cuts of a model without features, as a first cut and logarithms of the steps."""
    shares = np.bincount(target, weights, levels) / weights.sum()
    ends = scipy.special.logit(np.clip(np.cumsum(shares)[:-1], 1e-6, 1 - 1e-6))
    return np.concatenate([ends[:1], np.log(np.maximum(np.diff(ends), 1e-3))])


def _logistic(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-min(value, 700.0)))
    grown = math.exp(max(value, -700.0))
    return grown / (1 + grown)
