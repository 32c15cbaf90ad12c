"""Rates of graded samples: pass@k and its kin, exact per problem, averaged over problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from atts.distributions import hypergeometric_tail
from atts.errors import OptionError
from atts.evaluators.metrics.intervals import Estimate, Floats, Ints, mean_estimate

Graded = Sequence[Sequence[bool | None]]
"""Per problem, per sample: right, wrong, or None where it is not known."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Per problem: `n` samples, `c` of them right."""

    n: Ints
    c: Ints

    @property
    def samples(self) -> int:
        """All samples."""
        return int(self.n.sum())


def count(correct: Graded) -> Counts:
    """Samples and right ones per problem, ragged or not; always what is there, never what was configured.

    >>> counts = count([[True, False, None], [True]])
    >>> counts.n.tolist(), counts.c.tolist()
    ([3, 1], [1, 1])
    """
    if isinstance(correct, np.ndarray) and correct.dtype != object and correct.ndim == 2:
        right = np.asarray(correct, dtype=bool).sum(axis=1)
        return Counts(np.full(len(correct), correct.shape[1], dtype=np.int64), right.astype(np.int64))
    n = np.fromiter(map(len, correct), np.int64, len(correct))
    c = np.fromiter((sum(bool(one) for one in row) for row in correct), np.int64, len(correct))
    return Counts(n, c)


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """P(some of k samples drawn without replacement is right) per problem: unbiased; NaN where n < k.

    >>> pass_at_k([4, 4, 1], [0, 2, 1], 2).round(4).tolist()
    [0.0, 0.8333, nan]
    """
    counts, right = _checked(n, c, k)
    return np.where(counts < k, np.nan, 1 - _none_of(counts, counts - right, k))


def pass_hat_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """pass^k: P(all of k samples drawn without replacement are right); NaN where n < k."""
    counts, right = _checked(n, c, k)
    return np.where(counts < k, np.nan, _none_of(counts, right, k))


def g_pass_at_k(n: ArrayLike, c: ArrayLike, k: int, tau: float) -> Floats:
    """G-pass@k: P(at least the share tau of k samples is right, one at the least); NaN where n < k.

    tau near 0 is pass@k, tau = 1 is pass^k. Raises OptionError for a tau outside [0, 1].
    """
    if not 0 <= tau <= 1:
        raise OptionError("tau", f"{tau!r} is not between 0 and 1")
    counts, right = _checked(n, c, k)
    least = max(1, math.ceil(Fraction(str(tau)) * k))  # exact: 0.28 * 25 is 7.000000000000001 in floats
    return hypergeometric_tail(least, counts, right, k)


def avg_at_n(counts: Counts) -> Floats:
    """The share of right samples per problem (pass@1); NaN where there is no sample."""
    return np.where(counts.n > 0, counts.c / np.maximum(counts.n, 1), np.nan)


def rate(values: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> Estimate:
    """The mean of per-problem values with its interval; `n` are the samples per problem.

    Problems whose value is NaN (too few samples) make it undefined.
    """
    array, counts = np.asarray(values, dtype=np.float64), np.asarray(n, dtype=np.int64)
    missing = int(np.isnan(array).sum())
    estimate = mean_estimate(array, int(counts.sum()), level=level)
    return replace(estimate, note=f"too few samples in {missing} of {array.size} problems") if missing else estimate


def _checked(n: ArrayLike, c: ArrayLike, k: int) -> tuple[Ints, Ints]:
    counts, right = np.atleast_1d(np.asarray(n, dtype=np.int64)), np.atleast_1d(np.asarray(c, dtype=np.int64))
    if k < 1:
        raise OptionError("k", f"{k} is not at least 1")
    if (right > counts).any() or (right < 0).any():
        raise OptionError("c", "there are more right samples than samples, or fewer than none")
    return counts, right


def _none_of(n: Ints, bad: Ints, k: int) -> Floats:
    """C(bad, k) / C(n, k) as a product of k ratios: exact enough, and never an overflow."""
    product = np.ones(n.shape)
    for drawn in range(k):
        product *= np.clip(bad - drawn, 0, None) / np.maximum(n - drawn, 1)
    return product
