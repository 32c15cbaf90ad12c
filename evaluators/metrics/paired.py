"""Paired comparison of two runs on the same problems, at the end or after every problem.

The last part is the power analysis before a run: how many problems and samples show a difference in
accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from atts.errors import OptionError, counted
from atts.evaluators.metrics.intervals import (
    Estimate,
    Floats,
    check_level,
    reach,
    undefined_estimate,
)
from atts.sampling import binomial_cdf, binomial_pmf, student_tail

# If the standard deviation is more than this many times the difference, no number of problems is
# enough to show the difference.
_MOST_SPREAD = 1e6


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second run compared with the first run, problem by problem.

    `p_value` is two-sided and belongs to the same test as the interval: it is below 1 - level
    exactly if the interval excludes 0. `problems_needed` is the number of problems needed to detect
    a difference of this size with 80 % power.
    """

    first: float
    second: float
    difference: Estimate  # mean of the second run minus mean of the first run, with its interval
    p_value: float
    better: int  # number of problems on which the second run has the higher value
    worse: int
    tied: int
    problems_needed: int | None

    def __str__(self) -> str:
        need = (
            (
                f"; {counted(self.problems_needed, 'problem')} would show a difference of this "
                "size with 80 % power"
            )
            if self.problems_needed
            else ""
        )
        return (
            f"{self.first:.3f} → {self.second:.3f}, difference {self.difference}, "
            f"p = {self.p_value:.3g}; better on {self.better}, worse on {self.worse}, tied on {self.tied}{need}"
        )


@dataclass(frozen=True, slots=True)
class McNemar:
    """McNemar's exact test of two runs with one answer per problem. It uses only problems on which
    the runs disagree.
    """

    both: int
    first_only: int
    second_only: int
    neither: int
    p_value: float  # two-sided p-value of the exact McNemar test
    # The mid-p-value counts only half the probability of the observed outcome. So it is less
    # conservative than `p_value`.
    mid_p: float


