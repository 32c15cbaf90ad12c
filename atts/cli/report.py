"""`atts report`: the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atts.cli.options import RunDirectory
from atts.cli.output import print_json
from atts.cli.terminal import hand_out, say, tell

_SHORT = {"md": "markdown"}


def report(
    directory: RunDirectory,
    format: Annotated[str, typer.Option(help="html, markdown or json.")] = "html",
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; - is stdout. Unless told: report.html, .md or .json in the run."),
    ] = None,
    against: Annotated[list[Path] | None, typer.Option(help="Another run to compare with; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: where the report is, and its verdict.")] = (
        False
    ),
) -> None:
    """Write the report of a run, finished or not: one self-contained HTML file, Markdown or JSON.

    Example: atts report runs/first --against runs/target-only
    """
    from atts.analysis import as_format, build_report, render, save_report

    named = as_format(_SHORT.get(format, format))
    built = build_report(directory, against or ())
    if out is not None and str(out) == "-":
        hand_out(render(built, named))
        return
    path = save_report(built, named, out)
    verdict, sentence = built.report.verdict, built.report.headline.sentence
    if as_json:
        print_json({"report": str(path), "standing": verdict.standing, "sentence": sentence, "verdict": verdict.line})
    else:
        say(path)
        tell(sentence)
        tell(verdict.line)
