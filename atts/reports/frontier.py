"""What accuracy costs: fewer rollouts, the same rollouts under another rate, other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atts.evaluators import score
from atts.reports.accuracy import accuracy_of, graded, was_spared
from atts.reports.gather import Evidence, Solved
from atts.reports.numbers import Point


def frontier(evidence: Evidence, others: Sequence[Evidence]) -> tuple[Point, ...]:
    """The run itself, the vote of 1, 2, 4, ... rollouts out of those recorded, and every other run.

    Fewer rollouts are on the policy of the run: a rollout never depends on its siblings. They cost what that many
    whole rollouts cost on average; the run itself costs what it really did, votes that ended early included.
    """
    fewer = _fewer_rollouts(list(evidence.solved.values()))
    return (*fewer, *_run(evidence, "this run"), *(p for other in others for p in _run(other, other.directory.name)))


def _fewer_rollouts(solved: Sequence[Solved]) -> list[Point]:
    samples = graded([one for one in solved if one.verdict is not None])
    if not samples:
        return []
    known = {held.problem for held in samples}
    lines = [line for one in solved if one.problem.id in known for line in one.samples if not was_spared(line)]
    target = math.fsum(line.usage.target_tokens for line in lines) / len(lines)
    tokens = math.fsum(line.usage.draft_tokens + line.usage.target_tokens for line in lines) / len(lines)
    points = list[Point]()
    for name, estimate in score(samples).estimates.items():
        kind, _, k = name.partition("@")
        if (kind == "maj" or name == "pass@1") and k.isdigit():
            label = "1 rollout" if k == "1" else f"vote of {k}"
            points.append(Point(label, "samples", target * int(k), tokens * int(k), estimate))
    return sorted(points, key=lambda point: point.tokens)


def _run(other: Evidence, name: str) -> list[Point]:
    accuracy = accuracy_of(other)
    if math.isnan(accuracy.value):
        return []
    usages = [one.usage for one in other.solved.values()]
    target = math.fsum(usage.target_tokens for usage in usages) / len(usages)
    tokens = math.fsum(usage.draft_tokens + usage.target_tokens for usage in usages) / len(usages)
    return [Point(name, "run", target, tokens, accuracy)]
