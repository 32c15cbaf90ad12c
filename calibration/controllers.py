"""Rate controllers, and the calibration modes that pair them with a score pool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from atts.calibration.pools import (
    MINIMUM,
    Fading,
    Frozen,
    Pooled,
    Ranks,
    Residuals,
    ScoreHistory,
    ScorePool,
    SiblingPool,
    Window,
)
from atts.calibration.state import DefaultTable, GroupTable, Persisted
from atts.errors import CalibrationInputError, OptionError

# of a run's decisions: paying what is owed to the last takes the target from its last, hardest
# chunks
SLACK = 0.0075
# what is owed beyond that is paid as if so many times fewer were left: slower misses sorted runs
_HASTE = 2.0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How far off the end of a run is: the decisions left, the next one included, and what may
    still be owed then.
    """

    left: float = math.inf
    slack: float = 0.0


UNKNOWN = RunEnd()


class Controller(Persisted):
    """Turns a p-value into a decision and learns what was really done; this one gives every
    decision its rate.
    """

    __slots__ = ("_rate",)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        """The fraction of chunks like this one to escalate now: escalate iff p > 1 - current_rate."""
        return self._rate

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        """Record what was really done with a chunk; it has no nonconformity if it was decided on
        without a score.
        """

    def forget(self, question: str) -> None:
        """No more decisions on this question will come."""


def _checked(step: float) -> float:
    if not 0 < step < math.inf:
        raise CalibrationInputError("step", step, "a positive number")
    return step


class Adaptive(Controller):
    """Adaptive conformal inference on the escalation rate.

    After a decision the rate moves by step * (rate - escalated), unclamped: at or below 0 nothing
    escalates, at or above 1 everything does, so for any sequence |realised - rate| <= (max(rate, 1
    - rate) + step) / (step * T); with d decisions in flight between deciding and observing,
    (max(rate, 1 - rate) + (d + 1) step) / (step * T).

    Where it is known about how many decisions are left, what is owed beyond a slack is made up for
    over half of them, however small the step. So where the truth is at least that half, the sum of
    errors ends within one decision of the slack, for any sequence; every decision it is short of
    that adds at most max(rate, 1 - rate).
    """

    __slots__ = ("_level", "_step")
    saved = ("_level",)

    def __init__(self, rate: float, step: float) -> None:
        super().__init__(rate)
        if not 0 < step < math.inf:
            raise CalibrationInputError("step", step, "a positive number")
        self._step = step
        self._level = rate

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        lead = self._level - self._rate
        paced = _HASTE * max(0.0, abs(lead) / self._step - end.slack) / max(_HASTE, end.left)
        return self._level if paced <= abs(lead) else self._rate + math.copysign(paced, lead)

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        self._level += self._step * (self._rate - escalated)

    def merge(self, state: Any) -> None:
        # Both levels started at the rate, so it is their distances from the rate that add up. A
        # fresh controller takes the other's level over, so that a restored one is bit-identical.
        if self._level == self._rate:
            self._level = float(state["level"])
        else:
            self._level += state["level"] - self._rate


