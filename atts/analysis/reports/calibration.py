"""The calibration report of a run or a file of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from atts.analysis.reports import tables
from atts.analysis.reports.charts import Chart, calibration_charts, labelled_chart, over_time_chart
from atts.analysis.reports.headline import TOO_FEW, percent
from atts.analysis.reports.numbers import (
    DriftAlarm,
    DriftTest,
    Headline,
    Point,
    RateControl,
    ShownNumber,
    Standing,
    StatedGuarantee,
    rate_standing,
    worst_of,
)
from atts.analysis.reports.rate_control import (
    LabelledScores,
    LabelSource,
    labelled_scores,
    rate_control,
    realised_rate,
)
from atts.analysis.reports.render import as_format, filled, page, save_figures
from atts.analysis.reports.run_data import ProblemFacts, RunData, read_run_data
from atts.analysis.steps import GateStep
from atts.calibration import Calibrator, Health, Mode, StoredScores, examine, replay_scores
from atts.errors import DISTRIBUTION, CalibrationInputError, OptionError, counted
from atts.evaluators import answer_classes, group
from atts.files import jsonable, write_out

_SPAN = "{} to {}"


def calibration_headline(
    kind: str, health: Health, control: RateControl, labelled: LabelledScores | None
) -> Headline:
    """Return the headline of a calibration report, for readers who do not know conformal
    prediction.
    """
    numbers = (
        _gain(labelled),
        _auroc(labelled),
        _share(kind, control),
        _worth(health),
        _alarms(control),
    )
    return Headline(_sentence(kind, health, control), numbers)


def calibration_points(kind: str, health: Health, control: RateControl) -> tuple[Point, ...]:
    """Return the observations for and against the calibration, starting with the worst."""
    points = list[Point]()
    check = control.check()
    if kind == "run" and check is not None and check.standing != "held":
        points.append((rate_standing(check), str(check)))
    elif check is not None and check.standing == "left":
        points.append(
            (
                "care",
                f"if a calibrator decided on the stored scores in the order of the file: {check}",
            )
        )
    points.extend(
        ("bad", f"drift alarm after {counted(alarm.scores, 'score')}: {alarm.text or alarm.kind}")
        for alarm in control.alarms
    )
    if _is_reached(control.drift) and not control.alarms:
        points.append(
            (
                "care",
                "the drift statistic passed the alarm level: later questions have different "
                "scores from earlier ones",
            )
        )
    if control.forced:
        forced = counted(control.forced, "decision")
        points.append(("care", f"the gate had to make {forced} without a score"))
    if kind != "run":
        worst = health.repeats.fault
        points.extend(
            ("bad" if warning == worst else "care", warning) for warning in health.warnings
        )
    order = ("bad", "care", "note", "good")
    return tuple(sorted(points, key=lambda point: order.index(point[0])))


def _sentence(kind: str, health: Health, control: RateControl) -> str:
    share = percent(control.escalated / control.decisions)
    check = control.check()
    chunks = counted(control.decisions, "chunk")
    counts = f"{control.escalated:,} of {chunks} escalated ({share})"
    if kind == "run":
        if check is None:
            return f"{counts}; the gate has no nominal rate"
        asked = percent(check.nominal)
        if check.has_few_decisions:
            return f"{counts} at a nominal rate of {asked}: {TOO_FEW}"
        ends = {
            "held": "on target",
            "unclear": "too few questions to tell whether chance explains the difference",
            "left": "off target",
        }
        return f"{counts} at a nominal rate of {asked}: {ends[check.standing]}"
    low, high = health.long_run_clustered
    return (
        f"at a nominal rate of {percent(health.rate)}, a threshold from the "
        f"{counted(health.scores, 'stored score')} would escalate "
        f"{_SPAN.format(percent(low).removesuffix(' %'), percent(high))} of new chunks"
    )


def _share(kind: str, control: RateControl) -> ShownNumber:
    share = percent(control.escalated / control.decisions)
    nominal = control.nominal
    counts = f"{control.escalated:,} of {control.decisions:,}"
    if kind == "run":
        asked = (
            "the gate has no nominal rate"
            if nominal is None
            else f"nominal rate {percent(nominal)}"
        )
        note = f"{control.escalated:,} of {counted(control.decisions, 'chunk')}; {asked}"
        return ShownNumber(share, "of the chunks were escalated", note)
    asked = "" if nominal is None else f"; nominal rate {percent(nominal)}"
    what = (
        "of the stored chunks would be escalated if a calibrator decided on the scores in file "
        "order"
    )
    return ShownNumber(share, what, f"{counts}, rate scope {control.promise.mode}{asked}")


def _worth(health: Health) -> ShownNumber:
    clusters = health.clusters
    what = f"is the effective sample size of the {counted(health.scores, 'score')}"
    if not health.repeats.clustered:
        return ShownNumber(
            f"{clusters.effective:,.0f}",
            what,
            "an upper bound, because the scores do not record their questions",
        )
    alike = (
        ""
        if math.isnan(clusters.icc)
        else f", whose scores have an intraclass correlation of {clusters.icc:.2f}"
    )
    return ShownNumber(
        f"{clusters.effective:,.0f}",
        what,
        f"the scores come from {counted(clusters.clusters, 'question')}{alike}",
    )


_LABELS: Mapping[LabelSource, str] = {
    "verdicts": "verdicts on the rollouts that contain the chunks",
    "votes": "whether the chunks' rollouts agree with the vote, because no verdicts are known",
}


def _gain(labelled: LabelledScores | None) -> ShownNumber:
    """Return the number that the report shows first: the gain of the score over random escalation
    (a coin).

    The gain is the share of chunks in wrong rollouts that the score escalates, minus the share that
    a coin with the same rate escalates.
    """
    what = (
        "gain over a coin (random escalation): share of the chunks in wrong rollouts that the "
        "score escalates, minus the share that a coin with the same rate escalates"
    )
    if labelled is None:
        return ShownNumber(
            "not known", what, "no chunk of the draft has both a score and a verdict"
        )
    if math.isnan(labelled.gain.value):
        return ShownNumber("cannot tell", what, labelled.gain.note)
    return ShownNumber(labelled.gain.signed(), what, _basis(labelled))


def _auroc(labelled: LabelledScores | None) -> ShownNumber:
    """Return the AUROC of the score, which measures how well the score separates wrong from correct
    rollouts of the same question.
    """
    what = "AUROC of the score within questions; random scores would give 0.5"
    if labelled is None:
        return ShownNumber(
            "not known", what, "no chunk of the draft has both a score and a verdict"
        )
    if math.isnan(labelled.auroc.value):
        return ShownNumber("cannot tell", what, labelled.auroc.note)
    note = "escalated chunks are left out, because the target replaced or continued their text"
    return ShownNumber(labelled.auroc.brief(), what, note)


def _basis(labelled: LabelledScores) -> str:
    questions = counted(labelled.gain.n_problems, "question")
    return (
        f"95 % interval over {questions} with both wrong and correct rollouts; "
        f"{counted(labelled.labelled, 'chunk')}, by {_LABELS[labelled.labels]}"
    )


def _is_reached(drift: DriftTest | None) -> bool:
    """Return True if the drift statistic reached its alarm level."""
    return drift is not None and drift.peak >= drift.alarm


def _alarms(control: RateControl) -> ShownNumber:
    drift = control.drift
    count = len(control.alarms) + _is_reached(drift)
    what = "drift alarm" if count == 1 else "drift alarms"
    if drift is None:
        return ShownNumber(
            f"{count:,}",
            what,
            "too few questions to compare the earlier questions with the later ones",
        )
    won = f"{10 ** min(drift.peak, 9):,.1f} (alarm at {10**drift.alarm:,.0f})"
    return ShownNumber(f"{count:,}", what, f"largest drift statistic {won}")


SourceKind = Literal["run", "scores", "calibrator"]
Label = bool | None


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The contents of a calibration report: a guarantee, and observations that support or
    contradict it.

    `control` describes the decisions of a run's gate. For a file of scores, it describes the
    decisions of a new calibrator on the scores in file order.
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
        """Return the guarantee with its numbers, and the conditions under which it is void."""
        return self.control.promise


def calibration_of_run(directory: Path, scores: StoredScores) -> CalibrationReport:
    """Report on the decisions of a run's gate at its nominal rate, and on the scores of these
    decisions.

    :raises JournalError: the directory is not a run directory, or cannot be read.
    :raises CalibrationInputError: the run's gate took no decisions.
    """
    data = read_run_data(directory, 0)
    control = realised_rate(data)
    if control is None:
        raise CalibrationInputError(
            "number of decisions", 0, "at least one decision made by a gate that requests scores"
        )
    rate = control.nominal if control.nominal is not None else control.rate.value
    labels, source = _labels_of_run(data)
    labelled = labelled_scores(labels, rate, source)
    return _made(str(directory), "run", (rate, control.promise.mode), scores, control, labelled)


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
    """Let a calibrator decide on scores in the given order at the given rate, and report on its
    decisions.

    If a `calibrator` is given, the report shows the calibrator's guarantee; the calibrator must
    have been made from these scores.

    :raises CalibrationInputError: there are no scores, or the calibrator's mode needs questions,
        but the scores do not name any.
    """
    if mode in ("question", "question-turn") and not scores.clustered:
        raise CalibrationInputError(
            "mode",
            mode,
            "aci, marginal or split, because these scores do not name their questions",
        )
    told = calibrator or Calibrator(rate, mode, seed=seed, stored=scores)
    # In mode "split", the calibrator does not learn during the replay. So the replay starts with
    # all of the scores stored.
    start = scores if mode == "split" else ()
    options: dict[str, Any] = {"scale": scores.scale, "stored": start, "by_length": told.by_length}
    done = replay_scores(_rows(scores), rate, mode, seed, **options)
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
    labelled = labelled_scores(known, rate, scale=scores.scale)
    return _made(name, kind, (rate, mode), scores, control, labelled)


def _made(
    source: str,
    kind: SourceKind,
    asked: tuple[float, str],
    scores: StoredScores,
    control: RateControl,
    labelled: LabelledScores | None,
) -> CalibrationReport:
    health = examine(scores, asked[0])
    (rate, mode) = asked
    points = calibration_points(kind, health, control)
    sentence = calibration_headline(kind, health, control, labelled)
    standing = worst_of(points, control.check() if kind == "run" else None)
    return CalibrationReport(
        source, kind, rate, mode, sentence, standing, points=points, health=health, control=control,
        labelled=labelled, conditions=scores.fingerprint,
    )  # fmt: skip


def _rows(scores: StoredScores) -> list[dict[str, object]]:
    """Return the records in their order; each score without a question gets its own question."""
    rows = enumerate(scores.records(), 1)
    return [{**row, "question": row["question"] or f"score {place}"} for place, row in rows]


def _labels_of_run(data: RunData) -> tuple[list[tuple[GateStep, bool]], LabelSource]:
    """Return the accepted chunks that have a p-value, each labelled True if its rollout was
    correct, and the source of the labels.

    Escalated chunks are left out, because the target's text affected how their rollouts ended. If
    there are no verdicts, the label is True if the rollout agrees with the vote of its problem.
    """
    ends = {
        (name, rollout.brief.sample): rollout.brief.verdict == "correct"
        for name, one in data.problems.items()
        for rollout in one.rollouts
        if rollout.brief.verdict in ("correct", "wrong")
    }
    source: LabelSource = "verdicts"
    if not ends:
        source = "votes"
        for name, one in data.problems.items():
            ends |= {(name, sample): agrees for sample, agrees in _agreeing(one)}
    kept = [step for step in data.done if not step.escalated and step.decision.p is not None]
    places = [(step, (step.decision.question, step.decision.sample)) for step in kept]
    return [(step, ends[place]) for step, place in places if place in ends], source


def _agreeing(one: ProblemFacts) -> Iterator[tuple[int, bool]]:
    """Yield the sample index of each finished rollout, and whether its answer agrees with the
    problem's vote.

    Nothing is yielded if the problem has no winner or fewer than two finished rollouts.
    """
    winner = one.brief.answer
    samples = one.brief.complete_samples
    if winner is None or len(samples) < 2:
        return
    answers = [sample.answer for sample in samples]
    first, *labels = answer_classes([winner, *answers], partial(group, kind=one.problem.kind))
    for sample, label in zip(samples, labels, strict=True):
        yield sample.sample, label == first


CalibrationFormat = Literal["html", "markdown", "json", "svg", "png"]
_FORMATS: tuple[CalibrationFormat, ...] = get_args(CalibrationFormat)
_ENDINGS: dict[str, CalibrationFormat] = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".json": "json",
}


def calibration_format(format: str | None, out: Path | None) -> CalibrationFormat:
    """Return the format with this name; without a name, return the format of the file's suffix, or
    HTML.

    :raises OptionError: the format is unknown.
    """
    if format is None:
        return _ENDINGS.get(out.suffix.lower() if out else "", "html")
    return as_format(format, _FORMATS)


def render_calibration(report: CalibrationReport, format: CalibrationFormat) -> str:
    """Return the report as a string in this format.

    :raises OptionError: the format is svg or png, which only files can contain.
    """
    labelled = None if report.labelled is None else labelled_chart(report.labelled)
    if format == "html":
        return page(
            "calibration.html",
            ("tables.js",),
            report=report,
            tables=tables,
            first=_first(report),
            charts=calibration_charts(report.control),
            labelled=labelled,
            version=version(DISTRIBUTION),
        )
    if format == "markdown":
        data = labelled and replace(labelled.data, title=labelled.title)
        return filled("calibration.md", report=report, tables=tables, labelled=data).strip() + "\n"
    if format == "json":
        facts = {**asdict(report), "promise": report.promise, "warnings": report.health.warnings}
        return json.dumps(jsonable(facts), allow_nan=False, ensure_ascii=False) + "\n"
    raise OptionError(
        "format", f"{format} writes one file per picture; give a folder for the files"
    )


def save_calibration(
    report: CalibrationReport, format: CalibrationFormat, out: Path
) -> Sequence[Path]:
    """Write the report to a file, or its figures into a folder; return the paths that were written.

    :raises StorageError: the files cannot be written.
    :raises UsageError: PNG is requested, but this machine has no program that draws PNG files.
    """
    if format == "svg" or format == "png":
        return save_figures(calibration_figures(report), out, format)
    write_out(out, render_calibration(report, format).encode("utf-8", "replace"))
    return [out]


def calibration_figures(report: CalibrationReport) -> list[Chart]:
    """Return all charts of the report, without duplicates."""
    labelled = [] if report.labelled is None else [labelled_chart(report.labelled)]
    return [*calibration_charts(report.control), *labelled]


def _first(report: CalibrationReport) -> Chart:
    """Return the chart on the first screen of the report: the share of chunks escalated over
    time.
    """
    asked = "" if report.control.nominal is None else " The dashed line is the nominal rate."
    caption = (
        "The thick line is the share of chunks escalated so far. The thin line is the same share "
        f"among the latest {report.control.window} chunks.{asked} With independent coin tosses, "
        "the thick line would be inside the grey band with 95 % probability."
    )
    return replace(
        over_time_chart(report.control), title="Share of chunks escalated", caption=caption
    )
