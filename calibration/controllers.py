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

Mode = Literal["split", "marginal", "aci", "question", "question-turn"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The deficit is rate * decisions - escalations. This share of a run's decisions may stay as deficit
# at its end: making up for all of it takes the target from the run's last, hardest chunks.
SLACK = 0.006
# The rest is made up for as if so many times fewer decisions were left: slower misses runs
# whose scores come sorted.
_HASTE = 2.0
# What all rollouts of a problem together move the level by. Slower leaves short runs off their
# rate; faster evens the rate out between problems, where the score should decide.
_PROBLEM_STEP = 0.016


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Distance to the end of a run."""

    left: float = math.inf  # decisions left, the next one included
    slack: float = 0.0  # the deficit that may stay then, in decisions


UNKNOWN = RunEnd()


class Controller(Persisted):
    """Turns a p-value into a decision and learns what was really done.

    This one gives every decision its nominal rate: modes "split" and "marginal".
    """

    __slots__ = ("_rate",)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        """Return the fraction of chunks like this one to escalate now.

        A chunk escalates iff its p-value is above 1 - current_rate.
        """
        return self._rate

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        """Record what was really done with a chunk.

        It has no nonconformity if it was decided on without a score.
        """

    def forget(self, question: str) -> None:
        """Drop what serves this question only: no more decisions on it will come."""


class Adaptive(Controller):
    """Adaptive conformal inference on the escalation rate (Gibbs and Candès, 2021).

    After a decision the level moves by step * (rate - escalated), unclamped: at or below 0 nothing
    escalates, at or above 1 everything does, so for any sequence |realised - rate| <= (max(rate, 1
    - rate) + step) / (step * T); with d decisions in flight between deciding and observing,
    (max(rate, 1 - rate) + (d + 1) step) / (step * T).

    Where it is known about how many decisions are left, a deficit beyond a slack is made up for
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
        # The lead is the step times the deficit so far.
        deficit = max(0.0, abs(lead) / self._step - end.slack)
        pace = _HASTE * deficit / max(_HASTE, end.left)
        if pace <= abs(lead):
            return self._level
        return self._rate + math.copysign(pace, lead)

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        # Not clamped to [0, 1]: the bound needs the level to remember a deficit beyond them.
        self._level += self._step * (self._rate - escalated)

    def merge(self, state: Any) -> None:
        # Both levels started at the rate, so it is their distances from the rate that add up. A
        # fresh controller takes the other's level over, so that a restored one is bit-identical.
        if self._level == self._rate:
            self._level = float(state["level"])
        else:
            self._level += state["level"] - self._rate


class Feedback(Controller):
    """The rate moved, on the logit scale, by the deficits of question, turn and stream.

    Each gain multiplies a deficit, the running sum of (rate - escalated). `order` leans towards
    consistency with the siblings decided before in the same (question, turn): a chunk worse than
    escalated ones should escalate, one better than kept ones should not. Beyond `limit` the
    question's sum decides alone, so for any scores whatever it stays within limit + 1 of zero.
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
    saved = ("_questions", "_turns", "_overall", "_siblings")

    def __init__(
        self, rate: float, gains: tuple[float, float, float], order: float, limit: float
    ) -> None:
        """Create a controller; the `gains` of question, turn and stream, and `order`, are in units
        of the variance rate * (1 - rate).
        """
        super().__init__(rate)
        self._logit = math.log(rate / (1 - rate)) if 0 < rate < 1 else 0.0
        # A step on the logit scale changes the rate by rate * (1 - rate) times as much; dividing by
        # that makes one gain fit all rates.
        variance = max(rate * (1 - rate), 1e-3)
        self._gains = tuple(gain / variance for gain in gains)
        self._order = order / variance
        self._limit = limit
        # deficits of each question, each turn and the stream
        self._questions = DefaultTable(str, float)
        self._turns = DefaultTable(int, float)
        self._overall = 0.0
        # scores of the kept and of the escalated siblings, keyed by (question, turn)
        self._siblings = GroupTable(lambda: (Ranks(), Ranks()))

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        if not 0 < self._rate < 1:
            return self._rate
        deficit = self._questions.get(question, 0.0)
        if abs(deficit) >= self._limit:
            return 1.0 if deficit > 0 else 0.0
        by_question, by_turn, overall = self._gains
        turn_deficit = self._turns.get(turn, 0.0)
        lean = by_question * deficit + by_turn * turn_deficit + overall * self._overall
        if self._order:
            # Three inverted siblings say all there is to say; more must not outweigh the deficits.
            inversions = self._inversions(nonconformity, question, turn)
            lean += self._order * max(-3, min(3, inversions))
        logit = max(-700.0, min(700.0, self._logit + lean))  # exp must not overflow
        return 1 / (1 + math.exp(-logit))

    def _inversions(self, nonconformity: float, question: str, turn: int) -> int:
        """Return the siblings escalated although better, minus those kept although worse."""
        siblings = self._siblings.get((question, turn))
        if siblings is None:
            return 0
        kept, escalated = siblings
        better_escalated, _ = escalated.counts(nonconformity)
        worse_kept = len(kept) - sum(kept.counts(nonconformity))
        return better_escalated - worse_kept

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        change = self._rate - escalated
        self._questions[question] += change
        self._turns[turn] += change
        self._overall += change
        if self._order and nonconformity is not None:
            self._siblings[question, turn][escalated].add(nonconformity)

    def forget(self, question: str) -> None:
        self._questions.pop(question, None)
        self._siblings.forget(question)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants of the modes.

    The defaults were chosen on the even questions of one recorded run, for all rates at once.
    """

    aci_step: float = 0.002  # for 8 rollouts a problem; see `for_rollouts`
    # Pull per decision of deficit on the logit scale, times the variance rate * (1 - rate).
    question_gain: float = 0.23
    turn_gain: float = 0.035
    overall_gain: float = 0.02
    order: float = 0.144  # pull per sibling decided the other way round
    limit: float = 4.0  # deficit of a question, at most, before it is simply given the decisions
    shrinkage: float = 1.0  # scores the mean of all questions is worth in a question's own
    residuals: float = 20.0  # scores the turn's pool is worth next to the question's residuals
    siblings: float = 24.0  # weight, in scores, of the scores of the same question and turn

    @classmethod
    def for_rollouts(cls, samples: int) -> Tuning:
        """Return the defaults for so many rollouts of a problem, which share the problem's step.

        Siblings find much the same things hard. Were each to move the level by a step of its own, a
        hard problem with many rollouts would raise it while it is still being solved, and go
        without what the score says it needs.
        """
        return cls(aci_step=_PROBLEM_STEP / max(1, samples))

    def limit_at(self, rate: float) -> float:
        """Return the greatest deficit a question may have at this rate.

        Of few escalations, one too many is a larger part, so the limit is tighter at rates near 0
        and 1.
        """
        rarer = min(rate, 1 - rate)
        return min(self.limit, 1.35 + 13 * rarer * rarer)


DEFAULTS = Tuning()


def build_mode(
    mode: Mode,
    rate: float,
    window: int | None = None,
    decay: float | None = None,
    tuning: Tuning = DEFAULTS,
) -> tuple[ScorePool, Controller]:
    """Return the pool and the controller of a mode.

    They remember the last `window` scores, or all with fading weight.

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
        remember, MINIMUM if by_turn else None, tuning.shrinkage, tuning.residuals
    )
    turn_gain = tuning.turn_gain if by_turn else 0.0
    gains = (tuning.question_gain, turn_gain, tuning.overall_gain)
    controller = Feedback(rate, gains, tuning.order, tuning.limit_at(rate))
    return SiblingPool(residuals, tuning.siblings), controller
