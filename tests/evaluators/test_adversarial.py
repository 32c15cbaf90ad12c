"""Tests of hostile answers: they cost little, crash nothing, run nothing and are not graded as
correct.
"""

import json
import random
from pathlib import Path

import pytest

from atts.evaluators import Limits, equivalent, extract, group
from atts.evaluators.syntax.reading import read

psutil = pytest.importorskip("psutil", reason="memory is measured with psutil")

HOSTILE = {
    "towers": "9^{9^{9^{9}}}",
    "factorials": "((9!)!)!",
    "binomials": r"\binom{10^{9}}{5\cdot 10^{8}}",
    "long sums": "+".join("1" * 40_000),
    "digits": "1" * 100_000,
    "many factors": "x" * 100_000,
    "open braces": "{" * 100_000,
    "fractions": r"\frac" * 20_000,
    "nested fractions": r"\frac{1}{1+" * 400 + "1" + "}" * 400,
    "nested roots": r"\sqrt{" * 2_000 + "2" + "}" * 2_000,
    "nested boxes": r"\boxed{" * 10_000,
    "lists": "1," * 50_000,
    "bars": "|" * 4_001 + "x",
    "minus": "-" * 50_000,
    "text": r"\text{" + "a" * 90_000 + "}",
    "open text": r"\text{ " * 5_000,
    "marks": "answer is " * 10_000,
    "dollars": "$" * 50_000,
    "sums": r"\sum_{k=1}^{10^9} k^3",
    "products": r"\prod_{k=1}^{300}\prod_{j=1}^{300}\prod_{i=1}^{300}(k+j+i)",
    "powers of sums": "(((x+1)^{9}+1)^{9}+1)^{9}",
    "tiny": "10^{-10^{10}}",
    "huge sine": r"\sin(10^{10^{10}})",
    "control": "\x00\x1b[31m5\x7f",
    "surrogate": "5\ud83d6",
    "marks upon marks": "a" + "\u0301" * 10_000,
    "ends of lists": "a= " + "; " * 9_000 + ")",
    "ends of sentences": "5" + " ." * 9_000 + "x",
    "blanks within": "5 " + " " * 100_000 + "x",
    "blanks after an announcement": "Answer:" + " " * 100_000,
    "marks of parts": "(a) 3 (b) " * 10_000,
    "parts of nothing": "(a)" + " " * 100_000 + "(b) 5",
    "unit vectors": r"\vec{i}" * 14_000,
    "questions": "\nQuestion: " * 9_000,
    "classes": r"x\equiv 1" + ",1" * 20_000,
    "times": "3:00 " * 20_000,
    "roman": "Ⅴ",
    "circled": "①",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_equal_no_reference(answer: str) -> None:
    """No hostile answer equals 1 or x, on either side of a comparison, and extraction raises on
    none of them.
    """
    for gold in ("1", "x"):
        assert not equivalent(gold, answer).is_equal
        assert not equivalent(answer, gold).is_equal
    extract(answer, fallback="number")


def test_redundant_brackets_are_free() -> None:
    """Redundant brackets around a value do not change its verdict, even if there are thousands of
    them.
    """
    for left, right in (("(", ")"), ("{", "}"), (r"\left(", r"\right)")):
        assert equivalent("1", left * 5_000 + "1" + right * 5_000).is_equal


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grading a text that creates a file when evaluated as code creates no file."""
    monkeypatch.chdir(tmp_path)
    for code in (
        "__import__('os').system('touch MARK')",
        "open('MARK','w')",
        "exec(\"open('MARK','w')\")",
        r"\write18{touch MARK}",
        r"\frac{__import__('os').system('touch MARK')}{1}",
        "[open('MARK','w') for _ in [0]]",
    ):
        assert not equivalent("5", code).is_equal
        assert not equivalent(code, "5").is_equal
        extract(code, fallback="number")
        group([code, "5"])
    assert list(tmp_path.iterdir()) == []


def test_a_text_beyond_a_limit_is_unscored() -> None:
    """A text that exceeds a limit is unscored instead of different, and the verdict names the
    limit.
    """
    verdict = equivalent("1", "+".join(["x"] * 15_000))
    assert (verdict.status, verdict.rule) == ("unscored", "limits")
    small = Limits(characters=10)
    assert equivalent("1", "1+1+1+1+1+1+1", limits=small).rule == "limits"
    assert not read("1" * 30_000, Limits()).trees


def test_shared_adversarial_answers(shared_data: Path) -> None:
    """No answer of the shared list is called equal to the reference, and grouping them for a vote
    raises no error.
    """
    lines = (shared_data / "equivalence/adversarial.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    false_equal = [
        row["id"]
        for row in rows
        if row["expected"] is False and equivalent(row["gold"], row["pred"]).is_equal
    ]
    assert false_equal == []
    assert len(group([row["pred"] for row in rows if len(row["pred"]) < 200])) > 300


PIECES = ["\\frac", "{", "}", "^", "_", "\\sqrt", "\\left(", "\\right)", "|", "1", "9", "x", "e", "i", "+", "-", "/",
          "=",
          "<", ",", ";", "\\pm", "\\text{", "\\boxed{", "!", "%", "\\circ", "(", "]", "\\\\", "&", "\\begin{matrix}",
          "\\end{matrix}", "\\sum_{k=1}^{9}", "\\log", "\\sin", " ", ".", "\\infty", "\\cup", "and", "not", "π",
          "\0"]  # fmt: skip


@pytest.mark.parametrize("inside", ["3", "3}", "frt{"])
def test_nested_fractions_after_integers_are_read_once(inside: str) -> None:
    """The parser reads each level of a nested mixed number, as in 2 1/(2 1/(2 ...)), only once. If
    it read each level twice, 25 levels would take 2^25 steps.
    """
    nested = r"2\frac{1}{" * 25 + inside + "}" * 25
    assert equivalent(nested, "5").status == "different"


def test_random_maths_crashes_nothing() -> None:
    """Random strings of mathematical symbols raise no error in grading, grouping or extraction."""
    draw = random.Random(11)
    for _ in range(1_500):
        gold, answer = ("".join(draw.choices(PIECES, k=draw.randrange(1, 14))) for _ in range(2))
        equivalent(gold, answer)
        equivalent(answer, answer + " ")
        group([gold, answer])
        extract(answer + gold, fallback="number")


def test_memory_stays_small() -> None:
    """Grading the whole hostile list adds less than a hundred megabytes to this process."""
    before = psutil.Process().memory_info().rss
    for answer in HOSTILE.values():
        equivalent("1", answer)
    assert psutil.Process().memory_info().rss - before < 100 << 20
