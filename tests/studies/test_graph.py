"""Tests that a recording of a graph returns its events, and that no slot is idle while work is
ready, on real rollouts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import CallSpan, CallStatus, ProblemSpan, RolloutSpan
from atts.graph import measure, sibling_edges
from atts.testing import Backend, run_virtual

packed = pytest.importorskip("scripts.studies.modelled", reason="needs a checkout")

times = st.floats(0, 1e9)
statuses: list[CallStatus] = ["done", "failed", "cancelled"]
any_node = st.builds(
    CallSpan,
    st.integers(0, 2**62),
    st.text(max_size=5),
    st.sampled_from(["draft", "target", ""]),
    st.text(max_size=5),
    st.integers(-1, 2**31 - 1),
    st.integers(-1, 2**31 - 1),
    times,
    times,
    times,
    times,
    st.lists(st.integers(0, 2**62), max_size=3).map(tuple),
    st.integers(0, 9),
    st.sampled_from(statuses),
    st.integers(0, 2**40),
    st.sampled_from(["live", "recalled"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(any_node, max_size=20, unique_by=lambda n: n.node))
def test_a_recording_gives_back_what_it_was_given(nodes: list[CallSpan]) -> None:
    """After packing and unpacking, nodes are equal and in order. Spans and events of other types
    are kept unchanged.
    """
    recording = packed.Recording()
    rollout = RolloutSpan("p", 0, "done", 0.0, 0.0, 1.0, 1.0)
    problem = ProblemSpan("p", 0, "done", 0.0, 1.0)
    for event in (*nodes, rollout, problem, "mine"):
        recording(event)
    assert list(recording.nodes()) == nodes
    assert len(recording) == len(nodes)
    assert (recording.rollouts, recording.problems, recording.others) == (
        [rollout],
        [problem],
        ["mine"],
    )


work = pytest.importorskip("scripts.studies.graph", reason="needs a checkout")
library = pytest.importorskip("scripts.studies.modelled", reason="needs a checkout")


@pytest.fixture(scope="session")
def questions(shared_data: Path) -> Any:
    """Return the stages of the recorded rollouts of run ct0, with durations fitted to that run."""
    return work.stages(library.recorded_rollouts(shared_data / "traces"))


def test_no_slot_is_idle_on_real_rollouts(questions: Any, anyio_backend: Backend) -> None:
    """On real rollouts no slot is idle while work is ready.

    The run takes at most 3 % longer than max(work / slots, longest rollout); with the barrier it
    takes at least 1.35 times as long. No rollout waits for siblings.
    """
    rollouts = [stages for samples in questions.values() for stages in samples]
    seconds, recording = run_virtual(
        partial(work.replayed, questions, "each", 32), backend=anyio_backend
    )
    busy = {"draft": 0.0, "target": 0.0}
    for _, engine, _, duration in (stage for stages in rollouts for stage in stages):
        busy[engine] += duration
    longest = max(sum(stage[3] for stage in stages) for stages in rollouts)
    bound = max(longest, *(busy[name] / slots for name, slots in work.SLOTS.items()))
    found = measure(recording.nodes())
    assert len({(node.problem, node.sample) for node in recording.nodes()}) == len(rollouts)
    assert bound <= seconds <= 1.03 * bound
    assert work.lower_bound(found) == pytest.approx(bound)
    assert found.critical_path.seconds == pytest.approx(longest)
    assert found.sibling_seconds == 0
    assert sibling_edges(recording.nodes()) == set()

    barrier, with_barrier = run_virtual(
        partial(work.replayed, questions, "together", 16), backend=anyio_backend
    )
    lost = measure(with_barrier.nodes())
    assert barrier >= 1.35 * seconds
    assert lost.sibling_seconds > 0
    assert lost.intensity < found.intensity
    assert sibling_edges(with_barrier.nodes())
