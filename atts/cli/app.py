"""Builds the command tree, importing only the command that was asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from atts.cli.registry import COMMANDS
from atts.errors import ATTSError

EXIT_CODES = """Exit codes: 0 done; 1 unexpected failure; 2 usage, dataset or calibration input; 3 engine;
4 run directory or disk; 5 a requested check failed; 130 interrupted, work kept."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; errors become one message on stderr and their documented exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build(words)(args=words, prog_name="atts")
    except SystemExit as stop:  # typer ends every command line, good or bad, by this
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except ATTSError as error:
        print(f"atts: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader left (`| head`): keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("atts: interrupted", file=sys.stderr)
        return 130
    return 0


def build(words: Sequence[str]) -> typer.Typer:
    """The tree for this command line: real code for the command it names, one help line for every other."""
    app = typer.Typer(
        name="atts",
        help="Asynchronous test-time scaling: a small model drafts, a large one judges, guarantees are printed.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    asked = next((word for word in words if not word.startswith("-")), None)
    completing = "_ATTS_COMPLETE" in os.environ  # the shell asks for words of every command
    for name, entry in sorted(COMMANDS.items()):
        if name == asked or completing:
            _attach(app, name, getattr(importlib.import_module(entry.module), entry.attribute), entry.help)
        else:
            app.command(name, help=entry.help)(_elsewhere)
    return app


def _attach(app: typer.Typer, name: str, code: Any, words: str) -> None:
    if isinstance(code, typer.Typer):
        app.add_typer(code, name=name, help=words)
    else:
        app.command(name, help=None if code.__doc__ else words)(code)


def _elsewhere() -> None:
    raise AssertionError("only the command that was asked for is ever called")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"atts {version('atts')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
