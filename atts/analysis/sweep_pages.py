"""Render a sweep as text and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from atts.analysis.reports.charts import Chart
from atts.analysis.reports.render import page
from atts.analysis.reports.svg import Axis, Plot
from atts.analysis.reports.tables import ReportTable
from atts.analysis.sweeps import Contrast, ScalingPoint, SweepReport

_WIDE = 60
_TALL = 12
_LETTERS = "abcdefghijklmnopqrsuvwxyz"


def sweep_lines(report: SweepReport) -> Iterator[str]:
    """Return the table, the chart, and notes on both."""
    yield from _table(report)
    yield ""
    yield from _picture(report)
    yield from sweep_notes(report)


def sweep_notes(report: SweepReport) -> Iterator[str]:
    """Return notes that explain the numbers."""
    yield (
        "Brackets are 95 % intervals over problems. Differences are from the target alone, in "
        "accuracy of the vote. Gains are over a coin of the same policy and rate, in accuracy of "
        "single rollouts. Both compare problem by problem."
    )
    compared = (("differences", "difference"), ("gains", "gain"))
    counts = {
        words: sum(getattr(point, name) is not None for point in report.points)
        for words, name in compared
    }
    several = [f"{count} {words}" for words, count in counts.items() if count > 1]
    if several:
        yield f"p-values are corrected by Holm's method, for {' and for '.join(several)}."
    yield (
        "Best of all: the share of problems that any rollout solved, which no vote can exceed; "
        "for this share, rollouts that a settled vote cancelled count as not correct."
    )
    calls, shared = (
        sum(getattr(point, name) for point in report.points) for name in ("calls", "shared")
    )
    if shared:
        yield (
            f"{shared:,} of {calls:,} engine calls were taken from another run of the set instead "
            "of made again; tokens and seconds are the cost of each run if made alone."
        )


def _table(report: SweepReport) -> Iterator[str]:
    wide = max([len(point.name) for point in report.points] + [12])
    has_prices = any(point.dollars is not None for point in report.points)
    money = f"  {'dollars':>10}" if has_prices else ""
    yield (
        f"  {'':<{wide}}  {'done':>9}  {'accuracy':<21}  {'difference':<31}  {'gain over a coin':<31}  "
        f"{'best of all':>11}  "
        f"{'rate':>5}  {'target':>8}  {'seconds':>8}{money}"
    )
    marks = _marks(report)
    for point in (*report.references, *report.grid):
        done = f"{point.done}/{point.problems if point.problems is not None else '?'}"
        what = point.accuracy.brief("-") if point.done else point.standing
        difference = "" if point.difference is None else str(point.difference)
        gain = "" if point.gain is None else str(point.gain)
        yield (
            f"{marks[point.name]} {point.name:<{wide}}  {done:>9}  {what:<21}  {difference:<31}  {gain:<31}  "
            f"{_number(point.oracle.value, '.3f'):>11}  {_number(point.rate.value, '.2f'):>5}  "
            f"{_number(point.target_tokens, ',.0f'):>8}  {_number(point.seconds, ',.2f'):>8}"
            f"{_dollars(point) if has_prices else ''}"
        ).rstrip()
    yield "  target: tokens that the target wrote per problem; seconds: of engine calls per problem, added up."
    if has_prices:
        yield "  dollars: per problem, by the prices of the models."


def _dollars(point: ScalingPoint) -> str:
    return f"  {'-' if point.dollars is None else f'{point.dollars:.6f}':>10}"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def _marks(report: SweepReport) -> dict[str, str]:
    """Return the letter of each point: one per curve, T, D and C for the baselines."""
    curves = enumerate(report.curves.values())
    marks = {
        point.name: _LETTERS[number % len(_LETTERS)]
        for number, points in curves
        for point in points
    }
    return marks | {
        point.name: str(point.values.get("method", "r"))[:1].upper() for point in report.references
    }


def _picture(report: SweepReport) -> Iterator[str]:
    """Draw accuracy against target tokens in characters; each baseline is a dashed line at its
    accuracy.
    """
    drawn = [point for point in report.points if point.is_drawn]
    if not drawn:
        return
    low, high = _range(drawn)
    right = max(point.target_tokens for point in drawn) or 1.0
    rows = [[" "] * (_WIDE + 1) for _ in range(_TALL + 1)]
    marks = _marks(report)
    for point in sorted(drawn, key=lambda point: point.kind == "point"):
        up = round((point.accuracy.value - low) / (high - low) * _TALL)
        across = round(point.target_tokens / right * _WIDE)
        if point.kind == "reference":
            rows[up] = [
                "-" if at % 2 == 0 and old == " " else old for at, old in enumerate(rows[up])
            ]
        rows[up][across] = marks[point.name]
    yield "accuracy"
    for number in range(_TALL, -1, -1):
        label = f"{low + (high - low) * number / _TALL:.3f}" if number % 3 == 0 else ""
        yield f"{label:>7} |{''.join(rows[number])}".rstrip()
    yield f"{'':>7} +{'-' * (_WIDE + 1)}"
    yield f"{'':>8} 0{f'{right:,.0f}':>{_WIDE}}  target tokens per problem"
    if report.along is not None:
        named = (f"{marks[points[0].name]}: {name}" for name, points in report.curves.items())
        yield f"{'':>8} along {report.along}; {'; '.join(named)}; T, D, C: target alone, draft alone, coin"


def _range(drawn: Sequence[ScalingPoint]) -> tuple[float, float]:
    """Return the range of accuracies to show."""
    values = [point.accuracy.value for point in drawn]
    low = max(0.0, min(values) - 0.02)
    high = min(1.0, max(values) + 0.02)
    return (low, high) if high > low else (low - 0.01, high + 0.01)


COLOURS = 6
"""The number of different colours of curves; further curves start again with the first colour."""
_LABEL = 12.0  # pixels between labels of baselines


def render_sweep(report: SweepReport) -> str:
    """Return the page, which needs no network and no server."""
    return page(
        "sweep.html",
        ("tables.js",),
        report=report,
        charts=list(sweep_charts(report)),
        runs=sweep_table(report),
        notes=list(sweep_notes(report)),
        headline=headline(report),
    )


def headline(report: SweepReport) -> str:
    """Name the cheapest run whose accuracy does not differ from the best one's by the intervals."""
    drawn = [point for point in report.grid if point.is_drawn]
    if not drawn:
        return "Nothing was graded yet"
    best = max(drawn, key=lambda point: (point.accuracy.value, -point.target_tokens))
    target = next(
        (
            one
            for one in report.references
            if one.values.get("method") == "target-only" and one.is_drawn
        ),
        None,
    )
    said = f"Best: {best.name}, accuracy {best.accuracy.brief()} for {best.target_tokens:,.0f} target tokens per problem"
    if target is None:
        return said
    return (
        f"{said}; the target alone gets {target.accuracy.brief()} for {target.target_tokens:,.0f}"
    )


