"""Intervals are what the textbooks say, and cover as often as they claim."""

import json
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import (
    Estimate,
    bayesian_estimate,
    benchmark_estimate,
    effective_n,
    mean_estimate,
    nested_bootstrap,
    wilson_interval,
)
from atts.evaluators.metrics.rates import pass_at_k, rate

Counted = NDArray[np.int64]


def test_t_is_the_clustered_standard_error_of_the_samples() -> None:
    """Problems as clusters, C/(C-1), Student's t: computed here from single samples, as the formula is written."""
    rows = np.array([[1, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]])
    deviations = (rows - rows.mean()).sum(axis=1)
    error = math.sqrt((deviations**2).sum() * 5 / 4) / rows.size
    half = stats.t.ppf(0.975, 4) * error
    found = mean_estimate(rows.mean(axis=1), rows.size, "t")
    expected = (rows.mean(), max(0, rows.mean() - half), min(1, rows.mean() + half))
    assert (found.value, found.low, found.high) == pytest.approx(expected)
    assert 0 < found.low


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.data())
def test_wilson_of_single_samples_is_the_textbook_interval(n: int, data: st.DataObject) -> None:
    """Equal to scipy's, for every count, whatever the rest of this module thinks of clusters."""
    right = data.draw(st.integers(0, n))
    found = mean_estimate([1.0] * right + [0.0] * (n - right), n)
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_effective_n_lies_between_problems_and_samples() -> None:
    """All samples of a problem alike: the problems count; no spread at all: the samples; all right: the problems."""
    alike = np.array([1.0, 0.0, 1.0, 0.0])
    assert effective_n(0.5, float(alike.var(ddof=1) / 4), 4, 64) == 4
    assert effective_n(0.5, 0.0, 4, 64) == 64
    assert effective_n(1.0, 0.0, 4, 64) == 4
    independent = effective_n(0.5, 0.25 / 40, 10, 160)
    assert independent == pytest.approx(40)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=12), st.sampled_from(["wilson", "t", "bootstrap"]))
def test_every_interval_holds_its_value_inside_the_unit(right: list[int], method: Any) -> None:
    """low <= value <= high, within [0, 1], and never of no width when all answers agree (Wilson)."""
    found = mean_estimate(np.array(right) / 8, 8 * len(right), method)
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    if method == "wilson":
        assert found.low < found.high


def test_one_problem_says_nothing_of_others() -> None:
    """However many samples it has."""
    for method in ("t", "bootstrap"):
        found = mean_estimate([0.75], 64, cast(Any, method))
        assert (found.low, found.high) == (0, 1)
    found = mean_estimate([0.75], 64)
    assert found.high - found.low > 0.7


