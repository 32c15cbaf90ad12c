"""Tests of the grader on pairs of answers, by the documented grading policy."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atts.errors import OptionError
from atts.evaluators import Limits, equivalent

EQUAL = {
    "integers of any size": ("2^{100}", "1267650600228229401496703205376"),
    "thousands": (r"11,\! 111,\! 111,\! 100", "11111111100"),
    "decimals": ("0.5", ".50"),
    "fractions": (r"\frac{14}{3}", r"4\frac{2}{3}"),
    "unreduced": (r"\frac{1}{2}", "2/4"),
    "scientific": (r"6.02\times 10^{23}", "6.02e23"),
    "radicals": (r"3\sqrt{13}", r"\sqrt{117}"),
    "denesting": (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    "odd roots of negatives are real": ("-2", r"\sqrt[3]{-8}"),
    "trigonometry": (
        r"\frac{1}{2\sin(\frac{\pi}{26})}",
        r"\frac{\sin(\frac{6\pi}{13})}{\sin(\frac{\pi}{13})}",
    ),
    "constants": ("-1", r"e^{i\pi}"),
    "letters in a cube root": (r"\sqrt[3]{3mg}", r"\sqrt[3]{3gm}"),
    "letters in a root with a written index": (r"\sqrt[{n}]{3mg}", r"\sqrt[{n}]{3gm}"),
    "arccos of 1": ("0", r"\arccos((\sqrt{3}+\sqrt{2})(\sqrt{3}-\sqrt{2}))"),
    "arcsin of 1": (r"\frac{\pi}{2}", r"\arcsin((\sqrt{3}+\sqrt{2})(\sqrt{3}-\sqrt{2}))"),
    "arcsec of 1": ("0", r"\operatorname{arcsec}((\sqrt{3}+\sqrt{2})(\sqrt{3}-\sqrt{2}))"),
    "arccsc of 1": (
        r"\frac{\pi}{2}",
        r"\operatorname{arccsc}((\sqrt{3}+\sqrt{2})(\sqrt{3}-\sqrt{2}))",
    ),
    "arccosh of 1": ("0", r"\operatorname{arccosh}((\sqrt{3}+\sqrt{2})(\sqrt{3}-\sqrt{2}))"),
    "expressions": ("(N+1)^2(4N+1)", "4N^3+9N^2+6N+1"),
    "discrete functions": (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    "assignments": ("5", "x = 5"),
    "quantities": (r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}", r"\frac{1}{\sqrt 6}"),
    "chains": ("28800", r"2 \times 120 \times 120 = 28,\!800"),
    "equations up to a factor": ("x-2y+z-1=0", "2x-4y+2z-2=0"),
    "inequalities turned": ("x > 5", "-x < -5"),
    "intervals": ("[-2,7]", r"x\in[-2,7]"),
    "unions": (r"(-\infty,-8)\cup (8,\infty)", "(8,∞)∪(-∞,-8)"),
    "inequality as interval": ("[0,1)", r"0\le x<1"),
    "sets": (r"\{1,2,3\}", "3, 1, 2"),
    "both signs": (r"\frac{-1\pm\sqrt{17}}{2}", r"\frac{-1-\sqrt{17}}{2}, \frac{-1+\sqrt{17}}{2}"),
    "tuples": (r"\left( 3, \frac{\pi}{2} \right)", "(3, pi/2)"),
    "matrices": (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\left[\begin{array}{cc}1 & 2\\3 & 4\end{array}\right]",
    ),
    "matrix arithmetic": (
        r"\begin{pmatrix} 6 \\ 8 \end{pmatrix}",
        r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}+\begin{pmatrix}4\\4\end{pmatrix}",
    ),
    "units": (r"15\mbox{ cm}^2", "15"),
    "units converted": (r"2 \text{ hours}", "120 minutes"),
    "ordinals": ("12", r"12^{\mathrm{th}} \text{ grade}"),
    "money": (r"\$32,\!348", "32348 dollars"),
    "degrees": (r"90^\circ", "90 degrees"),
    "degrees and radians": (r"\frac{\pi}{3}", r"60^\circ"),
    "percent": (r"28\%", "28 percent"),
    "percent as a value": ("0.335", r"33.5\%"),
    "bases": ("2516_8", r"2516_{\text{eight}}"),
    "text": (r"\text{Evelyn}", "evelyn"),
    "choices": ("C", "C. 42"),
    "unicode": (r"\frac{9}{4}\pi", "9π/4"),
    "words for numbers": ("27", "twenty-seven"),
    "announced": ("5", "The final answer is $5$."),
    "boxes": ("1,2", r"\boxed{2} and \boxed{1}"),
    "repeating decimals": (r"\frac{448}{3}", r"149.\overline{3}"),
    "rounded to many digits": (r"\sqrt{2}", "1.41421356"),
    "finite sums": ("55", r"\sum_{k=1}^{10} k"),
}
DIFFERENT = {
    "arccos near 1": ("0", r"\arccos(\frac{\sqrt{10}}{\sqrt{2}\sqrt{5}}-10^{-40})"),
    "arccos very near 1": ("0", r"\arccos(1-10^{-60})"),
    "off by one": ("123456789012345678901234567890", "123456789012345678901234567891"),
    "far below one": ("10^{-20}", "10^{-21}"),
    "nearly an integer": (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    "a hundred digits on": (r"\pi", r"\pi+10^{-100}"),
    "few digits": (r"\frac13", "0.333"),
    "rounded decimals": ("16386.16", "16386.2"),
    "significant digits": (".0000672", "0.000067"),
    "sign": (r"-\frac{1}{2}", r"\frac{1}{2}"),
    "inverse": (r"\frac{2}{3}", r"\frac{3}{2}"),
    "order of a tuple": ("(1,2)", "(2,1)"),
    "brackets": ("(1,2]", "[1,2)"),
    "one of two roots": (r"\pm 5", "5"),
    "more than asked": ("5", "5 or 7"),
    "other equation": ("x^2+121=0", "x^2+18x+86=0"),
    "one side of an equation": ("$a +3z = 0$", "$0$"),
    "strictness": ("x > 5", r"x \geq 5"),
    "absolute value": ("x", r"\sqrt{x^2}"),
    "variable": ("2n+1", "2m+1"),
    "assignments swapped": ("x=1,y=2", "x=2,y=1"),
    "units that differ": ("5 cm", "5 m"),
    "half past": ("11:30", "11:03"),
    "afternoon": ("2:30 pm", "2:30 am"),
    "value in another base": ("10", "1010_2"),
    "digits run together": ("12", "1 2"),
    "thousands cut": (r"1\,234", "235"),
    "list for a number": ("12", "1,23"),
    "steps shifted": (r"\lfloor\frac{2n-1}{5}\rfloor", r"\lfloor\frac{2n+1}{5}\rfloor"),
    "denied": (".35625", r"\frac{57}{160} \text{ cannot be expressed as a terminating decimal}"),
    "cut": (r"\frac{15}{2}", r"\frac{15"),
    "undefined": ("7", r"\frac{7}{0}"),
    "month": (r"\text{June 20}", "May 20"),
    "letters of a word": (r"\text{east}", "seat"),
}


@pytest.mark.parametrize(("gold", "answer"), EQUAL.values(), ids=EQUAL)
def test_equal_values_in_different_notation_are_equal(gold: str, answer: str) -> None:
    """The two notations of a value are equal whichever of them is the reference."""
    assert [equivalent(gold, answer).status, equivalent(answer, gold).status] == ["equal", "equal"]


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT.values(), ids=DIFFERENT)
def test_similar_looking_values_are_different(gold: str, answer: str) -> None:
    """Different values are distinguished however close they look, whichever is the reference."""
    assert [equivalent(gold, answer).status, equivalent(answer, gold).status] == [
        "different",
        "different",
    ]


def test_undecided_pairs_are_unscored() -> None:
    """An answer is unscored instead of wrong if the reference is missing or algebra cannot decide
    the pair.
    """
    assert equivalent("", "5").rule == "no reference"
    assert equivalent("0", r"\boxed{}").rule == "no answer"
    assert equivalent("5", r"\sum_{p \text{ prime}} \frac{1}{p^2}").status == "unscored"


def test_the_kind_decides_how_answers_are_compared() -> None:
    """The kind of an answer decides how it is compared: a text by its characters, and a choice by
    its letter. An unknown kind is an error.
    """
    assert equivalent("an ellipse", "Ellipse.", "text").is_equal
    assert not equivalent("0.5", "1/2", "text").is_equal
    assert equivalent("B", "(B) 42", "choice").is_equal
    assert not equivalent("B", "C", "choice").is_equal
    with pytest.raises(OptionError, match="choice"):
        equivalent("1", "1", "number")  # type: ignore[arg-type]


def test_the_caller_sets_the_limits() -> None:
    """If the caller sets a smaller limit, a pair that was called different becomes undecided."""
    gold = "(x+1)^{9}+1"
    answer = "1+(1+x)^{9}+0"
    assert equivalent(gold, answer).is_equal
    assert equivalent(gold, answer, limits=Limits(tokens=5)).status == "unscored"


def test_threads_do_not_change_verdicts() -> None:
    """Eight threads that grade concurrently get the same verdicts as one thread."""
    pairs = list(EQUAL.values()) * 4
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda pair: equivalent(*pair, limits=Limits(characters=19_999)).status, pairs)
        )
    assert set(found) == {"equal"}


def test_little_stack_leaves_an_answer_undecided() -> None:
    """Near the recursion limit the grader leaves the answer undecided instead of raising."""
    verdicts: list[str] = []

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            verdicts.append(equivalent("2", r"\sqrt{" * 12 + "x" + "}" * 12).status)

    worker = threading.Thread(target=deep, args=(820,))
    worker.start()
    worker.join()
    assert verdicts[0] in ("different", "unscored")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line:
            yield json.loads(line)


def test_cases_of_other_checkers(shared_data: Path) -> None:
    """Each undisputed pair from other checkers' tests gets the expected verdict in both directions."""
    rows = [row for row in _rows(shared_data / "equivalence/cases.jsonl") if row["tag"] == "core"]
    rows = [row for row in rows if row["kind"] == "answer"]
    wrong = [
        row["id"]
        for row in rows
        if equivalent(row["gold"], row["pred"]).is_equal != row["expected"]
    ]
    turned = [
        row["id"]
        for row in rows
        if equivalent(row["pred"], row["gold"]).is_equal != row["expected"]
    ]
    assert len(rows) > 700
    # in eq0406, words that are not a unit follow the number 17, so the pair is unscored
    assert (wrong, turned) == (
        ["eq0406"],
        ["eq0406"],
    )


