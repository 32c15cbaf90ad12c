"""Give every study its options, interleaved measurements, tables, and facts about the machine that
runs it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from atts.evaluators import Estimate

_COPIED = 1 << 26  # number of copied bytes; larger than the caches of a small machine
_MATRIX = 512
_OPERATIONS = 1000


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at the start of a study; rates are the best of several short rounds."""

    processor: str
    cores: int
    memory_gib: float
    # mean number of running processes over the last minute, this study's processes included
    load: float
    # bytes copied per second on one core; reading and writing count once
    copy_gib_per_second: float
    matrix_gflops: float  # float32 torch.mm of 512 x 512, one core
    # microseconds of one tiny torch operation, the least cost of any operation
    operation_microseconds: float
    # microseconds of one pass of an event loop, the least cost of any engine call
    loop_microseconds: float
    software: str
    # hash of the embedded models' weights; results of pairs with different hashes are not
    # comparable
    pair: str = ""

    def words(self) -> tuple[str, ...]:
        """Return the machine's facts as lines of text."""
        return (
            f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB; load "
            f"{self.load:.1f} at the start",
            f"limits: copy {self.copy_gib_per_second:.1f} GiB/s and matrices "
            f"{self.matrix_gflops:.0f} GFLOP/s on one "
            f"core, {self.operation_microseconds:.1f} us per torch operation, "
            f"{self.loop_microseconds:.1f} us per pass "
            "of the event loop",
            self.software,
        )

    def fields(self) -> dict[str, str | int | float]:
        """Return plain fields, for JSON."""
        return asdict(self)


def look(rounds: int = 15) -> Machine:
    """Measure this machine, which takes less than a second on an idle machine.

    One thread computes, because all studies measure per core.
    """
    import torch

    threads = torch.get_num_threads()
    small = torch.zeros(8)
    source = torch.zeros(_COPIED // 4)
    left = torch.randn(_MATRIX, _MATRIX)
    right = torch.randn(_MATRIX, _MATRIX)
    copied = torch.empty_like(source)
    out = torch.zeros(8)

    def operations() -> None:
        for _ in range(_OPERATIONS):
            torch.add(small, small, out=out)

    torch.set_num_threads(1)
    try:
        copy = _best(lambda: copied.copy_(source), rounds)
        matrix = _best(lambda: torch.mm(left, right), rounds)
        operation = _best(operations, rounds) / _OPERATIONS
    finally:
        torch.set_num_threads(threads)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "numpy", "anyio")]
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        load=os.getloadavg()[0],
        copy_gib_per_second=_COPIED / copy / 2**30,
        matrix_gflops=2 * _MATRIX**3 / matrix / 1e9,
        operation_microseconds=1e6 * operation,
        loop_microseconds=1e6 * _loop_seconds(),
        software=", ".join([f"Python {platform.python_version()}", *versions]),
        pair=pair_mark(),
    )


def shared_data() -> Path | None:
    """Return the folder of benchmarks and recorded traces, or None if it is absent.

    ATTS_SHARED_DATA names it; by default it is next to the checkout.
    """
    named = os.environ.get("ATTS_SHARED_DATA")
    found = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    return found if found.is_dir() else None


def traces() -> Path | None:
    """Return the folder of recorded traces; if the folder is absent, print the reason and return
    None.
    """
    root = shared_data()
    if root is not None and (root / "traces").is_dir():
        return root / "traces"
    say(
        "the recorded traces are missing, so studies that need them are left out; set "
        "ATTS_SHARED_DATA to the folder of the traces"
    )
    return None


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of shared data, or none if the file is absent."""
    base = shared_data()
    if base is None or not (base / name).is_file():
        return []
    return [
        json.loads(line) for line in (base / name).read_text(encoding="utf-8").split("\n") if line
    ]


def pair_mark() -> str:
    """Return a hash of both embedded models' weights; each model contributes four bytes of the
    hash.
    """
    from atts.models import EMBEDDED, path

    def mark(role: Literal["draft", "target"]) -> str:
        return blake2b((path(role) / "model.safetensors").read_bytes(), digest_size=4).hexdigest()

    return ", ".join(f"{role} {mark(role)}" for role in EMBEDDED)


def pair_name() -> str:
    """Return the hash of the embedded pair in a form for file names.

    Every pair keeps its measurements in its own file.
    """
    return pair_mark().replace(", ", "-").replace(" ", "-")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _best(work: Callable[[], object], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _loop_seconds(count: int = 2000) -> float:
    import anyio
    from anyio.lowlevel import checkpoint

    async def passes() -> float:
        began = time.perf_counter()
        for _ in range(count):
            await checkpoint()
        return (time.perf_counter() - began) / count

    return min(anyio.run(passes) for _ in range(3))


class Parts(dict[str, Any]):
    """The finished results of a study, keyed by name.

    If a file is given, every result is also written to it. The results then include those that
    earlier sessions and other processes wrote to this file.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._recall(line)

    def keep(self, name: str, value: Any) -> None:
        """Write a finished result to disk immediately.

        `value` is plain JSON.
        """
        self[name] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.read_bytes() if self._path.exists() else b""
            newline = "\n" if written and not written.endswith(b"\n") else ""
            with self._path.open(
                "ab", buffering=0
            ) as file:  # one write per line, so that lines of several processes do not mix
                file.write(f"{newline}{json.dumps({'part': name, 'value': value})}\n".encode())

    def forget(self) -> None:
        """Delete all results, in memory and on disk."""
        self.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _recall(self, line: str) -> None:
        try:
            record = json.loads(line)
            self[record["part"]] = record["value"]
        except (json.JSONDecodeError, KeyError):
            print(
                f"{self._path}: a killed run left an incomplete line; its part is run again",
                file=sys.stderr,
            )


