"""`atts calibration report`: what a run's calibration did, or what stored scores can promise."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import Json
from atts.cli.output import print_json
from atts.cli.score_files import PerQuestion, Scale, Source, records_of, scores_of
from atts.cli.terminal import hand_out, say, tell
from atts.errors import OptionError

if TYPE_CHECKING:
    from atts.analysis import CalibrationReport
    from atts.calibration import Health


def report(
    file: Source,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Fraction of chunks the target takes over. By default a run's or a calibrator's "
            "own; of scores 0.4."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="How the rate is held. By default a run's or a calibrator's own; of scores aci."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="html, markdown or json; svg or png: a folder of figures. By default as --out "
            "ends."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the report, or its figures; - is stdout.")
    ] = None,
    per_question: PerQuestion = None,
    scale: Scale = "perplexity",
    seed: Annotated[int, typer.Option(help="Of the coin that breaks ties.")] = 0,
    as_json: Json = False,
) -> None:
    """Say what a run's calibration did, or what scores or a calibrator can promise: on the
    terminal, or as a report.

    A run is told at the rate it was made at; with another one its scores are decided anew. Scores
    may carry a field "correct" (true or false): then the report says what they know of right
    answers.

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
    found = _report(file, rate, mode, (per_question, scale, seed))
    if out is None:
        (_print_as_json if as_json else _print_report)(found)
    elif str(out) == "-":
        hand_out(render_calibration(found, named))
    else:
        paths = [str(path) for path in save_calibration(found, named, out)]
        if as_json:
            print_json({"report": paths[0] if len(paths) == 1 else paths, **_verdict(found)})
        else:
            say("\n".join(paths))
            tell(found.headline.sentence)


def _report(
    file: str, rate: float | None, mode: Any, how: tuple[int | None, str, int]
) -> CalibrationReport:
    from atts.analysis import calibration_of_scores
    from atts.api import RATE_OF_FILES, calibration_report
    from atts.calibration import StoredScores, labels_of, scale_named

    per_question, scale, seed = how
    if file != "-":
        # says what is wrong with a file in the words of this command
        scores_of(file, per_question, scale, None)
        options = {"per_question": per_question, "scale": scale_named(scale), "seed": seed}
        return calibration_report(file, rate=rate, mode=mode, **options)  # type: ignore[arg-type]  # named by type
    rows = records_of(file, None, scale)
    scores = StoredScores.from_records(rows, scale_named(scale))
    asked = RATE_OF_FILES if rate is None else rate
    return calibration_of_scores(
        "stdin", scores, asked, mode or "aci", seed=seed, labels=labels_of(rows)
    )


def _verdict(found: CalibrationReport) -> dict[str, Any]:
    return {
        "standing": found.standing,
        "sentence": found.headline.sentence,
        "rate": found.rate,
        "mode": found.mode,
    }


def _print_as_json(found: CalibrationReport) -> None:
    print_json({**asdict(found.health), **_verdict(found), "warnings": found.health.warnings})


def _print_report(found: CalibrationReport) -> None:
    say(f"{found.headline.sentence[:1].upper()}{found.headline.sentence[1:]}.\n")
    for number in found.headline.numbers:
        say(f"  {number.value:>8}  {number.what}: {number.note}")
    say("")
    _print_health(found.health)
    for text in dict.fromkeys([*(text for _, text in found.points), *found.health.warnings]):
        say(f"warning: {text}")
    say(f"guarantee  {found.promise.guarantee}\nvoided by  {found.promise.voided_by}")


def _print_health(health: Health) -> None:
    say(
        health.clusters
        if health.repeats.clustered
        else f"{health.scores} scores whose questions are not known"
    )
    say(
        f"  {'repeats in their question' if health.repeats.clustered else 'repeats':<28}{health.repeats.within:.1%}"
    )
    say(f"  repeats in another one      {health.repeats.across:.1%}")
    say(f"  escalate above              {_threshold(health.threshold)} (rate {health.rate:g})")
    say(
        f"  ... at most, 90 % sure      {_threshold(health.careful_threshold)} (were scores "
        f"independent)"
    )
    for words, (low, high) in (
        ("long-run rate, independent", health.long_run),
        ("long-run rate, clustered", health.long_run_clustered),
    ):
        say(f"  {words:<28}{low:.3f} to {high:.3f} (90 %)")
    if not math.isnan(health.half_split):
        say(
            f"  half of the questions       SD of the rate on the other half "
            f"{health.half_split:.3f}"
        )
    for row in health.turns:
        facts = f"{row.scores:>6} scores, median {_threshold(row.median)}, escalate above {_threshold(row.threshold)}"
        say(f"  turn {row.turn:<4}{facts}")


def _threshold(value: float) -> str:
    """A score in few letters; there is none above which to escalate where the scores are too few
    for the rate.
    """
    if math.isinf(value):
        return "none"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"
