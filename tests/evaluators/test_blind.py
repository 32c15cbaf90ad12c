"""Tests on five sets of pairs and texts whose authors had not read the grader's code."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from atts.core import Problem
from atts.evaluators import equivalent, extract, grade, group, judge
from atts.evaluators.equivalence.pairs import matches_reference

FOLDER = Path(__file__).parent
POLICY = {
    ("110_2", "110"),
    ("101", "101_2"),
    ("9", "x^2=9"),
    (r"0.\overline{428571}", "0.428571"),
}
"""Pairs that the sets call different and the documented policy calls equal."""


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    """Read the rows of a set's file."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def is_equal(gold: str, answer: str) -> bool:
    """Return whether the grader calls two answers equal."""
    return equivalent(gold, answer).is_equal


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_blind_pairs_are_graded_correctly(number: int) -> None:
    """Different answers are called equal only if a policy says so, and few equal answers are called
    different.
    """
    pairs = [row for row in rows("blind_pairs.jsonl") if row["set"] == number]
    counts = Counter[str]()
    false_equal = list[tuple[str, str]]()
    for row in pairs:
        verdict = is_equal(row["gold"], row["answer"])
        if row["equal"]:
            counts["positive"] += 1
            counts["right"] += verdict
        elif verdict:
            false_equal.append((row["gold"], row["answer"]))
    assert counts["positive"] > 180
    assert len(pairs) - counts["positive"] > 150
    assert set(false_equal) <= POLICY
    assert counts["right"] / counts["positive"] > 0.98


