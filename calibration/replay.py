"""Decisions on anyone's scores, after the fact, in the order they arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from atts.calibration.metrics import rate_metrics
from atts.calibration.modes import Mode
from atts.calibration.online import Calibrator
from atts.calibration.scale import PERPLEXITY, Scale
from atts.core import Decision
from atts.errors import CalibrationInputError


@dataclass(frozen=True, slots=True)
class Replay:
    """Every decision in arrival order, and how well they held the rate."""

    rate: float
    mode: Mode
    decisions: tuple[Decision, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def escalated(self) -> float:
        """The realised rate; NaN for no decision."""
        return sum(d.escalate for d in self.decisions) / len(self.decisions) if self.decisions else float("nan")


def replay(
    records: Iterable[Mapping[str, Any]],
    rate: float | Fraction,
    mode: Mode = "question-turn",
    seed: int = 0,
    *,
    scale: Scale = PERPLEXITY,
    stored: Iterable[float] = (),
) -> Replay:
    """Decide on records {"question", "turn", "score"} ("sample" optional) one by one, each from those before it.

    :raises CalibrationInputError: if a record lacks a field, or its score is none.

    >>> replay([{"question": 1, "turn": 0, "score": s} for s in (1.2, 1.4, 9.0)], rate=0.5, mode="marginal").escalated
    0.3333333333333333
    """
    calibrator = Calibrator(rate, mode, seed=seed, scale=scale, stored=stored)
    decisions: list[Decision] = []
    for number, record in enumerate(records, 1):
        decision = _decide(calibrator, record, number)
        calibrator.observe(decision)
        decisions.append(decision)
    metrics = rate_metrics(
        [d.question for d in decisions],
        [d.turn for d in decisions],
        [scale.badness(d.score) for d in decisions],
        [d.escalate for d in decisions],
        float(calibrator.rate),
    )
    return Replay(float(calibrator.rate), mode, tuple(decisions), metrics)


def _decide(calibrator: Calibrator, record: Mapping[str, Any], number: int) -> Decision:
    try:
        question, turn, score = record["question"], record["turn"], record["score"]
    except KeyError as missing:
        raise CalibrationInputError(f"record {number}", dict(record), f"a field {missing}") from None
    sample = record.get("sample")
    if isinstance(turn, bool) or not isinstance(turn, int) or turn < 0:
        raise CalibrationInputError(f"turn of record {number}", turn, "a whole number from 0")
    return calibrator.decide(score, question=str(question), turn=turn, sample=sample)
