"""Takes a run's time apart: stages, engine lanes, bubbles, the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from atts.graph import Node, measure, sibling_edges
from atts.reports.numbers import Lanes, Stage, Timing

_SLICES = 240
_LANES = 12  # per engine that are drawn
_PIXELS = 900  # calls closer than one of these are drawn as one


def timing(nodes: Sequence[Node]) -> Timing | None:
    """The run by its task graph; None where no call was timed."""
    if not nodes:
        return None
    whole = measure(nodes)
    begin = min(node.ready for node in nodes)
    stages = [
        Stage(name, time.nodes, time.compute, time.queue, time.wait)
        for name, time in sorted(whole.stages.items(), key=lambda item: -item[1].compute)
    ]
    engines = sorted({node.engine for node in nodes if node.engine})
    return Timing(
        whole.seconds,
        len(nodes),
        tuple(stages),
        tuple(_lanes(engine, [n for n in nodes if n.engine == engine], begin, whole.seconds) for engine in engines),
        whole.critical_path.seconds,
        whole.intensity,
        whole.arithmetic_seconds,
        whole.memory_seconds,
        whole.sibling_seconds,
        len(sibling_edges(nodes)),
    )


def _lanes(engine: str, nodes: Sequence[Node], begin: float, seconds: float) -> Lanes:
    starts = np.array([node.started - begin for node in nodes])
    ends = np.array([node.ended - begin for node in nodes])
    queued = np.array([node.queued - begin for node in nodes])
    idle = _gaps(starts, ends, seconds)
    segments, lanes, peak = _segments(nodes, begin, seconds)
    return Lanes(
        engine,
        peak,
        1 - sum(idle) / seconds if seconds else 0.0,
        float((ends - starts).sum()) / seconds if seconds else 0.0,
        max(idle, default=0.0),
        _occupancy(starts, ends, seconds),
        _occupancy(queued, starts, seconds),
        lanes,
        segments,
    )


def _occupancy(starts: NDArray[np.float64], ends: NDArray[np.float64], seconds: float) -> tuple[float, ...]:
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
    nodes: Sequence[Node], begin: float, seconds: float
) -> tuple[tuple[tuple[int, str, float, float], ...], int, int]:
    """Calls on the lowest free lane; of each lane, neighbours of one stage within a pixel become one segment."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    count, pixel = 0, seconds / _PIXELS
    drawn: list[tuple[int, str, float, float]] = []
    last: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: (node.started, node.id)):
        while busy and busy[0][0] <= node.started:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else count
        count = max(count, lane + 1)
        heappush(busy, (node.ended, lane))
        if lane >= _LANES or node.ended <= node.started:
            continue
        start, end = node.started - begin, node.ended - begin
        before = drawn[last[lane]] if lane in last else None
        if before is not None and before[1] == node.stage and start - before[3] < pixel:
            drawn[last[lane]] = (lane, node.stage, before[2], end)
        else:
            last[lane] = len(drawn)
            drawn.append((lane, node.stage, start, end))
    return tuple(drawn), min(count, _LANES), count
