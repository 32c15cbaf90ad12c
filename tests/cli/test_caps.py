"""Caps on the command line: a run stops at one, and the same command continues it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
    """Exit code 130, a reason, and what was spent is within the cap; then the rest is run."""
    words = (*RUN, "--out", str(tmp_path / "run"), "--set", prices, "--json")
    stopped = atts(*words, "--max-cost", "0.001")
    assert stopped.code == 130
    assert "stopped: max_cost is spent; the same command continues the run" in stopped.err
    assert 0 < read_ledger(tmp_path / "run" / LEDGER)[""].dollars <= 0.001

    finished = atts(*words, "--max-cost", "1")
    assert finished.code == 0
    summary = json.loads(finished.out.splitlines()[-1])
    assert 0 < summary["cost"] <= read_ledger(tmp_path / "run" / LEDGER)[""].dollars


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--max-cost", "1"), "has no price"),
        (("--max-cost", "0"), "--max-cost: 0.0 is not an amount above 0"),
        (("--max-total-tokens", "0"), "allows nothing"),
        (("--max-seconds", "-1"), "not an amount above 0"),
        (("--set", "prices=missing.toml"), "cannot be read"),
    ],
)
def test_wrong_caps_are_usage_errors(
    atts: Any, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    """One message and exit code 2, before anything is run."""
    result = atts(*RUN, "--out", str(tmp_path / "run"), *words)
    assert result.code == 2
    assert problem in result.err
    assert "Traceback" not in result.err


def test_caps_leave_the_run_directory_the_same(atts: Any, tmp_path: Path) -> None:
    """A cap decides no result, so the same run continues with another one."""
    words = (*RUN, "--out", str(tmp_path / "run"))
    assert atts(*words, "--max-total-tokens", "500").code == 130
    assert atts(*words).code == 0
