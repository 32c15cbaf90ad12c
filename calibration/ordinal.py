"""Ordered levels of chunks, predicted with conformal sets and tested actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy
from numpy.typing import NDArray

from atts.calibration.certificates import betting_p_value
from atts.calibration.conformal import split_rank
from atts.calibration.guarantees import TEXTS
from atts.calibration.pools import Ranks
from atts.calibration.rates import check_fraction
from atts.core import Action, Features
from atts.errors import CalibrationInputError

LEVELS: tuple[Action, ...] = ("accept", "verify", "escalate")
"""Levels of a chunk, from one that needs no target to one that needs it all."""

Row = Sequence[float | None]
"""One chunk's features; None where a feature does not exist (no sibling has answered yet)."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OrdinalModel:
    """P(level <= k) = logistic(cut_k - weights . x), the cumulative-logit model (McCullagh, 1980).

    x are the standardised features with an indicator per missing one. Where the odds of the levels
    are not proportional, `shifts` are what each cut's weights have in addition to the common ones
    (Peterson and Harrell, 1990); the probabilities are then made to grow with the level.
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
        """Return the linear part: larger leans to the last level.

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
        columns = list[float]()
        for value, centre, spread in zip(row, self.centre, self.spread, strict=True):
            columns.append(0.0 if value is None else (value - centre) / spread)
        for place in self.sometimes_missing:
            columns.append(float(row[place] is None))
        return columns

    def probabilities(self, row: Row) -> tuple[float, ...]:
        """Return the probability of each level, in order; they sum to 1."""
        lean = self.lean(row)
        leans = [lean] * len(self.cuts)
        if self.shifts:
            columns = self._columns(row)
            leans = [lean + _dot(shift, columns) for shift in self.shifts]
        # P(level <= k); shifted cuts may cross far from the data, so each is at least the one before
        cumulative = [0.0]
        for cut, cut_lean in zip(self.cuts, leans, strict=True):
            cumulative.append(max(cumulative[-1], _logistic(cut - cut_lean)))
        cumulative.append(1.0)
        return tuple(max(0.0, high - low) for low, high in pairwise(cumulative))