def compare_runs(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, n_samples: int = 0
) -> Comparison:
    """Compare two runs by one value per problem, such as the share of correct samples.

    Both runs must have the problems in the same order. The interval is for the mean difference over
    problems, and the p-value belongs to the same test; see `difference_estimate`. Raises
    OptionError if the lengths differ or a value is infinite.
    """
    a, b = _pairs(first, second)
    check_level(level)
    delta = b - a
    estimate = difference_estimate(delta, level, n_samples or 2 * delta.size)
    seen = estimate.value
    scale = float(np.abs(delta).max()) if delta.size and seen != 0 else 0.0
    spread = math.nan
    if delta.size > 1 and scale > 0:
        spread = float((delta / scale).std(ddof=1)) * scale
    needed = None
    if spread > 0 and spread <= _MOST_SPREAD * abs(seen):
        needed = problems_needed(spread, seen)
    better = int((delta > 0).sum())
    worse = int((delta < 0).sum())
    return Comparison(
        first=float(a.mean()) if a.size else math.nan,
        second=float(b.mean()) if b.size else math.nan,
        difference=estimate,
        p_value=difference_p(delta),
        better=better,
        worse=worse,
        tied=int((delta == 0).sum()),
        problems_needed=needed,
    )


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Return McNemar's exact test of two runs with one verdict per problem.

    >>> mcnemar([True, True, False, False], [True, False, True, True]).p_value
    1.0
    """
    a, b = (values.astype(bool) for values in _pairs(first, second))
    lost = int((a & ~b).sum())
    won = int((~a & b).sum())
    n = lost + won
    least = min(lost, won)
    tail = 2 * float(binomial_cdf(least, n, 0.5))
    mid = 1.0 if lost == won else tail - float(binomial_pmf(least, n, 0.5))
    return McNemar(int((a & b).sum()), lost, won, int((~a & ~b).sum()), min(1.0, tail), mid)


def difference_p(delta: Floats) -> float:
    """Return the two-sided p-value of Student's t test that the mean difference is 0.

    The test uses the same standard error as the interval.
    """
    if delta.size < 2 or np.isnan(delta).any():
        return 1.0
    mean = float(delta.mean())
    if mean == 0:
        return 1.0
    return student_tail(abs(mean) / _error(delta), delta.size - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for multiple testing by Holm's method, in the same order.

    Reject each hypothesis whose corrected p-value is below 0.05. Then the probability of one or
    more false rejections is at most 5 %, even if the p-values depend on each other.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = [1.0 if math.isnan(p) else p for p in p_values]  # an unknown p-value (NaN) counts as 1
    order = sorted(range(len(known)), key=known.__getitem__)
    corrected = [1.0] * len(known)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * known[index]))
        corrected[index] = largest
    return corrected


def problems_needed(
    deviation: float, difference: float, *, power: float = 0.8, level: float = 0.95
) -> int:
    """Return the number of problems that a paired two-sided t test needs to detect `difference`.

    `deviation` is the standard deviation of the paired difference over problems, and `power` the
    probability that the test detects it. Raises OptionError if `difference` is 0.
    """
    check_level(level)
    is_answerable = difference != 0 and math.isfinite(difference) and 0 <= deviation < math.inf
    if not is_answerable or not 0 < power < 1:
        raise OptionError(
            "difference",
            f"no number of problems suffices to show a difference of {difference!r} with power "
            f"{power!r} if the standard deviation is {deviation!r}",
        )
    needed = freedom = math.inf
    # The quantile of Student's t depends on the number of problems, so repeat until the number is
    # stable.
    for _ in range(51):
        again = max(
            2.0,
            (reach(freedom, level) + reach(freedom, 2 * power - 1)) ** 2
            * (deviation / difference) ** 2,
        )
        if abs(again - needed) < 1e-6 * needed:
            break
        needed = again
        freedom = max(1.0, again - 1)
    return math.ceil(needed)


def difference_estimate(delta: Floats, level: float = 0.95, n_samples: int = 0) -> Estimate:
    """Return the mean difference of two runs with its interval, from one difference per problem.

    The interval is that of Student's t test, with a standard error that is also valid if few
    problems differ. If no problem differs, the interval allows for rare differences that this
    sample did not contain.
    """
    if delta.size < 2 or np.isnan(delta).any():
        note = (
            "a difference needs at least two problems"
            if delta.size < 2
            else "the difference is undefined for at least one problem"
        )
        return undefined_estimate(delta.size, n_samples, level, note)
    mean = float(delta.mean())
    method = "paired t"
    half = reach(delta.size - 1, level) * _error(delta)
    if not delta.any():
        method = "no spread"
        # No problem in the sample differs. If more than the share `half` of all problems differed,
        # such a sample would have a probability below 1 - level.
        half = 1 - (1 - level) ** (1 / delta.size)
    low = mean - half
    high = mean + half
    # If all values are shares, the mean difference cannot be outside [-1, 1].
    if np.abs(delta).max() <= 1:
        low = max(low, -1.0)
        high = min(high, 1.0)
    return Estimate(mean, low, high, delta.size, n_samples, method, level=level)


def _error(delta: Floats) -> float:
    """Return the standard error of a mean difference, with the correction of Agresti and Min.

    The correction adds one tied problem, half a problem that the second run won, and half a problem
    that it lost. The added differences are about as large as the observed differences. They are 1
    if each problem has one answer, but small if each problem has the average of many samples.

    The square of an added difference is the mean square of the nonzero observed differences, minus
    a fraction of their squared mean. The fraction is a quarter if few problems differ, because one
    more differing problem would matter. It is 1 if every problem differs.
    """
    scale = float(np.abs(delta).max())
    if scale == 0:
        return 0.0
    # Divide by the largest difference. Otherwise the square of a very large float is infinite, and
    # that of a very small float is 0.
    scaled = delta / scale
    moved = scaled[scaled != 0]
    part = max(0.25, 2 * moved.size / scaled.size - 1)
    size = math.sqrt(max(0.0, float((moved**2).mean()) - part * float(moved.mean()) ** 2))
    middle = float(scaled.sum()) / (scaled.size + 2)
    squares = float(((scaled - middle) ** 2).sum())
    squares += ((size - middle) ** 2 + (size + middle) ** 2) / 2 + middle**2
    return scale * math.sqrt(squares / (scaled.size + 1) / scaled.size)


def _pairs(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """Return the values of both runs as arrays; raise OptionError if they cannot be paired or a
    value is infinite.
    """
    try:
        a = np.asarray(first, dtype=np.float64)
        b = np.asarray(second, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            "comparison", f"give exactly one number for each problem and run ({error})"
        ) from None
    if a.shape != b.shape or a.ndim != 1:
        raise OptionError(
            "comparison",
            f"{a.size} values cannot be paired with {b.size}; give exactly one value for each "
            "problem and run",
        )
    if np.isinf(a).any() or np.isinf(b).any():
        raise OptionError(
            "comparison",
            "a value is infinite, so the mean difference cannot be computed; give finite values",
        )
    return a, b


Settled = Literal["better", "worse", "alike", "undecided"]
"""The verdict on the second run, compared with the first run. "alike" means that the accuracies
differ by at most `points` percentage points.
"""

# the candidate values of the mean difference are the multiples of 1 / _STEPS in [-1, 1]
_STEPS = 200
_STAKES = np.arange(0.05, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Sequential:
    """The result of a comparison that was tested after every problem."""

    settled: Settled
    # number of problems that were compared; no further problem is compared once the verdict is
    # clear
    problems: int
    low: float
    high: float
    # accuracies that differ by at most this number of percentage points are called "alike"
    points: float
    level: float = 0.95

    def __str__(self) -> str:
        interval = (
            f"difference in [{self.low:+.3f}, {self.high:+.3f}] ({self.level * 100:g} % "
            "interval, valid after every problem)"
        )
        words = {
            "alike": f"differs by at most {counted(self.points, 'point')}, decided",
            "undecided": "undecided",
        }
        result = words.get(self.settled, f"{self.settled}, decided")
        return f"{result} after {counted(self.problems, 'problem')}; {interval}"

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON. The entry "words" is the result as a
        sentence.
        """
        return {**asdict(self), "words": str(self)}


