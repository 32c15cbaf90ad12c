"""Lets people at a terminal hear what the library only logs, such as a server that is waited for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager


class _Words(logging.Handler):
    """One line on standard error, wherever that is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"atts: {record.getMessage()}", file=sys.stderr, flush=True)
        except OSError:
            return  # nobody is there to read it


@contextmanager
def warnings_said() -> Generator[None]:
    """Within the block, warnings of this package are said; the root logger stays as it is."""
    handler, logger = _Words(logging.WARNING), logging.getLogger("atts")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
