"""Score pools, which hold the stored and live scores among which a new score is ranked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from atts.calibration.conformal import check_fraction
from atts.calibration.state import DefaultTable, GroupTable, Persisted
from atts.errors import CalibrationInputError

# Number of scores in a block just after a split. A block grows to at most twice this number, so an
# insertion moves few scores.
_LOAD = 4096
_TOP: Callable[[Any], float] = itemgetter(-1)


class Ranks:
    """A sorted collection of scores, eight bytes each, stored in blocks of bounded size.

    An insertion, a count or a selection costs O(log n) comparisons, one move of bounded size and a
    sum over n / 4096 blocks. Infinities and ties are accepted; the caller must refuse NaN.

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
        """Remove one stored copy of `score`.

        :raises KeyError: if `score` is not stored.
        """
        at = bisect_left(self._blocks, score, key=_TOP)
        if at == len(self._blocks):
            raise KeyError(score)
        block = self._blocks[at]
        position = bisect_left(block, score)
        if block[position] != score:
            raise KeyError(score)
        del block[position]
        self._size -= 1
        if not block:  # Remove an empty block, because the search for a block reads its last score.
            del self._blocks[at]

    def counts(self, score: float) -> tuple[int, int]:
        """Return the number of stored scores below `score`, and the number equal to it."""
        blocks = self._blocks
        at = bisect_left(blocks, score, key=_TOP)
        if at == len(blocks):
            return self._size, 0
        left = bisect_left(blocks[at], score)
        below = sum(map(len, blocks[:at])) + left
        equal = bisect_right(blocks[at], score, left) - left
        # Equal scores may fill several blocks. For example, all chunks of which the model is
        # certain have perplexity 1.
        while blocks[at][-1] == score and at + 1 < len(blocks):
            at += 1
            equal += bisect_right(blocks[at], score)
        return below, equal

    def kth(self, k: int) -> float:
        """Return the k-th smallest stored score; `k` counts from 1.

        :raises IndexError: unless 1 <= k <= len.
        """
        at = k - 1
        for block in self._blocks:
            if 0 <= at < len(block):
                return block[at]
            at -= len(block)
        raise IndexError(k)


class WeightedRank(NamedTuple):
    """The weighted rank of a new score among stored scores; the new score has weight 1."""

    below: float  # total weight of the stored scores below the new score
    equal: float  # total weight of the stored scores equal to the new score
    size: float  # total weight of all stored scores

    def p(self, theta: float) -> float:
        """Return the smoothed conformal p-value (Vovk, Gammerman and Shafer, 2005), near 1 for a
        worse score.

        If `theta` is uniform on [0, 1] and the n + 1 scores are exchangeable, the p-value is
        exactly uniform, even with ties. If `theta` is 1, it is the deterministic p-value (1 +
        #{stored <= score}) / (n + 1), for which P(p <= a) <= a.
        """
        return (self.below + theta * (1 + self.equal)) / (self.size + 1)

    def plus(self, other: WeightedRank) -> WeightedRank:
        """Return the rank of the score in the union of two pools, given its rank in each."""
        return WeightedRank(
            self.below + other.below, self.equal + other.equal, self.size + other.size
        )


class Window:
    """The last `width` scores, or all scores if the width is None."""

    __slots__ = ("_order", "_ranks", "_width")

    def __init__(self, width: int | None = None) -> None:
        if width is not None and width < 1:
            raise CalibrationInputError(
                "window", width, "a positive number of scores, or None for all scores"
            )
        self._width = width
        self._ranks = Ranks()
        # scores from oldest to newest; stays empty if the width is None
        self._order = deque[float]()

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
    """All scores, with weights that fade: each new score multiplies the weights of all older scores
    by `decay`.

    The weights do not depend on the scores, so slow drift makes the weighted p-values only slightly
    wrong. Their error is at most the weighted sum of total-variation distances between old and new
    scores (Barber et al., 2023).

    In memory, newer scores get larger weights instead, and all weights are scaled down before they
    overflow. Scores whose weight is below a billionth of the newest weight are dropped, so about 21
    / (1 - decay) scores remain.
    """

    __slots__ = ("_decay", "_kept", "_next", "_order", "_scores", "_weights")

    def __init__(self, decay: float) -> None:
        check_fraction("decay", decay)
        self._decay = decay
        self._kept = math.ceil(21 / -math.log(decay))
        self._next = 1.0  # the weight that the next score will get
        self._order = deque[float]()  # scores from oldest to newest
        self._scores = array("d")
        # weights[i] belongs to scores[i]; scores ascend, and equal scores are oldest first
        self._weights = array("d")

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
        below = float(weights[:left].sum())
        equal = float(weights[left:right].sum())
        return WeightedRank(below, equal, float(weights.sum()))


