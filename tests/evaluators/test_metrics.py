"""Tests of rates and votes against enumeration over every subset, in exact fractions."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atts.errors import OptionError
from atts.evaluators.metrics.rates import (
    Votes,
    avg_at_n,
    count,
    g_pass_at_k,
    maj_at_k,
    pass_at_k,
    pass_hat_k,
    rate,
    votes,
)

FEW = settings(max_examples=120, deadline=None)
CASE = st.lists(st.booleans(), min_size=1, max_size=9).flatmap(
    lambda row: st.tuples(st.just(row), st.integers(1, len(row)))
)


def share(row: Sequence[bool], k: int, right: Any) -> Fraction:
    """Return the share of all subsets of k samples for which `right`, given the number of correct
    samples in the subset, returns true.
    """
    subsets = list(itertools.combinations(row, k))
    return Fraction(sum(bool(right(sum(subset))) for subset in subsets), len(subsets))


@FEW
@given(CASE)
def test_pass_metrics_equal_brute_force(case: tuple[list[bool], int]) -> None:
    """The metrics equal an enumeration of all subsets of k samples. pass@k needs one correct sample
    and pass^k only correct samples. G-pass@k needs a share of at least tau.
    """
    row, k = case
    counts = count([row])
    assert pass_at_k(counts.n, counts.c, k)[0] == pytest.approx(
        float(share(row, k, lambda r: r > 0)), abs=1e-12
    )
    assert pass_hat_k(counts.n, counts.c, k)[0] == pytest.approx(
        float(share(row, k, lambda r: r == k)), abs=1e-12
    )
    for tau in (0, 0.1, 0.25, 0.5, 0.75, 1):
        least = max(1, math.ceil(Fraction(str(tau)) * k))
        expected = float(share(row, k, lambda r, least=least: r >= least))
        assert g_pass_at_k(counts.n, counts.c, k, tau)[0] == pytest.approx(expected, abs=1e-12)


def test_g_pass_takes_its_share_exactly() -> None:
    """G-pass@k computes its share exactly: 0.28 of 25 samples is 7, although 0.28 * 25 exceeds 7 in
    floating point.
    """
    assert math.ceil(0.28 * 25) == 8
    assert g_pass_at_k([25], [7], 25, 0.28)[0] == 1


@FEW
@given(st.integers(1, 40), st.data())
def test_pass_rates_are_ordered(n: int, data: st.DataObject) -> None:
    """pass^k is at most pass@1, and pass@1 at most pass@k. As k grows, pass^k does not rise and
    pass@k does not fall. At k = 1 each equals the mean.
    """
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    low = pass_hat_k([n], [c], k)[0]
    high = pass_at_k([n], [c], k)[0]
    assert -1e-12 <= low <= c / n + 1e-12
    assert c / n - 1e-12 <= high <= 1 + 1e-12
    assert pass_at_k([n], [c], 1)[0] == pytest.approx(c / n)
    assert pass_hat_k([n], [c], 1)[0] == pytest.approx(c / n)
    if k > 1:
        assert pass_at_k([n], [c], k - 1)[0] <= high + 1e-12
        assert pass_hat_k([n], [c], k - 1)[0] >= low - 1e-12


def test_fewer_samples_than_k_is_undefined() -> None:
    """A metric of fewer samples than k is undefined: not 0, not 1, and not computed from fewer
    samples.
    """
    for metric in (pass_at_k, pass_hat_k):
        assert np.isnan(metric([3, 4], [3, 4], 4)).tolist() == [True, False]
    assert np.isnan(g_pass_at_k([3], [3], 4, 0.5)[0])
    assert np.isnan(maj_at_k([votes(["a"], [True])], 2)[0])
    assert math.isnan(avg_at_n(count([[]]))[0])


def test_large_counts_neither_overflow_nor_lose_digits() -> None:
    """For large counts, binomial coefficients exceed the range of floats. The metrics nevertheless
    equal those computed with exact integers.
    """
    n = 3000
    c = 700
    k = 40
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k([n], [c], k)[0] == pytest.approx(float(exact), rel=1e-12)
    exact = Fraction(math.comb(c, k), math.comb(n, k))
    assert pass_hat_k([n], [c], k)[0] == pytest.approx(float(exact), rel=1e-9)


def test_rows_may_have_different_lengths() -> None:
    """Problems may have different numbers of samples. A sample with an unknown verdict counts as
    wrong. Arrays give the same counts as lists.
    """
    rows: list[list[bool | None]] = [[True, None, False], [None], []]
    assert (count(rows).n.tolist(), count(rows).c.tolist()) == ([3, 1, 0], [1, 0, 0])
    array = np.array([[1, 0], [1, 1]], dtype=bool)
    assert count(cast(Any, array)).c.tolist() == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: pass_at_k([1], [1], 0),
        lambda: pass_at_k([1], [2], 1),
        lambda: g_pass_at_k([1], [1], 1, 1.5),
        lambda: maj_at_k([], 0),
        lambda: votes(["a"], []),
        lambda: rate([1.0], [1], level=95),
    ],
)
def test_impossible_arguments_are_errors(wrong: Any) -> None:
    """The error for an impossible argument names the argument, and no default replaces it."""
    with pytest.raises(OptionError):
        wrong()


# Tests of votes


LABELS = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9)


def brute_majority(labels: Sequence[str | None], correct: Sequence[bool], k: int) -> Fraction:
    """Return maj@k computed by a vote in every subset of k samples. Tied classes share the win
    equally, and each class counts with its share of correct samples.
    """
    total = Fraction(0)
    subsets = list(itertools.combinations(range(len(labels)), k))
    worth: dict[str | None, Fraction] = {}
    for label in set(labels):
        members = [correct[at] for at, other in enumerate(labels) if other == label]
        worth[label] = Fraction(sum(members), len(members)) if label is not None else Fraction(0)
    for subset in subsets:
        tally = Counter[str | None]()
        for at in subset:
            if labels[at] is not None:
                tally[labels[at]] += 1
        first = [label for label, weight in tally.items() if weight == max(tally.values())]
        total += sum((worth[label] for label in first), Fraction(0)) / max(1, len(first))
    return total / len(subsets)


@FEW
@given(LABELS, st.randoms(use_true_random=False))
def test_maj_at_k_equals_brute_force(labels: list[str | None], chance: random.Random) -> None:
    """maj@k equals brute force for every k, also if samples with the same answer were judged
    differently.
    """
    correct = [label == "a" or (label == "b" and chance.random() < 0.5) for label in labels]
    for k in range(1, len(labels) + 1):
        expected = brute_majority(labels, correct, k)
        assert maj_at_k([votes(labels, correct)], k)[0] == pytest.approx(float(expected), abs=1e-12)


def exact_majority(right: int, wrong: Sequence[int], blank: int, k: int) -> Fraction:
    """Compute maj@k from a polynomial with exact integers. This is too slow for atts but exact even
    for many samples.
    """
    total = Fraction(0)
    for j in range(1, min(right, k) + 1):
        poly: Counter[tuple[int, int]] = Counter({(0, 0): 1})
        for size in wrong:
            grown: Counter[tuple[int, int]] = Counter()
            for (drawn, tied), ways in poly.items():
                for x in range(min(size, j, k - j - drawn) + 1):
                    grown[drawn + x, tied + (x == j)] += ways * math.comb(size, x)
            poly = grown
        for (drawn, tied), ways in poly.items():
            silent = math.comb(blank, k - j - drawn)
            total += Fraction(math.comb(right, j) * ways * silent, tied + 1)
    return total / math.comb(right + sum(wrong) + blank, k)


@pytest.mark.parametrize(
    ("right", "wrong", "blank", "k"),
    [
        (20, [15, 9, 5, 3, 3, 2, 1, 1, 1], 4, 32),
        (1, [1] * 60, 3, 16),
        (30, [30], 4, 63),
        (12, [13, 13, 13, 13], 0, 48),
        (60, [], 4, 2),
        (3, [61], 0, 8),
    ],
)
def test_maj_at_k_is_exact_for_64_samples(right: int, wrong: list[int], blank: int, k: int) -> None:
    """maj@k is exact to twelve digits for 64 samples with ties and missing answers, also for many
    rows at once.
    """
    problem = Votes((right, *wrong), (1.0, *[0.0] * len(wrong)), blank)
    expected = float(exact_majority(right, wrong, blank, k))
    assert maj_at_k([problem, Votes((64,), (1.0,)), problem], k).tolist() == pytest.approx(
        [expected, 1.0, expected]
    )


def test_maj_at_k_survives_thousands_of_samples() -> None:
    """maj@k of 2,000 samples is exact to eleven digits, although binomial coefficients of this size
    exceed the range of floats.
    """
    found = maj_at_k([Votes((1500, 500), (1.0, 0.0)), Votes((1000, 1000), (1.0, 0.0))], 101)
    expected = stats.hypergeom.sf(50, 2000, 1500, 101)
    assert found.tolist() == pytest.approx([float(expected), 0.5], abs=1e-11)


@given(LABELS, st.randoms(use_true_random=False))
def test_a_vote_does_not_depend_on_the_order_of_finishing(
    labels: list[str | None], chance: random.Random
) -> None:
    """Shuffling a problem's samples does not change maj@k, for any k."""
    order = list(range(len(labels)))
    chance.shuffle(order)
    shuffled = [labels[at] for at in order]
    first = [votes(labels, [label == "a" for label in labels])]
    second = [votes(shuffled, [label == "a" for label in shuffled])]
    for k in range(1, len(labels) + 1):
        assert maj_at_k(first, k)[0] == pytest.approx(maj_at_k(second, k)[0], abs=1e-12)


# Tests of means over problems


def test_problems_with_too_few_samples_make_a_rate_undefined() -> None:
    """Problems with too few samples are not dropped silently, because that would change the rate."""
    values = pass_at_k([4, 4, 2], [4, 0, 2], 4)
    n = [4, 4, 2]
    whole = rate(values, n)
    assert math.isnan(whole.value)
    assert "too few samples in 1 of 3 problems" in str(whole)


def test_500_problems_of_64_samples_are_one_call() -> None:
    """One call computes the metrics of 500 problems with 64 samples for all usual values of k. A
    study measures how long this takes.
    """
    rng = np.random.default_rng(0)
    chances = rng.beta(0.5, 0.5, 500)
    c = rng.binomial(64, chances)
    problems = [
        Votes((int(right), *[1] * (64 - int(right))), (1.0, *[0.0] * (64 - int(right))))
        for right in c
    ]
    for k in (1, 8, 64):
        many = maj_at_k(problems, k)
        assert many.shape == (500,)
        assert ((many >= 0) & (many <= 1)).all()
        assert pass_at_k(np.full(500, 64), c, k).mean() >= many.mean() - 1e-9
