"""Printing on a terminal: one escaping function for every word, JSON lines and tables."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from atts.files import jsonable

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Everything that makes a terminal do something else than show a letter, line ends and tabs left
alone.
"""


def sanitized(text: str) -> str:
    """A text from a model, a file or a server, for a terminal: its control codes are shown, not
    obeyed.

    >>> sanitized("red: \x1b[31m, bell: \x07, back: \u202e")
    'red: ␛[31m, bell: ␇, back: \\\\u202e'
    """
    return _CONTROLS.sub(_picture, text)


def say(text: object, *, flush: bool = False) -> None:
    """Print on standard output what a command found, through the one escaping function."""
    print(sanitized(str(text)), flush=flush)


def tell(text: object) -> None:
    """Print on standard error what people should know besides, through the same."""
    print(sanitized(str(text)), file=sys.stderr, flush=True)


def hand_out(document: str) -> None:
    """Write a whole document on standard output: as it is, unless a terminal would obey it."""
    sys.stdout.write(sanitized(document) if sys.stdout.isatty() else document)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 32 else f"\\u{code:04x}"


class _StderrHandler(logging.Handler):
    """One line on standard error, wherever that is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell(f"atts: {record.getMessage()}")
        except OSError:
            return  # the reader of standard error is gone


@contextmanager
def warnings_on_stderr() -> Generator[None]:
    """Within the block, logged warnings of this package are printed, and what Python says of errors
    it cannot raise.

    The root logger stays as it is. What other libraries log or warn of is printed by them, after it
    was sanitized: it may quote a file.
    """
    handler = _StderrHandler(logging.WARNING)
    logger = logging.getLogger("atts")
    hooks = threading.excepthook, sys.unraisablehook
    make = logging.getLogRecordFactory()
    show = warnings.formatwarning
    logging.setLogRecordFactory(lambda *given, **named: _plain(make(*given, **named)))
    warnings.formatwarning = lambda *given, **named: sanitized(show(*given, **named))
    logger.addHandler(handler)
    threading.excepthook = sys.unraisablehook = _tell_unraised
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        logging.setLogRecordFactory(make)
        warnings.formatwarning = show
        logger.removeHandler(handler)


def _plain(record: logging.LogRecord) -> logging.LogRecord:
    with suppress(Exception):  # arguments that do not fit their message, which logging tells of
        record.msg = sanitized(record.getMessage())
        record.args = None
    return record


def _tell_unraised(found: Any) -> None:
    """The traceback of an error in a thread, or where nothing can catch one."""
    tell(
        "".join(
            traceback.format_exception(found.exc_type, found.exc_value, found.exc_traceback)
        ).rstrip()
    )


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
