"""The chart of a zoo: a row for each model and a dot for each of its blocks, coloured by whether it
is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atts.analysis.report.charts import Chart
from atts.analysis.report.figures import standalone
from atts.analysis.report.svg import Axis, Plot
from atts.files import write_out

Rows = Sequence[tuple[str, Mapping[str, int]]]
"""Models by name: how many models have each of their blocks, by its place."""


def save_sharing(rows: Rows, path: Path) -> None:
    """Write the picture as an SVG file.

    :raises StorageError: the disk refuses.
    """
    write_out(path, standalone(sharing_chart(rows)).encode())


def sharing_chart(rows: Rows) -> Chart:
    """Blocks from left to right as a token passes them, models from top to bottom."""
    most = max([len(parts) for _, parts in rows], default=1)
    across = Axis(
        -0.5,
        most - 0.5,
        "block, as a token passes them (shared; red: the model's own)",
        values="whole",
    )
    plot = Plot(
        across, Axis(-0.8, len(rows) - 0.2, "models", values="whole"), 760, 110 + 34 * len(rows)
    )
    data = (
        ("model", "block", "models"),
        [(name, *part) for name, parts in rows for part in parts.items()],
    )
    return replace(
        Chart.of("Blocks of a zoo", "Who shares which block.", plot, _marks(plot, rows), data),
        wide=True,
    )


def _marks(plot: Plot, rows: Rows) -> Iterator[str]:
    for row, (name, parts) in enumerate(rows):
        up = len(rows) - 1 - row
        for at, (place, count) in enumerate(parts.items()):
            tip = f"{name}, {place}: {count} model{'s' if count > 1 else ''}"
            yield plot.dot(at, up, "run" if count > 1 else "off", tip, radius=5)
        yield plot.text(-0.4, up, name, drop=-5)
