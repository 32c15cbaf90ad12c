"""Score pools: the scores a new one is ranked among, all together, by turn, or relative to their
question.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from atts.calibration.score_history import Ranks, ScoreHistory, WeightedRank, Window
from atts.calibration.state import GroupTable, Part, StateTable

MINIMUM = 20  # scores a turn's own pool needs before it answers in place of the pool of all turns

_FORGOTTEN = "\x1fforgotten"  # the name under which sums of questions that are over are kept
HistoryFactory = Callable[[], ScoreHistory]


class ScorePool(Part, ABC):
    """Stored and live scores that can place a new one; `question` and `turn` None mean "of any".

    Its state is what it has seen live.
    """

    __slots__ = ()

    @abstractmethod
    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        """Where the score stands; nothing is stored."""

    @abstractmethod
    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        """Store one live score, or one of a calibration run."""

    @abstractmethod
    def drop_stored(self) -> None:
        """Forget the calibration run, keeping what is live."""

    def forget(self, question: str) -> None:
        """No more scores of this question will come: let go of what serves its own only."""


class Pooled(ScorePool):
    """One pool for every question and turn."""

    __slots__ = ("_has_stored", "_live", "_stored")
    saved = ("_live",)

    def __init__(self, remember: HistoryFactory = Window) -> None:
        self._live = remember()
        self.drop_stored()

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        live = self._live.rank(nonconformity)
        return live.plus(self._stored.rank(nonconformity)) if self._has_stored else live

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        (self._live if live else self._stored).add(nonconformity)
        self._has_stored |= not live

    def drop_stored(self) -> None:
        self._stored = Window()
        self._has_stored = False

    def __len__(self) -> int:
        return len(self._live) + len(self._stored)


class Frozen(Pooled):
    """The stored scores alone, every threshold as it was fitted; live ones take over once the
    stored are disowned.
    """

    __slots__ = ()

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        if not (live and self._has_stored):
            super().add(nonconformity, question, turn, live)


class ByTurn(ScorePool):
    """A pool per turn beside the pool of all turns, which answers while a turn has too few scores
    of its own.
    """

    __slots__ = ("_all", "_minimum", "_turns")
    saved = ("_all", "_turns")

    def __init__(self, remember: HistoryFactory = Window, minimum: int = MINIMUM) -> None:
        self._minimum = minimum
        self._all = Pooled(remember)
        self._turns = StateTable(int, lambda: Pooled(remember))

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        own = self._turns.get(turn) if turn is not None else None
        pool = own if own is not None and len(own) >= self._minimum else self._all
        return pool.rank(nonconformity, question, turn)

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        for pool in (self._all, self._turns[turn]):
            pool.add(nonconformity, question, turn, live)

    def drop_stored(self) -> None:
        for pool in (self._all, *self._turns.values()):
            pool.drop_stored()

    def __len__(self) -> int:
        return len(self._all)


class SiblingPool(ScorePool):
    """The pool of another kind, blended with the scores of the same question and turn.

    The share of siblings below a score, and the pool's answer as if it were `prior` siblings: the
    predictive distribution of a Dirichlet process with the pool as its base. The first sample of a
    question is placed by the pool alone, the later ones more and more by their siblings.
    """

    __slots__ = ("_base", "_groups", "_prior")
    saved = ("_base", "_groups")

    def __init__(self, base: ScorePool, prior: float) -> None:
        self._base = base
        self._prior = prior
        self._groups = GroupTable(lambda: (Ranks(),))

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        place = self._base.rank(nonconformity, question, turn)
        group = (
            self._groups.get((question, turn))
            if question is not None and turn is not None
            else None
        )
        return _blend(place, group[0], nonconformity, self._prior) if group else place

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
    """Scores relative to what their question's so far lead to expect, ranked by turn.

    Expected of a question is its running mean shrunk towards the running mean of all questions as
    if `shrinkage` scores of the latter had been seen, so the first score of a new question is
    placed by the pooled mean, its tenth by its own. With `prior`, the rank among the question's own
    residuals is blended in as `SiblingPool` does, for questions that spread more or less than
    others. Infinite scores are placed at their end of the scale and never stored: one of them would
    shift a mean for ever.
    """

    __slots__ = ("_means", "_own", "_prior", "_ranks", "_shrinkage", "_stored_means")
    saved = ("_ranks", "_means", "_own")

    def __init__(
        self,
        remember: HistoryFactory = Window,
        minimum: int = MINIMUM,
        shrinkage: float = 1.0,
        prior: float = 0.0,
    ) -> None:
        self._ranks = ByTurn(remember, minimum)
        self._shrinkage = shrinkage
        self._prior = prior
        self._means = _Means()
        self._stored_means = _Means()
        self._own = StateTable(str, Ranks)

    def rank(self, nonconformity: float, question: str | None, turn: int | None) -> WeightedRank:
        if math.isinf(nonconformity):
            return WeightedRank(len(self) if nonconformity > 0 else 0, 0, len(self))
        if not len(self):
            return WeightedRank(0, 0, 0)
        residual = nonconformity - self._expected(question)
        place = self._ranks.rank(residual, question, turn)
        own = self._own.get(question) if question is not None and self._prior else None
        return _blend(place, own, residual, self._prior) if own else place

    def add(self, nonconformity: float, question: str, turn: int, live: bool = True) -> None:
        if math.isinf(nonconformity):
            return
        residual = nonconformity - self._expected(question) if len(self) else 0.0
        self._ranks.add(residual, question, turn, live)
        (self._means if live else self._stored_means).add(nonconformity, question)
        if live and self._prior:
            self._own[question].add(residual)

    def drop_stored(self) -> None:
        self._ranks.drop_stored()
        self._stored_means = _Means()

    def forget(self, question: str) -> None:
        self._means.forget(question)
        self._own.pop(question, None)

    def _expected(self, question: str | None) -> float:
        """What is expected of the question's next score."""
        live = self._means
        stored = self._stored_means
        count = live.count + stored.count
        overall = (live.total + stored.total) / count if count else 0.0
        seen, total = live.of(question) if question is not None else (0, 0.0)
        if stored.count and question:
            before, before_total = stored.of(question)
            seen = seen + before
            total = total + before_total
        return (total + self._shrinkage * overall) / (seen + self._shrinkage) if seen else overall

    def __len__(self) -> int:
        return len(self._ranks)


class _Means(Part):
    """Counts and sums, of each question and of all; those of forgotten questions are one entry."""

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
        """Keep its scores in the sums of all only."""
        seen, total = self._questions.pop(question, (0, 0.0))
        before, before_total = self.of(_FORGOTTEN)
        if seen:
            self._questions[_FORGOTTEN] = (before + seen, before_total + total)

    def state(self) -> Any:
        return {question: list(sums) for question, sums in self._questions.items()}

    def merge(self, state: Any) -> None:
        for question, (count, total) in state.items():
            self.add(float(total), question, int(count))


def _blend(place: WeightedRank, own: Ranks, value: float, prior: float) -> WeightedRank:
    """The place among `own` values with the pool's answer standing in for `prior` more.

    Its p is (prior * p of the pool + values of `own` below, ties by the same coin) / (prior +
    len(own)).
    """
    below, equal = own.counts(value)
    worth = (place.size + 1) / prior  # scores of the pool that weigh as much as one of `own`
    return WeightedRank(
        place.below + below * worth, place.equal + equal * worth, (prior + len(own)) * worth - 1
    )
