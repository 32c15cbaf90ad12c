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
    """A chunk's score (larger is worse), and whether its rollout was wrong."""

    question: Hashable
    score: float
    is_wrong: bool


def within_question_auroc(chunks: Sequence[LabelledChunk], *, level: float = 0.95) -> Estimate:
    """Return the probability that a chunk of a wrong rollout scores worse than one of a correct
    rollout.

    Only pairs within a question count, and a tie counts as one half; a coin has 0.5. The interval
    is over questions, so the chunks of one question or rollout stay together.
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
    """Return how many more of the wrong rollouts' chunks the score escalates than a coin, as a
    share.

    In each question the worst `rate` of the chunks escalate; a coin of this rate escalates the
    share `rate` of the wrong rollouts' chunks. The difference of the two shares is 0 for an
    uninformative score. A chunk at the boundary, and chunks with equal scores, count in part.

    :raises OptionError: if the rate is outside [0, 1].
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

    A score that is not a number ranks worst, because a gate escalates it.
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
    """Return how many of the wrong scores are among the worst `rate` of all scores; ties count in
    part.
    """
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

    One question of average weight is added to the variance at `centre`, the value of an
    uninformative score: without it, a few questions that agree by chance would give an interval
    without width. Questions are weighted by their pairs, so the degrees of freedom come from the
    effective number of questions.
    """
    check_level(level)
    count = len(parts)
    if count < 2:
        note = "two questions with both wrong and correct rollouts are needed"
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