def test_verdicts_are_symmetric_and_group_agrees() -> None:
    """Exchanging answer and reference does not change a verdict, and a vote forms the same classes."""
    for row in rows("blind_pairs.jsonl"):
        gold = row["gold"]
        answer = row["answer"]
        verdict = is_equal(gold, answer)
        assert equivalent(answer, gold).status == equivalent(gold, answer).status, (gold, answer)
        one, two = group([gold, answer])
        assert (one == two) == verdict, (gold, answer)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_answers_of_blind_texts_are_found(number: int) -> None:
    """For nearly every text, the extracted answer is the one that the text's author marked."""
    texts = [row for row in rows("blind_texts.jsonl") if row["set"] == number]
    right = 0
    for row in texts:
        answer = extract(row["text"], row["kind"])
        accepted = row["accepted"]
        if answer in accepted:
            right += 1
        elif answer is not None:
            right += any(
                each is not None and equivalent(each, answer, row["kind"]).is_equal
                for each in accepted
            )
    assert len(texts) > 120
    assert right / len(texts) > 0.97


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"A^{-1}B", r"BA^{-1}", False),
        (r"(ABC)^{-1}", r"C^{-1}B^{-1}A^{-1}", True),
        (r"PDP^{-1}", r"P D P^{-1}", True),
        (r"\frac{PV}{T}", r"\frac{VP}{T}", True),
        ("17", "17=2x", False),
        ("17", "x=17", True),
        ("5", "2a+b=5", True),
        (r"\mathrm{Cs}", r"\mathrm{CS}", False),
        (r"\text{Yes}", "YES", True),
        (r"\ce{Fe2(SO4)3}", r"Fe_2(SO_4)_3", True),
        (r"\ce{H2O}", r"H_2O_2", False),
        ("s<t", "t>s", True),
        ("s<t", "t<s", False),
        (r"x\equiv 3\pmod 7", r"3 \bmod 7", True),
        (r"3 \pmod 7", r"4 \bmod 7", False),
        (r"\{2,4,\ldots,20\}", r"\{2,4,6,8,\dots,20\}", True),
        (r"\{2,4,\ldots,20\}", r"\{2,4,\ldots,22\}", False),
        (r"\{2,4,\ldots,20\}", r"\{2,5,\ldots,20\}", False),
        (r"\int_1^2\frac{dt}{t}", r"\ln 2", True),
        (r"\sin x+C", r"\sin x+k", True),
        (r"\sin x+C", r"\sin x+3+C", True),
        (r"\sin x+C", r"\cos x+C", False),
        (r"\sin x+C", r"\sin x", False),
        ("3+C", "5+C", False),
        ("a+b+c+2", "a+b+c+3", False),
        ("a_1+a_2", "a_1+a_3", False),
        (r"c_1\cosh t+c_2\sinh t", r"C_2\cosh t+C_1\sinh t", True),
        (r"c_1\cosh t+c_2\sinh t", r"C_1\cosh t+C_1\sinh t", False),
        (r"y=Kx^3", r"y=cx^3", True),
        (r"y=Kx^3", r"y=cx^2", False),
        ("F=kx", "F=cx", False),
        ("f(n)=bn", r"f(n)=cn\text{ where }c\text{ is any constant}", True),
        ("h^2k", "h^2c", False),
        (r"\sqrt{\mu^2\epsilon T}", r"\mu\sqrt{\epsilon T}", True),
        (r"\sqrt{\mu^2\epsilon T}", r"\epsilon\sqrt{\mu T}", False),
        (r"\sqrt{x^2\rho}", r"x\sqrt{\rho}", False),
        (r"|M|\sqrt{R}", r"M\sqrt{R}", False),
        (r"\sqrt{u^2v}", r"u\sqrt{v}", False),
        (r"\frac{hc}{2\pi}", r"\hbar c", True),
        (r"\frac{hc}{\pi}", r"\hbar c", False),
        (r"\frac{kq}{r}", r"\frac{q}{4\pi\epsilon_0 r}", True),
        (r"\frac{V}{LC}", "V/LC", True),
        (r"\sqrt{3 m g}", r"\sqrt{3mg}", True),
        (r"\zeta(4)", r"\frac{\pi^4}{90}", True),
        (r"\zeta(4)", r"\frac{\pi^4}{96}", False),
        (r"\Gamma(7)", "720", True),
        (r"\Gamma(\tfrac32)", r"\frac{\sqrt\pi}{2}", True),
        ("C(m,3)", r"\frac{m(m-1)(m-2)}{6}", True),
        ("C(m,3)", r"\frac{m(m-1)(m-2)}{3}", False),
        (r"\vec u\times\vec v", r"-\vec v\times\vec u", True),
        (r"\vec u\times\vec v", r"\vec v\times\vec u", False),
        (r"PQ\perp RS", r"RS\perp PQ", True),
        (r"PQ\perp RS", r"PQ\parallel RS", False),
        (r"\{5m : m\in\mathbb Z\}", r"5k,\ k\in\mathbb{Z}", True),
        (r"\{5m : m\in\mathbb Z\}", r"6k,\ k\in\mathbb{Z}", False),
        ("(r,2r)", "(s,2s)", True),
        ("(r,2r)", "(s,3s)", False),
        ("(x,2x)", "(y,2y)", False),
        (r"g(x)=x\text{ and }g(x)=1", r"g(x)=1\text{ or }g(x)=x", True),
        (r"f(x)=2x\text{ for all }x", "f(x)=2x", True),
        (r"t\mapsto t^3", "f(t)=t^3", True),
        ("Carol", "Carol has a winning strategy", True),
        ("Carol", "Carol loses", False),
        ("scalene", "the triangle is scalene", True),
        ("negative integer", "negative number", False),
        ("all even numbers", "even integers", True),
        ("no", "False", True),
        ("no", "True", False),
        (r"\infty", "goes to infinity", True),
        (r"x\equiv 7\pmod{100}", "7", True),
        (r"x\equiv 7\pmod{12}", "7", False),
        ("3\\ \\text{ergs}", r"3\times 10^{-7}\text{ J}", True),
        (r"\ln|3x+1|+C", r"\log|3x+1|+C", True),
        (r"\ln x+C", r"\log x+C", True),
        (r"\ln 5", r"\log 5", False),
        (r"\ln x+C", r"2\log x+C", False),
        (r"\frac{4}{9}", r"\frac{4}{9}\text{ (in simplest form)}", True),
        (r"\frac{4}{9}", r"\frac{4}{9}, already reduced", True),
        ("0.25", "0.25 (as a decimal)", True),
        ("4", r"4 \pmod{9}", False),
        ("4", r"13 \pmod{9}", False),
        ("x=4", r"4 \pmod{9}", False),
        (r"\text{odd}", r"\text{The function is odd}", True),
        (r"\text{odd}", r"\text{The function is even}", False),
        (r"\text{odd}", r"g \text{ is odd}", True),
        (r"\text{Monday}", r"\text{It falls on a Monday}", True),
        (r"\text{Monday}", r"\text{Mon.}", True),
        (r"\text{Monday}", r"\text{It is not Monday}", False),
        ("g(x)=2x", r"g(x)=2x,\ \forall x\in\mathbb{R}", True),
        ("g(n)=2n", r"g(n)=2n\text{ for all positive integers }n", True),
        ("g(n)=2n", r"g(n)=2n,\ n\ge 1", True),
        ("g(x)=2x", r"g(x)=2x\text{ for }x<3", False),
        (r"\mathrm{K^+}", r"\text{K}^{+}", True),
        (r"\mathrm{NO_3^-}", r"\text{NO}_3^-", True),
        (r"\mathrm{K^+}", r"\text{K}^{-}", False),
        (r"\mathrm{SO_2}", "SO2", True),
        (r"\mathrm{SO_2}", "SO3", False),
        ("p+q=29", "p+q=20+9=29", True),
        ("p+q=29", "p+q=20+8=28", False),
        (r"(s,3s), s\in\mathbb{R}", r"(r,3r),\ r\in\mathbb{R}", True),
        (r"(s,3s), s\in\mathbb{R}", r"\{(r/3,r) : r\in\mathbb{R}\}", True),
        (r"(s,3s), s\in\mathbb{R}", r"(3s,s),\ s\in\mathbb{R}", False),
        (r"(x,y)=(1+2k,5-k), k\in\mathbb{Z}", r"x=1+2m, y=5-m, m\in\mathbb{Z}", True),
        (r"(x,y)=(1+2k,5-k), k\in\mathbb{Z}", r"(3+2n,4-n), n\in\mathbb{Z}", True),
        (r"(x,y)=(1+2k,5-k), k\in\mathbb{Z}", r"(1+4n,5-2n), n\in\mathbb{Z}", False),
        (r"(x,y)=(1+2k,5-k), k\in\mathbb{Z}", r"(1+2n,5+n), n\in\mathbb{Z}", False),
        (
            r"x=(-1)^n\frac{\pi}{4}+n\pi, n\in\mathbb{Z}",
            r"x=\frac{\pi}{4}+2k\pi\text{ or }x=\frac{3\pi}{4}+2k\pi, k\in\mathbb{Z}",
            True,
        ),
        (
            r"x=(-1)^n\frac{\pi}{4}+n\pi, n\in\mathbb{Z}",
            r"x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z}",
            False,
        ),
        (r"\frac{\pi}{3}+k\pi, k\in\mathbb{Z}", r"-\frac{2\pi}{3}+n\pi, n\in\mathbb{Z}", True),
        (r"\frac{k\pi}{2}, k\in\mathbb{Z}", r"k\pi, k\in\mathbb{Z}", False),
        (r"\frac{AB}{BC}=\frac{2}{7}", "AB/BC=2/7", True),
        (r"\frac{AB}{BC}=\frac{2}{7}", "BC/AB=2/7", False),
        (r"\frac{a}{b}=\frac{2}{7}", "a:b=2:7", True),
        (r"\mathbb{N}", r"\text{all positive integers}", True),
        (r"\mathbb{N}_0", r"\{0,1,2,\ldots\}", True),
        (r"\mathbb{N}_0", r"\mathbb{N}", False),
        (r"\mathbb{Q}", r"\text{all rational numbers}", True),
        (r"3\mathbf{u}-\mathbf{v}", r"3\vec{u}-\vec{v}", True),
        (r"3\mathbf{u}-\mathbf{v}", "3u-v", True),
        (r"\mathbf{u}\times\mathbf{v}", r"\vec{v}\times\vec{u}", False),
        ("2,5", r"\text{The roots are }2\text{ and }5", True),
        (r"\mathbb{R}\setminus\{4\}", r"\mathbb{R}-\{4\}", True),
        ("x>8", r"\text{all real numbers greater than }8", True),
        ("x>8", r"\text{all real numbers less than }8", False),
        ("[2,6]", r"\text{between 2 and 6 inclusive}", True),
        (r"n\equiv 0\pmod 4", r"\text{all multiples of }4", True),
        (r"n\equiv 0\pmod 4", r"\text{positive multiples of }4", False),
        (r"n\equiv 0\pmod 4", r"n\text{ is divisible by }4", True),
        (r"\text{all even integers}", "n=2k", True),
        (r"\text{all even integers}", "n=2k+1", False),
        ("3^k", r"\text{powers of }3", True),
        ("9", r"9\checkmark", True),
        ("9", r"9\text{ (attained at }x=2)", True),
        (r"\text{Yes}", r"\text{Yes, such a set exists}", True),
        (r"\text{Yes}", r"\text{Yes, but only for primes}", False),
        (r"\text{No}", r"\text{No, it cannot be done}", True),
        (r"\text{diverges}", r"\text{the series is divergent}", True),
        ("y=Ae^x+Be^{-x}", "y=C_1e^x+C_2e^{-x}", True),
        (r"\binom{9}{4}", "^9C_4", True),
        (r"\frac{1}{2}LI^2", r"E=\frac12 L I^2", True),
        ("-25", r"-25\text{ degrees}", True),
        ("g(x)=ax", r"g(x)=ax, a\in\mathbb{R}", True),
        ("g(x)=ax", r"g(x)=a, a\in\mathbb{R}", False),
        (r"g(x)=x^3\text{ for }x>2", "g(x)=x^3, x>2", True),
        (r"g(x)=x^3\text{ for }x>2", "g(x)=x^3, x>3", False),
        (
            r"\begin{cases} x & x>1 \\ 2 & x\le 1\end{cases}",
            r"\left\{\begin{array}{ll} x, & x>1 \\ 2, & x\le 1\end{array}\right.",
            True,
        ),
    ],
)
def test_kinds_of_mistakes_found_by_the_sets(gold: str, answer: str, equal: bool) -> None:
    """The blind sets revealed several kinds of mistakes of the grader. Further pairs of each kind,
    which are not in the sets, are graded correctly.
    """
    assert is_equal(gold, answer) is equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<reasoning>\\boxed{1}</reasoning>\nThe answer is 2.", "2"),
        ("The remainder is 6 when it is divided by 11.", "6"),
        ("Answer: Every integer of the form 3k.", "Every integer of the form 3k"),
        ("Thus $n = 8$. \\(\\square\\)", "n = 8"),
        ("=> 31", "31"),
        ("Let me try $y = 3$ first", None),
        ("We then add the 5 and", None),
        ("<think>The sum is 12.", None),
        ("**Answer**\n(a) 2\n(b) 7", "(a) 2 (b) 7"),
        ("So the domain is $(-4, 1]$.", "(-4, 1]"),
        ("The least value is $-9$ (attained at $x = 3$).", "-9"),
        ("Hence the function is\n\\[\nQ(t) = t^2 - 5.\n\\]", "Q(t) = t^2 - 5"),
        ("We see that there are no such primes.", "no such primes"),
        ("Therefore the system has no solutions.", "no solutions"),
        ("$\\textbf{Answer: } 21$", "21"),
        ("$\\mathrm{Answer: 21}$", "21"),
        ("The ratio of boys to girls is 5 to 2.", "5 to 2"),
        ("So the colour is **green**.", "green"),
        ("**Answer: Yes**, since it is prime.", "Yes"),
        ("Answer: No, because 3 divides it.", "No"),
        ("There are 4 cases, and the number of pairs is", None),
        ("<|channel|>analysis<|message|>Say m = 2. Then n^2 - 2n", None),
        ("She will earn 90 dollars in 4 weeks.", "90"),
    ],
)
def test_positions_of_answers_found_by_the_sets(text: str, answer: str | None) -> None:
    """Answers are found at the positions where models usually write them. Plans and unfinished
    thoughts give no answer.
    """
    assert extract(text) == answer


