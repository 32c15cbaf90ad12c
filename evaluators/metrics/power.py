"""Power analysis before a run: how many problems and samples show a difference in accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import reach
from atts.evaluators.metrics.paired import problems_needed

POINTS = (1.0, 3.0)
"""The differences in accuracy, in points, for which dry runs print the number of problems needed.
"""


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """The variance of one rollout's correctness, between problems and within them.

    More samples of a problem average out `within`; only more problems average out `between`. A
    paired comparison on the same problems does not depend on `between`.
    """

    between: float
    within: float
    problems: int

    @property
    def share_between(self) -> float:
        """Return the share of the variance that lies between problems; NaN if there is none."""
        total = self.between + self.within
        return self.between / total if total > 0 else math.nan

    def __str__(self) -> str:
        if math.isnan(self.share_between):
            return (
                f"all rollouts of {self.problems:,} problems ended alike; without variance the "
                "power is not known"
            )
        return (
            f"{100 * self.share_between:.0f} % of the variance of single rollouts lies between "
            f"problems, {100 * (1 - self.share_between):.0f} % between samples of a problem "
            f"({self.problems:,} problems)"
        )


def variance_split(correct: Sequence[Sequence[bool]]) -> VarianceSplit | None:
    """Split the variance of correctness; `correct` has one row of samples per problem.

    Both parts are unbiased. The result is None if fewer than two problems have two samples.
    """
    rows = [row for row in correct if len(row) > 1]
    if len(rows) < 2:
        return None
    shares = np.array([sum(row) / len(row) for row in rows])
    counts = np.array([len(row) for row in rows], np.float64)
    within = shares * (1 - shares) * counts / (counts - 1)
    between = float(shares.var(ddof=1)) - float((within / counts).mean())
    return VarianceSplit(max(0.0, between), float(within.mean()), len(rows))


@dataclass(frozen=True, slots=True)
class Power:
    """The difference in single-rollout accuracy that a paired comparison of two methods can show.

    `needed` has the number of problems for each difference of `POINTS`; `detectable` is the
    smallest difference, in points, that the planned problems show with 80 % power. Both assume that
    the methods differ by the same amount on every problem; if they do not, more problems are
    needed.
    """

    samples: int
    problems: int
    detectable: float
    needed: tuple[int, ...]

    def __str__(self) -> str:
        takes = " and ".join(
            f"{points:g} point{'s' * (points != 1)} with {count:,} problems"
            for points, count in zip(POINTS, self.needed, strict=True)
        )
        shown = f"show a difference of {self.detectable:.1f} points"
        if self.detectable >= 100:
            shown = "show no difference, however large"
        return (
            f"{self.problems:,} problems x {self.samples} samples {shown} "
            f"(80 % power, single rollouts); {takes} x {self.samples}"
        )


def paired_power(split: VarianceSplit, problems: int, samples: int, spread: float = 0.0) -> Power:
    """Return the power of comparing two methods on the same problems with so many samples each.

    `spread` is the variance over problems of the true difference; use 0 if it is not known.

    :raises OptionError: for fewer than two problems or one sample, for a negative spread, or if
        there is no variance because all rollouts ended alike.
    """
    if problems < 2 or samples < 1:
        raise OptionError(
            "problems",
            f"{problems} problems x {samples} samples are too few to compare; give at least 2 x 1",
        )
    variance = spread + 2 * split.within / samples
    if not spread >= 0 or not variance > 0:
        raise OptionError(
            "variance",
            f"the variance between paired samples is {variance:g}; power needs rollouts that "
            "differ",
        )
    deviation = math.sqrt(variance)
    freedom = problems - 1
    standard = deviation / math.sqrt(problems)
    detectable = 100 * (reach(freedom, 0.95) + reach(freedom, 0.6)) * standard
    needed = tuple(problems_needed(deviation, points / 100) for points in POINTS)
    return Power(samples, problems, detectable, needed)


def difference_spread(
    first: Sequence[Sequence[bool]], second: Sequence[Sequence[bool]]
) -> float | None:
    """Return the variance over problems of the true difference, without sampling noise; None if
    unknown.

    The rows of both runs are the same problems in the same order.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if len(a) > 1 and len(b) > 1]
    if len(pairs) < 2:
        return None
    differences: list[float] = []
    noise: list[float] = []
    for pair in pairs:
        shares = [sum(row) / len(row) for row in pair]
        differences.append(shares[1] - shares[0])
        noise.append(
            sum(
                share * (1 - share) / (len(row) - 1)
                for share, row in zip(shares, pair, strict=True)
            )
        )
    return max(0.0, float(np.var(differences, ddof=1)) - math.fsum(noise) / len(noise))
