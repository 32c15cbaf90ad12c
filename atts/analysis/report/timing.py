"""Timing of a run: stages, engine lanes, idle gaps, the critical path."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atts.analysis.report.numbers import EngineLanes, StageSeconds, TimeBreakdown
from atts.graph import CallSpan, measure, sibling_edges

_SLICES = 240
_LANES = 12  # per engine that are drawn
_PIXELS = 900  # calls closer than one of these are drawn as one


def timing(nodes: Sequence[CallSpan]) -> TimeBreakdown | None:
    """The run by its task graph; None where no call was timed."""
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
    """The mean number of intervals that are open in each slice of the run."""
    if not seconds:
        return ()
    edges = np.linspace(0, seconds, _SLICES + 1)
    # the integral up to t of what is open is the sum over intervals of min(t, end) - min(t, start)
    totals = _sum_min(ends, edges) - _sum_min(starts, edges)
    return tuple(float(value) for value in np.diff(totals) / (seconds / _SLICES))


def _sum_min(values: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.sort(values)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    below = np.searchsorted(ordered, at)
    return np.asarray(sums[below] + at * (len(ordered) - below), dtype=np.float64)


def _gaps(starts: NDArray[np.float64], ends: NDArray[np.float64], seconds: float) -> list[float]:
    """The stretches of the run in which the engine had nothing to do."""
    order = np.argsort(starts)
    reached = np.concatenate([[0.0], np.maximum.accumulate(ends[order])])
    following = np.concatenate([starts[order], [seconds]])
    return [float(gap) for gap in following - reached if gap > 0]


def _segments(
    nodes: Sequence[CallSpan], begin: float, seconds: float
) -> tuple[tuple[int, str, float, float], ...]:
    """Calls, in order of their starts, on the lowest free lane; of each lane, neighbours of one
    stage within a pixel become one segment.

    Lanes beyond those drawn are left out: a call goes there when these are busy.
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
    """The most calls at once, given in order of their starts; a call ends before the next of that
    moment starts.

    >>> _peak(np.array([0.0, 1.0, 1.0, 2.0]), np.array([2.0, 1.0, 3.0, 3.0]))
    2
    """
    over = np.searchsorted(np.sort(ends), starts, "right")
    # among those are calls without length that start at this very moment, but later in line: not
    # over yet
    instant = np.concatenate([[0], np.cumsum(starts == ends)])
    later = instant[np.searchsorted(starts, starts, "right")] - instant[:-1]
    return int((np.arange(1, len(starts) + 1) - over + later).max())
