"""What every study shares: options, interleaved measuring, tables out as text, JSON and Markdown."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

Cell = str | int | float | None
T = TypeVar("T")
Effort = Literal["quick", "default", "full"]


@dataclass(frozen=True, slots=True)
class Options:
    """How hard to try, from which seed, and where files go (None: nowhere)."""

    effort: Effort = "default"
    seed: int = 0
    out: Path | None = None

    def pick(self, quick: T, default: T, full: T) -> T:
        """The value for this effort."""
        return {"quick": quick, "default": default, "full": full}[self.effort]


@dataclass(frozen=True, slots=True)
class Table:
    """One result: named columns, rows, and notes that say what a reader must know."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = field(default=())

    def markdown(self) -> str:
        """The table as GitHub Markdown, title first, notes last."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *self.notes, ""])


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}] n={self.n}"


def interleaved(arms: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Measure every arm `repeats` times in turn, A B A B, so that a drifting machine hits all alike."""
    for _ in range(warmup):
        for measure in arms.values():
            measure()
    values: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, measure in arms.items():
            values[name].append(measure())
    return values


def ratio(values: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """The spread of round-by-round ratios over/under."""
    return Spread.of([a / b for a, b in zip(values[over], values[under], strict=True)])


def cpu_seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def wall_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def say(words: str) -> None:
    """Progress, on stderr."""
    print(words, file=sys.stderr, flush=True)


def emit(name: str, tables: Sequence[Table], options: Options) -> None:
    """Print the tables; with an output folder also write NAME.json and NAME.md there."""
    text = "\n".join(table.markdown() for table in tables)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"study": name, "effort": options.effort, "seed": options.seed, "tables": [asdict(t) for t in tables]}
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / f"{name}.md").write_text(text)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}" if math.isfinite(cell) else "-"
    return "-" if cell is None else str(cell).replace("|", "\\|")
