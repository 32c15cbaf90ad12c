"""The interval of a ratio of costs holds it as often as it says, in runs of 30 problems too."""

import math

import numpy as np
import pytest

from atts.analysis.comparison import ratio_interval
from scripts.studies.calibration import RATIOS


@pytest.mark.parametrize("law", ["long tails", "second mostly nothing"])
@pytest.mark.parametrize("problems", [20, 30, 100])
def test_it_covers_where_costs_have_tails_or_are_mostly_nothing(law: str, problems: int) -> None:
    """The interval covers in at least 94 % of 600 simulated pairs of runs; a bootstrap and the
    delta method cover in fewer.
    """
    (costs, known) = RATIOS[law]
    draw = np.random.default_rng(problems)
    ends = [ratio_interval(*costs(draw, problems)) for _ in range(600)]
    assert np.mean([low <= known <= high for low, high in ends]) >= 0.94


def test_it_lies_around_the_ratio_and_takes_any_unit() -> None:
    """Doubling the second's costs doubles both ends; the upper one may be infinite, the lower one
    never negative.
    """
    draw = np.random.default_rng(1)
    for problems in (2, 3, 10, 50):
        first, second = RATIOS["long tails"][0](draw, problems)
        low, high = ratio_interval(first, second)
        assert 0 <= low <= second.sum() / first.sum() <= high
        assert ratio_interval(3 * first, 6 * second) == pytest.approx((2 * low, 2 * high))


def test_costs_that_vary_little_are_told_apart() -> None:
    """Thirty problems of counts near 40 and 20 give an interval a tenth wide."""
    draw = np.random.default_rng(2)
    low, high = ratio_interval(
        draw.poisson(40, 30).astype(float), draw.poisson(20, 30).astype(float)
    )
    assert 0.4 < low < 0.5 < high < 0.6


def test_what_says_nothing_has_no_interval() -> None:
    """One problem, or a first run that cost nothing; a second that cost nothing has the ratio 0."""
    nothing = np.zeros(5)
    some = np.arange(1.0, 6)
    assert all(map(math.isnan, ratio_interval(some[:1], some[:1])))
    assert all(map(math.isnan, ratio_interval(nothing, some)))
    assert ratio_interval(some, nothing) == (0, 0)
    assert ratio_interval(some, some) == pytest.approx((1, 1))


def test_one_problem_that_is_all_there_was_leaves_the_ratio_open() -> None:
    """Without that problem the second run would have cost nothing, so its ratio has no bound."""
    low, high = ratio_interval(np.ones(30), np.eye(30)[0])
    assert (low, high) == (0, math.inf)
