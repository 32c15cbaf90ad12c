"""What each mode is made of."""

from __future__ import annotations

from typing import Literal, get_args

from atts.calibration.controllers import Adaptive, Controller, Feedback, Fixed
from atts.calibration.pools import ByTurn, Pool, Pooled, Residuals
from atts.errors import OptionError

Mode = Literal["marginal", "question", "turn", "question-turn", "aci"]
MODES: tuple[Mode, ...] = get_args(Mode)


def build(mode: Mode, rate: float) -> tuple[Pool, Controller]:
    """The pool and the controller of a mode.

    :raises OptionError: for an unknown mode.
    """
    variance = max(rate * (1 - rate), 1e-3)
    if mode == "marginal":
        return Pooled(), Fixed(rate)
    if mode == "aci":
        return Pooled(), Adaptive(rate, 0.02)
    if mode == "turn":
        return ByTurn(), Adaptive(rate, 0.01, "turn")
    if mode == "question":
        return Residuals(minimum=10**9), Feedback(rate, 0.2 / variance, 0.0, 0.012 / variance, 0.4)
    if mode == "question-turn":
        return Residuals(), Feedback(rate, 0.2 / variance, 0.024 / variance, 0.012 / variance, 0.4)
    raise OptionError(str(mode), "is not a calibration mode", MODES)
