"""Calibration modes: which score pool and which rate controller each name stands for, and their
constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from atts.calibration.controllers import Adaptive, Controller, Feedback
from atts.calibration.pools import (
    MINIMUM,
    Frozen,
    Pooled,
    Residuals,
    ScorePool,
    SiblingPool,
)
from atts.calibration.score_history import Fading, ScoreHistory, Window
from atts.errors import OptionError

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
