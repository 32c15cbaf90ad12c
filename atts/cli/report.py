"""`atts report`: the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.follow import EVERY_SECONDS, follow
from atts.cli.options import RunDirectory
from atts.cli.output import print_json
from atts.cli.terminal import hand_out, say, tell
from atts.errors import OptionError

if TYPE_CHECKING:
    from atts.analysis import BuiltReport

_DAY = 86_400.0


def report(
    directory: RunDirectory,
    format: Annotated[str, typer.Option(help="html, markdown or json.")] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write; - is stdout. Unless told: report.html, .md or .json in the run."
        ),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with; repeatable.")
    ] = None,
    following: Annotated[
        bool,
        typer.Option(
            "--follow", help="Write it anew while the run goes on; it ends when the run does."
        ),
    ] = False,
    every: Annotated[
        float | None, typer.Option(help="Seconds between, with --follow.", show_default="10")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: where the report is, and its verdict.")
    ] = (False),
) -> None:
    """Write the report of a run, finished or not: one self-contained HTML file, Markdown or JSON.

    The file is replaced whole: a reader sees the old one or the new one, never half of one.

    Example: atts report runs/first --against runs/target-only

    Example: atts report runs/first --follow
    """
    from atts.analysis import FORMATS, as_format, build_report, render, save_report

    named = as_format(format, FORMATS)
    if every is not None and not (following and 0 < every <= _DAY):
        raise OptionError(
            "--every", f"{every:g}: give seconds, up to a day, together with --follow"
        )
    if out is not None and str(out) == "-":
        if following:
            raise OptionError(
                "--follow", "standard output cannot be written anew; name a file with --out"
            )
        hand_out(render(build_report(directory, against or ()), named))
        return

    def write() -> tuple[BuiltReport, Path]:
        built = build_report(directory, against or ())
        return built, save_report(built, named, out)

    if following:
        tell(
            "atts: the report is written anew as long as the run goes on; Ctrl-C ends that, and "
            "not the run"
        )
        built, path = follow(directory, write, EVERY_SECONDS if every is None else every)
    else:
        built, path = write()
    verdict = built.report.verdict
    sentence = built.report.headline.sentence
    if as_json:
        print_json(
            {
                "report": str(path),
                "standing": verdict.standing,
                "sentence": sentence,
                "verdict": verdict.line,
            }
        )
    else:
        say(path)
        tell(sentence)
        tell(verdict.line)