ScoreHistory = Window | Fading
"""A container of the scores among which a new score is ranked. To restore a saved container, add
all its items to an empty one.
"""


# A stratum contains chunks of similar length. It is split in two when it has at least `_LEAST`
# scores and at least 1 / `_SHARE` of all scores.
_LEAST = 30
_SHARE = 16
# Strength of the ridge penalty: the slope is fitted as if this number of additional scores had
# slope 0.
_RIDGE = 2.0

Point = tuple[float, float]
"""A chunk as (logarithm of its length, nonconformity)."""
Sums = list[float]
"""Five sums over the chunks: of 1, x, y, x * x and x * y, where x is the log-length and y the
score.
"""


class _Stratum:
    """Chunks of similar length. `split_from` is the number of chunks at which a split is tried
    next.
    """

    __slots__ = ("flat", "ranks", "split_from", "sums")

    def __init__(self, points: Iterable[Point] = (), split_from: int = _LEAST) -> None:
        # Log-lengths and scores alternate: x0, y0, x1, y1, ... A list of tuples would take eight
        # times the memory.
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
        """Return all points, in the order in which they came."""
        return list(zip(self.flat[::2], self.flat[1::2], strict=True))

    def add(self, point: Point) -> None:
        length, score = point
        self.flat.extend(point)
        self.ranks.add(score)
        terms = (1.0, length, score, length * length, length * score)
        self.sums = [old + new for old, new in zip(self.sums, terms, strict=True)]

    def halves(self) -> tuple[list[Point], list[Point]]:
        """Divide the chunks into shorter and longer chunks. Chunks of equal length are in the same
        half.

        One half is empty if all chunks have the same length.
        """
        ordered = sorted(self.points)
        median = ordered[len(ordered) // 2][0]
        # Chunks of the median length must not be separated. Put them where the sizes of the two
        # halves differ less.
        before = bisect_left(ordered, (median, -math.inf))
        after = bisect_left(ordered, (median, math.inf))
        imbalance_before = len(ordered) - before - before
        imbalance_after = abs(after - (len(ordered) - after))
        cut = before if imbalance_before <= imbalance_after else after
        return ordered[:cut], ordered[cut:]


class LengthStrata(Persisted):
    """Scores grouped by length into at most about thirty strata; a full stratum is split at its
    median.

    Ranks within a stratum are Mondrian conformal p-values with the length as category: they are
    uniform if chunks of similar length are exchangeable. While many chunks are in flight, shorter
    chunks finish first, also within a stratum. The current slope of scores on log-length, in the
    stratum and its neighbours, corrects this bias. A rank needs two searches, but no pass over all
    scores.

    >>> strata = LengthStrata()
    >>> strata.add(1.0, 200.0)
    >>> strata.rank(2.0, 210.0).below
    1
    """

    __slots__ = ("_bounds", "_count", "_strata")

    def __init__(self) -> None:
        # the largest log-length in each stratum; the last stratum has no upper bound
        self._bounds = list[float]()
        self._strata = [_Stratum()]
        self._count = 0

    def rank(self, nonconformity: float, length: float) -> WeightedRank:
        """Return the rank of a finite score among chunks of about this length; store nothing."""
        log_length = math.log(length)
        at = bisect_left(self._bounds, log_length)
        stratum = self._strata[at]
        if not len(stratum):
            return WeightedRank(0, 0, 0)
        mean_length = stratum.sums[1] / stratum.sums[0]
        detrended = nonconformity - self._slope(at) * (log_length - mean_length)
        below, equal = stratum.ranks.counts(detrended)
        return WeightedRank(below, equal, len(stratum))

    def add(self, nonconformity: float, length: float) -> None:
        """Store a finite score."""
        log_length = math.log(length)
        at = bisect_left(self._bounds, log_length)
        stratum = self._strata[at]
        stratum.add((log_length, nonconformity))
        self._count += 1
        if len(stratum) >= max(stratum.split_from, self._count / _SHARE):
            self._split(at)

    def _slope(self, at: int) -> float:
        """Return the slope of scores on log-length in this stratum and its neighbours, by ridge
        regression.
        """
        near = [stratum.sums for stratum in self._strata[max(0, at - 1) : at + 2]]
        count, lengths, scores, squares, products = [sum(sums) for sums in zip(*near, strict=True)]
        spread = squares - lengths * lengths / count
        if count < 3 or spread <= 1e-9 * squares:
            return 0.0
        return float((products - lengths * scores / count) / (spread * (1 + _RIDGE / count)))

    def _split(self, at: int) -> None:
        stratum = self._strata[at]
        shorter, longer = stratum.halves()
        # If nearly all chunks have the same length, such as the token limit, one half would be
        # tiny. So do not split until the stratum has twice as many scores.
        if min(len(shorter), len(longer)) < _LEAST // 4:
            stratum.split_from = 2 * len(stratum)
            return
        self._bounds.insert(at, shorter[-1][0])
        self._strata[at : at + 1] = [_Stratum(shorter), _Stratum(longer)]

    def state(self) -> Any:
        """Return all strata with their sums. The sums are stored, because their rounding errors
        depend on the order of additions.
        """
        rows = [[stratum.split_from, stratum.sums, list(stratum.flat)] for stratum in self._strata]
        return {"bounds": list(self._bounds), "strata": rows}

    def merge(self, state: Any) -> None:
        """Copy all strata of a saved state if this object has none yet; else add only those scores
        of the state that this object lacks.

        Both calibrators started from the same stored scores, which must not count twice.
        """
        points = [list(zip(row[2][::2], row[2][1::2], strict=True)) for row in state["strata"]]
        if self._count:
            here = Counter(point for stratum in self._strata for point in stratum.points)
            theirs = Counter(point for each in points for point in each)
            for log_length, score in (theirs - here).elements():
                self.add(float(score), math.exp(log_length))
            return
        self._bounds = [float(bound) for bound in state["bounds"]]
        self._strata = []
        for (split_from, sums, _), each in zip(state["strata"], points, strict=True):
            floats = [(float(log_length), float(score)) for log_length, score in each]
            stratum = _Stratum(floats, int(split_from))
            stratum.sums = [float(value) for value in sums]
            self._strata.append(stratum)
        self._count = sum(map(len, self._strata))


# The pool of a turn is used as soon as it has this number of scores. Before that, ranks come from
# the pool of all turns.
MINIMUM = 20

# the entry with this key has the sums of all questions that were dropped
_FORGOTTEN = "\x1fforgotten"
HistoryFactory = Callable[[], ScoreHistory]


class ScorePool(Persisted, ABC):
    """The stored and live scores among which a new score is ranked.

    If `question` or `turn` is None, the score may be of any question or turn. The state contains
    the live scores only.
    """

    __slots__ = ()

    @abstractmethod
    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        """Return the rank of the score; store nothing."""

    @abstractmethod
    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        """Store one score: a live score of the run, or a stored score of a calibration run if
        `live` is False.
        """

    @abstractmethod
    def drop_stored(self) -> None:
        """Drop the stored scores of the calibration run, but keep the live scores."""

    def forget(self, question: str) -> None:
        """Drop the data that is needed only for this question, after its last score."""


class Pooled(ScorePool):
    """A single pool for all questions and turns."""

    __slots__ = ("_has_stored", "_live", "_stored")
    saved = ("_live",)

    def __init__(self, remember: HistoryFactory = Window) -> None:
        self._live = remember()
        self.drop_stored()

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        live = self._live.rank(nonconformity)
        return live.plus(self._stored.rank(nonconformity)) if self._has_stored else live

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        if live:
            self._live.add(nonconformity)
        else:
            self._stored.add(nonconformity)
            self._has_stored = True

    def drop_stored(self) -> None:
        self._stored = Window()
        self._has_stored = False

    def __len__(self) -> int:
        return len(self._live) + len(self._stored)


class Frozen(Pooled):
    """A pool of stored scores only, so that thresholds never change.

    Once a drift alarm has dropped the stored scores, live scores replace them.
    """

    __slots__ = ()

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        if live and self._has_stored:
            return
        super().add(nonconformity, question, turn, live)


class ByTurn(ScorePool):
    """One pool per turn, and a pool of all turns, which is used while a turn has too few scores.

    If `minimum` is None, there are no pools per turn, and the pool of all turns is always used.
    """

    __slots__ = ("_all", "_minimum", "_turns")
    saved = ("_all", "_turns")

    def __init__(self, remember: HistoryFactory = Window, minimum: int | None = MINIMUM) -> None:
        self._minimum = minimum
        self._all = Pooled(remember)
        self._turns = DefaultTable(int, lambda: Pooled(remember))

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        if turn is not None and self._minimum is not None:
            pool = self._turns.get(turn)
            if pool is not None and len(pool) >= self._minimum:
                return pool.rank(nonconformity, question, turn)
        return self._all.rank(nonconformity, question, turn)

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        self._all.add(nonconformity, question, turn, live)
        if self._minimum is not None:
            self._turns[turn].add(nonconformity, question, turn, live)

    def drop_stored(self) -> None:
        for pool in (self._all, *self._turns.values()):
            pool.drop_stored()

    def __len__(self) -> int:
        return len(self._all)


class SiblingPool(ScorePool):
    """A pool that blends another pool with the scores of the same question and turn.

    Each sibling has weight 1, and the rank in the other pool has the weight of `prior` siblings.
    This is the predictive distribution of a Dirichlet process whose base is the other pool
    (Ferguson, 1973). The first sample of a question is ranked by the other pool alone, later
    samples increasingly by their siblings. These p-values are predictive ranks, not exact conformal
    p-values.
    """

    __slots__ = ("_base", "_groups", "_prior")
    saved = ("_base", "_groups")

    def __init__(self, base: ScorePool, prior: float) -> None:
        self._base = base
        self._prior = prior
        self._groups = GroupTable(lambda: (Ranks(),))

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        rank = self._base.rank(nonconformity, question, turn)
        if question is None or turn is None:
            return rank
        group = self._groups.get((question, turn))
        if not group:
            return rank
        return _blend(rank, group[0], nonconformity, self._prior)

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        self._base.add(nonconformity, question, turn, live)
        if live:
            self._groups[question, turn][0].add(nonconformity)

    def drop_stored(self) -> None:
        self._base.drop_stored()

    def forget(self, question: str) -> None:
        self._base.forget(question)
        self._groups.forget(question)


class Residuals(ScorePool):
    """A pool of scores minus the expected score of their question, ranked by turn.

    The expected score of a question is its running mean, shrunk towards the running mean of all
    questions. The mean of all questions counts as `shrinkage` scores. So the first score of a new
    question is compared with the mean of all questions, and later scores mostly with the question's
    own mean.

    With `prior`, the rank among the question's residuals is blended in as in `SiblingPool`, for
    questions with a wider or narrower spread. Infinite scores rank at their end of the scale but
    are never stored, because one infinite score would make a mean infinite for ever.
    """

    # `_own` maps each question to the residuals of its scores. Saved states contain the name, so it
    # cannot change.
    __slots__ = ("_means", "_own", "_prior", "_ranks", "_shrinkage", "_stored_means")
    saved = ("_ranks", "_means", "_own")

    def __init__(
        self,
        remember: HistoryFactory = Window,
        minimum: int | None = MINIMUM,
        shrinkage: float = 1.0,
        prior: float = 0.0,
    ) -> None:
        self._ranks = ByTurn(remember, minimum)
        self._shrinkage = shrinkage
        self._prior = prior
        self._means = _Means()
        self._stored_means = _Means()
        self._own = DefaultTable(str, Ranks)

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        if math.isinf(nonconformity):
            return WeightedRank(len(self) if nonconformity > 0 else 0, 0, len(self))
        if not len(self):
            return WeightedRank(0, 0, 0)
        residual = nonconformity - self._expected(question)
        rank = self._ranks.rank(residual, question, turn)
        if question is None or not self._prior:
            return rank
        residuals = self._own.get(question)
        if not residuals:
            return rank
        return _blend(rank, residuals, residual, self._prior)

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        if math.isinf(nonconformity):
            return
        residual = nonconformity - self._expected(question) if len(self) else 0.0
        self._ranks.add(residual, question, turn, live)
        if not live:
            self._stored_means.add(nonconformity, question)
            return
        self._means.add(nonconformity, question)
        if self._prior:
            self._own[question].add(residual)

    def drop_stored(self) -> None:
        self._ranks.drop_stored()
        self._stored_means = _Means()

    def forget(self, question: str) -> None:
        self._means.forget(question)
        self._own.pop(question, None)

    def _expected(self, question: str | None) -> float:
        """Return the expected value of the question's next score."""
        live = self._means
        stored = self._stored_means
        count = live.count + stored.count
        overall = (live.total + stored.total) / count if count else 0.0
        if question is None:
            return overall
        seen, total = live.of(question)
        if stored.count and question:
            stored_seen, stored_total = stored.of(question)
            seen += stored_seen
            total += stored_total
        if not seen:
            return overall
        return (total + self._shrinkage * overall) / (seen + self._shrinkage)

    def __len__(self) -> int:
        return len(self._ranks)


class _Means(Persisted):
    """The count and the sum of scores, per question and overall.

    Questions that are no longer tracked are merged into one entry, so memory grows only with the
    number of unfinished questions.
    """

    __slots__ = ("_questions", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._questions = dict[str, tuple[int, float]]()

    def of(self, question: str) -> tuple[int, float]:
        return self._questions.get(question, (0, 0.0))

    def add(self, nonconformity: float, question: str, count: int = 1) -> None:
        """Add `count` scores that sum to `nonconformity`."""
        seen, total = self.of(question)
        self._questions[question] = (seen + count, total + nonconformity)
        self.count += count
        self.total += nonconformity

    def forget(self, question: str) -> None:
        """Drop a question, but keep its scores in the sums of all questions."""
        seen, total = self._questions.pop(question, (0, 0.0))
        if seen:
            forgotten, forgotten_total = self.of(_FORGOTTEN)
            self._questions[_FORGOTTEN] = (forgotten + seen, forgotten_total + total)

    def state(self) -> Any:
        return {question: list(sums) for question, sums in self._questions.items()}

    def merge(self, state: Any) -> None:
        for question, (count, total) in state.items():
            self.add(float(total), question, int(count))


def _blend(rank: WeightedRank, few: Ranks, value: float, prior: float) -> WeightedRank:
    """Combine the rank of a score in a pool with its rank among a few scores. The pool has the
    weight of `prior` scores.

    The p-value is (prior * p of the pool + number of `few` below) / (prior + len(few)). One random
    number breaks the ties in both.
    """
    below, equal = few.counts(value)
    # Scores of the pool are many, but together count as `prior` scores. So one score of `few`
    # weighs as much as this number of scores of the pool.
    worth = (rank.size + 1) / prior
    return WeightedRank(
        below=rank.below + below * worth,
        equal=rank.equal + equal * worth,
        size=(prior + len(few)) * worth - 1,
    )
