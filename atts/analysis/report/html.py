"""The report as one HTML file that needs nothing else: no network, no server, any browser of today."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined

from atts.analysis.report import charts, tables
from atts.analysis.report.build import BuiltReport
from atts.analysis.report.frontier_chart import frontier_chart


def render_html(built: BuiltReport) -> str:
    """The whole page, from the templates beside this module."""
    report, script = built.report, _read("report.js")
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["sentence"] = _sentence
    created = datetime.fromtimestamp(report.run.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template("report.html").render(
        report=report,
        pages=built.pages,
        tables=tables,
        charts=charts,
        frontier_chart=frontier_chart,
        created=created if report.run.created else "",
        style=_read("report.css"),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _read(name: str) -> str:
    return (files("atts.analysis.report") / "templates" / name).read_text(encoding="utf-8")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
