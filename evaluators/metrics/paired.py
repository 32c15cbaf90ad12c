"""Paired comparison of two runs on the same problems: difference, interval, tests, sample size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from atts.distributions import binomial_cdf, binomial_pmf
from atts.errors import OptionError
from atts.evaluators.metrics.intervals import Estimate, Floats, check_level, reach, undefined_estimate
from atts.seeds import Seed, generator

EXACT_SIGNS = 14


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second run against the first, problem by problem.

    `p_value` is of sign flips (two-sided): were the runs alike, either could have had either result of each problem.
    `problems_needed` is how many problems like these would show a difference of this size four times in five.
    """

    first: float
    second: float
    difference: Estimate  # second - first
    p_value: float
    better: int  # problems on which the second is above the first
    worse: int
    tied: int
    problems_needed: int | None

    def __str__(self) -> str:
        need = f"; {self.problems_needed:,} problems would show it" if self.problems_needed else ""
        return (
            f"{self.first:.3f} → {self.second:.3f}, difference {self.difference}, p = {self.p_value:.3g}; "
            f"better on {self.better}, worse on {self.worse}, tied on {self.tied}{need}"
        )


@dataclass(frozen=True, slots=True)
class McNemar:
    """One answer per problem and run: only the problems on which the runs disagree speak."""

    both: int
    first_only: int
    second_only: int
    neither: int
    p_value: float  # exact, two-sided
    mid_p: float  # less conservative: half the weight of what was seen

    def __str__(self) -> str:
        return (
            f"right by both {self.both}, by the first alone {self.first_only}, by the second alone {self.second_only}, "
            f"by neither {self.neither}; exact McNemar p = {self.p_value:.3g} (mid-p {self.mid_p:.3g})"
        )


def compare_runs(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, seed: int = 0, n_samples: int = 0
) -> Comparison:
    """Two values per problem, such as shares of right samples, in the same order of problems.

    The interval is of the mean difference over problems: Student's with half a problem won, half a one lost and one
    tied added to the variance (Agresti and Min), right also where few problems differ. Where all problems agree on the
    difference, it is what others, too rare to have shown themselves, may still make of it. Raises OptionError for
    lengths that differ.
    """
    a, b = _pairs(first, second)
    check_level(level)
    delta = b - a
    estimate = difference_estimate(delta, level, n_samples or 2 * delta.size)
    spread = float(delta.std(ddof=1)) if delta.size > 1 else math.nan
    seen = estimate.value
    needed = problems_needed(spread, seen) if spread > 0 and seen != 0 and not math.isnan(seen) else None
    better, worse = int((delta > 0).sum()), int((delta < 0).sum())
    tied = delta.size - better - worse
    return Comparison(
        float(a.mean()),
        float(b.mean()),
        estimate,
        sign_flip_p(delta, seed=seed),
        better=better,
        worse=worse,
        tied=tied,
        problems_needed=needed,
    )


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact test on one verdict per problem and run.

    >>> mcnemar([True, True, False, False], [True, False, True, True]).p_value
    1.0
    """
    a, b = (values.astype(bool) for values in _pairs(first, second))
    lost, won = int((a & ~b).sum()), int((~a & b).sum())
    n, least = lost + won, min(lost, won)
    tail = float(binomial_cdf(least, n, 0.5))
    mass = float(binomial_pmf(least, n, 0.5))
    exact = min(1.0, 2 * tail)
    mid = 1.0 if lost == won else 2 * tail - mass
    return McNemar(int((a & b).sum()), lost, won, int((~a & ~b).sum()), exact, mid)


def sign_flip_p(delta: Floats, *, draws: int = 9999, seed: int = 0) -> float:
    """Two-sided permutation p of a mean difference: all sign patterns of up to 14 differences, else seeded draws."""
    moved = delta[delta != 0]
    if moved.size == 0:
        return 1.0
    limit = abs(math.fsum(moved)) * (1 - 1e-12)
    if moved.size <= EXACT_SIGNS:
        signs = np.array(list(product((-1.0, 1.0), repeat=moved.size)))
        return float((np.abs(signs @ moved) >= limit).mean())
    rng = generator(Seed(run=seed, purpose="sign flips"))
    step, hits = max(1, 500_000 // moved.size), 0
    for start in range(0, draws, step):
        signs = rng.integers(0, 2, (min(step, draws - start), moved.size)) * 2.0 - 1.0
        hits += int((np.abs(signs @ moved) >= limit).sum())
    return (1 + hits) / (1 + draws)


def problems_needed(deviation: float, difference: float, *, power: float = 0.8, level: float = 0.95) -> int:
    """Problems for a paired two-sided t test at 1 - level to see `difference` with that power.

    `deviation` is the standard deviation over problems of the paired difference. Raises OptionError for 0.

    >>> problems_needed(0.5, 0.1)
    199
    """
    check_level(level)
    if difference == 0 or not math.isfinite(difference) or not deviation >= 0 or not 0 < power < 1:
        raise OptionError("difference", f"{difference!r} with deviation {deviation!r}, power {power!r} has no answer")
    effect = deviation / abs(difference)
    needed = max(2.0, (reach(math.inf, level) + reach(math.inf, 2 * power - 1)) ** 2 * effect**2)
    for _ in range(50):  # t depends on n; the map contracts
        freedom = max(1.0, needed - 1)
        again = max(2.0, (reach(freedom, level) + reach(freedom, 2 * power - 1)) ** 2 * effect**2)
        if abs(again - needed) < 1e-6 * needed:
            break
        needed = again
    return math.ceil(needed)


def difference_estimate(delta: Floats, level: float = 0.95, n_samples: int = 0) -> Estimate:
    """The mean of one difference per problem with its interval; see `compare_runs`."""
    if delta.size < 2 or np.isnan(delta).any():
        note = "needs two problems" if delta.size < 2 else "undefined for some problem"
        return undefined_estimate(delta.size, n_samples, level, note)
    mean = float(delta.mean())
    if not np.ptp(delta) and abs(mean) <= 1:
        return Estimate(mean, *_no_spread(mean, delta.size, level), delta.size, n_samples, "no spread", level=level)
    half = reach(delta.size - 1, level) * math.sqrt(_with_both_outcomes(delta))
    return Estimate(mean, mean - half, mean + half, delta.size, n_samples, "paired agresti-min", level=level)


def _with_both_outcomes(delta: Floats) -> float:
    """The variance of the mean were there half a problem more that is won, half a one that is lost, and a tied one."""
    mean = float(delta.sum()) / (delta.size + 2)
    squares = float(((delta - mean) ** 2).sum()) + ((1 - mean) ** 2 + (1 + mean) ** 2) / 2 + mean**2
    return squares / (delta.size + 1) / delta.size


def _no_spread(mean: float, problems: int, level: float) -> tuple[float, float]:
    """Where the mean difference of shares may lie when all problems seen agree on it: others are rare, not impossible.

    >>> [round(end, 3) for end in _no_spread(0.0, 40, 0.95)]
    [-0.072, 0.072]
    """
    rare = 1 - (1 - level) ** (1 / problems)  # a larger share of others would have shown itself
    return mean - rare * (1 + mean), mean + rare * (1 - mean)


def _pairs(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise OptionError("comparison", f"{a.size} values against {b.size}: pairs need one value per problem and run")
    return a, b
