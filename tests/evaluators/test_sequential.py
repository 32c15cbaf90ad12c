"""Confidence sequences: what they promise is enumerated, what they cost is simulated."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from atts.errors import OptionError
from atts.evaluators import ConfidenceSequence, compare_in_order


def excluded(differences: tuple[float, ...], mean: float, level: float) -> bool:
    """Return whether the mean was ever outside the sequence's interval."""
    sequence = ConfidenceSequence(level)
    for difference in differences:
        sequence.add(difference)
        low, high = sequence.interval
        if not low <= mean <= high:
            return True
    return False


@pytest.mark.parametrize(("won", "lost"), [(0.3, 0.3), (0.5, 0.2), (0.05, 0.6)])
def test_every_sequence_of_five_problems_together_excludes_the_truth_seldom_enough(
    won: float, lost: float
) -> None:
    """All 243 sequences with their probabilities, at a level at which five problems can exclude
    something.
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
    """No difference is there: a 95 % interval that is looked at every time would mislead in a third
    of the runs.
    """
    draw = np.random.default_rng(5)
    runs = 50
    wrong = sum(
        compare_in_order(draw.choice([-1.0, 0.0, 1.0], 200, p=[0.15, 0.7, 0.15]).tolist()).settled
        != "undecided"
        for _ in range(runs)
    )
    assert wrong <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)


def test_a_difference_of_twenty_points_is_seen_within_a_hundred_problems() -> None:
    """The median of 21 runs is below a hundred, with three problems in ten differing."""
    draw = np.random.default_rng(6)
    found = [
        compare_in_order(draw.choice([-1.0, 0.0, 1.0], 400, p=[0.05, 0.7, 0.25]).tolist())
        for _ in range(21)
    ]
    assert np.median([one.problems for one in found]) <= 75
    assert all(one.settled == "better" and 0 <= one.low for one in found)


def test_sides_are_alike_and_near_ones_are_told() -> None:
    """Turned around, better is worse; with a margin, runs that never differ are alike, without one
    never decided.
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


def test_a_difference_is_one_of_shares() -> None:
    """Anything else is refused, and so is a level that is none."""
    with pytest.raises(OptionError, match="outside"):
        ConfidenceSequence().add(1.5)
    with pytest.raises(OptionError, match="level"):
        ConfidenceSequence(1.0)
