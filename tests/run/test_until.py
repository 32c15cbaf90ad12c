"""Tests of runs that end once their difference from an earlier run is clear."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atts.api import compare, evaluate_sync, report
from atts.api.evaluation import drawn_order
from atts.api.setup import Setup
from atts.core import Outcome
from atts.errors import DatasetError, FingerprintError, OptionError
from atts.journal import COMPARED, JOURNAL, Warned
from atts.pipelines import FixedGate, Policy
from atts.run import StopWhen
from atts.testing import toy_problems

PROBLEMS = toy_problems(30, 5)


def votes(value: float) -> Mapping[str, float]:
    """Return an earlier run whose votes were all correct, or all wrong."""
    return {problem.id: value for problem in PROBLEMS}


def plan(world: Any, against: Mapping[str, float], **changes: Any) -> Any:
    """Plan a run of the target alone with six rollouts in flight."""
    until = StopWhen("earlier", against)
    return world.plan(gate=FixedGate("escalate"), stop_when=until, concurrency=6, **changes)


def said(world: Any, name: str = "run") -> list[str]:
    """Return the journal's notes on the comparison."""
    return [
        event.text
        for event in world.events(name)
        if isinstance(event, Warned) and event.code == COMPARED
    ]


def test_a_run_ends_when_the_comparison_is_decided(world: Any) -> None:
    """When the comparison is decided, no further problem begins, open problems finish, and the
    journal has the result once.
    """
    result = world.run(plan(world, votes(0.0)), world.session(), PROBLEMS)
    assert (result.status, result.exit_code) == ("decided", 0)
    assert result.comparison is not None
    assert result.comparison.settled == "better"
    assert result.comparison.problems <= len(result.problems) < 25
    assert result.manifest.problems == 30
    assert [problem.problem for problem in result.problems] == [
        problem.id for problem in PROBLEMS[: len(result.problems)]
    ]
    assert len(said(world)) == 1
    assert f"decided after {result.comparison.problems} problems" in said(world)[0]
    again = world.run(plan(world, votes(0.0)), world.session(), PROBLEMS)
    assert (again.comparison, again.problems) == (result.comparison, result.problems)
    assert len(said(world)) == 1


def test_a_killed_comparison_resumes_to_the_same_result(world: Any) -> None:
    """Wherever the journal is cut, the resumed run decides after the same number of problems with
    the same interval.
    """
    whole = world.run(plan(world, votes(0.0)), world.session("whole"), PROBLEMS)
    lines = (world.tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    for share in (0.1, 0.4, 0.7, 0.95):
        cut = world.tmp_path / f"cut at {share}"
        cut.mkdir()
        (cut / "manifest.json").write_bytes((world.tmp_path / "whole/manifest.json").read_bytes())
        (cut / JOURNAL).write_bytes(b"".join(lines[: int(share * len(lines))]))
        resumed = world.run(plan(world, votes(0.0)), world.session(cut.name), PROBLEMS)
        assert (resumed.status, resumed.comparison) == ("decided", whole.comparison), share
        assert said(world, cut.name) == said(world, "whole"), share


def test_problems_are_compared_in_their_order(world: Any) -> None:
    """Problems are compared in their order, so a failed problem delays later ones until a session
    solves it.
    """

    async def pipeline(problem: Any, *others: Any) -> Outcome:
        if problem.id == PROBLEMS[2].id and not healed:
            raise RuntimeError("broken")
        return Outcome(problem, (), problem.answer)

    healed = False
    broken = world.run(plan(world, votes(0.0), pipeline=pipeline), world.session(), PROBLEMS)
    assert (broken.status, broken.comparison.problems, len(broken.problems)) == (
        "incomplete",
        2,
        30,
    )
    healed = True
    done = world.run(plan(world, votes(0.0), pipeline=pipeline), world.session(), PROBLEMS)
    assert (done.comparison.settled, done.comparison.problems) == ("better", 8)


def test_a_run_that_cannot_decide_says_so(world: Any) -> None:
    """If the comparison reaches no decision, all problems are run and the exit code is that of a
    failed check.
    """
    result = world.run(plan(world, votes(1.0)), world.session(), PROBLEMS[:12])
    assert (result.status, result.exit_code, result.comparison.settled) == (
        "finished",
        5,
        "undecided",
    )
    assert "undecided after 12 problems" in said(world)[0]


def test_problems_are_taken_in_an_order_drawn_by_the_seed(tmp_path: Path) -> None:
    """The seed determines the order of problems, the report has the comparison's result, and a
    resumed run must keep the order.
    """
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(
        "".join(f'{{"id": "{problem.id}", "correct": false}}\n' for problem in PROBLEMS[:20])
    )
    setup = Setup(
        draft="scripted",
        target="scripted",
        method="target-only",
        policy=Policy(samples=1),
        seed=3,
        concurrency=2,
    )
    words: dict[str, Any] = {
        "compare_to": earlier,
        "stop_when": "decided",
        "directory": tmp_path / "run",
    }
    result = evaluate_sync(PROBLEMS, setup, **words)
    order = [problem.id for problem in drawn_order(PROBLEMS[:20], 3)]
    assert result.status == "decided"
    assert result.comparison is not None
    assert [problem.problem for problem in result.problems] == order[: len(result.problems)]
    page = report(result, format="markdown").read_text()
    assert f"decided after {result.comparison.problems} problems" in page
    assert "the quick ones first" not in page
    assert result.to_dict()["comparison"]["settled"] == result.comparison.settled
    compared = compare(earlier, result, points=0)
    assert compared.sequential is not None
    words["stop_when"] = "decided=5"
    with pytest.raises(FingerprintError, match="until"):
        evaluate_sync(PROBLEMS, setup, **words)


def test_impossible_comparisons_are_refused(tmp_path: Path) -> None:
    """`compare_to` and `stop_when` are refused if only one is set, with an unknown value, with a
    shard, or if the problems differ.
    """
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text('{"id": "x", "correct": false}\n')
    setup = Setup(draft="scripted", target="scripted")

    asked: list[Any] = [
        {"compare_to": earlier},
        {"stop_when": "decided"},
        {"compare_to": earlier, "stop_when": "soon"},
    ]
    for words in asked:
        with pytest.raises(OptionError, match="stop_when"):
            evaluate_sync(PROBLEMS, setup, **words)
    with pytest.raises(OptionError, match="shard"):
        evaluate_sync(PROBLEMS, setup, compare_to=earlier, stop_when="decided", shard="1/2")
    with pytest.raises(DatasetError, match="graded none of the problems"):
        evaluate_sync(PROBLEMS, setup, compare_to=earlier, stop_when="decided")
