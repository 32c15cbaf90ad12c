"""Tests of paired comparisons of two runs on the same problems."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atts.errors import OptionError
from atts.evaluators.metrics.paired import (
    compare_runs,
    difference_estimate,
    difference_p,
    mcnemar,
    problems_needed,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=40), st.sampled_from([0.8, 0.9, 0.95, 0.99])
)
def test_interval_and_p_never_disagree(differences: list[int], level: float) -> None:
    """The p-value is below 1 - level exactly if the confidence interval excludes 0."""
    delta = np.array(differences, dtype=float) / 4
    found = compare_runs(np.zeros(delta.size), delta, level=level)
    excludes = found.difference.low > 0 or found.difference.high < 0
    if abs(found.p_value - (1 - level)) > 1e-9:
        assert excludes == (found.p_value < 1 - level)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=40),
    st.sampled_from([1e-300, 1e-17, 1e-3, 1e150, 1e300]),
)
def test_the_unit_of_the_values_does_not_matter(differences: list[int], unit: float) -> None:
    """The p-value does not change if all values are multiplied by a constant, even if squares of
    the differences exceed the range of floats.
    """
    delta = np.array(differences, dtype=float)
    one = compare_runs(np.zeros(delta.size), delta)
    other = compare_runs(np.zeros(delta.size), delta * unit)
    assert other.p_value == pytest.approx(one.p_value, rel=1e-9)
    assert other.problems_needed == one.problems_needed
    # smaller units are left out, because their values are shares, and intervals of shares are cut
    # at 1
    if delta.any() and unit > 1:
        assert other.difference.low / unit == pytest.approx(
            other.difference.value / unit * 2 - other.difference.high / unit
        )


def test_undefined_values_count_in_no_column() -> None:
    """A problem with a missing value counts as neither better, worse nor tied. A comparison without
    problems has p = 1 and no rates.
    """
    found = compare_runs([math.nan, 0.5, 0.5], [1.0, 0.5, 1.0])
    assert (found.better, found.worse, found.tied) == (1, 0, 1)
    assert math.isnan(found.difference.value)
    empty = compare_runs([], [])
    assert (empty.p_value, empty.tied, empty.problems_needed) == (1.0, 0, None)
    assert math.isnan(empty.first)


def test_small_gains_on_every_problem_are_noticed() -> None:
    """If one run is better by 0.05 on each of 30 problems, the interval is narrow around 0.05 and
    excludes 0.
    """
    found = compare_runs([0.5] * 30, [0.55] * 30)
    assert 0.04 < found.difference.low < found.difference.high < 0.06
    assert found.p_value < 1e-9


def test_exchanging_the_runs_flips_the_interval() -> None:
    """Exchanging the runs changes the sign of both ends of the interval and leaves p unchanged."""
    rng = np.random.default_rng(4)
    first, second = rng.binomial(4, 0.5, (2, 20)) / 4
    one = compare_runs(first, second)
    two = compare_runs(second, first)
    assert (two.difference.low, two.difference.high) == (-one.difference.high, -one.difference.low)
    assert one.p_value == two.p_value


@pytest.mark.parametrize("samples", [1, 4, 16, 64])
@pytest.mark.parametrize("problems", [15, 30, 100])
def test_coverage_and_power(problems: int, samples: int) -> None:
    """In 1,500 simulated pairs of runs, the interval covers the true difference in about 95 %. Its
    power is at most 5 points lower than that of Student's t test.
    """
    rng = np.random.default_rng([problems, samples])
    runs = 1_500
    chances = rng.beta(2.0, 2.0, (runs, problems))
    better = chances + 0.5 * chances * (1 - chances)
    delta = (rng.binomial(samples, better) - rng.binomial(samples, chances)) / samples
    found = [difference_estimate(row) for row in delta]
    covered = np.mean([each.low <= 0.1 <= each.high for each in found])
    power = np.mean([each.low > 0 or each.high < 0 for each in found])
    plain = np.mean(stats.ttest_1samp(delta, 0, axis=1).pvalue < 0.05)
    assert 0.93 <= covered <= 0.97
    assert power >= plain - 0.05


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_mcnemar_is_the_exact_binomial_test(pairs: list[tuple[bool, bool]]) -> None:
    """McNemar's p-value is that of an exact binomial test on the problems that only one run solved.
    Its mid-p value is at most this p-value.
    """
    first = [a for a, _ in pairs]
    second = [b for _, b in pairs]
    found = mcnemar(first, second)
    lost = found.first_only
    won = found.second_only
    assert found.both + lost + won + found.neither == len(pairs)
    expected = stats.binomtest(won, lost + won, 0.5).pvalue if lost + won else 1.0
    assert found.p_value == pytest.approx(expected)
    assert found.mid_p <= found.p_value + 1e-12
    assert mcnemar(second, first).p_value == pytest.approx(found.p_value)


def test_equal_runs_do_not_differ() -> None:
    """For two runs with the same values the difference is 0 and p is 1. No number of problems would
    show a difference between them.
    """
    found = compare_runs([0.5, 1.0, 0.0], [0.5, 1.0, 0.0])
    assert (found.difference.value, found.p_value) == (0, 1)
    assert (found.better, found.worse, found.tied, found.problems_needed) == (0, 0, 3, None)


def test_ties_alone_do_not_prove_runs_equal() -> None:
    """If all problems are tied, the interval is not empty, because problems outside the sample may
    differ. It shrinks as the number of problems grows.
    """
    few, many = (compare_runs([0.5] * n, [0.5] * n).difference for n in (40, 400))
    assert (1 - few.high) ** 40 == pytest.approx(0.05)
    assert few.low == -few.high
    assert 0 < many.high < few.high
    edge = compare_runs([0.0] * 40, [1.0] * 40).difference
    assert (edge.value, edge.high) == (1, 1)
    assert edge.low < 1


def test_a_comparison_prints_rates_difference_and_counts() -> None:
    """The text of a comparison has both rates, the difference with interval and p-value, counts of
    better and worse problems, and the problems needed.
    """
    words = str(compare_runs([0.2, 0.4, 0.9, 0.5] * 5, [0.4, 0.4, 0.8, 0.7] * 5))
    for part in (
        "0.500 → 0.575",
        "difference 0.075 [",
        "p = ",
        "better on 10, worse on 5, tied on 5",
        "problems would show a difference of this size",
    ):
        assert part in words


def test_pairs_show_what_separate_intervals_hide() -> None:
    """The separate intervals of two runs overlap, because problems differ more in difficulty than
    the runs in accuracy. The paired test nevertheless shows the difference between the runs.
    """
    rng = np.random.default_rng(3)
    chances = rng.beta(0.5, 0.5, 60) * 0.9
    first = chances
    second = chances + 0.05 + rng.normal(0, 0.02, 60)
    found = compare_runs(first, second)
    assert found.difference.low > 0
    assert found.p_value < 0.001
    separate = (first.std(ddof=1) + second.std(ddof=1)) / math.sqrt(60) * 1.96
    assert separate > 3 * found.difference.value


def test_the_interval_of_a_difference_covers() -> None:
    """The interval covers the true difference in 95 % of 300 pairs of runs, within 3.5 deviations,
    with 40 problems of 8 samples.
    """
    rng = np.random.default_rng(1)
    hits = 0
    runs = 300
    for _ in range(runs):
        chances = rng.beta(1.0, 1.0, 40)
        better = chances + 0.3 * chances * (1 - chances)
        first = rng.binomial(8, chances) / 8
        second = rng.binomial(8, better) / 8
        found = compare_runs(first, second).difference
        hits += found.low <= 0.3 / 6 <= found.high
    assert 0.95 - 3.5 * math.sqrt(0.0475 / runs) <= hits / runs


@pytest.mark.parametrize("samples", [1, 8])
def test_the_p_value_is_small_as_often_as_it_says(samples: int) -> None:
    """In 1,000 simulated pairs of runs with the same true accuracy, p is at most 0.1 in about a
    tenth of the pairs or fewer.
    """
    rng = np.random.default_rng(2)
    small = 0
    for _ in range(1_000):
        chances = rng.beta(1.0, 1.0, 15)
        delta = (rng.binomial(samples, chances) - rng.binomial(samples, chances)) / samples
        small += difference_p(delta) <= 0.1
    assert small / 1_000 <= 0.1 + 3 * math.sqrt(0.09 / 1_000)


def test_the_number_of_problems_gives_the_power_it_promises() -> None:
    """In simulations of a t test, the computed number of problems gives about 80 % power, and half
    as many give less than 60 %.
    """
    rng = np.random.default_rng(5)
    needed = problems_needed(0.3, 0.1)

    def power(problems: int) -> float:
        delta = rng.normal(0.1, 0.3, (2000, problems))
        return float(np.mean(stats.ttest_1samp(delta, 0, axis=1).pvalue < 0.05))

    assert power(needed) == pytest.approx(0.8, abs=0.03)
    assert power(needed // 2) < 0.6


def test_problems_needed_for_single_answers() -> None:
    """To show a difference of 5 points from single answers, two independent runs need more than
    1,500 problems, and related runs need 400 to 600.
    """
    difference = 0.05
    disagree = 0.45 * 0.50 + 0.55 * 0.50
    independent = problems_needed(math.sqrt(disagree - difference**2), difference)
    related = problems_needed(math.sqrt(0.15 - difference**2), difference)
    assert independent > 1500
    assert 400 < related < 600
    assert problems_needed(0.5, 0.1, power=0.9) > problems_needed(0.5, 0.1)
    assert problems_needed(0.0, 0.1) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: compare_runs([1.0], [1.0, 0.0]),
        lambda: compare_runs([[1.0]], [[1.0]]),
        lambda: compare_runs([1.0, math.inf], [1.0, 0.0]),
        lambda: compare_runs(["right"], ["wrong"]),
        lambda: mcnemar([True], []),
        lambda: problems_needed(0.5, 0.0),
        lambda: problems_needed(-0.5, 0.1),
        lambda: problems_needed(math.inf, 0.1),
        lambda: problems_needed(0.5, 0.1, power=1.0),
    ],
)
def test_impossible_comparisons_are_errors(wrong: Any) -> None:
    """The error for an impossible comparison names the fault, and no default replaces the argument."""
    with pytest.raises(OptionError):
        wrong()


def test_too_little_to_compare_is_undefined() -> None:
    """A comparison of one problem, or of a rate that is undefined itself, is undefined."""
    assert math.isnan(compare_runs([1.0], [0.0]).difference.value)
    assert math.isnan(compare_runs([1.0, math.nan], [0.0, 1.0]).difference.value)


@pytest.mark.parametrize(("problems", "samples"), [(30, 1), (30, 8), (40, 16)])
@pytest.mark.parametrize("truth", [0.02, 0.95, 0.99])
def test_the_interval_covers_if_few_problems_differ(
    problems: int, samples: int, truth: float
) -> None:
    """The interval covers the true difference for rates near 0 and 1, over 200 pairs of runs."""
    rng = np.random.default_rng([problems, samples, round(1000 * truth)])
    hits = 0
    runs = 200
    for _ in range(runs):
        chances = rng.beta(truth / 2, (1 - truth) / 2, (2, problems))
        better = np.where(rng.random(problems) < 0.2, chances[1], chances[0])
        better += 0.3 * (1 - better)
        first = rng.binomial(samples, chances[0])
        second = rng.binomial(samples, better)
        found = difference_estimate((second - first) / samples)
        hits += found.low <= 0.3 * (1 - truth) <= found.high
    assert hits / runs >= 0.95 - 3.5 * math.sqrt(0.0475 / runs)
