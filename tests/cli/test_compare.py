"""Two runs side by side: numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atts.api import compare


def results(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A file of results."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_accuracy_costs_and_problems_needed_by_hand(tmp_path: Path) -> None:
    """Ten problems, better on four, worse on one; half the target's tokens on every one."""
    before = results(
        tmp_path / "a.jsonl",
        [
            {"id": str(n), "correct": n < 4, "target_tokens": 100 + n, "seconds": 2.0}
            for n in range(10)
        ],
    )
    after = results(
        tmp_path / "b.jsonl",
        [
            {"id": str(n), "correct": 1 <= n < 8, "target_tokens": (100 + n) / 2, "seconds": 3.0}
            for n in range(10)
        ],
    )
    found = compare(before, after)
    assert (found.problems, found.vote.better, found.vote.worse, found.vote.tied) == (10, 4, 1, 5)
    assert (found.vote.first, found.vote.second) == (0.4, 0.7)
    assert found.vote.difference.low <= 0.3 <= found.vote.difference.high
    assert found.mcnemar is not None
    assert (found.mcnemar.both, found.mcnemar.first_only, found.mcnemar.second_only) == (3, 1, 4)
    assert found.mcnemar.p_value == pytest.approx(2 * (1 + 5) / 2**5)
    target, seconds = found.costs
    assert target.name == "target_tokens"
    assert [target.low, target.ratio, target.high] == pytest.approx([0.5, 0.5, 0.5])
    assert seconds.ratio == pytest.approx(1.5)
    # a paired t test with deviation sqrt((5 - 10 * 0.09) / 9) and difference 0.3, power 0.8
    assert found.vote.problems_needed == 42


def test_a_ratio_has_its_interval_over_problems(tmp_path: Path) -> None:
    """Problems of unlike cost widen it; it holds the ratio of the means."""
    costs = [(10, 5), (1000, 100), (20, 19), (500, 400), (30, 3), (70, 70)] * 4
    a = results(
        tmp_path / "a.jsonl",
        [{"id": n, "correct": 1, "target_tokens": x} for n, (x, _) in enumerate(costs)],
    )
    b = results(
        tmp_path / "b.jsonl",
        [{"id": n, "correct": 1, "target_tokens": y} for n, (_, y) in enumerate(costs)],
    )
    (target,) = compare(a, b).costs
    assert target.ratio == pytest.approx(597 / 1630)
    assert 0.05 < target.low < 597 / 1630 < target.high < 0.9


def test_a_cost_of_nothing_is_no_number(tmp_path: Path) -> None:
    """The draft alone asks the target for nothing: a ratio over it is infinite, and shown in words."""
    a = results(
        tmp_path / "a.jsonl", [{"id": n, "correct": 1, "target_tokens": 0} for n in range(3)]
    )
    b = results(
        tmp_path / "b.jsonl", [{"id": n, "correct": 1, "target_tokens": 9} for n in range(3)]
    )
    assert math.isinf(compare(a, b).costs[0].ratio)


def test_what_could_not_be_scored_stands_beside_what_it_could_change(
    atts: Any, tmp_path: Path
) -> None:
    """Votes that could not be scored count as wrong; the difference, were they right, is in the
    table.
    """
    verdicts = {
        "a": ["correct", "wrong", "unscored", "wrong"],
        "b": ["unscored", "unscored", "correct", "wrong"],
    }
    a, b = (
        results(
            tmp_path / f"{name}.jsonl",
            [{"id": n, "verdict": verdict} for n, verdict in enumerate(said)],
        )
        for name, said in verdicts.items()
    )
    found = compare(a, b)
    assert found.unscored == (1, 2)
    assert found.vote.difference.value == 0
    assert found.if_right is not None
    assert found.if_right.difference.value == pytest.approx(0.25)
    assert (
        "unscored, counted wrong: 1 and 2; were they right: difference +0.250 ["
        in atts("compare", str(a), str(b)).out
    )
    assert (
        "unscored"
        not in atts(
            "compare", str(results(tmp_path / "c.jsonl", [{"id": 1, "correct": 1}])), str(a)
        ).out
    )


def test_lines_of_one_problem_are_its_rollouts(tmp_path: Path) -> None:
    """Several lines with one id count as one problem: intervals are over problems, not lines."""
    rows = [{"id": "x", "correct": right} for right in (True, False, True)] + [
        {"id": "y", "correct": False}
    ]
    found = compare(results(tmp_path / "a.jsonl", rows), results(tmp_path / "b.jsonl", rows))
    assert found.problems == 2
    assert found.vote.first == pytest.approx((2 / 3 + 0) / 2)
    assert found.mcnemar is None  # shares are neither right nor wrong


def test_a_directory_and_what_eval_printed_are_the_same_run(
    atts: Any, runs: Path, tmp_path: Path, scripted: tuple[str, ...]
) -> None:
    """`atts eval --json > file` holds what the run directory holds, seconds of single problems
    apart.
    """
    printed = atts(
        "eval", "arithmetic[:3]", "--samples", "3", *scripted, "--out", "runs/atts", "--json"
    ).out
    (tmp_path / "printed.jsonl").write_text(printed)
    found = compare(runs / "atts", tmp_path / "printed.jsonl")
    assert found.problems == 3
    assert found.vote.tied == 3
    assert found.single is not None
    assert found.single.tied == 3
    assert {
        cost.name: cost.ratio for cost in found.costs if cost.name != "seconds"
    } == pytest.approx({"draft_tokens": 1.0, "scored_tokens": 1.0, "target_tokens": 1.0})


def test_the_words_say_who_and_how_much(atts: Any, runs: Path) -> None:
    """Both runs with their methods, the difference, the ratios; JSON has the same numbers."""
    said = atts("compare", "runs/alone", "runs/atts")
    assert said.code == 0
    assert "runs/alone (target-only) → runs/atts (atts)" in said.out
    assert "3 problems in common" in said.out
    record = json.loads(atts("compare", "runs/alone", "runs/atts", "--json").out)
    costs = {cost["name"]: cost for cost in record["costs"]}
    assert costs["draft_tokens"]["ratio"] == "inf"
    assert 0 < costs["target_tokens"]["ratio"] < 1
    assert f"{costs['target_tokens']['ratio']:.3f}" in said.out


def test_problems_of_one_side_only_are_left_out_aloud(atts: Any, tmp_path: Path) -> None:
    """No problem is compared with nothing, and none is dropped in silence."""
    results(tmp_path / "a.jsonl", [{"id": n, "correct": 1} for n in range(5)])
    results(tmp_path / "b.jsonl", [{"id": n, "correct": 0} for n in range(3)])
    said = atts("compare", "a.jsonl", "b.jsonl")
    assert "2 problems are only in a.jsonl, 0 only in b.jsonl" in said.err
    assert "3 problems in common" in said.out
