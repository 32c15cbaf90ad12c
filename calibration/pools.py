"""The stored scores a new score is compared with: all together, by turn, or relative to their question."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from atts.calibration.ranks import Ranks
from atts.errors import CalibrationInputError

MINIMUM = 20  # scores a turn's own pool needs before it replaces the pool of all turns


class Place(NamedTuple):
    """Where a score stands among the stored ones it is compared with."""

    below: int
    equal: int
    size: int

    def p(self, theta: float) -> float:
        """The smoothed conformal p-value: exactly uniform if the scores are exchangeable; near 1 is worse."""
        return (self.below + theta * (1 + self.equal)) / (self.size + 1)

    @property
    def conservative(self) -> float:
        """The p-value without a coin: P(p <= a) <= a, ties counting as not worse."""
        return (1 + self.below + self.equal) / (self.size + 1)


class Pool(Protocol):
    """Stored scores that can place a new one; `question` and `turn` None mean "of any"."""

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        """Where the score stands; nothing is stored."""
        ...

    def learn(self, badness: float, question: str, turn: int) -> None:
        """Store one score."""
        ...

    def clear(self) -> None:
        """Forget every stored score."""
        ...

    def __len__(self) -> int: ...

    def state(self) -> dict[str, Any]:
        """Everything that decides the next answer, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, replacing what is here."""
        ...

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another pool of the same kind has stored."""
        ...


class Window:
    """Ranks of the last `width` scores, or of all of them when the width is None."""

    __slots__ = ("_order", "_width", "ranks")

    def __init__(self, width: int | None = None) -> None:
        if width is not None and width < 1:
            raise CalibrationInputError("window", width, "a positive number of scores, or None for all")
        self.ranks = Ranks()
        self._width = width
        self._order = deque[float]()

    def __len__(self) -> int:
        return len(self.ranks)

    def add(self, score: float) -> None:
        """Store one score, dropping the oldest beyond the width."""
        self.ranks.add(score)
        if self._width is not None:
            self._order.append(score)
            if len(self._order) > self._width:
                self.ranks.remove(self._order.popleft())

    def place(self, score: float) -> Place:
        """Where `score` stands among the stored ones."""
        below, equal = self.ranks.counts(score)
        return Place(below, equal, len(self.ranks))

    def scores(self) -> list[float]:
        """The stored scores: oldest first with a width, sorted without one."""
        return list(self.ranks if self._width is None else self._order)

    def fill(self, scores: list[float]) -> None:
        """Replace the stored scores."""
        kept = scores if self._width is None else scores[-self._width :]
        self.ranks = Ranks(kept)
        self._order = deque(kept if self._width is not None else ())


class Pooled:
    """One pool for every question and turn."""

    __slots__ = ("_window",)

    def __init__(self, window: int | None = None) -> None:
        self._window = Window(window)

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        return self._window.place(badness)

    def learn(self, badness: float, question: str, turn: int) -> None:
        self._window.add(badness)

    def clear(self) -> None:
        self._window.fill([])

    def __len__(self) -> int:
        return len(self._window)

    def state(self) -> dict[str, Any]:
        return {"scores": self._window.scores()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window.fill(list(state["scores"]))

    def merge(self, state: Mapping[str, Any]) -> None:
        for score in state["scores"]:
            self._window.add(score)


class ByTurn:
    """A pool per turn beside the pool of all turns, which answers while a turn has too few scores of its own."""

    __slots__ = ("_all", "_minimum", "_turns", "_window")

    def __init__(self, window: int | None = None, minimum: int = MINIMUM) -> None:
        self._window, self._minimum = window, minimum
        self._all = Window(window)
        self._turns = dict[int, Window]()

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        own = self._turns.get(turn) if turn is not None else None
        return (own if own is not None and len(own) >= self._minimum else self._all).place(badness)

    def learn(self, badness: float, question: str, turn: int) -> None:
        self._all.add(badness)
        if turn not in self._turns:
            self._turns[turn] = Window(self._window)
        self._turns[turn].add(badness)

    def clear(self) -> None:
        self._all = Window(self._window)
        self._turns = {}

    def __len__(self) -> int:
        return len(self._all)

    def state(self) -> dict[str, Any]:
        turns = {str(turn): pool.scores() for turn, pool in self._turns.items()}
        return {"all": self._all.scores(), "turns": turns}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.clear()
        self._all.fill(list(state["all"]))
        for turn, scores in state["turns"].items():
            self._turns[int(turn)] = pool = Window(self._window)
            pool.fill(list(scores))

    def merge(self, state: Mapping[str, Any]) -> None:
        for score in state["all"]:
            self._all.add(score)
        for turn, scores in state["turns"].items():
            pool = self._turns.setdefault(int(turn), Window(self._window))
            for score in scores:
                pool.add(score)


class Residuals:
    """Scores relative to their question's level so far, ranked by turn.

    The level of a question is its running mean shrunk towards the running mean of all questions as if `shrinkage` scores
    of the latter had been seen, so the first score of a new question is placed by the pooled level, and its tenth by its
    own. Infinite scores are placed at the worst end and never stored: one would shift a mean for ever.
    """

    __slots__ = ("_mean", "_questions", "_ranks", "_shrinkage")

    def __init__(self, window: int | None = None, minimum: int = MINIMUM, shrinkage: float = 1.0) -> None:
        self._ranks = ByTurn(window, minimum)
        self._shrinkage = shrinkage
        self._questions = dict[str, list[float]]()  # [count, sum]
        self._mean = [0.0, 0.0]

    def level(self, question: str | None) -> float:
        """What is expected of the question's next score."""
        count, total = self._mean
        overall = total / count if count else 0.0
        own = self._questions.get(question) if question is not None else None
        if own is None:
            return overall
        return (own[1] + self._shrinkage * overall) / (own[0] + self._shrinkage)

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        if math.isinf(badness):
            return Place(len(self) if badness > 0 else 0, 0, len(self))
        if not self._mean[0]:
            return Place(0, 0, 0)
        return self._ranks.place(badness - self.level(question), question, turn)

    def learn(self, badness: float, question: str, turn: int) -> None:
        if math.isinf(badness):
            return
        expected = self.level(question) if self._mean[0] else badness
        self._ranks.learn(badness - expected, question, turn)
        for sums in (self._questions.setdefault(question, [0, 0.0]), self._mean):
            sums[0] += 1
            sums[1] += badness

    def clear(self) -> None:
        self._ranks.clear()
        self._questions = {}
        self._mean = [0.0, 0.0]

    def __len__(self) -> int:
        return len(self._ranks)

    def state(self) -> dict[str, Any]:
        return {"ranks": self._ranks.state(), "questions": self._questions, "mean": self._mean}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._ranks.restore(state["ranks"])
        self._questions = {question: list(sums) for question, sums in state["questions"].items()}
        self._mean = list(state["mean"])

    def merge(self, state: Mapping[str, Any]) -> None:
        self._ranks.merge(state["ranks"])
        for question, (count, total) in state["questions"].items():
            sums = self._questions.setdefault(question, [0, 0.0])
            sums[0] += count
            sums[1] += total
        self._mean = [mine + other for mine, other in zip(self._mean, state["mean"], strict=True)]
