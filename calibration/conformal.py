"""Conformal p-values and thresholds on a fixed set of stored scores, with their exact finite-sample guarantees.

Everywhere a larger score is worse, and `rate` is the fraction to escalate (the paper's alpha is 1 - rate).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from atts.calibration.rates import Rate, exact_rate
from atts.errors import CalibrationInputError

Scores = Sequence[float] | NDArray[np.float64]
Tail = Literal["lower", "upper"]
Rule = Literal["paper", "reference", "split"]


def stored_array(stored: Scores) -> NDArray[np.float64]:
    """The stored scores as a sorted array.

    :raises CalibrationInputError: if one is NaN, or they are not one list of numbers.
    """
    array = np.sort(np.asarray(stored, float))
    if array.ndim != 1:
        raise CalibrationInputError("stored scores", array.shape, "one list of numbers")
    if len(array) and np.isnan(array[-1]):
        raise CalibrationInputError("stored score", math.nan, "a number")
    return array


def p_value(stored: Scores, score: float, tail: Tail = "lower", theta: float | None = None) -> float:
    """The conformal p-value of `score` among n stored ones.

    "lower" is the paper's, near 1 for a worse score: (1 + #{S <= s}) / (n + 1). "upper" is near 0 for a worse score.
    If the n + 1 scores are exchangeable, P(p <= a) <= a for every a, ties and infinities included. With `theta`, a
    uniform drawn for this score alone, p is smoothed and exactly uniform.

    :raises CalibrationInputError: for NaN.

    >>> p_value([1.0, 2.0, 2.0], 2.0), p_value([1.0, 2.0, 2.0], 2.0, theta=0.5)
    (1.0, 0.625)
    """
    if math.isnan(score):
        raise CalibrationInputError("score", score, "a number")
    array = stored_array(stored)
    left, right = (int(np.searchsorted(array, score, side)) for side in ("left", "right"))
    beyond = left if tail == "lower" else len(array) - right
    return (beyond + (1.0 if theta is None else theta) * (1 + right - left)) / (len(array) + 1)


def split_rank(n: int, rate: Rate) -> int:
    """k = ceil((n + 1)(1 - rate)) in exact arithmetic; k > n means that n scores cannot promise this rate.

    >>> split_rank(9, 0.3), split_rank(8, 0.1)
    (7, 9)
    """
    return math.ceil((n + 1) * (1 - exact_rate(rate)))


def split_threshold(stored: Scores, rate: Rate) -> float:
    """The k-th smallest stored score: escalating iff s > threshold happens with probability in (rate - 1/(n+1), rate].

    The lower end needs scores without ties. +inf (never escalate) where n is too small, -inf at rate 1.
    """
    return _kth(stored_array(stored), split_rank(len(stored), rate))


def pac_rank(n: int, rate: Rate, delta: float) -> int | None:
    """The smallest k whose threshold escalates at most `rate` with probability 1 - delta over the stored scores.

    None where no rank of n scores can promise it, which needs n >= ln(delta) / ln(1 - rate).
    """
    allowed = float(exact_rate(rate))
    _fraction("delta", delta)
    ranks = np.arange(1, n + 1)
    good = np.flatnonzero(stats.beta.ppf(delta, ranks, n + 1 - ranks) >= 1 - allowed)
    return int(ranks[good[0]]) if len(good) else None


def pac_threshold(stored: Scores, rate: Rate, delta: float) -> float:
    """The threshold that escalates at most `rate` of fresh exchangeable scores, with probability 1 - delta.

    +inf, which escalates nothing, where the stored scores are too few to promise more.
    """
    rank = pac_rank(len(stored), rate, delta)
    return _kth(stored_array(stored), len(stored) + 1 if rank is None else rank)


def coverage_interval(n: int, k: int, confidence: float = 0.9) -> tuple[float, float]:
    """Where the true kept fraction of the k-th smallest of n scores lies: central interval of Beta(k, n + 1 - k)."""
    _fraction("confidence", confidence)
    if not 1 <= k <= n:
        raise CalibrationInputError("rank", k, f"between 1 and {n}")
    law = stats.beta(k, n + 1 - k)
    return float(law.ppf((1 - confidence) / 2)), float(law.ppf((1 + confidence) / 2))


def escalates(rule: Rule, below: int, equal: int, n: int, rate: Rate) -> bool:
    """What one of the three published deterministic rules does with a score, in integers so that rounding cannot flip
    it.

    `below` and `equal` count the n stored scores below and equal to it. Without ties the paper's rule escalates at
    least `rate` in expectation, the split quantile at most; the reference's has no +1.
    """
    alpha = 1 - exact_rate(rate)
    if rule == "paper":
        return below + equal + 1 > alpha * (n + 1)
    if rule == "reference":
        return below >= alpha * n
    return below >= math.ceil(alpha * (n + 1)) if alpha else True


def escalation_law(n: int, m: int, rate: Rate) -> Any:
    """How many of m fresh scores the paper's rule escalates with n stored ones: a BetaBinomial over the draw of both.

    :raises CalibrationInputError: at rate 1 (all of them) or where n + 1 is so small that all escalate.
    """
    j = math.floor((1 - exact_rate(rate)) * (n + 1))
    if not 1 <= j <= n:
        raise CalibrationInputError("rate", rate, f"one for which {n} stored scores leave both outcomes possible")
    return stats.betabinom(m, n + 1 - j, j)


def weighted_p_value(stored: Scores, weights: Scores, score: float, theta: float | None = None) -> float:
    """The p-value under weights in [0, 1] per stored score (the new one weighs 1), near 1 for a worse score.

    With fixed weights P(p <= a) <= a + sum of w_i d_TV / (1 + sum of w_i): the price of scores that are not
    exchangeable is their weighted distance from the new one's law. Weights that grow with relevance make that price
    small.
    """
    values, heavy = _weighted(stored, weights)
    if math.isnan(score):
        raise CalibrationInputError("score", score, "a number")
    below, equal = float(heavy[values < score].sum()), float(heavy[values == score].sum())
    return (below + (1.0 if theta is None else theta) * (1 + equal)) / (float(heavy.sum()) + 1)


def weighted_threshold(stored: Scores, weights: Scores, rate: Rate) -> float:
    """The smallest stored score at or below which lies 1 - rate of the weight, the new score's own put at +inf."""
    values, heavy = _weighted(stored, weights)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(heavy[order]) >= float(1 - exact_rate(rate)) * (heavy.sum() + 1) * (1 - 1e-12)
    return float(values[order][int(np.argmax(reached))]) if reached.any() else math.inf


