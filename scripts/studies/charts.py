"""Draws a study's table as one SVG file, readable on light and dark pages and without colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from atts.analysis import Axis, Plot
from scripts.studies.heat_map import HeatCell, Panel, draw_map
from scripts.studies.tables import Chart as Chart
from scripts.studies.tables import Scaling

Direction = Literal["across", "up"]
Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _ROW, _COLUMNS = 620, 330, 18, 3
_COLOURS = ("#2f6fb3", "#c4511d", "#2b8a4b", "#8a4fc4", "#a8821a", "#c03a6b", "#4a8f9e", "#7a7a7a")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_CROWDED = 40  # points of a line beyond which it is drawn without dots
_STYLE = (
    ".chart{font:12px system-ui,sans-serif;background:#fff}.chart text{fill:#333}.chart .grid{stroke:#8884;fill:none}"
    ".chart .line{fill:none;stroke-width:2}.chart .axis{font-weight:600}"
    "@media (prefers-color-scheme:dark){.chart{background:#14171b}.chart text{fill:#dde}}"
)


@dataclass(frozen=True, slots=True)
class LinearAxis(Axis):
    """An axis whose numbers stay short: 20k, 1.5M."""

    def written(self, value: float) -> str:
        """At most five characters."""
        return _short(value)


@dataclass(frozen=True, slots=True)
class LogAxis(Axis):
    """An axis of logarithms to base 2, written as what they are of: doublings, or round decimal numbers."""

    steps: Literal["doublings", "decimal"] = "doublings"

    def ticks(self, about: int = 5) -> list[float]:
        """Powers of two thinned out to about so many; or 1, 2, 5, 10, ..., where too many only powers of ten."""
        if self.steps == "doublings":
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            every = max(1, math.ceil((last - first + 1) / (about + 2)))
            return [float(power) for power in range(first, last + 1, every)] or [self.low]
        found = [math.log2(value) for value in _round_numbers(2**self.low, 2**self.high)]
        tens = [tick for tick in found if math.isclose(math.log10(2**tick) % 1, 0, abs_tol=1e-9)]
        return found if len(found) <= 2 * about or len(tens) < 2 else tens

    def written(self, value: float) -> str:
        """The number, not its logarithm."""
        return _short(2**value)


def _round_numbers(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**decade for decade in decades for step in (1.0, 2.0, 5.0)]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{round(value, 10):.3g}"


def draw(title: str, chart: Chart, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The chart of a table; rows without two numbers in the chart's columns are left out.

    :raises ValueError: a column the table does not have.
    """
    if chart.value:
        return draw_map(title, chart.x, _panels(chart, columns, rows))
    lines = series(chart, columns, rows)
    values = [[point[place] for points in lines.values() for point in points] for place in (0, 1)]
    across, up = _axis(chart.x, chart.x_scaling, values[0], "across"), _axis(chart.y, chart.y_scaling, values[1], "up")
    plot, marks = Plot(across, up, _WIDTH, _HEIGHT), list[str]()
    for number, (name, points) in enumerate(lines.items()):
        marks.append(plot.line(points, f"s{number}"))
        if len(points) <= _CROWDED:
            marks += [plot.dot(x, y, f"s{number}", name, 3) for x, y in points]
    return _with_legend(plot.drawn(title, marks), list(lines))


def _panels(chart: Chart, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, Panel]:
    """The cells of a map, panel by panel, in the order of the rows."""
    wanted = (chart.by, chart.y, chart.x, chart.value, chart.note)
    places, panels = [columns.index(name) for name in wanted], dict[str, Panel]()
    for row in rows:
        by, up, across, value, note = (row[place] for place in places)
        number = float(value) if isinstance(value, int | float) else None
        panels.setdefault(str(by), {})[str(up), str(across)] = HeatCell(number, str(note))
    return panels


def series(
    chart: Chart, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> Mapping[str, list[tuple[float, float]]]:
    """The points of each line, on the scales of the chart, sorted from left to right."""
    across, up = columns.index(chart.x), columns.index(chart.y)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, y = row[across], row[up]
        name = _named(row[columns.index(chart.by)], chart.by) if chart.by else chart.y
        if isinstance(x, int | float) and isinstance(y, int | float) and math.isfinite(x) and math.isfinite(y):
            if (x > 0 or chart.x_scaling == "linear") and (y > 0 or chart.y_scaling == "linear"):
                point = (_scaled(x, chart.x_scaling), _scaled(y, chart.y_scaling))
                lines.setdefault(name, []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def _named(value: object, column: str) -> str:
    """A line's name; numbers say what they count."""
    return f"{value} {column}" if isinstance(value, int | float) else str(value)


def _scaled(value: float, scaling: Scaling) -> float:
    return math.log2(value) if scaling == "log" else float(value)


def _axis(label: str, scaling: Scaling, values: Sequence[float], direction: Direction) -> Axis:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if scaling == "log" and direction == "across":  # as samples and replicas are counted
        return LogAxis(low, high, label)
    if scaling == "log":  # from one round number to another
        around = _round_numbers(2**low / 10, 2**high * 10)
        first = max((value for value in around if value <= 2**low * 1.001), default=2**low)
        last = min((value for value in around if value >= 2**high * 0.999), default=2**high)
        return LogAxis(math.log2(first), math.log2(max(last, first * 2)), label, steps="decimal")
    if direction == "up" or 0 <= low <= 0.2 * high:
        low = min(0.0, low)
    return LinearAxis(low, high + 0.05 * (high - low) if direction == "up" else high, label)


def page(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """A picture made of parts that are SVG already, in the style of the charts."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" class="chart">'
    return f"{head}<style>{_STYLE}</style>{''.join(parts)}</svg>\n"


def _with_legend(svg: str, names: Sequence[str]) -> str:
    """The same picture with room below for what each line is, and colours of its own."""
    tall = _HEIGHT + _ROW * math.ceil(len(names) / _COLUMNS) + 6
    parts, styles = list[str](), list[str]()
    for number, name in enumerate(names):
        x = 20 + number % _COLUMNS * (_WIDTH - 20) // _COLUMNS
        y = _HEIGHT + 10 + number // _COLUMNS * _ROW
        parts.append(f'<path class="line s{number}" d="M{x} {y}h20"/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>')
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        styles.append(f".line.s{number}{{stroke:{colour};stroke-dasharray:{dash or 0}}}.dot.s{number}{{fill:{colour}}}")
    head, _, body = svg.partition(">")
    head = head.replace(f'viewBox="0 0 {_WIDTH} {_HEIGHT}"', f'viewBox="0 0 {_WIDTH} {tall}"')
    head = head.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{tall}" ')
    style = f"<style>{_STYLE}{''.join(styles)}</style>"
    return f"{head}>{style}{body.removesuffix('</svg>')}{''.join(parts)}</svg>\n"
