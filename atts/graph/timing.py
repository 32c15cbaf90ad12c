"""Functions that analyse the time of a run: busy seconds of engines, the critical path, waiting
times, and a Chrome trace.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

from msgspec.structs import asdict

from atts.core import CallSpan

T = TypeVar("T")
Event = dict[str, Any]
# The process id of all rollouts in the trace file. The engines have the process ids 2, 3, and so
# on.
_ROLLOUTS = 1

COMPUTE_BOUND = frozenset({"score"})
"""The stages in which the engine only prefills (processes given tokens), and does not decode.

Prefill is limited by the speed of arithmetic. Decoding is limited by memory bandwidth, because
every weight is read for every token.
"""


@dataclass(slots=True)
class StageTime:
    """The times of one stage, such as "draft" or "score": waiting for siblings, queueing and
    computing, each in seconds summed over the stage's calls.
    """

    nodes: int = 0
    wait: float = 0.0  # total seconds that rollouts waited for sibling rollouts before their calls
    queue: float = 0.0  # seconds in which calls waited for a free slot of the engine
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of graph nodes, in which each node waited for the previous node."""

    seconds: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """The time analysis of a run."""

    seconds: float  # seconds from the start of the first node to the end of the last node
    stages: Mapping[str, StageTime]
    # for each engine: the seconds of its calls, summed over the calls
    busy_seconds: Mapping[str, float]
    # The longest chain of calls in which each call waited for the previous call. More slots cannot
    # make the run shorter than this chain.
    critical_path: Path
    # seconds of calls that only prefilled, summed over the calls; Tc in `intensity`
    arithmetic_seconds: float
    memory_seconds: float  # seconds of calls that decoded, summed over the calls; Tm in `intensity`
    # total seconds that rollouts spent waiting for their sibling rollouts; called Ts in `intensity`
    sibling_seconds: float

    @property
    def intensity(self) -> float:
        """Return the paper's ratio r = Tc / (Tm + Ts). Tc is the seconds of prefill, Tm the seconds
        of decoding, and Ts the seconds of waiting for siblings.
        """
        rest = self.memory_seconds + self.sibling_seconds
        if not rest:
            return math.inf if self.arithmetic_seconds else math.nan
        return self.arithmetic_seconds / rest


def measure(nodes: Iterable[CallSpan], *, compute_bound: Collection[str] = COMPUTE_BOUND) -> Timing:
    """Analyse how a run spent its time, from the nodes of its graph in any order.

    The nodes may come from a running graph or from a journal.

    >>> draft = CallSpan(0, "draft", "draft", "p", 0, 0, ready=0.0, queued=0.0, started=0.0, ended=2.0)
    >>> score = CallSpan(1, "score", "target", "p", 0, 0, ready=2.0, queued=2.0, started=3.0, ended=4.0, after=(0,))
    >>> timing = measure([score, draft])
    >>> timing.seconds, timing.critical_path.seconds, timing.intensity, timing.sibling_seconds
    (4.0, 3.0, 0.5, 0.0)
    """
    ordered = sorted(nodes, key=lambda node: node.node)
    stages: defaultdict[str, StageTime] = defaultdict(StageTime)
    busy: defaultdict[str, float] = defaultdict(float)
    for node in ordered:
        stage = stages[node.stage]
        compute = node.ended - node.started
        stage.nodes += 1
        stage.wait += node.queued - node.ready
        stage.queue += node.started - node.queued
        stage.compute += compute
        if node.engine:
            busy[node.engine] += compute
    arithmetic = math.fsum(time.compute for stage, time in stages.items() if stage in compute_bound)
    began = min((node.ready for node in ordered), default=0.0)
    ended = max((node.ended for node in ordered), default=0.0)
    return Timing(
        seconds=ended - began,
        stages=MappingProxyType(dict(stages)),
        busy_seconds=MappingProxyType(dict(busy)),
        critical_path=_longest_chain(ordered),
        arithmetic_seconds=arithmetic,
        memory_seconds=math.fsum(time.compute for time in stages.values()) - arithmetic,
        sibling_seconds=math.fsum(time.wait for time in stages.values()),
    )


def _longest_chain(nodes: list[CallSpan]) -> Path:
    ends: dict[int, float] = {}
    before: dict[int, int] = {}
    for node in nodes:
        ends[node.node] = node.ended - node.started
        known = [other for other in node.after if other in ends]
        if known:
            last = max(known, key=ends.__getitem__)
            before[node.node] = last
            ends[node.node] += ends[last]
    if not ends:
        return Path(0.0, ())
    chain = [max(ends, key=ends.__getitem__)]
    while chain[-1] in before:
        chain.append(before[chain[-1]])
    return Path(ends[chain[0]], tuple(reversed(chain)))


