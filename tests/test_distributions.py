"""Tests that tails and quantiles equal those of scipy, which the package itself never imports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special, stats

from atts.sampling import (
    beta_quantile,
    beta_tails,
    beta_upper_quantile,
    binomial_cdf,
    binomial_pmf,
    binomial_quantile,
    binomial_tail,
    hypergeometric_tail,
    normal_quantile,
    student_quantile,
    student_tail,
)

SHARES = [1e-9, 0.001, 0.025, 0.1, 0.5, 0.9, 0.975, 0.999]
CLOSE = 1e-12
sizes = st.integers(0, 300)
chances = st.floats(1e-6, 1 - 1e-6)


@pytest.mark.parametrize("share", SHARES)
def test_quantiles_equal_scipy(share: float) -> None:
    """Quantiles of the normal, Student's t and beta distributions are correct in both tails."""
    assert_allclose(normal_quantile(share), stats.norm.ppf(share), CLOSE, CLOSE)
    for freedom in (1, 2, 7, 29, 10_000):
        assert_allclose(student_quantile(share, freedom), stats.t.ppf(share, freedom), CLOSE, CLOSE)
    for a, b in ((1, 1), (3, 40), (200, 2)):
        assert_allclose(beta_quantile(share, a, b), stats.beta.ppf(share, a, b), CLOSE)
        assert_allclose(beta_upper_quantile(share, a, b), stats.beta.isf(share, a, b), CLOSE)


@given(n=sizes, chance=chances, share=st.floats(1e-9, 1 - 1e-9))
def test_binomial_counts_equal_scipy(n: int, chance: float, share: float) -> None:
    """Binomial probabilities, tails and quantiles equal scipy's."""
    counts = np.arange(-1, n + 3)
    assert_allclose(
        binomial_cdf(counts, n, chance), stats.binom.cdf(counts, n, chance), 1e-11, CLOSE
    )
    tails = [binomial_tail(int(count), n, chance) for count in counts]
    assert_allclose(tails, stats.binom.sf(counts, n, chance), 1e-11, CLOSE)
    drawn = [float(binomial_pmf(int(count), n, chance)) for count in counts[1:]]
    assert_allclose(drawn, stats.binom.pmf(counts[1:], n, chance), 1e-11, CLOSE)
    # if a cumulative probability equals `share` to the last digit, rounding decides which count is
    # found
    found = binomial_quantile(share, n, chance)
    assert (
        stats.binom.cdf(found - 1, n, chance) - CLOSE
        < share
        < stats.binom.cdf(found, n, chance) + CLOSE
    )


@given(
    share=st.floats(1e-12, 1 - 1e-12),
    a=st.floats(0.3, 200_000),
    b=st.floats(0.3, 200_000),
    value=st.floats(0, 60),
)
def test_extreme_parameters_keep_their_digits(
    share: float, a: float, b: float, value: float
) -> None:
    """Tails and quantiles are accurate for large and small counts, fractions and far tails."""
    quantile = float(beta_quantile(share, a, b))
    assert_allclose(quantile, special.betaincinv(a, b, share), 1e-9, 1e-300)
    below, above = beta_tails(share, a, b)
    assert_allclose(below, special.betainc(a, b, share), 1e-9, 1e-200)
    assert_allclose(above, special.betaincc(a, b, share), 1e-9, 1e-200)
    assert_allclose(student_tail(value, a), 2 * special.stdtr(a, -value), 1e-9, 1e-200)
    assert_allclose(student_quantile(share, a), special.stdtrit(a, share), 1e-8, 1e-9)


def test_binomials_of_probability_0_or_1() -> None:
    """For a probability of 0 or 1 only one count is possible."""
    assert [binomial_quantile(0.3, 7, chance) for chance in (0.0, 1.0)] == [0, 7]
    assert binomial_cdf([0, 6, 7], 7, 1.0).tolist() == [0, 0, 1]
    assert binomial_pmf(0, [0, 7], 0.0).tolist() == [1, 1]


@given(n=st.integers(0, 60), drawn=st.integers(1, 60), data=st.data())
def test_hypergeometric_tails_equal_scipy(n: int, drawn: int, data: st.DataObject) -> None:
    """The probability of at least a number of correct draws equals scipy's, and is NaN if more
    items are drawn than exist.
    """
    right = data.draw(st.integers(0, n))
    least = data.draw(st.integers(1, drawn))
    found = float(hypergeometric_tail(least, n, right, drawn))
    assert_allclose(
        found,
        stats.hypergeom.sf(least - 1, n, right, drawn) if drawn <= n else np.nan,
        1e-11,
        CLOSE,
    )
