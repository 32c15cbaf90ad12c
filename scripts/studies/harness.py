"""What every study shares: options, measuring in turn, results as tables in Markdown and JSON."""

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
from typing import Any, Literal, TypeVar, get_args

from atts.evaluators import Estimate
from scripts.studies.machine import Machine

T = TypeVar("T")
Effort = Literal["quick", "default", "full"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
Scaling = Literal["linear", "log"]
Cell = str | int | float | None
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """How hard to try, from which seed, and where files go (None: nowhere)."""

    effort: Effort = "default"
    seed: int = 0
    out: Path | None = None

    def pick(self, quick: T, default: T, full: T) -> T:
        """The value for this effort."""
        return {"quick": quick, "default": default, "full": full}[self.effort]

    def file(self, name: str) -> Path | None:
        """Where a study keeps its finished parts; None: it keeps none."""
        return None if self.out is None else self.out / name


@dataclass(frozen=True, slots=True)
class Chart:
    """Which columns of a table are drawn: `x` across, `y` up, one line per value of `by` (none: one
    line).

    With a `value`, cells of that column's colour instead, a panel per value of `by`, the column
    `note` written in them.
    """

    x: str
    y: str
    by: str = ""
    x_scaling: Scaling = "linear"
    y_scaling: Scaling = "linear"
    value: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One result: named columns, rows, and notes that say what a reader must know."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())
    chart: Chart | None = None  # drawn from the table's own cells
    shown: Literal["rows", "chart only"] = "rows"  # in Markdown; JSON has everything
    headline: str = ""  # what BENCHMARKS.md says of it

    @classmethod
    def of(cls, title: str, header: str, rows: Iterable[Row], *notes: str, **more: Any) -> Table:
        """A table whose header is written as in Markdown: "method | seconds"; `more` are the fields
        after the notes.

        :raises AssertionError: a row has another number of cells than the header.
        """
        columns = tuple(name.strip() for name in header.split("|"))
        held = tuple(rows)
        assert all(len(row) == len(columns) for row in held), (
            f"{title}: {header}: a row of another length"
        )
        return cls(title, columns, held, notes, **more)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Table:
        """The table that a study's JSON holds."""
        made: dict[str, Any] = {**fields, "rows": tuple(map(tuple, fields["rows"]))}
        made |= {name: tuple(fields[name]) for name in ("columns", "notes")}
        made["chart"] = Chart(**fields["chart"]) if fields.get("chart") else None
        return cls(**made)

    def body(self) -> str:
        """The table as GitHub Markdown without its title, notes last."""
        if self.shown == "chart only":
            return "\n".join(self.notes)
        lines = ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *self.notes]).strip()

    def markdown(self) -> str:
        """The same under its title."""
        return f"### {self.title}\n\n{self.body()}\n"


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return figure(cell) if math.isfinite(cell) else "-"
    return "-" if cell is None else str(cell).replace("|", "\\|")


def figure(value: float, digits: int = 4) -> str:
    """A number with the digits that count; large ones in full, as people write them.

    >>> figure(0.123456), figure(11_151.7), figure(2713.4, 3), figure(9999.7)
    ('0.1235', '11,150', '2,710', '10,000')
    """
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):,.0f}" if math.isfinite(value) and "e+" in rounded else rounded


def times(factor: float) -> str:
    """A factor, to two digits: more of one are not read."""
    return f"{factor:.0f}x" if factor >= 9.95 else f"{factor:.1f}x"


