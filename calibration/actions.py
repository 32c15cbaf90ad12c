"""Unscored actions: the least predicted probability at which few of them are wrong."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atts.calibration.exact_rate import check_fraction
from atts.calibration.guarantees import TEXTS
from atts.calibration.risk import betting_p_value

_LADDERS = ((0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5), (0.8, 0.7, 0.6, 0.5))
"""Thresholds tried from the strictest down; each ladder has an equal part of what the test may be
wrong.
"""
_GROWTH = 1.25
_FIRST = 20
_KEPT = 20_000


class ActionRule:
    """Acts where the probability of a level is at least a threshold, tested to be wrong at most
    `alpha` of the time.

    Learn-then-Test on labelled chunks: against "of the chunks acted on, more than alpha are wrong"
    a capital is bet question by question, each question counting as one however many chunks it has,
    for they move together. Labels must not depend on what was decided: they come from scores, from
    exploration, or from a calibration run.
    """

    __slots__ = ("_alpha", "_chunks", "_count", "_kept", "_next", "threshold")

    def __init__(self, alpha: float, kept: float = 0.9) -> None:
        """:raises CalibrationInputError: for alpha or `kept` outside (0, 1)."""
        check_fraction("alpha", alpha)
        check_fraction("kept", kept)
        self._alpha = alpha
        self._kept = kept
        self._chunks = dict[
            str, list[tuple[float, bool]]
        ]()  # by question, in the order in which they came
        self._count = 0
        self._next = _FIRST
        self.threshold = math.inf

    def learn(self, probability: float, wrong: bool, question: str) -> None:
        """Take a labelled chunk, with the probability that a model which did not know its label
        gave.
        """
        self._chunks.setdefault(question, []).append((probability, wrong))
        self._count += 1
        if self._count >= self._next:
            self._next = math.ceil(self._count * _GROWTH)
            self._test()

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        kind = "acts" if math.isfinite(self.threshold) else "waits"
        words = TEXTS["actions"][kind]
        return words.format(
            rule=self,
            alpha=self._alpha,
            kept=self._kept,
            labelled=self._count,
            questions=len(self._chunks),
        )

    def _test(self) -> None:
        while self._count > _KEPT:  # whole questions, the oldest first
            self._count -= len(self._chunks.pop(next(iter(self._chunks))))
        ends = np.cumsum([0, *map(len, self._chunks.values())])
        table = np.array([chunk for chunks in self._chunks.values() for chunk in chunks], float)
        passed = [step for ladder in _LADDERS for step in self._passed(ladder, table, ends)]
        self.threshold = min(passed, default=math.inf)

    def _passed(
        self, ladder: tuple[float, ...], table: NDArray[np.float64], ends: NDArray[np.int64]
    ) -> list[float]:
        found = list[float]()
        for step in ladder:
            gains = np.where(table[:, 0] >= step, table[:, 1] - self._alpha, 0.0)
            losses = self._alpha + np.add.reduceat(gains, ends[:-1]) / np.diff(ends)
            if betting_p_value(np.clip(losses, 0.0, 1.0), self._alpha) > (1 - self._kept) / len(
                _LADDERS
            ):
                break
            found.append(step)
        return found
