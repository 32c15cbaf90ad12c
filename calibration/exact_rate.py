"""The escalation rate as an exact fraction, and the check of numbers between 0 and 1."""

from __future__ import annotations

from fractions import Fraction

from atts.errors import CalibrationInputError

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
