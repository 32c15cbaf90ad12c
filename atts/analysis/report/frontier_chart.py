"""The chart of accuracy against target tokens, with labels beside the points that have room for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atts.analysis.report.charts import Chart
from atts.analysis.report.numbers import FrontierPoint
from atts.analysis.report.svg import Axis, Plot
from atts.analysis.report.tables import ReportTable

_LEGEND = (
    ("run", "whole runs"),
    ("samples", "votes of fewer rollouts"),
    ("turns", "every rollout cut after so many turns"),
)
_LETTER, _LINE, _CLOSE = 6.6, 13.0, 30.0  # pixels
_PLACES = ((8, 4), (8, -9), (8, 17), (-8, 4), (-8, -9), (-8, 17), (8, -22), (-8, -22), (8, 30), (-8, 30))
"""Where words may stand, the best first: how far right of the point (negative: they end left of it), how far below."""

Box = tuple[float, float, float, float]
"""Left, right, top, bottom."""


def frontier_chart(points: Sequence[FrontierPoint]) -> Chart:
    """Accuracy against what the target wrote."""
    highest = max([point.cost for point in points] + [1e-9])
    plot = Plot(Axis(0, highest * 1.12, "target tokens per problem"), Axis(0, 1, "accuracy"), 760, 320)
    marks = [plot.line([(p.cost, p.accuracy.low), (p.cost, p.accuracy.high)], "whisker") for p in points]
    for kind in ("samples", "turns"):
        line = sorted((p.cost, p.accuracy.value) for p in points if p.kind == kind)
        marks.append(plot.line(line, f"thin {kind}") if line else "")
    for p in points:
        tip = f"{p.label}: accuracy {p.accuracy.value:.3f}, {p.cost:,.1f} target tokens per problem"
        marks.append(plot.dot(p.cost, p.accuracy.value, p.kind, tip, 6 if p.kind == "run" else 4))
    marks += _labels(plot, points)
    kinds = {point.kind for point in points}
    columns = ("what", "kind", "target tokens per problem", "all tokens per problem", "accuracy", "from", "to")
    rows = [(p.label, p.kind, p.cost, p.tokens, p.accuracy.value, p.accuracy.low, p.accuracy.high) for p in points]
    return Chart(
        "Cost and accuracy",
        "Whiskers are 95 % intervals over problems. Votes of fewer rollouts are averages over all choices among those "
        "recorded, at what so many whole rollouts cost; whole runs at what they really cost, votes that ended early "
        "included.",
        plot.drawn("Accuracy against target tokens per problem", marks),
        ReportTable.of("", columns, rows),
        wide=True,
        legend=tuple(entry for entry in _LEGEND if entry[0] in kinds),
    )


def _labels(plot: Plot, points: Sequence[FrontierPoint]) -> Iterator[str]:
    """Labels that lie on no point and on no other label; a point without room for one has its tooltip."""
    dots = [plot.at(p.cost, p.accuracy.value) for p in points]
    taken = [(x - 6, x + 6, y - 6, y + 6) for x, y in dots]
    for p in _by_weight(points):
        across, up = plot.at(p.cost, p.accuracy.value)
        wide = _LETTER * len(p.label)
        for right, below in _places((across, up), dots):
            left = across + right if right > 0 else across + right - wide
            box = (left, left + wide, up + below - _LINE + 3, up + below + 3)
            if _is_free(box, taken, plot):
                taken.append(box)
                yield plot.text(p.cost, p.accuracy.value, p.label, "start" if right > 0 else "end", right, below + 7)
                break


def _places(own: tuple[float, float], dots: Sequence[tuple[float, float]]) -> Sequence[tuple[int, int]]:
    """Words stand on the side where no close point is, or they would seem to be that one's."""
    close = [dot for dot in dots if dot != own and abs(dot[0] - own[0]) < _CLOSE and abs(dot[1] - own[1]) < _CLOSE]
    is_left = bool(close) and all(dot[0] > own[0] for dot in close)
    return sorted(_PLACES, key=lambda place: place[0] > 0) if is_left else _PLACES


def _by_weight(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Whole runs, then the ends of each line, then what lies between."""
    ends = list[FrontierPoint]()
    for kind in ("samples", "turns"):
        line = sorted((p for p in points if p.kind == kind), key=lambda p: p.cost)
        ends += [line[0], line[-1]] if len(line) > 1 else line
    runs = [p for p in points if p.kind == "run"]
    return [*runs, *ends, *(p for p in points if p not in runs and p not in ends)]


def _is_free(box: Box, taken: Sequence[Box], plot: Plot) -> bool:
    left, right, top, bottom = box
    if left < plot.across(plot.x.low) + 2 or right > plot.width or top < 0 or bottom > plot.up(plot.y.low):
        return False
    return not any(left < b and right > a and top < d and bottom > c for a, b, c, d in taken)
