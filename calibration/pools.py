"""The scores a new score is compared with: all together, by turn, or relative to their question."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from atts.calibration.memory import Memory, Place, Window
from atts.calibration.ranks import Ranks

MINIMUM = 20  # scores a turn's own pool needs before it answers in place of the pool of all turns

Key = TypeVar("Key")
Remember = Callable[[], Memory]


class Pool(Protocol):
    """Stored and live scores that can place a new one; `question` and `turn` None mean "of any"."""

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        """Where the score stands; nothing is stored."""
        ...

    def learn(self, badness: float, question: str, turn: int) -> None:
        """Store one live score."""
        ...

    def adopt(self, badness: float, question: str, turn: int) -> None:
        """Store one score of a calibration run."""
        ...

    def disown(self) -> None:
        """Forget the calibration run, keeping what is live."""
        ...

    def __len__(self) -> int: ...

    def state(self) -> dict[str, Any]:
        """Everything live that decides the next answer, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, replacing what is live."""
        ...

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another pool of the same kind has seen live."""
        ...


class Pooled:
    """One pool for every question and turn."""

    __slots__ = ("_live", "_remember", "_stored")

    def __init__(self, remember: Remember = Window) -> None:
        self._remember = remember
        self._live = remember()
        self._stored = Window()

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        live = self._live.place(badness)
        return live.plus(self._stored.place(badness)) if len(self._stored) else live

    def learn(self, badness: float, question: str, turn: int) -> None:
        self._live.add(badness)

    def adopt(self, badness: float, question: str, turn: int) -> None:
        self._stored.add(badness)

    def disown(self) -> None:
        self._stored = Window()

    def __len__(self) -> int:
        return len(self._live) + len(self._stored)

    def state(self) -> dict[str, Any]:
        return {"live": self._live.scores()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._live = self._remember()
        self.merge(state)

    def merge(self, state: Mapping[str, Any]) -> None:
        for score in state["live"]:
            self._live.add(float(score))


class Frozen(Pooled):
    """The stored scores alone, every threshold as it was fitted; live ones take over once the stored are disowned."""

    __slots__ = ()

    def learn(self, badness: float, question: str, turn: int) -> None:
        if not len(self._stored):
            self._live.add(badness)


class ByTurn:
    """A pool per turn beside the pool of all turns, which answers while a turn has too few scores of its own."""

    __slots__ = ("_all", "_minimum", "_remember", "_turns")

    def __init__(self, remember: Remember = Window, minimum: int = MINIMUM) -> None:
        self._remember, self._minimum = remember, minimum
        self._all = Pooled(remember)
        self._turns = dict[int, Pooled]()

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        own = self._turns.get(turn) if turn is not None else None
        pool = own if own is not None and len(own) >= self._minimum else self._all
        return pool.place(badness, question, turn)

    def learn(self, badness: float, question: str, turn: int) -> None:
        self._all.learn(badness, question, turn)
        self._of(turn).learn(badness, question, turn)

    def adopt(self, badness: float, question: str, turn: int) -> None:
        self._all.adopt(badness, question, turn)
        self._of(turn).adopt(badness, question, turn)

    def disown(self) -> None:
        for pool in (self._all, *self._turns.values()):
            pool.disown()

    def _of(self, turn: int) -> Pooled:
        if turn not in self._turns:
            self._turns[turn] = Pooled(self._remember)
        return self._turns[turn]

    def __len__(self) -> int:
        return len(self._all)

    def state(self) -> dict[str, Any]:
        return {"all": self._all.state(), "turns": {str(turn): pool.state() for turn, pool in self._turns.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        for pool in (self._all, *self._turns.values()):
            pool.restore({"live": []})
        self.merge(state)

    def merge(self, state: Mapping[str, Any]) -> None:
        self._all.merge(state["all"])
        for turn, live in state["turns"].items():
            self._of(int(turn)).merge(live)


class Siblings:
    """The pool of another kind, blended with the scores of the same question and turn.

    The share of siblings below a score, and the pool's answer as if it were `prior` siblings: the predictive law of a
    Dirichlet process with the pool as its base. The first sample of a question is placed by the pool alone, the later
    ones more and more by their siblings.
    """

    __slots__ = ("_base", "_groups", "_prior")

    def __init__(self, base: Pool, prior: float) -> None:
        self._base, self._prior = base, prior
        self._groups = dict[tuple[str, int], Ranks]()

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        place = self._base.place(badness, question, turn)
        group = self._groups.get((question, turn)) if question is not None and turn is not None else None
        return _blend(place, group, badness, self._prior) if group else place

    def learn(self, badness: float, question: str, turn: int) -> None:
        self._base.learn(badness, question, turn)
        _of(self._groups, (question, turn)).add(badness)

    def adopt(self, badness: float, question: str, turn: int) -> None:
        self._base.adopt(badness, question, turn)

    def disown(self) -> None:
        self._base.disown()

    def __len__(self) -> int:
        return len(self._base)

    def state(self) -> dict[str, Any]:
        groups = [[question, turn, list(scores)] for (question, turn), scores in self._groups.items()]
        return {"base": self._base.state(), "groups": groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._base.restore(state["base"])
        self._groups = {(str(q), int(t)): Ranks(map(float, scores)) for q, t, scores in state["groups"]}

    def merge(self, state: Mapping[str, Any]) -> None:
        self._base.merge(state["base"])
        for question, turn, scores in state["groups"]:
            group = _of(self._groups, (str(question), int(turn)))
            for score in scores:
                group.add(float(score))


class Residuals:
    """Scores relative to their question's level so far, ranked by turn.

    The level of a question is its running mean shrunk towards the running mean of all questions as if `shrinkage`
    scores of the latter had been seen, so the first score of a new question is placed by the pooled level, its tenth
    by its own. With `prior`, the rank among the question's own residuals is blended in as `Siblings` does, for
    questions that spread more or less than others. Infinite scores are placed at their end of the scale and never
    stored: one of them would shift a mean for ever.
    """

    __slots__ = ("_means", "_own", "_prior", "_ranks", "_shrinkage", "_stored_means")

    def __init__(
        self, remember: Remember = Window, minimum: int = MINIMUM, shrinkage: float = 1.0, prior: float = 0.0
    ) -> None:
        self._ranks = ByTurn(remember, minimum)
        self._shrinkage, self._prior = shrinkage, prior
        self._means, self._stored_means = _Means(), _Means()
        self._own = dict[str, Ranks]()

    def place(self, badness: float, question: str | None, turn: int | None) -> Place:
        if math.isinf(badness):
            return Place(len(self) if badness > 0 else 0, 0, len(self))
        if not len(self):
            return Place(0, 0, 0)
        residual = badness - self._level(question)
        place = self._ranks.place(residual, question, turn)
        own = self._own.get(question) if question is not None and self._prior else None
        return _blend(place, own, residual, self._prior) if own else place

    def learn(self, badness: float, question: str, turn: int) -> None:
        if math.isinf(badness):
            return
        residual = badness - self._level(question) if len(self) else 0.0
        self._ranks.learn(residual, question, turn)
        self._means.add(badness, question)
        if self._prior:
            _of(self._own, question).add(residual)

    def adopt(self, badness: float, question: str, turn: int) -> None:
        if math.isinf(badness):
            return
        residual = badness - self._level(question) if len(self) else 0.0
        self._ranks.adopt(residual, question, turn)
        self._stored_means.add(badness, question)

    def disown(self) -> None:
        self._ranks.disown()
        self._stored_means = _Means()

    def _level(self, question: str | None) -> float:
        """What is expected of the question's next score."""
        live, stored = self._means, self._stored_means
        count = live.count + stored.count
        overall = (live.total + stored.total) / count if count else 0.0
        seen, total = live.of(question) if question is not None else (0, 0.0)
        if stored.count and question:
            before, before_total = stored.of(question)
            seen, total = seen + before, total + before_total
        return (total + self._shrinkage * overall) / (seen + self._shrinkage) if seen else overall

    def __len__(self) -> int:
        return len(self._ranks)

    def state(self) -> dict[str, Any]:
        own = {question: list(residuals) for question, residuals in self._own.items()}
        return {"ranks": self._ranks.state(), "means": self._means.state(), "own": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._ranks.restore(state["ranks"])
        self._means = _Means()
        self._means.merge(state["means"])
        self._own = {question: Ranks(map(float, scores)) for question, scores in state["own"].items()}

    def merge(self, state: Mapping[str, Any]) -> None:
        self._ranks.merge(state["ranks"])
        self._means.merge(state["means"])
        for question, scores in state["own"].items():
            own = _of(self._own, question)
            for score in scores:
                own.add(float(score))


class _Means:
    """Counts and sums, of each question and of all."""

    __slots__ = ("_questions", "count", "total")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self._questions = dict[str, tuple[int, float]]()

    def of(self, question: str) -> tuple[int, float]:
        return self._questions.get(question, (0, 0.0))

    def add(self, badness: float, question: str, count: int = 1) -> None:
        """Add `count` scores that sum to `badness`."""
        seen, total = self.of(question)
        self._questions[question] = (seen + count, total + badness)
        self.count += count
        self.total += badness

    def state(self) -> dict[str, Any]:
        return {question: list(sums) for question, sums in self._questions.items()}

    def merge(self, state: Mapping[str, Any]) -> None:
        for question, (count, total) in state.items():
            self.add(float(total), question, int(count))


def _of(groups: dict[Key, Ranks], key: Key) -> Ranks:
    if key not in groups:
        groups[key] = Ranks()
    return groups[key]


def _blend(place: Place, own: Ranks, value: float, prior: float) -> Place:
    """The place among `own` values with the pool's answer standing in for `prior` more.

    Its p is (prior * p of the pool + values of `own` below, ties by the same coin) / (prior + len(own)).
    """
    below, equal = own.counts(value)
    worth = (place.size + 1) / prior  # scores of the pool that weigh as much as one of `own`
    return Place(place.below + below * worth, place.equal + equal * worth, (prior + len(own)) * worth - 1)
