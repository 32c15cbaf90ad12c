"""Domain check: whether a question's scores are like the stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atts.calibration.scale import Scale
from atts.calibration.stored import StoredScores

LEVEL = 0.05
"""The chance that a question like the stored ones is taken for another kind."""
_LEAST = 3
"""Scores of a question below which their mean says too little."""
_CAP = 0.98
"""The quantile of stored scores beyond which a score counts no more than that: one wild chunk is no
other domain.
"""


@dataclass(frozen=True, slots=True)
class Domain:
    """The mean score of every stored question, on the scale that ranks are computed on, each score
    capped.

    A new question's mean is ranked among them: were it drawn as they were, its p-value would be at
    most `LEVEL` with at most that probability. Nothing is said of questions that score alike for
    other reasons.
    """

    means: tuple[float, ...]
    cap: float
    scale: Scale

    @classmethod
    def of(cls, stored: StoredScores) -> Domain | None:
        """None where questions are not known, or are too few for any to be outside."""
        questions = dict[str, list[float]]()
        for question, value in zip(stored.questions, stored.nonconformity, strict=True):
            questions.setdefault(question, []).append(value)
        if not stored.clustered or 1 / (len(questions) + 1) > LEVEL:
            return None
        ordered = sorted(stored.nonconformity)
        cap = ordered[int(_CAP * (len(ordered) - 1))]
        return cls(tuple(_mean(values, cap) for values in questions.values()), cap, stored.scale)

    def p_value(self, scores: Sequence[float]) -> float:
        """The rank of the scores' mean among those of stored questions, near 0 for a higher one."""
        mean = _mean([self.scale.nonconformity(score) for score in scores], self.cap)
        return (1 + sum(other >= mean for other in self.means)) / (len(self.means) + 1)

    def doubt(self, scores: Sequence[float]) -> str:
        """What is to be said of a question with these scores; "" where nothing is."""
        if len(scores) < _LEAST or (p := self.p_value(scores)) > LEVEL:
            return ""
        return (
            f"out of domain: its {len(scores)} chunks score worse than those of {1 - p:.1%} of the "
            f"{len(self.means)} "
            "questions that the stored scores come from; gate and models may know nothing of such "
            "text"
        )


def _mean(values: Sequence[float], cap: float) -> float:
    return sum(min(value, cap) for value in values) / len(values)
