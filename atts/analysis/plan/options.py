"""Policies that a recorded run can evaluate: fewer of its rollouts, and fewer turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atts.analysis.plan.plan_data import CompleteRollout, GradedCase, PlanData
from atts.evaluators import Estimate, maj_at_k, mean_estimate, votes


@dataclass(frozen=True, slots=True)
class Option:
    """One way, per problem: what it takes on average, and how often its vote is right (95 %
    interval over problems).

    `seconds` is until the last rollout ends, at the load of the recorded run; a lighter load is
    quicker.
    """

    run: str
    method: str
    rate: float
    samples: int
    turns: int
    accuracy: Estimate
    draft_tokens: float
    target_tokens: float
    scored_tokens: float
    seconds: float

    @property
    def tokens(self) -> float:
        """Written by either model."""
        return self.draft_tokens + self.target_tokens


def options(data: PlanData) -> Iterator[Option]:
    """Every number of rollouts up to those recorded, and every power of two of turns.

    All are on the policy of the run: a rollout depends neither on its siblings nor on turns to
    come. Problems with too few whole rollouts for a number are left out of it; a number that loses
    more than a tenth of them is not offered.
    """
    most = max(len(case.rollouts) for case in data.cases)
    longest = max(len(rollout.turns) for case in data.cases for rollout in case.rollouts)
    turns = [1 << power for power in range(longest.bit_length()) if 1 << power < longest] + [
        longest
    ]
    for samples in range(1, most + 1):
        cases = [case for case in data.cases if len(case.rollouts) >= samples]
        if len(cases) >= 0.9 * len(data.cases):
            for limit in turns:
                yield _option(data, cases, samples, limit)


def _option(data: PlanData, cases: Sequence[GradedCase], samples: int, turns: int) -> Option:
    cut = [[_within(rollout, turns) for rollout in case.rollouts] for case in cases]

    def accuracy(unscored: bool) -> Estimate:
        """Of the votes of `samples` of them, were what could not be scored right or wrong."""
        judged = [[unscored if right is None else right for _, right in pairs] for pairs in cut]
        ballots = [
            votes([label for label, _ in pairs], right)
            for pairs, right in zip(cut, judged, strict=True)
        ]
        return mean_estimate(maj_at_k(ballots, samples), samples * len(cases))

    kept = [[rollout.turns[:turns] for rollout in case.rollouts] for case in cases]

    def spent(name: str) -> float:
        """The mean over problems of what `samples` of their rollouts take."""
        means = [
            math.fsum(getattr(turn, name) for rollout in case for turn in rollout) / len(case)
            for case in kept
        ]
        return samples * math.fsum(means) / len(means)

    waits = [
        _longest([math.fsum(turn.seconds for turn in rollout) for rollout in case], samples)
        for case in kept
    ]
    return Option(
        str(data.run.directory),
        method=data.method,
        rate=data.rate,
        samples=samples,
        turns=turns,
        accuracy=accuracy(False).with_best_case(
            accuracy(True), sum(right is None for pairs in cut for _, right in pairs)
        ),
        draft_tokens=spent("draft_tokens"),
        target_tokens=spent("target_tokens"),
        scored_tokens=spent("scored_tokens"),
        seconds=math.fsum(waits) / len(waits),
    )


def _within(rollout: CompleteRollout, turns: int) -> tuple[object, bool | None]:
    """The rollout's vote, were it cut after so many turns."""
    return (rollout.label, rollout.is_right) if len(rollout.turns) <= turns else (None, False)


def _longest(seconds: Sequence[float], k: int) -> float:
    """The expected longest of k drawn without replacement.

    >>> _longest([1.0, 2.0, 3.0], 2)
    2.6666666666666665
    """
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    n = len(ordered)
    whole = math.comb(n, k)
    return (
        math.fsum(float(value) * math.comb(place, k - 1) for place, value in enumerate(ordered))
        / whole
    )


def frontier(found: Sequence[Option], cost: str) -> list[Option]:
    """Those that nothing cheaper equals, cheapest first."""
    best = -1.0
    kept = list[Option]()
    for option in sorted(found, key=lambda option: (getattr(option, cost), -option.accuracy.value)):
        if option.accuracy.value > best + 1e-12:
            best = option.accuracy.value
            kept.append(option)
    return kept
