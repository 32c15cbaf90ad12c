"""The charts of a report, and the axes and plots with which they are drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Literal

from atts.analysis.reports.numbers import (
    THIS_RUN,
    DriftTest,
    FrontierPoint,
    GroupRate,
    RateControl,
    TimeBreakdown,
    Uniformity,
)
from atts.analysis.reports.rate_control import LabelledScores
from atts.analysis.reports.tables import ReportTable
from atts.calibration import coin_band
from atts.errors import counted

WIDTH = 460
HEIGHT = 260
_LEFT = 52
_RIGHT = 14
_TOP = 14
_BOTTOM = 44


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a plot: its range of values, and its label."""

    low: float
    high: float
    label: str
    # "whole": ticks only at integers, for example on an axis of turns
    values: Literal["any", "whole"] = "any"

    def ticks(self, about: int = 5) -> list[float]:
        """Return roughly `about` round values of the axis at which to draw ticks.

        >>> Axis(0, 11, "turn", values="whole").ticks(), Axis(0, 3, "turn", values="whole").ticks()
        ([0.0, 5.0, 10.0], [0.0, 1.0, 2.0, 3.0])
        """
        if not self.high > self.low:
            return [self.low]
        whole = self.values == "whole"
        rough = max((self.high - self.low) / about, 1.0 if whole else 0.0)
        power = 10.0 ** math.floor(math.log10(rough))
        units = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
        step = next(power * unit for unit in units if power * unit >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def written(self, value: float) -> str:
        """Return the label of a tick at this value."""
        return f"{round(value, 10):g}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot area with two axes, which converts values to pixel positions."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a pair of values in pixels, clipped to the frame."""
        return self.across(x), self.up(y)

    def across(self, x: float) -> float:
        """Return the horizontal position of a value in pixels from the left."""
        return _LEFT + _part(x, self.x) * (self.width - _LEFT - _RIGHT)

    def up(self, y: float) -> float:
        """Return the vertical position of a value in pixels from the top."""
        return self.height - _BOTTOM - _part(y, self.y) * (self.height - _TOP - _BOTTOM)

    def drawn(self, title: str, marks: Iterable[str]) -> str:
        """Return the whole SVG picture, with a title for screen readers."""
        body = "".join([*self._grid(), *marks])
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(title)}" '
            f'class="chart">{body}</svg>'
        )

    def _grid(self) -> Iterable[str]:
        bottom = self.height - _BOTTOM
        right = self.width - _RIGHT
        for value in self.x.ticks():
            x = _n(self.across(value))
            yield f'<path class="grid" d="M{x} {_TOP}V{bottom}"/>'
            yield (
                f'<text x="{x}" y="{bottom + 17}" '
                f'text-anchor="middle">{escape(self.x.written(value))}</text>'
            )
        for value in self.y.ticks():
            y = _n(self.up(value))
            yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
            yield (
                f'<text x="{_LEFT - 7}" y="{float(y) + 4:g}" '
                f'text-anchor="end">{escape(self.y.written(value))}</text>'
            )
        middle = (_LEFT + right) / 2
        foot = self.height - 6
        yield (
            f'<text class="axis" x="{middle:g}" y="{foot}" '
            f'text-anchor="middle">{escape(self.x.label)}</text>'
        )
        height = (_TOP + bottom) / 2
        yield (
            f'<text class="axis" transform="translate(13 {height:g}) rotate(-90)" '
            f'text-anchor="middle">'
            f"{escape(self.y.label)}</text>"
        )

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> str:
        """Return a line through the points."""
        return f'<path class="line {kind}" d="{_path(self.at(x, y) for x, y in points)}"/>'

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> str:
        """Return the filled area between two lines."""
        there = [self.at(x, y) for x, y in zip(xs, lows, strict=True)]
        back = [self.at(x, y) for x, y in zip(xs, highs, strict=True)]
        return f'<path class="band" d="{_path([*there, *reversed(back)])}Z"/>'

    def bar(self, left: float, right: float, top: float, kind: str, tip: str) -> str:
        """Return a bar from zero up to a value, with a tooltip."""
        x, y = self.at(left, top)
        wide = self.across(right) - x
        tall = self.up(0.0) - y
        return (
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(tall)}">'
            f"<title>{escape(tip)}</title></rect>"
        )

    def dot(self, x: float, y: float, kind: str, tip: str, radius: float = 4) -> str:
        """Return a point with a tooltip."""
        across, up = self.at(x, y)
        return (
            f'<circle class="dot {kind}" cx="{_n(across)}" cy="{_n(up)}" r="{radius:g}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        shift: float = 0.0,
        drop: float = 0.0,
    ) -> str:
        """Return a text label at a position of the plot, `shift` pixels to the right and `drop`
        pixels below it.
        """
        across, up = self.at(x, y)
        place = f'x="{_n(across + shift)}" y="{_n(up - 7 + drop)}"'
        return f'<text class="label" {place} text-anchor="{anchor}">{escape(text)}</text>'


def _part(value: float, axis: Axis) -> float:
    if axis.high == axis.low:
        return 0.5
    return min(1.0, max(0.0, (value - axis.low) / (axis.high - axis.low)))


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


Data = tuple[Sequence[str], Iterable[Sequence[object]]]
"""The numbers that a chart shows, as a table: the names of the columns, and the rows."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its description and its numbers."""

    title: str
    caption: str
    picture: str
    data: ReportTable
    wide: bool = False
    # one pair for each entry of the legend: the CSS class that sets the colour, and the entry's
    # text
    legend: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, title: str, caption: str, plot: Plot, marks: Iterable[str], data: Data, label: str = ""
    ) -> Chart:
        """Build a chart from a plot and its marks.

        Screen readers read `label` aloud; it defaults to the title.
        """
        columns, rows = data
        return cls(
            title, caption, plot.drawn(label or title, marks), ReportTable.of("", columns, rows)
        )


