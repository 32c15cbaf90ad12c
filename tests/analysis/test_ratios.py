"""Tests of the confidence interval for a ratio of costs: the interval has its stated coverage, also
in runs of 30 problems.
"""

import math

import numpy as np
import pytest

from atts.analysis.comparison import ratio_interval
from scripts.studies.calibration import RATIOS


@pytest.mark.parametrize("law", ["long tails", "second cost mostly 0"])
@pytest.mark.parametrize("problems", [20, 30, 100])
def test_the_interval_covers_costs_with_long_tails_or_many_zeros(law: str, problems: int) -> None:
    """In 600 simulated pairs of runs, the interval covers the true ratio in at least 94 %. A
    bootstrap and the delta method cover the ratio less often.
    """
    (costs, known) = RATIOS[law]
    draw = np.random.default_rng(problems)
    ends = [ratio_interval(*costs(draw, problems)) for _ in range(600)]
    assert np.mean([low <= known <= high for low, high in ends]) >= 0.94


def test_the_interval_scales_with_the_unit_of_cost() -> None:
    """If the costs of the second run double relative to the first, both ends of the interval
    double. The lower end is never negative, and the upper end may be infinite.
    """
    draw = np.random.default_rng(1)
    for problems in (2, 3, 10, 50):
        first, second = RATIOS["long tails"][0](draw, problems)
        low, high = ratio_interval(first, second)
        assert 0 <= low <= second.sum() / first.sum() <= high
        assert ratio_interval(3 * first, 6 * second) == pytest.approx((2 * low, 2 * high))


def test_costs_that_vary_little_give_a_narrow_interval() -> None:
    """Thirty problems cost about 40 each in the first run and about 20 in the second. The interval
    of the ratio lies between 0.4 and 0.6.
    """
    draw = np.random.default_rng(2)
    low, high = ratio_interval(
        draw.poisson(40, 30).astype(float), draw.poisson(20, 30).astype(float)
    )
    assert 0.4 < low < 0.5 < high < 0.6


def test_costs_that_show_nothing_have_no_interval() -> None:
    """If there is only one problem, or the first run has no costs, the ratio has no interval; if
    the second run has no costs, the ratio is 0.
    """
    nothing = np.zeros(5)
    some = np.arange(1.0, 6)
    assert all(map(math.isnan, ratio_interval(some[:1], some[:1])))
    assert all(map(math.isnan, ratio_interval(nothing, some)))
    assert ratio_interval(some, nothing) == (0, 0)
    assert ratio_interval(some, some) == pytest.approx((1, 1))


def test_costs_in_a_single_problem_leave_the_ratio_unbounded() -> None:
    """If one problem has all costs of the second run, the ratio has no upper bound."""
    low, high = ratio_interval(np.ones(30), np.eye(30)[0])
    assert (low, high) == (0, math.inf)
