"""What every study shares: options, interleaved measuring, tables out as text, JSON, Markdown and charts."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from scripts.studies.charts import Chart, draw
from scripts.studies.machine import Machine

Cell = str | int | float | None
Row = tuple[Cell, ...]
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
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())
    chart: Chart | None = None  # drawn from the table's own cells
    shown: Literal["rows", "chart only"] = "rows"  # in Markdown; JSON has everything

    @classmethod
    def of(
        cls,
        title: str,
        header: str,
        rows: Iterable[Row],
        *notes: str,
        chart: Chart | None = None,
        shown: Literal["rows", "chart only"] = "rows",
    ) -> Table:
        """A table whose header is written as in Markdown: "method | seconds".

        :raises AssertionError: a row has another number of cells than the header.
        """
        columns, held = tuple(name.strip() for name in header.split("|")), tuple(rows)
        assert all(len(row) == len(columns) for row in held), f"{title}: {header}: a row of another length"
        return cls(title, columns, held, notes, chart, shown)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Table:
        """The table that a study's JSON holds."""
        return cls(
            fields["title"],
            tuple(fields["columns"]),
            tuple(tuple(row) for row in fields["rows"]),
            tuple(fields["notes"]),
            Chart(**fields["chart"]) if fields.get("chart") else None,
            fields.get("shown", "rows"),
        )

    def markdown(self) -> str:
        """The table as GitHub Markdown, title first, notes last."""
        if self.shown == "chart only":
            return "\n".join([f"### {self.title}", "", *self.notes, ""])
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
        median, low, high = (figure(value, 3) for value in (self.median, self.low, self.high))
        return f"{median} [{low}, {high}] n={self.n}"


def figure(value: float, digits: int = 4) -> str:
    """A number with the digits that count; large ones in full, as people write them.

    >>> figure(0.123456), figure(11_151.7), figure(2713.4, 3), figure(9999.7)
    ('0.1235', '11,150', '2,710', '10,000')
    """
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):,.0f}" if math.isfinite(value) and "e+" in rounded else rounded


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


class Calm:
    """How much of the processors' time others took since it was made: what a measurement was disturbed by."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._own = _own_seconds()
        self._all = _busy_seconds()

    @property
    def disturbance(self) -> float:
        """Others' processor seconds per second; nan where the system does not tell."""
        passed = max(time.perf_counter() - self._began, 1e-9)
        return max(0.0, (_busy_seconds() - self._all) - (_own_seconds() - self._own)) / passed


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float:
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return math.nan
    user, nice, system, _, _, irq, softirq, steal = (float(value) for value in first[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wall_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def say(words: str) -> None:
    """Progress, on stderr."""
    print(words, file=sys.stderr, flush=True)


def emit(
    name: str, tables: Sequence[Table], options: Options, machine: Machine, spent: Mapping[str, float] | None = None
) -> None:
    """Print the tables; with an output folder also write NAME.json, NAME.md and one SVG per chart there.

    `spent` is what they took, in seconds, for whoever wants to know before running them again.
    """
    folder = options.out
    facts = "\n".join(f"- {line}" for line in machine.words())
    text = f"## {name} ({options.effort}, seed {options.seed})\n\n{facts}\n\n"
    text += "\n".join(table.markdown() + _picture(name, number, table) for number, table in enumerate(tables))
    print(text)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    about = {"study": name, "effort": options.effort, "seed": options.seed, "machine": machine.fields(), "spent": spent}
    record = {**about, "tables": [asdict(table) for table in tables]}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)
    for number, table in enumerate(tables):
        if table.chart is not None:
            picture = draw(table.title, table.chart, table.columns, table.rows)
            (folder / picture_name(name, number)).write_text(picture)


def picture_name(study: str, number: int) -> str:
    """The file of a table's chart."""
    return f"{study}-{number + 1}.svg"


def _picture(study: str, number: int, table: Table) -> str:
    return f"![{table.title}]({picture_name(study, number)})\n" if table.chart else ""


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return figure(cell) if math.isfinite(cell) else "-"
    return "-" if cell is None else str(cell).replace("|", "\\|")
