"""What every study shares: options, interleaved measuring, tables out as text, JSON, Markdown and charts."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from atts.evaluators import Estimate
from scripts.studies.charts import draw
from scripts.studies.machine import Machine
from scripts.studies.tables import Cell as Cell
from scripts.studies.tables import Row as Row
from scripts.studies.tables import Table as Table
from scripts.studies.tables import figure as figure
from scripts.studies.tables import points as points

T = TypeVar("T")
Effort = Literal["quick", "default", "full"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)


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


def times(factor: float) -> str:
    """A factor, to two digits: more of one are not read."""
    return f"{factor:.0f}x" if factor >= 9.95 else f"{factor:.1f}x"


def interval(estimate: Estimate) -> str:
    """A rate with its 95 % interval; a dash where there is none."""
    if estimate.n_problems == 0 or math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def interleaved(arms: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Measure every arm `repeats` times in turn, A B A B, so that a drifting machine hits all alike."""
    values: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-warmup, repeats):
        for name, measure in arms.items():
            value = measure()
            if number >= 0:
                values[name].append(value)
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


class Spent:
    """What this process and its children used since it was made, and what others took of the processors meanwhile."""

    def __init__(self) -> None:
        self._wall, self._own, self._all = time.perf_counter(), _own_seconds(), _busy_seconds()

    def seconds(self) -> dict[str, float]:
        """Wall and processor seconds."""
        wall, processor = time.perf_counter() - self._wall, _own_seconds() - self._own
        return {"wall": round(wall, 1), "processor": round(processor, 1)}

    def __str__(self) -> str:
        """On a machine that is busy with other work the second number is the one that means something."""
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
    """Processor seconds of this process and of the children that it has now, in which engines compute."""
    stats = [(child / "stat").read_text().rpartition(")")[2].split() for child in children()]
    return time.process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


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


def say(words: str) -> None:
    """Progress, on stderr."""
    print(words, file=sys.stderr, flush=True)


def emit(
    name: str, tables: Sequence[Table], options: Options, machine: Machine, spent: Mapping[str, float] | None = None
) -> None:
    """Print the tables; with an output folder also write NAME.json there, of which pages are made.

    `spent` is what they took, in seconds: what running them again would take.
    """
    facts = "\n".join(f"- {line}" for line in machine.words())
    text = f"## {name} ({options.effort}, seed {options.seed})\n\n{facts}\n\n"
    text += "\n".join(table.markdown() for table in tables)
    print(text)
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"study": name, "effort": options.effort, "seed": options.seed, "machine": machine.fields(), "spent": spent}
    record = {**about, "tables": [asdict(table) for table in tables]}
    (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def drawing(table: Table) -> str:
    """The chart of a table that has one, as SVG."""
    assert table.chart is not None, "asked of tables with a chart"
    return draw(table.title, table.chart, table.columns, table.rows)


def picture_name(study: str, number: int) -> str:
    """The file of a table's chart."""
    return f"{study}-{number + 1}.svg"
