"""How much of the rate the next decision is given, from what has been decided so far."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from atts.errors import CalibrationInputError

Scope = Literal["overall", "turn"]


class Controller(Protocol):
    """Turns a p-value into a decision and learns what was really done."""

    def level(self, badness: float, question: str, turn: int) -> float:
        """The fraction of chunks like this one to escalate now: escalate iff p > 1 - level."""
        ...

    def account(self, badness: float, question: str, turn: int, escalated: bool) -> None:
        """Record what was really done with a chunk."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything that decides the next answer, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        ...

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another controller of the same kind and rate has seen."""
        ...


class Fixed:
    """The nominal rate for every decision."""

    __slots__ = ("_rate",)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def level(self, badness: float, question: str, turn: int) -> float:
        return self._rate

    def account(self, badness: float, question: str, turn: int, escalated: bool) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def merge(self, state: Mapping[str, Any]) -> None:
        pass


class Adaptive:
    """Adaptive conformal inference on the escalation rate, overall or for each turn by itself.

    After a decision the level moves by step * (rate - escalated), unclamped: at or below 0 nothing escalates, at or above
    1 everything does, so for any sequence whatever |realised - rate| <= (max(rate, 1 - rate) + step) / (step * T).
    """

    __slots__ = ("_levels", "_rate", "_scope", "_step")

    def __init__(self, rate: float, step: float, scope: Scope = "overall") -> None:
        if not 0 < step < math.inf:
            raise CalibrationInputError("step", step, "a positive number")
        self._rate, self._step, self._scope = rate, step, scope
        self._levels = dict[int, float]()

    def level(self, badness: float, question: str, turn: int) -> float:
        return self._levels.get(turn if self._scope == "turn" else 0, self._rate)

    def account(self, badness: float, question: str, turn: int, escalated: bool) -> None:
        group = turn if self._scope == "turn" else 0
        self._levels[group] = self._levels.get(group, self._rate) + self._step * (self._rate - escalated)

    def bound(self, decisions: int) -> float:
        """How far the realised rate of `decisions` can be from the nominal one, whatever the scores."""
        if not decisions:
            return math.inf
        return (max(self._rate, 1 - self._rate) + self._step) / (self._step * decisions)

    def state(self) -> dict[str, Any]:
        return {"levels": {str(group): level for group, level in self._levels.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._levels = {int(group): float(level) for group, level in state["levels"].items()}

    def merge(self, state: Mapping[str, Any]) -> None:
        for group, level in state["levels"].items():
            mine = self._levels.get(int(group), self._rate)
            self._levels[int(group)] = mine + (level - self._rate)


class Feedback:
    """The rate moved, on the logit scale, by what the question, the turn and the whole stream still have to come.

    Each gain multiplies a running sum of (rate - escalated). `order` leans towards consistency with the siblings decided
    before in the same (question, turn): a chunk worse than escalated ones should escalate, one better than kept ones not.
    """

    __slots__ = ("_gains", "_logit", "_order", "_owed", "_owed_question", "_owed_turn", "_rate", "_siblings")

    def __init__(self, rate: float, question: float, turn: float, overall: float, order: float) -> None:
        self._rate = rate
        self._logit = math.log(rate / (1 - rate)) if 0 < rate < 1 else 0.0
        self._gains = (question, turn, overall)
        self._order = order
        self._owed_question = dict[str, float]()
        self._owed_turn = dict[int, float]()
        self._owed = 0.0
        self._siblings = dict[tuple[str, int], tuple[list[float], list[float]]]()

    def level(self, badness: float, question: str, turn: int) -> float:
        if not 0 < self._rate < 1:
            return self._rate
        by_question, by_turn, overall = self._gains
        lean = (
            self._logit
            + by_question * self._owed_question.get(question, 0.0)
            + by_turn * self._owed_turn.get(turn, 0.0)
            + overall * self._owed
        )
        if self._order:
            lean += self._order * max(-3, min(3, self._standing(badness, question, turn)))
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, lean))))

    def _standing(self, badness: float, question: str, turn: int) -> int:
        """Siblings escalated although better, minus siblings kept although worse."""
        siblings = self._siblings.get((question, turn))
        if siblings is None:
            return 0
        kept, escalated = siblings
        return bisect_left(escalated, badness) - (len(kept) - bisect_right(kept, badness))

    def account(self, badness: float, question: str, turn: int, escalated: bool) -> None:
        owed = self._rate - escalated
        self._owed_question[question] = self._owed_question.get(question, 0.0) + owed
        self._owed_turn[turn] = self._owed_turn.get(turn, 0.0) + owed
        self._owed += owed
        if self._order:
            insort(self._siblings.setdefault((question, turn), ([], []))[escalated], badness)

    def state(self) -> dict[str, Any]:
        return {
            "questions": self._owed_question,
            "turns": {str(turn): owed for turn, owed in self._owed_turn.items()},
            "overall": self._owed,
            "siblings": [[question, turn, *lists] for (question, turn), lists in self._siblings.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._owed_question = dict(state["questions"])
        self._owed_turn = {int(turn): float(owed) for turn, owed in state["turns"].items()}
        self._owed = float(state["overall"])
        self._siblings = {(str(q), int(t)): (list(kept), list(up)) for q, t, kept, up in state["siblings"]}

    def merge(self, state: Mapping[str, Any]) -> None:
        for question, owed in state["questions"].items():
            self._owed_question[question] = self._owed_question.get(question, 0.0) + owed
        for turn, owed in state["turns"].items():
            self._owed_turn[int(turn)] = self._owed_turn.get(int(turn), 0.0) + owed
        self._owed += state["overall"]
        for question, turn, kept, escalated in state["siblings"]:
            mine = self._siblings.setdefault((question, int(turn)), ([], []))
            for own, other in zip(mine, (kept, escalated), strict=True):
                own.extend(other)
                own.sort()
