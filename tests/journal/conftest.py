"""Fixtures of the journal's tests: a small rollout, and a disk with little space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from atts.cli.app import run as command
from atts.core import Chunk, Decision, Problem, Prompt, Turn
from atts.journal import (
    JOURNAL,
    Event,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    RolloutStarted,
    TurnFinished,
)


class SmallDisk(FileIO):
    """An append-only file on a disk with room for `room` bytes, which accepts at most `bite` bytes
    at a time.
    """

    def __init__(self, path: Path, room: int, bite: int) -> None:
        super().__init__(path, "ab")
        self._room = room
        self._bite = bite
        self.syncs = 0

    def write(self, data: Any, /) -> int:
        """Write as many bytes as fit. If none fits, raise the error of a full disk."""
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = super().write(data[: min(self._room, self._bite)])
        assert taken is not None
        self._room -= taken
        return taken

    def fileno(self) -> int:
        """Count the syncs, each of which calls this method once."""
        self.syncs += 1
        return super().fileno()


@pytest.fixture
def small_disk() -> Callable[..., tuple[list[SmallDisk], Callable[[Path], SmallDisk]]]:
    """Make an opener with `room` and `bite`, and the list of the files that it opens."""

    def make(
        room: int = 1 << 30, bite: int = 1 << 30
    ) -> tuple[list[SmallDisk], Callable[[Path], SmallDisk]]:
        opened: list[SmallDisk] = []

        def opener(path: Path) -> SmallDisk:
            opened.append(SmallDisk(path, room, bite))
            return opened[-1]

        return opened, opener

    return make


@pytest.fixture
def story() -> list[Event]:
    """Return the events of one problem with two rollouts, from start to outcome."""
    prompt = Prompt((1, 2, 3), (1, 2, 3))
    events: list[Event] = [ProblemStarted(Problem("p0", "What is 2+2?" * 20, answer="4"))]
    for sample in (0, 1):
        events.append(RolloutStarted("p0", sample, prompt))
        for index in range(2):
            ids = tuple(range(40))
            chunk = Chunk(
                "draft", f"step {index} " * 20, ids, ids, "delimiter", tuple(-0.1 * i for i in ids)
            )
            decision = Decision("accept", 0.4, "p0", turn=index, sample=sample, score=1.5, p=0.25)
            events.append(
                TurnFinished("p0", sample, Turn(index, (chunk,), score=1.5, decision=decision))
            )
        events.append(RolloutFinished("p0", sample, "answer", 2, answer="4"))
    events.append(OutcomeReached("p0", "answered", "4", (1, 0), {"4": 2.0}))
    return events


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of runs by scripted engines: several methods, shards, a merged run, a killed
    one.
    """
    folder = tmp_path_factory.mktemp("runs")
    words = ("eval", "arithmetic[:4]", "--draft", "scripted", "--target", "scripted", "--seed", "3")
    common = (*words, "--samples", "2", "--turns", "6", "--concurrency", "2", "--report", "none")
    for name, *own in (
        ("finished",),
        ("rounds", "--method", "top-b"),
        ("coin", "--method", "coin"),
        ("shard1", "--shard", "1/2"),
        ("shard2", "--shard", "2/2"),
    ):
        assert command([*common, *own, "--out", str(folder / name)]) == 0
    shards = [str(folder / "shard1"), str(folder / "shard2")]
    assert command(["merge", *shards, "--out", str(folder / "merged")]) == 0
    shutil.copytree(folder / "finished", folder / "killed")
    lines = (folder / "killed" / JOURNAL).read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    (folder / "killed" / JOURNAL).write_bytes(b"".join(lines[:middle]) + lines[middle][:20])
    return folder