T = TypeVar("T")
Effort = Literal["quick", "default", "full"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
Scaling = Literal["linear", "log"]
Cell = str | int | float | None
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """The effort of a study, the seed, and the folder for files (None: the study writes no
    files).
    """

    effort: Effort = "default"
    seed: int = 0
    out: Path | None = None

    def pick(self, quick: T, default: T, full: T) -> T:
        """Return the argument that belongs to the effort of this run."""
        return {"quick": quick, "default": default, "full": full}[self.effort]

    def file(self, name: str) -> Path | None:
        """Return the file of a study's finished parts, or None if the study stores no parts."""
        return None if self.out is None else self.out / name


@dataclass(frozen=True, slots=True)
class Chart:
    """The columns of a table to draw: `x` on the horizontal axis, `y` on the vertical one, and
    one line per value of `by`.

    If the columns `low` and `high` are named, each line has a band between them.

    With a `value`, the chart shows coloured cells of that column instead: one panel per value of
    `by`, with the column `note` as text in the cells.
    """

    x: str
    y: str
    by: str = ""
    x_scaling: Scaling = "linear"
    y_scaling: Scaling = "linear"
    value: str = ""
    note: str = ""
    low: str = ""
    high: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A result with named columns, rows, and notes for its readers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())
    chart: Chart | None = None  # chart drawn from the cells of this table
    # what the Markdown page shows: the table's rows, or only its chart; the JSON file always has
    # both
    shown: Literal["rows", "chart only"] = "rows"
    headline: str = ""  # sentence for the summary in BENCHMARKS.md

    @classmethod
    def of(cls, title: str, header: str, rows: Iterable[Row], *notes: str, **more: Any) -> Table:
        """Make a table whose header is written as in Markdown: "method | seconds".

        `more` sets the fields after the notes, by name.

        :raises AssertionError: the number of cells of a row differs from that of the header.
        """
        columns = tuple(name.strip() for name in header.split("|"))
        kept = tuple(rows)
        assert all(len(row) == len(columns) for row in kept), (
            f"{title}: {header}: a row has more or fewer cells than the header"
        )
        return cls(title, columns, kept, notes, **more)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Table:
        """Read the table from a study's JSON."""
        made: dict[str, Any] = {**fields, "rows": tuple(map(tuple, fields["rows"]))}
        made |= {name: tuple(fields[name]) for name in ("columns", "notes")}
        made["chart"] = Chart(**fields["chart"]) if fields.get("chart") else None
        return cls(**made)

    def body(self) -> str:
        """Return the table as GitHub Markdown without its title; notes come last."""
        if self.shown == "chart only":
            return "\n".join(self.notes)
        lines = ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *self.notes]).strip()

    def markdown(self) -> str:
        """Return the table as GitHub Markdown under its title."""
        return f"### {self.title}\n\n{self.body()}\n"


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return figure(cell) if math.isfinite(cell) else "-"
    return "-" if cell is None else str(cell).replace("|", "\\|")


def figure(value: float, digits: int = 4) -> str:
    """Round a number to significant digits; large numbers are written in full, with commas.

    >>> figure(0.123456), figure(11_151.7), figure(2713.4, 3), figure(9999.7)
    ('0.1235', '11,150', '2,710', '10,000')
    """
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):,.0f}" if math.isfinite(value) and "e+" in rounded else rounded


