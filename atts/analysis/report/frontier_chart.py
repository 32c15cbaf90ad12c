"""The chart of accuracy against target tokens, with labels beside the points that have room for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from atts.analysis.report.charts import Chart
from atts.analysis.report.numbers import THIS_RUN, FrontierPoint
from atts.analysis.report.svg import HEIGHT, WIDTH, Axis, Plot

_LEGEND = (
    ("own", THIS_RUN),
    ("run", "other runs"),
    ("samples", "votes of fewer rollouts"),
    ("turns", "every rollout cut after so many turns"),
)
_LETTER = 6.6
_LINE = 13.0
_CLOSE = 30.0  # pixels
_PLACES = (
    (8, 4),
    (8, -9),
    (8, 17),
    (-8, 4),
    (-8, -9),
    (-8, 17),
    (8, -22),
    (-8, -22),
    (8, 30),
    (-8, 30),
)
"""Where words may stand, the best first: how far right of the point (negative: they end left of
it), how far below.
"""

_FLOOR = 0.02  # errors below it are not told apart: the axis ends at accuracy 1
_ROUND = (
    1.0,
    0.0,
    0.9,
    0.5,
    0.95,
    0.8,
    0.98,
    0.7,
    0.3,
    0.97,
    0.6,
    0.4,
    0.2,
    0.1,
    0.85,
    0.99,
    0.75,
    0.94,
    0.96,
    0.92,
)
Box = tuple[float, float, float, float]
"""Left, right, top, bottom."""


def frontier_chart(points: Sequence[FrontierPoint]) -> Chart:
    """Accuracy against what the target wrote, of runs, of fewer rollouts and of fewer turns."""
    caption = (
        "Whiskers are 95 % intervals over problems. Votes of fewer rollouts are averages over all "
        "choices among those "
        "recorded, at what so many whole rollouts cost; whole runs at what they really cost, votes "
        "that ended early "
        "included. The axis is stretched towards 1, where runs differ by few answers."
    )
    kinds = {"own" if point.label == THIS_RUN else point.kind for point in points}
    legend = tuple(entry for entry in _LEGEND if entry[0] in kinds)
    return replace(
        _drawn("Cost and accuracy", caption, points, StretchedAxis, 760), wide=True, legend=legend
    )


def runs_chart(points: Sequence[FrontierPoint]) -> Chart | None:
    """The picture of the first screen: this run and those it is compared with; None where none is
    graded.
    """
    runs = [point for point in points if point.kind == "run"]
    if not runs:
        return None
    caption = (
        "Further up is better, further left is cheaper. Whiskers are 95 % intervals over problems."
    )
    return _drawn(
        "Right answers against what the large model wrote", caption, runs, PlainAxis, WIDTH
    )


@dataclass(frozen=True, slots=True)
class PlainAxis(Axis):
    """An axis of accuracies from below the lowest whisker to above the highest one."""

    @staticmethod
    def place(accuracy: float) -> float:
        """Where an accuracy lies on the axis."""
        return accuracy

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> PlainAxis:
        """An axis that holds these points with their intervals."""
        low = min(point.accuracy.low for point in points)
        high = max(point.accuracy.high for point in points)
        pad = max(0.005, 0.06 * (high - low))
        return cls(cls.place(max(0.0, low - pad)), cls.place(min(1.0, high + pad)), "accuracy")


@dataclass(frozen=True, slots=True)
class StretchedAxis(PlainAxis):
    """An axis on which halving the errors is the same step everywhere but at its very end."""

    @staticmethod
    def place(accuracy: float) -> float:
        """The logarithm of the errors, a floor under them, upside down.

        >>> round(StretchedAxis.place(0.96) - StretchedAxis.place(0.9), 2), round(StretchedAxis.place(1) - 0, 2)
        (0.3, 1.7)
        """
        return -math.log10(1 + _FLOOR - accuracy)

    def ticks(self, about: int = 5) -> list[float]:
        """The roundest accuracies that have room beside each other."""
        found = list[float]()
        for accuracy in _ROUND:
            place = self.place(accuracy)
            if self.low <= place <= self.high and all(
                abs(place - other) > self._room(about) for other in found
            ):
                found.append(place)
        return sorted(found)

    def written(self, value: float) -> str:
        """The accuracy at a place."""
        return f"{round(1 + _FLOOR - 10**-value, 6):g}"

    def _room(self, about: int) -> float:
        return (self.high - self.low) / (2.2 * about)


def _drawn(
    title: str, caption: str, points: Sequence[FrontierPoint], kind: type[PlainAxis], width: int
) -> Chart:
    highest = max([point.cost for point in points] + [1e-9])
    axis = kind.of(points)
    plot = Plot(
        Axis(0, highest * 1.12, "target tokens per problem"),
        axis,
        width,
        320 if width > WIDTH else HEIGHT,
    )
    marks = list(_marks(plot, points, axis.place))
    columns = (
        "what",
        "kind",
        "target tokens per problem",
        "all tokens per problem",
        "accuracy",
        "from",
        "to",
    )
    rows = [
        (p.label, p.kind, p.cost, p.tokens, p.accuracy.value, p.accuracy.low, p.accuracy.high)
        for p in points
    ]
    return Chart.of(
        title, caption, plot, marks, (columns, rows), "Accuracy against target tokens per problem"
    )


def _marks(
    plot: Plot, points: Sequence[FrontierPoint], up: Callable[[float], float]
) -> Iterator[str]:
    """Whiskers, lines, dots, then the labels over them."""
    for p in points:
        yield plot.line([(p.cost, up(p.accuracy.low)), (p.cost, up(p.accuracy.high))], "whisker")
    for kind in ("samples", "turns"):
        line = sorted((p.cost, up(p.accuracy.value)) for p in points if p.kind == kind)
        yield plot.line(line, f"thin {kind}") if line else ""
    places = [(p.cost, up(p.accuracy.value)) for p in points]
    for p, place in zip(points, places, strict=True):
        tip = f"{p.label}: accuracy {p.accuracy.value:.3f}, {p.cost:,.1f} target tokens per problem"
        yield plot.dot(
            *place, "own" if p.label == THIS_RUN else p.kind, tip, 6 if p.kind == "run" else 4
        )
    yield from _labels(plot, points, dict(zip(points, places, strict=True)))


def _labels(
    plot: Plot, points: Sequence[FrontierPoint], places: Mapping[FrontierPoint, tuple[float, float]]
) -> Iterator[str]:
    """Labels that lie on nothing and begin nearest to their own point; a point without room has its
    tooltip.
    """
    dots = [plot.at(*places[p]) for p in points]
    taken = [(x - 6, x + 6, y - 6, y + 6) for x, y in dots]
    for p in _by_weight(points):
        across, up = plot.at(*places[p])
        wide = _LETTER * len(p.label)
        for right, below in _places((across, up), dots):
            left = across + right if right > 0 else across + right - wide
            box = (left, left + wide, up + below - _LINE + 3, up + below + 3)
            begin = (left if right > 0 else left + wide, up + below - _LINE / 2 + 3)
            if _is_free(box, taken, plot) and min(dots, key=partial(math.dist, begin)) == (
                across,
                up,
            ):
                taken.append(box)
                yield plot.text(
                    *places[p], p.label, "start" if right > 0 else "end", right, below + 7
                )
                break


def _places(
    own: tuple[float, float], dots: Sequence[tuple[float, float]]
) -> Sequence[tuple[int, int]]:
    """Words stand on the side where no close point is, or they would seem to be that one's."""
    close = [
        dot
        for dot in dots
        if dot != own and abs(dot[0] - own[0]) < _CLOSE and abs(dot[1] - own[1]) < _CLOSE
    ]
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
    if (
        left < plot.across(plot.x.low) + 2
        or right > plot.width
        or top < 0
        or bottom > plot.up(plot.y.low)
    ):
        return False
    return not any(left < b and right > a and top < d and bottom > c for a, b, c, d in taken)
