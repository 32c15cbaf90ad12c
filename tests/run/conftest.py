"""Fixtures that evaluate toy problems with scripted engines, in virtual or real time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from atts.calibration import Calibrator
from atts.core import Problem
from atts.graph import Limit
from atts.journal import JOURNAL, Event, JournalOptions, read_entries
from atts.pipelines import Answers, Chunking, ConformalGate, Gate, Policy, ScoreRule, ThresholdGate
from atts.run import RunOptions, RunResult, RunSpec, evaluate
from atts.testing import (
    Backend,
    Latency,
    ScriptedEngine,
    run_virtual,
    toy_answer,
    toy_groups,
    toy_problems,
)
from tests.run.crashing import essence


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict of the test's grader."""

    status: Literal["equal", "different", "unscored"]
    rule: str = "same text"


def grade(answer: str, problem: Problem) -> Said:
    """Grade an answer as correct if it equals the reference as a string."""
    return Said("equal" if answer == problem.answer else "different")


POLICY = Policy(
    samples=4, turns=6, chunking=Chunking(12, 12, ()), early_stop="none", score=ScoreRule("mean")
)
QUICK = Latency(per_sample=0.05, per_score=0.01, sampled_token=0.01, jitter=0.5)


@dataclass
class World:
    """The parts of a run, each of which may be replaced."""

    tmp_path: Path
    quick: Latency = QUICK

    def plan(self, **changes: Any) -> RunSpec:
        """Plan a run with scripted engines and a frozen gate."""
        parts: dict[str, Any] = {
            "draft": ScriptedEngine("draft", latency=QUICK),
            "target": ScriptedEngine("target", latency=QUICK),
            "policy": POLICY,
            "gate": self.frozen(),
            "answers": Answers(toy_answer, toy_groups),
            "grade": grade,
            "concurrency": 12,
            "limits": {"draft": Limit(slots=6), "target": Limit(slots=2)},
        }
        return RunSpec(**{**parts, **changes})

    def frozen(self) -> Gate:
        """Return a gate that never learns."""
        return ThresholdGate(1.3)

    def online(self) -> Gate:
        """Return a gate that learns from every decision."""
        return ConformalGate(Calibrator(0.4, "question-turn", seed=3))

    def session(self, name: str | None = "run", **changes: Any) -> RunOptions:
        """Return the options of a session in a directory of this name, or without a directory."""
        parts: dict[str, Any] = {
            "directory": self.tmp_path / name if name else None,
            "journal": JournalOptions(durability="close"),
            "signals": "ignore",
        }
        return RunOptions(**{**parts, **changes})

    def run(
        self,
        plan: RunSpec,
        session: RunOptions,
        problems: Iterable[Problem] | int = 5,
        backend: Backend = "asyncio",
    ) -> RunResult:
        """Evaluate toy problems in virtual time."""
        chosen = toy_problems(problems, 5) if isinstance(problems, int) else problems
        return run_virtual(partial(evaluate, chosen, plan, session), backend=backend)

    def events(self, name: str = "run") -> list[Event]:
        """Return the events of the journal in the run directory of this name."""
        return [entry.event for entry in read_entries(self.tmp_path / name / JOURNAL)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return the parts of a run in the test's folder."""
    return World(tmp_path)


@pytest.fixture
def outcomes() -> Callable[[RunResult], dict[str, str]]:
    """Return a function that maps the problems of a result to their outcomes, without timing."""
    return lambda result: {outcome.problem.id: essence(outcome) for outcome in result.outcomes()}


class SmallDisk:
    """An append-only file on a disk with room for this many bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self._file = path.open("ab", buffering=0)
        self._room = room

    def write(self, data: bytes, /) -> int:
        """Write the bytes that fit, then raise an error, as a full disk does."""
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(data[: self._room])
        self._room -= taken
        return taken

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the real file."""
        self._file.close()


@pytest.fixture
def small_disk() -> Callable[[int], Callable[[Path], SmallDisk]]:
    """Return a function that opens files on a disk with this much room."""
    return lambda room: lambda path: SmallDisk(path, room)
