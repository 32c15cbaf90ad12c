"""Property tests of grading on random expressions: the verdict depends on the value of an
expression and not on its notation.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atts.evaluators import equivalent

CASES = settings(max_examples=80, deadline=None)


@dataclass(frozen=True)
class Written:
    """An expression as text, with its exact value."""

    text: str
    value: Fraction
    is_atom: bool  # true if the expression needs no brackets as a factor


def numbers() -> st.SearchStrategy[Written]:
    """Draw integers, decimals and fractions in several spellings."""
    integers = st.integers(0, 10**9).map(lambda n: Written(str(n), Fraction(n), True))
    grouped = st.integers(10**3, 10**12).map(
        lambda n: Written(f"{n:,}".replace(",", "{,}"), Fraction(n), True)
    )
    decimals = st.integers(0, 10**6).map(
        lambda n: Written(f"{n // 1000}.{n % 1000:03}", Fraction(n, 1000), True)
    )
    parts = st.tuples(
        st.integers(0, 999), st.integers(1, 999), st.sampled_from(["frac", "dfrac", "tfrac"])
    )
    fractions = parts.map(
        lambda p: Written(rf"\{p[2]}{{{p[0]}}}{{{p[1]}}}", Fraction(p[0], p[1]), True)
    )
    return st.one_of(integers, grouped, decimals, fractions)


def bracketed(item: Written, style: int) -> str:
    """Put the text into brackets if it cannot be a factor without them."""
    if item.is_atom:
        return item.text
    return (f"({item.text})", rf"\left({item.text}\right)", f"{{({item.text})}}")[style]


def combined(inner: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    """Draw sums, differences, products and quotients in several spellings."""

    def join(parts: tuple[Written, Written, str, int]) -> Written:
        left, right, sign, style = parts
        one = bracketed(left, style)
        two = bracketed(right, style)
        if sign == "+":
            return Written(f"{left.text} + {two}", left.value + right.value, False)
        if sign == "-":
            return Written(f"{left.text}-{two}", left.value - right.value, False)
        if sign == "*":
            times = (r" \cdot ", r"\times ", "*")[style]
            return Written(f"{one}{times}{two}", left.value * right.value, False)
        assume(right.value != 0)
        text = (
            rf"\frac{{{left.text}}}{{{right.text}}}",
            f"{one}/{two}",
            rf"{{{left.text} \over {right.text}}}",
        )[style]
        return Written(text, left.value / right.value, style != 1)

    return st.tuples(inner, inner, st.sampled_from("+-*/"), st.integers(0, 2)).map(join)


EXPRESSIONS = st.recursive(numbers(), combined, max_leaves=6)


@CASES
@given(EXPRESSIONS, EXPRESSIONS)
def test_arithmetic_is_graded_by_value(one: Written, two: Written) -> None:
    """Two expressions are equal exactly if Python's fractions are equal."""
    assert equivalent(one.text, two.text).is_equal == (one.value == two.value)


@CASES
@given(EXPRESSIONS)
def test_an_expression_equals_its_lowest_terms(item: Written) -> None:
    """An expression equals its value as a fraction in lowest terms, and differs from that value
    plus 1/7.
    """
    value = item.value
    assert equivalent(item.text, rf"\frac{{{value.numerator}}}{{{value.denominator}}}").is_equal
    assert equivalent(str(value), item.text).is_equal
    other = value + Fraction(1, 7)
    assert equivalent(item.text, f"{other.numerator}/{other.denominator}").status == "different"


ANSWERS = st.sampled_from(
    [
        "12", "-7", "0.75", r"\frac{3}{4}", r"-\frac{22}{7}", r"2\sqrt{3}", r"\frac{\sqrt{21}}{5}",
        r"1+2\sqrt{3}", "7\\pi",
        r"\frac{\pi}{3}", "6-5i", r"\frac{1+i\sqrt{3}}{2}", "x^2+2x+1", r"\frac{x+2}{7}", "2k+2", "5r^5", "p-q",
        r"\cos 2\theta", r"2\sin b\cos a", "2^{10}", r"\log_2 3", r"\binom{10}{3}", r"\sqrt[3]{4}", r"\frac{n(n+1)}{2}",
        r"3\sqrt[3]{2}-1", "e^{2}", r"10^{-3}", r"\frac{a+b}{c}", "26!", r"\lfloor n/2 \rfloor+1",
    ]
)  # fmt: skip
WRAPPERS = st.sampled_from(
    [
        "{}", "${}$", r"\({}\)", r"\[{}\]", "$${}$$", r"\boxed{{{}}}", "{}.", " {}  ", r"\displaystyle {}", "**{}**",
        r"{}\,", "({})", "{{{}}}", r"\left({}\right)", "The answer is {}", r"\textbf{{Answer:}} ${}$", "{}\n",
        "+{}", "{}+0",
        r"{} \approx 3.2",
    ]
)  # fmt: skip
VALUES = st.sampled_from(
    ["12", "-7", "0.75", r"\frac{3}{4}", r"2\sqrt{3}", "7\\pi", "10^{-3}", r"137 \frac{1}{2}"]
)
UNITS = st.sampled_from(
    [
        r"\text{ cm}",
        " cm^2",
        r"\ \text{square units}",
        r"\mathrm{~km}",
        " dollars",
        " miles per hour",
        r"\text{ apples}",
    ]
)


