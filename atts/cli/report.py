"""`atts report`: the report of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atts.cli.options import RunDirectory
from atts.cli.output import print_json
from atts.errors import OptionError

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
    from atts.analysis import FORMATS, NAMES, Format, collect, render
    from atts.files import write_atomic

    named = _SHORT.get(format, format)
    known: dict[str, Format] = {each: each for each in FORMATS}
    if named not in known:
        raise OptionError("format", f"{format!r} is not a format", FORMATS, format)
    collected = collect(directory, against or ())
    text = render(collected, known[named])
    if out is not None and str(out) == "-":
        sys.stdout.write(text)
        return
    path = out or directory / NAMES[known[named]]
    write_atomic(path, text.encode("utf-8", "replace"))
    verdict = collected.report.verdict
    if as_json:
        print_json({"report": str(path), "standing": verdict.standing, "verdict": verdict.line})
    else:
        print(path)
        print(f"{verdict.line}", file=sys.stderr)
