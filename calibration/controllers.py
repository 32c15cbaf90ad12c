"""How much of the rate the next decision is given, from what has been decided so far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from atts.calibration.ranks import Ranks
from atts.errors import CalibrationInputError

Scope = Literal["overall", "turn"]


class Gains(NamedTuple):
    """How strongly the question, the turn and the whole stream pull, per decision owed."""

    question: float
    turn: float
    overall: float


class Controller(Protocol):
    """Turns a p-value into a decision and learns what was really done."""

    def level(self, badness: float, question: str, turn: int) -> float:
        """The fraction of chunks like this one to escalate now: escalate iff p > 1 - level."""
        ...

    def account(self, badness: float | None, question: str, turn: int, escalated: bool) -> None:
        """Record what was really done with a chunk; it has no badness if it was decided on without a score."""
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

    def account(self, badness: float | None, question: str, turn: int, escalated: bool) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def merge(self, state: Mapping[str, Any]) -> None:
        pass


class Adaptive:
    """Adaptive conformal inference on the escalation rate, overall or for each turn by itself.

    After a decision the level moves by step * (rate - escalated), unclamped: at or below 0 nothing escalates, at or
    above 1 everything does, so for any sequence |realised - rate| <= (max(rate, 1 - rate) + step) / (step * T); with
    d decisions in flight between deciding and observing, (max(rate, 1 - rate) + (d + 1) step) / (step * T).
    """

    __slots__ = ("_levels", "_rate", "_scope", "_step")

    def __init__(self, rate: float, step: float, scope: Scope = "overall") -> None:
        if not 0 < step < math.inf:
            raise CalibrationInputError("step", step, "a positive number")
        self._rate, self._step, self._scope = rate, step, scope
        self._levels = dict[int, float]()

    def level(self, badness: float, question: str, turn: int) -> float:
        return self._levels.get(turn if self._scope == "turn" else 0, self._rate)

    def account(self, badness: float | None, question: str, turn: int, escalated: bool) -> None:
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


class Tracking:
    """A threshold on the score itself that follows its own (1 - rate) quantile: quantile tracking with an integral
    term.

    After a decision it moves by step * scale * (escalated - rate), and `integral` leans it against the sum of all
    errors, saturating with it. It starts from the first `warm` scores: at their quantile, with their mean distance from
    the median as scale; before, the nominal rate decides. Once the mean distance of all scores is over twice the scale
    (first turns may score much alike), it becomes the scale. While one scale counts, for scores that stay within b of
    each other, the sum of errors moves by at most b / (step * scale) + 1.
    """

    __slots__ = ("_distance", "_integral", "_last", "_middle", "_owed", "_rate", "_scale", "_seen", "_step",
                 "_threshold", "_warm")  # fmt: skip

    def __init__(self, rate: float, step: float, integral: float = 0.0, warm: int = 20) -> None:
        if not 0 < step < math.inf:
            raise CalibrationInputError("step", step, "a positive number")
        self._rate, self._step, self._integral, self._warm = rate, step, integral, warm
        self._last = deque[float](maxlen=warm)
        self._threshold = self._scale = self._owed = 0.0
        self._middle = self._distance = 0.0  # the first median, and the sum of all distances from it
        self._seen = 0

    def level(self, badness: float, question: str, turn: int) -> float:
        if not self._scale or not 0 < self._rate < 1:
            return self._rate
        lean = self._integral * self._scale * math.tanh(self._owed / 25) if self._integral else 0.0
        return 1.0 if badness > self._threshold - lean else 0.0

    def account(self, badness: float | None, question: str, turn: int, escalated: bool) -> None:
        self._owed += self._rate - escalated
        if self._scale:
            self._threshold += self._step * self._scale * (escalated - self._rate)
        if badness is None or not math.isfinite(badness):
            return
        self._last.append(badness)
        self._seen += 1
        if self._scale:
            self._distance += abs(badness - self._middle)
            if self._distance > 2 * self._scale * self._seen:
                self._scale = self._distance / self._seen
        elif len(self._last) == self._warm:  # as long as they are all equal, wait for another
            self._start()

    def _start(self) -> None:
        ordered = sorted(self._last)
        self._middle = ordered[self._warm // 2]
        self._scale = math.fsum(abs(score - self._middle) for score in ordered) / self._warm
        self._distance = self._scale * self._seen
        self._threshold = ordered[min(self._warm - 1, int((1 - self._rate) * self._warm))]

    def state(self) -> dict[str, Any]:
        sums = {"middle": self._middle, "distance": self._distance, "seen": self._seen}
        return {
            "last": list(self._last),
            "threshold": self._threshold,
            "scale": self._scale,
            "owed": self._owed,
            **sums,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._last = deque(map(float, state["last"]), maxlen=self._warm)
        self._threshold, self._scale = float(state["threshold"]), float(state["scale"])
        self._owed, self._middle = float(state["owed"]), float(state["middle"])
        self._distance, self._seen = float(state["distance"]), int(state["seen"])

    def merge(self, state: Mapping[str, Any]) -> None:
        owed = self._owed + state["owed"]
        if not self._scale:
            before = list(self._last)
            self.restore(state)
            self._last.extendleft(reversed(before[: self._warm - len(self._last)]))
        elif state["scale"]:
            self._threshold = (self._threshold + state["threshold"]) / 2
            self._scale = max(self._scale, float(state["scale"]))
            self._distance += state["distance"]
            self._seen += int(state["seen"])
        self._owed = owed


class Feedback:
    """The rate moved, on the logit scale, by what the question, the turn and the whole stream are still owed.

    Each gain multiplies a running sum of (rate - escalated). `order` leans towards consistency with the siblings
    decided before in the same (question, turn): a chunk worse than escalated ones should escalate, one better than
    kept ones not. Beyond `limit` the question's sum decides alone, so for any scores whatever it stays within limit +
    1 of zero.
    """

    __slots__ = ("_gains", "_limit", "_logit", "_order", "_owed", "_owed_question", "_owed_turn", "_rate", "_siblings")

    def __init__(self, rate: float, gains: Gains, order: float, limit: float) -> None:
        self._rate = rate
        self._logit = math.log(rate / (1 - rate)) if 0 < rate < 1 else 0.0
        self._gains, self._order, self._limit = gains, order, limit
        self._owed_question = dict[str, float]()
        self._owed_turn = dict[int, float]()
        self._owed = 0.0
        self._siblings = dict[tuple[str, int], tuple[Ranks, Ranks]]()  # kept, escalated

    def level(self, badness: float, question: str, turn: int) -> float:
        if not 0 < self._rate < 1:
            return self._rate
        owed = self._owed_question.get(question, 0.0)
        if abs(owed) >= self._limit:
            return 1.0 if owed > 0 else 0.0
        by_question, by_turn, overall = self._gains
        lean = by_question * owed + by_turn * self._owed_turn.get(turn, 0.0) + overall * self._owed
        if self._order:
            lean += self._order * max(-3, min(3, self._standing(badness, question, turn)))
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, self._logit + lean))))

    def _standing(self, badness: float, question: str, turn: int) -> int:
        """Siblings escalated although better, minus siblings kept although worse."""
        siblings = self._siblings.get((question, turn))
        if siblings is None:
            return 0
        kept, escalated = siblings
        return escalated.counts(badness)[0] - (len(kept) - sum(kept.counts(badness)))

    def account(self, badness: float | None, question: str, turn: int, escalated: bool) -> None:
        owed = self._rate - escalated
        self._owed_question[question] = self._owed_question.get(question, 0.0) + owed
        self._owed_turn[turn] = self._owed_turn.get(turn, 0.0) + owed
        self._owed += owed
        if self._order and badness is not None:
            self._of(question, turn)[escalated].add(badness)

    def _of(self, question: str, turn: int) -> tuple[Ranks, Ranks]:
        key = (question, turn)
        if key not in self._siblings:
            self._siblings[key] = (Ranks(), Ranks())
        return self._siblings[key]

    def state(self) -> dict[str, Any]:
        return {
            "questions": dict(self._owed_question),
            "turns": {str(turn): owed for turn, owed in self._owed_turn.items()},
            "overall": self._owed,
            "siblings": [[q, t, list(kept), list(up)] for (q, t), (kept, up) in self._siblings.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._owed_question, self._owed_turn, self._owed = {}, {}, 0.0
        self._siblings = {}
        self.merge(state)

    def merge(self, state: Mapping[str, Any]) -> None:
        for question, owed in state["questions"].items():
            self._owed_question[question] = self._owed_question.get(question, 0.0) + owed
        for turn, owed in state["turns"].items():
            self._owed_turn[int(turn)] = self._owed_turn.get(int(turn), 0.0) + owed
        self._owed += state["overall"]
        for question, turn, *lists in state["siblings"]:
            for mine, scores in zip(self._of(str(question), int(turn)), lists, strict=True):
                for score in scores:
                    mine.add(float(score))
