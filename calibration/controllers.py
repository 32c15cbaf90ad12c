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

# Deficit = rate * decisions - escalations, the number of escalations that are still missing. When a
# run ends, the deficit may be this share of the run's decisions. If it had to be 0, the controller
# would choose the last chunks of the run by chance instead of by score.
SLACK = 0.006
# If the deficit exceeds the allowed deficit, the excess is removed within 1 / _HASTE (half) of the
# remaining decisions. A smaller value would remove it too late if scores arrive sorted.
_HASTE = 2.0
# The level is the rate that the controller currently aims at. A decision changes the level by step
# * (rate - escalated). The step is this number divided by the number of rollouts per problem. With
# a smaller step, short runs miss their rate. With a larger step, all problems get about the same
# rate, although hard problems should get more escalations.
_PROBLEM_STEP = 0.016


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The expected number of decisions left in a run, and the deficit of escalations that is
    allowed when the run ends.
    """

    left: float = math.inf  # number of remaining decisions of the run, including the next decision
    # deficit that is allowed when the run ends: the number of missing escalations
    slack: float = 0.0


UNKNOWN = RunEnd()


class Controller(Persisted):
    """A rule that turns a p-value into a decision, and learns from the action carried out.

    This base class always uses the nominal rate, as the modes "split" and "marginal" do.
    """

    __slots__ = ("_rate",)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def current_rate(
        self, nonconformity: float, question: str, turn: int, end: RunEnd = UNKNOWN
    ) -> float:
        """Return the rate at which a chunk like this one is escalated now.

        The chunk is escalated if and only if its p-value is above one minus this rate.
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

    After a decision the level moves by step * (rate - escalated); it may leave [0, 1]. At a level
    of 0 or less every chunk is accepted, and at a level of 1 or more every chunk is escalated. So
    after T decisions |realised - rate| is at most (max(rate, 1 - rate) + step) / (step * T), for
    any sequence. With d decisions taken but not yet observed, the bound is (max(rate, 1 - rate) +
    (d + 1) step) / (step * T).

    With a small step alone, a deficit or surplus of escalations would shrink too slowly. If the
    number of remaining decisions is roughly known, the rate therefore moves further. It moves far
    enough to remove the deficit, except for an allowed slack, in half of the remaining decisions.
    If at least this half is really taken, the final sum of errors is within one decision of the
    slack, for any sequence. Each decision that is missing from this half adds at most max(rate, 1 -
    rate).
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
        # `lead` is step * deficit, because every decision moves the level by step * (rate -
        # escalated).
        deficit = max(0.0, abs(lead) / self._step - end.slack)
        pace = _HASTE * deficit / max(_HASTE, end.left)
        if pace <= abs(lead):
            return self._level
        return self._rate + math.copysign(pace, lead)

    def update(
        self, nonconformity: float | None, question: str, turn: int, escalated: bool
    ) -> None:
        # Do not clip the level to [0, 1]. The bound on the realised rate holds only if the level
        # contains the whole deficit.
        self._level += self._step * (self._rate - escalated)

    def merge(self, state: Any) -> None:
        # Both levels started at the nominal rate, so the merged level is the rate plus both
        # changes. A new controller copies the other level instead. The copy is bit-identical, which
        # a sum of floats may not be.
        if self._level == self._rate:
            self._level = float(state["level"])
        else:
            self._level += state["level"] - self._rate


class Feedback(Controller):
    """A controller that shifts the logit of the rate to reduce the deficits of the question, of the
    turn and of the whole run.

    A deficit is a running sum of (rate - escalated), and each kind of deficit has its own gain.
    `order` is the gain for a comparison with siblings: earlier chunks of the same question and
    turn. It favours escalating a chunk that is worse than escalated siblings, and accepting a chunk
    that is better than accepted siblings. If the absolute deficit of the question reaches `limit`,
    only this deficit decides. So for any scores it is at most one more than `limit`.
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
        """Create a controller; `gains` has the gains for deficits of the question, of the turn and
        of the run.

        The gains and `order` are in units of the variance rate * (1 - rate), so the same values
        suit all rates.
        """
        super().__init__(rate)
        self._logit = math.log(rate / (1 - rate)) if 0 < rate < 1 else 0.0
        # A change d of the logit changes the rate by about d * rate * (1 - rate). The gains are
        # divided by this variance, so that the same gains suit all rates.
        variance = max(rate * (1 - rate), 1e-3)
        self._gains = tuple(gain / variance for gain in gains)
        self._order = order / variance
        self._limit = limit
        # Deficits: the numbers of missing escalations of each question, of each turn and of the
        # whole run.
        self._questions = DefaultTable(str, float)
        self._turns = DefaultTable(int, float)
        self._overall = 0.0
        # For each (question, turn): the scores of accepted chunks, and the scores of escalated
        # chunks.
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
            # A sibling contradicts the order of scores if it was escalated with a better score, or
            # accepted with a worse score. Count at most three of them, so that the deficits still
            # decide.
            inversions = self._inversions(nonconformity, question, turn)
            lean += self._order * max(-3, min(3, inversions))
        # math.exp raises OverflowError for arguments above 709.
        logit = max(-700.0, min(700.0, self._logit + lean))
        return 1 / (1 + math.exp(-logit))

    def _inversions(self, nonconformity: float, question: str, turn: int) -> int:
        """Return how many escalated siblings have a better score than this chunk, minus how many
        accepted siblings have a worse score.

        Siblings are earlier decided chunks of the same question and turn.
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

    # step of mode "aci" for 8 rollouts per problem; see `for_rollouts` for other numbers
    aci_step: float = 0.002
    # Each missing escalation raises the logit of the current rate by gain / (rate * (1 - rate)).
    # There are separate gains for missing escalations of the question, of the turn and of the run.
    question_gain: float = 0.23
    turn_gain: float = 0.035
    overall_gain: float = 0.02
    # A sibling is a chunk of the same question and turn. Each sibling that was accepted with a worse
    # score, or escalated with a better score, changes the logit by order / (rate * (1 - rate)).
    order: float = 0.144
    # If this number of escalations is missing in a question, its next chunk is always escalated.
    # With this number too many, its next chunk is always accepted. `limit_at` returns a smaller
    # limit at rates near 0 and 1.
    limit: float = 4.0
    # The expected score of a question is its mean score, mixed with the mean of all questions. The
    # mean of all questions counts as this number of scores.
    shrinkage: float = 1.0
    # A residual is a score minus the expected score of its question. It is ranked in two groups:
    # among residuals of all questions, and among those of its question. The first rank counts as
    # this number of residuals of the question.
    residuals: float = 20.0
    # The rank from the residuals is combined with the rank among siblings (chunks of the same
    # question and turn). The rank from the residuals counts as this number of siblings.
    siblings: float = 24.0

    @classmethod
    def for_rollouts(cls, samples: int) -> Tuning:
        """Return the defaults for `samples` rollouts per problem. With more rollouts, each decision
        moves the level less.

        Rollouts of a problem are hard in the same places. If each rollout moved the level by a full
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
