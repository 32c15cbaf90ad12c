"""`atts journal`: whether a run directory is whole, and what can be saved of one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.options import Json
from atts.cli.output import print_result
from atts.errors import CheckFailed

if TYPE_CHECKING:
    from atts.journal import JournalCheck

app = typer.Typer(no_args_is_help=True)
Run = Annotated[Path, typer.Argument(help="A run directory, as given to `atts eval --out`.")]


@app.command()
def check(run: Run, as_json: Json = False) -> None:
    """Read every line of a run; fail (exit code 5) if one is damaged, missing, doubled or
    contradicts those before it.

    Example: atts journal check runs/first
    """
    from atts.journal import check_journal

    found = check_journal(run)
    print_result(found.as_json(), as_json, lambda _: told(found))
    if found.damage:
        raise CheckFailed(found.damage)


@app.command()
def salvage(
    run: Run,
    out: Annotated[
        Path, typer.Option(help="A new directory for what is saved.", metavar="DIRECTORY")
    ],
    as_json: Json = False,
) -> None:
    """Copy everything before the first damaged line into a new directory; the run's own command
    goes on there.

    The damaged run is left as it is. What followed the damage is done again.

    Example: atts journal salvage runs/first --out runs/saved
    """
    from atts.journal import salvage as save

    found = save(run, out)
    print_result(
        {**found.as_json(), "out": str(out)},
        as_json,
        lambda _: [*told(found), f"Saved in {out}: run the same command with --out {out}"],
    )


def told(found: JournalCheck) -> list[str]:
    """What was found, in lines for people."""
    after = "damaged" if found.damage else "a torn last line"
    return [
        f"{found.directory}: {found.lines:,} whole lines of {found.sessions:,} sessions; "
        f"{found.complete:,} problems "
        f"complete, {found.open:,} open",
        *([f"{found.lost:,} bytes after them are {after}"] if found.lost else []),
    ]