def sweep_charts(report: SweepReport) -> Iterator[Chart]:
    """Draw accuracy against each kind of cost."""
    yield _chart(
        report,
        "Accuracy against target tokens",
        "target tokens per problem",
        lambda p: p.target_tokens,
    )
    yield _chart(
        report,
        "Accuracy against engine time",
        "seconds of engine calls per problem",
        lambda p: p.seconds,
    )
    if len(set(report.over.get("samples", ()))) > 1:
        yield _chart(
            report, "Accuracy against samples", "rollouts per problem", lambda p: float(p.samples)
        )


def _chart(
    report: SweepReport, title: str, label: str, cost: Callable[[ScalingPoint], float]
) -> Chart:
    drawn = [point for point in report.points if point.is_drawn]
    plot = Plot(
        Axis(0, max([cost(p) for p in drawn] + [1e-9]) * 1.08, label), _accuracies(drawn), 760, 340
    )
    marks = [*_ceiling(plot, report, cost), *_baselines(plot, report, cost)]
    for number, (name, points) in enumerate(report.curves.items()):
        shown = [p for p in points if p.is_drawn]
        marks.append(
            f'<g class="s{number % COLOURS}">{"".join(_curve(plot, name, shown, cost, report.along))}</g>'
        )
    rows = [
        (p.name, cost(p), p.accuracy.value, p.accuracy.low, p.accuracy.high, p.oracle.value)
        for p in drawn
    ]
    columns = ("run", label, "accuracy", "from", "to", "any rollout correct")
    legend = [(f"s{number % COLOURS}", name) for number, name in enumerate(report.curves)]
    words = (
        "Bands and whiskers are 95 % intervals over problems; dashed: the baselines; dotted: the "
        "share that any "
        "rollout solved."
    )
    along = f" Along each curve: {report.along}." if report.along else ""
    return replace(
        Chart.of(title, words + along, plot, marks, (columns, rows)),
        wide=True,
        legend=tuple(legend),
    )


