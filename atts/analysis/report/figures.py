"""Figures as files of their own: SVG with its colours in it, and PNG by a program that draws SVG."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from atts.analysis.report.charts import Chart
from atts.analysis.report.render import asset
from atts.errors import UsageError
from atts.files import storage, write_out

_SCALE = 2  # pixels of a PNG per unit of its SVG
_SIZE = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def save_figures(charts: Sequence[Chart], folder: Path, kind: Literal["svg", "png"]) -> list[Path]:
    """Write each chart as a file named after its title.

    :raises StorageError: the disk refuses.
    :raises UsageError: PNG is wanted, and no program that draws it is installed, or it failed.
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
    """The picture as a document of its own, in light colours, which needs no style sheet."""
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
    found = _SIZE.search(picture)
    assert found is not None, "every chart says how large it is"
    return int(found[1]), int(found[2])


def _light(name: str) -> str:
    """A style sheet without variables: many programs that draw SVG know none."""
    root = asset("report.css").partition(":root{")[2].partition("}")[0]
    colours = dict(re.findall(r"--(\w+):([^;]+)", root)) | {"card": "#fff"}
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], asset(name)).replace("\n", "")


def _drawer() -> tuple[str, str]:
    """The name and path of a program that makes PNG of SVG."""
    for name in ("rsvg-convert", "resvg", "inkscape", *_BROWSERS):
        if found := shutil.which(name):
            return name, found
    raise UsageError(
        "PNG needs a program that draws SVG, and none is installed: install rsvg-convert, resvg, "
        "inkscape or chromium, "
        "or take --format svg"
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
            raise UsageError(f"{name} did not draw a PNG ({error}); take --format svg") from error


def _words(name: str, source: Path, out: Path, size: tuple[int, int]) -> list[str]:
    """How each program is asked."""
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
    # a browser keeps its sandbox wherever the system lets it have one, and reads nothing but the
    # file written above
    return [
        "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", f"--user-data-dir={source.parent / 'p'}",
        f"--force-device-scale-factor={_SCALE}", f"--window-size={size[0]},{size[1]}", f"--screenshot={out}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), source.as_uri(),
    ]  # fmt: skip
