"""Tests of child processes killed during a run: the next session does only the missing work."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.core import Outcome, Problem, Role
from atts.evaluators import extract, group, load_dataset
from atts.graph import RetryPolicy
from atts.journal import Sampled, Scored
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import Notice, RunOptions, RunResult, RunSpec, evaluate

pytestmark = pytest.mark.slow
POLICY = Policy(
    samples=3, turns=6, max_tokens=96, chunking=Chunking(16, 16, ("\n\n",)), early_stop="none"
)


class Killer:
    """A listener that kills the child process of one engine after a given number of its calls."""

    def __init__(self, engine: LocalEngine, role: Role, calls: int) -> None:
        self.engine = engine
        self.role = role
        self.left = calls

    def recalled(self, event: object) -> None: ...

    def notify(self, event: Notice) -> None:
        """Count the call, and kill the child when the planned number is reached."""
        is_own = isinstance(event, Sampled) if self.role == "draft" else isinstance(event, Scored)
        self.left -= is_own
        if is_own and self.left == 0:
            worker: Any = self.engine._opened._worker  # type: ignore[union-attr]  # pyright: ignore
            os.kill(worker._process.pid, signal.SIGKILL)


def run(
    directory: Path, problems: tuple[Problem, ...], role: Role = "draft", calls: int = -1
) -> RunResult:
    """Evaluate with a frozen gate on the embedded engines, and kill one child process during the
    run.
    """
    engines = {
        name: LocalEngine(path(name), name=name, options=LocalOptions())
        for name in ("draft", "target")
    }
    retries = RetryPolicy(calls=2, delay_seconds=0.01, failures_in_row=None)
    answers = Answers(extract, group)
    plan = RunSpec(
        engines["draft"],
        engines["target"],
        POLICY,
        ThresholdGate(1.05),
        answers,
        retries=retries,
        concurrency=6,
    )
    listeners = (Killer(engines[role], role, calls),)
    return anyio.run(
        evaluate, problems, plan, RunOptions(directory, signals="ignore", listeners=listeners)
    )


def essence(outcome: Outcome) -> str:
    """Return texts, answers and votes of a run.

    Sums of floats are left out, because they may differ with the batch.
    """
    return repr(
        (
            outcome.answer,
            dict(outcome.votes),
            [(r.sample, r.finish, r.answer, r.text) for r in outcome.rollouts],
        )
    )


def test_a_child_killed_at_any_point_loses_no_outcome(tmp_path: Path) -> None:
    """If a child process is killed, the run exits with code 3. The resumed run has the outcomes of
    an undisturbed run. This is tested at twenty random moments.

    If the killed child had already done all its work, the exit code is 0.
    """
    problems = tuple(load_dataset("arithmetic[:3]"))
    whole = {o.problem.id: essence(o) for o in run(tmp_path / "whole", problems).outcomes()}
    draws = random.Random(31)
    outages = 0
    roles: tuple[Role, Role] = ("draft", "target")
    for number in range(20):
        directory = tmp_path / str(number)
        cut = run(directory, problems, roles[number % 2], draws.randrange(1, 10))
        outages += cut.exit_code == 3
        assert (cut.status, cut.exit_code) in (("incomplete", 3), ("failed", 3), ("finished", 0))
        again = run(directory, problems)
        assert (again.status, again.exit_code) == ("finished", 0)
        assert {o.problem.id: essence(o) for o in again.outcomes()} == whole
    assert outages > 15
