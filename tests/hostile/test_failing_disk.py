"""Tests of failing disks and memory: each system call of a writer fails in turn, and power is lost
between writes.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.calibration import Calibrator
from atts.errors import ATTSError, JournalCorrupt, StorageError
from atts.files import write_atomic, write_out
from atts.journal import (
    JOURNAL,
    JournalOptions,
    Manifest,
    read_entries,
    read_outcomes,
    salvage,
    save_manifest,
)
from atts.journal.lines import LineWriter
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import RunOptions, RunSpec, evaluate
from atts.testing import ScriptedEngine, toy_answer, toy_groups, toy_problems

PROBLEMS = toy_problems(2)
Fault = Callable[[], BaseException]
REFUSALS: dict[str, Fault] = {
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EINTR": lambda: InterruptedError(errno.EINTR, os.strerror(errno.EINTR)),
    "no memory": MemoryError,
}


def plan() -> RunSpec:
    """Plan a run of about thirty journal lines: few and short rollouts with a frozen gate."""
    policy = Policy(samples=2, turns=2, chunking=Chunking(12, 12, ()), early_stop="none")
    draft = ScriptedEngine("draft")
    target = ScriptedEngine("target")
    return RunSpec(draft, target, policy, ThresholdGate(1.3), Answers(toy_answer, toy_groups))


def evaluated(directory: Path, journal: JournalOptions | None = None) -> dict[str, Any]:
    """Start or resume a run, and return each problem's answer and votes from its journal."""
    options = RunOptions(
        directory, journal=journal or JournalOptions(durability="close"), signals="ignore"
    )
    anyio.run(evaluate, PROBLEMS, plan(), options)
    return told(directory / JOURNAL)


def told(path: Path) -> dict[str, Any]:
    """Return the finished problems of a journal."""
    found = dict[str, Any]()
    for outcome in read_outcomes(read_entries(path)):
        assert outcome.problem.id not in found, "the journal has two outcomes of one problem"
        rollouts = [(r.finish, r.answer, r.ids("target")) for r in outcome.rollouts]
        found[outcome.problem.id] = (outcome.answer, dict(outcome.votes), outcome.status, rollouts)
    return found


@dataclass(slots=True)
class Nth:
    """A fault in the n-th call of those that are counted. The failing call may first write some of
    its bytes.
    """

    number: int
    fault: Fault | None
    calls: int = 0
    met: bool = False

    def is_due(self) -> bool:
        """Count a call, and return whether this call must fail."""
        self.calls += 1
        self.met = self.met or self.calls == self.number
        return self.calls == self.number


class Failing(FileIO):
    """An append-only file in which one write fails, at once or after some bytes. All writes after
    it fail too.
    """

    def __init__(self, path: Path, nth: Nth, part: float) -> None:
        super().__init__(path, "ab")
        self._nth = nth
        self._part = part
        self._is_broken = False

    def write(self, data: Any, /) -> int:
        """Write the data, or as much as fits."""
        if self._is_broken or self._nth.is_due():
            self._is_broken = self._nth.fault is not None
            size = int(len(data) * self._part)
            taken = super().write(data[:size]) if size else 0
            if self._nth.fault is not None:
                raise self._nth.fault()
            # write one byte and raise no error, as a short write does
            return taken or super().write(data[:1]) or 0
        return super().write(data) or 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """Return the results of an undisturbed run, and the number of its writes."""
    nth = Nth(0, None)
    folder = tmp_path_factory.mktemp("whole")
    journal = JournalOptions(durability="close", opener=lambda path: Failing(path, nth, 1.0))
    return evaluated(folder / "run", journal), nth.calls


