"""Fill BENCHMARKS.md and docs/benchmarks/ with the results of studies, and draw tables as charts."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from atts.analysis import Axis, Plot
from scripts.studies.harness import EFFORTS, Cell, Chart, Row, Scaling, Table, pair_mark

_LABELS = 140
_CELL = 66
_TALL = 44
_HEAD = 46
_GAP = 22
_FOOT = 26
_MAP_STYLE = (
    ".chart{font:12px system-ui,sans-serif;background:#fff}.chart text{fill:#333}.chart "
    ".head{font-weight:600}"
    ".chart .cell text{fill:#1a1a1a;text-anchor:middle}.chart "
    ".number{font-size:14px;font-weight:600}"
    ".chart .note{font-size:9.5px}.chart .none{fill:#8883}"
    "@media (prefers-color-scheme:dark){.chart{background:#14171b}.chart text{fill:#dde}.chart "
    ".empty text{fill:#dde}}"
)
_GREEN = (46, 160, 90)
_RED = (214, 84, 70)
_PALE = (247, 244, 232)
_FULL = 3.0  # a speed-up of this factor has the full green, and its inverse has the full red


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a map: its value, which may be missing, and a line of text below the value."""

    value: float | None
    note: str


Panel = dict[tuple[str, str], HeatCell]
"""Cells of a map by row and column."""


