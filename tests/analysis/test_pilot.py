"""Tests of pilots: pairs of models with a known best choice get the recommendation of that choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.analysis import PilotArm, PilotReport, judge_pilot, pilot_lines
from atts.api import run_pilot
from atts.cli.app import run as run_command
from atts.core import Role, Usage
from atts.engine import Capability
from atts.errors import OptionError, UsageError
from atts.testing import (
    Latency,
    ScoreDrift,
    ScriptedEngine,
    Skill,
    ToyModel,
    ToyTokenizer,
    toy_problems,
)
from atts.testing.clock import run_virtual

WEAK = Skill(right=0.7, typical=0.5, repair=0.0)
STRONG = Skill(right=0.985, typical=0.5, repair=0.75, wander=0.03, fluency=1.0)
# the model gives a mistake the same probability as the correct step, so no score can find mistakes
SECRET = Skill(right=0.5, typical=1.0, repair=0.0)
BLIND = ScoreDrift(factor=0.0)
"""A change of scores that gives every text the same log-probability, so that scores contain no
information.
"""
ALL: frozenset[Capability] = frozenset({"sample", "score", "draw"})
NO_DRAWS: frozenset[Capability] = frozenset({"sample", "score"})


# a target whose tokens take as long as a whole draft, so that method `exact` drafts all the time
SLOW = Latency(per_score=0.02, sampled_token=0.02)


def engine(
    role: Role,
    skill: Skill,
    drift: ScoreDrift | None = None,
    can: frozenset[Capability] = ALL,
    latency: Latency | None = None,
) -> ScriptedEngine:
    """Make a toy model of this skill."""
    model = ToyModel(skill, ToyTokenizer())
    return ScriptedEngine(
        role,
        model=model,
        drift=drift or ScoreDrift(),
        capabilities=can,
        latency=latency or Latency(),
    )


@dataclass(frozen=True)
class Planted:
    """A pair of toy models and the recommendation that is known to be correct for it."""

    draft: Skill
    target: Skill
    drift: ScoreDrift | None = None
    can: frozenset[Capability] = ALL
    latency: Latency | None = None  # time of the target's calls; None means no time at all


PLANTED = {
    # the score finds mistakes, and no cheaper method is as accurate as the gate
    "gate": Planted(WEAK, STRONG, can=NO_DRAWS),
    # scores find no mistake, and method `exact` writes the target's own text at a lower cost than
    # the target alone
    "exact": Planted(SECRET, STRONG, BLIND, latency=SLOW),
    # the pair of the previous case at temperature 0, where the target alone is the cheapest
    "target-only": Planted(SECRET, STRONG, BLIND, NO_DRAWS),
    # two models of equal skill: the target's tokens cost more but add no accuracy
    "draft-only": Planted(STRONG, STRONG),
}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Write a file of problems in the toy language."""
    path = tmp_path / "toy.jsonl"
    rows = ({"id": one.id, "problem": one.text, "answer": one.answer} for one in toy_problems(60))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def piloted(planted: Planted, dataset: str, out: Path, **flags: object) -> PilotReport:
    """Run a pilot of these models."""
    words = {"draft": "scripted", "target": "scripted", "dataset": dataset, "out": str(out)}
    engines = (
        engine("draft", planted.draft),
        engine("target", planted.target, planted.drift, planted.can, planted.latency),
    )

    async def main() -> PilotReport:
        end = await run_pilot({**words, **flags}, engines=engines)
        assert end.report is not None
        return end.report

    return run_virtual(main)


@pytest.mark.parametrize("right", PLANTED)
@pytest.mark.parametrize("begin", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 40))])
def test_each_planted_pair_gets_its_recommendation(
    right: str, begin: int, problems: Path, tmp_path: Path
) -> None:
    """Pilots of 20 problems give each pair its planted recommendation and no other recommendation."""
    dataset = f"{problems}[{begin}:{begin + 20}]"
    report = piloted(PLANTED[right], dataset, tmp_path / "pilot", seed=begin)
    assert report.take == right, report.reason


def test_a_pilot_prints_every_arm_and_continues(problems: Path, tmp_path: Path) -> None:
    """The pilot's table has a row for each method that was tried, and the pilot gives a reason for
    each method that was not. Running the pilot again repeats no request.
    """
    dataset = f"{problems}[:8]"
    report = piloted(PLANTED["gate"], dataset, tmp_path / "pilot")
    text = "\n".join(pilot_lines(report))
    for name in ("draft-only", "target-only", "coin", "mean", "speculative", "cascade"):
        assert any(line.startswith(f"{name} ") for line in text.splitlines()), name
    assert [arm.name for arm in report.unavailable] == ["exact"]
    cascade = report.row("cascade")
    assert cascade is not None
    # the gain needs a run in which a coin replaces the cascade's gate
    assert cascade.gain is not None
    assert "Holm's method for" in text
    assert "Take the gate: --method atts --rate" in text
    assert report.flags["method"] == "atts"
    again = piloted(PLANTED["gate"], dataset, tmp_path / "pilot")
    assert replace(again) == report


