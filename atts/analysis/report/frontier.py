"""What accuracy costs: fewer rollouts, fewer turns, other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atts.analysis.report.accuracy import accuracy_of, graded, labels
from atts.analysis.report.gather import Evidence, Solved
from atts.analysis.report.numbers import Point
from atts.evaluators import mean_estimate, score, votes


def frontier(evidence: Evidence, others: Sequence[Evidence]) -> tuple[Point, ...]:
    """The run itself, the vote of 1, 2, 4, ... rollouts out of those recorded or of 1, 2, 4, ... turns, other runs.

    Fewer rollouts and fewer turns are on the policy of the run: a rollout never depends on its siblings, or on turns to
    come. They cost what that many whole rollouts cost on average, and what was written in those turns; the run itself
    costs what it really did, votes that ended early included.
    """
    solved = list(evidence.solved.values())
    return (
        *_fewer_rollouts(solved),
        *_fewer_turns(solved),
        *_run(evidence, "this run"),
        *(p for other in others for p in _run(other, other.directory.name)),
    )


def _fewer_rollouts(solved: Sequence[Solved]) -> list[Point]:
    samples = graded([one for one in solved if one.verdict is not None])
    if not samples:
        return []
    known = {held.problem for held in samples}
    lines = [line for one in solved if one.problem.id in known for line in one.samples if not line.is_censored]
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


def _fewer_turns(solved: Sequence[Solved]) -> list[Point]:
    """The vote of what was answered within so many turns."""
    known = [one for one in solved if one.verdict is not None]
    longest = max((len(line.written) for one in known for line in one.samples), default=0)
    return [_cut(known, 1 << power) for power in range(longest.bit_length()) if 1 << power < longest]


def _cut(solved: Sequence[Solved], turns: int) -> Point:
    right = [vote_within(one, turns) for one in solved]
    written = [pair for one in solved for line in one.samples for pair in line.written[:turns]]
    target = math.fsum(pair[1] for pair in written) / len(solved)
    draft = math.fsum(pair[0] for pair in written) / len(solved)
    label = f"{turns} turn{'s' * (turns != 1)}"
    return Point(label, "turns", target, draft + target, mean_estimate(right, len(right)))


def vote_within(one: Solved, turns: int) -> float:
    """How right the vote is, were rollouts cut after so many turns: ties count as their mean, no answer as wrong."""
    lines = [line for line in one.samples if len(line.written) <= turns and line.answer is not None]
    found = votes(labels(lines, one.problem.kind), [line.verdict == "correct" for line in lines])
    best = [value for size, value in zip(found.sizes, found.values, strict=True) if size == max(found.sizes)]
    return math.fsum(best) / len(best) if best else 0.0
