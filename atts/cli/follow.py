"""A report that is written anew while its run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from atts.errors import JournalCorrupt, JournalError

T = TypeVar("T")
EVERY_SECONDS = 10.0
LOOK_SECONDS = 0.5


def follow(
    directory: Path,
    write: Callable[[], T],
    every: float = EVERY_SECONDS,
    wait: Callable[[float], None] = time.sleep,
) -> T:
    """Call `write` now, then every so many seconds in which the run went on, and once more when it
    has ended.

    What the last call returned. A line that is being written while it is read is no damage: it is
    read again.

    :raises JournalError: there is no run, or it is over and cannot be read.
    """
    from atts.analysis import is_running
    from atts.journal import JOURNAL

    left = 0.0
    seen = -1
    while True:
        goes_on = is_running(directory)
        size = _size(directory / JOURNAL)
        if not goes_on:
            return write()
        if size != seen and left <= 0:
            with suppress(JournalCorrupt):
                write()
                left = every
                seen = size
        wait(LOOK_SECONDS)
        left -= LOOK_SECONDS


def _size(journal: Path) -> int:
    try:
        return journal.stat().st_size
    except OSError as error:
        raise JournalError(
            journal.parent, "there is no run here", "Give the directory of `atts eval --out`"
        ) from error
