"""`atts runs`: every run with its status and headline, whatever state it is in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from atts.analysis import list_runs
from atts.journal import JOURNAL, LOCK, locked


def test_runs_are_listed_with_what_they_came_to(atts: Any, runs: Path) -> None:
    """The numbers are those of the run's own summary."""
    lines = [json.loads(line) for line in atts("runs", str(runs), "--json").out.splitlines()]
    assert [(Path(line["directory"]).name, line["method"]) for line in lines] == [
        ("atts", "atts"),
        ("alone", "target-only"),
    ]
    for line in lines:
        assert (line["standing"], line["done"], line["problems"], line["models"]) == (
            "finished",
            3,
            3,
            "scripted",
        )
        summary = json.loads(atts("eval", "arithmetic[:3]", "--method", line["method"], "--samples", "3", "--draft",
            "scripted", "--target", "scripted", "--report", "none", "--out", line["directory"], "--json",
        ).out.splitlines()[-1])  # fmt: skip
        assert line["accuracy"] == summary["answers"]
        assert line["rate"] == summary["rate"]
        assert {name: line[name] for name in ("target_tokens", "draft_tokens")} == {
            name: summary["usage"][name] for name in ("target_tokens", "draft_tokens")
        }


def test_each_status_has_its_word(runs: Path) -> None:
    """A run without a last word was killed, unless its lock is held: then it is being written."""
    cut = runs / "cut"
    shutil.copytree(runs / "atts", cut)
    lines = (cut / JOURNAL).read_bytes().splitlines(keepends=True)
    (cut / JOURNAL).write_bytes(b"".join(lines[: len(lines) // 2]))
    assert [one.standing for one in list_runs([cut])] == ["killed"]
    with locked(cut / LOCK, cut):
        assert [one.standing for one in list_runs([cut])] == ["running"]
    assert [one.standing for one in list_runs([cut])] == ["killed"]


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(atts: Any, runs: Path) -> None:
    """It keeps no other run from being listed."""
    (runs / "atts" / "manifest.json").write_text("{")
    said = atts("runs", str(runs))
    assert said.code == 0
    assert "unreadable" in said.out
    assert "it is not a manifest" in said.out
    assert "target-only" in said.out


def test_a_folder_without_runs_says_so(atts: Any, tmp_path: Path) -> None:
    """On standard error; nothing was found, and nothing is wrong."""
    (tmp_path / "empty").mkdir()
    said = atts("runs", "empty", "--json")
    assert (said.code, said.out) == (0, "")
    assert "no run in empty" in said.err
