"""The escalation rate as an exact fraction."""

from __future__ import annotations

import math
from fractions import Fraction

from atts.errors import CalibrationInputError

Rate = float | Fraction


def exact_rate(rate: object) -> Fraction:
    """The rate as written: 0.4 is two fifths, not its nearest double.

    :raises CalibrationInputError: if it is not a number in [0, 1].

    >>> exact_rate(0.4)
    Fraction(2, 5)
    """
    if isinstance(rate, bool) or not isinstance(rate, (int, float, Fraction)):
        raise CalibrationInputError("rate", rate, "a number in [0, 1]")
    if isinstance(rate, float) and not math.isfinite(rate):
        raise CalibrationInputError("rate", rate, "a number in [0, 1]")
    value = rate if isinstance(rate, Fraction) else Fraction(repr(float(rate)))
    if not 0 <= value <= 1:
        raise CalibrationInputError("rate", rate, "a number in [0, 1]")
    return value


def rate_of(budget: int, samples: int) -> Fraction:
    """The rate that spends `budget` escalations on `samples` chunks: B of m.

    :raises CalibrationInputError: unless 0 <= budget <= samples and samples >= 1.

    >>> rate_of(4, 16)
    Fraction(1, 4)
    """
    if samples < 1:
        raise CalibrationInputError("m", samples, "at least one chunk")
    if not 0 <= budget <= samples:
        raise CalibrationInputError("B", budget, f"between 0 and m = {samples}")
    return Fraction(budget, samples)
