"""`atts doctor`: everything that a long run depends on, looked at before it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atts.cli import options
from atts.cli.interrupts import run_async
from atts.cli.output import print_json
from atts.cli.terminal import say
from atts.errors import CheckFailed


@options.with_keys(
    "pair at method rate samples turns max_tokens draft target card out config pairs as_json"
)
def doctor(
    context: typer.Context,
    card: Annotated[
        str | None,
        typer.Option(
            help="GPU to fit the pair to: rtx4090, l40s, a100, h100, h200, ...",
            show_default="those here",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the settings here, for `atts eval --config`.", metavar="FILE"),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: options.ObjectJson = False,
) -> None:
    """Look at both engines, their tokenizers and templates, lengths, memory and disk, and say what
    to do.

    Each line is ok, warn or fail; one that fails makes the exit code 5. One short chunk is drafted
    and scored.

    Example: atts doctor --pair r1-1.5b/r1-70b --card h100 --out pair.toml
    """
    from atts.api import diagnose, write_settings

    configuration = options.configured(context, config, pairs, without="out")

    async def main() -> None:
        found = await diagnose(configuration, card)
        if out is not None:
            write_settings(out, configuration, found)
        if as_json:
            print_json({**found.as_json(), "out": None if out is None else str(out)})
        else:
            say("\n".join(map(str, found.checks)))
        if found.failed:
            raise CheckFailed(f"{found.failed} of {len(found.checks)} checks failed")

    run_async(main)
