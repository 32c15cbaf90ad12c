"""A run as a Chrome trace in JSON, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from heapq import heappop, heappush
from typing import Any, TextIO, TypeVar

from atts.core import CallSpan

T = TypeVar("T")
Event = dict[str, Any]
_ROLLOUTS = 1  # the process that holds the rollouts; engines follow


def write_trace(nodes: Iterable[CallSpan], out: TextIO) -> None:
    """Write the nodes as one JSON object.

    Each engine is a process whose threads are its slots; one more process holds the rollouts, one
    row for each place, with what they waited for between the calls. Arrows join nodes of different
    rollouts.
    """
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for event in trace_events(nodes):
        out.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    out.write("\n]}\n")


def trace_events(nodes: Iterable[CallSpan]) -> Iterator[Event]:
    """The events of the trace; times are microseconds since the first node was ready."""
    found = sorted(nodes, key=lambda node: (node.ready, node.node))
    zero = found[0].ready if found else 0.0
    yield from _engine_events(found, zero)
    yield from _rollout_events(found, zero)


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
    spans = sorted(
        (
            (min(n.ready for n in own), max(n.ended for n in own), own)
            for own in by_rollout.values()
        ),
        key=lambda span: span[:2],
    )
    rows: dict[int, tuple[int, CallSpan]] = {}
    for lane, own in _lanes(spans):
        for node in own:
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
    """Give each span (in the order of their starts) the lowest row that is free."""
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
            rows = rows + 1
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
