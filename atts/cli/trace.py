"""`atts trace`: the task graph of a run as a Chrome trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atts.cli.options import Json, RunDirectory
from atts.cli.output import json_line
from atts.cli.terminal import say, tell


def trace(
    directory: RunDirectory,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; - is stdout.", show_default="trace.json in the run"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's engine calls as a trace: open it at https://ui.perfetto.dev or
    chrome://tracing.

    Each engine is a process whose threads are its slots; one more holds the rollouts, with what
    they waited for.

    Example: atts trace runs/first
    """
    if out is not None and str(out) == "-":
        from atts.graph import write_trace
        from atts.journal import open_run

        write_trace(list(open_run(directory).nodes()), sys.stdout)
        return
    from atts.api import trace as write

    path = write(directory, out)
    say(json_line({"trace": str(path), "bytes": path.stat().st_size}) if as_json else path)
    if not as_json:
        tell("Open it at https://ui.perfetto.dev or chrome://tracing.")