def sibling_edges(nodes: Iterable[CallSpan]) -> set[tuple[int, int]]:
    """Return the edges of the task graph that connect different rollouts of one problem.

    Only runs with rounds or shared scores have such edges.
    """
    by_number = {node.node: node for node in nodes}
    edges: set[tuple[int, int]] = set()
    for node in by_number.values():
        for number in node.after:
            other = by_number.get(number)
            # Sample -1 is the problem itself. The problem may wait for its rollouts, but this is
            # not a wait between rollouts.
            if other is None or other.sample == node.sample or min(other.sample, node.sample) < 0:
                continue
            edges.add((other.node, node.node))
    return edges


def write_trace(nodes: Iterable[CallSpan], out: TextIO) -> None:
    """Write the nodes as one JSON object in Chrome's trace format.

    In the trace, each engine is a process, and the engine's slots are its threads. One more process
    shows the rollouts, with one row per concurrency slot. A rollout's row also shows its waits
    between calls. Arrows connect nodes of different rollouts.
    """
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for event in trace_events(nodes):
        out.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    out.write("\n]}\n")


def trace_events(nodes: Iterable[CallSpan]) -> Iterator[Event]:
    """Yield the events of the trace, with times in microseconds since the first node was ready."""
    ordered = sorted(nodes, key=lambda node: (node.ready, node.node))
    zero = ordered[0].ready if ordered else 0.0
    yield from _engine_events(ordered, zero)
    yield from _rollout_events(ordered, zero)


def _engine_events(nodes: list[CallSpan], zero: float) -> Iterator[Event]:
    engines = sorted({node.engine for node in nodes if node.engine})
    for process, engine in enumerate(engines, _ROLLOUTS + 1):
        yield _name("process_name", process, 0, f"engine {engine}")
        calls = sorted(
            (n for n in nodes if n.engine == engine and n.ended > n.started),
            key=lambda n: n.started,
        )
        named = 0
        for lane, node in _lanes([(n.started, n.ended, n) for n in calls]):
            while named <= lane:
                yield _name("thread_name", process, named, f"slot {named}")
                named += 1
            yield _slice(process, lane, _label(node), node.started - zero, node.compute, node)


def _rollout_events(nodes: list[CallSpan], zero: float) -> Iterator[Event]:
    yield _name("process_name", _ROLLOUTS, 0, "rollouts")
    by_rollout: dict[tuple[str, int], list[CallSpan]] = {}
    for node in nodes:
        by_rollout.setdefault((node.problem, node.sample), []).append(node)
    spans: list[tuple[float, float, list[CallSpan]]] = []
    for calls in by_rollout.values():
        began = min(node.ready for node in calls)
        ended = max(node.ended for node in calls)
        spans.append((began, ended, calls))
    spans.sort(key=lambda span: span[:2])
    rows: dict[int, tuple[int, CallSpan]] = {}
    for lane, calls in _lanes(spans):
        for node in calls:
            rows[node.node] = (lane, node)
            yield from _steps(node, lane, zero)
    for row, node in rows.values():
        for lane, other in (rows[number] for number in node.after if number in rows):
            if other.sample != node.sample:
                yield from _arrow(
                    f"{other.node}-{node.node}",
                    (lane, other.ended - zero),
                    (row, node.queued - zero),
                )


def _steps(node: CallSpan, lane: int, zero: float) -> Iterator[Event]:
    parts = (
        ("wait for siblings", node.ready, node.wait),
        (f"queue {node.engine}", node.queued, node.queue),
    )
    for name, start, seconds in parts:
        if seconds > 0:
            yield _slice(_ROLLOUTS, lane, name, start - zero, seconds, None)
    if node.compute > 0:
        yield _slice(_ROLLOUTS, lane, _label(node), node.started - zero, node.compute, node)


def _lanes(spans: Iterable[tuple[float, float, T]]) -> Iterator[tuple[int, T]]:
    """Yield each item with the index of its row in the trace. An item is put into the lowest row
    that is free when the item's time span starts.
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rows = 0
    for start, end, what in spans:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            lane = heappop(free)
        else:
            lane = rows
            rows += 1
        heappush(busy, (end, lane))
        yield lane, what


def _label(node: CallSpan) -> str:
    return f"{node.stage} {node.problem}/{node.sample} turn {node.turn}"


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    process: int, thread: int, name: str, start: float, seconds: float, node: CallSpan | None
) -> Event:
    event: Event = {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
    }
    if node is not None:
        event["cat"] = node.stage
        event["args"] = asdict(node)
    return event


def _arrow(name: str, start: tuple[int, float], end: tuple[int, float]) -> Iterator[Event]:
    common = {"name": "waited for", "cat": "edge", "id": name, "pid": _ROLLOUTS}
    yield {"ph": "s", **common, "tid": start[0], "ts": start[1] * 1e6}
    yield {"ph": "f", "bp": "e", **common, "tid": end[0], "ts": end[1] * 1e6}