def _accuracies(drawn: Sequence[ScalingPoint]) -> Axis:
    """Return the range of accuracies to show, with whole intervals."""
    low = min([p.accuracy.low for p in drawn] + [1.0])
    high = max([max(p.accuracy.high, p.oracle.value) for p in drawn] + [0.0])
    return (
        Axis(max(0.0, low - 0.02), min(1.0, high + 0.02), "accuracy")
        if high > low
        else Axis(0, 1, "accuracy")
    )


def _curve(
    plot: Plot,
    name: str,
    points: Sequence[ScalingPoint],
    cost: Callable[[ScalingPoint], float],
    along: str | None,
) -> Iterator[str]:
    at = [cost(p) for p in points]
    if len(points) > 1 and along is not None:
        yield plot.band(at, [p.accuracy.low for p in points], [p.accuracy.high for p in points])
        yield plot.line([(x, p.accuracy.value) for x, p in zip(at, points, strict=True)], "main")
    for x, p in zip(at, points, strict=True):
        if along is None or len(points) == 1:
            yield plot.line([(x, p.accuracy.low), (x, p.accuracy.high)], "whisker")
        tip = f"{p.name}: {p.accuracy.brief()}, {x:,.1f} {plot.x.label}"
        yield plot.dot(x, p.accuracy.value, "run", tip)
        if along is not None and len(points) > 1:
            yield plot.text(x, p.accuracy.value, f"{p.values[along]}", "middle", 0, -3)


def _baselines(
    plot: Plot, report: SweepReport, cost: Callable[[ScalingPoint], float]
) -> Iterator[str]:
    """Draw a dashed line for each baseline, with a point at its cost.

    Its name is at the right below the line, or above the line if there is no room below.
    """
    taken = list[float]()
    for p in sorted(report.references, key=lambda p: p.accuracy.value if p.is_drawn else -1.0):
        if not p.is_drawn:
            continue
        value = p.accuracy.value
        yield plot.line([(plot.x.low, value), (plot.x.high, value)], "nominal")
        yield plot.dot(
            cost(p),
            value,
            "baseline",
            f"{p.name}: {p.accuracy.brief()}, {cost(p):,.1f} {plot.x.label}",
            3,
        )
        up = plot.up(value)
        drop = 2 * _LABEL - 4 if all(abs(up - other) > 2 * _LABEL for other in taken) else 0.0
        taken.append(up)
        yield plot.text(plot.x.high, value, p.name, "end", -6, drop)


def _ceiling(
    plot: Plot, report: SweepReport, cost: Callable[[ScalingPoint], float]
) -> Iterator[str]:
    """Draw the accuracy that no vote can exceed, curve by curve."""
    for number, points in enumerate(report.curves.values()):
        line = [
            (cost(p), p.oracle.value)
            for p in points
            if p.is_drawn and not math.isnan(p.oracle.value)
        ]
        if len(line) > 1 and report.along is not None:
            yield f'<g class="s{number % COLOURS}">{plot.line(line, "oracle")}</g>'
        elif line:
            yield from (
                f'<g class="s{number % COLOURS}">{plot.dot(x, y, "oracle", "any rollout correct", 2.5)}</g>'
                for x, y in line
            )


def _cells(contrast: Contrast | None) -> tuple[float | None, ...]:
    """Return a comparison as the cells of a table; empty cells if there is none."""
    if contrast is None:
        return (None,) * 4
    estimate = contrast.estimate
    return (estimate.value, estimate.low, estimate.high, contrast.p_value)


def sweep_table(report: SweepReport) -> ReportTable:
    """Return a row for every run of the set."""
    columns = (
        "run", "status", "problems", "accuracy", "from", "to", "difference to the target alone", "from", "to",
        "p (Holm)", "gain over a coin, single rollouts", "from", "to", "p (Holm)",
        "any rollout correct", "rate", "target tokens", "draft tokens", "scored tokens", "seconds of calls", "calls",
        "shared calls", "dollars",
    )  # fmt: skip
    rows = [
        (
            p.name, p.standing, p.done, p.accuracy.value, p.accuracy.low, p.accuracy.high,
            *_cells(p.difference), *_cells(p.gain),
            p.oracle.value, p.rate.value, p.target_tokens, p.draft_tokens, p.scored_tokens, p.seconds, p.calls,
            p.shared, math.nan if p.dollars is None else p.dollars,
        )
        for p in (*report.references, *report.grid)
    ]  # fmt: skip
    return ReportTable.of("Every run, costs per problem", columns, rows)
