"""The calibrator of a running evaluation: decide on a score, observe what was done."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from hashlib import blake2b

from atts.calibration.modes import Mode, build
from atts.calibration.pools import Place
from atts.calibration.rates import exact_rate
from atts.calibration.scale import PERPLEXITY, Scale
from atts.core import Decision
from atts.errors import CalibrationInputError

Group = int | tuple[str, int] | None
"""Which stored scores to compare with: a turn's, a question's and turn's, or all."""


class Calibrator:
    """Decides on a stream of scores so that the fraction of escalations is `rate`, where its mode says so.

    `decide` only reads: it may be asked twice, in any order, for chunks that are then dropped. `observe` stores the score
    and what was really done. Both are deterministic given the seed, and independent of the order of asking.

    >>> calibrator = Calibrator(rate=0.25, mode="marginal", stored=[1.1, 1.2, 1.3, 1.4])
    >>> decision = calibrator.decide(9.0, question="q7")
    >>> decision.action
    'escalate'
    >>> calibrator.observe(decision)
    """

    def __init__(
        self,
        rate: float | Fraction,
        mode: Mode = "question-turn",
        *,
        seed: int = 0,
        scale: Scale = PERPLEXITY,
        stored: Iterable[float] = (),
    ) -> None:
        self.rate = exact_rate(rate)
        self.mode: Mode = mode
        self.scale = scale
        self.seed = seed
        self.decided = 0
        self.escalated = 0
        self._nominal = float(self.rate)
        self._pool, self._controller = build(mode, self._nominal)
        for place, score in enumerate(stored):
            self._pool.learn(scale.badness(score), f"stored {place}", 0)

    def decide(
        self, score: float, question: str = "", turn: int = 0, sample: int | None = None, issue: int | None = None
    ) -> Decision:
        """What to do with a chunk of this score, from stored scores and decisions only; nothing is stored.

        :raises CalibrationInputError: if it is not a score of the declared domain.
        """
        badness = self.scale.badness(score)
        theta = self._theta(badness, question, turn, sample)
        p = self._pool.place(badness, question, turn).p(theta)
        level = self._controller.level(badness, question, turn)
        up = level >= 1 or (level > 0 and p > 1 - level)
        return Decision(
            "escalate" if up else "accept", self._nominal, question, turn, sample or 0, issue, float(score), p,
            why=f"p {'>' if up else '<='} {1 - level:.4g}",
        )  # fmt: skip

    def observe(self, decision: Decision, escalated: bool | None = None) -> None:
        """Record a decision and what was really done with its chunk, where that differs (a hard cap, an override).

        :raises CalibrationInputError: if the decision carries no score of the declared domain.
        """
        if decision.score is None:
            raise CalibrationInputError("decision.score", None, f"the score decided on, {self.scale.domain}")
        badness = self.scale.badness(decision.score)
        done = decision.action == "escalate" if escalated is None else escalated
        self.decided += 1
        self.escalated += done
        self._controller.account(badness, decision.question, decision.turn, done)
        self._pool.learn(badness, decision.question, decision.turn)

    def p_value(self, score: float, group: Group = None) -> float:
        """The conformal p-value of a score against the stored ones, without a coin: P(p <= a) <= a if exchangeable.

        :raises CalibrationInputError: if it is not a score of the declared domain.
        """
        return self._place(score, group).conservative

    def _place(self, score: float, group: Group) -> Place:
        badness = self.scale.badness(score)
        question, turn = group if isinstance(group, tuple) else (None, group)
        return self._pool.place(badness, question, turn)

    def _theta(self, badness: float, question: str, turn: int, sample: int | None) -> float:
        """A uniform that belongs to this chunk: the same in every replay, whatever was decided in between."""
        position = self.decided if sample is None else sample
        text = f"{self.seed}\x1f{question}\x1f{turn}\x1f{position}\x1f{badness!r}"
        return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") * 2.0**-56
