"""The command group `atts calibration`, for calibration scores and calibrators."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import Json, named_values
from atts.cli.terminal import hand_out, json_line, print_json, say, tell, write_scores
from atts.errors import CalibrationInputError, CheckFailed, OptionError, counted

if TYPE_CHECKING:
    from atts.analysis import CalibrationReport
    from atts.calibration import Health, ReplayResult, StoredScores


Rate = Annotated[
    float | None,
    typer.Option(
        help="Share of chunks to escalate to the target; by default the run's rate or, for a "
        "file of scores, 0.4."
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        help="Where the escalation rate is controlled: within each question (question), within "
        "each turn of a question (question-turn), or over all chunks (aci, marginal, "
        "split). aci adapts its threshold, marginal compares each score with all earlier "
        "scores, and split compares each score only with the stored scores. The default is the "
        "run's scope or, for a file of scores, aci."
    ),
]
Scale = Annotated[
    str,
    typer.Option(
        help="Kind of the scores: perplexity (at least 1; higher is worse), logprob (mean "
        "log-probability; lower is worse), real (any number; higher is worse)."
    ),
]
PerQuestion = Annotated[
    int | None,
    typer.Option(
        help="For a file that does not name questions: number of consecutive scores that belong "
        "to the same question."
    ),
]
ByLength = Annotated[
    bool,
    typer.Option(
        "--by-length",
        help="Compare each score only with scores of chunks of about the same length.",
    ),
]
Condition = Annotated[
    list[str] | None,
    typer.Option(
        help="Setting of the run that produced the scores, such as target.model=QwQ-32B or "
        "sampling.temperature=0.7; repeatable."
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        help="Source of the scores: a run directory, JSON Lines with the fields score, question "
        "and turn (- for stdin), a .json file or a .npy array."
    ),
]


def rate_of(given: float | None, file: str) -> float:
    """Return `given` if it is set. Otherwise return the nominal rate of the run in the directory
    `file`, or 0.4 if there is none.
    """
    from atts.api import RATE_OF_FILES

    recorded = given if given is not None else _setting_of(file, "rate")
    return float(recorded) if isinstance(recorded, int | float) else RATE_OF_FILES


def scope_of(given: str | None, file: str) -> str:
    """Return `given` if it is set. Otherwise return the rate scope of the run in the directory
    `file`, or "aci" if there is none.
    """
    return given or _setting_of(file, "rate_scope") or "aci"


def _setting_of(file: str, name: str) -> Any:
    """Return a setting of the run in the directory `file`; None if there is no run."""
    if file == "-" or not Path(file).is_dir():
        return None
    from atts.journal import open_run

    return open_run(Path(file)).setting(name)


def scores_of(
    file: str, per_question: int | None, scale: str, conditions: list[str] | None
) -> StoredScores:
    """Read scores, and the conditions under which they were made, from a run, a file or stdin.

    :raises CalibrationInputError: the source has no scores, or has a value that is not a score.
    """
    from atts.api import stored_scores
    from atts.calibration import StoredScores, scale_named
    from atts.run import read_conditions

    fingerprint = read_conditions(named_values(conditions or (), "condition", "NAME=VALUE"))
    if file == "-":
        return StoredScores.from_records(
            records_of(file, None, scale), scale_named(scale), fingerprint
        )
    stored = stored_scores(Path(file), per_question, scale_named(scale), fingerprint)
    if not len(stored):
        raise CalibrationInputError(f"number of scores in {file}", 0, "at least one")
    return stored


def records_of(file: str, per_question: int | None, scale: str) -> list[dict[str, Any]]:
    """Read one record per score, in the order of the source, with all fields of a JSON Lines file.

    :raises CalibrationInputError: the source has no records, or has a record that cannot be read.
    """
    from atts.calibration import is_state, parse_lines
    from atts.files import read_ordinary
    from atts.journal import check_exists

    if file != "-":
        check_exists(Path(file))
    if file != "-" and (Path(file).is_dir() or Path(file).suffix in (".npy", ".json")):
        return scores_of(file, per_question, scale, None).records()
    try:
        text = sys.stdin.read() if file == "-" else read_ordinary(Path(file)).decode("utf-8")
    except OSError as problem:
        raise CalibrationInputError(
            "file of scores", file, f"a readable file ({problem.strerror})"
        ) from None
    except UnicodeDecodeError:
        raise CalibrationInputError(file, "not text", "JSON Lines, a .npy array or JSON") from None
    if file != "-" and is_state(text):
        return scores_of(file, per_question, scale, None).records()
    records = parse_lines(text.splitlines(), "stdin" if file == "-" else file)
    if not records:
        raise CalibrationInputError(
            f"number of records in {'stdin' if file == '-' else file}", 0, "at least one"
        )
    return records


app = typer.Typer(no_args_is_help=True)

_DECISION = ("question", "turn", "sample", "score", "p", "escalate", "why")


@app.command("replay")
def replay(
    file: Source,
    rate: Rate = None,
    rate_scope: Mode = None,
    seed: Annotated[
        int, typer.Option(help="Random seed for breaking ties between equal scores.")
    ] = 0,
    stored: Annotated[
        Path | None,
        typer.Option(
            help="Calibration scores to start from: a run directory, JSON Lines, a .json file or a "
            ".npy array."
        ),
    ] = None,
    per_question: PerQuestion = None,
    drift: Annotated[
        str,
        typer.Option(
            help="What to do on a drift alarm: recalibrate (drop the stored scores), widen "
            "(escalate more of the next 500 chunks), escalate (escalate every later "
            "chunk), report (only report the alarm)."
        ),
    ] = "recalibrate",
    window: Annotated[
        int | None,
        typer.Option(help="Compare each score only with this many of the latest scores."),
    ] = None,
    decay: Annotated[
        float | None,
        typer.Option(
            help="Multiply the weight of each earlier score by this factor whenever a new score "
            "arrives; with 0.99, older scores count less."
        ),
    ] = None,
    scale: Scale = "perplexity",
    by_length: ByLength = False,
    as_json: Json = False,
) -> None:
    """Replay the decisions of a gate on recorded scores, and report how well the rate was met.

    Scores are read in order of arrival, and each decision uses only earlier scores.

    Example: atts calibration replay runs/first --rate 0.4
    """
    from atts.calibration import replay_scores as decide
    from atts.calibration import scale_named

    records = records_of(file, per_question, scale)
    start = () if stored is None else scores_of(str(stored), per_question, scale, None)
    options: dict[str, Any] = {
        "mode": scope_of(rate_scope, file),
        "seed": seed,
        "scale": scale_named(scale),
        "stored": start,
        "drift": drift,
        "window": window,
        "decay": decay,
        "by_length": by_length,
    }
    done = decide(records, rate_of(rate, file), **options)
    if as_json:
        _print_decisions(done)
    else:
        _print_replay(done)


@app.command("import")
def import_scores(
    file: Source,
    out: Annotated[Path, typer.Option(help="File to write the scores to; - is stdout.")],
    per_question: PerQuestion = None,
    scale: Scale = "perplexity",
    condition: Condition = None,
    as_json: Json = False,
) -> None:
    """Read scores from any supported source, and write the scores and their conditions to one file.

    Example: atts calibration import ppls.npy --per-question 16 --condition target.model=QwQ-32B
    --out scores.json
    """
    scores = scores_of(file, per_question, scale, condition)
    report_written = write_scores(out, scores.state())
    facts = {"scores": len(scores), "questions": len(set(scores.questions)), "out": str(out)}
    questions = counted(len(set(scores.questions)), "question")
    report_written(
        json_line(facts) if as_json else f"{out}: {counted(len(scores), 'score')} of {questions}"
    )


@app.command("fit")
def fit(
    file: Source,
    out: Annotated[Path, typer.Option(help="File to write the calibrator to; - is stdout.")],
    rate: Rate = None,
    rate_scope: Mode = None,
    per_question: PerQuestion = None,
    seed: Annotated[
        int, typer.Option(help="Random seed for breaking ties between equal scores.")
    ] = 0,
    scale: Scale = "perplexity",
    condition: Condition = None,
    by_length: ByLength = False,
    as_json: Json = False,
) -> None:
    """Make a calibrator that starts from the given scores.

    `atts eval --scores` accepts the calibrator's file, and also accepts the scores themselves.

    Example: atts calibration fit scores.jsonl --rate-scope question-turn --condition target.model=QwQ-32B --out
    calibrator.json
    """
    from atts.calibration import Calibrator

    rate = rate_of(rate, file)
    mode = scope_of(rate_scope, file)
    scores = scores_of(file, per_question, scale, condition)
    made = Calibrator(rate, mode, seed=seed, stored=scores, by_length=by_length)  # type: ignore[arg-type]  # checked there
    report_written = write_scores(out, made.state())
    if as_json:
        facts: dict[str, Any] = {
            "out": str(out),
            "rate": rate,
            "rate_scope": mode,
            "scores": len(scores),
            "warnings": [scores.warning] if scores.warning else [],
        }
        report_written(
            json_line({**facts, "guarantee": made.guarantee, "voided_by": made.voided_by})
        )
        return
    stored = counted(len(scores), "score")
    report_written(f"{out}: {stored}, rate scope {mode}, rate {rate:g}")
    if scores.warning:
        report_written(f"warning: {scores.warning}")
    report_written(f"guarantee  {made.guarantee}\nvoided by  {made.voided_by}")


@app.command("judge")
def judge(
    run: Annotated[str, typer.Argument(help="Directory of a graded run with method trial.")],
    out: Annotated[Path, typer.Option(help="File to write the judge to; - is stdout.")],
    rate: Annotated[
        float,
        typer.Option(
            help="Share of chunks that the judge escalates when it is compared with a coin; the "
            "coin escalates the same share."
        ),
    ] = 0.2,
    seed: Annotated[int, typer.Option(help="Random seed of the cross-validation.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit a judge that predicts the gain of escalating a chunk, and compare the judge with a coin.

    The gain is the change in accuracy if the target rewrites the chunk. A coin escalates chunks at
    random. A run uses the judge with `atts eval --set score.kind=learned --set score.judge=FILE`.

    Example: atts calibration judge runs/trial --out judge.json
    """
    from atts.api import judge_of

    if not 0 < rate < 1:
        raise OptionError("--rate", f"{rate} is not between 0 and 1")
    made = judge_of(run, rate, seed)
    report_written = write_scores(out, made.state())
    if as_json:
        report_written(json_line({"out": str(out), **made.state()}))
        return
    gain, low, high = (100 * value for value in made.over_coin)
    chunks, problems = counted(made.chunks, "chunk"), counted(made.problems, "problem")
    report_written(f"{out}: a judge fitted on {chunks} from {problems}")
    report_written(
        f"gain of the judge over a coin at rate {rate:g}: {gain:+.2f} [{low:+.2f}, {high:+.2f}] "
        "percentage points of rollout accuracy per chunk, cross-validated by problem"
    )
    if not made.beats_coin:
        report_written("the judge is not shown to be better than a coin: the interval contains 0")


