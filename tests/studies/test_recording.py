"""The packed record of a graph's events gives back what it was given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import CallSpan, CallStatus, ProblemSpan, RolloutSpan

packed = pytest.importorskip("tests.studies.recording", reason="needs a checkout")

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
    """Nodes packed and unpacked are equal and in order; spans and foreign events are kept as they
    are.
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