def calibration_charts(control: RateControl) -> list[Chart]:
    """Draw the charts of a run's calibration: the rate by turn, by question and over time, p-values
    and drift. A chart without data is left out.
    """
    charts = [_by_turn(control), over_time_chart(control)]
    if control.questions > 1 and control.decisions > control.questions:
        charts.insert(1, _by_question(control))
    if control.p_values is not None:
        charts += [reliability_chart(control.p_values), _p_histogram(control.p_values)]
    if control.drift is not None:
        charts.append(_drift(control.drift))
    return charts


def _by_turn(control: RateControl) -> Chart:
    shown = control.turns[:24]
    plot = Plot(
        Axis(-0.5, len(shown) - 0.5, "turn", values="whole"), _share_axis(shown, control.nominal)
    )
    marks = [
        plot.band([n - 0.5, n + 0.5], [g.low, g.low], [g.high, g.high])
        for n, g in enumerate(shown)
        if control.nominal
    ]
    marks += [
        plot.bar(
            n - 0.3, n + 0.3, group.share,
            "bar off" if control.controls_turns and not group.inside else "bar", _tip(group),
        )
        for n, group in enumerate(shown)
    ]  # fmt: skip
    words = "Each bar is the share of a turn's chunks that were escalated."
    if control.nominal is not None:
        marks.append(
            plot.line([(-0.5, control.nominal), (len(shown) - 0.5, control.nominal)], "nominal")
        )
        words += (
            " If every decision were a coin toss at the nominal rate, all bars would be inside "
            "the grey band with 95 % probability."
        )
        if not control.controls_turns:
            words += " This gate does not keep the rate in each turn, so bars may be outside."
    return Chart.of(
        "Rate by turn", words, plot, marks, _group_data(control.turns), "Realised rate by turn"
    )


def _group_data(groups: Sequence[GroupRate]) -> Data:
    columns = ("group", "decisions", "escalated", "rate", "band from", "to")
    return columns, [(g.name, g.decisions, g.escalated, g.share, g.low, g.high) for g in groups]


