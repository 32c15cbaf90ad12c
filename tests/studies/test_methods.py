"""Tests of the study of the frontier: the result of each run, and the runs on the Pareto frontier."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.journal import open_run

methods = pytest.importorskip("scripts.studies.arms", reason="needs a checkout")
arms = pytest.importorskip("scripts.studies.arms", reason="needs a checkout")


def test_a_finished_run_is_not_repeated_and_counts_what_it_spent(tmp_path: Path) -> None:
    """A finished run is not repeated, and its sums equal those of its journal, including the tokens
    of a second session.
    """
    made = arms.arm("draft-only-2", "draft-only", samples=2)
    scripted = replace(made, setup=replace(made.setup, draft="scripted", target="scripted"))
    first, again = (
        anyio.run(methods.frontier_run, scripted, 3, tmp_path / "run", 5) for _ in range(2)
    )
    assert first == again
    recorded = list(open_run(tmp_path / "run").outcomes())
    assert len(recorded) == len(first.solved) == 3
    assert first.total("draft") == sum(outcome.usage.draft_tokens for outcome in recorded) > 0


def _sum(name: str, right: float, target: int) -> Any:
    return arms.Sum(
        [arms.Piece(name, 1, 0, 0, [arms.Solved("p", 1, right, right, 10, 0, target, [])])]
    )


def test_what_is_beaten_in_one_and_better_in_none_is_not_on_the_frontier() -> None:
    """The frontier is sorted by the amount of arithmetic, and two runs with equal results are both
    on it.
    """
    found = {
        "draft-only-1": _sum("a", 0.5, 0),
        "atts-0.2-1": _sum("b", 0.9, 20),
        "atts-0.4-1": _sum("c", 0.8, 30),
    }
    rows = methods.frontier_table({**found, "target-only-1": _sum("d", 0.9, 20)}).rows
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("draft-only-1", "draft-only", "yes"),
        ("atts-0.2-1", "atts-0.2", "yes"),
        ("target-only-1", "target-only", "yes"),
        ("atts-0.4-1", "atts-0.4", ""),
    ]
