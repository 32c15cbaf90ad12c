"""Score histories: all scores by rank, a sliding window of them, or all with exponentially decaying
weights.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from atts.calibration.exact_rate import check_fraction
from atts.errors import CalibrationInputError

_LOAD = 4096  # scores per block after a split; an insertion moves at most twice as many
_TOP: Callable[[Any], float] = itemgetter(-1)


class Ranks:
    """Scores in order, eight bytes each, in blocks of bounded size, none of them empty.

    Adding, counting and selecting cost O(log n) comparisons, one bounded move and a sum of n / 4096
    sizes. Infinities and ties are ordinary values; NaN must be refused before.

    >>> pool = Ranks([3.0, 1.0, 3.0])
    >>> pool.add(2.0)
    >>> pool.counts(3.0), pool.kth(2), len(pool)
    ((2, 2), 2.0, 4)
    """

    __slots__ = ("_blocks", "_size")

    def __init__(self, scores: Iterable[float] = ()) -> None:
        ordered = sorted(scores)
        self._size = len(ordered)
        self._blocks = [
            array("d", ordered[start : start + _LOAD]) for start in range(0, len(ordered), _LOAD)
        ]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[float]:
        return chain.from_iterable(self._blocks)

    def add(self, score: float) -> None:
        """Store one score."""
        self._size += 1
        if not self._blocks:
            self._blocks.append(array("d"))
        at = bisect_right(self._blocks, score, hi=len(self._blocks) - 1, key=_TOP)
        block = self._blocks[at]
        insort(block, score)
        if len(block) > 2 * _LOAD:
            self._blocks[at : at + 1] = [block[:_LOAD], block[_LOAD:]]

    def remove(self, score: float) -> None:
        """Take one stored copy of `score` out.

        :raises KeyError: if there is none.
        """
        at = bisect_left(self._blocks, score, key=_TOP)
        block = self._blocks[at] if at < len(self._blocks) else []
        place = bisect_left(block, score)
        if not block or block[place] != score:
            raise KeyError(score)
        del block[place]
        self._size -= 1
        if not block:
            del self._blocks[at]

    def counts(self, score: float) -> tuple[int, int]:
        """How many stored scores are below `score`, and how many equal it."""
        blocks = self._blocks
        at = bisect_left(blocks, score, key=_TOP)
        if at == len(blocks):
            return self._size, 0
        left = bisect_left(blocks[at], score)
        below = sum(map(len, blocks[:at])) + left
        equal = bisect_right(blocks[at], score, left) - left
        while blocks[at][-1] == score and at + 1 < len(blocks):  # a tie that may span blocks
            at += 1
            equal += bisect_right(blocks[at], score)
        return below, equal

    def kth(self, k: int) -> float:
        """The k-th smallest stored score, counted from 1.

        :raises IndexError: unless 1 <= k <= len.
        """
        at = k - 1
        for block in self._blocks:
            if 0 <= at < len(block):
                return block[at]
            at -= len(block)
        raise IndexError(k)


class WeightedRank(NamedTuple):
    """The rank of a score: the weight of stored scores below it, equal to it, and of all; the score
    itself weighs 1.
    """

    below: float
    equal: float
    size: float

    def p(self, theta: float) -> float:
        """The smoothed conformal p-value: exactly uniform if the scores are exchangeable; near 1 is
        worse.
        """
        return (self.below + theta * (1 + self.equal)) / (self.size + 1)

    def plus(self, other: WeightedRank) -> WeightedRank:
        """The rank among both sets of scores."""
        return WeightedRank(
            self.below + other.below, self.equal + other.equal, self.size + other.size
        )


class Window:
    """The last `width` scores, or all of them when the width is None."""

    __slots__ = ("_order", "_ranks", "_width")

    def __init__(self, width: int | None = None) -> None:
        if width is not None and width < 1:
            raise CalibrationInputError(
                "window", width, "a positive number of scores, or None for all"
            )
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
    """All scores, each worth `decay` times less with every newer one: the weighted p-value for slow
    drift.

    Instead of fading the old, newer scores are given growing weights, scaled back before they
    overflow. Scores worth less than a billionth of the newest are dropped, so about 21 / (1 -
    decay) are kept.
    """

    __slots__ = ("_decay", "_kept", "_next", "_order", "_scores", "_weights")

    def __init__(self, decay: float) -> None:
        check_fraction("decay", decay)
        self._decay = decay
        self._kept = math.ceil(21 / -math.log(decay))
        self._next = 1.0  # the weight of the score added next
        self._order = deque[float]()  # oldest first
        self._scores = array("d")
        self._weights = array("d")  # ascending, equal scores oldest first

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[float]:
        return iter(self._order)

    def add(self, score: float) -> None:
        self._order.append(score)
        at = bisect_right(self._scores, score)
        self._scores.insert(at, score)
        self._weights.insert(at, self._next)
        if len(self._order) > self._kept:
            oldest = bisect_left(self._scores, self._order.popleft())
            del self._scores[oldest], self._weights[oldest]
        self._next /= self._decay
        if self._next > 1e150:
            self._weights = array("d", (weight / self._next for weight in self._weights))
            self._next = 1.0

    def rank(self, score: float) -> WeightedRank:
        left = bisect_left(self._scores, score)
        right = bisect_right(self._scores, score)
        weights = np.asarray(self._weights) / self._next
        return WeightedRank(
            float(weights[:left].sum()), float(weights[left:right].sum()), float(weights.sum())
        )


ScoreHistory = Window | Fading
"""Scores that can place a new one; adding what one iterates over to an empty one of its kind makes
the same again.
"""
