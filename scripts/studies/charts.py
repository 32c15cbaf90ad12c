"""Draws a study's table as one SVG file, readable on light and dark pages and without colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from atts.reports.svg import Axis, Plot

Scaling = Literal["linear", "log"]
Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _ROW, _COLUMNS = 620, 330, 18, 3
_COLOURS = ("#2f6fb3", "#c4511d", "#2b8a4b", "#8a4fc4", "#a8821a", "#c03a6b", "#4a8f9e", "#7a7a7a")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_STYLE = (
    ".chart{font:12px system-ui,sans-serif;background:#fff}.chart text{fill:#333}.chart .grid{stroke:#8884;fill:none}"
    ".chart .line{fill:none;stroke-width:2}.chart .axis{font-weight:600}"
    "@media (prefers-color-scheme:dark){.chart{background:#14171b}.chart text{fill:#dde}}"
)


@dataclass(frozen=True, slots=True)
class Chart:
    """Which columns of a table are drawn: `x` across, `y` up, one line per value of `by` (none: one line)."""

    x: str
    y: str
    by: str = ""
    x_scaling: Scaling = "linear"
    y_scaling: Scaling = "linear"


@dataclass(frozen=True, slots=True)
class LogAxis(Axis):
    """An axis whose values are given as logarithms to base 2 and written as what they are of."""

    def ticks(self, about: int = 5) -> list[float]:
        """Powers of two, thinned out to about so many."""
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        every = max(1, math.ceil((last - first + 1) / (about + 2)))
        return [float(power) for power in range(first, last + 1, every)] or [self.low]

    def written(self, value: float) -> str:
        """The power, not its exponent."""
        return f"{2**value:.3g}"


def draw(title: str, chart: Chart, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The chart of a table; rows without two numbers in the chart's columns are left out.

    :raises ValueError: a column the table does not have.
    """
    lines = series(chart, columns, rows)
    plot = Plot(_axis(chart.x, chart.x_scaling, lines, 0), _axis(chart.y, chart.y_scaling, lines, 1), _WIDTH, _HEIGHT)
    marks: list[str] = []
    for number, (name, points) in enumerate(lines.items()):
        marks.append(plot.line(points, f"s{number}"))
        marks += [plot.dot(x, y, f"s{number}", name, 3) for x, y in points]
    return _with_legend(plot.drawn(title, marks), list(lines))


def series(
    chart: Chart, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> Mapping[str, list[tuple[float, float]]]:
    """The points of each line, on the scales of the chart, sorted from left to right."""
    across, up = columns.index(chart.x), columns.index(chart.y)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, y = row[across], row[up]
        name = str(row[columns.index(chart.by)]) if chart.by else chart.y
        if isinstance(x, int | float) and isinstance(y, int | float) and math.isfinite(x) and math.isfinite(y):
            if (x > 0 or chart.x_scaling == "linear") and (y > 0 or chart.y_scaling == "linear"):
                lines.setdefault(name, []).append((_scaled(x, chart.x_scaling), _scaled(y, chart.y_scaling)))
    return {name: sorted(points) for name, points in lines.items()}


def _scaled(value: float, scaling: Scaling) -> float:
    return math.log2(value) if scaling == "log" else float(value)


def _axis(label: str, scaling: Scaling, lines: Mapping[str, Points], place: Literal[0, 1]) -> Axis:
    values = [point[place] for points in lines.values() for point in points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if scaling == "log":
        return LogAxis(math.floor(low + 0.01) if place else low, math.ceil(high - 0.01) if place else high, label)
    return Axis(min(0.0, low) if place else low, high + 0.05 * (high - min(0.0, low)) if place else high, label)


def _with_legend(svg: str, names: Sequence[str]) -> str:
    """The same picture with room below for what each line is, and colours of its own."""
    tall = _HEIGHT + _ROW * math.ceil(len(names) / _COLUMNS) + 6
    parts: list[str] = []
    for number, name in enumerate(names):
        x = 20 + number % _COLUMNS * (_WIDTH - 20) // _COLUMNS
        y = _HEIGHT + 10 + number // _COLUMNS * _ROW
        parts.append(f'<path class="line s{number}" d="M{x} {y}h20"/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>')
    head, _, body = svg.partition(">")
    head = head.replace(f'viewBox="0 0 {_WIDTH} {_HEIGHT}"', f'viewBox="0 0 {_WIDTH} {tall}"')
    head = head.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{tall}" ')
    style = f"<style>{_STYLE}{''.join(_colours(number) for number in range(len(names)))}</style>"
    return f"{head}>{style}{body.removesuffix('</svg>')}{''.join(parts)}</svg>\n"


def _colours(number: int) -> str:
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return f".line.s{number}{{stroke:{colour};stroke-dasharray:{dash or 0}}}.dot.s{number}{{fill:{colour}}}"
