"""Tests of power losses: a simulated disk keeps only what was synced, and is inspected after each
call.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.errors import StorageError
from atts.files import write_atomic
from atts.journal import JOURNAL, Event, JournalOptions, ProblemSpan, read_entries, read_outcomes
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import Notice, RunOptions, RunSpec, evaluate
from atts.testing import ScriptedEngine, toy_answer, toy_groups, toy_problems

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot sync a directory")


class Disk:
    """A simulated disk that shows what remains after a loss of power. A file has its contents of
    the last sync, and a directory its entries of the last sync.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.contents: dict[int, bytes] = {}  # contents of each file, keyed by its inode
        self.names: dict[int, dict[str, int]] = {}  # entries of each directory, keyed by its inode
        self.after_each: Callable[[], None] = lambda: None
        self.crash_at = -1
        self.calls = 0
        patch.setattr("os.fsync", self.fsync)
        for name in ("replace", "truncate"):
            patch.setattr(f"os.{name}", self._watched(getattr(os, name)))

    def fsync(self, handle: int) -> None:
        """Save what the file contains, or what the directory lists, at this moment."""
        self._count()
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = {
                entry.name: entry.inode() for entry in os.scandir(f"/proc/self/fd/{handle}")
            }
        else:
            self.contents[found.st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()
        self.after_each()

    def left_of(self, folder: Path) -> dict[str, bytes]:
        """Return the files that the folder would have after a loss of power."""
        names = self.names.get(folder.stat().st_ino, {})
        return {
            name: self.contents.get(inode, b"") for name, inode in names.items() if name != "lock"
        }

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **settings: Any) -> Any:
            self._count()
            done = call(*args, **settings)
            self.after_each()
            return done

        return watched

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.crash_at:
            raise OSError(5, "Input/output error")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Put a simulated disk under all file operations."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to read the contents of an open file")
    return Disk(monkeypatch)


def test_a_replaced_file_is_the_old_or_the_new_one_at_every_moment(
    tmp_path: Path, disk: Disk
) -> None:
    """At every moment, the name of a replaced file gives the old or the new file.

    When the call returns, the new file is on disk.
    """
    write_atomic(tmp_path / "f", b"old")
    assert disk.left_of(tmp_path) == {"f": b"old"}
    seen = list[bytes]()
    disk.after_each = lambda: seen.append(disk.left_of(tmp_path)["f"])
    write_atomic(tmp_path / "f", b"new")
    assert set(seen) == {b"old", b"new"}
    assert disk.left_of(tmp_path) == {"f": b"new"}


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path, disk: Disk) -> None:
    """If a system call of the replacement fails, the old file stays and no temporary file is left."""
    write_atomic(tmp_path / "f", b"old")
    for call in (1, 2):
        disk.calls = 0
        disk.crash_at = call
        with pytest.raises(StorageError, match="Input/output"):
            write_atomic(tmp_path / "f", b"new")
        assert disk.left_of(tmp_path) == {"f": b"old"}
        assert os.listdir(tmp_path) == ["f"]


class Watch:
    """A listener that records which problems were reported as finished, and what was on the disk at
    that moment.
    """

    def __init__(self, left: Callable[[], bytes]) -> None:
        self.reported: dict[str, bytes] = {}
        self._left = left

    def recalled(self, event: Event) -> None:
        """Ignore earlier sessions; there are none."""

    def notify(self, event: Notice) -> None:
        """Record what is on the disk when a problem's span ends."""
        if isinstance(event, ProblemSpan):
            self.reported[event.problem] = self._left()


def _plan() -> RunSpec:
    policy = Policy(samples=2, turns=4, chunking=Chunking(12, 12, ()), early_stop="none")
    return RunSpec(
        ScriptedEngine("draft"),
        ScriptedEngine("target"),
        policy,
        ThresholdGate(1.3),
        Answers(toy_answer, toy_groups),
    )


def _finished(journal: bytes, folder: Path) -> set[str]:
    """Return the problems whose outcomes are in the part of the journal that is left after a loss
    of power.
    """
    (folder / JOURNAL).write_bytes(journal)
    return {outcome.problem.id for outcome in read_outcomes(read_entries(folder / JOURNAL))}


def test_a_problem_is_reported_after_its_outcome_is_on_disk(tmp_path: Path, disk: Disk) -> None:
    """With every event synced, a power loss right after a problem is reported loses no part of the
    problem.
    """
    run = tmp_path / "run"
    problems = toy_problems(4)
    watch = Watch(lambda: disk.left_of(run).get(JOURNAL, b""))
    options = RunOptions(
        run, journal=JournalOptions(durability="always"), signals="ignore", listeners=(watch,)
    )
    anyio.run(evaluate, problems, _plan(), options)
    assert set(watch.reported) == {problem.id for problem in problems}
    (tmp_path / "left").mkdir()
    for name, journal in watch.reported.items():
        assert name in _finished(journal, tmp_path / "left")


def test_a_new_run_directory_survives_from_its_first_event(tmp_path: Path, disk: Disk) -> None:
    """Before a new run calls an engine, its manifest and the directory entry of its journal are on
    disk.
    """
    run = tmp_path / "run"
    left = list[set[str]]()

    class Begun(Watch):
        def notify(self, event: Notice) -> None:
            left.append(set(disk.left_of(run)))

    options = RunOptions(run, signals="ignore", listeners=(Begun(lambda: b""),))
    anyio.run(evaluate, toy_problems(1), _plan(), options)
    assert left
    assert all({JOURNAL, "manifest.json"} <= names for names in left)


@pytest.mark.parametrize("durability", ["always", "close"])
def test_a_run_resumes_after_power_loss_at_any_sync(
    durability: Any, tmp_path: Path, disk: Disk
) -> None:
    """After a power loss at any sync, the resumed run reaches the results of an undisturbed run."""
    run = tmp_path / "run"
    lefts = list[dict[str, bytes]]()
    disk.after_each = lambda: lefts.append(disk.left_of(run)) if run.is_dir() else None
    journal = JournalOptions(durability=durability)
    whole = anyio.run(
        evaluate, toy_problems(2), _plan(), RunOptions(run, journal=journal, signals="ignore")
    )
    disk.after_each = lambda: None
    expected = {line.problem: line.answer for line in whole.problems}
    distinct = {tuple(sorted(left.items())) for left in lefts}
    for number, left in enumerate(sorted(distinct)[:: max(1, len(distinct) // 8)]):
        again = tmp_path / f"again {number}"
        again.mkdir()
        for name, data in left:
            if not name.startswith("."):
                (again / name).write_bytes(data)
        if "manifest.json" not in dict(left):
            assert not dict(left).get(JOURNAL)
        result = anyio.run(evaluate, toy_problems(2), _plan(), RunOptions(again, signals="ignore"))
        assert {line.problem: line.answer for line in result.problems} == expected