def draw_map(title: str, across: str, panels: dict[str, Panel]) -> str:
    """Draw several maps, two in a row, as one SVG file."""
    made = [(name, panel, _names(panel, 0), _names(panel, 1)) for name, panel in panels.items()]
    wide = max(
        (_LABELS + _CELL * len(columns) + _GAP for _, _, _, columns in made), default=_LABELS
    )
    tall = max((_HEAD + _TALL * len(rows) + _FOOT for _, _, rows, _ in made), default=_HEAD)
    width = wide * min(2, len(made))
    height = tall * math.ceil(len(made) / 2) + 24
    parts = list[str]()
    for number, (name, panel, rows, columns) in enumerate(made):
        x = number % 2 * wide
        y = number // 2 * tall
        parts.append(
            f'<g transform="translate({x} '
            f'{y})">{"".join(_panel(name, across, panel, (rows, columns)))}</g>'
        )
    words = (
        "Green: atts is faster than the best alternative, which is named below. Red: atts "
        "is slower. Grey: not measured yet."
    )
    parts.append(f'<text x="10" y="{height - 8}">{escape(words)}</text>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" class="chart">'
    return f"{head}<style>{_MAP_STYLE}</style>{''.join(parts)}</svg>\n"


def _names(panel: Panel, place: int) -> list[str]:
    return list(dict.fromkeys(key[place] for key in panel))


def _panel(
    name: str, across: str, panel: Panel, names: tuple[Sequence[str], Sequence[str]]
) -> Iterator[str]:
    rows, columns = names
    yield f'<text class="head" x="10" y="18">{escape(name)}</text>'
    yield f'<text x="{_LABELS - 8}" y="{_HEAD - 7}" text-anchor="end">{escape(across)}</text>'
    for place, column in enumerate(columns):
        x = _LABELS + _CELL * (place + 0.5)
        yield f'<text x="{x:g}" y="{_HEAD - 7}" text-anchor="middle">{escape(column)}</text>'
    for line, row in enumerate(rows):
        y = _HEAD + _TALL * line
        yield f'<text x="{_LABELS - 8}" y="{y + _TALL / 2 + 4:g}" text-anchor="end">{escape(row)}</text>'
        for place, column in enumerate(columns):
            yield _cell(_LABELS + _CELL * place, y, panel.get((row, column), HeatCell(None, "")))


def _cell(x: int, y: int, cell: HeatCell) -> str:
    box = f'x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_TALL - 2}" rx="3"'
    middle = x + _CELL / 2
    lines = cell.note.rsplit(" ", 1) if cell.value is None else [cell.note]
    first = y + (34 if cell.value is not None else 19)
    note = "".join(
        f'<text class="note" x="{middle:g}" y="{first + 12 * at}">{escape(line)}</text>'
        for at, line in enumerate(lines)
    )
    if cell.value is None:
        return f'<g class="cell empty"><rect class="none" {box}/>{note}</g>'
    number = f'<text class="number" x="{middle:g}" y="{y + 20}">{cell.value:.2g}x</text>'
    return f'<g class="cell"><rect {box} fill="{_colour(cell.value)}"/>{number}{note}</g>'


def _colour(value: float) -> str:
    """Return a colour that is pale at factor 1, full green at 3 and full red at 1/3."""
    share = min(1.0, abs(math.log(max(value, 1e-9))) / math.log(_FULL))
    ends = _GREEN if value >= 1 else _RED
    return "#" + "".join(
        f"{round(pale + (0.15 + 0.85 * share) * (end - pale)):02x}"
        for pale, end in zip(_PALE, ends, strict=True)
    )


_WIDTH = 620
_HEIGHT = 330
_ROW = 18
_COLUMNS = 3
_COLOURS = ("#2f6fb3", "#c4511d", "#2b8a4b", "#8a4fc4", "#a8821a", "#c03a6b", "#4a8f9e", "#7a7a7a")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_CROWDED = 40  # lines with more points than this are drawn without dots
_STYLE = (
    ".chart{font:12px system-ui,sans-serif;background:#fff}.chart text{fill:#333}.chart "
    ".grid{stroke:#8884;fill:none}"
    ".chart .line{fill:none;stroke-width:2}.chart .axis{font-weight:600}"
    "@media (prefers-color-scheme:dark){.chart{background:#14171b}.chart text{fill:#dde}}"
)


@dataclass(frozen=True, slots=True)
class ScaledAxis(Axis):
    """An axis with short numbers, such as 20k or 1.5M, in a linear or a logarithmic scale.

    A logarithmic scale uses logarithms to base 2, and has ticks at doublings or at round decimal
    numbers.
    """

    steps: Literal["linear", "doublings", "decimal"] = "linear"

    def ticks(self, about: int = 5) -> list[float]:
        """Return the ticks: round numbers, powers of two, or 1, 2, 5, 10 and so on."""
        if self.steps == "linear":
            return Axis.ticks(self, about)
        if self.steps == "doublings":
            first = math.ceil(self.low - 1e-9)
            last = math.floor(self.high + 1e-9)
            every = max(1, math.ceil((last - first + 1) / (about + 2)))
            return [float(power) for power in range(first, last + 1, every)] or [self.low]
        found = [math.log2(value) for value in _round_numbers(2**self.low, 2**self.high)]
        tens = [tick for tick in found if math.isclose(math.log10(2**tick) % 1, 0, abs_tol=1e-9)]
        return found if len(found) <= 2 * about or len(tens) < 2 else tens

    def written(self, value: float) -> str:
        """Return a tick's label in at most five characters.

        On a logarithmic scale, the label is the number itself, not its logarithm.
        """
        number = value if self.steps == "linear" else 2**value
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(number) >= size:
                return f"{number / size:.3g}{letter}"
        return f"{round(number, 10):.3g}"


def _round_numbers(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**decade for decade in decades for step in (1.0, 2.0, 5.0)]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def draw(table: Table) -> str:
    """Draw the chart of a table as SVG.

    Rows without two numbers in the chart's columns are left out.

    :raises KeyError: the table lacks a column of the chart.
    """
    chart = table.chart
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert chart is not None, "the table has a chart"
    if chart.value:
        return draw_map(table.title, chart.x, _panels(chart, rows))
    lines = _series(chart, rows)
    across, up = (
        [point[place] for points in lines.values() for point in points] for place in (0, 1)
    )
    plot = Plot(_across(chart, across), _up(chart, up), _WIDTH, _HEIGHT)
    marks = list[str]()
    bands = _bands(chart, rows)
    for number, name in enumerate(lines):
        if name in bands:
            xs, lows, highs = zip(*bands[name], strict=True)
            marks.append(_band(plot, xs, lows, highs, f"s{number}"))
    for number, (name, points) in enumerate(lines.items()):
        marks.append(plot.line(points, f"s{number}"))
        if len(points) <= _CROWDED:
            marks += [plot.dot(x, y, f"s{number}", name, 3) for x, y in points]
    body = plot.drawn(table.title, marks).partition(">")[2].removesuffix("</svg>")
    tall = _HEIGHT + _ROW * math.ceil(len(lines) / _COLUMNS) + 6
    return page(table.title, _WIDTH, tall, [*_styles(len(lines)), body, *_legend(list(lines))])


def _panels(chart: Chart, rows: Iterable[Mapping[str, Cell]]) -> dict[str, Panel]:
    """Return the cells of a map, panel by panel, in the order of the table's rows."""
    panels = dict[str, Panel]()
    for cells in rows:
        value = cells[chart.value]
        found = HeatCell(
            float(value) if isinstance(value, int | float) else None, str(cells[chart.note])
        )
        panels.setdefault(str(cells[chart.by]), {})[str(cells[chart.y]), str(cells[chart.x])] = (
            found
        )
    return panels


def _series(
    chart: Chart, rows: Iterable[Mapping[str, Cell]]
) -> Mapping[str, list[tuple[float, float]]]:
    """Return the points of each line on the chart's scales, from left to right."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cells in rows:
        x = _scaled(cells[chart.x], chart.x_scaling)
        y = _scaled(cells[chart.y], chart.y_scaling)
        by = cells[chart.by] if chart.by else chart.y
        # a legend entry that is only a number would not show the unit
        name = f"{by} {chart.by}" if isinstance(by, int | float) else str(by)
        if x is not None and y is not None:
            lines.setdefault(name, []).append((x, y))
    return {name: sorted(points) for name, points in lines.items()}


def _bands(
    chart: Chart, rows: Iterable[Mapping[str, Cell]]
) -> Mapping[str, list[tuple[float, float, float]]]:
    """Return the band around each line, as a list of (position, low, high)."""
    bands: dict[str, list[tuple[float, float, float]]] = {}
    if not chart.low:
        return bands
    for cells in rows:
        x = _scaled(cells[chart.x], chart.x_scaling)
        low = _scaled(cells[chart.low], chart.y_scaling)
        high = _scaled(cells[chart.high], chart.y_scaling)
        if x is not None and low is not None and high is not None:
            bands.setdefault(str(cells[chart.by]), []).append((x, low, high))
    return {name: sorted(points) for name, points in bands.items()}


def _band(
    plot: Plot, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], kind: str
) -> str:
    """Return the SVG of a band. A band with only one point is drawn as a vertical stroke."""
    if len(xs) == 1:
        return plot.line([(xs[0], lows[0]), (xs[0], highs[0])], kind)
    area = plot.band(xs, lows, highs)
    return area.replace('class="band"', f'class="area {kind}"')


def _scaled(value: Cell, scaling: Scaling) -> float | None:
    """Return the position of a cell on its axis, or None if the cell has no position there."""
    if (
        not isinstance(value, int | float)
        or not math.isfinite(value)
        or (scaling == "log" and value <= 0)
    ):
        return None
    return math.log2(value) if scaling == "log" else float(value)


def _across(chart: Chart, values: Sequence[float]) -> Axis:
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if chart.x_scaling == "log":  # samples and replicas are counted in powers of two
        return ScaledAxis(low, high, chart.x, steps="doublings")
    return ScaledAxis(min(0.0, low) if 0 <= low <= 0.2 * high else low, high, chart.x)


def _up(chart: Chart, values: Sequence[float]) -> Axis:
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if chart.y_scaling == "linear":
        low = min(0.0, low)
        return ScaledAxis(low, high + 0.05 * (high - low), chart.y)
    around = _round_numbers(2**low / 10, 2**high * 10)  # the axis begins and ends at round numbers
    first = max((value for value in around if value <= 2**low * 1.001), default=2**low)
    last = min((value for value in around if value >= 2**high * 0.999), default=2**high)
    return ScaledAxis(math.log2(first), math.log2(max(last, first * 2)), chart.y, steps="decimal")


def _styles(count: int) -> list[str]:
    """Return the styles of the lines, each with a colour and dashes."""
    kinds = [
        (at, _COLOURS[at % len(_COLOURS)], _DASHES[at % len(_DASHES)] or 0) for at in range(count)
    ]
    rules = [
        f".line.s{at}{{stroke:{c};stroke-dasharray:{d}}}.dot.s{at}{{fill:{c}}}"
        f".area.s{at}{{fill:{c};fill-opacity:.13}}"
        for at, c, d in kinds
    ]
    return [f"<style>{''.join(rules)}</style>"]


def _legend(names: Sequence[str]) -> list[str]:
    """Return the parts of the legend below the picture."""
    parts = list[str]()
    for number, name in enumerate(names):
        x = 20 + number % _COLUMNS * (_WIDTH - 20) // _COLUMNS
        y = _HEIGHT + 10 + number // _COLUMNS * _ROW
        parts.append(f'<path class="line s{number}" d="M{x} {y}h20"/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>')
    return parts


def page(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Join SVG parts into one picture in the style of the charts."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" class="chart">'
    return f"{head}<style>{_STYLE}</style>{''.join(parts)}</svg>\n"


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
MARK = re.compile(
    r"(<!-- (?P<what>table|machine|summary)(?: (?P<study>[\w-]+))?(?:: (?P<title>.+?))? -->\n)(?P<held>.*?)"
    r"(<!-- end -->)",
    re.DOTALL,
)
_ON_THE_PAIR = {
    "pipelines",
    "speculation",
    "overlap",
    "against",
    "frontier",
    "field",
    "ablations",
    "models",
    "local",
    "scale",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A table, and the name of its chart's file."""

    table: Table
    picture: str


@dataclass(frozen=True, slots=True)
class Record:
    """The results of a study with all its parts: tables by title, the most important first."""

    study: str
    effort: str
    machine: Mapping[str, Any]
    kept: Mapping[str, Kept]
    spent: Mapping[str, float]  # seconds of the last part; empty if they were not recorded

    @property
    def tables(self) -> tuple[Table, ...]:
        """Return the tables without the names of their charts."""
        return tuple(one.table for one in self.kept.values())

    def find(self, title: str) -> Kept:
        """Return the first table whose title begins with these words.

        Titles of the same table may differ in the number of problems.

        :raises KeyError: no title begins with these words.
        """
        for name, one in self.kept.items():
            if name.startswith(title):
                return one
        raise KeyError(f"{self.study} has no table {title!r}; it has {list(self.kept)}")

    def words(self) -> str:
        """Describe the machine and effort of the study."""
        machine = self.machine
        is_other = self.study in _ON_THE_PAIR and machine.get("pair") != pair_mark()
        return (
            f"The study ran at effort `{self.effort}` (of `quick`, `default` and `full`). Machine: "
            f"{machine['processor']}, {machine['cores']} cores; the load average was "
            f"{machine['load']:.1f} at the start. Measured speed of one core: copying memory "
            f"{machine['copy_gib_per_second']:.1f} GiB/s, matrix products "
            f"{machine['matrix_gflops']:.0f} GFLOP/s, "
            f"{machine['operation_microseconds']:.1f} us for a small torch operation."
            + (
                f" The study used {self.spent['processor']:.0f} seconds of processor time."
                if self.spent
                else ""
            )
            + (
                " The study used an earlier embedded pair, or did not record which."
                if is_other
                else ""
            )
        )


def read(folder: Path) -> dict[str, Record]:
    """Read the records of all studies below a folder.

    Parts such as `pipelines-claim` are joined under the name of their study. If two tables have the
    same title, the table of the greater effort is used, and of equal efforts the newer.
    """
    found: dict[str, Record] = {}
    written = [
        (path.stat().st_mtime, json.loads(path.read_text())) for path in folder.rglob("*.json")
    ]
    studies = [
        (EFFORTS.index(fields["effort"]), when, fields)
        for when, fields in written
        if isinstance(fields, dict) and {"study", "tables", "effort"} <= fields.keys()
    ]
    for _, _, fields in sorted(studies, key=lambda one: one[:2]):
        name = str(fields["study"])
        tables = [Table.read(table) for table in fields["tables"]]
        study = name.split("-")[0]
        made = {
            table.title: Kept(table, f"{name}-{number}.svg")
            for number, table in enumerate(tables, 1)
        }
        older = found[study].kept if study in found else {}
        kept = made | {title: one for title, one in older.items() if title not in made}
        found[study] = Record(
            study, str(fields["effort"]), fields.get("machine", {}), kept, fields.get("spent") or {}
        )
    return found


def fill(
    page: str, records: Mapping[str, Record], pictures: Path | None = None
) -> tuple[str, list[str]]:
    """Fill every marked part of a page. Return the page, and a message for each part without a
    record.

    A part without a record keeps its text. If it is empty, it gets a sentence which says that the
    study has not been run.
    """
    missing: list[str] = []

    def part(found: re.Match[str]) -> str:
        try:
            body = _part(found, records, pictures)
        except KeyError as error:
            missing.append(str(error.args[0]))
            body = found["held"].strip() or "*This study has not been run yet.*"
        return f"{found.group(1)}{body}\n{found.group(6)}"

    return MARK.sub(part, page), missing


def _part(found: re.Match[str], records: Mapping[str, Record], pictures: Path | None) -> str:
    if found["what"] == "summary":
        return summary(
            {name: record.tables for name, record in records.items()}, found["held"]
        ).body()
    if found["study"] not in records:
        raise KeyError(f"no study {found['study']} was run")
    record = records[found["study"]]
    if found["what"] == "machine":
        return record.words()
    one = record.find(found["title"])
    text = f"**{one.table.title}**\n\n{one.table.body()}"
    if one.table.chart is None:
        return text
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / one.picture).write_text(draw(one.table))
    return f"{text}\n\n![{one.table.title}]({one.picture})"


