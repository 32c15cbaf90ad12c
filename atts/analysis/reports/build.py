"""The construction of a report from the data of recorded runs."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atts.analysis.reports.headline import (
    answered,
    baseline,
    caveats,
    corrected,
    frontier,
    headline,
    method,
    percent,
    rates,
    spend,
    written,
)
from atts.analysis.reports.numbers import (
    Caveat,
    EngineLanes,
    NamedRate,
    Point,
    ProblemRow,
    RateControl,
    RunFacts,
    RunReport,
    RunVerdict,
    Spend,
    StageSeconds,
    TimeBreakdown,
    rate_standing,
    worst_of,
)
from atts.analysis.reports.rate_control import realised_rate
from atts.analysis.reports.run_data import (
    Pages,
    ProblemFacts,
    RunData,
    looked_for,
    read_run_data,
    shorten,
)
from atts.errors import counted
from atts.graph import CallSpan, measure, sibling_edges
from atts.journal import COMPARED, Json
from atts.pipelines import summarise_combinations

_SLICES = 240
_LANES = 12  # largest number of lanes (parallel rows of calls) that are drawn for one engine
# The run's time is divided into this number of equal parts. Calls of one lane and one stage are
# drawn as one segment if less than one part is between them.
_PIXELS = 900


def timing(nodes: Sequence[CallSpan], calls: int | None = None) -> TimeBreakdown | None:
    """Return how a run's time divides into stages and engines, computed from its task graph; None
    if no call has times.

    `calls` is the number of all calls of the run. `nodes` has only the first calls if the run is
    large.
    """
    if not nodes:
        return None
    whole = measure(nodes)
    begin = min(node.ready for node in nodes)
    stages = [
        StageSeconds(name, time.nodes, time.compute, time.queue, time.wait)
        for name, time in sorted(whole.stages.items(), key=lambda item: -item[1].compute)
    ]
    engines = sorted({node.engine for node in nodes if node.engine})
    return TimeBreakdown(
        whole.seconds,
        len(nodes),
        calls=len(nodes) if calls is None else calls,
        stages=tuple(stages),
        engines=tuple(
            _lanes(engine, [n for n in nodes if n.engine == engine], begin, whole.seconds)
            for engine in engines
        ),
        critical_path=whole.critical_path.seconds,
        intensity=whole.intensity,
        arithmetic_seconds=whole.arithmetic_seconds,
        memory_seconds=whole.memory_seconds,
        sibling_seconds=whole.sibling_seconds,
        sibling_edges=len(sibling_edges(nodes)),
    )


def _lanes(engine: str, nodes: Sequence[CallSpan], begin: float, seconds: float) -> EngineLanes:
    numbers, queued_at, started, ended = np.array(
        [(n.node, n.queued, n.started, n.ended) for n in nodes]
    ).T
    order = np.lexsort((numbers, started))
    queued = queued_at - begin
    starts = started - begin
    ends = ended - begin
    idle = _gaps(starts, ends, seconds)
    peak = _peak(started[order], ended[order])
    return EngineLanes(
        engine,
        peak,
        busy_share=1 - sum(idle) / seconds if seconds else 0.0,
        mean_in_flight=float((ends - starts).sum()) / seconds if seconds else 0.0,
        longest_bubble=max(idle, default=0.0),
        in_flight=_occupancy(starts, ends, seconds),
        waiting=_occupancy(queued, starts, seconds),
        lanes=min(peak, _LANES),
        segments=_segments([nodes[place] for place in order], begin, seconds),
    )


def _occupancy(
    starts: NDArray[np.float64], ends: NDArray[np.float64], seconds: float
) -> tuple[float, ...]:
    """Divide the run's time into slices of equal length, and return for each slice the mean number
    of intervals that are open.
    """
    if not seconds:
        return ()
    edges = np.linspace(0, seconds, _SLICES + 1)
    # For each edge: the total time for which intervals were open before this edge. It is the sum of
    # min(edge, end) - min(edge, start) over the intervals.
    totals = _sum_min(ends, edges) - _sum_min(starts, edges)
    return tuple(float(value) for value in np.diff(totals) / (seconds / _SLICES))


def _sum_min(values: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.sort(values)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    below = np.searchsorted(ordered, at)
    return np.asarray(sums[below] + at * (len(ordered) - below), dtype=np.float64)


def _gaps(starts: NDArray[np.float64], ends: NDArray[np.float64], seconds: float) -> list[float]:
    """Return the lengths in seconds of the periods in which the engine was idle."""
    order = np.argsort(starts)
    reached = np.concatenate([[0.0], np.maximum.accumulate(ends[order])])
    following = np.concatenate([starts[order], [seconds]])
    return [float(gap) for gap in following - reached if gap > 0]


def _segments(
    nodes: Sequence[CallSpan], begin: float, seconds: float
) -> tuple[tuple[int, str, float, float], ...]:
    """Place each call, in order of start, on the first lane of the timeline that is free; return
    the segments to draw.

    Calls of the same stage with gaps of less than a pixel are drawn as one segment. A call that
    starts while all lanes are busy is not drawn.
    """
    pixel = seconds / _PIXELS
    drawn: list[tuple[int, str, float, float]] = []
    last: dict[int, int] = {}
    until = [-math.inf] * _LANES
    soonest = -math.inf
    for node in nodes:
        if soonest > node.started:
            continue
        lane = next(lane for lane, end in enumerate(until) if end <= node.started)
        until[lane] = node.ended
        soonest = min(until)
        if node.ended <= node.started:
            continue
        start = node.started - begin
        end = node.ended - begin
        before = drawn[last[lane]] if lane in last else None
        if before is not None and before[1] == node.stage and start - before[3] < pixel:
            drawn[last[lane]] = (lane, node.stage, before[2], end)
        else:
            last[lane] = len(drawn)
            drawn.append((lane, node.stage, start, end))
    return tuple(drawn)


def _peak(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> int:
    """Return the largest number of simultaneous calls; calls do not overlap if one ends when the
    other starts.

    >>> _peak(np.array([0.0, 1.0, 1.0, 2.0]), np.array([2.0, 1.0, 3.0, 3.0]))
    2
    """
    over = np.searchsorted(np.sort(ends), starts, "right")
    # `over` counts, for each call, the calls that ended when it starts. It also counts calls of
    # length 0 that start at the same time but come later in the order.
    instant = np.concatenate([[0], np.cumsum(starts == ends)])
    later = instant[np.searchsorted(starts, starts, "right")] - instant[:-1]
    return int((np.arange(1, len(starts) + 1) - over + later).max())


PAGE_BYTES = 16 * 2**20
"""The size limit in bytes for all problem pages of one report file. Texts that are too long are
shortened to fit.
"""


@dataclass(frozen=True, slots=True)
class BuiltReport:
    """A report, with the pages of its problems, which only the HTML format shows."""

    report: RunReport
    pages: Pages


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Turn off the garbage collector during the block, where it would take a tenth of the time and
    find nothing.

    The data of a report have no reference cycles. They are deleted within the block, so that the
    collector does not search them later.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_garbage_collection()
def build_report(
    directory: Path, against: Sequence[Path] = (), *, page_bytes: int = PAGE_BYTES
) -> BuiltReport:
    """Build the report of a finished or unfinished run, and compare the run with other runs.

    :raises JournalError: one of the directories is not a run directory, or cannot be read.
    """
    data = read_run_data(directory, page_bytes)
    others = [read_run_data(other, 0) for other in against]
    calibration = realised_rate(data)
    problems = list(data.problems.values())
    accuracy, coverage = rates(problems)
    cost = spend(data)
    warnings = caveats(data, calibration)
    baselines = corrected([row for other in others if (row := baseline(data, other)) is not None])
    report = RunReport(
        _facts(data),
        headline(accuracy, cost, calibration, baselines, len(problems)),
        _verdict(accuracy, cost, calibration, warnings, len(problems)),
        accuracy=(*accuracy, *answered(data)),
        coverage=coverage,
        spend=cost,
        speculated=data.state.speculated,
        combined=summarise_combinations(one.brief for one in problems),
        baselines=baselines,
        calibration=calibration,
        frontier=frontier(data, others),
        timing=timing(data.nodes, data.calls),
        caveats=warnings,
        problems=_rows(problems, data.pages),
    )
    return BuiltReport(report, data.pages)


def _facts(data: RunData) -> RunFacts:
    manifest = data.run.manifest
    ended = data.state.ended
    return RunFacts(
        str(data.run.directory),
        version=manifest.versions.get("atts", "?"),
        created=manifest.created,
        sessions=data.state.sessions,
        ended="killed, or still running"
        if ended is None
        else ended.status + (f" ({ended.why})" if ended.why else ""),
        seconds=data.state.seconds,
        planned=manifest.problems,
        done=len(data.problems),
        seed=manifest.seed,
        dataset=manifest.dataset,
        draft=_model(manifest.engines.get("draft")),
        target=_model(manifest.engines.get("target")),
        what=_what(data),
        configuration=tuple(_settings(data)),
        versions=manifest.versions,
    )


def _what(data: RunData) -> str:
    """Return one line with the method, the dataset and the models that the run records."""
    manifest = data.run.manifest
    named = manifest.settings.get("dataset")
    parts = [method(data) if named is None else f"{method(data)} on {named.value}"]
    for role in ("draft", "target"):
        engine = manifest.engines.get(role)
        if engine is not None:
            parts.append(f"{role} {engine.get('model', '?')}")
    return " · ".join(parts)


def _model(engine: Mapping[str, Json] | None) -> str:
    if engine is None:  # the method does not use this model
        return "not used"
    return f"{engine.get('model', '?')} ({engine.get('engine', '?')})"


def _settings(data: RunData) -> list[tuple[str, str, str]]:
    rows = [("method", method(data), "as run")]
    given = data.run.manifest.settings
    for name, setting in data.run.manifest.configuration.items():
        if name in given or (name == "policy" and given):
            continue  # these settings are listed below, in the form in which the user gave them
        parts = (
            setting.value.items() if isinstance(setting.value, Mapping) else [("", setting.value)]
        )
        rows += [
            (f"{name}.{part}".rstrip("."), _setting(value), setting.origin) for part, value in parts
        ]
    return rows + [
        (name, _setting(setting.value), setting.origin)
        for name, setting in given.items()
        if name != "method"
    ]


def _setting(value: Json) -> str:
    """Return a setting's value on one line; a long list, such as a list of stored scores, is
    shortened.
    """
    return shorten(value if isinstance(value, str) else json.dumps(value), 200)


def _verdict(
    accuracy: Sequence[NamedRate],
    cost: Spend,
    calibration: RateControl | None,
    warnings: Sequence[Caveat],
    count: int,
) -> RunVerdict:
    problems = counted(count, "problem")
    points = list[Point]()
    if calibration is not None and calibration.forced:
        words = (
            f"{calibration.forced:,} of {counted(calibration.decisions, 'chunk')} had to be "
            "decided without a score"
        )
        points.append(("bad", words))
    if accuracy:
        known = accuracy[0].estimate.n_problems
        of = "" if known == count else f"{known:,} of "
        points.append(
            ("note", f"accuracy of the vote {accuracy[0].estimate.brief()} over {of}{problems}")
        )
    else:
        points.append(
            (
                "care",
                f"{problems}, but no answer is graded, because no problem has a reference answer",
            )
        )
    if not math.isnan(cost.target_share):
        points.append(
            (
                "note",
                f"the target wrote {100 * cost.target_share:.1f} % of "
                f"{written(cost.usage):,} tokens",
            )
        )
    if calibration is not None:
        points.append(_rate_point(calibration))
    points.extend(("note", caveat.text) for caveat in warnings if caveat.code == COMPARED)
    # Caveats rated "good" are left out: a green tick before a text that asks for care would be a
    # contradiction.
    weighing = [caveat for caveat in warnings if caveat.standing != "good"]
    points.extend((caveat.standing, caveat.sentence) for caveat in weighing)
    standing = worst_of(points, None if calibration is None else calibration.check())
    return RunVerdict(standing, "; ".join(text for _, text in points[:3]), tuple(points))


def _rate_point(control: RateControl) -> Point:
    check = control.check()
    if check is None:
        share = control.escalated / control.decisions
        return (
            "note",
            f"{control.escalated:,} of {counted(control.decisions, 'chunk')} escalated "
            f"({percent(share)}); the gate has no nominal rate",
        )
    return rate_standing(check), str(check)


def _rows(problems: Sequence[ProblemFacts], pages: Pages) -> tuple[ProblemRow, ...]:
    rows = [_row(one) for one in problems]
    shown = set(pages.shown([(row.id, looked_for(row.verdict, (row.flags,))) for row in rows]))
    return tuple(row if row.id in shown else replace(row, is_shown=False) for row in rows)


def _row(one: ProblemFacts) -> ProblemRow:
    problem = one.problem
    brief = one.brief
    verdicts = [
        sample.verdict
        for sample in brief.samples
        if sample.verdict is not None and sample.answer is not None
    ]
    words = problem.text if len(problem.text) <= 110 else problem.text[:110].rstrip() + " …"
    return ProblemRow(
        problem.id,
        status=brief.status,
        answer=brief.answer,
        reference=problem.answer,
        verdict=brief.verdict,
        level=problem.level,
        subject=problem.subject,
        samples=len(brief.samples),
        right=verdicts.count("correct"),
        graded=len(verdicts),
        agreement=brief.agreement,
        decisions=sum(rollout.decisions for rollout in one.rollouts),
        escalated=sum(rollout.escalated for rollout in one.rollouts),
        draft_tokens=brief.usage.draft_tokens,
        target_tokens=brief.usage.target_tokens,
        seconds=brief.seconds,
        flags=tuple(dict.fromkeys(flag for rollout in one.rollouts for flag in rollout.flags)),
        why=brief.why,
        question=words,
    )
