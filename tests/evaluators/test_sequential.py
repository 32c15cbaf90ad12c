"""Tests of confidence sequences: all outcomes are enumerated for the coverage, and runs simulated
for the delay.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from atts.errors import OptionError
from atts.evaluators import ConfidenceSequence, compare_in_order


def excluded(differences: tuple[float, ...], mean: float, level: float) -> bool:
    """Return whether the confidence sequence excludes the mean after any of the differences."""
    sequence = ConfidenceSequence(level)
    for difference in differences:
        sequence.add(difference)
        low, high = sequence.interval
        if not low <= mean <= high:
            return True
    return False


@pytest.mark.parametrize(("won", "lost"), [(0.3, 0.3), (0.5, 0.2), (0.05, 0.6)])
def test_sequences_of_five_problems_keep_their_level(won: float, lost: float) -> None:
    """Over all 243 sequences, weighted by their probabilities, the confidence sequence excludes the
    true mean no more often than the level allows.
    """
    level = 0.5
    missed = 0.0
    any_excluded = False
    chances = {1.0: won, -1.0: lost, 0.0: 1 - won - lost}
    for differences in product(chances, repeat=5):
        if excluded(differences, won - lost, level):
            any_excluded = True
            missed += math.prod(chances[difference] for difference in differences)
    assert any_excluded
    assert missed <= 1 - level


def test_looking_after_each_of_200_problems_misleads_in_one_run_of_twenty_at_most() -> None:
    """If two runs do not differ, a check after each of 200 problems reports a difference in at most
    about 5 % of simulations.
    """
    draw = np.random.default_rng(5)
    runs = 50
    wrong = sum(
        compare_in_order(draw.choice([-1.0, 0.0, 1.0], 200, p=[0.15, 0.7, 0.15]).tolist()).settled
        != "undecided"
        for _ in range(runs)
    )
    assert wrong <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)


def test_a_difference_of_twenty_points_is_seen_within_75_problems() -> None:
    """The runs differ on three in ten problems, by 20 points in total. In the median of 21
    simulations, the difference is detected within 75 problems.
    """
    draw = np.random.default_rng(6)
    found = [
        compare_in_order(draw.choice([-1.0, 0.0, 1.0], 400, p=[0.05, 0.7, 0.25]).tolist())
        for _ in range(21)
    ]
    assert np.median([one.problems for one in found]) <= 75
    assert all(one.settled == "better" and 0 <= one.low for one in found)


def test_exchanging_sides_exchanges_the_verdict() -> None:
    """Exchanging the two runs exchanges the verdicts "better" and "worse". Runs with the same
    results are called alike only if a margin is given.
    """
    draw = np.random.default_rng(7)
    differences = draw.choice([-1.0, 0.0, 1.0], 200, p=[0.05, 0.6, 0.35]).tolist()
    there = compare_in_order(differences)
    back = compare_in_order([-one for one in differences])
    assert (there.settled, back.settled) == ("better", "worse")
    assert (there.problems, there.low, there.high) == pytest.approx(
        (back.problems, -back.high, -back.low)
    )
    assert compare_in_order([0.0] * 300, points=5).settled == "alike"
    assert compare_in_order([0.0] * 300).settled == "undecided"


def test_only_differences_of_shares_are_accepted() -> None:
    """Numbers that are not differences of shares, and impossible levels, are refused."""
    with pytest.raises(OptionError, match="outside"):
        ConfidenceSequence().add(1.5)
    with pytest.raises(OptionError, match="level"):
        ConfidenceSequence(1.0)
