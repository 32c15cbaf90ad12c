"""Count votes: find the answer of most rollouts, and whether running rollouts could change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from atts.core import Rollout

_LEAST_WEIGHT = 1e-3
VoteKind = Literal["majority", "confidence"]
Grouper = Callable[[Sequence[str]], Sequence[int]]
"""A function that groups answers: it returns one label for each answer, and equal answers have
equal labels.
"""


@dataclass(frozen=True, slots=True)
class Ballot:
    """The vote of one rollout: its answer and its weight."""

    answer: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Tally:
    """Classes of equal answers with their weights, the heaviest first. Classes of the same weight
    are in the order in which they were first seen.
    """

    answers: tuple[str, ...]
    weights: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def winner(self) -> str | None:
        """Return the answer that represents the heaviest class; None if there are no ballots."""
        return self.answers[0] if self.answers else None

    @property
    def lead(self) -> float:
        """Return the difference in weight between the heaviest class and the second."""
        if not self.weights:
            return 0.0
        return self.weights[0] - (self.weights[1] if len(self.weights) > 1 else 0.0)

    @property
    def agreement(self) -> float:
        """Return the share of the ballots in the heaviest class; 0 if there are no ballots."""
        return self.counts[0] / sum(self.counts) if self.counts else 0.0


def weight(kind: VoteKind, logprobs: Sequence[float]) -> float:
    """Return the weight of a ballot: 1 for majority votes, otherwise the geometric mean of the
    probabilities of the rollout's tokens.

    The weight is at least 0.001, and exactly 0.001 if there are no log-probabilities.
    """
    if kind == "majority":
        return 1.0
    if not logprobs:
        return _LEAST_WEIGHT
    return max(math.exp(math.fsum(logprobs) / len(logprobs)), _LEAST_WEIGHT)


def ballot(kind: VoteKind, rollout: Rollout) -> Ballot | None:
    """Return a rollout's vote, or None if it has no answer."""
    if rollout.answer is None:
        return None
    logprobs = [value for chunk in rollout.chunks for value in chunk.logprobs]
    return Ballot(rollout.answer, weight(kind, logprobs))


def classes(answers: Sequence[str], group: Grouper) -> list[int]:
    """Return one class index per answer; equal answers have the same index. Identical strings are
    compared only once.
    """
    distinct = list(dict.fromkeys(answers))
    groups = group(distinct) if len(distinct) > 1 else [0] * len(distinct)
    labels = dict(zip(distinct, groups, strict=True))
    return [labels[answer] for answer in answers]


def tally(ballots: Sequence[Ballot], group: Grouper) -> Tally:
    """Count the ballots for each class of equivalent answers; equivalent answers may be different
    strings.
    """
    labels = classes([ballot.answer for ballot in ballots], group)
    answers: dict[int, str] = {}  # for each label: the spelling of its first answer
    weights: dict[int, float] = {}
    counts: dict[int, int] = {}
    for ballot, label in zip(ballots, labels, strict=True):
        answers.setdefault(label, ballot.answer)
        weights[label] = weights.get(label, 0.0) + ballot.weight
        counts[label] = counts.get(label, 0) + 1
    # `sorted` is stable, so in a tie the class that was seen first wins.
    heaviest_first = sorted(answers, key=lambda label: -weights[label])
    return Tally(
        tuple(answers[label] for label in heaviest_first),
        tuple(weights[label] for label in heaviest_first),
        tuple(counts[label] for label in heaviest_first),
    )


def cannot_change(current: Tally, remaining: int, heaviest: float = 1.0) -> bool:
    """Return True if the `remaining` ballots cannot change the winner. Each of them weighs at most
    `heaviest`.

    A lead that equals the remaining weight does not suffice, because a tie may go to another class.
    """
    return bool(current.answers) and current.lead > remaining * heaviest


def settled_probability(current: Tally, remaining: int) -> float:
    """Return a lower bound on the probability that the leader still wins after `remaining` more
    ballots.

    The model is an assumption: ballots are exchangeable, with a Dirichlet(1, ..., 1) prior over the
    classes seen and one unseen class. For each rival, the probability of at least a tie is exact;
    the sum over rivals is a union bound.
    """
    if not current.counts:
        return 0.0
    first, *rivals = current.counts
    others = sum(rivals)
    lost = 0.0
    for rival in [*rivals, 0]:  # The 0 stands for an answer that no rollout has given yet.
        lost += _overtaken(first, rival, others - rival, len(rivals), remaining)
    return max(0.0, 1.0 - lost)


@lru_cache(maxsize=1 << 16)
def _overtaken(first: int, rival: int, rest: int, rest_classes: int, remaining: int) -> float:
    """Return the probability that a rival ends with at least as many votes as the leader. The
    Dirichlet model has three classes: the leader, the rival, and all others.
    """
    prior = (first + 1.0, rival + 1.0, rest + float(rest_classes))
    total = 0.0
    for x in range(remaining + 1):
        for y in range(max(0, first + x - rival), remaining - x + 1):
            total += math.exp(_log_dirichlet_multinomial((x, y, remaining - x - y), prior))
    return min(total, 1.0)


def _log_dirichlet_multinomial(
    counts: tuple[int, int, int], prior: tuple[float, float, float]
) -> float:
    n = sum(counts)
    mass = sum(prior)
    value = math.lgamma(n + 1) + math.lgamma(mass) - math.lgamma(n + mass)
    for count, pseudo in zip(counts, prior, strict=True):
        if pseudo:
            value += math.lgamma(count + pseudo) - math.lgamma(pseudo) - math.lgamma(count + 1)
        elif count:
            return -math.inf
    return value
