"""Question samples of the two-sample test: how many scores of each to use, their mean and spread, normal scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from atts.calibration.clusters import summarise
from atts.calibration.stored import StoredScores

Floats = NDArray[np.float64]
_SPREAD_FROM = 3  # scores of a question from which its spread says anything


@dataclass(frozen=True, slots=True)
class QuestionSample:
    """The stored questions of one turn, each by its scores in their order."""

    questions: tuple[tuple[float, ...], ...]
    size: int  # scores of a typical question
    icc: float

    @classmethod
    def of(cls, stored: StoredScores, turn: int) -> QuestionSample:
        """The questions of one turn; scores of no question are questions of their own, infinite ones are left out."""
        parts = dict[str, list[float]]()
        rows = zip(stored.questions, stored.turns, stored.nonconformity, strict=True)
        for place, (question, at, nonconformity) in enumerate(rows):
            if at == turn and math.isfinite(nonconformity):
                parts.setdefault(question or f"chunk {place}", []).append(nonconformity)
        if not parts:
            return cls((), 1, 0.0)
        icc = summarise({name: np.array(scores) for name, scores in parts.items()}).icc
        size = int(np.median([len(scores) for scores in parts.values()]))
        return cls(tuple(map(tuple, parts.values())), size, 1.0 if math.isnan(icc) else max(0.0, icc))

    @property
    def half(self) -> int:
        """The number of scores after which a live question is compared with `early`."""
        return max(1, math.ceil(self.size / 2))

    @property
    def early(self) -> list[float]:
        """The mean of the first half of each question's scores."""
        return [math.fsum(q[: self.half]) / self.half for q in self.questions if len(q) >= self.half]

    def depth(self, live: Sequence[Sequence[float]]) -> int:
        """How many scores of each question to compare, the rest left out, so that the means are told best.

        Few scores of many questions or many of few: the variance of the difference of the means decides.
        """
        counts = np.array([len(scores) for scores in live])
        stored = np.array([len(scores) for scores in self.questions])
        best, least = 1, math.inf
        for depth in sorted({int(count) for count in counts if count <= stored.max()}):
            ours, theirs = int((counts >= depth).sum()), int((stored >= depth).sum())
            variance = (1 / ours + 1 / theirs) * (self.icc + (1 - self.icc) / depth)
            if variance <= least:
                best, least = depth, variance
        return best


def features(questions: Sequence[Sequence[float]], depth: int) -> Floats:
    """Level, and spread where `depth` allows one, of the first scores of each question that has so many."""
    rows = np.array([scores[:depth] for scores in questions if len(scores) >= depth], float).reshape(-1, depth)
    columns = [rows.mean(axis=1)]
    if depth >= _SPREAD_FROM:
        columns.append(np.log(rows.std(axis=1, ddof=1) + 1e-6))
    return np.column_stack(columns)


def normal_scores(values: Floats, reference: Floats) -> Floats:
    """Each column by its place among the reference's, as a normal quantile: no outlier decides."""
    ordered = np.sort(reference, axis=0)
    places = [
        np.searchsorted(ordered[:, at], values[:, at], "left") + np.searchsorted(ordered[:, at], values[:, at], "right")
        for at in range(values.shape[1])
    ]
    share = (np.column_stack(places) + 1) / (2 * (len(reference) + 1))
    return np.asarray(
        scipy.special.ndtri(np.clip(share, 0.5 / (len(reference) + 1), 1 - 0.5 / (len(reference) + 1))), float
    )
