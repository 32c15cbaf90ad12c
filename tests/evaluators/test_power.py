"""Tests of power analysis and of the split of variance, against simulated comparisons."""

from __future__ import annotations

import numpy as np
import pytest

from atts.errors import OptionError
from atts.evaluators import (
    VarianceSplit,
    compare_runs,
    difference_spread,
    paired_power,
    variance_split,
)


def rows(draw: np.random.Generator, accuracy: np.ndarray, samples: int) -> list[list[bool]]:
    """Draw samples of each problem, correct with the problem's own probability."""
    return [(draw.uniform(size=samples) < p).tolist() for p in accuracy]


def test_the_split_is_unbiased_with_few_samples() -> None:
    """With only three samples per problem, the estimates of the variance between and within
    problems equal the true values on average over 300 runs.
    """
    draw = np.random.default_rng(0)
    splits: list[VarianceSplit] = []
    for _ in range(300):
        split = variance_split(rows(draw, draw.beta(2, 2, 100), 3))
        assert split is not None
        splits.append(split)
    # Beta(2, 2) has variance 1/20, and the mean of p(1 - p) is 1/5
    assert np.mean([one.between for one in splits]) == pytest.approx(0.05, abs=0.004)
    assert np.mean([one.within for one in splits]) == pytest.approx(0.2, abs=0.004)
    assert np.mean([one.share_between for one in splits]) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(("problems", "samples"), [(30, 16), (100, 4)])
def test_a_detectable_difference_has_80_percent_power(problems: int, samples: int) -> None:
    """If the true difference is the one that the plan calls detectable, a t test finds it in about
    80 % of simulated comparisons.
    """
    draw = np.random.default_rng(1)
    split = VarianceSplit(0.05, 0.18, problems)
    gain = paired_power(split, problems, samples).detectable / 100
    seen = 0
    runs = 600
    for _ in range(runs):
        # 0.18 is the mean of p(1 - p) over the problems' accuracies p in each run
        centre = np.where(draw.uniform(size=problems) < 0.5, 0.24, 0.76)
        first, second = (
            [sum(row) / samples for row in rows(draw, centre + side * gain / 2, samples)]
            for side in (-1, 1)
        )
        seen += compare_runs(first, second).p_value < 0.05
    assert 0.7 < seen / runs < 0.88


def test_the_problems_needed_shrink_with_samples_and_points() -> None:
    """Four times as many samples need a quarter of the problems, and a difference three times as
    large needs about a ninth.
    """
    split = VarianceSplit(0.1, 0.1, 40)
    few, many = paired_power(split, 40, 2), paired_power(split, 40, 8)
    assert few.needed[0] == pytest.approx(4 * many.needed[0], rel=0.01)
    assert many.needed[0] == pytest.approx(9 * many.needed[1], rel=0.03)
    assert "show a difference of" in str(many)
    with pytest.raises(OptionError):
        paired_power(split, 1, 8)


def test_the_spread_of_a_difference_excludes_sampling_noise() -> None:
    """The estimated variance of the difference in accuracy over problems excludes sampling noise.
    It is 0 if accuracies are the same, and 0.01 if half of the problems gain 0.2.
    """
    draw = np.random.default_rng(2)
    accuracy = draw.uniform(0.3, 0.7, 4_000)
    first = rows(draw, accuracy, 4)
    assert difference_spread(first, rows(draw, accuracy, 4)) == pytest.approx(0.0, abs=0.01)
    moved = accuracy + np.where(draw.uniform(size=4_000) < 0.5, 0.2, 0.0)
    assert difference_spread(first, rows(draw, moved, 4)) == pytest.approx(0.01, abs=0.006)
    assert difference_spread([[True]], [[True, False]]) is None


def test_single_samples_give_no_split_of_variance() -> None:
    """A single sample per problem does not show the variance within problems, so it is not
    estimated. If all rollouts have the same result, the text says so.
    """
    assert variance_split([[True], [False]]) is None
    alike = variance_split([[True, True], [True, True]])
    assert alike is not None
    assert str(alike).startswith("all rollouts of 2 problems had the same result")


def test_no_detectable_difference_exceeds_100_points() -> None:
    """With three problems of two samples, a difference would have to be 126 points to be detected.
    This is impossible, so the text says that no difference is detectable.
    """
    words = str(paired_power(VarianceSplit(0.0, 0.17, 3), 3, 2))
    assert words.startswith("3 problems x 2 samples cannot show any difference between methods")


@pytest.mark.parametrize(("within", "spread"), [(0.0, 0.0), (0.1, -1.0), (0.1, float("nan"))])
def test_equal_rollouts_give_no_power(within: float, spread: float) -> None:
    """If the variance is zero or invalid, atts refuses to estimate power, because any difference
    would appear detectable.
    """
    with pytest.raises(OptionError, match="variance"):
        paired_power(VarianceSplit(0.1, within, 5), 10, 4, spread)
