"""`atts config`: every key, its value, and what set it."""

from __future__ import annotations

import json
from typing import Any

import typer

from atts.cli.options import ConfigFile, Json, Pairs
from atts.cli.output import print_json
from atts.cli.terminal import say
from atts.files import jsonable

app = typer.Typer(no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the configuration, and who set what.

    Example: atts config show
    """


@app.command("show")
def show(
    key: str = typer.Argument("", help="Only keys that contain this.", show_default="all"),
    config: ConfigFile = None,
    pairs: Pairs = None,
    as_json: Json = False,
) -> None:
    """Show every key, its value, and where that came from: default, a file, a variable, or the
    method.

    Flags of other commands come last and win: defaults < atts.toml < ATTS_* < flags.

    Example: ATTS_RATE=0.3 atts config show rate
    """
    from atts.api import config_keys, configure
    from atts.errors import OptionError

    found = configure({}, pairs or (), file=config).settings
    shown = {name: known for name, known in config_keys().items() if key in name}
    if not shown:
        raise OptionError("config", f"no key contains {key!r}; `atts config show` lists them all")
    for name, known in shown.items():
        value = jsonable(found[name].value)
        origin = found[name].origin
        if as_json:
            facts = {"key": name, "value": value, "origin": origin, "default": known.default}
            print_json({**facts, "variable": known.variable, "help": known.help})
        else:
            say(f"{name:<28}{_word(value):<34}{origin}")


def _word(value: Any) -> str:
    """As it would stand in a file, shortened to a column."""
    words = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return words if len(words) <= 32 else words[:31] + "…"
