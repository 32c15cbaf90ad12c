"""Rules of other tools and papers that decide how many rollouts to take and which answer to give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from atts.pipelines import Tally, settled_probability
from atts.sampling import beta_tails

NO_ANSWER = -1
SURE = 0.95
_DOUBLING_SHARE = 0.75
_ESC_WINDOW = 5
_CERTAINDEX = 0.8
_CERTAINDEX_FROM = 4
_WARMUP = 16
_KEPT_ONLINE = 0.9


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A problem's rollouts in the order in which they arrive.

    `labels` are classes of equal answers, or NO_ANSWER; `scores` are the recorded scores of each
    rollout, for which higher is better.
    """

    labels: Sequence[int]
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a rule: the number of rollouts that it used, and the class of its answer."""

    used: int
    label: int
    rollout: int | None = None  # the selected rollout, if the rule selects one


Play = Callable[[Arrivals], Taken]


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """A rule with its name; `whose` names the tool or paper that it comes from."""

    name: str
    about: str
    play: Play
    whose: str = ""


def majority(labels: Sequence[int]) -> int:
    """Return the class with the most votes; a tie goes to the class seen first, and without votes
    the result is NO_ANSWER.

    >>> majority([2, NO_ANSWER, 1, 1, 2]), majority([NO_ANSWER])
    (2, -1)
    """
    counts = Counter(label for label in labels if label != NO_ANSWER)
    return max(counts, key=counts.__getitem__, default=NO_ANSWER)


def fixed(size: int) -> StoppingRule:
    """Return the rule that always takes `size` rollouts."""

    def play(arrivals: Arrivals) -> Taken:
        used = min(size, len(arrivals))
        return Taken(used, majority(arrivals.labels[:used]))

    return StoppingRule(f"fixed {size}", f"the vote of {size}", play)


def take_all(arrivals: Arrivals) -> Taken:
    """Take every rollout, and vote."""
    return Taken(len(arrivals), majority(arrivals.labels))


Stops = Callable[[Sequence[int], int], bool]
"""A function that decides whether to stop, given the votes of each class, most first, and the
number of rollouts to come.
"""


def _one_by_one(stops: Stops) -> Play:
    """Return a rule that checks the votes after every rollout."""

    def play(arrivals: Arrivals) -> Taken:
        counts = Counter[int]()
        for used, label in enumerate(arrivals.labels, 1):
            if label != NO_ANSWER:
                counts[label] += 1
                votes = sorted(counts.values(), reverse=True)
                if stops(votes, len(arrivals) - used):
                    return Taken(used, majority(arrivals.labels[:used]))
        return take_all(arrivals)

    return play


def _is_certain(votes: Sequence[int], left: int) -> bool:
    second = votes[1] if len(votes) > 1 else 0
    return votes[0] - second > left


def _is_likely(votes: Sequence[int], left: int) -> bool:
    return _settled(tuple(votes), left) >= SURE


@lru_cache(maxsize=1 << 16)
def _settled(votes: tuple[int, ...], left: int) -> float:
    """Return the probability that the leader also wins in the end."""
    names = tuple(map(str, range(len(votes))))
    return settled_probability(Tally(names, tuple(map(float, votes)), votes), left)


def _is_beta_sure(votes: Sequence[int], left: int) -> bool:
    return _beta(votes[0], votes[1] if len(votes) > 1 else 0) >= SURE


@lru_cache(maxsize=1 << 16)
def _beta(first: int, second: int) -> float:
    """Return P(p > 1/2) for the leader against the second, under a uniform prior.

    >>> round(_beta(4, 0), 5)
    0.96875
    """
    return beta_tails(0.5, first + 1, second + 1)[1]


def _doubling(arrivals: Arrivals) -> Taken:
    """Check after 2, 4, 8, ... rollouts, and stop at a share of equal answers."""
    used = 2
    while used < len(arrivals):
        labels = arrivals.labels[:used]
        winner = majority(labels)
        if winner != NO_ANSWER and labels.count(winner) >= _DOUBLING_SHARE * used:
            return Taken(used, winner)
        used *= 2
    return take_all(arrivals)


def _windows(arrivals: Arrivals) -> Taken:
    """Check after each window of rollouts, and stop if all answers of a window agree."""
    for end in range(_ESC_WINDOW, len(arrivals), _ESC_WINDOW):
        window = set(arrivals.labels[end - _ESC_WINDOW : end])
        if len(window) == 1 and NO_ANSWER not in window:
            return Taken(end, majority(arrivals.labels[:end]))
    return take_all(arrivals)


def _certaindex(votes: Sequence[int], left: int) -> bool:
    """Return whether the answers' entropy is low compared with the largest entropy of so many
    answers.
    """
    total = sum(votes)
    if total < _CERTAINDEX_FROM:
        return False
    entropy = -sum(count / total * math.log(count / total) for count in votes)
    return 1 - entropy / math.log(total) >= _CERTAINDEX


ONE_BY_ONE: tuple[StoppingRule, ...] = (
    StoppingRule(
        "exact", "stops when no rollout to come can change the vote", _one_by_one(_is_certain),
        "atts, early_stop=certain",
    ),
    StoppingRule(
        "likely", f"stops when the leader stays ahead with probability {SURE:g}",
        _one_by_one(_is_likely), "atts, early_stop=likely",
    ),
    StoppingRule(
        "beta", f"stops when the leader beats the second with probability {SURE:g}",
        _one_by_one(_is_beta_sure), "Adaptive-Consistency; Beta in its_hub",
    ),
    StoppingRule(
        "doubling", f"checks after 2, 4, 8, ...; stops at {100 * _DOUBLING_SHARE:g} % equal answers",
        _doubling, "Adaptive in its_hub",
    ),
    StoppingRule(
        "windows", f"stops when {_ESC_WINDOW} in a row agree, checked at every fifth", _windows,
        "ESC",
    ),
    StoppingRule(
        "certaindex", f"stops when 1 - entropy / log n is {_CERTAINDEX:g}, from {_CERTAINDEX_FROM} on",
        _one_by_one(_certaindex), "Dynasor",
    ),
)  # fmt: skip
"""The rules that use only the answers."""


def best_of_n(score: str) -> StoppingRule:
    """Return the rule that selects the rollout with the best score."""

    def play(arrivals: Arrivals) -> Taken:
        values = arrivals.scores[score]
        best = max(range(len(arrivals)), key=values.__getitem__)
        return Taken(len(arrivals), arrivals.labels[best], best)

    return StoppingRule(f"best of n by {score}", "the rollout with the highest score", play)


def weighted_vote(score: str) -> StoppingRule:
    """Return the rule that weights each vote by a score."""

    def play(arrivals: Arrivals) -> Taken:
        return Taken(len(arrivals), heaviest(arrivals.labels, arrivals.scores[score]))

    return StoppingRule(f"weighted by {score}", "each vote weighs its score", play)


def borda_vote(score: str) -> StoppingRule:
    """Return the rule that weights each vote by the rank of its score; the best has the largest
    weight.
    """

    def play(arrivals: Arrivals) -> Taken:
        order = sorted(range(len(arrivals)), key=arrivals.scores[score].__getitem__)
        ranks = [0.0] * len(arrivals)
        for rank, place in enumerate(order, 1):
            ranks[place] = float(rank)
        return Taken(len(arrivals), heaviest(arrivals.labels, ranks))

    return StoppingRule(
        f"Borda vote with {score}", "each vote weighs the rank of its score", play, "self-certainty"
    )


def deepconf_offline(score: str, kept: float) -> StoppingRule:
    """Return the rule that lets only the most confident rollouts vote, weighted by confidence."""

    def play(arrivals: Arrivals) -> Taken:
        values = arrivals.scores[score]
        bar = float(np.percentile(values, 100 * (1 - kept)))
        weights = [value if value >= bar else 0.0 for value in values]
        return Taken(len(arrivals), heaviest(arrivals.labels, weights))

    about = f"the {100 * kept:g} % with the highest {score} vote, weighted by it"
    return StoppingRule(f"deepconf offline {100 * kept:g}", about, play, "DeepConf")


def deepconf_online(score: str) -> StoppingRule:
    """Return the rule that drops rollouts less confident than most of the first ones.

    It stops when the weights agree. The cost of a dropped rollout counts in full, although the
    original method would have stopped it earlier, so the cost is an upper bound.
    """

    def play(arrivals: Arrivals) -> Taken:
        values = arrivals.scores[score]
        first = min(_WARMUP, max(1, len(arrivals) // 2))
        bar = float(np.percentile(values[:first], 100 * (1 - _KEPT_ONLINE)))
        weights: list[float] = []
        for used in range(1, len(arrivals) + 1):
            value = values[used - 1]
            weights.append(value if value >= bar else 0.0)
            if used >= first:
                by_label = _weights(arrivals.labels[:used], weights)
                total = math.fsum(by_label.values())
                if total > 0 and max(by_label.values()) >= SURE * total:
                    return Taken(used, heaviest(arrivals.labels[:used], weights))
        return Taken(len(arrivals), heaviest(arrivals.labels, weights))

    about = (
        f"drops rollouts less confident than {100 * _KEPT_ONLINE:g} % of the first; stops if "
        f"{100 * SURE:g} % of the weight agrees"
    )
    return StoppingRule("deepconf online", about, play, "DeepConf")


def _weights(labels: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    by_label: dict[int, float] = {}
    for label, weight in zip(labels, weights, strict=True):
        if label != NO_ANSWER:
            by_label[label] = by_label.get(label, 0.0) + weight
    return by_label


def heaviest(labels: Sequence[int], weights: Sequence[float]) -> int:
    """Return the class with the largest weight; a tie goes to the class seen first.

    >>> heaviest([0, 1, 1, NO_ANSWER], [5.0, 2.0, 2.0, 9.0])
    0
    """
    by_label = _weights(labels, weights)
    return max(by_label, key=by_label.__getitem__, default=NO_ANSWER)