def interval(estimate: Estimate) -> str:
    """A rate with its 95 % interval; a dash where there is none."""
    if estimate.n_problems == 0 or math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def points(estimate: Estimate, digits: int = 2) -> str:
    """A difference in points with its interval."""
    value, low, high = (
        f"{100 * each:+.{digits}f}" for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"


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

    def fixed(self, digits: int = 2) -> str:
        """With so many digits after the point; the median alone where there is one value."""
        median, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return median if self.n == 1 else f"{median} [{low}, {high}]"

    def __str__(self) -> str:
        median, low, high = (figure(value, 3) for value in (self.median, self.low, self.high))
        return f"{median} [{low}, {high}] n={self.n}"


def interleaved(
    arms: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Measure every arm `repeats` times in turn, A B B A, so that a drifting machine hits all
    alike.
    """
    values: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-warmup, repeats):
        for name in [*arms][:: 1 if number % 2 else -1]:
            value = arms[name]()
            if number >= 0:
                values[name].append(value)
    return values


def ratio(values: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """The spread of round-by-round ratios over/under."""
    return Spread.of([a / b for a, b in zip(values[over], values[under], strict=True)])


def beside_best(
    values: Mapping[str, Sequence[float]], names: Sequence[str], arm: str
) -> tuple[list[str], Spread]:
    """The best of the named arms, and the spread of its times over another arm's.

    The best is found in every other round and compared in those between, and the other way round:
    in the rounds that it is found in, the best of several that are alike is better than it is.
    """
    found = list[str]()
    ratios = list[float]()
    for start in (0, 1):
        looked = {name: times[1 - start :: 2] for name, times in values.items()}
        compared = {name: times[start::2] for name, times in values.items()}
        best = min(names, key=lambda name: ratio(looked, name, arm).median)
        found += [best] if best not in found else []
        ratios += [a / b for a, b in zip(compared[best], compared[arm], strict=True)]
    return found, Spread.of(ratios)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call in this process."""
    return _seconds(work, time.process_time)


def wall_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    return _seconds(work, time.perf_counter)


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


class Spent:
    """What this process and its children used since it was made, and what others took of the
    processors meanwhile.
    """

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = _own_seconds()
        self._all = _busy_seconds()

    def seconds(self) -> dict[str, float]:
        """Wall and processor seconds."""
        wall = time.perf_counter() - self._wall
        processor = _own_seconds() - self._own
        return {"wall": round(wall, 1), "processor": round(processor, 1)}

    def __str__(self) -> str:
        """On a machine that is busy with other work the second number is the one that means
        something.
        """
        return f"{self.seconds()['wall']:.0f} s, of processors {self.seconds()['processor']:.0f} s"

    def disturbance(self) -> str:
        """How busy others kept the machine meanwhile, as a note under a table."""
        passed = max(time.perf_counter() - self._wall, 1e-9)
        others = max(0.0, (_busy_seconds() - self._all) - (_own_seconds() - self._own)) / passed
        return f"Meanwhile others used {others:.1f} of this machine's {os.cpu_count()} processors."


def children() -> list[Path]:
    """Where the system tells of the processes that this one has started, from whichever thread."""
    lists = Path("/proc/self/task").glob("*/children")
    return [Path("/proc", child) for file in lists for child in file.read_text().split()]


def tree_seconds() -> float:
    """Processor seconds of this process and of the children that it has now, in which engines
    compute.
    """
    stats = [(child / "stat").read_text().rpartition(")")[2].split() for child in children()]
    return time.process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf(
        "SC_CLK_TCK"
    )


def _own_seconds() -> float:
    """Of this process and of the children that have ended: user and system time."""
    return sum(os.times()[:4])


def _busy_seconds() -> float:
    """Of all processors since the machine started, but idle and waiting for disks."""
    try:
        user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return math.nan
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def say(words: str) -> None:
    """Progress, on stderr."""
    print(words, file=sys.stderr, flush=True)


def emit(
    name: str,
    tables: Sequence[Table],
    options: Options,
    machine: Machine,
    spent: Mapping[str, float] | None = None,
) -> None:
    """Print the tables; with an output folder also write NAME.json there, of which pages are made.

    `spent` is what they took, in seconds: what running them again would take.
    """
    facts = "\n".join(f"- {line}" for line in machine.words())
    text = f"## {name} ({options.effort}, seed {options.seed})\n\n{facts}\n\n"
    print(text + "\n".join(table.markdown() for table in tables))
    if (file := options.file(f"{name}.json")) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "study": name,
            "effort": options.effort,
            "seed": options.seed,
            "machine": machine.fields(),
        }
        record = {**about, "spent": spent, "tables": [asdict(table) for table in tables]}
        file.write_text(json.dumps(record, indent=1) + "\n")
