"""`atts runs`: every run below a folder, in a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.output import json_line
from atts.cli.terminal import say, tell

if TYPE_CHECKING:
    from atts.analysis import RunLine


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of runs, or runs.", show_default="runs", metavar="[FOLDER]..."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """List runs, the latest last: status, problems done, accuracy with its interval, rate, tokens,
    method and models.

    A run whose journal cannot be read is listed with the reason.

    Example: atts runs; atts runs runs/sweep-1 --json
    """
    from dataclasses import asdict

    from atts.analysis import list_runs

    named = folders or [Path("runs")]
    found = list_runs(named)
    if as_json:
        say("\n".join(json_line(asdict(line)) for line in found)) if found else None
    elif found:
        say("\n".join(_table(found)))
    if not found:
        tell(f"atts: no run in {', '.join(map(str, named))}; `atts eval` makes one")


def _table(found: Sequence[RunLine]) -> Iterator[str]:
    wide = max(len("run"), *(len(line.directory) for line in found))
    yield (
        f"{'run':<{wide}}  {'begun':<16}  {'status':<11}  {'problems':>11}  {'accuracy':<20}  "
        f"{'rate':>5}  "
        f"{'target tokens':>13}  {'method':<12}  models"
    )
    for line in found:
        yield _row(line, wide).rstrip()
    yield f"{len(found)} run{'s' * (len(found) != 1)}. Brackets are 95 % intervals over problems."


def _row(line: RunLine, wide: int) -> str:
    when = datetime.fromtimestamp(line.begun).strftime("%Y-%m-%d %H:%M") if line.begun else ""
    if line.standing is None or line.accuracy is None or line.rate is None:
        return f"{line.directory:<{wide}}  {when:<16}  {'unreadable':<11}  {line.problem}"
    of = "?" if line.problems is None else f"{line.problems:,}"
    rate = line.rate.value
    return (
        f"{line.directory:<{wide}}  {when:<16}  {line.standing:<11}  {f'{line.done:,}/{of}':>11}  "
        f"{line.accuracy.brief('-'):<20}  {'-' if rate != rate else f'{rate:.3f}':>5}  "
        f"{line.target_tokens:>13,}  "
        f"{line.method:<12}  {line.models}"
    )