def pages(root: Path = ROOT) -> list[Path]:
    """Return the front page, then the page of each study."""
    return [root / "BENCHMARKS.md", *sorted((root / "docs" / "benchmarks").glob("*.md"))]


def main() -> None:
    """Fill the pages from a folder of results, and print the parts that no record filled."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=main.__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench")
    records = read(parser.parse_args().runs)
    texts = ""
    for page in pages():
        text, missing = fill(page.read_text(), records, FOLDER)
        page.write_text(text)
        texts += text
        for words in missing:
            print(f"benchmarks: {page.name}: not filled: {words}", file=sys.stderr)
    for picture in FOLDER.glob("*.svg"):
        if picture.name not in texts:  # delete pictures of tables that no page shows
            picture.unlink()


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's question, with the study and the tables that answer it, the command, and the
    limits of the answer.
    """

    question: str
    study: str
    titles: tuple[str, ...]
    command: str
    limits: str

    def answer(self, tables: Sequence[Table]) -> str:
        """Return the headlines of the claim's tables, or "" if a table is missing.

        If several titles begin alike, the first table is used.
        """
        found = [
            next(
                (one.headline for one in tables if one.headline and one.title.startswith(title)), ""
            )
            for title in self.titles
        ]
        return "; ".join(found) if all(found) else ""


