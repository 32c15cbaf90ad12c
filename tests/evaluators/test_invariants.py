"""Tests of properties of all verdicts: symmetry, agreement with grouping, and budgets counted in
steps.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atts.core import Grading, Problem
from atts.evaluators import (
    Limits,
    LoadOptions,
    equivalent,
    extraction,
    find_benchmark,
    grade,
    group,
    judge,
    load_dataset,
    reference,
    unmarked,
)
from atts.evaluators.answers import MOST_CHARACTERS


def rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line:
            yield json.loads(line)


def test_shared_pairs_are_symmetric_and_grouped_alike(shared_data: Path) -> None:
    """A pair of the shared files has the same verdict whichever answer is the reference. A vote
    puts the two answers into one class exactly if they are equal.
    """
    pairs = [
        (row["gold"], row["pred"])
        for name in ("cases", "adversarial")
        for row in rows(shared_data / f"equivalence/{name}.jsonl")
        if row.get("kind") != "text" and row["gold"].strip() and row["pred"].strip()
    ]
    uneven = []
    for gold, answer in pairs:
        verdict = equivalent(gold, answer)
        if verdict.rule in ("no answer", "no reference"):
            continue
        first, second = group([gold, answer])
        if (
            equivalent(answer, gold).status != verdict.status
            or (first == second) != verdict.is_equal
        ):
            uneven.append((gold[:80], answer[:80]))
    assert len(pairs) > 1000
    assert uneven == []


def test_pairs_of_every_kind_are_grouped_as_they_are_compared() -> None:
    """For each pair of the tests' own list, grouping and comparison agree on whether the answers
    are equal.
    """
    from tests.evaluators.test_meanings import KINDS

    pairs = [pair for kind in KINDS.values() for pair in kind]
    uneven = [pair for pair in pairs if len({*group(pair)}) == 1 + equivalent(*pair).is_equal]
    assert uneven == []


def test_no_verdict_depends_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is ten thousand times slower, every verdict is the same."""
    pairs = [
        (r"\frac{1}{2\sin(\frac{\pi}{26})}", r"\frac{\sin(\frac{6\pi}{13})}{\sin(\frac{\pi}{13})}"),
        (r"\lfloor\frac{2n-1}{5}\rfloor", r"\lfloor\frac{2n+1}{5}\rfloor"),
        ("x^2+2x+1", "(x+1)^2"),
    ]
    expected = [equivalent(*pair) for pair in pairs]
    now = time.thread_time

    def slow() -> float:
        return now() * 10_000 + 1

    monkeypatch.setattr(time, "thread_time", slow)
    limits = Limits(seconds=10**9)
    assert [equivalent(*pair, limits=limits) for pair in pairs] == expected


def test_an_answer_ended_by_the_clock_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the time limit ends a comparison, the answer is unscored and the verdict names the time
    limit.
    """
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks) * 100))
    gold = r"\sum_{k=1}^{300}\sum_{j=1}^{60}(k+j)"
    verdict = equivalent(gold, "5")
    assert (verdict.status, verdict.rule) == ("unscored", "time")


def test_a_budget_counts_work() -> None:
    """If a comparison exceeds its limit of computing steps, the answer is unscored with the rule
    "limits".
    """
    verdict = equivalent(r"\sin x + \cos x", r"\cos x + \sin(x) + 10^{-60}", limits=Limits(work=20))
    assert (verdict.status, verdict.rule) == ("unscored", "limits")


REPEATED = [
    "\n",
    "\t",
    " ",
    "a",
    "1",
    "{",
    "$",
    "\\",
    "*",
    "#",
    "<",
    "x>i",
    "A or B ",
    "<|im_end|>",
    "\n ",
    "é",
]


@pytest.mark.parametrize("unit", REPEATED)
@pytest.mark.parametrize("read", ["extraction", "choice", "unmarked", "pair"])
def test_reading_takes_linear_time(unit: str, read: str) -> None:
    """Reading takes linear time: a text eight times as long takes at most about twenty times as
    long, even if it repeats itself.
    """
    readers: dict[str, Callable[[str], object]] = {
        "extraction": lambda text: extraction(text, fallback="number"),
        "choice": lambda text: extraction(text, "choice"),
        "unmarked": unmarked,
        "pair": lambda text: equivalent("1", text),
    }

    def seconds(count: int) -> float:
        text = unit * (count // len(unit))
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            readers[read](text)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(40_000) < 20 * max(seconds(5_000), 0.001)


def test_very_long_texts_are_read_at_their_end() -> None:
    """Extraction searches only the end of a text that exceeds the limit on characters, and an
    answer that exceeds this limit is not compared.
    """
    text = "a" * 10 * MOST_CHARACTERS
    assert extraction(text + r" so \boxed{7}").answer == "7"
    assert extraction(r"\boxed{7} " + text).answer is None
    assert equivalent("1", text).rule == "limits"


def test_many_inequalities_are_not_called_different() -> None:
    """A chain of inequalities that is too long to evaluate is undecided."""
    chain = ">".join(["x>i"] * 300)
    assert equivalent("x>i", chain).status == "unscored"
    assert equivalent("x>1", ", ".join(["x>1"] * 300)).is_equal


def test_a_reference_may_have_a_percent_sign() -> None:
    """If the reference is 28 %, the answer may be 28, unless units are required. If the reference
    is 28, the answer 28 % is wrong.
    """
    records = [
        {"gold": r"28\%", "answer": "28"},
        {"gold": "28", "answer": r"28\%"},
        {"gold": "0.28", "answer": r"28\%"},
        {"gold": r"28\%", "answer": "28", "units": "required"},
    ]
    assert [each.verdict.is_equal for each in grade(records)] == [True, False, True, False]
    assert judge(Problem("1", "?", "28 percent"), "28").is_equal
    assert reference(r"So the share is $1/5$, or $\boxed{20}$ percent.") == r"20\%"


@pytest.mark.parametrize("name", ["math500", "aime24", "amc23", "hmmt25_feb", "olympiadbench"])
def test_exact_benchmarks_take_no_rounded_answers(name: str) -> None:
    """For a benchmark with exact answers, 0.333333 does not equal 1/3. Under the default settings
    it does.
    """
    benchmark = find_benchmark(name)
    assert benchmark is not None
    assert benchmark.grading == Grading(rounding="none")
    assert equivalent(r"\frac13", "0.333333").rule == "rounding"
    assert not equivalent(r"\frac13", "0.333333", grading=benchmark.grading).is_equal


def test_a_file_of_a_benchmark_has_its_profile(tmp_path: Path) -> None:
    """A local file of a benchmark is graded under the same profile as the hub's copy."""
    file = tmp_path / "aime.jsonl"
    file.write_text(json.dumps({"problem": "?", "answer": "33"}))
    problem = load_dataset("aime24", options=LoadOptions(file=file)).problems[0]
    assert problem.grading == Grading(rounding="none")
