"""Run directories written by version 0.1.0 (tests/fixtures/runs) open, resume, replay and report as
they did then.

`python tests/run/test_recorded_runs.py` writes what this version says of them; do so only with a
stated reason.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from atts.api import Setup
from atts.cli.app import run
from atts.core import Problem
from atts.errors import FingerprintError
from atts.journal import Setting
from atts.testing import ScriptedEngine, toy_problems

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"
KINDS = (
    "finished",
    "rounds",
    "ordinal",
    "shard1",
    "shard2",
    "merged",
    "killed",
    "interrupted",
    "failed",
)
UNFINISHED = ("killed", "interrupted", "failed")
COMMANDS = {
    **{f"{kind}.report": ("report", kind, "--format", "json", "--out", "-") for kind in KINDS},
    **{f"{kind}.plan": ("plan", kind, "--json") for kind in ("finished", "merged")},
    "finished.replay": ("replay", "finished", "--json"),
    "finished.replay-rate": ("replay", "finished", "--rate", "0.4", "--json"),
    "merged.replay-samples": ("replay", "merged", "--samples", "1", "--json"),
    "ordinal.replay": ("replay", "ordinal", "--json"),
    "finished.compare": ("compare", "finished", "rounds", "--json"),
    "merge": ("merge", "shard1", "shard2", "--out", "union", "--json"),
}
RESUME = (
    "eval",
    "arithmetic[:8]",
    "--samples",
    "2",
    "--seed",
    "3",
    "--rollouts",
    "1",
    "--report",
    "none",
    "--json",
)
# of a resumed run: its own clock and cache
TIMES = {
    "seconds",
    "draft_prefill_tokens",
    "target_prefill_tokens",
}
# by drawing while scoring, and by equal chunks, since those runs began
SPARED = {
    "calls",
    "scored_tokens",
}

WORDS = {"guarantee", "voided_by"}  # sentences that later versions may word with more in them


def atts(at: Path, *words: str) -> list[Any]:
    """What the command printed on standard output, JSON by JSON."""
    out = StringIO()
    told = StringIO()
    with chdir(at), redirect_stdout(out), redirect_stderr(told):
        code = run(words)
    assert code in (0, 5), told.getvalue()
    return list(values(out.getvalue()))


def values(text: str) -> Iterator[Any]:
    """One or several JSON values, one after the other."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        yield value
        at = end + len(text[end:]) - len(text[end:].lstrip())


def said(at: Path, name: str) -> list[Any]:
    """What a command says of the recorded runs."""
    return atts(at, *COMMANDS[name])


def resumed(at: Path, kind: str) -> list[Any]:
    """What the recorded command says when it goes on in its directory: all but the clock."""
    return [without_times(value) for value in atts(at, *RESUME, "--out", kind)]


def without_times(value: Any) -> Any:
    """The value without what a clock said."""
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def assert_same(new: Any, old: Any, place: str = "") -> None:
    """Equal, numbers up to rounding; fields may have been added."""
    if isinstance(old, dict):
        assert set(old) <= set(new), f"{place}: {set(old) - set(new)} are gone"
        for name, part in old.items():
            if name in WORDS and isinstance(part, str):
                assert isinstance(new[name], str), place
                continue
            if name in SPARED and place.startswith("resumed"):
                assert new[name] <= part, place
                continue
            # intervals of ratios are wider since
            if ".costs[" in place and name in (
                "low",
                "high",
            ):
                assert (
                    (float(new[name]) <= part) if name == "low" else (float(new[name]) >= part)
                ), place
                continue
            assert_same(new[name], part, f"{place}.{name}")
    elif isinstance(old, list):
        assert len(new) == len(old), f"{place}: {len(new)} for {len(old)}"
        for i, part in enumerate(old):
            assert_same(new[i], part, f"{place}[{i}]")
    elif isinstance(old, float):
        assert new == pytest.approx(old, rel=1e-9, abs=1e-12), place
    else:
        assert new == old, place


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a copy of every recorded run."""
    shutil.copytree(RUNS, tmp_path / "runs", ignore=shutil.ignore_patterns("expected"))
    return tmp_path / "runs"


@pytest.mark.parametrize("name", COMMANDS)
def test_recorded_runs_are_read_as_before(name: str, runs: Path) -> None:
    """Reports, plans, replays, comparisons and unions of old runs have the numbers they had."""
    assert_same(said(runs, name), json.loads((RUNS / "expected" / f"{name}.json").read_text()))


def test_what_is_said_after_choices_is_no_setting_of_a_run_without_any() -> None:
    """Runs from before it could be said go on; where there are choices, their prompts would be
    others.
    """
    plan = Setup().plan(ScriptedEngine("draft"), ScriptedEngine("target"))

    def check(problems: Sequence[Problem]) -> None:
        now = plan.manifest(problems, None)
        policy: Any = now.configuration["policy"].value
        before = Setting({name: value for name, value in policy.items() if name != "letter"})
        now.check(replace(now, configuration={**now.configuration, "policy": before}), Path("run"))

    check(toy_problems(2))
    with pytest.raises(FingerprintError, match=r"policy\.letter"):
        check([Problem("one", "Which?", "A", "choice", choices=("this", "that"))])


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNFINISHED)
def test_unfinished_runs_go_on_as_before(kind: str, runs: Path) -> None:
    """A run that was killed, interrupted or failed under the old code ends under the new one as it
    did there.
    """
    expected = json.loads((RUNS / "expected" / f"{kind}.resume.json").read_text())
    assert_same(resumed(runs, kind), without_times(expected), "resumed")


if __name__ == "__main__":
    import tempfile

    (RUNS / "expected").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "runs"
        shutil.copytree(RUNS, here, ignore=shutil.ignore_patterns("expected"))
        found = {name: said(here, name) for name in COMMANDS}
        found |= {f"{kind}.resume": resumed(here, kind) for kind in UNFINISHED}
    for name, value in found.items():
        (RUNS / "expected" / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")