def fit_ordinal(
    rows: Sequence[Row],
    labels: Sequence[str],
    features: Sequence[str],
    levels: Sequence[str] = LEVELS,
    ridge: float = 1.0,
) -> OrdinalModel:
    """Return the model of greatest penalised likelihood.

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
    # of each cut: the shift of its end, then those of its weights
    cut_shifts = [
        _shift(table, (target <= cut).astype(float), weights, offset=end - lean, ridge=ridge)
        for cut, end in enumerate(cuts)
    ]
    shifts: tuple[tuple[float, ...], ...] = ()
    if any(shift.any() for shift in cut_shifts):
        shifts = tuple(tuple(float(value) for value in shift[1:]) for shift in cut_shifts)
    return OrdinalModel(
        levels=tuple(levels),
        features=tuple(features),
        centre=centre,
        spread=spread,
        sometimes_missing=missing,
        weights=coefficients,
        cuts=tuple(end + float(shift[0]) for end, shift in zip(cuts, cut_shifts, strict=True)),
        rows=len(rows),
        shifts=shifts,
    )


def _standardised(
    rows: Sequence[Row], features: Sequence[str]
) -> tuple[Floats, tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Return the table of standardised features, their means and spreads, and which go missing.

    Missing entries are 0; the indicators of features that are ever missing are further columns.
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
    """Return weights and cuts of the common model.

    The parameters are the weights, the first cut and the logarithms of the steps between cuts, so
    that the cuts stay in order.
    """
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
    optimum = scipy.optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}
    )
    solution = np.asarray(optimum.x, float)
    steps = np.exp(solution[columns + 1 :])
    ends = solution[columns] + np.concatenate([[0.0], np.cumsum(steps)])
    return tuple(map(float, solution[:columns])), tuple(map(float, ends))


def _shift(table: Floats, upto: Floats, weights: Floats, offset: Floats, ridge: float) -> Floats:
    """Return what one cut has in addition to the common model: its end, then its weights.

    Only weights more than three standard errors apart are kept; 0 for the others. They come from
    Newton steps of the logistic regression of "at most this level", with the common model as
    offset.
    """
    columns = np.hstack([np.ones((len(table), 1)), -table])
    free = np.ones(columns.shape[1], bool)
    penalty = np.full(columns.shape[1], max(ridge, 1e-6))
    shift = np.zeros(columns.shape[1])
    curve = np.diag(penalty)
    for _ in range(2):  # all weights free, then those that need to be
        shift = np.zeros(columns.shape[1])
        design = columns[:, free]
        for _ in range(8):
            chance = scipy.special.expit(offset + columns @ shift)
            slope = design.T @ (weights * (upto - chance)) - (penalty * shift)[free]
            information = (design * (weights * chance * (1 - chance))[:, None]).T @ design
            curve = information + np.diag(penalty[free])
            shift[free] += np.clip(np.linalg.solve(curve, slope), -2.0, 2.0)
        error = np.full(columns.shape[1], np.inf)
        error[free] = np.sqrt(np.diag(np.linalg.inv(curve)))
        apart = np.abs(shift[1:]) > 3 * error[1:]
        free = np.concatenate([[bool(apart.any())], apart])
        if not apart.any():
            return np.zeros(columns.shape[1])
    return shift


def _dot(weights: Sequence[float], columns: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, columns, strict=True))


def _log_interval(upper: Floats, lower: Floats) -> tuple[Floats, Floats, Floats]:
    """Return log(logistic(upper) - logistic(lower)) and its derivatives, stable in both tails."""
    gap = np.maximum(upper - lower, 1e-10)
    ratio = np.exp(-gap)  # 0 at an open end
    value = scipy.special.log_expit(upper) + scipy.special.log_expit(-lower) + np.log1p(-ratio)
    inside = ratio / -np.expm1(-gap)
    return value, scipy.special.expit(-upper) + inside, -scipy.special.expit(lower) - inside


def _starting_cuts(target: NDArray[np.int64], weights: Floats, levels: int) -> Floats:
    """Return the cuts of a model without features, as a first cut and logarithms of the steps."""
    shares = np.bincount(target, weights, levels) / weights.sum()
    ends = scipy.special.logit(np.clip(np.cumsum(shares)[:-1], 1e-6, 1 - 1e-6))
    return np.concatenate([ends[:1], np.log(np.maximum(np.diff(ends), 1e-3))])


def _logistic(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-min(value, 700.0)))
    grown = math.exp(max(value, -700.0))
    return grown / (1 + grown)


Probabilities = Sequence[float]


def nested_windows(probabilities: Probabilities) -> list[range]:
    """Return contiguous windows of levels, from the most probable level to all.

    Each has one level more than the one before. It is the heaviest window of its length that
    contains the one before it, which is growing towards the heavier neighbour. Shortest windows
    need not nest for other probabilities than unimodal ones, and coverage needs nesting.

    >>> [list(window) for window in nested_windows((0.35, 0.05, 0.30, 0.30))]
    [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    """
    _check(probabilities)
    mode = max(range(len(probabilities)), key=lambda level: probabilities[level])
    low = mode
    high = mode + 1
    windows = [range(low, high)]
    while high - low < len(probabilities):
        left = probabilities[low - 1] if low else -1.0
        right = probabilities[high] if high < len(probabilities) else -1.0
        if left > right:
            low -= 1
        else:
            high += 1
        windows.append(range(low, high))
    return windows


def entry_mass(probabilities: Probabilities, level: int) -> float:
    """Return the mass of the largest nested window without this level: its conformity score.

    0 for the most probable level. This is ordinal APS (Lu et al., 2022), with windows that nest.
    """
    inside = 0.0
    for window in nested_windows(probabilities):
        if level in window:
            return inside
        inside = math.fsum(probabilities[place] for place in window)
    raise CalibrationInputError("level", level, f"a place among {len(probabilities)} levels")


class LevelSets:
    """Sets that contain the true level with probability at least 1 - alpha.

    They are split-conformal sets, calibrated on labelled chunks. The guarantee is over a new
    labelled chunk exchangeable with the calibration ones, which were not used to fit the
    probabilities. Chunks of one question count as many only if questions are many: see `guarantee`.
    """

    __slots__ = ("_alpha", "_questions", "_scores")

    def __init__(self, alpha: float = 0.1) -> None:
        """:raises CalibrationInputError: for alpha outside (0, 1)."""
        check_fraction("alpha", alpha)
        self._alpha = alpha
        self._scores = Ranks()
        self._questions = set[str]()

    def __len__(self) -> int:
        return len(self._scores)

    def learn(self, probabilities: Probabilities, level: int, question: str = "") -> None:
        """Store one labelled chunk."""
        self._scores.add(entry_mass(probabilities, level))
        self._questions.add(question)

    def levels(self, probabilities: Probabilities) -> range:
        """Return the set of a new chunk; all levels while labelled ones are too few for less."""
        rank = split_rank(len(self._scores), self._alpha)
        threshold = self._scores.kth(rank) if rank <= len(self._scores) else math.inf
        for window in nested_windows(probabilities):
            inside = math.fsum(probabilities[place] for place in window)
            if inside > threshold:
                return window
        return range(len(probabilities))

    @property
    def guarantee(self) -> str:
        """Return what the sets promise, in words."""
        questions = len(self._questions)
        covered = 1 - self._alpha
        return TEXTS["levels"]["guarantee"].format(
            labelled=len(self), questions=questions, covered=covered
        )

    @property
    def voided_by(self) -> str:
        """Return what makes that promise empty, in words."""
        return TEXTS["levels"]["voided_by"]


def _check(probabilities: Probabilities) -> None:
    total = math.fsum(probabilities)
    is_law = all(p >= 0 for p in probabilities) and math.isclose(total, 1, abs_tol=1e-6)
    if not probabilities or not is_law:
        raise CalibrationInputError(
            "probabilities of levels", tuple(probabilities), "numbers from 0 that sum to 1"
        )


# Thresholds tried from the strictest down; each ladder has an equal part of the allowed error. The
# second does not stop where only the strictest thresholds have too few chunks to pass.
_LADDERS = ((0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5), (0.8, 0.7, 0.6, 0.5))
# Tests and fits are repeated whenever there are a quarter more labels.
_GROWTH = 1.25
_FIRST = 20  # labels at the first test
_FIRST_FIT = 60  # labels at the first fit
_KEPT = 20_000  # labels remembered


class ActionRule:
    """A rule that acts where the probability of a level is at least a tested threshold.

    The threshold is tested to be wrong at most `alpha` of the time, by Learn-then-Test on labelled
    chunks: against "of the chunks acted on, more than alpha are wrong" a capital is bet question by
    question. Each question counts as one however many chunks it has, for they move together; so
    this assumes independent questions. Labels must not depend on what was decided: they come from
    the scores of chunks that were scored whatever the evidence said.
    """

    __slots__ = ("_alpha", "_chunks", "_count", "_kept", "_next", "threshold")

    def __init__(self, alpha: float, kept: float = 0.9) -> None:
        """:raises CalibrationInputError: for alpha or `kept` outside (0, 1)."""
        check_fraction("alpha", alpha)
        check_fraction("kept", kept)
        self._alpha = alpha
        self._kept = kept
        # by question, in the order in which they came: probability, and whether acting were wrong
        self._chunks = dict[str, list[tuple[float, bool]]]()
        self._count = 0
        self._next = _FIRST
        self.threshold = math.inf

    def learn(self, probability: float, wrong: bool, question: str) -> None:
        """Take a labelled chunk, and the probability from a model that did not know its label."""
        self._chunks.setdefault(question, []).append((probability, wrong))
        self._count += 1
        if self._count >= self._next:
            self._next = math.ceil(self._count * _GROWTH)
            self._test()

    @property
    def guarantee(self) -> str:
        """Return what is promised, in words."""
        kind = "acts" if math.isfinite(self.threshold) else "waits"
        return TEXTS["actions"][kind].format(
            rule=self,
            alpha=self._alpha,
            kept=self._kept,
            labelled=self._count,
            questions=len(self._chunks),
        )

    def _test(self) -> None:
        while self._count > _KEPT:  # drop whole questions, the oldest first
            oldest = next(iter(self._chunks))
            self._count -= len(self._chunks.pop(oldest))
        # [chunks, (probability, wrong)], and where each question begins and the last one ends
        ends = np.cumsum([0, *map(len, self._chunks.values())])
        table = np.array([chunk for chunks in self._chunks.values() for chunk in chunks], float)
        passed = list[float]()
        for ladder in _LADDERS:
            passed.extend(self._thresholds_passed(ladder, table, ends))
        self.threshold = min(passed, default=math.inf)

    def _thresholds_passed(
        self, ladder: tuple[float, ...], table: NDArray[np.float64], ends: NDArray[np.int64]
    ) -> list[float]:
        """Return the thresholds of a ladder down to the first that fails its test."""
        share = (1 - self._kept) / len(_LADDERS)
        passed = list[float]()
        for threshold in ladder:
            # Of each question: alpha plus the mean over its chunks of (wrong - alpha) where it is
            # acted on. The expectation is at most alpha iff at most alpha of the actions are wrong.
            excess = np.where(table[:, 0] >= threshold, table[:, 1] - self._alpha, 0.0)
            losses = self._alpha + np.add.reduceat(excess, ends[:-1]) / np.diff(ends)
            if betting_p_value(np.clip(losses, 0.0, 1.0), self._alpha) > share:
                break
            passed.append(threshold)
        return passed


FEATURES = ("draft_evidence", "length", "turn", "answered", "agreement", "support")
"""What `feature_row` makes of a chunk's evidence, in this order."""


def feature_row(evidence: Features) -> Row:
    """Return the features named in `FEATURES`.

    "agreement" is the share of answered siblings behind the leading answer, "support" the same with
    the sign of whether this chunk's own answer is that one. Both are missing until a sibling has
    answered.
    """
    is_finite = math.isfinite(evidence.draft_evidence)
    draft_evidence = evidence.draft_evidence if is_finite else None
    agreement = None
    support = None
    if evidence.answered > 0:
        sign = 0.0
        if evidence.has_answer:
            sign = 1.0 if evidence.agrees else -1.0
        agreement = evidence.agreement
        support = sign * evidence.agreement
    return (
        draft_evidence,
        math.log1p(evidence.tokens),
        math.log1p(evidence.turn),
        math.log1p(evidence.answered),
        agreement,
        support,
    )


class OrdinalFit:
    """A cumulative-logit model that is refitted as labels arrive, with its sets and actions.

    Sets and actions are calibrated on labels that the model had not seen. A set contains the level
    of a chunk often enough over all chunks, the unclear ones included. What is done on the model's
    word alone is tested by itself: see `ActionRule`. Every label first enters both with the
    probabilities of a model that did not know it, then the data of the next fit. Refits happen
    after 60 labels and whenever there are a quarter more.
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
        # Sets and actions are calibrated on labels that the model has not seen: so first these.
        probabilities = self._probabilities(row)
        if probabilities:
            self.sets.learn(probabilities, LEVELS.index(level), question)
            self.accept.learn(probabilities[0], level != "accept", question)
            self.escalate.learn(probabilities[-1], level != "escalate", question)
        self._rows.append(tuple(row))
        self._labels.append(level)
        if len(self._rows) >= self._next_fit:
            self._next_fit = math.ceil(len(self._rows) * _GROWTH)
            del self._rows[:-_KEPT], self._labels[:-_KEPT]
            self.model = fit_ordinal(self._rows, self._labels, self._features)

    def levels(self, row: Row) -> tuple[Action, ...]:
        """Return the conformal set of a chunk.

        It has every level before the first fit, or where the row lacks what no fitted row lacked.
        """
        probabilities = self._probabilities(row)
        if not probabilities:
            return LEVELS
        window = self.sets.levels(probabilities)
        return LEVELS[window.start : window.stop]

    def action(self, row: Row) -> Action:
        """Return what may be done with a chunk on the model's word; "verify" where no test passed."""
        probabilities = self._probabilities(row)
        if not probabilities:
            return "verify"
        if probabilities[0] >= self.accept.threshold:
            return "accept"
        if probabilities[-1] >= self.escalate.threshold:
            return "escalate"
        return "verify"

    def _probabilities(self, row: Row) -> tuple[float, ...]:
        """Return the probability of each level; empty where the model knows none.

        That is before the first fit, and where a feature is missing that never was in the fit: the
        model cannot tell what it means that such a feature is missing.
        """
        if self.model is None:
            return ()
        known = self.model.sometimes_missing
        is_familiar = all(value is not None or place in known for place, value in enumerate(row))
        return self.model.probabilities(row) if is_familiar else ()