def test_several_letters_are_one_choice() -> None:
    """The answer to a question with several correct options has all of their letters."""
    assert extract("B is false.\n\nAnswer: A, C", "choice") == "A, C"
    assert extract("Answer: A and D.", "choice") == "A, D"
    assert extract("Answer: A, because B is false", "choice") == "A"


def test_a_remainder_may_name_its_modulus() -> None:
    """If the reference has no modulus, the answer may still give one. If the reference has a
    modulus, an answer without it is not equal.
    """
    assert matches_reference("4", r"4 \pmod{9}").is_equal
    assert not matches_reference("4", r"13 \pmod{9}").is_equal
    assert not matches_reference(r"4 \pmod{9}", "4").is_equal
    assert not matches_reference("x=4", r"4 \pmod{9}").is_equal


def test_positive_letters_come_from_the_problem() -> None:
    """If a problem says that its numbers are positive, the grader assumes that its letters are
    positive, but only for this problem.
    """
    gold = r"\sqrt{p^2q}"
    answer = r"p\sqrt{q}"
    said = "Let p and q be positive real numbers."
    assert judge(Problem("1", said, gold), answer).rule == "sizes"
    assert judge(Problem("1", "Let p and q be integers.", gold), answer).status == "different"
    rows = [{"gold": gold, "answer": answer, "problem": said}, {"gold": gold, "answer": answer}]
    assert [each.verdict.status for each in grade(rows)] == ["equal", "different"]
    real = [{**rows[0], "variables": "real"}]
    assert [each.verdict.status for each in grade(real)] == ["different"]


def test_a_vote_counts_constants_of_any_letter_together() -> None:
    """Answers that differ only in the letter of the integration constant are in one class. The vote
    has so many answers that atts compares keys instead of pairs.
    """
    others = [f"{number}x^{number}+C" for number in range(3, 40)]
    classes = group(["x^2+C", *others, "x^2+k", "x^2+1+C", "Dora", "Dora wins"])
    assert classes[0] == classes[-4] == classes[-3]
    assert classes[-2] == classes[-1]
    assert len(set(classes)) == len(others) + 2
