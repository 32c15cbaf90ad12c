"""Tests that the page of grading policies agrees with the grader."""

import re
from collections import Counter
from pathlib import Path

import pytest

from atts.core import AnswerKind, Grading, Problem
from atts.evaluators import equivalent, judge

pytestmark = pytest.mark.checkout
EXAMPLES: tuple[tuple[str, Grading, str, str, str], ...] = (
    ("relative", Grading(relative=0.01), "4.5e33", r"4.48 \times 10^{33}", "equal"),
    ("relative", Grading(relative=0.01), "4.5e33", r"4.4 \times 10^{33}", "different"),
    ("relative", Grading(relative=0.01), "200", "201", "different"),
    ("absolute", Grading(absolute=0.1), "29", "28.95", "equal"),
    ("absolute", Grading(absolute=0.1), "29", "28.85", "different"),
    ("absolute", Grading(absolute=0.1), "(3, 4)", "(3.05, 3.92)", "equal"),
    ("units", Grading(), r"5\text{ km}", "5", "equal"),
    ("units", Grading(units="required"), r"5\text{ km}", "5", "different"),
    ("units", Grading(units="required"), r"5\text{ km}", "5000 m", "equal"),
    ("variables", Grading(), r"\sqrt{\rho^2 L}", r"\rho\sqrt{L}", "equal"),
    ("variables", Grading(variables="real"), r"\sqrt{\rho^2 L}", r"\rho\sqrt{L}", "different"),
    ("variables", Grading(variables="positive"), r"\sqrt{a^2b}", r"a\sqrt{b}", "equal"),
    ("choices", Grading(), "B", "mitochondria", "different"),
    ("choices", Grading(choices="text"), "B", "mitochondria", "equal"),
    ("choices", Grading(choices="text"), "B", "nucleus", "different"),
)
"""Examples: policy, setting, reference, answer, expected verdict. The choices of a multiple-choice
question are nucleus, mitochondria and ribosome.
"""
CHOICES = ("nucleus", "mitochondria", "ribosome")


def test_the_examples_of_policies_hold() -> None:
    """Each policy that can be set has three examples on the page, with verdicts for both settings."""
    from scripts.studies.grading import TARGET

    page = TARGET.read_text(encoding="utf-8")
    assert Counter(row[0] for row in EXAMPLES) == dict.fromkeys(
        ("relative", "absolute", "units", "variables", "choices"), 3
    )
    for policy, grading, gold, answer, status in EXAMPLES:
        kind: AnswerKind = "choice" if gold == "B" else "math"
        assert (
            judge(Problem("", "", gold, kind, choices=CHOICES, grading=grading), answer).status
            == status
        )
        assert (
            f"| `{policy} = {getattr(grading, policy)}` | `{gold}` | `{answer}` | {status} |"
            in page
        )


def test_the_examples_of_fixed_rules_hold() -> None:
    """The page's examples of fixed rules, such as domains and repeated items, have the verdict that
    the page gives, whichever answer is the reference.
    """
    from scripts.studies.grading import TARGET

    section = (
        TARGET.read_text(encoding="utf-8")
        .partition("# Fixed rules")[2]
        .partition("# Disputed pairs")[0]
    )
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (\w+) \|", section, re.MULTILINE)
    assert len(rows) == 13
    assert [
        row
        for row in rows
        if {equivalent(*row[:2]).status, equivalent(*row[1::-1]).status} != {row[2]}
    ] == []


def test_the_page_is_current(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of grading policies is current: generating it again changes nothing, and each
    disputed pair has its row.
    """
    from scripts.studies.grading import TARGET, document

    monkeypatch.setenv("ATTS_SHARED_DATA", str(shared_data))
    assert document() == TARGET.read_text(encoding="utf-8")
    assert TARGET.read_text(encoding="utf-8").count("\n| ") > 250
