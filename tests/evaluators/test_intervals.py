"""Tests of confidence intervals: they equal textbook values and have the stated coverage."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import (
    Estimate,
    effective_n,
    mean_estimate,
    share_estimate,
)
from atts.evaluators.metrics.rates import Votes, maj_at_k, pass_at_k
from atts.evaluators.metrics.wilson import wilson_interval

Counted = NDArray[np.int64]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.data())
def test_wilson_of_single_samples_is_the_textbook_interval(n: int, data: st.DataObject) -> None:
    """For single samples, Wilson's interval equals scipy's for every number of correct samples."""
    right = data.draw(st.integers(0, n))
    found = mean_estimate([1.0] * right + [0.0] * (n - right), n)
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_effective_n_lies_between_problems_and_samples() -> None:
    """The effective sample size is the number of problems if all samples of a problem agree.

    Without clustering it is the number of samples.
    """
    alike = np.array([1.0, 0.0, 1.0, 0.0])
    assert effective_n(0.5, float(alike.var(ddof=1) / 4), 4, 64) == 4
    assert effective_n(0.5, 0.0, 4, 64) == 64
    assert effective_n(1.0, 0.0, 4, 64) == 4
    independent = effective_n(0.5, 0.25 / 40, 10, 160)
    assert independent == pytest.approx(40)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=12))
def test_every_interval_contains_its_value_within_0_and_1(right: list[int]) -> None:
    """Every interval is wider than 0, contains its value and lies within 0 and 1, even if all
    answers agree.
    """
    found = mean_estimate(np.array(right) / 8, 8 * len(right))
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    assert found.low < found.high


def test_one_problem_has_no_interval_over_problems() -> None:
    """The interval over a single problem is wider than 0.7, however many samples it has."""
    found = mean_estimate([0.75], 64)
    assert found.high - found.low > 0.7


def test_undefined_rates_are_reported_as_undefined() -> None:
    """A rate is reported as undefined if there are no problems or no samples, or if a problem has
    no value.
    """
    for found in (
        mean_estimate([], 0),
        mean_estimate([math.nan, 1.0], 2),
        share_estimate([(0, 0)]),
    ):
        assert math.isnan(found.value)
        assert str(found).startswith("undefined (")
        assert found.note
        assert json.loads(json.dumps(found.as_json(), allow_nan=False))["value"] is None


def test_an_estimate_prints_its_basis() -> None:
    """A printed estimate has its value, interval, confidence level, method, number of problems, and
    number of samples.
    """
    assert str(Estimate(0.80869, 0.756, 0.8604, 100, 1600, "wilson")) == (
        "0.809 [0.756, 0.860] (95 % wilson, 100 problems × 16)"
    )
    assert (
        str(Estimate(0.5, 0.1, 0.9, 1, 1, "t", 0.9)) == "0.500 [0.100, 0.900] (90 % t, 1 problem)"
    )
    assert "3 problems, 10 samples; two unscored" in str(
        Estimate(0.5, 0.1, 0.9, 3, 10, "t", note="two unscored")
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mean_estimate([1.0], 1, level=0),
    ],
)
def test_unknown_methods_and_units_are_errors(wrong: Callable[[], object]) -> None:
    """An unknown method or unit raises an error that names it, and no default replaces it."""
    with pytest.raises(OptionError):
        wrong()


# simulations use a fixed seed, so a failed test means that the code changed


def benchmarks(
    kind: tuple[float, float], problems: int, samples: int, runs: int
) -> tuple[float, Counted]:
    """Draw each problem's accuracy from a Beta distribution, and its number of correct samples from
    a binomial one. Return the true mean accuracy and these numbers, as [run, problem].
    """
    rng = np.random.default_rng(20_260_101)
    chances = rng.beta(*kind, (runs, problems))
    return kind[0] / sum(kind), rng.binomial(samples, chances)


def covered(truth: float, found: list[Estimate]) -> float:
    """Return the share of simulated runs in which the interval covers the true value."""
    return float(np.mean([one.low <= truth <= one.high for one in found]))


AIME = (0.4, 0.5)
MATH = (4.0, 0.6)


@pytest.mark.parametrize(
    ("kind", "problems", "samples", "least", "most"),
    [
        (AIME, 30, 16, 0.94, 0.985),
        (AIME, 15, 4, 0.94, 0.985),
        (MATH, 30, 16, 0.94, 0.99),
        (MATH, 100, 4, 0.93, 0.97),
        (MATH, 100, 1, 0.93, 0.97),
        ((6.0, 0.15), 30, 1, 0.94, 1.0),
    ],
)
def test_intervals_over_problems_cover(
    kind: tuple[float, float], problems: int, samples: int, least: float, most: float
) -> None:
    """Over 600 simulated benchmarks each interval covers the true value as often as documented,
    within 3 binomial deviations.
    """
    truth, right = benchmarks(kind, problems, samples, 600)
    total = problems * samples
    found = [mean_estimate(row / samples, total) for row in right]
    assert least <= covered(truth, found) <= most


@pytest.mark.parametrize("problems", [30, 40])
@pytest.mark.parametrize("truth", [0.02, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99])
def test_rates_near_the_edges_are_covered(problems: int, truth: float) -> None:
    """Intervals of pass@1, pass@4 and maj@4 of 16 samples miss the true value in at most 5 % of 200
    benchmarks.
    """
    rng = np.random.default_rng([problems, round(1000 * truth)])
    chances = rng.beta(2 * truth, 2 * (1 - truth), (200, problems))
    right = rng.binomial(16, chances)
    many = rng.beta(2 * truth, 2 * (1 - truth), 100_000)
    size = np.full(problems, 16)
    total = 16 * problems
    table = np.array([maj_at_k([Votes((c, 16 - c), (1.0, 0.0))], 4)[0] for c in range(17)])
    majority = (many**4 + 4 * many**3 * (1 - many) + 3 * many**2 * (1 - many) ** 2).mean()
    cases = [
        (truth, [row / 16 for row in right]),
        (float((1 - (1 - many) ** 4).mean()), [pass_at_k(size, row, 4) for row in right]),
        (float(majority), [table[row] for row in right]),
    ]
    least = 0.95 - 3.5 * math.sqrt(0.0475 / 200)
    for known, found in cases:
        # rates above 0.99 are left out, because often all 30 problems of a run have the same value
        if known <= 0.99:
            assert covered(known, [mean_estimate(values, total) for values in found]) >= least, (
                known
            )


@pytest.mark.parametrize("truth", [0.02, 0.05, 0.5, 0.95, 0.98])
def test_shares_of_unequal_totals_are_covered_near_the_edges(truth: float) -> None:
    """In a realised rate, problems have different numbers of decisions. Over 250 simulated runs of
    30 problems, the interval of such a share covers the true value as often as stated.
    """
    rng = np.random.default_rng(round(1000 * truth))
    found: list[Estimate] = []
    for _ in range(250):
        totals = 1 + rng.poisson(12, 30)
        counted = rng.binomial(totals, rng.beta(2 * truth, 2 * (1 - truth), 30))
        found.append(share_estimate(zip(counted.tolist(), totals.tolist(), strict=True)))
    assert covered(truth, found) >= 0.95 - 3.5 * math.sqrt(0.0475 / 250)


def test_taking_samples_as_independent_would_not_cover() -> None:
    """An interval that treats samples as independent covers the true value in about 60 % of runs
    instead of 95 %, so atts avoids it.
    """
    truth, right = benchmarks(AIME, 30, 16, 400)
    naive = [stats.binomtest(int(row.sum()), 480).proportion_ci(method="wilson") for row in right]
    assert np.mean([one.low <= truth <= one.high for one in naive]) < 0.75


def test_wilson_weighs_problems_equally() -> None:
    """A problem with a thousand samples counts as one problem."""
    found = mean_estimate([1.0, 0.0], 1001)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.5, 2, stats.t.ppf(0.975, 1)))
    assert found.high - found.low > 0.9


@pytest.mark.parametrize("wrong", [10.94, -0.25, math.inf])
def test_a_mean_above_1_gets_no_interval_of_shares(wrong: float) -> None:
    """Values outside [0, 1] are refused as shares, unless they exceed 1 only by rounding."""
    with pytest.raises(OptionError, match="is not a share"):
        mean_estimate([0.5, wrong], 2)
    with pytest.raises(OptionError, match="is not a share"):
        share_estimate([(1, 2), (math.copysign(3, wrong), 2)])  # type: ignore[list-item]
    assert mean_estimate([1 + 1e-12, 1.0], 2).value == 1.0