@pytest.mark.parametrize("part", [0.0, 0.6], ids=["nothing written", "half a line written"])
@pytest.mark.parametrize("refusal", [*REFUSALS, "short write"])
def test_a_run_resumes_after_any_failed_write(
    refusal: str, part: float, whole: tuple[dict[str, Any], int], tmp_path: Path
) -> None:
    """If a write accepts only a part of the bytes, the run continues unchanged. If a write fails,
    the run ends with a message and can be resumed.
    """
    expected, writes = whole
    # the writes are divided among the kinds of faults, so that each write fails once
    ways = [(name, share) for name in REFUSALS for share in (0.0, 0.6)]
    way = ways.index((refusal, part)) if refusal in REFUSALS else int(5 * part)
    for number in (
        range(1, writes + 1)
        if os.environ.get("ATTS_FUZZ")
        else range(1 + way, writes + 1, len(ways))
    ):
        nth = Nth(number, REFUSALS.get(refusal))
        run = tmp_path / f"run {number}"
        journal = JournalOptions(durability="close", opener=partial(Failing, nth=nth, part=part))
        if refusal == "short write":
            assert evaluated(run, journal) == expected
            continue
        with pytest.raises(StorageError, match=r"journal\.jsonl"):
            evaluated(run, journal)
        assert nth.met
        assert told(run / JOURNAL).items() <= expected.items(), (
            "the failed run reported a wrong outcome"
        )
        assert evaluated(run) == expected


