"""On real rollouts under virtual time: nothing waits while it could run, and a barrier costs what was found."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import pytest

from atts.graph import Admit, Graph, Limit, ProblemScope, Recording, RolloutScope, Timing, measure, sibling_edges

Stage = tuple[str, str, int, float]
Questions = dict[str, list[list[Stage]]]
SLOTS = {"draft": 16, "target": 4}


@dataclass(frozen=True)
class Question:
    """A recorded question."""

    id: str


async def replay(questions: Questions, admit: Admit, rollouts: int) -> tuple[float, Recording, Graph]:
    """Run the recorded stages on the slots they had."""
    recording = Recording()
    graph = Graph(rollouts=rollouts, limits={name: Limit(n) for name, n in SLOTS.items()}, sink=recording)

    async def solve(question: Question, scope: ProblemScope) -> list[int | None]:
        async def rollout(line: RolloutScope[int]) -> int:
            for stage, engine, turn, seconds in questions[question.id][line.sample]:
                await line.call(stage, anyio.sleep, seconds, engine=engine, turn=turn)
            return line.sample

        return [result.value for result in await scope.rollouts(rollout, 16, admit=admit)]

    start = anyio.current_time()
    results = await graph.run([Question(name) for name in questions], solve)
    assert [result.problem for result in results] == list(questions)
    assert all(result.value == list(range(16)) for result in results)
    return anyio.current_time() - start, recording, graph


def test_no_slot_is_idle_on_real_rollouts(
    real_rollouts: Questions, virtually: Callable[[Callable[[], Awaitable[object]]], tuple[float, Recording, Graph]]
) -> None:
    """Within 3 % of max(work / slots, longest rollout), 1.35 times faster than the barrier, no time lost by waiting."""
    seconds, recording, graph = virtually(lambda: replay(real_rollouts, "each", 32))
    work = {"draft": 0.0, "target": 0.0}
    for stages in (stages for samples in real_rollouts.values() for stages in samples):
        for _, engine, _, duration in stages:
            work[engine] += duration
    longest = max(sum(s[3] for s in stages) for samples in real_rollouts.values() for stages in samples)
    bound = max(longest, *(work[name] / slots for name, slots in SLOTS.items()))
    found = measure(recording.nodes())
    assert bound <= seconds <= 1.03 * bound
    assert found.lower_bound(SLOTS) == pytest.approx(bound)
    assert found.critical_path.seconds == pytest.approx(longest)
    assert found.sibling_seconds == 0 == graph.stats().sibling_seconds
    assert sibling_edges(recording.nodes()) == set()

    barrier, with_barrier, barred = virtually(lambda: replay(real_rollouts, "together", 16))
    assert barrier >= 1.35 * seconds
    lost: Timing = measure(with_barrier.nodes())
    assert lost.sibling_seconds == pytest.approx(barred.stats().sibling_seconds)
    assert lost.sibling_seconds > 0
    assert lost.intensity < found.intensity
    assert sibling_edges(with_barrier.nodes())