class Feedback(Controller):
    """The rate moved, on the logit scale, by what the question, the turn and the whole stream are
    still owed.

    Each gain multiplies a running sum of (rate - escalated). `order` leans towards consistency with
    the siblings decided before in the same (question, turn): a chunk worse than escalated ones
    should escalate, one better than kept ones not. Beyond `limit` the question's sum decides alone,
    so for any scores whatever it stays within limit + 1 of zero.
    """

    __slots__ = (
        "_gains",
        "_limit",
        "_logit",
        "_order",
        "_overall",
        "_questions",
        "_siblings",
        "_turns",
    )
    saved = ("_questions", "_turns", "_overall", "_siblings")  # of the first three, what is owed

    def __init__(
        self, rate: float, gains: tuple[float, float, float], order: float, limit: float
    ) -> None:
        """`gains` of question, turn and stream, and `order`, are times the variance rate * (1 -
        rate).
        """
        super().__init__(rate)
        self._logit = math.log(rate / (1 - rate)) if 0 < rate < 1 else 0.0
        variance = max(rate * (1 - rate), 1e-3)
        self._gains = tuple(gain / variance for gain in gains)
        self._order = order / variance
        self._limit = limit
        self._questions = DefaultTable(str, float)
        self._turns = DefaultTable(int, float)
        self._overall = 0.0
        self._siblings = GroupTable(lambda: (Ranks(), Ranks()))  # kept, escalated

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        if not 0 < self._rate < 1:
            return self._rate
        owed = self._questions.get(question, 0.0)
        if abs(owed) >= self._limit:
            return 1.0 if owed > 0 else 0.0
        by_question, by_turn, overall = self._gains
        lean = by_question * owed + by_turn * self._turns.get(turn, 0.0) + overall * self._overall
        if self._order:
            lean += self._order * max(-3, min(3, self._standing(nonconformity, question, turn)))
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, self._logit + lean))))

    def _standing(self, nonconformity: float, question: str, turn: int) -> int:
        """Siblings escalated although better, minus siblings kept although worse."""
        siblings = self._siblings.get((question, turn))
        if siblings is None:
            return 0
        kept, escalated = siblings
        return escalated.counts(nonconformity)[0] - (len(kept) - sum(kept.counts(nonconformity)))

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        owed = self._rate - escalated
        self._questions[question] += owed
        self._turns[turn] += owed
        self._overall += owed
        if self._order and nonconformity is not None:
            self._siblings[question, turn][escalated].add(nonconformity)

    def forget(self, question: str) -> None:
        self._questions.pop(question, None)
        self._siblings.forget(question)


Mode = Literal["split", "marginal", "aci", "question", "question-turn"]
MODES: tuple[Mode, ...] = get_args(Mode)


_PROBLEM_STEP = 0.016
"""Slower ones leave short runs off their rate; faster ones even it out between problems, where the
score decides.
"""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants of the modes; the defaults were chosen on the even questions of one run, for
    all rates at once.
    """

    aci_step: float = 0.002  # for 8 rollouts a problem; see `for_rollouts`
    # Pull per decision owed on the logit scale, times the variance rate * (1 - rate).
    question_gain: float = 0.23
    turn_gain: float = 0.035
    overall_gain: float = 0.02
    order: float = 0.144  # the same for one sibling decided the other way round
    limit: float = 4.0  # decisions a question may be owed, at most, before it is simply given them
    shrinkage: float = 1.0  # scores the mean of all questions is worth in a question's own
    residuals: float = 20.0  # scores the turn's pool is worth beside the question's own residuals
    siblings: float = 24.0  # and beside the scores of the same question and turn

    @classmethod
    def for_rollouts(cls, samples: int) -> Tuning:
        """The defaults where so many rollouts of a problem are judged: they share one problem's
        step.

        Siblings find much the same things hard. Were each to move the threshold by a step of its
        own, a hard problem with many rollouts would raise it while it is still being solved, and go
        without what the score says it needs.
        """
        return cls(aci_step=_PROBLEM_STEP / max(1, samples))

    def limit_at(self, rate: float) -> float:
        """What a question may be owed at this rate: of few escalations, one too many is a larger
        part.
        """
        rarer = min(rate, 1 - rate)
        return min(self.limit, 1.35 + 13 * rarer * rarer)


DEFAULTS = Tuning()


def build(
    mode: Mode,
    rate: float,
    window: int | None = None,
    decay: float | None = None,
    tuning: Tuning = DEFAULTS,
) -> tuple[ScorePool, Controller]:
    """The pool and the controller of a mode, remembering the last `window` scores, or all with
    fading weight.

    :raises OptionError: for an unknown mode, or both a window and a decay.
    """
    if window is not None and decay is not None:
        raise OptionError("window and decay", "both given; a memory either ends or fades")

    def remember() -> ScoreHistory:
        return Window(window) if decay is None else Fading(decay)

    if mode == "split":
        return Frozen(), Controller(rate)
    if mode == "marginal":
        return Pooled(remember), Controller(rate)
    if mode == "aci":
        return Pooled(remember), Adaptive(rate, tuning.aci_step)
    if mode not in MODES:
        raise OptionError(str(mode), "is not a calibration mode", MODES)
    by_turn = mode == "question-turn"
    residuals = Residuals(
        remember, MINIMUM if by_turn else 10**18, tuning.shrinkage, tuning.residuals
    )
    gains = (tuning.question_gain, tuning.turn_gain if by_turn else 0.0, tuning.overall_gain)
    return SiblingPool(residuals, tuning.siblings), Feedback(
        rate, gains, tuning.order, tuning.limit_at(rate)
    )
