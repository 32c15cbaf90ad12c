"""Abstention by Learn-then-Test: the least confidence at which answers are seldom wrong, or how
much that takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atts.calibration.exact_rate import check_fraction
from atts.calibration.guarantees import TEXTS
from atts.calibration.risk import problems_needed, rejected
from atts.errors import CalibrationInputError
from atts.sampling import binomial_cdf

# of the walks down, in twentieths; each has an equal part of what the test may be wrong
_STARTS = (
    20,
    12,
)


@dataclass(frozen=True, slots=True)
class Abstention:
    """What labelled problems say of answering only where confidence is at least `threshold`.

    `threshold` is None where none can be promised; then `needed` is about how many problems it
    would take, None where no number would do. `answered` and `wrong` are of the labelled problems
    at the threshold, or at the one that came nearest.
    """

    risk: float
    kept: float
    problems: int
    threshold: float | None
    answered: int
    wrong: int
    needed: int | None = None

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        outcome = (
            "certified"
            if self.threshold is not None
            else "needs more"
            if self.needed
            else "hopeless"
        )
        outcome = outcome if self.answered else "unsure"
        return TEXTS["abstention"][outcome].format(abstention=self)

    @property
    def voided_by(self) -> str:
        """What makes that empty, in words."""
        return TEXTS["abstention"]["voided_by"]


def certify_abstention(
    confidence: Sequence[float], wrong: Sequence[bool], risk: float, kept: float = 0.9
) -> Abstention:
    """The lowest threshold at which answered problems are wrong at most `risk` of the time, with
    probability `kept`.

    One confidence in [0, 1] and one label per problem; a problem without any answer has confidence
    nan. Given how many are answered, the wrong ones of a threshold are binomial, so its p-value is
    exact. Thresholds are twentieths, tried from 1 down and from .6 down until one fails; so their
    order does not depend on the data.

    :raises CalibrationInputError: without problems, for a confidence that is none, `risk` or `kept`
        outside (0, 1).
    """
    check_fraction("risk", risk)
    check_fraction("kept", kept)
    held = np.asarray(confidence, float)
    bad = np.asarray(wrong, bool)
    if not held.size or held.shape != bad.shape or held.ndim != 1:
        raise CalibrationInputError(
            "labelled problems", held.size, "a confidence and a label for each, at least one"
        )
    if ((held < 0) | (held > 1)).any():
        raise CalibrationInputError(
            "confidence", float(held[(held < 0) | (held > 1)][0]), "a number from 0 to 1, or nan"
        )
    share = (1 - kept) / len(_STARTS)
    walks = [list(_walk(held, bad, start)) for start in _STARTS]
    passed = [walk[place] for walk in walks for place in rejected(_p_values(walk, risk), share)]
    if passed:
        threshold, answered, mistaken = min(passed)
        return Abstention(risk, kept, held.size, threshold, answered, mistaken)
    found = [(_needed(held.size, n, k, risk, share), n, k) for (_, n, k), *_ in walks]
    needed, answered, mistaken = min(found, key=lambda row: (row[0] or math.inf, row[1]))
    return Abstention(risk, kept, held.size, None, answered, wrong=mistaken, needed=needed)


def _walk(
    held: NDArray[np.float64], bad: NDArray[np.bool_], start: int
) -> Iterator[tuple[float, int, int]]:
    """Each threshold with how many problems it answers, and how many of these are wrong."""
    for step in range(start, -1, -1):
        answered = held >= step / 20 - 1e-9
        yield step / 20, int(answered.sum()), int((answered & bad).sum())


def _p_values(walk: Sequence[tuple[float, int, int]], risk: float) -> list[float]:
    _, answered, wrong = np.array(walk).T
    return list(map(float, binomial_cdf(wrong, answered, risk)))


def _needed(problems: int, answered: int, wrong: int, risk: float, share: float) -> int | None:
    """About how many problems would do, if as many of them were answered and wrong."""
    enough = problems_needed(wrong / answered, risk, share) if answered else None
    return None if enough is None else max(problems + 1, math.ceil(enough * problems / answered))