class ConfidenceSequence:
    """A confidence sequence for the mean of differences in [-1, 1], one difference per problem.

    Each candidate mean m is tested by bets. Its capital is divided among fixed stakes, and each new
    difference multiplies the capital of a stake by 1 + stake (difference - m).

    Suppose that each difference has mean m, given the earlier differences. Then the capital is a
    martingale, and exceeds 1 / (1 - level) at some time with probability at most 1 - level (Ville's
    inequality). So a candidate is excluded permanently once its capital exceeds this limit. The
    intervals after each of the problems are all valid at the same time. The order of the problems
    must not depend on their results.
    """

    def __init__(self, level: float = 0.95) -> None:
        """Create a sequence that has no differences yet; raise OptionError unless `level` is in (0,
        1).
        """
        check_level(level)
        self.problems = 0
        self._bar = -math.log(1 - level)
        self._means = np.arange(-_STEPS, _STEPS + 1) / _STEPS
        sides = np.concatenate([-_STAKES, _STAKES])
        room = np.where(sides[:, None] > 0, 1 + self._means, 1 - self._means)
        self._bets: Floats = sides[:, None] / np.maximum(room, 1 / _STEPS)
        self._logs: Floats = np.zeros_like(self._bets)

    def add(self, difference: float) -> None:
        """Add the next problem's difference.

        :raises OptionError: if the difference is outside [-1, 1].
        """
        if not -1 <= difference <= 1:
            raise OptionError(
                "difference",
                f"{difference!r} is outside [-1, 1]; give a difference of two accuracies",
            )
        self.problems += 1
        self._logs += np.log1p(self._bets * (difference - self._means))
        # The logarithm of the mean capital over all stakes. Subtracting the maximum first avoids an
        # overflow of `exp`.
        top = self._logs.max(axis=0, initial=-math.inf)
        left = top + np.log(np.exp(self._logs - top).mean(axis=0)) < self._bar
        if not left.all():
            self._means = self._means[left]
            self._bets = self._bets[:, left]
            self._logs = self._logs[:, left]

    @property
    def interval(self) -> tuple[float, float]:
        """Return the range of the candidate means that are not excluded, extended to the nearest
        excluded candidates.

        If all candidates are excluded, both ends are NaN.
        """
        # All candidates are excluded. The probability of this is at most 1 - level.
        if not self._means.size:
            return math.nan, math.nan
        low = max(-1.0, float(self._means[0]) - 1 / _STEPS)
        high = min(1.0, float(self._means[-1]) + 1 / _STEPS)
        return low, high

    def answer(self, points: float = 0.0) -> Sequential:
        """Return the verdict and the interval after the problems added so far."""
        low, high = self.interval
        settled: Settled = "undecided"
        if (self._means > 0).all():
            settled = "better"
        elif (self._means < 0).all():
            settled = "worse"
        elif max(-low, high) <= points / 100:
            settled = "alike"
        return Sequential(settled, self.problems, low, high, points, level=-math.expm1(-self._bar))


