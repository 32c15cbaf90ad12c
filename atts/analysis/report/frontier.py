"""The accuracy-cost frontier: fewer rollouts, fewer turns, other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from atts.analysis.report.accuracy import accuracy_of, graded, total_usage, written
from atts.analysis.report.numbers import THIS_RUN, FrontierPoint
from atts.analysis.report.run_data import ProblemFacts, RunData
from atts.evaluators import answer_classes, group, mean_estimate, score, votes


def frontier(data: RunData, others: Sequence[RunData]) -> tuple[FrontierPoint, ...]:
    """The run itself, the vote of 1, 2, 4, ... rollouts out of those recorded or of 1, 2, 4, ...
    turns, other runs.

    Fewer rollouts and fewer turns are on the policy of the run: a rollout never depends on its
    siblings, or on turns to come. They cost what that many whole rollouts cost on average, and what
    was written in those turns; the run itself costs what it really did, votes that ended early
    included.
    """
    known = [one for one in data.problems.values() if one.brief.verdict is not None]
    return (
        *_fewer_rollouts(known),
        *_fewer_turns(known),
        *_whole_run(data, THIS_RUN),
        *(point for other in others for point in _whole_run(other, other.run.directory.name)),
    )


def _fewer_rollouts(problems: Sequence[ProblemFacts]) -> list[FrontierPoint]:
    samples = graded(problems)
    if not samples:
        return []
    known = {held.problem for held in samples}
    rollouts = [
        r
        for one in problems
        if one.problem.id in known
        for r in one.rollouts
        if not r.brief.is_censored
    ]
    target = math.fsum(rollout.usage.target_tokens for rollout in rollouts) / len(rollouts)
    tokens = math.fsum(written(rollout.usage) for rollout in rollouts) / len(rollouts)
    points = list[FrontierPoint]()
    for name, estimate in score(samples).estimates.items():
        kind, _, k = name.partition("@")
        if (kind == "maj" or name == "pass@1") and k.isdigit():
            label = "1 rollout" if k == "1" else f"vote of {k}"
            points.append(
                FrontierPoint(label, "samples", target * int(k), tokens * int(k), estimate)
            )
    return sorted(points, key=lambda point: point.tokens)


def _whole_run(data: RunData, name: str) -> list[FrontierPoint]:
    accuracy = accuracy_of(data)
    usage = total_usage(data.problems.values())
    count = len(data.problems)
    if math.isnan(accuracy.value):
        return []
    return [
        FrontierPoint(name, "run", usage.target_tokens / count, written(usage) / count, accuracy)
    ]


def _fewer_turns(problems: Sequence[ProblemFacts]) -> list[FrontierPoint]:
    """The vote of what was answered within so many turns."""
    longest = max((len(rollout.written) for one in problems for rollout in one.rollouts), default=0)
    return [
        _cut(problems, 1 << power) for power in range(longest.bit_length()) if 1 << power < longest
    ]


def _cut(problems: Sequence[ProblemFacts], turns: int) -> FrontierPoint:
    right = [value for one in problems if (value := _vote_within(one, turns)) is not None]
    tokens = [
        pair for one in problems for rollout in one.rollouts for pair in rollout.written[:turns]
    ]
    draft, target = (math.fsum(pair[model] for pair in tokens) / len(problems) for model in (0, 1))
    label = f"{turns} turn{'s' * (turns != 1)}"
    return FrontierPoint(label, "turns", target, draft + target, mean_estimate(right, len(right)))


def _vote_within(one: ProblemFacts, turns: int) -> float | None:
    """How right the vote is, were rollouts cut after so many turns: ties count as their mean, no
    answer as wrong.

    None where all that might have answered by then was stopped before.
    """
    within = [rollout.brief for rollout in one.rollouts if len(rollout.written) <= turns]
    samples = [brief for brief in within if brief.answer is not None]
    if not samples and any(brief.is_censored for brief in within):
        return None
    labels = answer_classes(
        [sample.answer for sample in samples], partial(group, kind=one.problem.kind)
    )
    found = votes(labels, [sample.verdict == "correct" for sample in samples])
    best = [
        value
        for size, value in zip(found.sizes, found.values, strict=True)
        if size == max(found.sizes)
    ]
    return math.fsum(best) / len(best) if best else 0.0