@CASES
@given(ANSWERS, WRAPPERS, WRAPPERS)
def test_wrapping_changes_nothing(answer: str, inner: str, outer: str) -> None:
    """Delimiters, boxes, brackets, spaces and phrases around a value do not change it."""
    assume(not (answer.startswith("-") and "+{}" in (inner, outer)))
    assume(
        not ("approx" in inner and outer in ("({})", "{}+0", r"\left({}\right)", r"{} \approx 3.2"))
    )
    assume(not ("nswer" in inner and outer != "{}") and not ("$" in inner and "$" in outer))
    assume(not ("[" in inner + outer and inner != outer))
    # in this combination the full stop follows a number but does not end the sentence
    assume(not (inner == "{}." and "approx" in outer))
    assert equivalent(answer, outer.format(inner.format(answer))).is_equal


@CASES
@given(VALUES, UNITS)
def test_units_may_be_left_out(value: str, unit: str) -> None:
    """If only the answer or only the reference has a unit, the grader ignores the unit."""
    assert equivalent(value, value + unit).is_equal
    assert equivalent(value + unit, value).is_equal


@CASES
@given(ANSWERS, ANSWERS)
def test_distinct_answers_stay_distinct(one: str, two: str) -> None:
    """No two answers of the list are equal, and either may be the reference."""
    same = one == two or {one, two} == {"0.75", r"\frac{3}{4}"}
    assert (equivalent(one, two).status == "equal") == same
    assert equivalent(one, two).status == equivalent(two, one).status


@CASES
@given(ANSWERS)
def test_every_answer_equals_itself_and_differs_from_its_negative(answer: str) -> None:
    """Every answer equals itself and differs from its negative."""
    assert equivalent(answer, answer).is_equal
    assert equivalent(answer, f" {answer} ").is_equal
    assert equivalent(answer, f"-({answer})").status == "different"
    assert equivalent(answer, f"{answer}+1").status == "different"


TERMS = st.lists(
    st.sampled_from(["x", "3y", r"\sqrt{2}", "7", r"\frac{1}{3}", r"\pi", "2z^2", "ab"]),
    min_size=2,
    max_size=5,
)


@CASES
@given(TERMS, st.randoms(use_true_random=False))
def test_sums_commute(terms: list[str], order: object) -> None:
    """A sum equals the same sum with its terms in another order."""
    shuffled = sorted(terms, key=lambda term: hash((term, str(order))))
    assert equivalent("+".join(terms), " + ".join(shuffled)).is_equal


@CASES
@given(st.lists(numbers(), min_size=2, max_size=5), st.integers(0, 10**6))
def test_order_is_free_in_sets_and_kept_in_tuples(items: list[Written], turn: int) -> None:
    """Two sets with the same members are equal in any order. Two tuples are equal only if their
    members have the same order.
    """
    turned = items[turn % len(items) :] + items[: turn % len(items)]
    one, two = (";".join(item.text for item in side) for side in (items, turned))
    assert equivalent(rf"\{{{one}\}}", rf"\{{{two}\}}").is_equal
    same = [item.value for item in items] == [item.value for item in turned]
    assert equivalent(f"({one})", f"({two})").is_equal == same


@CASES
@given(
    numbers(),
    numbers(),
    st.sampled_from(["()", "[]", "[)", "(]"]),
    st.sampled_from(["()", "[]", "[)", "(]"]),
)
def test_intervals_keep_their_ends(low: Written, high: Written, one: str, two: str) -> None:
    """Two intervals are different if only one of them includes an end."""
    first, second = (f"{ends[0]}{low.text};{high.text}{ends[1]}" for ends in (one, two))
    assert equivalent(first, second).is_equal == (one == two)


@pytest.mark.parametrize("index", range(12))
def test_five_correct_digits_stand_for_an_endless_decimal(index: int) -> None:
    """A decimal with five correct digits equals a value whose decimal never ends. With four digits,
    or with a wrong last digit, it does not.
    """
    text = "1.41421356237309504880"[: index + 2]
    verdict = equivalent(r"\sqrt{2}", text).is_equal
    assert verdict == (len(text.replace(".", "")) >= 5)
    if verdict:
        last = int(text[-1])
        wrong = text[:-1] + str((last + 3) % 10)
        assert not equivalent(r"\sqrt{2}", wrong).is_equal
