"""Measures how fast a journal is written and read beside bare JSON lines, and what a run's journal weighs in memory."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import anyio

from atts.core import Completion, Decision
from atts.journal import (
    JOURNAL,
    Decided,
    Event,
    JournalOptions,
    Manifest,
    NodeFinished,
    Sampled,
    open_journal,
    read_entries,
)
from scripts.studies.harness import Cell, Options, Spread, Table, cpu_seconds, interleaved, ratio

KINDS: dict[str, Callable[[int], Event]] = {
    "node": lambda i: NodeFinished(i, "draft", "draft", f"p{i}", 3, 4, 1.0, 1.0, 1.5, 2.25, (i - 1,)),
    "decision": lambda i: Decided(Decision("accept", 0.4, f"p{i}", 1, 3, i, 1.5 + i, 0.3, why="p 0.3 <= 0.6")),
    "chunk of 500 tokens": lambda i: Sampled(f"p{i}", f"k{i}", _completion(i), "draft"),
}


def study(options: Options) -> list[Table]:
    """Rates per kind of event, and memory while a long journal is written and read."""
    events = options.pick(5_000, 20_000, 100_000)
    repeats = options.pick(3, 5, 9)
    with tempfile.TemporaryDirectory() as folder:
        speed = [_speed(Path(folder), name, max(200, events // _weight(name)), repeats) for name in KINDS]
        memory = [
            _memory(Path(folder), count) for count in options.pick((10**3,), (10**3, 10**4), (10**3, 10**4, 10**5))
        ]
    columns = ("event", "bytes", "written /s", "read /s", "bare JSON lines written /s", "time over bare JSON lines")
    notes = (
        "Processor time; `saved` every 16 events. Bare: `asdict`, `json.dumps`, `write`, no checksum, no packing.",
    )
    return [
        Table("Journal speed", columns, tuple(speed), notes),
        Table("Journal memory (peak, writing then reading)", ("events", "written, KiB", "read, KiB"), tuple(memory)),
    ]


def _weight(name: str) -> int:
    return 20 if name.startswith("chunk") else 1


def _completion(i: int) -> Completion:
    return Completion((i, *range(500)), f"word{i} " * 400, "length", (0.1 * i, *(-0.1 * j for j in range(500))))


def _speed(folder: Path, name: str, count: int, repeats: int) -> tuple[Cell, ...]:
    events = [KINDS[name](i) for i in range(count)]
    path = folder / name
    arms = {
        "write": lambda: cpu_seconds(partial(_write, path, events)),
        "read": lambda: cpu_seconds(lambda: sum(1 for _ in read_entries(path / JOURNAL))),
        "bare": lambda: cpu_seconds(partial(_write_bare, folder / "bare", events)),
    }
    values = interleaved(arms, repeats)
    size = (path / JOURNAL).stat().st_size / count
    rates = [int(count / Spread.of(values[arm]).median) for arm in ("write", "read", "bare")]
    return (name, int(size), *rates, str(ratio(values, "write", "bare")))


def _write(folder: Path, events: Sequence[Event]) -> None:
    (folder / JOURNAL).unlink(missing_ok=True)
    anyio.run(_record, folder, events)


async def _record(folder: Path, events: Sequence[Event]) -> None:
    async with open_journal(folder, Manifest(versions={}), JournalOptions(durability="close")) as journal:
        for number, event in enumerate(events):
            journal.record(event)
            if number % 16 == 0:
                await journal.saved()


def _write_bare(path: Path, events: Sequence[Event]) -> None:
    with path.open("w") as file:
        for event in events:
            file.write(json.dumps(asdict(event)) + "\n")


def _memory(folder: Path, count: int) -> tuple[Cell, ...]:
    path = folder / f"memory {count}"
    peaks: list[int] = []
    for work in (lambda: anyio.run(_record_many, path, count), lambda: sum(1 for _ in read_entries(path / JOURNAL))):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1] // 1024)
        tracemalloc.stop()
    return (count, *peaks)


async def _record_many(folder: Path, count: int) -> None:
    async with open_journal(folder, Manifest(versions={}), JournalOptions(durability="close")) as journal:
        for number in range(count):
            journal.record(KINDS["decision"](number))
            if number % 16 == 0:
                await journal.saved()
