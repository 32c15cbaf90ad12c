"""Tests of grouping: equal answers form one class, in any order, and different answers stay
separate.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.evaluators import Verdict, equivalent, group
from atts.evaluators.equivalence import grouping

POOL = [
    "1/2", "0.5", r"\frac{2}{4}", r"50\%", "x=1/2", "2", "2.0", "x = 2", "(1,2)", "1,2", "2,1", r"\{1,2\}",
    "[1,2]", r"\pm 2",
    "2,-2", "y=2x+3", "2x+3", "y-2x-3=0", r"\sqrt{12}", r"2\sqrt{3}", "3.4641016", r"90^\circ", "90", r"\frac{\pi}{2}",
    "x<3", r"(-\infty,3)", r"\text{Evelyn}", "Evelyn", "B", "(B)", "204_5", "204", "10", r"10\%", "0.1", "5 cm",
    "5", "5 m",
    "not an answer at all", r"\frac{1", "", None, r"\binom{n}{2}", r"\frac{n(n-1)}{2}", "1:2", "2:4", "11:30",
    "7,000", "7000", "9:15 pm", "21:15", "|x|<3", "(-3,3)", r"x\equiv 5\pmod{11}", r"16\pmod{11}", "8 kJ", "8000 J",
    "3 boys and 4 girls", "4 girls, 3 boys", r"\$5", "5 dollars", "no solution", r"\emptyset",
    "(x,y)=(1,2)", "y=2, x=1", r"\begin{cases} x & x>0 \\ -x & x\le 0\end{cases}", "|x|", "x=2 or x=-2",
    r"\{x \mid -3<x<3\}", "1.73205", r"\sqrt3",
    r"(1.73205, \frac13)", r"(\sqrt{3}, \frac{1}{3})",
]  # fmt: skip


def partition(answers: Sequence[str | None]) -> set[frozenset[str | None]]:
    """Return the classes of a grouping as sets of texts."""
    classes = group(answers)
    return {
        frozenset(a for a, c in zip(answers, classes, strict=True) if c == which)
        for which in set(classes) - {-1}
    }


def test_answers_of_one_question_are_grouped() -> None:
    """Answers with the same value get the same class number. Classes are numbered in the order of
    their first answers, and a missing answer gets -1.
    """
    assert group(["0.5", "x", r"\frac12", None, "1/2", " "]) == [0, 1, 0, -1, 0, -1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(POOL), max_size=14), st.randoms(use_true_random=False))
def test_the_partition_does_not_depend_on_the_order(
    answers: list[str | None], order: random.Random
) -> None:
    """Shuffling the answers changes their labels but not the classes."""
    shuffled = list(answers)
    order.shuffle(shuffled)
    assert partition(answers) == partition(shuffled)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([answer for answer in POOL if answer]), max_size=10))
def test_a_class_holds_equal_answers_only(answers: list[str]) -> None:
    """If a vote puts two answers into one class, the grader calls them equal."""
    classes = group(answers)
    for i, one in enumerate(answers):
        for j, two in enumerate(answers[:i]):
            if classes[i] == classes[j]:
                assert equivalent(one, two).is_equal


def test_equal_answers_are_together_unless_that_would_join_different_ones() -> None:
    """Equal answers are in one class, unless their common class would contain a pair of different
    answers.
    """
    answers = [answer for answer in POOL if answer]
    classes = dict(zip(answers, group(answers), strict=True))
    members = {c: [a for a in answers if classes[a] == c] for c in classes.values()}
    for one in answers:
        for two in answers:
            if classes[one] != classes[two] and equivalent(one, two).is_equal:
                joined = members[classes[one]] + members[classes[two]]
                assert any(not equivalent(a, b).is_equal for a in joined for b in joined), (
                    one,
                    two,
                )


def test_percent_does_not_join_ten_and_a_tenth() -> None:
    """10 % equals 10 and also 0.1, but 10 and 0.1 differ, so they stay in separate classes."""
    ten, tenth = group(["10", "0.1", r"10\%"])[:2]
    assert ten != tenth
    assert group(["0.1", r"10\%"]) == [0, 0]


def test_six_thousand_answers_are_grouped_at_once() -> None:
    """Six thousand answers to six hundred values form six hundred classes."""
    spellings = (
        "{0}",
        "{0}.0",
        r"\frac{{{1}}}{{2}}",
        "${0}$",
        "x = {0}",
        r"{0}\text{{ cm}}",
        "({0})",
        "{0}.",
        "+{0}",
        "{0}+0",
    )
    answers = [spelling.format(n, 2 * n) for n in range(600) for spelling in spellings]
    random.Random(5).shuffle(answers)
    assert set(Counter(group(answers)).values()) == {10}


def test_keys_separate_most_distinct_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different radicals, fractions, decimals and tuples have different comparison keys even if
    most digits are the same, so few pairs must be compared.
    """
    compared: list[str] = []

    def counted(gold: str, answer: str, *args: Any, **options: Any) -> Verdict:
        compared.append(gold)
        return equivalent(gold, answer, *args, **options)

    monkeypatch.setattr(grouping, "equivalent", counted)
    forms = (
        r"\sqrt{{{0}}}",
        r"\frac{{{0}}}{{7}}",
        r"{0}.00007",
        r"(\frac{{{0}}}{{7}}, \sqrt{{{0}}})",
        r"\sqrt{{{0}}}+2",
    )
    answers = [form.format(10**9 + 7 * n + 1) for form in forms for n in range(60)]
    assert len(set(group(answers))) == len(answers)
    assert len(compared) < len(answers)


def test_correct_answers_of_real_models_share_a_class(shared_data: Path) -> None:
    """Answers that a human reader called correct are in one class per question, and this class has
    no wrong answer.
    """
    lines = (shared_data / "traces/answer_pairs.jsonl").read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    strays = 0
    for question in {row["question_id"] for row in rows}:
        mine = [row for row in rows if row["question_id"] == question]
        classes = group([mine[0]["gold"], *(row["pred"] for row in mine)])
        strays += sum(
            (c == classes[0]) != row["judged_equal"]
            for c, row in zip(classes[1:], mine, strict=True)
        )
    assert strays <= 0.01 * len(rows)
