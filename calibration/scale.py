"""Score scales: the domain of a score, its orientation, and its conversion to a nonconformity
score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from atts.errors import CalibrationInputError, OptionError

Worse = Literal["higher", "lower"]
Measure = Literal["log", "linear"]

_SLACK = 1e-6  # sums of float32 log-probs may miss a closed end of the domain by this much


@dataclass(frozen=True, slots=True)
class Scale:
    """The declaration a score comes with.

    `low` and `high` bound the domain (both ends belong to it), `worse` says which end a weak chunk
    is near, and `measure` whether differences are read on the logarithm (perplexities) or as they
    are (mean log-probs, judge marks).
    """

    name: str
    low: float
    high: float
    worse: Worse = "higher"
    measure: Measure = "linear"

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise CalibrationInputError("score domain", (self.low, self.high), "low < high")
        if self.measure == "log" and self.low <= 0:
            raise CalibrationInputError(
                "score domain", (self.low, self.high), "low > 0 for a logarithmic measure"
            )

    def nonconformity(self, score: object, what: str = "score") -> float:
        """The score on the scale everything here is computed on: larger is worse, never NaN,
        infinite only if the score is.

        :raises CalibrationInputError: naming it as `what`, if it is not a number, is NaN, or lies
            outside the domain.

        >>> PERPLEXITY.nonconformity(1.0), LOG_PROB.nonconformity(-2.5)
        (0.0, 2.5)
        """
        value = (
            score if type(score) is float else plain_number(what, score, f"a number, {self.domain}")
        )
        if not self.low <= value <= self.high:
            if not self.low - _SLACK <= value <= self.high + _SLACK:
                raise CalibrationInputError(what, value, self.domain)
            value = min(max(value, self.low), self.high)
        if self.measure == "log":
            value = math.log(value)
        return value if self.worse == "higher" else -value

    @property
    def domain(self) -> str:
        """The domain in words."""
        return f"a {self.name} in [{self.low:g}, {self.high:g}]"


def plain_number(what: str, value: object, expected: str = "a number") -> float:
    """Any real number as a float, numpy's included.

    :raises CalibrationInputError: naming it as `what`, if it is none; texts and truth values are
        none.
    """
    try:
        if not isinstance(value, (bool, str, bytes)):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        pass
    raise CalibrationInputError(what, value, expected)


PERPLEXITY = Scale("perplexity", 1.0, math.inf, "higher", "log")
LOG_PROB = Scale("mean log-prob", -math.inf, 0.0, "lower")
REAL = Scale("number", -math.inf, math.inf)
SCALES = {"perplexity": PERPLEXITY, "logprob": LOG_PROB, "real": REAL}


def scale_named(name: str) -> Scale:
    """One of the declared scales by name.

    :raises OptionError: for an unknown name.
    """
    if name not in SCALES:
        raise OptionError(name, "is not a scale of scores", sorted(SCALES))
    return SCALES[name]