@pytest.mark.parametrize("refusal", [MemoryError, KeyboardInterrupt, ValueError])
def test_a_counted_line_that_was_not_written_ends_the_writing(
    refusal: type[BaseException],
    whole: tuple[dict[str, Any], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a line got a number but could not be written, the journal's writer stops, because readers
    refuse lines after a missing number.
    """
    expected, _ = whole
    nth = Nth(9, None)
    proper = LineWriter.line

    def lines(self: LineWriter, *rest: Any) -> bytes:
        made = proper(self, *rest)
        if nth.is_due():
            raise refusal
        return made

    monkeypatch.setattr(LineWriter, "line", lines)
    with pytest.raises((ATTSError, KeyboardInterrupt, ValueError)):
        evaluated(tmp_path / "run")
    monkeypatch.setattr(LineWriter, "line", proper)
    assert nth.met
    assert evaluated(tmp_path / "run") == expected


CALLS = (
    "open",
    "fsync",
    "replace",
    "truncate",
    "ftruncate",
    "pwrite",
    "fstat",
    "lstat",
    "chmod",
    "scandir",
)
"""System calls of the functions that write files, by the names under which they are called."""


@contextmanager
def failing_system(nth: Nth) -> Generator[None]:
    """Make the n-th call of any of the functions in `CALLS` fail."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            proper = getattr(os, name)

            def call(*arguments: Any, proper: Any = proper, **settings: Any) -> Any:
                if nth.fault is not None and nth.is_due():
                    raise nth.fault()
                return proper(*arguments, **settings)

            patch.setattr(os, name, call)
        yield


def _calibrated() -> Calibrator:
    calibrator = Calibrator(0.3, "question-turn")
    for place in range(20):
        calibrator.observe(calibrator.decide(1 + place / 7, f"q{place % 3}", place % 2, 0))
    return calibrator


SNAPSHOT: dict[str, Callable[[Path], object]] = {
    "manifest": lambda path: save_manifest(path, Manifest(seed=3)),
    "calibrator": lambda path: _calibrated().save(path),
    "result": lambda path: write_out(path, b"new"),
    "report": lambda path: write_atomic(path, b"new"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("kind", SNAPSHOT)
def test_a_file_that_is_replaced_is_whole_at_any_failure(
    kind: str, refusal: str, tmp_path: Path
) -> None:
    """A failure of any call of the writer gives a message, and leaves the old file or the new one,
    without a temporary file.
    """
    write = SNAPSHOT[kind]
    path = tmp_path / "file"
    write(path)
    new = path.read_bytes()
    for number in range(1, 30):
        path.write_bytes(b"old")
        nth = Nth(number, REFUSALS[refusal])
        with failing_system(nth):
            if refused := _refusal(lambda: write(path)):
                assert isinstance(refused, StorageError), refused
                assert str(path) in str(refused)
        assert path.read_bytes() in ((b"old", new) if nth.met else (new,))
        assert os.listdir(tmp_path) == ["file"]
        if not nth.met:
            assert number > 3, "no system call was made to fail"
            return
    pytest.fail("the number of system calls has no end")


def _refusal(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except (ATTSError, OSError, MemoryError) as error:
        return error
    return None


@pytest.mark.parametrize("refusal", ["EIO", "no memory"])
def test_a_run_resumes_after_any_failed_system_call(
    refusal: str, whole: tuple[dict[str, Any], int], tmp_path: Path
) -> None:
    """If one system call fails, the run finishes, or ends with an error of storage or memory.
    Starting it again gives the results of an undisturbed run.
    """
    expected, _ = whole
    for number in range(1 + (refusal == "no memory"), 200, 2):
        run = tmp_path / f"run {number}"
        nth = Nth(number, REFUSALS[refusal])
        with failing_system(nth):
            refused = _refusal(partial(evaluated, run, JournalOptions(durability="always")))
        assert isinstance(refused, StorageError | MemoryError | None), refused
        assert evaluated(run) == expected
        if not nth.met:
            assert number > 10
            return
    pytest.fail("the number of system calls has no end")


@dataclass(slots=True)
class Reordered:
    """A simulated disk that stores a journal. If power is lost, all synced writes stay, and any
    subset of the other writes.
    """

    synced: bytes = b""
    late: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    seen: list[tuple[bytes, tuple[tuple[int, bytes], ...]]] = field(
        default_factory=list[tuple[bytes, tuple[tuple[int, bytes], ...]]]
    )

    def write(self, place: int, data: bytes) -> None:
        """Record a write that is not synced yet."""
        self.late.append((place, data))
        self.seen.append((self.synced, tuple(self.late)))

    def left(self, number: int, draws: random.Random) -> bytes:
        """Return the file's bytes after a loss of power at write `number`.

        Of the unsynced writes a random subset stays, and missing bytes between two writes are
        zeros.
        """
        synced, late = self.seen[number]
        kept = [write for write in late if draws.random() < 0.6]
        size = max([len(synced), *(place + len(data) for place, data in kept)])
        if draws.random() < 0.3:  # a disk may store the new size before the bytes
            size = max(place + len(data) for place, data in late)
        held = bytearray(synced.ljust(size, b"\0"))
        for place, data in kept:
            held[place : place + len(data)] = data
        return bytes(held)


class Watched(FileIO):
    """An append-only file on a `Reordered` disk."""

    def __init__(self, path: Path, disk: Reordered) -> None:
        super().__init__(path, "ab")
        self._disk = disk

    def write(self, data: Any, /) -> int:
        """Write one page at a time, as disks do."""
        place = os.fstat(self.fileno()).st_size
        for start in range(0, len(data), 512):
            self._disk.write(place + start, bytes(data[start : start + 512]))
        return super().write(data) or 0


@pytest.mark.parametrize("durability", ["always", "close"])
def test_any_journal_left_by_a_power_loss_can_be_resumed_or_salvaged(
    durability: Any,
    whole: tuple[dict[str, Any], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a loss of power, any subset of the unsynced writes may be on the disk. The run then
    resumes, or its journal is refused and can be salvaged.
    """
    expected, _ = whole
    disk = Reordered()
    proper = os.fsync

    def fsync(handle: int) -> None:
        proper(handle)
        if os.path.samestat(os.fstat(handle), (tmp_path / "run" / JOURNAL).stat()):
            disk.synced = (tmp_path / "run" / JOURNAL).read_bytes()
            disk.late = []

    monkeypatch.setattr(os, "fsync", fsync)
    evaluated(
        tmp_path / "run",
        JournalOptions(durability=durability, opener=lambda path: Watched(path, disk)),
    )
    monkeypatch.setattr(os, "fsync", proper)
    draws = random.Random(17)
    manifest = (tmp_path / "run" / "manifest.json").read_bytes()
    salvaged = went_on = 0
    count = int(os.environ.get("ATTS_FUZZ", "40"))
    for number in range(count):
        folder = tmp_path / f"left {number}"
        folder.mkdir()
        left = disk.left(draws.randrange(len(disk.seen)), draws)
        (folder / JOURNAL).write_bytes(left)
        (folder / "manifest.json").write_bytes(manifest)
        refused = _refusal(partial(evaluated, folder))
        if refused is not None:
            assert isinstance(refused, JournalCorrupt)
            assert "atts journal salvage" in str(refused)
            assert (folder / JOURNAL).read_bytes() == left, (
                "the salvage changed the damaged journal"
            )
            folder, damaged = tmp_path / f"saved {number}", folder
            nothing = _refusal(partial(salvage, damaged, folder))
            assert nothing is None or "no line that can be saved" in str(nothing)
            evaluated(folder)
        salvaged = salvaged + (refused is not None)
        went_on = went_on + (refused is None)
        assert told(folder / JOURNAL) == expected
    assert went_on
    assert salvaged or durability == "always"
