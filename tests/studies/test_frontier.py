"""The frontier of a recorded run: on its policy it reads what happened, off it it says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atts.api import Setup, evaluate_sync
from atts.errors import JournalError
from atts.testing import toy_problems
from scripts.studies import frontier
from scripts.studies.frontier import Grid, Record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small journalled run on scripted engines."""
    directory = tmp_path_factory.mktemp("runs") / "scripted"
    base = Setup(draft="scripted", target="scripted", rate=0.3)
    policy = replace(base.policy, samples=4, early_stop="none", first_wave=0)
    problems = [replace(problem, kind="math") for problem in toy_problems(6, 4)]
    evaluate_sync(problems, replace(base, policy=policy), directory=directory)
    return directory


def test_the_run_itself_is_the_first_point_at_its_own_cost(run: Path) -> None:
    """Nothing off-policy, its tokens and its seconds."""
    record = Record(run, (1e6, 1e7))
    first = record.points(Grid())[0]
    usage = [outcome.usage for outcome in record.outcomes]
    assert (first.policy, first.kind, first.off_policy) == ("as it was", "run", 0.0)
    assert first.target_tokens == pytest.approx(sum(u.target_tokens for u in usage) / 6)
    arithmetic = sum(u.draft_tokens * 1e6 + (u.target_tokens + u.scored_tokens) * 1e7 for u in usage)
    assert first.gflops == pytest.approx(arithmetic / 6 / 1e9)
    assert first.seconds == pytest.approx(record.seconds / 6)
    right = sum(outcome.answer == outcome.problem.answer for outcome in record.outcomes)
    assert first.right.value == pytest.approx(right / 6)


def test_fewer_samples_cost_less_and_other_rates_are_off_policy(run: Path) -> None:
    """Samples and turns are cuts of the record; another rate leaves it, and costs what its escalations would."""
    found = Record(run).points(Grid((0.05, 0.9), (1, 2, 4), (2,)))
    cut = {one.policy: one for one in found if one.kind == "majority vote"}
    assert cut["vote of 1"].target_tokens < cut["vote of 4"].target_tokens
    assert all(one.off_policy == 0 for one in cut.values())
    rates = {one.policy: one for one in found if one.kind.startswith("conformal")}
    assert rates["rate 0.9"].off_policy > 0.05
    assert rates["rate 0.05"].target_tokens < rates["rate 0.9"].target_tokens
    assert all(one.gflops is None for one in found)


def test_the_command_writes_table_pictures_and_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markdown, strict JSON, one SVG per axis that is known."""
    frontier.main([str(run), "--out", str(tmp_path), "--rates", "0.2", "--samples", "2", "--turns"])
    assert "as it was" in capsys.readouterr().out
    record = json.loads((tmp_path / "frontier.json").read_text())
    assert {one["kind"] for one in record} >= {"run", "majority vote", "top-B", "random"}
    assert "<svg" in (tmp_path / "frontier-target-tokens.svg").read_text()
    assert not (tmp_path / "frontier-flops.svg").exists()
    frontier.main([str(run), "--out", str(tmp_path), "--draft-flops", "1e6", "--target-flops", "1e7"])
    assert (tmp_path / "frontier-flops.svg").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(JournalError, match="no run"):
        Record(tmp_path)
