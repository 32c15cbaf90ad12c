"""Two runs compared problem by problem: accuracy with its interval, costs as ratios with theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atts.analysis.ratios import cost_ratio, ratio_interval
from atts.analysis.results import COSTS, GradedRun
from atts.errors import DatasetError
from atts.evaluators import Comparison, McNemar, Sequential, compare_in_order, compare_runs, mcnemar
from atts.sampling import Seed, generator


@dataclass(frozen=True, slots=True)
class CostRatio:
    """A cost of the second run over the first's, per problem, with the interval over problems."""

    name: str
    first: float  # mean per problem
    second: float
    ratio: float  # inf: the first took none
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Compared:
    """The second run against the first on the problems that both have graded.

    `single` is of single rollouts (their share of right ones per problem), `mcnemar` of votes that
    are right or wrong.
    """

    first: str
    second: str
    methods: tuple[str, str]
    problems: int
    only_first: int
    only_second: int
    vote: Comparison
    single: Comparison | None
    mcnemar: McNemar | None
    costs: tuple[CostRatio, ...]
    unscored: tuple[int, int] = (0, 0)  # votes counted wrong that could not be scored
    if_right: Comparison | None = None  # of votes, were these right
    # of votes, looked at after every problem in an order drawn by seed
    sequential: Sequential | None = None


def compare(
    first: GradedRun, second: GradedRun, *, seed: int = 0, points: float | None = None
) -> Compared:
    """Pair the problems that both sides have; with `points`, also one by one until they are told
    apart.

    :raises DatasetError: there are none.
    """
    common = [name for name in first.problems if name in second.problems]
    if not common:
        example = next(iter(first.problems)), next(iter(second.problems))
        raise DatasetError(
            f"{first.name} and {second.name}",
            f"no problem is in both; they hold such as {example[0]!r} and {example[1]!r}",
            "Compare runs on the same problems",
        )
    ours, theirs = ([side.problems[name] for name in common] for side in (first, second))
    votes = [one.vote for one in ours], [one.vote for one in theirs]
    doubted = [one.unscored for one in ours], [one.unscored for one in theirs]
    best = (
        [vote + more for vote, more in zip(*side, strict=True)]
        for side in zip(votes, doubted, strict=True)
    )
    shares = [
        (a.share, b.share)
        for a, b in zip(ours, theirs, strict=True)
        if not math.isnan(a.share + b.share)
    ]
    samples = sum(one.samples for one in (*ours, *theirs))
    whole = all(vote in (0.0, 1.0) for side in votes for vote in side)
    costs = [_cost(name, [o.costs for o in ours], [t.costs for t in theirs]) for name in COSTS]
    taken = generator(Seed(run=seed, purpose="order of problems")).permutation(len(common))
    differences = (votes[1][place] - votes[0][place] for place in taken)
    return Compared(
        first.name,
        second.name,
        methods=(first.method, second.method),
        problems=len(common),
        only_first=len(first.problems) - len(common),
        only_second=len(second.problems) - len(common),
        vote=compare_runs(*votes, seed=seed),
        single=compare_runs(*zip(*shares, strict=True), seed=seed, n_samples=samples)
        if shares
        else None,
        mcnemar=mcnemar(*([vote == 1.0 for vote in side] for side in votes)) if whole else None,
        costs=tuple(cost for cost in costs if cost is not None),
        unscored=(sum(map(bool, doubted[0])), sum(map(bool, doubted[1]))),
        if_right=compare_runs(*best, seed=seed) if any(map(any, doubted)) else None,
        sequential=None if points is None else compare_in_order(differences, points),
    )


def _cost(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> CostRatio | None:
    if any(name not in costs for costs in (*ours, *theirs)):
        return None
    first, second = (
        np.array([costs[name] for costs in side], dtype=np.float64) for side in (ours, theirs)
    )
    before = float(first.mean())
    after = float(second.mean())
    return CostRatio(name, before, after, cost_ratio(after, before), *ratio_interval(first, second))
