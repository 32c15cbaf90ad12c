"""Replay of a stream of recorded scores through a calibrator, with metrics of the rate it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from atts.calibration.drift import DriftEvent, DriftPolicy
from atts.calibration.metrics import rate_metrics
from atts.calibration.modes import DEFAULTS, Mode, Tuning
from atts.calibration.online import Calibrator
from atts.calibration.scale import PERPLEXITY, Scale, plain_number
from atts.calibration.stored import StoredScores, whole_number
from atts.core import Decision
from atts.errors import CalibrationInputError


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Every decision in arrival order, and how well they held the rate."""

    rate: float
    mode: Mode
    decisions: tuple[Decision, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    guarantee: str = ""
    voided_by: str = ""
    events: tuple[DriftEvent, ...] = ()

    @property
    def escalated(self) -> float:
        """The realised rate; NaN for no decision."""
        return (
            sum(d.escalate for d in self.decisions) / len(self.decisions)
            if self.decisions
            else float("nan")
        )


def replay(
    records: Iterable[Mapping[str, Any]],
    rate: float | Fraction,
    mode: Mode = "question-turn",
    seed: int = 0,
    *,
    scale: Scale = PERPLEXITY,
    stored: StoredScores | Sequence[float] = (),
    drift: DriftPolicy = "recalibrate",
    window: int | None = None,
    decay: float | None = None,
    tuning: Tuning = DEFAULTS,
    by_length: bool = False,
    cap: float | Fraction | None = None,
) -> ReplayResult:
    """Decide on records {"question", "turn", "score"} one by one in arrival order, each from those
    before it.

    "sample" is optional, "left" (the share of decisions expected to be left) too, and "issue" (the
    place in the order of asking, from 0 without gaps) makes scores join the pools in that order
    instead of the order of arrival; "length" is needed where ranks are by length. The options are
    those of `Calibrator`.

    :raises CalibrationInputError: if a record lacks a field, or its score is none.
    :raises OptionError: for an unknown mode or drift policy.

    >>> records = [{"question": 1, "turn": 0, "score": score} for score in (1.2, 1.4, 9.0)]
    >>> [decision.escalate for decision in replay(records, rate=0.5, mode="marginal", seed=1).decisions]
    [True, True, True]
    """
    calibrator = Calibrator(
        rate, mode, seed=seed, scale=scale, stored=stored, drift=drift, window=window, decay=decay, tuning=tuning,
        by_length=by_length, cap=cap,
    )  # fmt: skip
    decisions: list[Decision] = []
    for number, record in enumerate(records, 1):
        decision = _decide(calibrator, record, number)
        calibrator.observe(decision)
        decisions.append(decision)
    metrics = rate_metrics(
        [d.question for d in decisions],
        [d.turn for d in decisions],
        [calibrator.scale.nonconformity(d.score) for d in decisions],
        [d.escalate for d in decisions],
        float(calibrator.rate),
    )
    promise = (calibrator.guarantee, calibrator.voided_by)
    return ReplayResult(
        float(calibrator.rate), mode, tuple(decisions), metrics, *promise, calibrator.events
    )


def _decide(calibrator: Calibrator, record: Mapping[str, Any], number: int) -> Decision:
    try:
        question = record["question"]
        turn = record["turn"]
        score = record["score"]
    except KeyError as missing:
        raise CalibrationInputError(
            f"record {number}", dict(record), f"a field {missing}"
        ) from None
    counts = {
        name: record.get(name) for name in ("sample", "issue") if record.get(name) is not None
    }
    for name, value in {"turn": turn, **counts}.items():
        whole_number(f"{name} of record {number}", value)
    given = {name: record[name] for name in ("left", "length") if record.get(name) is not None}
    numbers: dict[str, Any] = {
        name: plain_number(f"{name} of record {number}", value) for name, value in given.items()
    }
    try:
        return calibrator.decide(score, str(question), int(turn), **counts, **numbers)
    except CalibrationInputError as problem:
        if problem.what != "score":
            raise
        raise CalibrationInputError(
            f"score of record {number}", score, calibrator.scale.domain
        ) from None
