"""Output on a terminal, with control codes made visible in every text."""

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
"""The control characters that a terminal would obey, except tabs and line ends."""


def sanitized(text: str) -> str:
    """Return a text in which control codes of terminals are replaced by visible characters.

    >>> sanitized("red: \x1b[31m, bell: \x07, back: \u202e")
    'red: ␛[31m, bell: ␇, back: \\\\u202e'
    """
    return _CONTROLS.sub(_picture, text)


def say(text: object, *, flush: bool = False) -> None:
    """Print a command's result on standard output, with control codes made visible."""
    print(sanitized(str(text)), flush=flush)


def tell(text: object) -> None:
    """Print a notice for people on standard error, with control codes made visible."""
    print(sanitized(str(text)), file=sys.stderr, flush=True)


def hand_out(document: str) -> None:
    """Write a document to standard output; on a terminal, control codes are made visible."""
    sys.stdout.write(sanitized(document) if sys.stdout.isatty() else document)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 32 else f"\\u{code:04x}"


class _StderrHandler(logging.Handler):
    """A log handler that prints each message as one line on the current `sys.stderr`, even if it
    was replaced.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell(f"atts: {record.getMessage()}")
        except OSError:
            # The program that read our standard error has ended, so no one can see the message.
            return


@contextmanager
def warnings_on_stderr() -> Generator[None]:
    """Print warnings of atts on stderr during the block, and errors that no caller can catch, such
    as errors in threads.

    The root logger is not changed. Control codes in the messages and warnings of other libraries
    are made visible, because a message may quote a file.
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
    # If the arguments do not fit the message, `getMessage` fails. The logging module reports this
    # error later.
    with suppress(Exception):
        record.msg = sanitized(record.getMessage())
        record.args = None
    return record


def _tell_unraised(unraised: Any) -> None:
    """Print the traceback of an error that no caller can catch, such as an error in a thread."""
    tell(
        "".join(
            traceback.format_exception(
                unraised.exc_type, unraised.exc_value, unraised.exc_traceback
            )
        ).rstrip()
    )


T = TypeVar("T")


def json_line(value: Any) -> str:
    """Return a value as strict JSON; NaN becomes null, and an infinite number becomes a string."""
    return json.dumps(jsonable(value), allow_nan=False)


def write_scores(out: Path, state: Mapping[str, Any]) -> Callable[[object], None]:
    """Write scores or a calibrator to a file, or to stdout if `out` is "-".

    Return a function that prints notes on the result: to stderr if the scores were written to
    stdout, else to stdout.
    """
    from atts.calibration import state_text, write_state

    if str(out) == "-":
        hand_out(state_text(state))
        return tell
    write_state(out, state)
    return say


def print_json(value: Any) -> None:
    """Print a value as one line of strict JSON, and flush standard output."""
    say(json_line(value), flush=True)


def print_result(result: T, as_json: bool, table: Callable[[T], Iterable[str]]) -> None:
    """Print a result as one JSON object, or as the text lines that `table(result)` returns."""
    say(json_line(result) if as_json else "\n".join(table(result)))
