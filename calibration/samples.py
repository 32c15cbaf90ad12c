"""Questions as the units of a two-sample comparison of scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from atts.calibration.clusters import summarise
from atts.calibration.stored import StoredScores

_FEWEST = 5  # questions on either side before anything is compared


@dataclass(frozen=True, slots=True)
class QuestionSample:
    """The stored questions, each by the level and the spread of its scores."""

    levels: tuple[float, ...]
    spreads: tuple[float, ...]  # empty when questions hold fewer than three scores
    early: tuple[float, ...]  # the mean of the first half of each question's scores
    size: int  # scores of a typical question
    icc: float

    @classmethod
    def of(cls, stored: StoredScores, turn: int) -> QuestionSample:
        """The questions of one turn; scores of no question are questions of their own, infinite ones are left out."""
        parts = dict[str, list[float]]()
        rows = zip(stored.questions, stored.turns, stored.badness, strict=True)
        for place, (question, at, badness) in enumerate(rows):
            if at == turn and math.isfinite(badness):
                parts.setdefault(question or f"chunk {place}", []).append(badness)
        if not parts:
            return cls((), (), (), 1, 0.0)
        size = int(np.median([len(scores) for scores in parts.values()]))
        full = [scores for scores in parts.values() if 2 * len(scores) >= size]
        levels = tuple(math.fsum(scores) / len(scores) for scores in full)
        spreads = tuple(_spread(scores) for scores in full) if size >= 3 else ()
        half = max(1, math.ceil(size / 2))
        early = tuple(math.fsum(scores[:half]) / len(scores[:half]) for scores in full)
        icc = summarise({name: np.array(scores) for name, scores in parts.items()}).icc
        return cls(levels, spreads, early, size, 1.0 if math.isnan(icc) else max(0.0, icc))

    @property
    def half(self) -> int:
        """The number of scores after which a live question is compared with `early`."""
        return max(1, math.ceil(self.size / 2))

    def compare(self, live: Iterable[Sequence[float]]) -> tuple[float, int]:
        """The p-value of "these questions are like the stored ones", and how many questions it rests on.

        Level and spread together where at least five live questions have half a stored question's scores, the level
        alone otherwise. 1 where there are too few questions to say.
        """
        questions = list(live)
        ready = [scores for scores in questions if 2 * len(scores) >= self.size and len(scores) >= 3]
        joint = bool(self.spreads) and len(ready) >= _FEWEST
        chosen = ready if joint else questions
        if len(chosen) < _FEWEST or len(self.levels) < _FEWEST:
            return 1.0, len(chosen)
        levels = [math.fsum(scores) / len(scores) for scores in chosen]
        ours, theirs = _columns(self.levels, levels)
        noise = [self._level_noise(len(scores)) for scores in chosen]
        if joint:
            mine, stored = _columns(self.spreads, [_spread(scores) for scores in chosen])
            ours, theirs = np.column_stack([ours, mine]), np.column_stack([theirs, stored])
            noise = [max(a, self._spread_noise(len(s))) for a, s in zip(noise, chosen, strict=True)]
        return _hotelling(ours, theirs, float(np.mean(noise))), len(chosen)

    def _level_noise(self, scores: int) -> float:
        """The variance of the mean of so few scores over that of a stored question's, at least 1."""
        return max(1.0, (self.icc + (1 - self.icc) / scores) / (self.icc + (1 - self.icc) / self.size))

    def _spread_noise(self, scores: int) -> float:
        """The same for the logarithm of a standard deviation, were all questions equally spread."""
        between = max(0.0, float(np.var(self.spreads)) - 0.5 / (self.size - 1))
        return max(1.0, (between + 0.5 / (scores - 1)) / (between + 0.5 / (self.size - 1)))


def _spread(scores: Sequence[float]) -> float:
    """The logarithm of the standard deviation, corrected for the number of scores (exactly so for normal ones)."""
    freedom = len(scores) - 1
    if freedom < 1:
        return 0.0
    bias = (float(special.digamma(freedom / 2)) - math.log(freedom / 2)) / 2
    return math.log(float(np.std(scores, ddof=1)) + 1e-6) - bias


def _columns(stored: Sequence[float], live: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Live and stored values as normal scores among each other, so that no outlier decides."""
    both = np.concatenate([np.asarray(live, float), np.asarray(stored, float)])
    normal = np.asarray(stats.norm.ppf(stats.rankdata(both) / (len(both) + 1)), float)
    return normal[: len(live)], normal[len(live) :]


def _hotelling(ours: NDArray[np.float64], theirs: NDArray[np.float64], noise: float) -> float:
    """Hotelling's two-sample test; `noise` is the variance of one of ours over that of one of theirs."""
    columns = 1 if theirs.ndim == 1 else theirs.shape[1]
    ours, theirs = ours.reshape(-1, columns), theirs.reshape(-1, columns)
    n, k = len(ours), len(theirs)
    inside = np.vstack([ours - ours.mean(axis=0), theirs - theirs.mean(axis=0)])
    covariance = inside.T @ inside / (n + k - 2) + 1e-9 * np.eye(columns)
    difference = ours.mean(axis=0) - theirs.mean(axis=0)
    statistic = float(difference @ np.linalg.solve(covariance, difference)) / (noise / n + 1 / k)
    freedom = n + k - 1 - columns
    return float(stats.f.sf(statistic * freedom / (columns * (n + k - 2)), columns, freedom))
