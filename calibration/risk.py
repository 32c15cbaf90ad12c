"""P-values of "the mean loss exceeds epsilon" and the sample sizes they need: the tests behind Learn-then-Test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from atts.calibration.rates import check_fraction
from atts.errors import CalibrationInputError, OptionError

RiskTest = Literal["binomial", "hoeffding-bentkus", "betting"]
Losses = NDArray[np.float64]


def checked_losses(losses: ArrayLike) -> Losses:
    """One loss in [0, 1] per problem, as an array.

    :raises CalibrationInputError: if there is none, or one is outside [0, 1].
    """
    array = np.asarray(losses, float)
    if array.ndim != 1 or not len(array):
        raise CalibrationInputError("losses", array.shape, "one number per problem, at least one problem")
    if not ((array >= 0) & (array <= 1)).all():
        raise CalibrationInputError("loss", float(array[~((array >= 0) & (array <= 1))][0]), "a number in [0, 1]")
    return array


def lost_answers(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """The loss of each problem: how often the target alone is right and the policy wrong.

    One row per problem; with a column per paired sample the loss is the fraction of samples, so a problem stays one
    unit however many samples it has.

    >>> lost_answers([[1, 1], [0, 1]], [[1, 0], [0, 1]]).tolist()
    [0.5, 0.0]
    """
    target, policy = np.asarray(target_right, bool), np.asarray(policy_right, bool)
    if target.shape != policy.shape or target.ndim not in (1, 2):
        raise CalibrationInputError("answers", (target.shape, policy.shape), "two equal shapes, a row per problem")
    lost = (target & ~policy).astype(float)
    return lost if lost.ndim == 1 else np.asarray(lost.mean(axis=1), float)


def binomial_p_value(losses: ArrayLike, epsilon: float) -> float:
    """P(Bin(n, epsilon) <= number of losses): exact for 0/1 losses of independent problems with mean >= epsilon.

    :raises CalibrationInputError: if a loss is neither 0 nor 1.
    """
    array = checked_losses(losses)
    if not ((array == 0) | (array == 1)).all():
        raise CalibrationInputError("loss", "a fraction", "0 or 1 for the exact binomial test")
    return float(scipy.stats.binom.cdf(array.sum(), len(array), epsilon))


def hoeffding_bentkus_p_value(losses: ArrayLike, epsilon: float) -> float:
    """min(exp(-n h(min(R, epsilon), epsilon)), e P(Bin(n, epsilon) <= ceil(n R))) for losses in [0, 1] with mean R."""
    array = checked_losses(losses)
    n, risk = len(array), float(array.mean())
    kept = min(risk, epsilon)
    entropy = sum(p * math.log(p / q) for p, q in ((kept, epsilon), (1 - kept, 1 - epsilon)) if p > 0)
    hoeffding = math.exp(-n * entropy)
    bentkus = math.e * float(scipy.stats.binom.cdf(math.ceil(n * risk - 1e-9), n, epsilon))
    return min(1.0, hoeffding, bentkus)


def betting_p_value(losses: ArrayLike, epsilon: float) -> float:
    """A p-value from betting against "the mean loss is at least epsilon", problem by problem in the given order.

    The capital prod(1 + b_i (epsilon - loss_i)), each b_i fixed before its loss is seen, is a supermartingale under
    that hypothesis, so 1 / its maximum is a p-value (Ville). It gains on Hoeffding-Bentkus when losses are fractions
    of small variance, and the order of problems must not depend on their losses.
    """
    log_capital = best = 0.0
    total, square, seen = epsilon, epsilon * (1 - epsilon), 1
    for loss in checked_losses(losses).tolist():
        mean, variance = total / seen, square / seen
        gain = epsilon - mean
        bet = max(0.0, min(0.75 / (1 - epsilon), gain / max(variance + gain * gain, 1e-9)))
        bet = max(bet, 0.1)  # never idle: an early unlucky loss must not end the betting
        log_capital += math.log1p(bet * (epsilon - loss))
        best = max(best, log_capital)
        total, square, seen = total + loss, square + (loss - mean) ** 2, seen + 1
    return math.exp(-best)


_TESTS = {
    "binomial": binomial_p_value,
    "hoeffding-bentkus": hoeffding_bentkus_p_value,
    "betting": betting_p_value,
}


def risk_p_value(losses: ArrayLike, epsilon: float, test: RiskTest | None = None) -> float:
    """The p-value of "the true mean loss exceeds epsilon"; without a test named, the sharpest one for the kind of
    loss.

    That is the exact binomial for 0/1 losses, betting for fractions.

    :raises OptionError: for an unknown test.
    """
    check_fraction("epsilon", epsilon)
    array = checked_losses(losses)
    if test is None:
        test = "binomial" if ((array == 0) | (array == 1)).all() else "betting"
    if test not in _TESTS:
        raise OptionError(str(test), "is not a test of risk", sorted(_TESTS))
    return _TESTS[test](array, epsilon)


def rejected(p_values: Sequence[float], delta: float) -> list[int]:
    """Which hypotheses fixed-sequence testing rejects with family-wise error at most delta, as indices.

    It goes down the list, whose order must not depend on the data, and stops at the first p above delta.

    >>> rejected([0.001, 0.04, 0.2, 0.01], 0.1)
    [0, 1]
    """
    return list(takewhile(lambda place: p_values[place] <= delta, range(len(p_values))))


def fewest_problems(epsilon: float, delta: float) -> int:
    """How many problems without a single loss certify epsilon at delta.

    >>> fewest_problems(0.05, 0.1)
    45
    """
    return math.ceil(math.log(delta) / math.log1p(-epsilon))


def problems_needed(risk: float, epsilon: float, delta: float, limit: int = 10**7) -> int | None:
    """About how many problems certify epsilon at delta if the observed loss stays `risk`; None beyond the limit."""
    if risk >= epsilon:
        return None

    def enough(n: int) -> bool:
        return float(scipy.stats.binom.cdf(math.ceil(n * risk - 1e-9), n, epsilon)) <= delta

    high = fewest_problems(epsilon, delta)
    while not enough(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
