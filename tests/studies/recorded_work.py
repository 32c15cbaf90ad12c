"""Whether anything waits while it could run: recorded rollouts in virtual time, beside the same
work with a barrier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from atts.graph import Admit, Graph, Limit, ProblemScope, RolloutScope, Timing, measure
from atts.testing import run_virtual
from scripts.studies.harness import Row, Table, say
from scripts.studies.modelled import recorded_rollouts
from tests.studies.recording import Recording

SLOTS = {"draft": 16, "target": 4}
SAMPLES = 16
Stage = tuple[str, str, int, float]
"""Stage, engine, turn, seconds."""
Questions = Mapping[str, Sequence[Sequence[Stage]]]


@dataclass(frozen=True, slots=True)
class Question:
    """One of the record."""

    id: str


def conserved() -> list[Table]:
    """The table, or none where the recorded traces are not at hand."""
    rollouts = recorded_rollouts()
    if rollouts is None:
        say(
            "graph: the recorded traces are not at hand: nothing is said of the conservation of "
            "work"
        )
        return []
    questions = stages(rollouts)
    ways: Sequence[tuple[str, Admit, int]] = (
        ("as they come, 32 in flight", "each", 32),
        ("as they come, 16 in flight", "each", 16),
        ("question by question: the barrier", "together", 16),
    )
    found = {
        name: run_virtual(partial(replayed, questions, admit, places))
        for name, admit, places in ways
    }
    ours, recording = found[ways[0][0]]
    bound = lower_bound(measure(recording.nodes()))
    rows: list[Row] = []
    for name, (seconds, recording) in found.items():
        timing = measure(recording.nodes())
        idle = 1 - timing.busy_seconds["target"] / (SLOTS["target"] * timing.seconds)
        rows.append((name, seconds, seconds / bound, seconds / ours, idle, timing.sibling_seconds))
    table = Table.of(
        "Work conservation on recorded rollouts, virtual time",
        "admission | virtual s | of the least possible (bar: 1.03) | of the first (bar: 1.35 with "
        "a barrier) | "
        "target slots idle | s waiting for siblings",
        rows,
        f"{len(rollouts)} recorded rollouts of {len(questions)} questions; slots: {SLOTS['draft']} "
        f"of the draft, "
        f"{SLOTS['target']} of the target; first come first served.",
    )
    return [table]


def lower_bound(timing: Timing) -> float:
    """Seconds that no schedule on these slots beats: the most loaded engine's work, or the longest
    chain.
    """
    return max(
        timing.critical_path.seconds,
        *(timing.busy_seconds[name] / count for name, count in SLOTS.items()),
    )


def stages(rollouts: Sequence[Mapping[str, Any]]) -> Questions:
    """The stages of every rollout of a recorded run, with durations fitted to it."""
    questions: dict[str, list[list[Stage]]] = {}
    for record in rollouts:
        found: list[Stage] = []
        for turn in record["turns"]:
            number = turn["turn"]
            found.append(("draft", "draft", number, 0.1943 + 0.002420 * turn["draft_chars"]))
            if turn["ppl"] is not None:
                found.append(("score", "target", number, 0.1499))
            if turn["escalated"]:
                found.append(
                    ("escalate", "target", number, 0.2139 + 0.004994 * turn["target_chars"])
                )
        questions.setdefault(str(record["question_id"]), []).append(found)
    return questions


async def replayed(questions: Questions, admit: Admit, rollouts: int) -> tuple[float, Recording]:
    """The seconds, and every node, when the graph runs the recorded stages on the slots they had."""
    recording = Recording()
    graph = Graph(
        rollouts=rollouts, limits={name: Limit(n) for name, n in SLOTS.items()}, sink=recording
    )

    async def solve(question: Question, scope: ProblemScope) -> None:
        async def rollout(line: RolloutScope[None]) -> None:
            for stage, engine, turn, seconds in questions[question.id][line.sample]:
                await line.call(stage, anyio.sleep, seconds, engine=engine, turn=turn)

        await scope.rollouts(rollout, SAMPLES, admit=admit)

    began = anyio.current_time()
    await graph.drive([Question(name) for name in questions], solve, lambda result: None)
    return anyio.current_time() - began, recording
