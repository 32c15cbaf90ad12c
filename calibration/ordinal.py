"""Partial proportional-odds regression: probabilities of ordered levels from features that may be
missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    """P(level <= k) = logistic(cut_k - weights . x), x the standardised features with an indicator
    per missing one.

    Where the odds of the levels are not proportional, `shifts` holds what each cut's weights have
    beside the common ones; the probabilities are then made to grow with the level.
    """

    levels: tuple[str, ...]
    features: tuple[str, ...]
    centre: tuple[float, ...]
    spread: tuple[float, ...]
    sometimes_missing: tuple[int, ...]  # places of the features that have an indicator
    weights: tuple[float, ...]
    cuts: tuple[float, ...]
    rows: int
    shifts: tuple[tuple[float, ...], ...] = ()  # by cut; none where the data do not ask for any

    def lean(self, row: Row) -> float:
        """The linear part: larger leans to the last level.

        :raises CalibrationInputError: if the row has not one entry per feature, or one is not
            finite.
        """
        if len(row) != len(self.features):
            raise CalibrationInputError(
                "features", len(row), f"{len(self.features)}: {', '.join(self.features)}"
            )
        return _dot(self.weights, self._columns(row))

    def _columns(self, row: Row) -> list[float]:
        if any(value is not None and not math.isfinite(value) for value in row):
            raise CalibrationInputError("feature", row, "finite numbers or None")
        scaled = zip(row, self.centre, self.spread, strict=True)
        known = [
            0.0 if value is None else (value - centre) / spread for value, centre, spread in scaled
        ]
        return [*known, *(float(row[place] is None) for place in self.sometimes_missing)]

    def probabilities(self, row: Row) -> tuple[float, ...]:
        """The probability of each level, in order; they sum to 1."""
        lean = self.lean(row)
        leans = [lean] * len(self.cuts)
        if self.shifts:
            columns = self._columns(row)
            leans = [lean + _dot(shift, columns) for shift in self.shifts]
        upto = [
            *accumulate(
                (_logistic(cut - at) for cut, at in zip(self.cuts, leans, strict=True)), max
            ),
            1.0,
        ]
        return tuple(max(0.0, high - low) for low, high in zip([0.0, *upto], upto, strict=False))


def fit_ordinal(
    rows: Sequence[Row],
    labels: Sequence[str],
    features: Sequence[str],
    levels: Sequence[str] = LEVELS,
    ridge: float = 1.0,
) -> OrdinalModel:
    """Fit by penalised maximum likelihood.

    `ridge` pulls the weights of the standardised features to 0, so that separable data have an
    answer; half an observation of every level at the mean features keeps the cuts finite where a
    level is rare or absent.

    :raises CalibrationInputError: without rows, for an unknown label, a row of another length, or a
        negative ridge.
    """
    if not rows or len(rows) != len(labels):
        raise CalibrationInputError(
            "rows", len(rows), f"one per label, {len(labels)}, and at least one"
        )
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
    lean = np.asarray(table @ np.array(coefficients), float)
    found = [
        _shift(table, (target <= cut).astype(float), weights, offset=end - lean, ridge=ridge)
        for cut, end in enumerate(cuts)
    ]
    shifts = (
        tuple(tuple(map(float, shift[1:])) for shift in found)
        if any(shift.any() for shift in found)
        else ()
    )
    cuts = tuple(end + float(shift[0]) for end, shift in zip(cuts, found, strict=True))
    return OrdinalModel(
        tuple(levels), tuple(features), centre, spread, missing, weights=coefficients, cuts=cuts, rows=len(rows),
        shifts=shifts,
    )  # fmt: skip


def _standardised(
    rows: Sequence[Row], features: Sequence[str]
) -> tuple[Floats, tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Columns of mean 0 and spread 1, missing entries at 0, followed by the indicators of what is
    missing.
    """
    if any(len(row) != len(features) for row in rows):
        raise CalibrationInputError(
            "row", "of another length", f"{len(features)}: {', '.join(features)}"
        )
    table = np.array(
        [[math.nan if value is None else float(value) for value in row] for row in rows]
    )
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
    columns = table.shape[1]
    cuts = levels - 1

    def loss(parameters: Floats) -> tuple[float, Floats]:
        beta = parameters[:columns]
        steps = np.exp(np.minimum(parameters[columns + 1 :], 50.0))
        bounds = np.concatenate(
            [[-np.inf], parameters[columns] + np.concatenate([[0.0], np.cumsum(steps)]), [np.inf]]
        )
        lean = table @ beta
        upper = bounds[target + 1] - lean
        lower = bounds[target] - lean
        value, d_upper, d_lower = _log_interval(upper, lower)
        gradient = np.empty_like(parameters)
        gradient[:columns] = (weights * (d_upper + d_lower)) @ table + ridge * beta
        by_cut = np.zeros(cuts)
        for cut in range(cuts):
            by_cut[cut] = -float(
                (weights * d_upper)[target == cut].sum()
                + (weights * d_lower)[target == cut + 1].sum()
            )
        gradient[columns] = by_cut.sum()
        for step in range(cuts - 1):
            gradient[columns + 1 + step] = by_cut[step + 1 :].sum() * steps[step]
        return float(-(weights * value).sum() + ridge * (beta @ beta) / 2), gradient

    start = np.zeros(columns + cuts)
    start[columns:] = _starting_cuts(target, weights, levels)
    found = scipy.optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}
    )
    solution = np.asarray(found.x, float)
    ends = solution[columns] + np.concatenate([[0.0], np.cumsum(np.exp(solution[columns + 1 :]))])
    return tuple(map(float, solution[:columns])), tuple(map(float, ends))


def _shift(table: Floats, upto: Floats, weights: Floats, offset: Floats, ridge: float) -> Floats:
    """What one cut has beside the common model: its end, and the weights more than three standard
    errors apart.

    Newton's steps of the logistic regression of "at most this level", the common model being the
    offset.
    """
    columns = np.hstack([np.ones((len(table), 1)), -table])
    free = np.ones(columns.shape[1], bool)
    penalty = np.full(columns.shape[1], max(ridge, 1e-6))
    found = np.zeros(columns.shape[1])
    curve = np.diag(penalty)
    for _ in range(2):  # all weights free, then those that need be
        found = np.zeros(columns.shape[1])
        design = columns[:, free]
        for _ in range(8):
            chance = scipy.special.expit(offset + columns @ found)
            slope = design.T @ (weights * (upto - chance)) - (penalty * found)[free]
            curve = (design * (weights * chance * (1 - chance))[:, None]).T @ design + np.diag(
                penalty[free]
            )
            found[free] += np.clip(np.linalg.solve(curve, slope), -2.0, 2.0)
        error = np.full(columns.shape[1], np.inf)
        error[free] = np.sqrt(np.diag(np.linalg.inv(curve)))
        apart = np.abs(found[1:]) > 3 * error[1:]
        free = np.concatenate([[bool(apart.any())], apart])
        if not apart.any():
            return np.zeros(columns.shape[1])
    return found


def _dot(weights: Sequence[float], columns: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, columns, strict=True))


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
