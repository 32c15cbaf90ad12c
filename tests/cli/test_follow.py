"""`atts report --follow`: the report is written anew while the run goes on, and ends with it."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atts.cli.recorded_runs import follow
from atts.errors import JournalError
from atts.journal import JOURNAL, LOCK, locked


class GrowingRun:
    """A run that is being written: every wait adds lines, torn ones too, until it is whole and its
    lock is free.
    """

    def __init__(self, recorded: Path, folder: Path, steps: int) -> None:
        shutil.copytree(recorded, folder)
        self.folder = folder
        self.waits = 0
        self._steps = steps
        self._data = (folder / JOURNAL).read_bytes()
        self._lock = ExitStack()
        self._lock.enter_context(locked(folder / LOCK, folder))
        self._write(len(self._data) // 4)

    def _write(self, length: int) -> None:
        (self.folder / JOURNAL).write_bytes(self._data[:length])

    def wait(self, seconds: float) -> None:
        """Half a second of the run."""
        self.waits += 1
        self._write(
            len(self._data) * min(self.waits + self._steps // 4, self._steps) // self._steps
        )
        if self.waits == self._steps:
            self._lock.close()


def test_it_is_written_while_the_run_goes_on_and_once_when_it_has_ended(
    runs: Path, tmp_path: Path
) -> None:
    """Every so many seconds if something happened, each time with what is there by then; the last
    is of the whole.
    """
    from atts.analysis import build_report

    run = GrowingRun(runs / "atts", tmp_path / "growing", 16)
    done = list[int]()

    def write() -> int:
        done.append(len(build_report(run.folder).report.problems))
        return len(done)

    assert follow(run.folder, write, every=1.0, wait=run.wait) == len(done)
    assert run.waits == 16
    assert 4 <= len(done) <= 9
    assert done == sorted(done)
    assert (done[0] < 3, done[-1]) == (True, 3)


def test_a_run_that_does_nothing_is_not_reported_anew(runs: Path, tmp_path: Path) -> None:
    """However long it does nothing."""
    run = GrowingRun(runs / "atts", tmp_path / "idle", 40)
    times = list[int]()
    run._write = lambda length: None  # type: ignore[method-assign]
    follow(run.folder, lambda: times.append(run.waits), every=1.0, wait=run.wait)
    assert times == [0, 40]


def test_a_run_that_is_over_is_reported_once(atts: Any, runs: Path) -> None:
    """The command says where, as without --follow."""
    said = atts("report", str(runs / "atts"), "--follow", "--out", "page.html")
    assert (said.code, said.out) == (0, "page.html\n")
    assert Path("page.html").read_text().startswith("<!doctype html>")


def test_a_run_that_is_taken_away_is_told(runs: Path, tmp_path: Path) -> None:
    """By its directory."""
    run = GrowingRun(runs / "atts", tmp_path / "gone", 9)
    with pytest.raises(JournalError, match="there is no run here"):
        follow(run.folder, lambda: shutil.rmtree(run.folder), wait=lambda seconds: None)