@app.command("report")
def report(
    file: Source,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Share of chunks to escalate to the target; by default the rate of the run or "
            "calibrator, or 0.4 for a file of scores."
        ),
    ] = None,
    rate_scope: Annotated[
        str | None,
        typer.Option(
            help="Where the escalation rate is controlled: over all chunks (aci, marginal, "
            "split), within each question (question), or within each turn of a question "
            "(question-turn). Default: as in the run or calibrator; for scores, aci."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Format: html, markdown, json, svg (a folder of SVG figures) or png (a folder "
            "of PNG figures). By default, the suffix of --out decides."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Path of the report or of the folder of figures; - is stdout."),
    ] = None,
    per_question: PerQuestion = None,
    scale: Scale = "perplexity",
    seed: Annotated[
        int, typer.Option(help="Random seed for breaking ties between equal scores.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Report on the calibration of a run, or on the guarantee that scores or a calibrator give.

    The report is printed, or written with --out. A run is reported at its nominal rate; with
    another --rate, the decisions on its scores are made again. If records have a field "correct"
    (true or false), the report also says how scores and correct answers are related.

    Example: atts calibration report runs/first --out calibration.html

    Example: atts calibration report ppls_math500.npy --per-question 16 --rate 0.4
    """
    from atts.analysis import calibration_format, render_calibration, save_calibration

    named = calibration_format(format, out)
    if out is None and format is not None:
        raise OptionError(
            "--out",
            f"name a {'folder' if named in ('svg', 'png') else 'file'} to write the {named} into",
        )
    built = _report(file, rate, rate_scope, (per_question, scale, seed))
    if out is None:
        if as_json:
            _print_as_json(built)
        else:
            _print_report(built)
    elif str(out) == "-":
        hand_out(render_calibration(built, named))
    else:
        paths = [str(path) for path in save_calibration(built, named, out)]
        if as_json:
            print_json({"report": paths[0] if len(paths) == 1 else paths, **_verdict(built)})
        else:
            say("\n".join(paths))
            tell(built.headline.sentence)


@app.command("check")
def check(
    file: Source,
    live: Annotated[
        Path | None,
        typer.Option(
            help="Scores to compare with the stored scores: those of a run that uses the stored "
            "scores, in order of arrival, as a run directory or a file."
        ),
    ] = None,
    rate: Rate = None,
    per_question: PerQuestion = None,
    scale: Scale = "perplexity",
    as_json: Json = False,
) -> None:
    """Fail (exit code 5) if stored scores are faulty, or differ from those of the run that uses
    them.

    A run directory fails if its realised rate is outside its band or a drift alarm was raised. With
    --live the check also fails if the two sets of scores differ in their conditions: models,
    tokenizers, sampling or chunk limits. The band is the range of rates that differences between
    questions can explain. A rate inside the band is called unclear, and does not fail, if
    independent coins would be unlikely to give that rate.

    Example: atts calibration check runs/first

    Example: atts calibration check scores.json --live runs/first
    """
    from atts.calibration import check_fingerprint, examine, first_alarm

    if file != "-" and Path(file).is_dir() and live is None:
        return check_run(Path(file), as_json)
    stored = scores_of(file, per_question, scale, None)
    health = examine(stored, rate_of(rate, file))
    other = stored if live is None else scores_of(str(live), None, scale, None)
    if live is not None and stored.fingerprint and other.fingerprint:
        check_fingerprint(file, stored.fingerprint, other.fingerprint)
    monitor = first_alarm(stored, None if live is None else other)
    events = [asdict(event) for event in monitor.events]
    if as_json:
        print_json({"ok": not events, "events": events, "warnings": health.warnings})
    if events:
        after = counted(events[0]["scores"], "score")
        noticed = f" (noticed after {after})" if live is not None else ""
        raise CheckFailed(f"{file}: {events[0]['message']}{noticed}")
    if not as_json:
        verb = "was" if len(other) == 1 else "were"
        watched = f"; {counted(len(other), 'score')} of the run {verb} checked for drift"
        seen = counted(len(stored), "stored score") + ("" if live is None else watched)
        say(f"{file}: no problem found ({seen})")


def check_run(directory: Path, as_json: bool) -> None:
    """Check that a run kept the guarantee of its calibration.

    :raises CheckFailed: if the realised rate is outside its band, or a drift alarm was raised.
    """
    from atts.analysis import build_report

    calibration = build_report(directory, page_bytes=0).report.calibration
    if calibration is None:
        raise CheckFailed(
            f"{directory}: the gate of this run made no decisions, so there is no rate to check"
        )
    problems = [
        f"drift alarm after {counted(alarm.scores, 'score')}: {alarm.text or alarm.kind}"
        for alarm in calibration.alarms
    ]
    share = calibration.escalated / calibration.decisions
    facts: dict[str, Any] = {
        "decisions": calibration.decisions,
        "rate": share,
        "nominal": calibration.nominal,
        "standing": "held",
    }
    sentence = (
        f"{calibration.escalated:,} of {counted(calibration.decisions, 'chunk')} escalated "
        f"({100 * share:.1f} %); the gate has no nominal rate"
    )
    check = calibration.check()
    if check:
        sentence = str(check)
        facts |= {"standing": check.standing, "coin": check.coin, "band": check.band}
    if facts["standing"] == "left":
        problems.insert(0, sentence)
    if as_json:
        print_json(
            {"ok": not problems, **facts, "problems": problems, "audit": calibration.promise.audit}
        )
    if problems:
        raise CheckFailed(f"{directory}: " + "; ".join(problems))
    if not as_json:
        say(f"{directory}: {sentence}; no alarm")


def _print_decisions(done: ReplayResult) -> None:
    for decision in done.decisions:
        print_json({"type": "decision", **{name: getattr(decision, name) for name in _DECISION}})
    for event in done.events:
        print_json({"type": "drift", **asdict(event)})
    summary = {
        "rate": done.rate,
        "rate_scope": done.mode,
        "decisions": len(done.decisions),
        "escalated": done.escalated,
    }
    words = {"note": done.note, "guarantee": done.guarantee, "voided_by": done.voided_by}
    print_json({"type": "summary", **summary, **done.metrics, **words})


def _print_replay(done: ReplayResult) -> None:
    count = sum(decision.escalate for decision in done.decisions)
    say(
        f"{count} of {counted(len(done.decisions), 'chunk')} escalated: realised rate "
        f"{done.escalated:.4f} (nominal rate {done.rate:g}, rate scope {done.mode})"
    )
    if done.note:
        say(f"note       {done.note}")
    for name, value in done.metrics.items():
        say(f"  {name.replace('_', ' '):<28}{'-' if math.isnan(value) else f'{value:.4f}'}")
    for event in done.events:
        say(
            f"drift      alarm after {counted(event.scores, 'score')}: {event.message} (action: "
            f"{event.action})"
        )
    say(f"guarantee  {done.guarantee}\nvoided by  {done.voided_by}")


def _report(
    file: str, rate: float | None, rate_scope: Any, how: tuple[int | None, str, int]
) -> CalibrationReport:
    from atts.analysis import calibration_of_scores
    from atts.api import RATE_OF_FILES, calibration_report
    from atts.calibration import StoredScores, labels_of, scale_named

    per_question, scale, seed = how
    if file != "-":
        # The result is not needed. If the file is invalid, this call raises an error that names
        # this command's options.
        scores_of(file, per_question, scale, None)
        options = {"per_question": per_question, "scale": scale_named(scale), "seed": seed}
        return calibration_report(file, rate=rate, rate_scope=rate_scope, **options)  # type: ignore[arg-type]  # named by type
    rows = records_of(file, None, scale)
    scores = StoredScores.from_records(rows, scale_named(scale))
    asked = RATE_OF_FILES if rate is None else rate
    return calibration_of_scores(
        "stdin", scores, asked, rate_scope or "aci", seed=seed, labels=labels_of(rows)
    )


def _verdict(report: CalibrationReport) -> dict[str, Any]:
    return {
        "standing": report.standing,
        "sentence": report.headline.sentence,
        "rate": report.rate,
        "rate_scope": report.mode,
    }


def _print_as_json(report: CalibrationReport) -> None:
    print_json({**asdict(report.health), **_verdict(report), "warnings": report.health.warnings})


def _print_report(report: CalibrationReport) -> None:
    say(f"{report.headline.sentence[:1].upper()}{report.headline.sentence[1:]}.\n")
    for number in report.headline.numbers:
        say(f"  {number.value:>8}  {number.what}: {number.note}")
    say("")
    _print_health(report.health)
    for text in dict.fromkeys([*(text for _, text in report.points), *report.health.warnings]):
        say(f"warning: {text}")
    say(f"guarantee  {report.promise.guarantee}\nvoided by  {report.promise.voided_by}")


def _print_health(health: Health) -> None:
    from atts.analysis import shown_score

    say(
        health.clusters
        if health.repeats.clustered
        else f"{counted(health.scores, 'score')} of unknown questions"
    )
    scope = "repeated within a question" if health.repeats.clustered else "repeated scores"
    say(f"  {scope:<28}{100 * health.repeats.within:.1f} %")
    say(f"  {'repeated across questions':<28}{100 * health.repeats.across:.1f} %")
    say(
        f"  escalate if worse than      {shown_score(health, health.threshold)} (rate "
        f"{health.rate:g})"
    )
    for words, (low, high) in (
        ("rate, independent scores", health.long_run),
        ("rate, clustered scores", health.long_run_clustered),
    ):
        say(f"  {words:<28}{low:.3f} to {high:.3f} (90 % interval of the long-run rate)")
    if not math.isnan(health.half_split):
        say(
            f"  {'rate on unseen questions':<28}standard deviation {health.half_split:.3f} (the "
            "threshold comes from one half of the questions, the rate from the other half)"
        )
    for row in health.turns:
        median = shown_score(health, row.median)
        threshold = shown_score(health, row.threshold)
        say(
            f"  turn {row.turn:<4}{counted(row.scores, 'score') + ',':>14} median {median}, "
            f"escalate if worse than {threshold}"
        )