def test_answers_of_real_models(shared_data: Path) -> None:
    """At least 99 of 100 answers of real models get the same verdict as from a human reader."""
    rows = list(_rows(shared_data / "traces/answer_pairs.jsonl"))
    right = sum(
        equivalent(row["gold"], row["pred"]).is_equal == row["judged_equal"] for row in rows
    )
    assert right >= 0.99 * len(rows)


@pytest.mark.parametrize("count", [3, 40, 200])
def test_long_lists_are_compared_member_by_member(count: int) -> None:
    """The order of a long set does not matter, and one changed or missing member makes the set
    different.
    """
    numbers = list(range(1, count + 1))
    gold = f"\\{{{','.join(map(str, numbers))}\\}}"

    def status(members: list[int]) -> str:
        return equivalent(gold, f"\\{{{','.join(map(str, members))}\\}}").status

    assert status(numbers[::-1]) == "equal"
    assert status([*numbers[:-1], 999]) == "different"
    assert status(numbers[1:]) == "different"


@pytest.mark.parametrize(("last", "status"), [(160, "equal"), (161, "different")])
def test_long_lists_of_other_spellings_are_compared_by_value(last: int, status: str) -> None:
    """Two lists of eighty fractions are equal although each fraction is written differently on the
    two sides.
    """
    gold = ",".join(f"\\frac{{{place}}}{{83}}" for place in range(1, 81))
    others = [2 * place for place in range(1, 80)] + [last]
    answer = ",".join(f"\\frac{{{top}}}{{166}}" for top in reversed(others))
    assert equivalent(f"\\{{{gold}\\}}", f"\\{{{answer}\\}}").status == status