def test_the_command_prints_its_recommendation(problems: Path, tmp_path: Path, capsys: Any) -> None:
    """`atts pilot --json` prints one object, and `--method` is refused because a pilot tries
    several methods.
    """
    words = ("pilot", f"{problems}[:6]", "--draft", "scripted", "--target", "scripted", "--json")
    assert run_command([*words, "--samples", "2", "--out", str(tmp_path / "set")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["take"] in ("gate", "exact", "target-only", "draft-only", "undecided")
    assert {"draft-only", "target-only", "coin"} <= {arm["name"] for arm in facts["arms"]}
    assert run_command([*words, "--set", "method=coin"]) == 2
    assert "a pilot chooses its methods itself" in capsys.readouterr().err


def test_a_pilot_of_one_problem_is_refused_before_a_model_is_asked(tmp_path: Path) -> None:
    """A pilot of one problem has nothing to compare, so atts refuses the pilot before it spends
    tokens.
    """
    alone = tmp_path / "one.jsonl"
    alone.write_text('{"question": "1 plus 1", "answer": "2"}\n')
    flags = {"dataset": str(alone), "out": str(tmp_path / "set"), "draft": "scripted"}
    with pytest.raises(OptionError, match="a pilot needs at least 2"):
        anyio.run(run_pilot, {**flags, "target": "scripted"})
    assert not (tmp_path / "set").exists()


def made(name: str, shares: Sequence[float], target: int, coin: str = "") -> PilotArm:
    """Make the results of one method on invented problems with ten rollouts each."""
    correct = {
        str(place): [sample < round(10 * share) for sample in range(10)]
        for place, share in enumerate(shares)
    }
    return PilotArm(name, {"method": name}, correct, Usage(target_tokens=target), 0.2, coin)


def test_a_gate_that_costs_more_than_the_target_is_not_recommended() -> None:
    """If the same accuracy costs more with the gate than with the target alone, the pilot
    recommends the target.
    """
    draft = made("draft-only", [0.2, 0.3] * 10, 0)
    target = made("target-only", [0.9, 0.8] * 10, 2_000)
    coin = made("coin", [0.2, 0.3] * 10, 2_000)
    dear = made("mean", [0.3, 0.4] * 10, 1_990, "coin")
    report = judge_pilot([draft, target, coin, dear])
    row = report.row("mean")
    assert row is not None
    assert row.helps
    assert (report.take, "less per percentage point" in report.reason) == ("target-only", True)
    cheap = judge_pilot([draft, target, coin, made("mean", [0.8, 0.7] * 10, 400, "coin")])
    assert cheap.take == "gate"


def test_a_promising_gate_leaves_a_small_pilot_undecided() -> None:
    """If a cheap gate's interval is above 0 but the gain is not significant among all gates, the
    pilot says how many problems would decide, and recommends no method.
    """
    baselines = [made("draft-only", [0.2, 0.3] * 10, 0), made("target-only", [0.9] * 20, 8_000)]
    coin = made("coin", [0.3] * 20, 1_000)
    useless = [made(f"useless {place}", [0.3, 0.2, 0.4, 0.3] * 5, 1_000, "coin") for place in "ABC"]
    gate = made("mean", [0.8, 0.3, 0.1, 0.5] * 5, 1_000, "coin")
    report = judge_pilot([*baselines, coin, *useless, gate])
    assert (report.take, report.flags) == ("undecided", {"method": "target-only"})
    assert report.undecided is not None
    assert report.undecided.arm.name == "mean"
    needed = report.undecided.problems_needed
    assert needed is not None
    assert needed > 20
    text = "\n".join(pilot_lines(report))
    assert f"about {needed} problems (--limit {needed})" in text
    assert "\nTake " not in text
    assert "Per point: additional cost" in text


def test_a_tie_between_exact_and_the_target_is_not_a_recommendation_of_exact() -> None:
    """Method `exact` writes the target's text, so a cost that is lower by a hair recommends the
    target alone.
    """
    draft = made("draft-only", [0.2, 0.3] * 10, 0)
    target = made("target-only", [0.9, 0.8] * 10, 7_400)
    for cost, right in ((7_380, "target-only"), (3_000, "exact")):
        report = judge_pilot([draft, target, made("exact", [0.9, 0.8] * 10, cost)])
        assert report.take == right
        assert f"--method {right}" in pilot_lines(report)[5]


def test_a_pilot_needs_both_models_alone() -> None:
    """A pilot with a missing baseline, a single problem, or problems without references is refused
    with an error that names the cause.
    """
    alone = made("draft-only", [0.5], 0)
    with pytest.raises(UsageError, match="target-only"):
        judge_pilot([alone])
    with pytest.raises(UsageError, match="two problems"):
        judge_pilot([alone, made("target-only", [0.5], 10)])
    with pytest.raises(OptionError, match="chooses its methods itself"):
        anyio.run(run_pilot, {"method": "coin"})
