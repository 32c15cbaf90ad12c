"""Draws a table as panels of coloured cells: green above 1, red below, grey where nothing was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_LABELS = 140
_CELL = 66
_TALL = 44
_HEAD = 46
_GAP = 22
_FOOT = 26
_STYLE = (
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
_FULL = 3.0  # a factor, or one over it, that has the whole colour


@dataclass(frozen=True, slots=True)
class HeatCell:
    """What one cell says: its value where there is one, and a line below it."""

    value: float | None
    note: str


Panel = dict[tuple[str, str], HeatCell]
"""Cells by row and column."""


def draw_map(title: str, across: str, panels: dict[str, Panel]) -> str:
    """Panels two in a row, as one SVG file."""
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
    words = "Green: atts is faster than the best alternative, which stands below. Red: it is not. Grey: not yet measured."
    parts.append(f'<text x="10" y="{height - 8}">{escape(words)}</text>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" class="chart">'
    return f"{head}<style>{_STYLE}</style>{''.join(parts)}</svg>\n"


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
    """From pale at 1 to the whole colour at a factor of 3 either way."""
    share = min(1.0, abs(math.log(max(value, 1e-9))) / math.log(_FULL))
    ends = _GREEN if value >= 1 else _RED
    return "#" + "".join(
        f"{round(pale + (0.15 + 0.85 * share) * (end - pale)):02x}"
        for pale, end in zip(_PALE, ends, strict=True)
    )