def _tip(group: GroupRate) -> str:
    return f"{group.name}: {group.escalated} of {group.decisions} escalated ({group.share:.3f})"


def _share_axis(groups: Sequence[GroupRate], nominal: float | None) -> Axis:
    top = max([group.share for group in groups] + [2 * (nominal or 0.0), 0.1])
    return Axis(0.0, min(1.0, top * 1.08), "share escalated")


_MOST_DOTS = 1000  # largest number of dots in the chart of questions


def _by_question(control: RateControl) -> Chart:
    """Draw one dot per question, ordered by realised rate.

    A dot has another colour if a coin with the nominal rate would rarely give the realised rate of
    its question. With very many questions, only every n-th question has a dot.
    """
    everything = sorted(control.by_question, key=lambda group: (group.share, group.name))
    # If there are more questions, only every n-th question gets a dot. This does not change the
    # shape of the curve.
    step = -(-len(everything) // _MOST_DOTS) or 1
    ordered = everything[::step]
    plot = Plot(
        Axis(0, max(1, len(everything)), "questions, ordered by rate", values="whole"),
        _share_axis(ordered, control.nominal),
    )
    marks = list[str]()
    if control.nominal is not None:
        marks.append(
            plot.line([(0, control.nominal), (len(everything), control.nominal)], "nominal")
        )
    radius = 4.0 if len(ordered) <= 60 else 2.5 if len(ordered) <= 200 else 1.5
    marks += [
        plot.dot(
            n * step + 0.5, group.share, "plain" if group.inside else "off", _tip(group), radius
        )
        for n, group in enumerate(ordered)
    ]
    dots = (
        "Each dot is a question" if step == 1 else f"Only one of every {step} questions has a dot"
    )
    words = (
        f"{dots}. Root mean square distance between the questions' rates and the nominal rate: "
        f"{control.question_rms:.3f}"
    )
    words += (
        f"; coin tosses at the nominal rate would give {control.coin_rms:.3f}."
        if control.nominal is not None
        else "."
    )
    data = _group_data(ordered if step > 1 else control.by_question)
    return Chart.of("Rate by question", words, plot, marks, data, "Realised rate by question")


def over_time_chart(control: RateControl) -> Chart:
    """Draw the realised rate against the number of decisions."""
    moments = control.moments
    shares = [moment.share for moment in moments] + [
        m.rolling for m in moments if m.rolling is not None
    ]
    top = max([*shares, 2 * (control.nominal or 0.0), 0.1]) * 1.08
    plot = Plot(
        Axis(0, control.decisions, "decisions", values="whole"),
        Axis(0, min(1.0, top), "share escalated"),
    )
    marks = list[str]()
    if control.nominal is not None:
        marks.append(
            plot.band(
                [m.decisions for m in moments], [m.low for m in moments], [m.high for m in moments]
            )
        )
        marks.append(
            plot.line([(0, control.nominal), (control.decisions, control.nominal)], "nominal")
        )
    marks.append(
        plot.line(
            [(m.decisions, m.rolling) for m in moments if m.rolling is not None] or [(0, 0)], "thin"
        )
    )
    marks.append(plot.line([(m.decisions, m.share) for m in moments], "main"))
    words = (
        "Thick line: share over all decisions so far. Thin line: share over the latest "
        f"{control.window} decisions. Band: if each decision were an independent coin toss, the "
        "thick line would be inside the band with 95 % probability."
    )
    rows = [
        (m.decisions, m.share, m.low, m.high, m.rolling)
        for m in moments[:: max(1, len(moments) // 20)]
    ]
    data = ("decisions", "rate so far", "band from", "to", "latest"), rows
    return Chart.of("Rate over time", words, plot, marks, data, "Realised rate over time")


def reliability_chart(found: Uniformity) -> Chart:
    """Draw the escalation rate computed from the p-values against the nominal rate."""
    plot = Plot(Axis(0, 1, "nominal rate"), Axis(0, 1, "rate computed from the p-values"))
    curve = [(1 - p, 1 - share) for p, share in reversed(found.curve)]
    grid = [asked for asked, _ in curve]
    marks = [
        plot.band(
            grid, [max(0.0, x - found.band) for x in grid], [min(1.0, x + found.band) for x in grid]
        ),
        plot.line([(0, 0), (1, 1)], "nominal"),
        plot.line(curve, "main"),
    ]
    words = (
        "On the dashed line, p-values are uniform, so the realised rate equals the nominal "
        f"rate. The largest distance between the curve and this line is {found.distance:.3f}, "
        f"{'inside' if found.inside else 'OUTSIDE'} the simultaneous 95 % band of "
        f"±{found.band:.3f} for {found.n:,} p-values (effective sample size: "
        f"{found.effective:,.0f}). A rate scope with feedback corrects the rate even if the "
        "p-values are not uniform, so its guarantee does not depend on this chart."
    )
    data = ("nominal rate", "rate computed from the p-values"), curve[::5]
    return Chart.of(
        "Reliability",
        words,
        plot,
        marks,
        data,
        "Rate computed from the p-values, against the nominal rate",
    )


def _p_histogram(found: Uniformity) -> Chart:
    bins = len(found.counts)
    low, high = (
        found.n * share
        for share in coin_band(max(1, round(found.effective)), 1 / bins, 1 - 0.05 / bins)
    )
    plot = Plot(Axis(0, 1, "p-value"), Axis(0, max([*found.counts, high, 1]) * 1.1, "decisions"))
    marks = [plot.band([0, 1], [low, low], [high, high])]
    marks += [
        plot.bar(
            n / bins, (n + 0.9) / bins, count, "bar" if low <= count <= high else "bar off",
            f"p in [{n / bins:.2f}, {(n + 1) / bins:.2f}]: {count}",
        )
        for n, count in enumerate(found.counts)
    ]  # fmt: skip
    marks.append(plot.line([(0, found.n / bins), (1, found.n / bins)], "nominal"))
    words = (
        "A p-value near 1 means that the chunk's score is worse than those of most earlier "
        "chunks. If p-values were uniform, every bar would end near the dashed line. With "
        f"{found.effective:,.0f} independent uniform p-values, all bars would be inside the "
        "grey band with 95 % probability."
    )
    rows = [(n / bins, (n + 1) / bins, count, low, high) for n, count in enumerate(found.counts)]
    columns = ("from", "to", "decisions", "band from", "band to")
    return Chart.of("Histogram of p-values", words, plot, marks, (columns, rows))


def labelled_chart(found: LabelledScores) -> Chart:
    """Draw the share of chunks whose rollouts are correct against the chunks' p-values."""
    plot = Plot(
        Axis(0, 1, "p-value of the chunk"), Axis(0, 1, "share of chunks from correct rollouts")
    )
    places = [((one.low + one.high) / 2, one.right) for one in found.bins]
    marks = [
        plot.line([(place, right.low), (place, right.high)], "whisker") for place, right in places
    ]
    marks.append(plot.line([(place, right.value) for place, right in places], "thin"))
    marks += [plot.dot(place, right.value, "plain", right.brief()) for place, right in places]
    words = (
        f"Fewer than two questions have both wrong and correct rollouts, so the "
        f"{counted(found.labelled, 'chunk')} cannot show whether the score finds wrong rollouts."
    )
    if not math.isnan(found.auroc.value):
        words = (
            "If the score finds wrong rollouts, chunks with large p-values come from correct "
            "rollouts less often than chunks with small p-values. Take one chunk of a wrong "
            "rollout and one chunk of a correct rollout of the same question. The chunk of the "
            f"wrong rollout has the worse score with probability {found.auroc.brief()} (coin: "
            f"0.5), measured on {counted(found.labelled, 'chunk')}. Whiskers are 95 % intervals "
            "over questions."
        )
    rows = [(one.low, one.high, one.right, one.right.n_samples) for one in found.bins]
    columns = ("p-value from", "to", "share of chunks from correct rollouts", "chunks")
    return Chart.of("Accuracy by p-value", words, plot, marks, (columns, rows))


def _drift(found: DriftTest) -> Chart:
    low = min(*found.path, -1.0)
    high = max(*found.path, found.alarm)
    thin = max(1, len(found.path) // 1000)
    plot = Plot(
        Axis(0, found.questions, "questions", values="whole"),
        Axis(low * 1.05, high * 1.1, "log10 of the capital"),
    )
    marks = [
        plot.line([(0, found.alarm), (found.questions, found.alarm)], "alarm"),
        plot.line([(0, 0), (found.questions, 0)], "nominal"),
        plot.line(
            [(0, 0.0), *((n + 1, found.path[n]) for n in range(0, len(found.path), thin))], "main"
        ),
    ]
    said = "reached" if found.peak >= found.alarm else "stayed below"
    words = (
        "A martingale bets that later questions have different scores from earlier ones. If "
        "the questions are exchangeable, the probability that its capital ever reaches the "
        f"upper line ({10**found.alarm:,.0f} times the initial capital) is at most 1 %. The "
        f"capital {said} the line: at its peak it was {10 ** min(found.peak, 9):,.1f} times the "
        "initial capital."
    )
    step = max(1, len(found.path) // 20)
    rows = [(n + 1, found.path[n]) for n in range(0, len(found.path), step)]
    return Chart.of(
        "Drift",
        words,
        plot,
        marks,
        (("questions", "log10 of the capital"), rows),
        "Drift martingale",
    )


def timeline_chart(found: TimeBreakdown) -> Chart:
    """Return the data from which the page's template draws the timeline of all engines."""
    columns = (
        "engine",
        "largest number of calls at the same time",
        "mean number of calls in flight",
        "share of time busy",
        "longest idle time (s)",
    )
    rows = [
        (e.engine, e.peak, e.mean_in_flight, e.busy_share, e.longest_bubble) for e in found.engines
    ]
    return Chart(
        "Engines over time",
        "Filled area: calls in flight. Line: calls waiting for a slot. Gap: the engine is "
        "idle. Rows below the area: the calls in flight, coloured by stage. Each row shows one "
        "call at a time; only the first rows are drawn.",
        "",
        ReportTable.of("", columns, rows),
        wide=True,
        legend=tuple((css_class(stage.name), stage.name) for stage in found.stages),
    )


def css_class(name: str) -> str:
    """Convert a name to a CSS class name: replace all characters except letters and digits by
    hyphens.

    >>> css_class('draft "2"')
    'draft--2-'
    """
    return "".join(letter if letter.isalnum() else "-" for letter in name)


_LEGEND = (
    ("own", THIS_RUN),
    ("run", "other runs"),
    ("samples", "votes over fewer rollouts"),
    ("turns", "rollouts cut after the stated number of turns"),
)
LETTER = 6.6  # mean width of a letter in pixels
LINE = 13.0  # height of a line of text in pixels
# two points are close if their distances in x and in y are both below this number of pixels
_CLOSE = 30.0
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
"""The possible positions of a label, best first, as offsets in pixels: to the right of its point,
and below its point.

If the first offset is negative, the label ends to the left of the point.
"""

# This constant is added to each error rate before the logarithm is taken. Without it, accuracy 1
# would be at infinity.
_FLOOR = 0.02
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
"""The left, right, top and bottom edges of a rectangle, in pixels."""


def frontier_chart(points: Sequence[FrontierPoint]) -> Chart:
    """Draw accuracy against the target's tokens, for complete runs and for votes with fewer
    rollouts or turns.
    """
    caption = (
        "Whiskers are 95 % intervals over problems. A point for fewer rollouts is an average over "
        "all subsets of that size, with the mean cost of that many complete rollouts. A point for "
        "a complete run has the recorded cost, without the tokens that early stopping saved. The "
        "accuracy axis is stretched near 1, where runs differ by only a few answers."
    )
    kinds = {"own" if point.label == THIS_RUN else point.kind for point in points}
    legend = tuple(entry for entry in _LEGEND if entry[0] in kinds)
    return replace(
        _drawn("Cost and accuracy", caption, points, StretchedAxis, 760), wide=True, legend=legend
    )


def runs_chart(points: Sequence[FrontierPoint]) -> Chart | None:
    """Draw accuracy against cost for this run and for each run that it is compared with. Return
    None if no run is graded.
    """
    runs = [point for point in points if point.kind == "run"]
    if not runs:
        return None
    caption = (
        "Points higher up are more accurate, and points further left are cheaper. Whiskers are "
        "95 % intervals over problems."
    )
    return _drawn(
        "Accuracy against the number of tokens written by the target",
        caption,
        runs,
        PlainAxis,
        WIDTH,
    )


@dataclass(frozen=True, slots=True)
class PlainAxis(Axis):
    """An axis of accuracies, from below the lowest whisker to above the highest whisker."""

    @staticmethod
    def place(accuracy: float) -> float:
        """Return the accuracy unchanged, because this axis is linear."""
        return accuracy

    @classmethod
    def of(cls, points: Sequence[FrontierPoint]) -> PlainAxis:
        """Make an axis whose range contains these points with their intervals."""
        low = min(point.accuracy.low for point in points)
        high = max(point.accuracy.high for point in points)
        pad = max(0.005, 0.06 * (high - low))
        return cls(cls.place(max(0.0, low - pad)), cls.place(min(1.0, high + pad)), "accuracy")


@dataclass(frozen=True, slots=True)
class StretchedAxis(PlainAxis):
    """An axis with a logarithmic scale of the error rate.

    Halving the error rate always covers the same distance, except near accuracy 1.
    """

    @staticmethod
    def place(accuracy: float) -> float:
        """Return -log10 of the error rate; a small constant is added to the rate, so the result is
        finite at accuracy 1.

        >>> round(StretchedAxis.place(0.96) - StretchedAxis.place(0.9), 2), round(StretchedAxis.place(1) - 0, 2)
        (0.3, 1.7)
        """
        return -math.log10(1 + _FLOOR - accuracy)

    def ticks(self, about: int = 5) -> list[float]:
        """Return the axis positions of ticks at round accuracies, as many as there is room for."""
        chosen = list[float]()
        for accuracy in _ROUND:
            place = self.place(accuracy)
            if self.low <= place <= self.high and all(
                abs(place - other) > self._room(about) for other in chosen
            ):
                chosen.append(place)
        return sorted(chosen)

    def written(self, value: float) -> str:
        """Return the accuracy at this axis position, as the label of a tick."""
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
    """Yield whiskers, lines and dots; yield labels last, so that they are drawn on top."""
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
    """Yield labels that are as near as possible to their points, and do not cover other parts of
    the chart.

    If there is no room for a point's label, the point has only a tooltip.
    """
    dots = [plot.at(*places[p]) for p in points]
    taken = [(x - 6, x + 6, y - 6, y + 6) for x, y in dots]
    for p in _by_weight(points):
        across, up = plot.at(*places[p])
        wide = LETTER * len(p.label)
        for right, below in _places((across, up), dots):
            left = across + right if right > 0 else across + right - wide
            box = (left, left + wide, up + below - LINE + 3, up + below + 3)
            begin = (left if right > 0 else left + wide, up + below - LINE / 2 + 3)
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
    """Return the offsets to try for a label, best first. If all nearby points are to the right,
    offsets to the left are first.
    """
    close = [
        dot
        for dot in dots
        if dot != own and abs(dot[0] - own[0]) < _CLOSE and abs(dot[1] - own[1]) < _CLOSE
    ]
    is_left = bool(close) and all(dot[0] > own[0] for dot in close)
    return sorted(_PLACES, key=lambda place: place[0] > 0) if is_left else _PLACES


def _by_weight(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return the points in order of importance: complete runs, then the end points of lines, then
    all other points.
    """
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
