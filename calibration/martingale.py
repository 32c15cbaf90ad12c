"""The simple jumper: a test martingale against exchangeability, fed one p-value at a time."""

from __future__ import annotations

import math
from typing import ClassVar

from atts.calibration.state import Part
from atts.errors import CalibrationInputError

_BETS = (-1.0, -0.5, 0.0, 0.5, 1.0)
_JUMP = 0.01  # the share of the capital that moves at each step


class SimpleJumper(Part):
    """The simple jumper martingale: five bets, between which a little capital moves at each step.

    On p-values that are independent and uniform, as smoothed online conformal p-values of exchangeable values are, its
    value ever reaches 1 / a with probability at most a (Ville). Kept in logarithms, so it cannot overflow.

    >>> martingale = SimpleJumper()
    >>> for _ in range(20): martingale.update(0.99)
    >>> martingale.log_value > 4
    True
    """

    __slots__ = ("_shares", "log_peak", "log_value")
    saved: ClassVar = {"shares": "_shares", "log_total": "log_value", "log_peak": "log_peak"}

    def __init__(self) -> None:
        self._shares = [1 / len(_BETS)] * len(_BETS)
        self.log_value = 0.0  # the logarithm of the capital
        self.log_peak = 0.0

    def update(self, p: float) -> None:
        """Bet on one p-value.

        :raises CalibrationInputError: if it is outside [0, 1].
        """
        if not 0 <= p <= 1:
            raise CalibrationInputError("p-value", p, "a number in [0, 1]")
        common = _JUMP / len(_BETS)
        grown = [
            ((1 - _JUMP) * share + common) * (1 + bet * (p - 0.5))
            for share, bet in zip(self._shares, _BETS, strict=True)
        ]
        total = math.fsum(grown)
        self._shares = [share / total for share in grown]
        self.log_value += math.log(total)
        self.log_peak = max(self.log_peak, self.log_value)

    def alarm(self, significance: float) -> bool:
        """Whether the capital has ever reached 1 / significance."""
        return self.log_peak >= -math.log(significance)
