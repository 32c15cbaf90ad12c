"""`atts calibration`: fit, import, report on, check and replay calibration scores."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.calibration_report import report
from atts.cli.options import Json
from atts.cli.output import json_line, print_json, write_scores
from atts.cli.score_files import (
    ByLength,
    Condition,
    Mode,
    OwnRate,
    PerQuestion,
    Rate,
    Scale,
    Source,
    rate_of,
    records_of,
    scores_of,
)
from atts.cli.terminal import say
from atts.errors import CheckFailed

if TYPE_CHECKING:
    from atts.calibration import ReplayResult

app = typer.Typer(no_args_is_help=True)

_DECISION = ("question", "turn", "sample", "score", "p", "escalate", "why")


@app.command("replay")
def replay(
    file: Source,
    rate: Rate = 0.4,
    mode: Mode = "question-turn",
    seed: Annotated[int, typer.Option(help="Of the coin that breaks ties.")] = 0,
    stored: Annotated[
        Path | None, typer.Option(help="Scores of a calibration run to start from.")
    ] = None,
    per_question: PerQuestion = None,
    drift: Annotated[
        str, typer.Option(help="On alarm: recalibrate, widen, escalate or report.")
    ] = "recalibrate",
    window: Annotated[int | None, typer.Option(help="Remember only so many scores.")] = None,
    decay: Annotated[
        float | None, typer.Option(help="Let each score fade by this factor per newer one.")
    ] = None,
    scale: Scale = "perplexity",
    by_length: ByLength = False,
    as_json: Json = False,
) -> None:
    """Decide on recorded scores in arrival order, each from those before it, and say how well the
    rate was held.

    Example: atts calibration replay scores.jsonl --rate 0.4 --mode question-turn --json
    """
    from atts.calibration import replay as decide
    from atts.calibration import scale_named

    records = records_of(file, per_question, scale)
    start = () if stored is None else scores_of(str(stored), per_question, scale, None)
    options: dict[str, Any] = {
        "mode": mode,
        "seed": seed,
        "scale": scale_named(scale),
        "by_length": by_length,
    }
    done = decide(records, rate, stored=start, drift=drift, window=window, decay=decay, **options)  # type: ignore[arg-type]  # checked there
    (_print_decisions if as_json else _print_replay)(done)


@app.command("import")
def import_scores(
    file: Source,
    out: Annotated[Path, typer.Option(help="Where to write the scores; - is stdout.")],
    per_question: PerQuestion = None,
    scale: Scale = "perplexity",
    condition: Condition = None,
    as_json: Json = False,
) -> None:
    """Read scores of any supported kind and write them as one file with their conditions.

    Example: atts calibration import ppls.npy --per-question 16 --condition target.model=QwQ-32B
    --out scores.json
    """
    found = scores_of(file, per_question, scale, condition)
    told = write_scores(out, found.state())
    facts = {"scores": len(found), "questions": len(set(found.questions)), "out": str(out)}
    told(
        json_line(facts)
        if as_json
        else f"{facts['scores']} scores of {facts['questions']} questions: {out}"
    )


@app.command("fit")
def fit(
    file: Source,
    out: Annotated[Path, typer.Option(help="Where to write the calibrator; - is stdout.")],
    rate: OwnRate = None,
    mode: Mode = "question-turn",
    per_question: PerQuestion = None,
    seed: Annotated[int, typer.Option(help="Of the coin that breaks ties.")] = 0,
    scale: Scale = "perplexity",
    condition: Condition = None,
    by_length: ByLength = False,
    as_json: Json = False,
) -> None:
    """Make a calibrator that starts from these scores.

    `atts eval --scores` starts from it as from the scores themselves.

    Example: atts calibration fit scores.jsonl --mode turn --condition target.model=QwQ-32B --out
    calibrator.json
    """
    from atts.calibration import Calibrator

    rate = rate_of(rate, file)
    found = scores_of(file, per_question, scale, condition)
    made = Calibrator(rate, mode, seed=seed, stored=found, by_length=by_length)  # type: ignore[arg-type]  # checked there
    told = write_scores(out, made.state())
    if as_json:
        facts = {"out": str(out), "rate": rate, "mode": mode, "scores": len(found)}
        told(json_line({**facts, "guarantee": made.guarantee, "voided_by": made.voided_by}))
        return
    told(f"{out}: {len(found)} scores, mode {mode}, rate {rate:g}")
    told(f"guarantee  {made.guarantee}\nvoided by  {made.voided_by}")


app.command("report")(report)


@app.command("check")
def check(
    file: Source,
    live: Annotated[
        Path | None, typer.Option(help="Scores of the run these are meant for, in arrival order.")
    ] = None,
    rate: OwnRate = None,
    per_question: PerQuestion = None,
    scale: Scale = "perplexity",
    as_json: Json = False,
) -> None:
    """Fail (exit code 5) if stored scores are broken, or are not like those of the run they are
    meant for.

    Of a run directory: fail if its realised rate left its band, an alarm went off, or, with --live,
    the other run was made under other conditions (models, tokenizers, sampling, chunk limits). The
    band is what questions that differ as much as these allow; a rate inside it but outside what
    coins allow is called unclear and does not fail.

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
        noticed = f" (noticed after {events[0]['scores']} scores)" if live is not None else ""
        raise CheckFailed(f"{file}: {events[0]['message']}{noticed}")
    if not as_json:
        watched = f", {len(other)} live scores watched" if live is not None else ""
        say(f"{file}: nothing found against it ({len(stored)} scores{watched})")


