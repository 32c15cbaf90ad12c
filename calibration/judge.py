"""A learned judge, which predicts from the features of a chunk how much an escalation helps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atts.errors import CalibrationInputError

Floats = NDArray[np.float64]
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""The ridge penalties that are tried. A penalty of 1 weighs as much as one training example."""
_FOLDS = 5
_RESAMPLES = 1000
_LEAST_GROUPS = 10
_KIND = "atts judge"


@dataclass(frozen=True, slots=True)
class Examples:
    """Training examples: each chunk's features, the gain from an escalation, and the problem."""

    names: tuple[str, ...]  # names of the features, in the order of each list in `features`
    features: Sequence[Sequence[float]]
    gains: Sequence[float]
    problems: Sequence[str]


@dataclass(frozen=True, slots=True)
class AdvantageJudge:
    """A linear model that predicts the gain from an escalation, and its measured gain over a coin.

    The gain over a coin compares the judge with random escalation. It is the gain from escalating
    the share `rate` with the best predictions, minus the gain from escalating as many random
    chunks, per chunk. The gain is cross-validated by problem: each chunk is ranked by a judge that
    was fitted without the chunks of its problem.
    """

    names: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    mean_gain: float
    penalty: float
    rate: float
    # Accuracy gain per chunk of the judge over random escalation at the same rate: the estimate and
    # the two ends of its 95 % interval.
    over_coin: tuple[float, float, float]
    chunks: int
    problems: int
    fingerprint: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def beats_coin(self) -> bool:
        """Return True if the whole interval of the gain over a coin is above 0."""
        return self.over_coin[1] > 0

    def advantage(self, features: Sequence[float]) -> float:
        """Return the predicted gain from an escalation; NaN if a feature is NaN."""
        total = self.mean_gain
        for value, mean, scale, weight in zip(
            features, self.means, self.scales, self.weights, strict=True
        ):
            total += weight * (value - mean) / scale
        return total

    def score(self, features: Sequence[float]) -> float:
        """Return 2 plus the predicted gain, limited to [1, 3]; higher is worse."""
        advantage = self.advantage(features)
        return math.nan if math.isnan(advantage) else 2 + max(-1.0, min(1.0, advantage))

    def state(self) -> dict[str, Any]:
        """Return the judge as JSON, for `write_state`."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["fingerprint"] = dict(self.fingerprint)
        return {"kind": _KIND, "version": 1, **fields}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AdvantageJudge:
        """Make a judge from its state.

        :raises CalibrationInputError: if `state` is not the state of a judge.
        """
        if state.get("kind") != _KIND or state.get("version") != 1:
            raise CalibrationInputError(
                "judge", state.get("kind", "a file of another kind"), f"a file of {_KIND!r}"
            )
        values = {name: state.get(name) for name in cls.__slots__}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        numbers = ("means", "scales", "weights")
        if not all(isinstance(values[name], tuple) for name in ("names", *numbers)) or any(
            len(values[name] or ()) != len(values["names"] or ()) for name in numbers
        ):
            raise CalibrationInputError(
                "judge", "incomplete", "one mean, scale and weight for each feature"
            )
        return cls(**values)  # type: ignore[arg-type]  # checked above, and digested as a whole


def fit_judge(
    examples: Examples,
    rate: float,
    seed: int = 0,
    fingerprint: Mapping[str, object] | None = None,
) -> AdvantageJudge:
    """Fit a ridge regression of gains on standardised features, and measure its gain over random
    escalation.

    In the cross-validation, each penalty is chosen on training problems only. The problems on which
    the gain is measured influence neither the judge nor the penalty.

    :raises CalibrationInputError: if there are too few problems, or if a feature or gain is not
        finite.
    """
    features = np.asarray(examples.features, dtype=np.float64)
    gains = np.asarray(examples.gains, dtype=np.float64)
    names = sorted(set(examples.problems))
    if len(names) < _LEAST_GROUPS:
        raise CalibrationInputError(
            "number of problems with escalated chunks", len(names), f"at least {_LEAST_GROUPS}"
        )
    if not (np.isfinite(features).all() and np.isfinite(gains).all()):
        raise CalibrationInputError("features and gains", "not finite", "finite numbers")
    numbers = {name: number for number, name in enumerate(names)}
    groups = np.array([numbers[name] for name in examples.problems])
    predicted = np.array(cross_validated(examples, seed))
    penalty = _best_penalty(features, gains, groups, seed + 1)
    ridge = _Ridge(features, gains, penalty)
    return AdvantageJudge(
        names=examples.names,
        means=tuple(ridge.means.tolist()),
        scales=tuple(ridge.scales.tolist()),
        weights=tuple(ridge.weights.tolist()),
        mean_gain=ridge.intercept,
        penalty=penalty,
        rate=rate,
        over_coin=gain_over_coin(predicted, gains, groups, rate, seed),
        chunks=len(gains),
        problems=len(names),
        fingerprint=dict(fingerprint or {}),
    )


def cross_validated(examples: Examples, seed: int = 0) -> list[float]:
    """Return each chunk's gain as predicted by a judge that was fitted without the chunk's problem."""
    features = np.asarray(examples.features, dtype=np.float64)
    gains = np.asarray(examples.gains, dtype=np.float64)
    names = sorted(set(examples.problems))
    numbers = {name: number for number, name in enumerate(names)}
    groups = np.array([numbers[name] for name in examples.problems])
    folds = _folds(len(names), seed)[groups]
    predicted = np.zeros(len(gains))
    for fold in range(_FOLDS):
        test = folds == fold
        penalty = _best_penalty(features[~test], gains[~test], groups[~test], seed + 1)
        predicted[test] = _Ridge(features[~test], gains[~test], penalty)(features[test])
    values: list[float] = predicted.tolist()
    return values


def gain_over_coin(
    predicted: Floats, gains: Floats, groups: NDArray[np.int64], rate: float, seed: int
) -> tuple[float, float, float]:
    """Return how much accuracy per chunk a gate with these predictions gains over random
    escalation.

    The result includes a 95 % interval.
    """
    generator = np.random.default_rng(seed)
    members = [np.flatnonzero(groups == group) for group in range(int(groups.max()) + 1)]

    def gain(rows: NDArray[np.int64]) -> float:
        count = max(1, round(rate * len(rows)))
        best = rows[np.argsort(-predicted[rows], kind="stable")[:count]]
        return float((gains[best].mean() - gains[rows].mean()) * count / len(rows))

    whole = gain(np.arange(len(gains)))
    drawn = [
        gain(np.concatenate([members[group] for group in generator.integers(0, len(members), len(members))]))
        for _ in range(_RESAMPLES)
    ]  # fmt: skip
    low, high = np.quantile(drawn, (0.025, 0.975))
    return whole, float(low), float(high)


class _Ridge:
    """A ridge regression on standardised features; the intercept is not penalised."""

    def __init__(self, features: Floats, gains: Floats, penalty: float) -> None:
        self.means = features.mean(0)
        scales = features.std(0)
        self.scales = np.where(scales > 1e-12, scales, 1.0)
        self.intercept = float(gains.mean())
        rows = (features - self.means) / self.scales
        gram = rows.T @ rows + penalty * np.eye(rows.shape[1])
        self.weights = np.linalg.solve(gram, rows.T @ (gains - self.intercept))

    def __call__(self, features: Floats) -> Floats:
        """Return the predicted gain of each row of features."""
        predictions: Floats = (features - self.means) / self.scales @ self.weights + self.intercept
        return predictions


def _best_penalty(features: Floats, gains: Floats, groups: NDArray[np.int64], seed: int) -> float:
    """Return the penalty with the least squared error in a cross-validation by problem."""
    _, groups = np.unique(groups, return_inverse=True)
    folds = _folds(int(groups.max()) + 1, seed)[groups]
    errors: list[float] = []
    for penalty in PENALTIES:
        error = 0.0
        for fold in range(_FOLDS):
            test = folds == fold
            ridge = _Ridge(features[~test], gains[~test], penalty)
            error += float(((gains[test] - ridge(features[test])) ** 2).sum())
        errors.append(error)
    return PENALTIES[int(np.argmin(errors))]


def _folds(groups: int, seed: int) -> NDArray[np.int64]:
    """Return the index of the fold of each group; all folds have about the same size."""
    order = np.random.default_rng(seed).permutation(groups)
    folds = np.empty(groups, dtype=np.int64)
    folds[order] = np.arange(groups) % _FOLDS
    return folds