def geometric_weights(n: int, decay: float) -> NDArray[np.float64]:
    """Weights of n scores, oldest first: the newest weighs `decay`, each older one `decay` times less."""
    if not 0 < decay <= 1:
        raise CalibrationInputError("decay", decay, "a number in (0, 1]")
    return decay ** np.arange(n, 0, -1, dtype=float)


@dataclass(frozen=True, slots=True)
class Mondrian:
    """Stored scores in categories chosen before seeing them; each category answers for itself once it is large enough.

    A category with fewer than `minimum` scores falls back to all of them, and then promises only what those do.
    """

    groups: Mapping[Hashable, NDArray[np.float64]]
    everything: NDArray[np.float64]
    minimum: int

    @classmethod
    def of(cls, stored: Scores, labels: Sequence[Hashable], minimum: int = 20) -> Mondrian:
        """Sort `stored` by its `labels`.

        :raises CalibrationInputError: if they differ in number.
        """
        if len(stored) != len(labels):
            raise CalibrationInputError("labels", len(labels), f"one per stored score, {len(stored)}")
        parts = dict[Hashable, list[float]]()
        for score, label in zip(stored, labels, strict=True):
            parts.setdefault(label, []).append(float(score))
        groups = {label: stored_array(scores) for label, scores in parts.items()}
        return cls(groups, stored_array(stored), minimum)

    def scores(self, label: Hashable) -> NDArray[np.float64]:
        """The scores that answer for a category."""
        own = self.groups.get(label)
        return own if own is not None and len(own) >= self.minimum else self.everything

    def p_value(self, score: float, label: Hashable, tail: Tail = "lower", theta: float | None = None) -> float:
        """The p-value of a score within its category."""
        return p_value(self.scores(label), score, tail, theta)

    def threshold(self, label: Hashable, rate: Rate) -> float:
        """The split threshold of a category."""
        return split_threshold(self.scores(label), rate)


def required_size(rate: Rate) -> int:
    """The fewest stored scores whose split threshold is finite at this rate: ceil(1/rate) - 1."""
    allowed = exact_rate(rate)
    if not allowed:
        raise CalibrationInputError("rate", 0, "a positive rate; at 0 no number of scores suffices")
    return math.ceil(Fraction(1) / allowed) - 1


def _kth(ordered: NDArray[np.float64], k: int) -> float:
    if k > len(ordered):
        return math.inf
    return float(ordered[k - 1]) if k >= 1 else -math.inf


def _weighted(stored: Scores, weights: Scores) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values, heavy = np.asarray(stored, float), np.asarray(weights, float)
    if values.shape != heavy.shape or values.ndim != 1:
        raise CalibrationInputError("weights", heavy.shape, f"one per stored score, {values.shape}")
    if np.isnan(values).any() or not ((heavy >= 0) & (heavy <= 1)).all():
        raise CalibrationInputError("stored scores or weights", "an impossible value", "numbers, weights in [0, 1]")
    return values, heavy


def _fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise CalibrationInputError(name, value, "a number strictly between 0 and 1")
