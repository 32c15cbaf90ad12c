"""From a run directory to a report in one of its formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from atts.analysis.report.collect import PAGE_BYTES, Collected, collect
from atts.analysis.report.html import render_html
from atts.analysis.report.markdown import render_markdown
from atts.analysis.report.numbers import Report
from atts.errors import OptionError
from atts.files import write_atomic
from atts.jsonable import jsonable

Format = Literal["html", "markdown", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
NAMES: dict[Format, str] = {"html": "report.html", "markdown": "report.md", "json": "report.json"}


def render(collected: Collected, format: Format) -> str:
    """The report's text.

    :raises OptionError: for an unknown format.
    """
    if format not in FORMATS:
        raise OptionError("format", f"{format!r} is not a format", FORMATS, format)
    if format == "html":
        return render_html(collected)
    return render_markdown(collected.report) if format == "markdown" else _json(collected.report)


def write_report(
    directory: Path,
    format: Format = "html",
    out: Path | None = None,
    against: Sequence[Path] = (),
    *,
    page_bytes: int = PAGE_BYTES,
) -> Path:
    """Write the report of a run, into its directory unless told otherwise; where it is.

    :raises OptionError: for an unknown format.
    :raises JournalError: a directory holds no run, or one that cannot be read.
    :raises StorageError: the disk refuses.
    """
    if format not in FORMATS:
        raise OptionError("format", f"{format!r} is not a format", FORMATS, format)
    path = out or directory / NAMES[format]
    write_atomic(path, render(collect(directory, against, page_bytes=page_bytes), format).encode("utf-8", "replace"))
    return path


def _json(report: Report) -> str:
    return json.dumps(jsonable(report), allow_nan=False, ensure_ascii=False) + "\n"
