"""Length strata: a score's rank among chunks of about the same length, the strata learnt online."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

from atts.calibration.score_history import Ranks, WeightedRank
from atts.calibration.state import Part

_LEAST = 30
_SHARE = 16  # a stratum is split from so many scores on, and once it holds one in so many of all
_RIDGE = 2.0  # scores by which a slope is drawn to 0

Point = tuple[float, float]
"""A chunk: the logarithm of its length, and its nonconformity."""
Sums = list[float]
"""Of points: how many, lengths, scores, squared lengths, products."""


class _Stratum:
    """Chunks of about one length; `split_from` is the size at which a split is tried next."""

    __slots__ = ("flat", "ranks", "split_from", "sums")

    def __init__(self, points: Iterable[Point] = (), split_from: int = _LEAST) -> None:
        # length, score, length, score: as objects they would take eight times as much
        self.flat = array("d")
        self.ranks = Ranks()
        self.split_from = split_from
        self.sums: Sums = [0.0] * 5
        for point in points:
            self.add(point)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def points(self) -> list[Point]:
        """All of them, in their order."""
        return list(zip(self.flat[::2], self.flat[1::2], strict=True))

    def add(self, point: Point) -> None:
        length, score = point
        self.flat.extend(point)
        self.ranks.add(score)
        terms = (1.0, length, score, length * length, length * score)
        self.sums = [old + new for old, new in zip(self.sums, terms, strict=True)]

    def halves(self) -> tuple[list[Point], list[Point]]:
        """The shorter and the longer chunks, no length in both; one is empty where all are of one
        length.
        """
        ordered = sorted(self.points)
        middle = ordered[len(ordered) // 2][0]
        below = bisect_left(ordered, (middle, -math.inf))
        up_to = bisect_left(ordered, (middle, math.inf))
        cut = (
            below if len(ordered) - below - below <= abs(up_to - (len(ordered) - up_to)) else up_to
        )
        return ordered[:cut], ordered[cut:]


class LengthStrata(Part):
    """Scores by length: strata that are split at their median length as they fill, at most some
    thirty of them.

    While many chunks are in flight the short ones are known first, and within a stratum the shorter
    ones. What a stratum leaves of that bias is taken out by the slope of the scores on log-length
    in it and its neighbours, as it is now: so a rank costs two searches and never a pass over the
    scores.

    >>> strata = LengthStrata()
    >>> strata.add(1.0, 200.0)
    >>> strata.rank(2.0, 210.0).below
    1
    """

    __slots__ = ("_bounds", "_count", "_strata")

    def __init__(self) -> None:
        self._bounds = list[float]()  # the greatest log-length of every stratum but the last
        self._strata = [_Stratum()]
        self._count = 0

    def rank(self, nonconformity: float, length: float) -> WeightedRank:
        """Where a finite score stands among chunks of about this length; nothing is stored."""
        at, place = self._place(length)
        stratum = self._strata[at]
        if not len(stratum):
            return WeightedRank(0, 0, 0)
        usual = stratum.sums[1] / stratum.sums[0]
        below, equal = stratum.ranks.counts(nonconformity - self._slope(at) * (place - usual))
        return WeightedRank(below, equal, len(stratum))

    def add(self, nonconformity: float, length: float) -> None:
        """Store a finite score."""
        at, place = self._place(length)
        stratum = self._strata[at]
        stratum.add((place, nonconformity))
        self._count += 1
        if len(stratum) >= max(stratum.split_from, self._count / _SHARE):
            self._split(at)

    def _place(self, length: float) -> tuple[int, float]:
        place = math.log(length)
        return bisect_left(self._bounds, place), place

    def _slope(self, at: int) -> float:
        """Of scores on log-length, here and in the strata beside this one."""
        near = self._strata[max(0, at - 1) : at + 2]
        count, lengths, scores, squares, products = map(
            sum, zip(*(stratum.sums for stratum in near), strict=True)
        )
        spread = squares - lengths * lengths / count
        if count < 3 or spread <= 1e-9 * squares:
            return 0.0
        return (products - lengths * scores / count) / (spread * (1 + _RIDGE / count))

    def _split(self, at: int) -> None:
        stratum = self._strata[at]
        shorter, longer = stratum.halves()
        # nearly all of one length, as where a limit cuts them
        if min(len(shorter), len(longer)) < _LEAST // 4:
            stratum.split_from = 2 * len(stratum)
            return
        self._bounds.insert(at, shorter[-1][0])
        self._strata[at : at + 1] = [_Stratum(shorter), _Stratum(longer)]

    def state(self) -> Any:
        """Every stratum with its sums, which depend on the order of the scores."""
        rows = [[one.split_from, one.sums, list(one.flat)] for one in self._strata]
        return {"bounds": list(self._bounds), "strata": rows}

    def merge(self, state: Any) -> None:
        """Take over the strata of a state, or, where there are scores here, those of its scores
        that are not here.
        """
        points = [list(zip(row[2][::2], row[2][1::2], strict=True)) for row in state["strata"]]
        if self._count:
            here = Counter(point for one in self._strata for point in one.points)
            for length, score in (
                Counter(point for each in points for point in each) - here
            ).elements():
                self.add(float(score), math.exp(length))
            return
        self._bounds = list(map(float, state["bounds"]))
        self._strata = []
        for (split_from, sums, _), each in zip(state["strata"], points, strict=True):
            stratum = _Stratum(
                [(float(length), float(score)) for length, score in each], int(split_from)
            )
            stratum.sums = list(map(float, sums))
            self._strata.append(stratum)
        self._count = sum(map(len, self._strata))
