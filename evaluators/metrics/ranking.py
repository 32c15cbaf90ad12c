"""Power of a score to find the chunks of wrong rollouts, compared within each question."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from atts.errors import OptionError
from atts.evaluators.metrics.intervals import (
    Estimate,
    Floats,
    check_level,
    reach,
    undefined_estimate,
)


@dataclass(frozen=True, slots=True)
class LabelledChunk:
    """A chunk's score (larger is worse) and whether its rollout ended wrong."""

    question: Hashable
    score: float
    is_wrong: bool


def within_question_auroc(chunks: Sequence[LabelledChunk], *, level: float = 0.95) -> Estimate:
    """Return the chance that the chunk of a wrong rollout scores worse than that of a correct one.

    Only pairs of one question count, ties for one half; 0.5 is a coin. The interval is over
    questions, so chunks of one question, and of one rollout, stay together.
    """
    wins: list[float] = []
    pairs: list[float] = []
    for wrong, right in _mixed(chunks):
        ordered = np.sort(right)
        below = np.searchsorted(ordered, wrong, "left")
        up_to = np.searchsorted(ordered, wrong, "right")
        wins.append(float((below + up_to).sum()) / 2)
        pairs.append(float(len(wrong) * len(right)))
    return _ratio(wins, pairs, len(chunks), level, centre=0.5, ends=(0.0, 1.0))


def gain_over_coin(
    chunks: Sequence[LabelledChunk], rate: float, *, level: float = 0.95
) -> Estimate:
    """Return how much more of the wrong rollouts' chunks the score escalates than a coin does.

    In each question the worst `rate` of the chunks escalate; a coin of this rate catches the share
    `rate` of the wrong ones. The difference of both shares is 0 for a score that knows nothing. A
    chunk at the boundary, and chunks of equal scores, count in part.

    :raises OptionError: the rate is outside [0, 1].
    """
    if not 0 <= rate <= 1:
        raise OptionError("rate", f"{rate!r} is outside [0, 1]")
    caught: list[float] = []
    total: list[float] = []
    for wrong, right in _mixed(chunks):
        taken = _share_escalated(wrong, right, rate)
        caught.append(taken - rate * len(wrong))
        total.append(float(len(wrong)))
    return _ratio(caught, total, len(chunks), level, centre=0.0, ends=(-1.0, 1.0))


def _mixed(chunks: Sequence[LabelledChunk]) -> list[tuple[Floats, Floats]]:
    """Return the scores of wrong and of correct rollouts, for questions that have both.

    A score that is not a number ranks worst, as a gate takes it.
    """
    wrong: dict[Hashable, list[float]] = {}
    right: dict[Hashable, list[float]] = {}
    for chunk in chunks:
        side = wrong if chunk.is_wrong else right
        side.setdefault(chunk.question, []).append(
            math.inf if math.isnan(chunk.score) else chunk.score
        )
    return [
        (np.asarray(wrong[question], np.float64), np.asarray(right[question], np.float64))
        for question in wrong
        if question in right
    ]


def _share_escalated(wrong: Floats, right: Floats, rate: float) -> float:
    """Return how many of the wrong ones are among the worst `rate` of all, ties in part."""
    both = np.concatenate([wrong, right])
    left = rate * len(both)
    count = 0.0
    for score in np.unique(both)[::-1]:
        tied = float((both == score).sum())
        part = min(1.0, left / tied)
        count += part * float((wrong == score).sum())
        left -= part * tied
        if left <= 0:
            break
    return count


def _ratio(
    parts: Sequence[float],
    wholes: Sequence[float],
    samples: int,
    level: float,
    *,
    centre: float,
    ends: tuple[float, float],
) -> Estimate:
    """Return a ratio of sums over questions, with a t interval over questions.

    One question of the usual weight at `centre`, where a score that knows nothing is, is added to
    the variance: without it a few questions that agree by chance have an interval of no width.
    Questions weigh by their pairs, so the degrees of freedom are those of the effective number.
    """
    check_level(level)
    count = len(parts)
    if count < 2:
        note = "needs two questions with both wrong and correct rollouts"
        return undefined_estimate(count, samples, level, note)
    numerator = np.asarray(parts, np.float64)
    weights = np.asarray(wholes, np.float64)
    total = float(weights.sum())
    value = float(numerator.sum()) / total
    usual = float((weights**2).mean())
    squares = float(((numerator - value * weights) ** 2).sum()) + usual * (value - centre) ** 2
    effective = total**2 / float((weights**2).sum())
    freedom = max(1.0, effective - 1)
    error = math.sqrt(squares * effective / freedom) / total
    half = reach(freedom, level) * error
    low = max(ends[0], value - half)
    high = min(ends[1], value + half)
    return Estimate(value, low, high, count, samples, "t over questions", level=level)
