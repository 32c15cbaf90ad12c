"""Signals to a run on local engines, to a child of it or to all: nothing is lost or changed, nothing left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from atts.journal import JOURNAL, read_entries, read_outcomes

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc")]
COUNT = int(os.environ.get("ATTS_KILLS", "12"))
ENDS = [*[signal.SIGKILL] * 6, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP]
PROGRAM = Path(__file__).with_name("killing.py")
MARK = "ATTS_STUDY_OF_KILLS"


class Running:
    """One process of the run, and those it started, known by a mark in their environment."""

    def __init__(self, directory: Path) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}".encode()
        name, _, value = self.mark.decode().partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), str(directory)], env=environment)

    def alive(self) -> list[int]:
        """All that still run, the first process among them."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._is_ours(entry)]

    def _is_ours(self, entry: Path) -> bool:
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            return state not in "ZX" and self.mark in (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            return False

    def send(self, pids: list[int], end: signal.Signals) -> None:
        """A signal to these; after a stop, the first process is killed, or nothing would ever end."""
        for pid in pids:
            _kill(pid, end)
        if end == signal.SIGSTOP:
            self.process.kill()


def _kill(pid: int, end: signal.Signals) -> None:
    try:
        os.kill(pid, end)
    except ProcessLookupError:
        return


def told(directory: Path) -> dict[str, object]:
    """Every problem's answer, and each rollout's texts and decisions; scores may differ in rounding."""
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
        assert outcome.problem.id not in found, "told twice"
        found[outcome.problem.id] = (outcome.answer, outcome.status, rollouts)
    return found


def _wait_for(journal: Path, size: int, running: Running) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.process.poll() is None:
        if journal.exists() and journal.stat().st_size >= size:
            return
        time.sleep(0.002)


def test_signals_at_any_moment_change_nothing(tmp_path: Path) -> None:
    """ATTS_KILLS many, at seeded moments from the start of a process on; the run goes on after each to the same end."""
    whole = tmp_path / "whole"
    assert Running(whole).process.wait() == 0
    size, draws, counts = (whole / JOURNAL).stat().st_size, random.Random(1), Counter[str]()
    number = slowest = 0.0
    while sum(counts.values()) < COUNT:
        number += 1
        directory = tmp_path / f"run {number:.0f}"
        code = None
        while code != 0:
            before = (directory / JOURNAL).read_bytes() if (directory / JOURNAL).exists() else b""
            running = Running(directory)
            if sum(counts.values()) < COUNT:
                _wait_for(directory / JOURNAL, draws.randrange(0, size), running)
                who, end = draws.choice(["parent", "child", "both"]), draws.choice(ENDS)
                pids = running.alive()
                children = [pid for pid in pids if pid != running.process.pid]
                chosen = {"parent": [running.process.pid], "child": children[:1], "both": pids}[who]
                if running.process.poll() is None and chosen:
                    running.send(chosen, end)
                    counts[f"{end.name} {who}"] += 1
            code = running.process.wait(120)
            ended = time.monotonic()
            while running.alive() and time.monotonic() < ended + 5:
                time.sleep(0.02)
            slowest = max(slowest, time.monotonic() - ended)
            assert not running.alive(), "a process outlived the run by 5 s"
            after = (directory / JOURNAL).read_bytes() if (directory / JOURNAL).exists() else b""
            assert after.startswith(before[: before.rfind(b"\n") + 1]), "what was recorded has changed"
        assert told(directory) == told(whole)
    sys.stderr.write(
        f"{sum(counts.values())} signals, {number:.0f} runs, all gone after {slowest:.2f} s: {dict(counts)}\n"
    )
