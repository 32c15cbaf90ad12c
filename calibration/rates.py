"""Rates: exact fractions, and a test of the realised rate against the nominal one."""

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


def exact_rate(rate: object, what: str = "rate") -> Fraction:
    """The rate as written: 0.4 is two fifths, not its nearest double; refused under the name of
    `what`.

    :raises CalibrationInputError: if it is not a number in [0, 1].

    >>> exact_rate(0.4)
    Fraction(2, 5)
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float | Fraction) or not 0 <= rate <= 1:
        raise CalibrationInputError(what, rate, "a number in [0, 1]")
    return rate if isinstance(rate, Fraction) else Fraction(repr(float(rate)))


def check_fraction(name: str, value: float) -> None:
    """:raises CalibrationInputError: for a value outside (0, 1), or NaN."""
    if not 0 < value < 1:
        raise CalibrationInputError(name, value, "a number strictly between 0 and 1")


Standing = Literal["held", "unclear", "left"]
COIN = 0.95  # inside where that share of fair coins stays, a rate is held
_CLUSTERED = 0.99  # outside where that share of such questions stays, it is not


@dataclass(frozen=True, slots=True)
class RateCheck:
    """A realised rate beside the nominal one.

    `held`: inside `coin`, where 95 % of fair coins stay. `left`: outside `band` as well, where 99 %
    of runs stay whose questions differ as these do; a run whose gate works is called so once in a
    hundred times. `unclear`: between.
    """

    standing: Standing
    nominal: float
    share: float
    decisions: int
    questions: int
    coin: tuple[float, float]
    band: tuple[float, float]

    def __str__(self) -> str:
        share = f"{self.share:.3f} of {self.decisions:,} chunks were escalated, nominal {self.nominal:g}"
        if self.standing == "left":
            return f"{share}: left its band, outside {_span(self.band)}"
        if self.standing == "unclear":
            return (
                f"{share}: too few questions to tell; coins would stay in {_span(self.coin)}, "
                f"{self.questions:,} questions as different as these in {_span(self.band)}"
            )
        few = (self.coin[1] - self.coin[0]) / 2 > min(self.nominal, 1 - self.nominal) / 2
        return f"{share}{f', so few allow {_span(self.coin)}' if few else ''}: held"


def check_rate(rate: Rate, questions: Sequence[tuple[int, int]]) -> RateCheck:
    """Judge the (decisions, escalated) of each question.

    :raises CalibrationInputError: if there is no decision, or one question escalated more than it
        decided.

    >>> check_rate(0.2, [(20, 4)] * 10).standing, check_rate(0.2, [(20, 9)] * 10).standing
    ('held', 'left')
    >>> check_rate(0.2, [(20, 1), (20, 18), (20, 0), (20, 9), (20, 3)]).standing
    'unclear'
    """
    nominal = float(exact_rate(rate))
    rows = np.array([row for row in questions if row[0]], float).reshape(-1, 2)
    if not len(rows) or (rows[:, 1] > rows[:, 0]).any() or (rows < 0).any():
        raise CalibrationInputError(
            "questions", list(questions)[:5], "(decisions, escalated), some decision among them"
        )
    n = int(rows[:, 0].sum())
    share = float(rows[:, 1].sum() / rows[:, 0].sum())
    coin = coin_band(n, nominal)
    reach = _reach(rows, share, nominal)
    band = (min(coin[0], max(0.0, nominal - reach)), max(coin[1], min(1.0, nominal + reach)))
    standing: Standing = (
        "held"
        if coin[0] <= share <= coin[1]
        else "unclear"
        if band[0] <= share <= band[1]
        else "left"
    )
    return RateCheck(
        standing, nominal, share, decisions=n, questions=len(rows), coin=coin, band=band
    )


def coin_band(n: int, rate: float | None, confidence: float = COIN) -> tuple[float, float]:
    """Where the share of `n` coins of this rate lies with at least this probability; everywhere
    without a rate.

    >>> coin_band(100, 0.2)
    (0.12, 0.28)
    """
    if rate is None:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    return binomial_quantile(tail, n, rate) / n, binomial_quantile(1 - tail, n, rate) / n


def _reach(rows: NDArray[np.float64], share: float, nominal: float) -> float:
    """How far from the nominal rate the share of so few questions that differ so much may be; never
    nearer than coins.

    The standard error is that of a ratio over questions, the quantile Student's for their number.
    """
    count = len(rows)
    n = float(rows[:, 0].sum())
    if count < 2:
        return 1.0
    apart = rows[:, 1] - share * rows[:, 0]
    error = math.sqrt(count / (count - 1) * float((apart**2).sum())) / n
    return student_quantile((1 + _CLUSTERED) / 2, count - 1) * max(
        error, math.sqrt(nominal * (1 - nominal) / n)
    )


def _span(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]"
