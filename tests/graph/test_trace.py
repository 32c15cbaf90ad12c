"""Tests of timings and traces on invented calls that can be computed by hand."""

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from atts.core import CallSpan
from atts.graph import measure, sibling_edges, trace_events, write_trace


def node(
    number: int, sample: int, start: float, end: float, after: tuple[int, ...] = (), **other: Any
) -> CallSpan:
    """Make a node of one problem that by default neither waited nor queued."""
    base = CallSpan(number, "draft", "draft", "p", sample, 0, start, start, start, end, after)
    return replace(base, **other)


def test_timing_of_a_run_equals_hand_computation() -> None:
    """The timing of a run equals hand computation: stages, engines, the critical path, time lost to
    siblings, and the intensity r.
    """
    nodes = [
        node(0, 0, 0.0, 2.0),
        node(1, 1, 0.0, 5.0),
        node(2, 0, 5.5, 6.0, (0, 1), stage="score", engine="target", ready=2.0, queued=5.0),
        node(3, 1, 5.0, 5.5, (0, 1), stage="score", engine="target"),
        node(4, 1, 6.0, 9.0, (3,), stage="escalate", engine="target", queued=5.5, ready=5.5),
    ]
    for order in (nodes, nodes[::-1]):
        found = measure(order)
        assert found.seconds == 9.0
        assert found.busy_seconds == {"draft": 7.0, "target": 4.0}
        assert found.critical_path.nodes == (1, 3, 4)
        assert found.critical_path.seconds == 8.5
        assert (found.arithmetic_seconds, found.memory_seconds, found.sibling_seconds) == (
            1.0,
            10.0,
            3.0,
        )
        assert found.intensity == pytest.approx(1 / 13)
        score = found.stages["score"]
        assert (score.nodes, score.wait, score.queue, score.compute) == (2, 3.0, 0.5, 1.0)
        assert (found.stages["escalate"].queue, found.stages["draft"].compute) == (0.5, 7.0)
    assert sibling_edges(nodes) == {(1, 2), (0, 3)}


def test_a_run_without_calls_has_undefined_ratios() -> None:
    """Without calls there are no seconds, and ratios are marked as undefined."""
    found = measure([])
    assert (found.seconds, found.critical_path.nodes) == (0.0, ())
    assert found.intensity != found.intensity


def load(nodes: Iterable[CallSpan]) -> list[dict[str, Any]]:
    """Read the written trace with a JSON reader."""
    out = io.StringIO()
    write_trace(nodes, out)
    events: list[dict[str, Any]] = json.loads(out.getvalue())["traceEvents"]
    return events


def test_a_trace_shows_slots_rollouts_and_waiting() -> None:
    """Each call is drawn twice, on a row of its engine and on the row of its rollout. Arrows
    connect the calls that depend on each other.
    """
    nodes = [
        node(0, 0, 1.0, 2.0),
        node(1, 1, 1.0, 4.0),
        node(2, 0, 4.5, 6.0, (0, 1), stage="score", engine="target", ready=2.0, queued=4.0),
    ]
    events = load(nodes)
    names = {e["pid"]: e["args"] for e in events if e["name"] == "process_name"}
    assert names == {
        1: {"name": "rollouts"},
        2: {"name": "engine draft"},
        3: {"name": "engine target"},
    }
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (2, 0, "draft p/0 turn 0", 0.0, 1e6),
        (2, 1, "draft p/1 turn 0", 0.0, 3e6),
        (3, 0, "score p/0 turn 0", 3.5e6, 1.5e6),
        (1, 0, "draft p/1 turn 0", 0.0, 3e6),
        (1, 1, "draft p/0 turn 0", 0.0, 1e6),
        (1, 1, "wait for siblings", 1e6, 2e6),
        (1, 1, "queue target", 3e6, 0.5e6),
        (1, 1, "score p/0 turn 0", 3.5e6, 1.5e6),
    ]
    arrows = [(e["ph"], e["id"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", "1-2", 0, 3e6), ("f", "1-2", 1, 3e6)]
    (args,) = [e["args"] for e in events if e["pid"] == 3 and e["ph"] == "X"]
    assert args == {**asdict(nodes[2]), "after": [0, 1]}
    assert load([]) == [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rollouts"}}
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 5)), max_size=30))
def test_rows_never_overlap_and_are_as_few_as_can_be(calls: list[tuple[int, int, int]]) -> None:
    """An engine has as many rows as it had simultaneous calls, and a row shows one call at a time."""
    nodes = [node(n, s, start, start + length) for n, (start, length, s) in enumerate(calls)]
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in trace_events(nodes):
        if event["ph"] == "X" and event["pid"] == 2:
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:], strict=False))
    at_once = max((sum(a <= t < a + d for a, d, _ in calls) for t in range(71)), default=0)
    assert len(rows) == at_once
