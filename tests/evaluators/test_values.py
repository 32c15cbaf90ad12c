"""Tests of computed values: rational values are exact, and others have a true error bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import mpmath
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atts.evaluators import equivalent
from atts.evaluators.equivalence.evaluation import Approx, Evaluator, NotRational, exact
from atts.evaluators.syntax.reading import read
from atts.evaluators.syntax.tree import Node
from atts.evaluators.verdict import Limits, TooLarge, Undefined

LIMITS = Limits()


def tree(text: str) -> Node:
    """Return the first syntax tree that the parser gives for a text."""
    return read(text, LIMITS).trees[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{1}{1-\frac{1}{2}}", Fraction(2)),
        (r"\sqrt{\frac{9}{16}}", Fraction(3, 4)),
        (r"\sqrt[3]{-27}", Fraction(-3)),
        ("2^{-3}", Fraction(1, 8)),
        ("5!-5", Fraction(115)),
        (r"\binom{10}{3}", Fraction(120)),
        (r"\lfloor -3.5 \rfloor", Fraction(-4)),
        (r"|-3|+\max(2,5)+\gcd(12,18)", Fraction(14)),
        (r"\sum_{k=1}^{10} k^2", Fraction(385)),
        (r"\prod_{k=1}^{5} k", Fraction(120)),
        ("1.5e3", Fraction(1500)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"7\frac{3}{4}", Fraction(31, 4)),
        ("-2^2", Fraction(-4)),
        ("2^{2^3}", Fraction(256)),
        ("12/4/3", Fraction(1)),
    ],
)
def test_rational_values(text: str, value: Fraction) -> None:
    """The exact values of rational expressions equal those computed by hand."""
    assert exact(tree(text), LIMITS) == value


def test_irrational_undefined_and_huge_values_differ() -> None:
    """Exact evaluation raises a different error for an irrational, an undefined and a huge
    value.
    """
    with pytest.raises(NotRational):
        exact(tree(r"\sqrt{2}"), LIMITS)
    for text in (r"\frac{1}{0}", "0^{-1}", "(-1)!", r"\ln 0"):
        with pytest.raises(Undefined):
            exact(tree(text), LIMITS)
    for text in ("9^{9^9}", "99999999!", r"\sum_{k=1}^{10^9} k", r"\binom{10^{9}}{5\cdot 10^{8}}"):
        with pytest.raises(TooLarge):
            exact(tree(text), LIMITS)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**30), st.integers(2, 7))
def test_exact_roots(value: int, index: int) -> None:
    """A perfect power has an exact root, but the root of the next integer is irrational."""
    power = value**index
    assert exact(tree(rf"\sqrt[{index}]{{{power}}}"), LIMITS) == value
    assume(value > 1)
    with pytest.raises(NotRational):
        exact(tree(rf"\sqrt[{index}]{{{power + 1}}}"), LIMITS)


NUMBERS = st.integers(1, 10**6).map(str)
UNARY = (
    r"\sqrt{{{}}}",
    r"\sin({})",
    r"\cos({})",
    r"\ln({})",
    r"\arctan({})",
    "({})^{{3/7}}",
    r"e^{{({})/10^6}}",
)
TERMS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(UNARY), inner).map(lambda parts: parts[0].format(parts[1])),
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(
            lambda parts: f"({parts[0]}){parts[1]}({parts[2]})"
        ),
    ),
    max_leaves=6,
)


def approximation(node: Node, bits: int) -> Approx:
    """Return the value of an expression at this precision in bits, with its error bound."""
    evaluator = Evaluator(bits, LIMITS)
    return evaluator.approximate(evaluator.value(node))


@settings(max_examples=100, deadline=None)
@given(TERMS)
def test_error_bounds_hold(text: str) -> None:
    """The value at 200 bits differs from the value at 1,500 bits by at most its own error bound."""
    node = tree(text)
    try:
        coarse = approximation(node, 200)
        value = coarse.value
        error = coarse.error
        fine = approximation(node, 1_500).value
    except (Undefined, TooLarge):
        return
    with mpmath.workprec(1_600):
        gap = abs(mpmath.mpmathify(value) - mpmath.mpmathify(fine))
        assert gap <= mpmath.mpf(2) ** (error + 1)


def test_threads_do_not_disturb_each_other() -> None:
    """Each thread has its own constants and precision, whatever other threads do to mpmath."""
    node = tree(r"\pi \cdot e^{\sqrt{2}}")
    expected = approximation(node, 200).value
    stop = threading.Event()
    disturbed: list[object] = []

    def disturb() -> None:
        while not stop.is_set():
            with mpmath.workprec(30):
                disturbed.append(mpmath.pi() * mpmath.sqrt(2))
                del disturbed[1:]

    threading.Thread(target=disturb, daemon=True).start()
    work: Callable[[int], object] = lambda _: approximation(node, 200).value  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(60)))
    stop.set()
    assert all(str(value) == str(expected) for value in found)


def test_short_evaluations_add_up_to_the_limit() -> None:
    """The limit counts the work of all evaluation points of a pair together, however short each
    evaluation is.
    """
    gold = r"a\cdot|b|-|b|a"
    answer = r"\ln(1+10^{-600})-\ln(1+10^{-600})"
    assert equivalent(gold, answer, limits=Limits(work=50)).rule == "limits"
