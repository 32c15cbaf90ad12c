"""A report as HTML, Markdown or JSON, from the templates beside this module, and as a file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape

from atts.analysis.report import charts, tables
from atts.analysis.report.build import BuiltReport
from atts.analysis.report.frontier_chart import frontier_chart, runs_chart
from atts.analysis.report.svg import Axis
from atts.errors import OptionError
from atts.files import jsonable, write_atomic, write_out

F = TypeVar("F", bound=str)
Format = Literal["html", "markdown", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
FILE_NAMES: dict[Format, str] = {
    "html": "report.html",
    "markdown": "report.md",
    "json": "report.json",
}


def render(built: BuiltReport, format: Format) -> str:
    """The report's text.

    :raises OptionError: for an unknown format.
    """
    match as_format(format, FORMATS):
        case "html":
            return _html(built)
        case "markdown":
            # the same numbers without pictures or texts of rollouts, short enough to be pasted into
            # an issue
            return filled("report.md", report=built.report, tables=tables).strip() + "\n"
        case "json":
            return json.dumps(jsonable(built.report), allow_nan=False, ensure_ascii=False) + "\n"


def save_report(built: BuiltReport, format: Format, out: Path | None = None) -> Path:
    """Write a report that was built; where it is.

    :raises StorageError: the disk refuses.
    """
    data = render(built, format).encode("utf-8", "replace")
    if out is not None:
        write_out(out, data)
        return out
    path = Path(built.report.run.directory) / FILE_NAMES[format]
    write_atomic(path, data)  # whoever made the directory may have put a link there: it is replaced
    return path


def as_format(name: str, known: Sequence[F]) -> F:
    """The format of this name, which may be its short one.

    :raises OptionError: there is none.
    """
    for each in known:
        if each == {"md": "markdown"}.get(name, name):
            return each
    raise OptionError("format", f"{name!r} is not a format", known, name)


def _html(built: BuiltReport) -> str:
    """One file that needs nothing else: no network, no server, any browser of today."""
    report = built.report
    created = datetime.fromtimestamp(report.run.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return page(
        "report.html",
        ("tables.js", "report.js"),
        report=report,
        pages=built.pages,
        tables=tables,
        charts=charts,
        frontier_chart=frontier_chart,
        runs_chart=runs_chart,
        axis=Axis,
        created=created if report.run.created else "",
    )


def page(template: str, scripts: Sequence[str], **values: Any) -> str:
    """A template of HTML filled in, with the style of all pages and the scripts that this one may
    run.
    """
    script = "".join(map(asset, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = asset("report.css") + asset("charts.css")
    return filled(template, style=style, script=script, script_digest=digest, **values)


def filled(template: str, **values: Any) -> str:
    """A template filled in."""
    return _environment().get_template(template).render(**values)


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sentence": _sentence, "plain": plain, "css_class": charts.css_class}
    return environment


def asset(name: str) -> str:
    """The text of a file beside the templates."""
    return (files("atts.analysis.report") / "templates" / name).read_text(encoding="utf-8")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> plain("a|b <script>\\n*c*")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    for letter in "\\`*_[]|#~$":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
