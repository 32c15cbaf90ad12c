"""How results are printed: one JSON object per line, or a table for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from atts.cli.terminal import hand_out, say, tell
from atts.files import jsonable

T = TypeVar("T")


def json_line(value: Any) -> str:
    """The value as strict JSON; dataclasses are objects, what is not finite is null or its word."""
    return json.dumps(jsonable(value), allow_nan=False)


def write_scores(out: Path, state: Mapping[str, Any]) -> Callable[[object], None]:
    """Write scores or a calibrator to the file or, for "-", on standard output; how to say what was
    written.
    """
    from atts.calibration import state_text, write_state

    if str(out) == "-":
        hand_out(state_text(state))
        return tell
    write_state(out, state)
    return say


def print_json(value: Any) -> None:
    """Print the value as one line of strict JSON, at once."""
    say(json_line(value), flush=True)


def print_result(result: T, as_json: bool, table: Callable[[T], Iterable[str]]) -> None:
    """Print what a command found: as one JSON object, or as the lines that `table` makes of it."""
    say(json_line(result) if as_json else "\n".join(table(result)))
