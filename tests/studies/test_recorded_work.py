"""On real rollouts under virtual time: nothing waits while it could run, and a barrier costs what
was found.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atts.graph import measure, sibling_edges
from atts.testing import Backend, run_virtual

work = pytest.importorskip("tests.studies.recorded_work", reason="needs a checkout")
library = pytest.importorskip("scripts.studies.modelled", reason="needs a checkout")


@pytest.fixture(scope="session")
def questions(shared_data: Path) -> Any:
    """The stages of run ct0 with the durations fitted to it."""
    return work.stages(library.recorded_rollouts(shared_data / "traces"))


def test_no_slot_is_idle_on_real_rollouts(questions: Any, anyio_backend: Backend) -> None:
    """Within 3 % of max(work / slots, longest rollout), 1.35 times faster than the barrier, no time
    lost by waiting.
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
