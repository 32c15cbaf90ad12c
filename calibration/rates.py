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
