"""Score histories: a sliding window, or all scores with exponentially decaying weights."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from atts.calibration.exact_rate import check_fraction
from atts.calibration.ranks import Ranks
from atts.errors import CalibrationInputError

_LOAD = 128  # scores per block of a fading memory after a rebuild


class WeightedRank(NamedTuple):
    """The rank of a score: the weight of stored scores below it, equal to it, and of all; the score itself weighs 1."""

    below: float
    equal: float
    size: float

    def p(self, theta: float) -> float:
        """The smoothed conformal p-value: exactly uniform if the scores are exchangeable; near 1 is worse."""
        return (self.below + theta * (1 + self.equal)) / (self.size + 1)

    def plus(self, other: WeightedRank) -> WeightedRank:
        """The rank among both sets of scores."""
        return WeightedRank(self.below + other.below, self.equal + other.equal, self.size + other.size)


class Window:
    """The last `width` scores, or all of them when the width is None."""

    __slots__ = ("_order", "_ranks", "_width")

    def __init__(self, width: int | None = None) -> None:
        if width is not None and width < 1:
            raise CalibrationInputError("window", width, "a positive number of scores, or None for all")
        self._width = width
        self._ranks = Ranks()
        self._order = deque[float]()  # empty without a width

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, score: float) -> None:
        self._ranks.add(score)
        if self._width is not None:
            self._order.append(score)
            if len(self._order) > self._width:
                self._ranks.remove(self._order.popleft())

    def rank(self, score: float) -> WeightedRank:
        below, equal = self._ranks.counts(score)
        return WeightedRank(below, equal, len(self._ranks))

    def __iter__(self) -> Iterator[float]:
        return iter(self._ranks if self._width is None else self._order)


class Fading:
    """All scores, each worth `decay` times less with every newer one: the weighted p-value for slow drift.

    Instead of fading the old, newer scores are given growing weights, scaled back before they overflow. Scores worth
    less than a billionth of the newest are dropped, so about 21 / (1 - decay) are kept.
    """

    __slots__ = ("_blocks", "_decay", "_kept", "_next", "_order", "_sums", "_tops", "_total")

    def __init__(self, decay: float) -> None:
        check_fraction("decay", decay)
        self._decay = decay
        self._kept = math.ceil(21 / -math.log(decay))
        self._next = 1.0  # the weight of the score added next
        self._order = deque[tuple[float, float]]()  # (score, weight), oldest first
        self._rebuild()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, score: float) -> None:
        weight = self._next
        self._order.append((score, weight))
        self._total += weight
        at = min(bisect_right(self._tops, score), len(self._tops) - 1)
        insort(self._blocks[at], (score, weight))
        self._sums[at] += weight
        self._tops[at] = self._blocks[at][-1][0]
        if len(self._order) > self._kept:
            self._drop()
        self._next = weight / self._decay
        if len(self._blocks[at]) > 2 * _LOAD or self._next > 1e150:
            self._rebuild()

    def __iter__(self) -> Iterator[float]:
        return (score for score, _ in self._order)

    def rank(self, score: float) -> WeightedRank:
        first, last = bisect_left(self._tops, score), bisect_right(self._tops, score)
        below, equal = sum(self._sums[:first]), 0.0
        for block in self._blocks[first : last + 1]:
            left, right = bisect_left(block, (score, -1.0)), bisect_right(block, (score, math.inf))
            below += sum(weight for _, weight in block[:left])
            equal += sum(weight for _, weight in block[left:right])
        return WeightedRank(below / self._next, equal / self._next, max(0.0, self._total) / self._next)

    def _drop(self) -> None:
        score, weight = self._order.popleft()
        at = bisect_left(self._tops, score)
        while (place := bisect_left(self._blocks[at], (score, weight))) == len(self._blocks[at]):
            at += 1  # equal scores may span blocks
        del self._blocks[at][place]
        self._total -= weight
        self._sums[at] -= weight

    def _rebuild(self) -> None:
        scale = 1 / self._next
        self._order = deque((score, weight * scale) for score, weight in self._order)
        self._next = 1.0
        ordered = sorted(self._order)
        self._blocks = [ordered[start : start + _LOAD] for start in range(0, len(ordered), _LOAD)] or [[]]
        self._tops = [block[-1][0] if block else math.inf for block in self._blocks]
        self._sums = [math.fsum(weight for _, weight in block) for block in self._blocks]
        self._total = math.fsum(self._sums)


ScoreHistory = Window | Fading
"""Scores that can place a new one; adding what one iterates over to an empty one of its kind makes the same again."""
