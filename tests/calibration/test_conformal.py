"""Tests of p-values and thresholds by enumeration at small sizes, and of the effective size of
clustered scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

from atts.calibration.conformal import (
    by_cluster,
    coverage_interval,
    split_rank,
    split_threshold,
    summarise,
)
from atts.calibration.pools import Window
from atts.calibration.scores import PERPLEXITY, REAL, StoredScores
from atts.errors import CalibrationInputError


def p_value(stored: Iterable[float], score: float, theta: float = 1.0) -> float:
    """Return the p-value of a score among the stored scores, as the calibrator computes it."""
    window = Window()
    for one in stored:
        window.add(one)
    return window.rank(score).p(theta)


LEVELS = [Fraction(k, 24) for k in range(25)]
TIED = [
    (0, 0, 1),
    (0, 1, 1),
    (2, 2, 2),
    (0, 1, 1, 2),
    (0, 0, 1, 1, 2),
    (math.inf, 0, math.inf, -math.inf),
]


@pytest.mark.parametrize("scores", [*(tuple(range(n + 1)) for n in range(6)), *TIED])
def test_p_values_are_super_uniform_over_all_rank_orders(scores: tuple[float, ...]) -> None:
    """P(p <= a) <= a holds exactly, whichever of the exchangeable scores comes last, ties and
    infinities included.
    """
    p_values = [p_value(order[:-1], order[-1]) for order in permutations(scores)]
    for level in LEVELS:
        assert Fraction(sum(p <= level + 1e-12 for p in p_values), len(p_values)) <= level


@pytest.mark.parametrize("scores", [*(tuple(range(n + 1)) for n in range(6)), *TIED])
def test_smoothed_p_values_are_exactly_uniform(scores: tuple[float, ...]) -> None:
    """Over all orders and draws of the tie-breaker, P(p <= a) equals a; p is linear in the
    tie-breaker, so two values suffice.
    """
    for level in LEVELS:
        total = Fraction(0)
        count = 0
        for order in permutations(scores):
            low, high = (
                Fraction(p_value(order[:-1], order[-1], t)).limit_denominator(64) for t in (0, 1)
            )
            total += min(Fraction(1), max(Fraction(0), (level - low) / (high - low)))
            count += 1
        assert total / count == level


def test_paper_p_value_is_near_one_for_a_worse_score() -> None:
    """A score worse than all n stored scores has p = 1, and one better than all has p = 1 / (n +
    1).
    """
    assert p_value([1, 2, 3], 9) == 1
    assert p_value([1, 2, 3], 0) == 0.25


@pytest.mark.parametrize(
    ("n", "alpha"), [(9, 0.7), (19, 0.85), (24, 0.44), (49, 0.42), (99, 0.29), (149, 0.18)]
)
def test_split_rank_is_exact_where_floats_fail(n: int, alpha: float) -> None:
    """The rank is ceil((n + 1)(1 - alpha)), computed exactly from the decimal numbers that the user
    wrote.
    """
    assert split_rank(n, alpha) == math.ceil((n + 1) * (1 - Fraction(str(alpha))))


def test_float_ceilings_would_be_wrong_in_231_cases() -> None:
    """For 9 to 399 scores and whole percentages as rates, floating point would give a wrong rank in
    231 cases. atts therefore computes the rank exactly.
    """
    wrong = sum(
        math.ceil((n + 1) * (1 - a / 100)) != split_rank(n, Fraction(a, 100))
        for n in range(9, 400)
        for a in range(1, 100)
    )
    assert wrong == 231


def test_split_threshold_escalates_at_most_the_rate() -> None:
    """P(s > threshold) lies in (rate - 1/(n + 1), rate] over all orders; with too few scores
    nothing escalates, and rate 1 always escalates.
    """
    for n in range(1, 6):
        for rate in LEVELS[1:-1]:
            orders = list(permutations(range(n + 1)))
            over = Fraction(sum(o[-1] > split_threshold(o[:-1], rate) for o in orders), len(orders))
            assert rate - Fraction(1, n + 1) < over <= rate
    assert split_threshold([1.0, 2.0], 0.1) == math.inf
    assert split_threshold([1.0, 2.0], 1.0) == -math.inf


@pytest.mark.parametrize(
    ("n", "marginal", "low", "high"),
    [(100, 91, 0.848, 0.945), (500, 451, 0.877, 0.921), (1000, 901, 0.884, 0.915)],
)
def test_the_table_of_training_conditional_rates(
    n: int, marginal: int, low: float, high: float
) -> None:
    """Ranks and intervals equal those of the published table for rate 0.1."""
    assert split_rank(n, 0.1) == marginal
    assert list(coverage_interval(n, marginal)) == pytest.approx([low, high], abs=5e-4)


@pytest.mark.parametrize("bad", [math.nan])
def test_nan_is_refused_everywhere(bad: float) -> None:
    """NaN is refused both as a stored score and as a new score."""
    with pytest.raises(CalibrationInputError):
        split_threshold([bad], 0.5)
    for scale in (PERPLEXITY, REAL):
        with pytest.raises(CalibrationInputError):
            scale.nonconformity(bad)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, math.inf, "0.4", True, None])
def test_rates_outside_the_unit_interval_are_refused(rate: object) -> None:
    """A rate outside the unit interval is refused, and the error names the rate."""
    with pytest.raises(CalibrationInputError, match="rate"):
        split_rank(10, rate)  # type: ignore[arg-type]  # the mistake under test


def test_effective_size_explains_the_spread_of_clustered_rates() -> None:
    """With twenty questions of twenty dependent scores, the true rates spread as the effective size
    predicts.
    """
    draw = np.random.default_rng(0)
    rates = list[float]()
    sizes = list[float]()
    for _ in range(300):
        effect = draw.normal(size=(20, 1))
        scores = effect + draw.normal(size=(20, 20)) * 0.8
        summary = summarise(dict(enumerate(scores)))
        sizes.append(summary.effective)
        threshold = np.sort(scores.ravel())[239]
        rates.append(float(np.mean(draw.normal(size=4000) * math.hypot(1, 0.8) > threshold)))
    naive = math.sqrt(0.24 / 400)
    assert np.std(rates) > 2.5 * naive
    assert np.std(rates) == pytest.approx(math.sqrt(0.24 / float(np.mean(sizes))), rel=0.25)


def test_effective_sizes_of_published_arrays(array_of: Callable[..., StoredScores]) -> None:
    """With a correlation of about 0.6 within questions, 1,600 scores of 100 questions have an
    effective size of about 160, and 240 scores of 15 about 22.
    """
    for part, icc, effective in (
        ("ec846181", (0.57, 0.61), (155, 170)),
        ("7564d923", (0.55, 0.77), (19, 26)),
    ):
        stored = array_of(part)
        summary = summarise(by_cluster(stored.nonconformity, stored.questions))
        assert icc[0] <= summary.icc <= icc[1]
        assert effective[0] <= summary.effective <= effective[1]


def test_effective_size_of_extreme_clusterings() -> None:
    """Independent scores count in full, one question counts as one score, and infinite scores carry
    no correlation.
    """
    assert summarise({at: [float(at)] for at in range(7)}).effective == 7
    assert summarise({"q": [1.0, 2.0, 3.0]}).effective == 1
    assert summarise({}).effective == 0
    assert math.isfinite(summarise({"a": [1.0, 2.0, math.inf], "b": [5.0, 6.0]}).icc)
    with pytest.raises(CalibrationInputError):
        by_cluster([1.0], [])
