"""The numbers of a calibration report: of a run, of scores, or of a calibrator made from scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atts.analysis.report.calibration_headline import calibration_headline, calibration_points
from atts.analysis.report.numbers import (
    DriftAlarm,
    Headline,
    Point,
    RateControl,
    Standing,
    StatedGuarantee,
    worst_of,
)
from atts.analysis.report.realised_rate import rate_control, realised_rate
from atts.analysis.report.reliability import LabelledScores, labelled_scores
from atts.analysis.report.run_data import GateStep, RunData, read_run_data
from atts.calibration import Calibrator, Health, Mode, StoredScores, examine, replay
from atts.errors import CalibrationInputError

SourceKind = Literal["run", "scores", "calibrator"]
Label = bool | None


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """What a calibration holds, what it promises, and what was seen to speak against it.

    `control` is what a run's gate did, or what a fresh calibrator would do with the scores one by
    one in their order.
    """

    source: str
    kind: SourceKind
    rate: float
    mode: str
    headline: Headline
    standing: Standing
    points: tuple[Point, ...]
    health: Health
    control: RateControl
    labelled: LabelledScores | None
    conditions: Mapping[str, object]

    @property
    def promise(self) -> StatedGuarantee:
        """The guarantee with its numbers, and what voids it."""
        return self.control.promise


def calibration_of_run(directory: Path, scores: StoredScores) -> CalibrationReport:
    """What a run's gate did at the rate it was asked for; `scores` are those it decided on.

    :raises JournalError: it is no run directory, or cannot be read.
    :raises CalibrationInputError: its gate decided nothing.
    """
    data = read_run_data(directory, 0)
    control = realised_rate(data)
    if control is None:
        raise CalibrationInputError(
            "number of decisions", 0, "at least one: a gate that asks for scores"
        )
    rate = control.nominal if control.nominal is not None else control.rate.value
    return _made(
        str(directory), "run", (rate, control.promise.mode), scores, control, _labels_of_run(data)
    )


def calibration_of_scores(
    name: str,
    scores: StoredScores,
    rate: float,
    mode: Mode,
    *,
    seed: int = 0,
    labels: Sequence[Label] = (),
    calibrator: Calibrator | None = None,
) -> CalibrationReport:
    """What scores promise at this rate, decided one by one in their order; `labels` say which were
    of right answers.

    A `calibrator` that was made from them states its own guarantee.

    :raises CalibrationInputError: there are no scores, or the mode needs questions and these have
        none.
    """
    if mode in ("question", "question-turn") and not scores.clustered:
        raise CalibrationInputError(
            "mode", mode, "one that needs no questions, for these scores name none: aci, turn"
        )
    told = calibrator or Calibrator(rate, mode, seed=seed, stored=scores)
    # which learns nothing live: it is shown on what it starts from
    start = scores if mode == "split" else ()
    options: dict[str, Any] = {"scale": scores.scale, "stored": start, "by_length": told.by_length}
    done = replay(_rows(scores), rate, mode, seed, **options)
    events = (*told.events, *done.events)
    alarms = tuple(
        DriftAlarm(one.kind, one.scores, one.p, one.action, one.message) for one in events
    )
    steps = [GateStep("observed", decision, decision.escalate) for decision in done.decisions]
    said = done if calibrator is None else calibrator
    promise = StatedGuarantee(mode, said.guarantee, said.voided_by, "")
    control = rate_control(steps, promise, alarms, scores.scale)
    kind: SourceKind = "scores" if calibrator is None else "calibrator"
    known = [(step, right) for step, right in zip(steps, labels, strict=False) if right is not None]
    return _made(name, kind, (rate, mode), scores, control, known)


def _made(
    source: str,
    kind: SourceKind,
    asked: tuple[float, str],
    scores: StoredScores,
    control: RateControl,
    labels: Sequence[tuple[GateStep, bool]],
) -> CalibrationReport:
    health = examine(scores, asked[0])
    (rate, mode) = asked
    points = calibration_points(kind, health, control)
    sentence = calibration_headline(kind, health, control)
    labelled = labelled_scores(labels)
    return CalibrationReport(
        source, kind, rate, mode, sentence, worst_of(points), points=points, health=health, control=control,
        labelled=labelled, conditions=scores.fingerprint,
    )  # fmt: skip


def _rows(scores: StoredScores) -> list[dict[str, object]]:
    """Records in their order; a score whose question is not known is one of its own."""
    rows = enumerate(scores.records(), 1)
    return [{**row, "question": row["question"] or f"score {place}"} for place, row in rows]


def _labels_of_run(data: RunData) -> list[tuple[GateStep, bool]]:
    """Chunks that were kept, with whether their rollout came to a right answer; what was taken over
    says nothing.
    """
    ends = {
        (name, rollout.brief.sample): rollout.brief.verdict == "correct"
        for name, one in data.problems.items()
        for rollout in one.rollouts
        if rollout.brief.verdict in ("correct", "wrong")
    }
    kept = [step for step in data.done if not step.escalated and step.decision.p is not None]
    places = [(step, (step.decision.question, step.decision.sample)) for step in kept]
    return [(step, ends[place]) for step, place in places if place in ends]
