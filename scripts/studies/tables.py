"""Tables of results, plain values without a library: as Markdown, and as the JSON that pages are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from atts.evaluators import Estimate

Scaling = Literal["linear", "log"]
Cell = str | int | float | None
Row = tuple[Cell, ...]
Shown = Literal["rows", "chart only"]


@dataclass(frozen=True, slots=True)
class Chart:
    """Which columns of a table are drawn: `x` across, `y` up, one line per value of `by` (none: one line).

    With a `value`, cells of that column's colour instead, a panel per value of `by`, the column `note` written in them.
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
    shown: Shown = "rows"  # in Markdown; JSON has everything
    headline: str = ""  # what BENCHMARKS.md says of it

    @classmethod
    def of(
        cls,
        title: str,
        header: str,
        rows: Iterable[Row],
        *notes: str,
        chart: Chart | None = None,
        shown: Shown = "rows",
        headline: str = "",
    ) -> Table:
        """A table whose header is written as in Markdown: "method | seconds".

        :raises AssertionError: a row has another number of cells than the header.
        """
        columns, held = tuple(name.strip() for name in header.split("|")), tuple(rows)
        assert all(len(row) == len(columns) for row in held), f"{title}: {header}: a row of another length"
        return cls(title, columns, held, notes, chart=chart, shown=shown, headline=headline)

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


def points(estimate: Estimate, digits: int = 2) -> str:
    """A difference in points with its interval."""
    value, low, high = (f"{100 * each:+.{digits}f}" for each in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def figure(value: float, digits: int = 4) -> str:
    """A number with the digits that count; large ones in full, as people write them.

    >>> figure(0.123456), figure(11_151.7), figure(2713.4, 3), figure(9999.7)
    ('0.1235', '11,150', '2,710', '10,000')
    """
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):,.0f}" if math.isfinite(value) and "e+" in rounded else rounded


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return figure(cell) if math.isfinite(cell) else "-"
    return "-" if cell is None else str(cell).replace("|", "\\|")