def summary(studies: Mapping[str, Sequence[Table]], held: str = "") -> Table:
    """Return the table of all claims with their headlines.

    A claim whose study was not run keeps its answer, or gets "not measured".
    """
    kept = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in held.splitlines()
        if "](" in line
    }
    rows: list[Row] = []
    for claim in CLAIMS:
        question = f"[{claim.question}](docs/benchmarks/{claim.study}.md)"
        answer = claim.answer(studies.get(claim.study, ())) or kept.get(question, "not measured")
        rows.append((question, answer, f"`{claim.command}`", claim.limits))
    return Table.of("In five minutes", "question | measured | command | limits", rows)


CLAIMS = tuple(
    Claim(*fields)
    for fields in (
        ("How much faster is atts than target-only?", "pipelines", ("Time, throughput", "Time, latency"),
         "./scripts/bench pipelines-time",
         "embedded models on two shared cores; on a CPU, scoring is not much cheaper than writing"),
        ("At which accuracy?", "pipelines", ("The claim: ",), "./scripts/bench pipelines --full",
         "embedded models, graded arithmetic"),
        ("How fast is atts if each engine has its own GPUs?", "scale", ("Gains: ",), "./scripts/scale",
         "virtual time with published costs; all methods write equally many tokens; accuracy is not simulated"),
        ("How exact is the rate, compared with the published rule?", "calibration",
         ("Every mode on the real stream at rate 0.4",), "./scripts/bench calibration",
         "recorded scores of one pair on 100 questions; effects of other decisions are not replayed"),
        ("How exact is the rate in a live run?", "against", ("Methods side by side: embedded pair",),
         "./scripts/bench against",
         "a question has few decisions, so even a coin at the nominal rate has an error, but a smaller one"),
        ("Would another default be better?", "ablations", ("Which defaults would change",), "./scripts/bench ablations",
         "the embedded pair; too few problems to detect small differences"),
        ("What does the scheduler cost?", "graph", ("CPU microseconds per rollout of 12 nodes",),
         "./scripts/bench graph", "asyncio, on one machine"),
        ("What does one client send to a server?", "remote", ("Throughput",), "./scripts/bench remote",
         "server and client share the machine's cores"),
        ("How fast is the local engine?", "local", ("Decoding",), "./scripts/bench local --full",
         "one machine, float32, one thread for each engine"),
        ("Where does atts saturate at cluster scale?", "scale", ("Replicas of both engines", "Work that grows"),
         "./scripts/scale",
         "virtual time without networks and load balancers; the longest rollout limits a fixed evaluation"),
        ("How far off is the simulation?", "scale", ("Predicted and measured",), "./scripts/bench scale",
         "validated on this machine's embedded pair only; GPU costs are published fits"),
        ("Are the paper's 56.7x and 4.14x reachable?", "scale", ("The published headline figures",), "./scripts/scale",
         "the paper does not name its baselines, so we chose them"),
        ("How often are verdicts correct?", "grading", ("model answers",), "./scripts/bench grading",
         "one person judged the pairs; every checker has its default settings"),
        ("Does a killed run lose anything?", "crash", ("Runs killed",), "./scripts/bench crash --full",
         "scripted engines, and a gate that does not learn"),
        ("Does atts run for ever?", "soak", ("Soak: what the process holds",), "./scripts/bench soak --full",
         "one hour, not a month"),
    )
)  # fmt: skip


if __name__ == "__main__":
    main()
