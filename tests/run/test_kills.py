"""Tests of signals to one or all processes of a run on local engines: no result is lost and no
process is left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from atts.journal import JOURNAL, read_entries, read_outcomes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to list processes"),
]
COUNT = int(os.environ.get("ATTS_KILLS", "24"))
ENDS = [*[signal.SIGKILL] * 6, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP]
PROGRAM = [sys.executable, str(Path(__file__).with_name("killing.py"))]
ORPHAN_SECONDS = 5.0
KILLS_OF_ONE_RUN = 20


class Runs(Protocol):
    """A starter of evaluations, which runs one at a time, each in a process session of its own."""

    def start(self, directory: Path) -> int:
        """Start an evaluation; return the id of its first process, which is also the id of its
        session.
        """
        ...

    def wait(self) -> int:
        """Return the exit code of the run."""
        ...


class Commands:
    """A starter that runs every evaluation, and each engine of it, as a new Python process."""

    def start(self, directory: Path) -> int:
        """Start an evaluation."""
        self.process = subprocess.Popen([*PROGRAM, str(directory)], start_new_session=True)
        return self.process.pid

    def wait(self) -> int:
        """Return the exit code of the command."""
        return self.process.wait(300)


class Forks:
    """A starter that forks all evaluations and engines from one server, which saves time."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, directory: Path) -> int:
        """Start an evaluation."""
        assert self.server.stdin is not None
        self.server.stdin.write(f"{directory}\n")
        self.server.stdin.flush()
        return self.wait()

    def wait(self) -> int:
        """Return the exit code that the server reports."""
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())


@pytest.fixture(params=["commands", "forks"])
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Choose a way to start evaluations, and end all their processes afterwards."""
    started = Commands() if request.param == "commands" else Forks()
    yield started
    if isinstance(started, Forks):
        started.server.communicate()
        assert started.server.returncode == 0


def members(session: int) -> list[int]:
    """Return the living processes of a session, including its first process."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, of_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if state not in "ZX" and int(of_session) == session:
            found.append(int(entry.name))
    return found


def send(pids: list[int], end: signal.Signals, first: int) -> None:
    """Send a signal to these processes.

    After a stop signal the first process is killed too, because it would not end by itself.
    """
    for pid, number in [
        *((pid, end) for pid in pids),
        *([(first, signal.SIGKILL)] if end == signal.SIGSTOP else []),
    ]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def told(directory: Path) -> dict[str, object]:
    """Return every problem's answer, and each rollout's texts and decisions.

    Scores are left out, because they may differ by rounding.
    """
    found = dict[str, object]()
    for outcome in read_outcomes(read_entries(directory / JOURNAL)):
        rollouts = [
            (
                rollout.finish,
                rollout.answer,
                rollout.ids("target"),
                [turn.decision and turn.decision.action for turn in rollout.turns],
            )
            for rollout in outcome.rollouts
        ]
        assert outcome.problem.id not in found, "the journal has two outcomes of one problem"
        found[outcome.problem.id] = (outcome.answer, outcome.status, rollouts)
    return found


class Study:
    """Counts of signals sent, and the longest time, in seconds, that a process still existed after
    its run had ended.
    """

    def __init__(self, runs: Runs, size: int) -> None:
        self.runs = runs
        self.size = size
        self.draws = random.Random(1)
        self.counts = Counter[str]()
        self.codes = Counter[int]()
        self.slowest = 0.0

    def session(self, directory: Path, *, is_quiet: bool) -> int:
        """Start one process, send it a signal while it runs unless `is_quiet` is set, and return
        its exit code.
        """
        journal = directory / JOURNAL
        before = journal.read_bytes() if journal.exists() else b""
        first = self.runs.start(directory)
        if not is_quiet:
            self._interrupt(journal, len(before), first)
        code = self.runs.wait()
        self.codes[code] += 1
        ended = time.monotonic()
        while members(first) and time.monotonic() < ended + ORPHAN_SECONDS:
            time.sleep(0.02)
        self.slowest = max(self.slowest, time.monotonic() - ended)
        assert not members(first), "a process outlived the run by 5 s"
        after = journal.read_bytes() if journal.exists() else b""
        assert after.startswith(before[: before.rfind(b"\n") + 1]), "a recorded line has changed"
        return code

    def _interrupt(self, journal: Path, before: int, first: int) -> None:
        """Interrupt the run at one of three times: before the engines exist, while they load, or
        during the work.
        """
        draws = self.draws
        deadline = time.monotonic() + 60
        work = draws.choice([0, 1, *[draws.randrange(1, 2 * self.size // KILLS_OF_ONE_RUN)] * 6])
        while time.monotonic() < deadline and Path(f"/proc/{first}").exists():
            if (journal.stat().st_size if journal.exists() else 0) >= before + work:
                break
            time.sleep(0.005)
        time.sleep(draws.random() * 0.05)
        pids = members(first)
        children = [pid for pid in pids if pid != first]
        who = draws.choice(["parent", "child", "both"])
        end = draws.choice(ENDS)
        chosen = {
            "parent": [first],
            "child": draws.sample(children, min(1, len(children))),
            "both": pids,
        }[who]
        if first in pids and chosen:
            send(chosen, end, first)
            self.counts[f"{end.name} {who}"] += 1


def test_signals_at_any_moment_change_nothing(runs: Runs, tmp_path: Path) -> None:
    """A run that gets ATTS_KILLS signals at seeded moments continues after each, and ends with the
    result of a run without signals.
    """
    whole = tmp_path / "whole"
    number = 0
    runs.start(whole)
    assert runs.wait() == 0
    study = Study(runs, (whole / JOURNAL).stat().st_size)
    count = COUNT if isinstance(runs, Forks) else max(1, COUNT // 10)
    while (done := study.counts.total()) < count:
        number += 1
        assert number <= count + 5, "runs end before they get a signal"
        directory = tmp_path / f"run {number}"
        while study.session(
            directory, is_quiet=study.counts.total() >= min(count, done + KILLS_OF_ONE_RUN)
        ):
            pass
        assert told(directory) == told(whole)
    said = f"{study.counts.total()} signals, {number} runs, all gone after {study.slowest:.2f} s"
    sys.stderr.write(f"{said}: {dict(study.counts)}; exit codes {dict(study.codes)}\n")
