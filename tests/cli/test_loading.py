"""Silence is told: engines being loaded, and how many problems of how many an interrupted run has
done.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.api import Setup, configure, evaluate
from atts.cli.evaluations import result_table
from atts.cli.progress import PlainLines, line, progress_display, table
from atts.engine import EngineSpec
from atts.journal import open_run
from atts.pipelines import Policy
from atts.run import Progress, RunBegun, RunOptions, RunResult
from atts.testing import ScriptedEngine, toy_problems


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        """What time it is."""
        return self.now


def test_loading_is_a_stage_of_its_own() -> None:
    """The models by name from the first second on, in lines and in the table; never problems before
    there are any.
    """
    clock = Clock()
    said = io.StringIO()
    progress = Progress(clock, loading=("hf:Qwen/Qwen3-1.7B", "hf:Qwen/Qwen3-14B"))
    lines = PlainLines(progress, said)
    for clock.now in (0.0, 0.5, 2.0, 3.0, 8.0):
        lines.refresh()
    assert said.getvalue().splitlines() == [
        "loading hf:Qwen/Qwen3-1.7B and hf:Qwen/Qwen3-14B; 2 s",
        "loading hf:Qwen/Qwen3-1.7B and hf:Qwen/Qwen3-14B; 8 s",
    ]
    assert "loading hf:Qwen/Qwen3-1.7B" in str(table(progress.snapshot()))
    progress.notify(RunBegun(60, 0, 8, 0.0, draft="small", target="large", directory=None))
    assert progress.snapshot().state == "running"
    assert line(progress.snapshot()).startswith("0/60 problems; rollouts")
    assert Progress(clock, loading=("embedded", "embedded")).snapshot().note == "loading embedded"


def test_what_was_done_is_told_of_what_there_is(atts: Any, runs: Path) -> None:
    """After Ctrl-C the summary says "2 of 3 problems", after the end "3 problems"."""
    manifest = open_run(runs / "atts").manifest
    configuration = configure({}, environment={}, folder=runs)
    whole = RunResult("finished", (), manifest, 1.0)
    assert " 0 problems, " in result_table(whole, configuration, None)[0]
    assert (
        " 0 of 3 problems, "
        in result_table(replace(whole, status="interrupted"), configuration, None)[0]
    )


class Heavy(ScriptedEngine):
    """A toy that says it is as heavy as a model of 0.3 billion weights, computed here."""

    kernel = "native, 2 threads"

    @property
    def spec(self) -> EngineSpec:
        """Its own, with the price of a token."""
        return replace(super().spec, flops_per_token=6e8)


@pytest.mark.anyio
async def test_a_model_that_would_take_hours_here_says_so(tmp_path: Path) -> None:
    """Before anything is written, in words that name what to do; a run of minutes says nothing."""
    said = io.StringIO()
    for policy, told in (
        (Policy(samples=8, max_tokens=16_000, turns=1), True),
        (Policy(samples=1, turns=1), False),
    ):
        setup = Setup(draft=Heavy("draft"), target=ScriptedEngine("target"), policy=policy)
        progress = Progress()
        async with progress_display(progress, said):
            await evaluate(
                toy_problems(40 if told else 1), setup, options=RunOptions(listeners=(progress,))
            )
        assert (
            "some" in "".join(progress.warnings) and "--limit" in "".join(progress.warnings)
        ) == told
    assert "atts: " in said.getvalue()
    assert "computes on this machine's processor" in said.getvalue()
