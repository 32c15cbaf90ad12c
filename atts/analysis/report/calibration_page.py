"""A calibration report as HTML, Markdown or JSON, its figures as SVG or PNG files, and where they
are written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from atts.analysis.report import tables
from atts.analysis.report.calibration_report import CalibrationReport
from atts.analysis.report.charts import Chart, calibration_charts, labelled_chart, over_time_chart
from atts.analysis.report.figures import save_figures
from atts.analysis.report.render import as_format, filled, page
from atts.errors import DISTRIBUTION, OptionError
from atts.files import jsonable, write_out

CalibrationFormat = Literal["html", "markdown", "json", "svg", "png"]
_FORMATS: tuple[CalibrationFormat, ...] = get_args(CalibrationFormat)
_ENDINGS: dict[str, CalibrationFormat] = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".json": "json",
}


def calibration_format(format: str | None, out: Path | None) -> CalibrationFormat:
    """The format that is named, else the one that the file's name ends in, else HTML.

    :raises OptionError: there is no such format.
    """
    if format is None:
        return _ENDINGS.get(out.suffix.lower() if out else "", "html")
    return as_format(format, _FORMATS)


def render_calibration(report: CalibrationReport, format: CalibrationFormat) -> str:
    """The report's text.

    :raises OptionError: for a format of pictures, which are files.
    """
    labelled = None if report.labelled is None else labelled_chart(report.labelled)
    if format == "html":
        return page(
            "calibration.html",
            ("tables.js",),
            report=report,
            tables=tables,
            first=_first(report),
            charts=calibration_charts(report.control),
            labelled=labelled,
            version=version(DISTRIBUTION),
        )
    if format == "markdown":
        data = labelled and replace(labelled.data, title=labelled.title)
        return filled("calibration.md", report=report, tables=tables, labelled=data).strip() + "\n"
    if format == "json":
        facts = {**asdict(report), "promise": report.promise, "warnings": report.health.warnings}
        return json.dumps(jsonable(facts), allow_nan=False, ensure_ascii=False) + "\n"
    raise OptionError(
        "format", f"{format} is one picture per file: name a folder to write them into"
    )


def save_calibration(
    report: CalibrationReport, format: CalibrationFormat, out: Path
) -> Sequence[Path]:
    """Write the report, or a folder of its figures; what was written.

    :raises StorageError: the disk refuses.
    :raises UsageError: nothing here can draw PNG.
    """
    if format == "svg" or format == "png":
        return save_figures(calibration_figures(report), out, format)
    write_out(out, render_calibration(report, format).encode("utf-8", "replace"))
    return [out]


def calibration_figures(report: CalibrationReport) -> list[Chart]:
    """Every picture of the report, once."""
    labelled = [] if report.labelled is None else [labelled_chart(report.labelled)]
    return [*calibration_charts(report.control), *labelled]


def _first(report: CalibrationReport) -> Chart:
    """The picture of the first screen, in words that need no others."""
    asked = "" if report.control.nominal is None else " The dashed line is what was asked for."
    caption = (
        "A small model writes, a large one grades every step and takes over the worst. The thick "
        "line is the share "
        f"taken over so far, the thin one that of the latest {report.control.window} steps.{asked} "
        f"The grey band is "
        "where fair coins would be."
    )
    return replace(
        over_time_chart(report.control), title="Steps handed to the large model", caption=caption
    )
