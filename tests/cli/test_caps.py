"""Tests of spending limits on the command line: a run stops at a limit, and the same command
continues it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atts.analysis.planning import read_plan_data
from atts.ledger import LEDGER, read_ledger

RUN = ("eval", "arithmetic[:4]", "--draft", "scripted", "--target", "scripted", "--samples", "2")


@pytest.fixture
def prices(tmp_path: Path) -> str:
    """Write a file of prices."""
    (tmp_path / "prices.toml").write_text(
        "[draft]\ninput=0.1\noutput=0.4\n[target]\ninput=1\noutput=4\n"
    )
    return f"prices={tmp_path / 'prices.toml'}"


def test_a_run_stops_at_its_cost_and_prints_money(atts: Any, tmp_path: Path, prices: str) -> None:
    """At its cost limit the run ends with exit code 130 and spending within the limit; the same
    command with a higher limit runs the rest.
    """
    words = (*RUN, "--out", str(tmp_path / "run"), "--set", prices, "--json")
    stopped = atts(*words, "--max-cost", "0.001")
    assert stopped.code == 130
    assert "stopped: max_cost is used up; the same command continues the run" in stopped.err
    assert 0 < read_ledger(tmp_path / "run" / LEDGER)[""].dollars <= 0.001

    finished = atts(*words, "--max-cost", "1")
    assert finished.code == 0
    summary = json.loads(finished.out.splitlines()[-1])
    assert 0 < summary["cost"] <= read_ledger(tmp_path / "run" / LEDGER)[""].dollars


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--max-cost", "1"), "has no price"),
        (("--max-cost", "0"), "--max-cost: 0.0 is out of range; give a number above 0"),
        (("--max-total-tokens", "0"), "a limit of 0 allows no calls"),
        (("--max-seconds", "-1"), "give a number above 0"),
        (("--set", "prices=missing.toml"), "cannot be read"),
    ],
)
def test_wrong_caps_are_usage_errors(
    atts: Any, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    """An impossible limit is a usage error: one message and exit code 2 before a model is used."""
    result = atts(*RUN, "--out", str(tmp_path / "run"), *words)
    assert result.code == 2
    assert problem in result.err
    assert "Traceback" not in result.err


def test_limits_do_not_change_the_run_directory(atts: Any, tmp_path: Path) -> None:
    """A limit changes no result, so the same run continues under another limit."""
    words = (*RUN, "--out", str(tmp_path / "run"))
    assert atts(*words, "--max-total-tokens", "500").code == 130
    assert atts(*words).code == 0


def test_runs_with_prices_print_dollars(atts: Any, tmp_path: Path, prices: str) -> None:
    """Reports, compare, plan and sweep print dollars if the run has prices, and no dollars
    otherwise.
    """
    words = ("--draft", "scripted", "--target", "scripted", "--samples", "2", "--report", "none")
    for name, more in (("priced", ("--set", prices)), ("dear", ("--set", prices)), ("free", ())):
        method = "target-only" if name == "dear" else "atts"
        run = ("eval", "arithmetic[:4]", *words, "--method", method, *more)
        assert atts(*run, "--out", name).code == 0
    again = (*run, "--set", prices, "--out", "priced", "--json")
    summary = json.loads(atts(*again).out.splitlines()[-1])

    report = json.loads(atts("report", "priced", "--format", "json", "--out", "-").out)
    assert report["spend"]["dollars"] == pytest.approx(summary["cost"])
    table = atts("report", "priced", "--format", "markdown", "--out", "-").out
    assert f"${summary['cost']:,.4f}" in table
    assert "money" not in atts("report", "free", "--format", "markdown", "--out", "-").out

    compared = json.loads(atts("compare", "priced", "dear", "--json").out)
    (cost,) = [one for one in compared["costs"] if one["name"] == "dollars"]
    assert cost["first"] == pytest.approx(summary["cost"] / 4)
    assert cost["ratio"] > 1
    names = [
        one["name"] for one in json.loads(atts("compare", "priced", "free", "--json").out)["costs"]
    ]
    assert "dollars" not in names

    planned = json.loads(atts("plan", "priced", "--json").out)
    assert all(0 < one["dollars"] <= summary["cost"] / 4 for one in planned["options"])
    data = read_plan_data(tmp_path / "priced")
    usage = data.usage
    whole = data.dollars(usage.draft_tokens, usage.target_tokens, usage.scored_tokens)
    assert whole == pytest.approx(summary["cost"])
    assert "dollars" in atts("plan", "priced").out
    assert "dollars" not in atts("plan", "free").out
    assert (
        "was recorded without the prices of its models"
        in atts("plan", "free", "--dollars", "1").err
    )
    assert atts("plan", "priced", "--dollars", "1").code == 0

    swept = ("sweep", "arithmetic[:2]", *words[:-2], "--over", "rate=.1,.3", "--set", prices)
    assert "dollars: cost per problem" in atts(*swept, "--out", "set").out
