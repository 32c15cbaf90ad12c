"""Conformal prediction sets of ordered levels: contiguous and nested, with a stated coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atts.calibration.conformal import split_rank
from atts.calibration.exact_rate import check_fraction
from atts.calibration.guarantees import TEXTS
from atts.calibration.score_history import Ranks
from atts.errors import CalibrationInputError

Probabilities = Sequence[float]


def nested_windows(probabilities: Probabilities) -> list[range]:
    """Contiguous windows of levels from the most probable level to all, each with one level more
    than the one before.

    Each is the heaviest window of its length that contains the one before it, which is growing
    towards the heavier neighbour. Shortest windows need not nest for other probabilities than
    unimodal ones, and coverage needs nesting.

    >>> [list(window) for window in nested_windows((0.35, 0.05, 0.30, 0.30))]
    [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    """
    _check(probabilities)
    mode = max(range(len(probabilities)), key=lambda level: probabilities[level])
    low = mode
    high = mode + 1
    windows = [range(low, high)]
    while high - low < len(probabilities):
        left = probabilities[low - 1] if low else -1.0
        right = probabilities[high] if high < len(probabilities) else -1.0
        low, high = (low - 1, high) if left > right else (low, high + 1)
        windows.append(range(low, high))
    return windows


def entry_mass(probabilities: Probabilities, level: int) -> float:
    """The conformity score of a level: the mass of the largest nested window without it, 0 for the
    most probable.
    """
    inside = 0.0
    for window in nested_windows(probabilities):
        if level in window:
            return inside
        inside = math.fsum(probabilities[place] for place in window)
    raise CalibrationInputError("level", level, f"a place among {len(probabilities)} levels")


class LevelSets:
    """Sets that hold the true level with probability at least 1 - alpha, calibrated on labelled
    chunks.

    The guarantee is over a new labelled chunk exchangeable with the calibration ones, which were
    not used to fit the probabilities. Chunks of one question count as many only if questions are
    many: see `guarantee`.
    """

    __slots__ = ("_alpha", "_questions", "_scores")

    def __init__(self, alpha: float = 0.1) -> None:
        """:raises CalibrationInputError: for alpha outside (0, 1)."""
        check_fraction("alpha", alpha)
        self._alpha = alpha
        self._scores = Ranks()
        self._questions = set[str]()

    def __len__(self) -> int:
        return len(self._scores)

    def learn(self, probabilities: Probabilities, level: int, question: str = "") -> None:
        """Store one labelled chunk."""
        self._scores.add(entry_mass(probabilities, level))
        self._questions.add(question)

    def levels(self, probabilities: Probabilities) -> range:
        """The set of a new chunk: all levels while there are too few labelled ones to promise less."""
        rank = split_rank(len(self._scores), self._alpha)
        threshold = self._scores.kth(rank) if rank <= len(self._scores) else math.inf
        inside = 0.0
        for window in nested_windows(probabilities):
            inside = math.fsum(probabilities[place] for place in window)
            if inside > threshold:
                return window
        return range(len(probabilities))

    @property
    def guarantee(self) -> str:
        """What the sets promise, in words."""
        questions = len(self._questions)
        covered = 1 - self._alpha
        return TEXTS["levels"]["guarantee"].format(
            labelled=len(self), questions=questions, covered=covered
        )

    @property
    def voided_by(self) -> str:
        """What makes that promise empty, in words."""
        return TEXTS["levels"]["voided_by"]


def _check(probabilities: Probabilities) -> None:
    total = math.fsum(probabilities)
    if (
        not probabilities
        or not all(p >= 0 for p in probabilities)
        or not math.isclose(total, 1, abs_tol=1e-6)
    ):
        raise CalibrationInputError(
            "probabilities of levels", tuple(probabilities), "numbers from 0 that sum to 1"
        )