def compare_in_order(
    differences: Iterable[float], points: float = 0.0, level: float = 0.95
) -> Sequential:
    """Compare two runs with a test after every problem, and stop as soon as the test decides.

    >>> str(compare_in_order([1.0] * 20))
    'better, decided after 8 problems; difference in [+0.050, +1.000] (95 % interval, valid after every problem)'
    """
    sequence = ConfidenceSequence(level)
    for difference in differences:
        sequence.add(difference)
        result = sequence.answer(points)
        if result.settled != "undecided":
            return result
    return sequence.answer(points)


POINTS = (1.0, 3.0)
"""Differences in accuracy, in percentage points. A dry run prints, for each difference, how many
problems are needed to show it.
"""


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """The variance of the correctness of single rollouts, divided into the variance between
    problems and the variance within problems.

    More samples per problem reduce only the error from `within`. More problems also reduce the
    error from `between`. A paired comparison on the same problems does not depend on `between`.
    """

    between: float
    within: float
    problems: int

    @property
    def share_between(self) -> float:
        """Return the fraction of the variance that is between problems; NaN if the variance is
        0.
        """
        total = self.between + self.within
        return self.between / total if total > 0 else math.nan

    def __str__(self) -> str:
        if math.isnan(self.share_between):
            return (
                f"all rollouts of {counted(self.problems, 'problem')} had the same result; "
                "statistical power needs rollouts with different results"
            )
        return (
            f"{100 * self.share_between:.0f} % of the variance of single rollouts is between "
            f"problems, {100 * (1 - self.share_between):.0f} % between samples of the same problem "
            f"({counted(self.problems, 'problem')})"
        )


def variance_split(correct: Sequence[Sequence[bool]]) -> VarianceSplit | None:
    """Estimate the variance of correctness between and within problems. `correct` has one row of
    samples per problem.

    Both estimates are unbiased, except that a negative `between` is replaced by 0. The result is
    None if fewer than two problems have at least two samples.
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
    """The difference in single-rollout accuracy that a paired comparison of two methods can detect.

    `needed` has the number of problems that each difference in `POINTS` needs. `detectable` is the
    smallest difference, in percentage points, that the planned problems detect with 80 % power.

    If `paired_power` gets a `spread` of 0, `needed` and `detectable` assume that the methods differ
    equally on every problem. If the difference varies between problems, more problems are needed.
    """

    samples: int
    problems: int
    detectable: float
    needed: tuple[int, ...]

    def __str__(self) -> str:
        takes = " and ".join(
            f"{counted(count, 'problem')} to show {counted(points, 'point')}"
            for points, count in zip(POINTS, self.needed, strict=True)
        )
        shown = f"show a difference of {self.detectable:.1f} points"
        if self.detectable >= 100:
            shown = "cannot show any difference"
        samples = counted(self.samples, "sample")
        return (
            f"{counted(self.problems, 'problem')} x {samples} {shown} between methods (80 % "
            f"power, single rollouts); with {samples} per problem, it takes {takes}"
        )


def paired_power(split: VarianceSplit, problems: int, samples: int, spread: float = 0.0) -> Power:
    """Return the power of a comparison of two methods on the same problems.

    Each method has `samples` samples per problem. `spread` is the variance over problems of the
    methods' true difference in accuracy; use 0 if it is not known.

    :raises OptionError: the number of problems is below two, the number of samples is below one,
        the spread is negative, or the rollouts have no variance because all have the same result.
    """
    if problems < 2 or samples < 1:
        raise OptionError(
            "problems",
            f"{counted(problems, 'problem')} x {counted(samples, 'sample')} cannot be compared; "
            "give at least 2 problems x 1 sample",
        )
    variance = spread + 2 * split.within / samples
    if not spread >= 0 or not variance > 0:
        raise OptionError(
            "variance",
            f"the differences between paired rollouts have variance {variance:g}; statistical "
            "power needs rollouts with different results",
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
    """Estimate the variance over problems of the true difference between two runs.

    The noise of sampling is subtracted. The rows of both runs belong to the same problems in the
    same order. The result is None if fewer than two problems have enough samples.
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