def times(factor: float) -> str:
    """Return a factor with two digits, such as "1.5x"."""
    return f"{factor:.0f}x" if factor >= 9.95 else f"{factor:.1f}x"


def interval(estimate: Estimate) -> str:
    """Return a rate with its 95 % interval, or a dash."""
    if estimate.n_problems == 0 or math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def points(estimate: Estimate, digits: int = 2) -> str:
    """Return a difference in points with its interval."""
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
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def fixed(self, digits: int = 2) -> str:
        """Return the spread with a fixed number of decimals; only the median if there is one value."""
        median, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return median if self.n == 1 else f"{median} [{low}, {high}]"

    def __str__(self) -> str:
        median, low, high = (figure(value, 3) for value in (self.median, self.low, self.high))
        return f"{median} [{low}, {high}] n={self.n}"


def interleaved(
    arms: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Measure every arm `repeats` times in the order A B B A, so that slow changes of the machine
    affect all arms equally.
    """
    values: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-warmup, repeats):
        for name in [*arms][:: 1 if number % 2 else -1]:
            value = arms[name]()
            if number >= 0:
                values[name].append(value)
    return values


def ratio(values: Mapping[str, Sequence[float]], over: str, under: str) -> Spread:
    """Return the spread of the ratios `over` / `under`, with one ratio per round."""
    return Spread.of([a / b for a, b in zip(values[over], values[under], strict=True)])


def beside_best(
    values: Mapping[str, Sequence[float]], names: Sequence[str], arm: str
) -> tuple[list[str], Spread]:
    """Return the best of the named arms, and the spread of its times divided by those of another
    arm.

    The best arm is chosen on half of the rounds, and its times are compared in the other half. Then
    the halves are swapped. If the same rounds were used to choose and to compare, the best of
    several equal arms would look better than it is.
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
    """Return the CPU seconds of one call in this process."""
    return _seconds(work, time.process_time)


def wall_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of wall time of one call."""
    return _seconds(work, time.perf_counter)


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


class Spent:
    """The time that this process and its children have used since this object was created, and the
    load from other processes.
    """

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = _own_seconds()
        self._all = _busy_seconds()

    def seconds(self) -> dict[str, float]:
        """Return wall seconds and CPU seconds."""
        wall = time.perf_counter() - self._wall
        processor = _own_seconds() - self._own
        return {"wall": round(wall, 1), "processor": round(processor, 1)}

    def __str__(self) -> str:
        """Return wall and CPU seconds as text.

        On a busy machine only the CPU seconds are comparable.
        """
        return (
            f"{self.seconds()['wall']:.0f} s, {self.seconds()['processor']:.0f} processor seconds"
        )

    def disturbance(self) -> str:
        """Return a note about the load that other processes caused during the measurement."""
        passed = max(time.perf_counter() - self._wall, 1e-9)
        others = max(0.0, (_busy_seconds() - self._all) - (_own_seconds() - self._own)) / passed
        return (
            f"During the measurement, other processes kept {others:.1f} of this machine's "
            f"{os.cpu_count()} processors busy on average."
        )


def children(parent: Path = Path("/proc/self")) -> list[Path]:
    """Return the /proc folders of all descendants of a process, such as engines and their drafters."""
    found = list[Path]()
    for file in (parent / "task").glob("*/children"):
        try:
            names = file.read_text().split()
        except OSError:  # this thread or process ended while its folder was read
            continue
        for name in names:
            child = Path("/proc", name)
            found += [child, *children(child)]
    return found


def tree_seconds() -> float:
    """Return the CPU seconds of this process and of its running descendants, because engines
    compute in child processes.
    """
    stats = [(child / "stat").read_text().rpartition(")")[2].split() for child in children()]
    return time.process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf(
        "SC_CLK_TCK"
    )


def _own_seconds() -> float:
    """Return user and system time of this process and of its ended children."""
    return sum(os.times()[:4])


def _busy_seconds() -> float:
    """Return the busy seconds of all processors since the machine started, without idle time and
    waits for disks.
    """
    try:
        user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return math.nan
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def say(words: str) -> None:
    """Print progress on stderr."""
    print(words, file=sys.stderr, flush=True)


def emit(
    name: str,
    tables: Sequence[Table],
    options: Options,
    machine: Machine,
    spent: Mapping[str, float] | None = None,
) -> None:
    """Print the tables; with an output folder, also write NAME.json to the folder, because pages
    are made from this file. `spent` is the number of seconds that the study took.
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
