"""A set of runs in lines for a terminal: a table, and accuracy against target tokens drawn in
letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from atts.analysis.sweep.curves import ScalingPoint, SweepReport

_WIDE = 60
_TALL = 12
_LETTERS = "abcdefghijklmnopqrsuvwxyz"


def sweep_lines(report: SweepReport) -> Iterator[str]:
    """The table, the picture, and what both rest on."""
    yield from _table(report)
    yield ""
    yield from _picture(report)
    yield from sweep_notes(report)


def sweep_notes(report: SweepReport) -> Iterator[str]:
    """What a reader must know of the numbers."""
    yield "Brackets are 95 % intervals over problems; differences are to the target alone, problem by problem."
    yield (
        "Best of all: the share of problems that any rollout solved, which no vote can exceed; "
        "rollouts that a settled "
        "vote spared count as unsolved there."
    )
    calls, shared = (
        sum(getattr(point, name) for point in report.points) for name in ("calls", "shared")
    )
    if shared:
        yield (
            f"{shared:,} of {calls:,} engine calls were taken from another run of the set instead "
            f"of made again; "
            "tokens and seconds are what each run would have cost alone."
        )


def _table(report: SweepReport) -> Iterator[str]:
    wide = max([len(point.name) for point in report.points] + [12])
    yield (
        f"  {'':<{wide}}  {'done':>9}  {'accuracy':<21}  {'difference':<24}  {'best of all':>11}  "
        f"{'rate':>5}  {'target':>8}  {'seconds':>8}"
    )
    marks = _marks(report)
    for point in (*report.references, *report.grid):
        done = f"{point.done}/{point.problems if point.problems is not None else '?'}"
        what = point.accuracy.brief("-") if point.done else point.standing
        difference = "" if point.difference is None else point.difference.signed()
        yield (
            f"{marks[point.name]} {point.name:<{wide}}  {done:>9}  {what:<21}  {difference:<24}  "
            f"{_number(point.oracle.value, '.3f'):>11}  {_number(point.rate.value, '.2f'):>5}  "
            f"{_number(point.target_tokens, ',.0f'):>8}  {_number(point.seconds, ',.2f'):>8}"
        ).rstrip()
    yield "  target: tokens that the target wrote per problem; seconds: of engine calls per problem, added up."


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def _marks(report: SweepReport) -> dict[str, str]:
    """The letter of each point: one per curve, T and D for the target and the draft alone."""
    curves = enumerate(report.curves.values())
    found = {
        point.name: _LETTERS[number % len(_LETTERS)]
        for number, points in curves
        for point in points
    }
    return found | {
        point.name: str(point.values.get("method", "r"))[:1].upper() for point in report.references
    }


def _picture(report: SweepReport) -> Iterator[str]:
    """Accuracy against target tokens; baselines are dashes, at the height of their accuracy."""
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
        yield f"{'':>8} along {report.along}; {'; '.join(named)}; T, D: target and draft alone"


def _range(drawn: Sequence[ScalingPoint]) -> tuple[float, float]:
    """The accuracies to show: all that there are, and not much besides."""
    values = [point.accuracy.value for point in drawn]
    low = max(0.0, min(values) - 0.02)
    high = min(1.0, max(values) + 0.02)
    return (low, high) if high > low else (low - 0.01, high + 0.01)
