"""A report as text in one of its formats, and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from atts.analysis.report.build import PAGE_BYTES, BuiltReport, build_report
from atts.analysis.report.html import render_html
from atts.analysis.report.markdown import render_markdown
from atts.errors import OptionError
from atts.files import write_atomic
from atts.jsonable import jsonable

Format = Literal["html", "markdown", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
FILE_NAMES: dict[Format, str] = {"html": "report.html", "markdown": "report.md", "json": "report.json"}


def render(built: BuiltReport, format: Format) -> str:
    """The report's text.

    :raises OptionError: for an unknown format.
    """
    match as_format(format):
        case "html":
            return render_html(built)
        case "markdown":
            return render_markdown(built.report)
        case "json":
            return json.dumps(jsonable(built.report), allow_nan=False, ensure_ascii=False) + "\n"


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
    known = as_format(format)
    return save_report(build_report(directory, against, page_bytes=page_bytes), known, out)


def save_report(built: BuiltReport, format: Format, out: Path | None = None) -> Path:
    """Write a report that was built; where it is.

    :raises StorageError: the disk refuses.
    """
    path = out or Path(built.report.run.directory) / FILE_NAMES[format]
    write_atomic(path, render(built, format).encode("utf-8", "replace"))
    return path


def as_format(name: str) -> Format:
    """The format of this name.

    :raises OptionError: there is none.
    """
    for format in FORMATS:
        if format == name:
            return format
    raise OptionError("format", f"{name!r} is not a format", FORMATS, name)
