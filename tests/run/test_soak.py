"""Tests of a long run in every calibration mode under faults: its memory and other resources do not
grow.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest

from atts.api import Setup
from atts.calibration import MODES, Mode
from atts.core import Problem
from atts.engine import Engine
from atts.graph import RetryPolicy
from atts.journal import JOURNAL, Event, OutcomeReached, read_entries, read_outcomes
from atts.pipelines import Policy
from atts.run import Notice, RunOptions, evaluate
from atts.testing import FaultKind, Faults, Latency, ScriptedEngine, toy_problems

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc")]
SECONDS = float(os.environ.get("ATTS_SOAK", "120"))
WARM_UP = 1000  # number of problems over all modes
GROWTH = 1.10
FAULTS: dict[FaultKind, float] = {
    "refused": 0.01, "slow": 0.01, "dropped": 0.01, "timeout": 0.005, "wrong_length": 0.005, "nan": 0.005,
    "empty": 0.005, "wrong_ids": 0.005, "hang": 0.0005,
}  # fmt: skip


@dataclass(slots=True)
class Curve:
    """A record of the resources that the process uses, problem by problem."""

    began: float = field(default_factory=time.monotonic)
    over: dict[Mode, int] = field(default_factory=dict[Mode, int])
    levels: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])

    def count(self, mode: Mode) -> None:
        """Count one more finished problem, and measure the resources after every hundredth."""
        self.over[mode] = self.over.get(mode, 0) + 1
        if (total := sum(self.over.values())) % 100 == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.levels.append((total, held, len(gc.get_objects())))
            if total % 1000 == 0:
                passed = time.monotonic() - self.began
                sys.stderr.write(
                    f"soak: {passed:.0f} s, {total} problems, {held:.1f} MiB, {self.levels[-1][2]} "
                    f"objects\n"
                )


@dataclass(frozen=True, slots=True)
class Counter:
    """A listener that counts the finished problems of one run."""

    mode: Mode
    curve: Curve

    def recalled(self, event: Event) -> None:
        """Ignore earlier sessions; there are none."""

    def notify(self, event: Notice) -> None:
        """Count a problem when its outcome arrives."""
        if isinstance(event, OutcomeReached):
            self.curve.count(self.mode)


def questions(mode: Mode, count: int) -> list[Problem]:
    """Make few questions under many names, because the toy models remember every text that they
    made.
    """
    asked = toy_problems(48, seed=7)
    return [replace(asked[number % len(asked)], id=f"{mode} {number}") for number in range(count)]


async def run(mode: Mode, engines: tuple[Engine, Engine], folder: Path, curve: Curve) -> None:
    """Run until the time is up or no problem is left; write the outcomes to the journal and keep
    none in the result.
    """
    stored = [1 + random.Random(place).expovariate(2) for place in range(200)]
    setup = Setup(
        method="atts",
        rate=0.2,
        rate_scope=mode,
        stored=stored,
        policy=Policy(samples=4, timeout_seconds=2.0),
        concurrency=16,
    )
    retries = RetryPolicy(calls=3, rollouts=2, delay_seconds=0.005, failures_in_row=None)
    plan = replace(setup.plan(*engines), retries=retries)
    listeners = (Counter(mode, curve),)
    options = RunOptions(
        folder / mode, listeners, engines="are open", signals="ignore", keep="nothing"
    )
    with anyio.move_on_after(SECONDS):
        await evaluate(questions(mode, 200 + int(3 * SECONDS)), plan, options)


async def soak(folder: Path) -> Curve:
    """Run in every calibration mode on the same two engines."""
    faults = Faults(FAULTS, delay_seconds=0.02)
    latency = Latency(per_sample=0.001, per_score=0.001, sampled_token=2e-5)
    curve = Curve()
    async with (
        ScriptedEngine("draft", latency=latency, concurrency=16, faults=faults) as draft,
        ScriptedEngine("target", latency=latency, concurrency=8, faults=faults) as target,
    ):
        async with anyio.create_task_group() as tasks:
            for mode in MODES:
                tasks.start_soon(run, mode, (draft, target), folder, curve)
    return curve


def test_a_run_in_every_mode_grows_by_at_most_a_tenth(tmp_path: Path) -> None:
    """Over ATTS_SOAK seconds under faults, memory stays within 10 % of its size after the first
    thousand problems.
    """
    curve = anyio.run(soak, tmp_path)
    # in a short run, only its second half is compared
    warm = min(WARM_UP, sum(curve.over.values()) // 2)
    first = next(level for level in curve.levels if level[0] >= warm)
    most = max(curve.levels[curve.levels.index(first) :], key=lambda level: level[1])
    last = curve.levels[-1]
    sys.stderr.write(f"soak: {dict(curve.over)}; first {first}, most {most}, last {last}\n")
    assert most[1] <= GROWTH * first[1]
    assert len(curve.over) == len(MODES)
    for mode, count in curve.over.items():
        told = [
            outcome.problem.id for outcome in read_outcomes(read_entries(tmp_path / mode / JOURNAL))
        ]
        assert len(set(told)) == len(told) == count
