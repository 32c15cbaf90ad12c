"""Rates as exact fractions, and a test of the realised rate against the nominal rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atts.errors import CalibrationInputError
from atts.sampling import binomial_quantile, student_quantile

Rate = float | Fraction

Standing = Literal["held", "unclear", "left"]
"""The verdict on a realised rate: on target ("held"), off target ("left"), or "unclear"."""

# A rate is on target if it is inside the central interval of this probability for independent
# coins.
COIN = 0.95
# A rate is off target if it is outside the interval of this probability for runs whose questions
# vary as much. The two levels differ on purpose: a working gate is called off target once in a
# hundred runs, not once in twenty, and a rate between the two intervals is called unclear.
_CLUSTERED = 0.99


def exact_rate(rate: object, what: str = "rate") -> Fraction:
    """Return the rate as its decimal text says: 0.4 becomes two fifths, not its nearest double.

    Ranks such as ceil((n + 1)(1 - rate)) jump by one where floats round across an integer; for
    rates in hundredths that happens for 231 of the sizes below 400.

    :raises CalibrationInputError: naming the rate as `what`, if it is not a number in [0, 1].

    >>> exact_rate(0.4)
    Fraction(2, 5)
    """
    # True and False are ints to Python, but not rates.
    if isinstance(rate, bool) or not isinstance(rate, int | float | Fraction):
        raise CalibrationInputError(what, rate, "a number in [0, 1]")
    if not 0 <= rate <= 1:
        raise CalibrationInputError(what, rate, "a number in [0, 1]")
    if isinstance(rate, Fraction):
        return rate
    return Fraction(repr(float(rate)))


def check_fraction(name: str, value: float) -> None:
    """Refuse a number that is not strictly between 0 and 1.

    :raises CalibrationInputError: for a value outside (0, 1), or NaN.
    """
    if not 0 < value < 1:
        raise CalibrationInputError(name, value, "a number strictly between 0 and 1")


@dataclass(frozen=True, slots=True)
class RateCheck:
    """A realised rate compared with the nominal one.

    It is `held` inside `coin`, which contains 95 % of the rates of independent coins. It is `left`
    outside `band`, which contains 99 % of the rates of runs whose questions vary as these do; so a
    gate that works is called off target once in a hundred runs. In between it is `unclear`.
    """

    standing: Standing
    nominal: float
    share: float
    decisions: int
    questions: int
    coin: tuple[float, float]
    band: tuple[float, float]

    def __str__(self) -> str:
        share = (
            f"{self.share * self.decisions:,.0f} of {self.decisions:,} chunks were escalated "
            f"({100 * self.share:.1f} %), nominal rate {100 * self.nominal:g} %"
        )
        if self.standing == "left":
            return f"{share}: off target, outside the band {_interval_text(self.band)}"
        if self.standing == "unclear":
            return (
                f"{share}: too few questions to tell; independent coins would stay in "
                f"{_interval_text(self.coin)}, {self.questions:,} questions that vary like these "
                f"in {_interval_text(self.band)}"
            )
        low, high = self.coin
        # With few decisions the interval is so wide that being inside it says little, so the text
        # names it.
        is_wide = (high - low) / 2 > min(self.nominal, 1 - self.nominal) / 2
        width = f", so few allow {_interval_text(self.coin)}" if is_wide else ""
        return f"{share}{width}: on target"


def check_rate(rate: Rate, questions: Sequence[tuple[int, int]]) -> RateCheck:
    """Compare the realised rate of (decisions, escalated) pairs, one per question, with `rate`.

    :raises CalibrationInputError: if there is no decision, or if a question has more escalations
    than decisions.

    >>> check_rate(0.2, [(20, 4)] * 10).standing, check_rate(0.2, [(20, 9)] * 10).standing
    ('held', 'left')
    >>> check_rate(0.2, [(20, 1), (20, 18), (20, 0), (20, 9), (20, 3)]).standing
    'unclear'
    """
    nominal = float(exact_rate(rate))
    # [questions, (decisions, escalated)]
    rows = np.array([row for row in questions if row[0]], float).reshape(-1, 2)
    if not len(rows) or (rows[:, 1] > rows[:, 0]).any() or (rows < 0).any():
        raise CalibrationInputError(
            "questions",
            list(questions)[:5],
            "(decisions, escalated) of each question, with at least one decision",
        )
    decisions = int(rows[:, 0].sum())
    share = float(rows[:, 1].sum() / rows[:, 0].sum())
    coin = coin_band(decisions, nominal)
    reach = _clustered_reach(rows, share, nominal)
    band = (min(coin[0], max(0.0, nominal - reach)), max(coin[1], min(1.0, nominal + reach)))
    standing: Standing = "left"
    if coin[0] <= share <= coin[1]:
        standing = "held"
    elif band[0] <= share <= band[1]:
        standing = "unclear"
    return RateCheck(
        standing, nominal, share, decisions=decisions, questions=len(rows), coin=coin, band=band
    )


def coin_band(n: int, rate: float | None, confidence: float = COIN) -> tuple[float, float]:
    """Return an interval that contains the share of `n` coins of this rate with at least this
    probability.

    The ends are quantiles of the binomial distribution, so that no normal approximation is needed
    for few decisions or rates near 0. Without a rate the band is [0, 1].

    >>> coin_band(100, 0.2)
    (0.12, 0.28)
    """
    if rate is None:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = binomial_quantile(tail, n, rate) / n
    high = binomial_quantile(1 - tail, n, rate) / n
    return low, high


def _clustered_reach(rows: NDArray[np.float64], share: float, nominal: float) -> float:
    """Return how far the rate may be from the nominal rate if questions vary as these do.

    Decisions of one question move together, so the question is the unit: the share is a ratio of
    two sums over questions, and its standard error is the linearised one of a ratio estimator
    (Cochran, "Sampling Techniques", chapter 6). The quantile is Student's for the number of
    questions. This assumes that questions are independent of each other. The distance is never
    below that of independent coins.
    """
    count = len(rows)
    decisions = float(rows[:, 0].sum())
    if count < 2:
        return 1.0
    residuals = rows[:, 1] - share * rows[:, 0]
    error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / decisions
    coin_error = math.sqrt(nominal * (1 - nominal) / decisions)
    return student_quantile((1 + _CLUSTERED) / 2, count - 1) * max(error, coin_error)


def _interval_text(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]"
