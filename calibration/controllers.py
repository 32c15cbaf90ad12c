"""Rate controllers, and the calibration modes, each of which combines a controller with a score
pool.
"""

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

# The deficit is the number of missing escalations: rate * decisions - escalations. A run may end
# with a deficit of this share of its decisions. If no deficit were allowed, noise would decide
# which of the last, hardest chunks escalate.
SLACK = 0.006
# If the deficit is larger than the allowed one, a controller removes the excess within 1 / _HASTE
# (half) of the remaining decisions. With a smaller number, the deficit would shrink too slowly in
# runs whose scores arrive sorted.
_HASTE = 2.0
# The level is the rate that the controller currently aims at. One decision changes it by this
# number, divided by the number of rollouts of a problem. With a smaller number, short runs miss
# their rate. With a larger number, all problems get about the same rate, although the scores should
# decide which problems get more.
_PROBLEM_STEP = 0.016


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The distance to the end of a run."""

    left: float = math.inf  # number of decisions until the run ends, including the next one
    slack: float = 0.0  # number of escalations that may be missing when the run ends


UNKNOWN = RunEnd()


class Controller(Persisted):
    """A rule that turns a p-value into a decision, and learns from the action carried out.

    This base class escalates at the nominal rate throughout, for the modes "split" and "marginal".
    """

    __slots__ = ("_rate",)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        """Return the fraction of chunks like this one to escalate now.

        A chunk is escalated if and only if its p-value is above 1 - current_rate.
        """
        return self._rate

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        """Learn from the action that was carried out on a chunk.

        `nonconformity` is None if the decision was taken without a score.
        """

    def forget(self, question: str) -> None:
        """Drop the data of this question. Call this after the last decision on the question."""


class Adaptive(Controller):
    """Adaptive conformal inference on the escalation rate (Gibbs and Candès, 2021).

    After a decision the level moves by step * (rate - escalated), without a clamp. At a level of 0
    or less every chunk is accepted; at a level of 1 or more every chunk is escalated. So for any
    sequence |realised - rate| is at most (max(rate, 1 - rate) + step) / (step * T). With d
    decisions taken but not yet observed, the bound is (max(rate, 1 - rate) + (d + 1) step) / (step
    * T).

    If the number of remaining decisions is roughly known, half of them remove the part of the
    deficit beyond a slack, however small the step. If at least that half is really taken, the final
    sum of errors is within one decision of the slack, for any sequence. Each decision that is
    missing from that half adds at most max(rate, 1 - rate).
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
        # `lead` is the deficit so far, multiplied by the step.
        deficit = max(0.0, abs(lead) / self._step - end.slack)
        pace = _HASTE * deficit / max(_HASTE, end.left)
        if pace <= abs(lead):
            return self._level
        return self._rate + math.copysign(pace, lead)

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        # The level may leave [0, 1]. The controller's bound holds only if the level stores the
        # whole deficit.
        self._level += self._step * (self._rate - escalated)

    def merge(self, state: Any) -> None:
        # Both controllers started with the rate as their level, so add up how far each level has
        # moved. A new controller copies the level instead, so that a restored controller is
        # bit-identical.
        if self._level == self._rate:
            self._level = float(state["level"])
        else:
            self._level += state["level"] - self._rate


class Feedback(Controller):
    """A controller that shifts the logit of the rate by the deficits of the question, of the turn
    and of the whole run.

    A deficit is a running sum of (rate - escalated). It is multiplied by a gain. `order` favours
    decisions that agree with earlier decisions on the same question and turn. A chunk should be
    escalated if it is worse than escalated siblings, and accepted if it is better than accepted
    siblings. If the absolute deficit of the question is above `limit`, it alone decides. So for any
    scores this deficit is at most limit + 1.
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
        """Create a controller with `gains` of question, turn and stream.

        The gains and `order` are in units of the variance rate * (1 - rate).
        """
        super().__init__(rate)
        self._logit = math.log(rate / (1 - rate)) if 0 < rate < 1 else 0.0
        # A step on the logit scale changes the rate by that step times rate * (1 - rate). Dividing
        # by the variance makes one gain suitable for all rates.
        variance = max(rate * (1 - rate), 1e-3)
        self._gains = tuple(gain / variance for gain in gains)
        self._order = order / variance
        self._limit = limit
        # The deficit is stored for each question, for each turn and for the whole run.
        self._questions = DefaultTable(str, float)
        self._turns = DefaultTable(int, float)
        self._overall = 0.0
        # scores of the siblings that were accepted, and of those that were escalated; the key is
        # (question, turn)
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
            # At most three siblings that contradict the order of scores are counted. So they do not
            # outweigh the deficits.
            inversions = self._inversions(nonconformity, question, turn)
            lean += self._order * max(-3, min(3, inversions))
        # math.exp overflows above 709.
        logit = max(-700.0, min(700.0, self._logit + lean))
        return 1 / (1 + math.exp(-logit))

    def _inversions(self, nonconformity: float, question: str, turn: int) -> int:
        """Compare this chunk with chunks of the same question and turn that were decided before.

        Return the number of escalated ones with a better score than this chunk, minus the number of
        accepted ones with a worse score.
        """
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
    """The constants of the calibration modes.

    The defaults were tuned on half of the questions of one recorded run, for all rates together.
    """

    # step for 8 rollouts per problem; `for_rollouts` returns the step for other numbers
    aci_step: float = 0.002
    # A missing escalation shifts the logit of the rate by gain / (rate * (1 - rate)). There is a
    # gain for the question, for the turn and for the whole run.
    question_gain: float = 0.23
    turn_gain: float = 0.035
    overall_gain: float = 0.02
    # shift of the logit for each sibling whose decision contradicts the order of scores, times rate
    # * (1 - rate)
    order: float = 0.144
    # If a question lacks this number of escalations, its next chunk is escalated, whatever its
    # score is. If it has this number too many, its next chunk is accepted.
    limit: float = 4.0
    # The mean score of all questions weighs as much as this number of scores of the question.
    shrinkage: float = 1.0
    # The rank among the scores of the turn weighs as much as this number of scores of the question.
    residuals: float = 20.0
    # The rank among the scores of other questions weighs as much as this number of siblings.
    siblings: float = 24.0

    @classmethod
    def for_rollouts(cls, samples: int) -> Tuning:
        """Return the defaults for `samples` rollouts per problem. With more rollouts, each decision
        moves the level less.

        Rollouts of a problem find the same parts hard. If each rollout moved the level by a full
        step, a hard problem with many rollouts would lower the level too far. Its later chunks
        would then be accepted although their scores are bad.
        """
        return cls(aci_step=_PROBLEM_STEP / max(1, samples))

    def limit_at(self, rate: float) -> float:
        """Return the largest deficit that a question may have at this rate.

        One extra escalation matters more if few chunks are escalated, so the limit is lower at
        rates near 0 and 1.
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

    The pool remembers the last `window` scores, or all scores with weights that fade by `decay`.

    :raises OptionError: for an unknown mode, or both a window and a decay.
    """
    if window is not None and decay is not None:
        raise OptionError("window and decay", "cannot be combined; use only one of these settings")

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
