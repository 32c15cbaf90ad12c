"""The conversion of a report to HTML, Markdown or JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape

from atts.analysis.reports import charts, tables
from atts.analysis.reports.build import BuiltReport
from atts.analysis.reports.charts import Axis, Chart, Plot, frontier_chart, runs_chart
from atts.errors import OptionError, UsageError
from atts.files import jsonable, storage, write_atomic, write_out

F = TypeVar("F", bound=str)
Format = Literal["html", "markdown", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
FILE_NAMES: dict[Format, str] = {
    "html": "report.html",
    "markdown": "report.md",
    "json": "report.json",
}


def render(built: BuiltReport, format: Format, problems: str = "") -> str:
    """Return the report as a string in this format.

    `problems` is the file with all problems; a page that does not show all problems links to this
    file.

    :raises OptionError: for an unknown format.
    """
    match as_format(format, FORMATS):
        case "html":
            return _html(built, problems)
        case "markdown":
            # A Markdown report has no pictures and no texts of rollouts, so it is short enough for
            # an issue.
            return filled("report.md", report=built.report, tables=tables).strip() + "\n"
        case "json":
            return json.dumps(jsonable(built.report), allow_nan=False, ensure_ascii=False) + "\n"


def save_report(built: BuiltReport, format: Format, out: Path | None = None) -> Path:
    """Write a report to a file, and return the path of the file.

    :raises StorageError: the file cannot be written.
    """
    path = out or Path(built.report.run.directory) / FILE_NAMES[format]
    # A run directory from another person may contain links to any file. So in the run directory,
    # `write_atomic` replaces a link instead of following it.
    write = write_atomic if out is None else write_out
    problems = f"{path.stem}.problems.jsonl"
    if format == "html" and _is_large(built):
        rows = (jsonable(row) for row in built.report.problems)
        lines = "".join(f"{json.dumps(row, allow_nan=False, ensure_ascii=False)}\n" for row in rows)
        write(path.with_name(problems), lines.encode("utf-8", "replace"))
    write(path, render(built, format, problems).encode("utf-8", "replace"))
    return path


def _is_large(built: BuiltReport) -> bool:
    return len(tables.shown_problems(built.report)) < len(built.report.problems)


def as_format(name: str, known: Sequence[F]) -> F:
    """Return the format with this name, which may be an abbreviation such as md.

    :raises OptionError: no format has this name.
    """
    for each in known:
        if each == {"md": "markdown"}.get(name, name):
            return each
    raise OptionError("format", f"{name!r} is not a format", known, name)


def _html(built: BuiltReport, problems: str) -> str:
    """Return one HTML file that needs no network, no server and no other file."""
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
        is_large=_is_large(built),
        problems_file=problems,
        problems_url=quote(problems),
        created=created if report.run.created else "",
    )


def page(template: str, scripts: Sequence[str], **values: Any) -> str:
    """Fill in an HTML template, with the style sheets that all pages share and the scripts of this
    page.
    """
    script = "".join(map(asset, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = asset("report.css") + asset("charts.css")
    return filled(template, style=style, script=script, script_digest=digest, **values)


def filled(template: str, **values: Any) -> str:
    """Render a template with these values."""
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
    """Return the text of a file in the templates' folder."""
    return (files("atts.analysis.reports") / "templates" / name).read_text(encoding="utf-8")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def plain(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, on one line.

    >>> plain("a|b <script>\\n*c*")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\*'
    """
    for letter in "\\`*_[]|#~$":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


_SCALE = 2  # scale of a PNG: number of pixels per unit of the SVG
_SIZE = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def save_figures(charts: Sequence[Chart], folder: Path, kind: Literal["svg", "png"]) -> list[Path]:
    """Write each chart to a file that is named after the chart's title.

    :raises StorageError: the file cannot be written.
    :raises UsageError: PNG is requested, but no program that draws PNG files is installed, or the
        program failed.
    """
    draw = _drawer() if kind == "png" else None
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    for chart in charts:
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', chart.title.lower()).strip('-')}.{kind}"
        text = standalone(chart)
        write_out(path, text.encode() if draw is None else _png(draw, text))
        written.append(path)
    return written


def standalone(chart: Chart) -> str:
    """Return the chart as an independent SVG document, in light colours, without a style sheet."""
    wide, tall = _size(chart.picture)
    head, _, body = chart.picture.partition(">")
    head = head.replace(
        "<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
    )
    style = (
        "svg{font:12.5px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        + _light("charts.css")
    )
    return (
        f'{head}><style>{style}</style><rect width="{wide}" height="{tall}" fill="#fff"/>{body}\n'
    )


def _size(picture: str) -> tuple[int, int]:
    size = _SIZE.search(picture)
    assert size is not None, "every chart states its size"
    return int(size[1]), int(size[2])


def _light(name: str) -> str:
    """Return a style sheet with its variables replaced by the light colours, because many SVG
    programs do not support variables.
    """
    root = asset("report.css").partition(":root{")[2].partition("}")[0]
    colours = dict(re.findall(r"--(\w+):([^;]+)", root)) | {"card": "#fff"}
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], asset(name)).replace("\n", "")


def _drawer() -> tuple[str, str]:
    """Return the name and path of the first installed program that converts SVG to PNG."""
    for name in ("rsvg-convert", "resvg", "inkscape", *_BROWSERS):
        if program := shutil.which(name):
            return name, program
    raise UsageError(
        "--format png needs a program that converts SVG to PNG, but none is installed: install "
        "rsvg-convert, resvg, inkscape or chromium, or use --format svg"
    )


def _png(drawer: tuple[str, str], text: str) -> bytes:
    name, program = drawer
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "figure.svg"
        out = Path(folder) / "figure.png"
        source.write_text(text, encoding="utf-8")
        try:
            subprocess.run(
                [program, *_words(name, source, out, _size(text))],
                check=True,
                capture_output=True,
                timeout=60,
            )
            return out.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(
                f"{name} could not convert the figure to PNG ({error}); use --format svg instead"
            ) from error


def _words(name: str, source: Path, out: Path, size: tuple[int, int]) -> list[str]:
    """Return the arguments with which the program `name` converts an SVG file to a PNG file."""
    if name == "rsvg-convert":
        return [f"--zoom={_SCALE}", f"--output={out}", str(source)]
    if name == "resvg":
        return [f"--zoom={_SCALE}", str(source), str(out)]
    if name == "inkscape":
        return [
            str(source),
            "--export-type=png",
            f"--export-filename={out}",
            f"--export-dpi={96 * _SCALE}",
        ]
    # Browsers cannot use their sandbox when they run as root. The browser reads only the SVG file
    # that was written above.
    return [
        "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", f"--user-data-dir={source.parent / 'p'}",
        f"--force-device-scale-factor={_SCALE}", f"--window-size={size[0]},{size[1]}", f"--screenshot={out}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), source.as_uri(),
    ]  # fmt: skip


Rows = Sequence[tuple[str, Mapping[str, int]]]
"""One row per model: its name, and for the position of each of its blocks, the number of models
that share the block.
"""


def save_sharing(rows: Rows, path: Path) -> None:
    """Write the drawing of shared blocks as an SVG file.

    :raises StorageError: the file cannot be written.
    """
    write_out(path, standalone(sharing_chart(rows)).encode())


def sharing_chart(rows: Rows) -> Chart:
    """Draw each model as a row of blocks, from left to right in the order in which a token passes
    through them.
    """
    most = max([len(parts) for _, parts in rows], default=1)
    across = Axis(
        -0.5,
        most - 0.5,
        "blocks in the order of computation (red: not in any other model)",
        values="whole",
    )
    plot = Plot(
        across, Axis(-0.8, len(rows) - 0.2, "models", values="whole"), 760, 110 + 34 * len(rows)
    )
    data = (
        ("model", "block", "models"),
        [(name, *part) for name, parts in rows for part in parts.items()],
    )
    return replace(
        Chart.of(
            "Blocks of a zoo", "Models that share each block.", plot, _marks(plot, rows), data
        ),
        wide=True,
    )


def _marks(plot: Plot, rows: Rows) -> Iterator[str]:
    for row, (name, parts) in enumerate(rows):
        up = len(rows) - 1 - row
        for at, (place, count) in enumerate(parts.items()):
            tip = f"{name}, {place}: {count} model{'s' if count > 1 else ''}"
            yield plot.dot(at, up, "run" if count > 1 else "off", tip, radius=5)
        yield plot.text(-0.4, up, name, drop=-5)
