"""P-values of "the mean loss exceeds epsilon" and the sample sizes they need: the tests behind
Learn-then-Test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atts.calibration.exact_rate import check_fraction
from atts.errors import CalibrationInputError, OptionError
from atts.sampling import beta_quantile, beta_upper_quantile, binomial_cdf

RiskTest = Literal["binomial", "hoeffding-bentkus", "betting"]
Losses = NDArray[np.float64]


def checked_losses(losses: ArrayLike, low: float = 0.0) -> Losses:
    """One loss in [low, 1] per problem, as an array.

    :raises CalibrationInputError: if there is none, or one is outside [low, 1].
    """
    array = np.asarray(losses, float)
    if array.ndim != 1 or not len(array):
        raise CalibrationInputError(
            "losses", array.shape, "one number per problem, at least one problem"
        )
    outside = ~((array >= low) & (array <= 1))
    if outside.any():
        raise CalibrationInputError("loss", float(array[outside][0]), f"a number in [{low:g}, 1]")
    return array


def lost_answers(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """The loss of each problem: how often the target alone is right and the policy wrong.

    One row per problem; with a column per paired sample the loss is the fraction of samples, so a
    problem stays one unit however many samples it has.

    >>> lost_answers([[1, 1], [0, 1]], [[1, 0], [0, 1]]).tolist()
    [0.5, 0.0]
    """
    target, policy = _answers(target_right, policy_right)
    return _by_problem((target & ~policy).astype(float))


def net_losses(target_right: ArrayLike, policy_right: ArrayLike) -> Losses:
    """The net loss of each problem, in [-1, 1]: how much more often the target alone is right than
    the policy.

    Two runs of the same models differ in single answers by sampling alone; what one wins and loses
    so cancels here.

    >>> net_losses([[1, 1], [0, 1]], [[1, 0], [1, 1]]).tolist()
    [0.5, -0.5]
    """
    target, policy = _answers(target_right, policy_right)
    return _by_problem(target.astype(float) - policy.astype(float))


def _answers(
    target_right: ArrayLike, policy_right: ArrayLike
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    target = np.asarray(target_right, bool)
    policy = np.asarray(policy_right, bool)
    if target.shape != policy.shape or target.ndim not in (1, 2):
        raise CalibrationInputError(
            "answers", (target.shape, policy.shape), "two equal shapes, a row per problem"
        )
    return target, policy


def _by_problem(values: Losses) -> Losses:
    return values if values.ndim == 1 else np.asarray(values.mean(axis=1), float)


def binomial_p_value(losses: ArrayLike, epsilon: float) -> float:
    """P(Bin(n, epsilon) <= number of losses): exact for 0/1 losses of independent problems with
    mean >= epsilon.

    :raises CalibrationInputError: if a loss is neither 0 nor 1.
    """
    array = checked_losses(losses)
    if not ((array == 0) | (array == 1)).all():
        raise CalibrationInputError("loss", "a fraction", "0 or 1 for the exact binomial test")
    return float(binomial_cdf(array.sum(), len(array), epsilon))


def hoeffding_bentkus_p_value(losses: ArrayLike, epsilon: float) -> float:
    """min(exp(-n h(min(R, epsilon), epsilon)), e P(Bin(n, epsilon) <= ceil(n R))) for losses in [0,
    1] with mean R.
    """
    array = checked_losses(losses)
    n = len(array)
    risk = float(array.mean())
    kept = min(risk, epsilon)
    entropy = sum(
        p * math.log(p / q) for p, q in ((kept, epsilon), (1 - kept, 1 - epsilon)) if p > 0
    )
    hoeffding = math.exp(-n * entropy)
    bentkus = math.e * float(binomial_cdf(math.ceil(n * risk - 1e-9), n, epsilon))
    return min(1.0, hoeffding, bentkus)


def betting_p_value(losses: ArrayLike, epsilon: float) -> float:
    """A p-value from betting against "the mean loss is at least epsilon", problem by problem in the
    given order.

    The capital prod(1 + b_i (epsilon - loss_i)), each b_i fixed before its loss is seen, is a
    supermartingale under that hypothesis, so 1 / its maximum is a p-value (Ville). It gains on
    Hoeffding-Bentkus when losses are fractions of small variance, and the order of problems must
    not depend on their losses.
    """
    array = checked_losses(losses)
    seen = np.arange(1, len(array) + 1)
    mean = (epsilon + _before(array)) / seen
    variance = (epsilon * (1 - epsilon) + _before((array - mean) ** 2)) / seen
    gain = epsilon - mean
    bets = np.clip(gain / np.maximum(variance + gain * gain, 1e-9), 0.0, 0.75 / (1 - epsilon))
    bets = np.maximum(bets, 0.1)  # never idle: an early unlucky loss must not end the betting
    capital = np.cumsum(np.log1p(bets * (epsilon - array)))
    return math.exp(-max(0.0, float(capital.max())))


def _before(values: Losses) -> Losses:
    """The sum of all before each."""
    return np.cumsum(values) - values


def net_p_value(losses: ArrayLike, epsilon: float) -> float:
    """The p-value of "the mean net loss is at least epsilon", from one net loss in [-1, 1] per
    problem.

    Where all are -1, 0 or 1 it is exact: the chance of so few problems lost more than won, at the
    worst share of problems that differ within its 99.9 % interval, and .001 for that interval
    (Berger and Boos). Else it is that of betting on the losses moved into [0, 1]; the order of
    problems must then not depend on them.
    """
    array = checked_losses(losses, -1.0)
    if not np.isin(array, (-1.0, 0.0, 1.0)).all():
        return betting_p_value((array + 1) / 2, (epsilon + 1) / 2)
    n = len(array)
    differing = int(np.count_nonzero(array))
    net = round(float(array.sum()))
    low = float(beta_quantile(_APART / 2, differing, n - differing + 1)) if differing else 0.0
    high = beta_upper_quantile(_APART / 2, differing + 1, n - differing) if differing < n else 1.0
    shares = np.linspace(max(low, epsilon), max(high, epsilon), 65)
    return min(
        1.0, _APART + max(_chance_of_at_most(net, n, float(share), epsilon) for share in shares)
    )


_APART = 0.001


def _chance_of_at_most(net: int, n: int, differing: float, epsilon: float) -> float:
    """P(lost - won <= net) of n problems of which a share differs, and epsilon more of them are
    lost than won.
    """
    size = 2 * n + 1
    turn = np.exp(-2j * np.pi * np.arange(n + 1) / size)
    lost = (differing + epsilon) / 2
    won = (differing - epsilon) / 2
    # places count modulo `size`
    law = np.fft.irfft((1 - differing + lost * turn + won * turn.conj()) ** n, size)
    return float(np.clip(np.roll(law, n)[: net + n + 1].sum(), 0.0, 1.0))


_TESTS = {
    "binomial": binomial_p_value,
    "hoeffding-bentkus": hoeffding_bentkus_p_value,
    "betting": betting_p_value,
}


def risk_p_value(losses: ArrayLike, epsilon: float, test: RiskTest | None = None) -> float:
    """The p-value of "the true mean loss exceeds epsilon"; without a test named, the sharpest one
    for the kind of loss.

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
    """Which hypotheses fixed-sequence testing rejects with family-wise error at most delta, as
    indices.

    It goes down the list, whose order must not depend on the data, and stops at the first p above
    delta.

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
    """About how many problems certify epsilon at delta if the observed loss stays `risk`; None
    beyond the limit.
    """
    if risk >= epsilon:
        return None

    def enough(n: int) -> bool:
        return float(binomial_cdf(math.ceil(n * risk - 1e-9), n, epsilon)) <= delta

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