def check_run(directory: Path, as_json: bool) -> None:
    """Whether a run kept what its calibration promised.

    :raises CheckFailed: the rate left its band, or an alarm went off.
    """
    from atts.analysis import build_report

    held = build_report(directory, page_bytes=0).report.calibration
    if held is None:
        raise CheckFailed(f"{directory}: its gate decided nothing, so there is nothing to check")
    problems = [
        f"alarm after {alarm.scores:,} scores: {alarm.text or alarm.kind}" for alarm in held.alarms
    ]
    share = held.escalated / held.decisions
    facts: dict[str, Any] = {
        "decisions": held.decisions,
        "rate": share,
        "nominal": held.nominal,
        "standing": "held",
    }
    said = f"{share:.3f} of {held.decisions:,} chunks were escalated, no rate was promised"
    if found := held.check():
        said = str(found)
        facts |= {"standing": found.standing, "coin": found.coin, "band": found.band}
    if facts["standing"] == "left":
        problems.insert(0, said)
    if as_json:
        print_json({"ok": not problems, **facts, "problems": problems, "audit": held.promise.audit})
    if problems:
        raise CheckFailed(f"{directory}: " + "; ".join(problems))
    if not as_json:
        say(f"{directory}: {said}; no alarm")


def _print_decisions(done: ReplayResult) -> None:
    for decision in done.decisions:
        print_json({"type": "decision", **{name: getattr(decision, name) for name in _DECISION}})
    for event in done.events:
        print_json({"type": "drift", **asdict(event)})
    summary = {
        "rate": done.rate,
        "mode": done.mode,
        "decisions": len(done.decisions),
        "escalated": done.escalated,
    }
    words = {"guarantee": done.guarantee, "voided_by": done.voided_by}
    print_json({"type": "summary", **summary, **done.metrics, **words})


def _print_replay(done: ReplayResult) -> None:
    count = sum(decision.escalate for decision in done.decisions)
    say(
        f"{count} of {len(done.decisions)} decisions escalated: {done.escalated:.4f} (nominal "
        f"{done.rate:g})"
    )
    for name, value in done.metrics.items():
        say(f"  {name.replace('_', ' '):<28}{'-' if math.isnan(value) else f'{value:.4f}'}")
    for event in done.events:
        say(f"drift      after {event.scores} scores: {event.message} ({event.action})")
    say(f"guarantee  {done.guarantee}\nvoided by  {done.voided_by}")
