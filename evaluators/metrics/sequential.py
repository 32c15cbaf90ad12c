"""Confidence sequence of a paired difference: an interval that holds after every problem at once, however one stops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import Floats, check_level

Settled = Literal["better", "worse", "alike", "undecided"]
"""Of the second run against the first; "alike": within so many points of each other."""

_STEPS = 200  # candidate differences are this many to the unit
_STAKES = np.arange(0.05, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Sequential:
    """What a comparison that looked after every problem came to."""

    settled: Settled
    problems: int  # until it was settled, or all there were
    low: float
    high: float
    points: float  # differences within so many points count as alike; 0: none do
    level: float = 0.95

    def __str__(self) -> str:
        interval = f"difference in [{self.low:+.3f}, {self.high:+.3f}] ({self.level * 100:g} % after every problem)"
        said = {
            "better": f"better, decided after {self.problems:,} problems",
            "worse": f"worse, decided after {self.problems:,} problems",
            "alike": f"within {self.points:g} points, decided after {self.problems:,} problems",
            "undecided": f"undecided after {self.problems:,} problems",
        }
        return f"{said[self.settled]}; {interval}"

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the same in words."""
        return {**asdict(self), "words": str(self)}


class ConfidenceSequence:
    """The mean of differences in [-1, 1], one per problem, from bets against every candidate mean.

    Against each candidate m a capital is spread over fixed stakes, and grows by 1 + stake (difference - m). Where m is
    the mean of each next difference, given those before, the capital is a martingale: it ever exceeds 1 / (1 - level)
    with probability at most 1 - level (Ville). Candidates whose capital did are out for good, so the interval holds
    after every problem at once. Problems must come in an order that does not depend on their results.
    """

    def __init__(self, level: float = 0.95) -> None:
        """Raises OptionError unless `level` is a probability."""
        check_level(level)
        self.problems = 0
        self._bar = -math.log(1 - level)
        self._means = np.arange(-_STEPS, _STEPS + 1) / _STEPS
        sides = np.concatenate([-_STAKES, _STAKES])
        room = np.where(sides[:, None] > 0, 1 + self._means, 1 - self._means)
        self._bets: Floats = sides[:, None] / np.maximum(room, 1 / _STEPS)
        self._logs: Floats = np.zeros_like(self._bets)

    def add(self, difference: float) -> None:
        """Take the next problem's difference.

        :raises OptionError: it is outside [-1, 1].
        """
        if not -1 <= difference <= 1:
            raise OptionError("difference", f"{difference!r} is outside [-1, 1]")
        self.problems += 1
        self._logs += np.log1p(self._bets * (difference - self._means))
        top = self._logs.max(axis=0, initial=-math.inf)
        capital = top + np.log(np.exp(self._logs - top).mean(axis=0))
        left = capital < self._bar
        if not left.all():
            self._means, self._bets, self._logs = self._means[left], self._bets[:, left], self._logs[:, left]

    @property
    def interval(self) -> tuple[float, float]:
        """The candidates that are left, and the gap up to those next to them that are out."""
        if not self._means.size:  # has probability 1 - level at most
            return math.nan, math.nan
        return max(-1.0, float(self._means[0]) - 1 / _STEPS), min(1.0, float(self._means[-1]) + 1 / _STEPS)

    def answer(self, points: float = 0.0) -> Sequential:
        """Where the comparison stands."""
        low, high = self.interval
        settled: Settled = "undecided"
        if (self._means > 0).all():
            settled = "better"
        elif (self._means < 0).all():
            settled = "worse"
        elif max(-low, high) <= points / 100:
            settled = "alike"
        return Sequential(settled, self.problems, low, high, points, level=-math.expm1(-self._bar))


def compare_in_order(differences: Iterable[float], points: float = 0.0, level: float = 0.95) -> Sequential:
    """Look after every problem, and stop at the first at which it is settled.

    >>> str(compare_in_order([1.0] * 20))
    'better, decided after 8 problems; difference in [+0.050, +1.000] (95 % after every problem)'
    """
    sequence = ConfidenceSequence(level)
    for difference in differences:
        sequence.add(difference)
        if (found := sequence.answer(points)).settled != "undecided":
            return found
    return sequence.answer(points)