def test_a_seed_repeats_and_another_differs() -> None:
    """Bootstrap and posterior are functions of the seed."""
    values = np.linspace(0, 1, 13)
    one, again, other = (mean_estimate(values, 13, "bootstrap", seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    n, c = np.full(13, 4), np.arange(13) % 5
    assert bayesian_estimate(n, c, seed=3) == bayesian_estimate(n, c, seed=3)


def test_posterior_of_fixed_problems_is_the_exact_one() -> None:
    """Mean and spread of an average of independent Betas."""
    n, c = np.array([4, 10, 3]), np.array([1, 9, 0])
    found = bayesian_estimate(n, c, over="benchmark", prior="uniform", draws=40_000)
    means = (c + 1) / (n + 2)
    spread = math.sqrt(sum(stats.beta(a + 1, b - a + 1).var() for a, b in zip(c, n, strict=True))) / 3
    assert found.value == pytest.approx(means.mean(), abs=4 * spread / 200)
    assert (found.high - found.low) / (2 * 1.96 * spread) == pytest.approx(1, abs=0.03)


def test_the_centred_prior_moves_no_mean() -> None:
    """Problems never or always solved, 4 samples each: a flat prior moves the mean up, this one does not."""
    n = np.full(200, 4)
    c = np.where(np.arange(200) < 180, 0, 4)
    assert bayesian_estimate(n, c, prior="uniform", over="benchmark").value > 0.2
    assert bayesian_estimate(n, c, over="benchmark").value == pytest.approx(0.1, abs=0.01)


def test_undefined_is_said_never_invented() -> None:
    """No problems, no samples, one sample where two are needed."""
    for found in (
        mean_estimate([], 0),
        mean_estimate([math.nan, 1.0], 2),
        benchmark_estimate([1, 4], [1, 2]),
        bayesian_estimate([0], [0]),
        nested_bootstrap([4, 2], [1, 1], lambda n, c: pass_at_k(n, c, 4)),
    ):
        assert math.isnan(found.value)
        assert str(found).startswith("undefined (")
        assert found.note
        assert json.loads(json.dumps(found.as_json(), allow_nan=False))["value"] is None


def test_an_estimate_prints_what_it_rests_on() -> None:
    """Value, interval, level, method, problems times samples."""
    assert str(Estimate(0.80869, 0.756, 0.8604, 100, 1600, "wilson")) == (
        "0.809 [0.756, 0.860] (95 % wilson, 100 problems × 16)"
    )
    assert str(Estimate(0.5, 0.1, 0.9, 1, 1, "t", 0.9)) == "0.500 [0.100, 0.900] (90 % t, 1 problem)"
    assert "3 problems, 10 samples; two unscored" in str(Estimate(0.5, 0.1, 0.9, 3, 10, "t", note="two unscored"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mean_estimate([1.0], 1, cast(Any, "normal")),
        lambda: mean_estimate([1.0], 1, level=0),
        lambda: benchmark_estimate([2], [1], cast(Any, "bootstrap")),
        lambda: bayesian_estimate([2], [1], over=cast(Any, "all")),
        lambda: bayesian_estimate([2], [1], prior=cast(Any, "flat")),
    ],
)
def test_unknown_words_are_errors(wrong: Callable[[], object]) -> None:
    """Named, never guessed around."""
    with pytest.raises(OptionError):
        wrong()


# Coverage, by simulation: seeded, so that a failure is a change of the code and not bad luck


def benchmarks(kind: tuple[float, float], problems: int, samples: int, runs: int) -> tuple[float, Counted]:
    """The true mean rate, and right answers of [run, problem]: difficulties are Beta, samples binomial."""
    rng = np.random.default_rng(20_260_101)
    chances = rng.beta(*kind, (runs, problems))
    return kind[0] / sum(kind), rng.binomial(samples, chances)


def covered(truth: float, found: list[Estimate]) -> float:
    """How often the interval holds the truth."""
    return float(np.mean([one.low <= truth <= one.high for one in found]))


AIME, MATH = (0.4, 0.5), (4.0, 0.6)


@pytest.mark.parametrize(
    ("kind", "problems", "samples", "method", "least", "most"),
    [
        (AIME, 30, 16, "wilson", 0.94, 0.985),
        (AIME, 30, 16, "t", 0.935, 0.97),
        (AIME, 30, 16, "bootstrap", 0.90, 0.99),
        (AIME, 15, 4, "wilson", 0.94, 0.985),
        (MATH, 30, 16, "wilson", 0.93, 0.97),
        (MATH, 100, 4, "wilson", 0.93, 0.97),
        (MATH, 100, 1, "wilson", 0.93, 0.97),
        ((6.0, 0.15), 30, 1, "wilson", 0.94, 1.0),
    ],
)
def test_intervals_over_problems_cover(
    kind: tuple[float, float], problems: int, samples: int, method: Any, least: float, most: float
) -> None:
    """Nominal 95 %, 600 benchmarks (bootstrap 200): within 3 binomial deviations of what each is known to do."""
    truth, right = benchmarks(kind, problems, samples, 200 if method == "bootstrap" else 600)
    total = problems * samples
    found = [mean_estimate(row / samples, total, method) for row in right]
    assert least <= covered(truth, found) <= most


def test_taking_samples_as_independent_would_not_cover() -> None:
    """The mistake this module exists to prevent: about 60 % instead of 95."""
    truth, right = benchmarks(AIME, 30, 16, 400)
    naive = [stats.binomtest(int(row.sum()), 480).proportion_ci(method="wilson") for row in right]
    assert np.mean([one.low <= truth <= one.high for one in naive]) < 0.75


@pytest.mark.parametrize("method", ["wilson", "t"])
def test_intervals_over_samples_of_fixed_problems_cover(method: Any) -> None:
    """These very problems, again and again: narrower, and still right."""
    rng = np.random.default_rng(7)
    chances = rng.beta(*AIME, 30)
    runs = rng.binomial(16, chances, (600, 30))
    found = [benchmark_estimate(np.full(30, 16), row, method) for row in runs]
    assert 0.93 <= covered(float(chances.mean()), found) <= 0.975
    wide = mean_estimate(runs[0] / 16, 480, method)
    assert found[0].high - found[0].low < (wide.high - wide.low) / 2


@pytest.mark.parametrize("over", ["benchmark", "population"])
def test_credible_intervals_cover(over: Any) -> None:
    """Read as confidence intervals, which they need not be but should; at 0.87, where a flat prior covers never."""
    rng = np.random.default_rng(11)
    hits = flat = 0
    n = np.full(40, 16)
    for _ in range(120):
        chances = rng.beta(*MATH, 40)
        truth = float(chances.mean()) if over == "benchmark" else MATH[0] / sum(MATH)
        right = rng.binomial(16, chances)
        found = bayesian_estimate(n, right, over=over, draws=500)
        hits += found.low <= truth <= found.high
        other = bayesian_estimate(n, right, over="benchmark", prior="uniform", draws=200)
        flat += other.low <= chances.mean() <= other.high
    assert 0.90 <= hits / 120 <= 0.99
    assert flat / 120 < 0.2


def test_nested_bootstrap_of_pass_at_k_covers() -> None:
    """pass@4 of 8 samples over 40 problems: errs to the wide side."""
    truth = 1 - float(np.mean([(1 - p) ** 4 for p in np.random.default_rng(0).beta(*AIME, 400_000)]))
    _, right = benchmarks(AIME, 40, 8, 120)
    n = np.full(40, 8)
    found = [nested_bootstrap(n, row, lambda n, c: pass_at_k(n, c, 4), draws=400) for row in right]
    assert covered(truth, found) >= 0.91
    plain = [rate(pass_at_k(n, row, 4), n) for row in right]
    assert covered(truth, plain) >= 0.93


def test_wilson_with_unequal_samples_uses_what_is_there() -> None:
    """Means of problems, not of samples: one problem with a thousand samples is one problem."""
    found = mean_estimate([1.0, 0.0], 1001)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.5, 2, stats.t.ppf(0.975, 1)))
    assert found.high - found.low > 0.9
