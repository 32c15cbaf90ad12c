"""Make the pictures of docs/pictures: pages in a browser, and a run that is killed and resumed."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.analysis.conftest import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
EVAL = "eval arithmetic --limit 24 --samples 8 --report none --out runs/long"
KILL_AT = 3500
"""Lines of the journal after which the recorded run is killed."""
LIVE = "eval arithmetic --limit 400 --samples 8 --report none --out runs/live"
LIVE_AT = 4000
"""Lines of the journal after which the live page is looked at."""
PAGES = {
    "report.png": "runs/first/report.html",
    "calibration.png": "calibration.html",
    "sweep.png": "runs/sweep/sweep.html",
}
COMMANDS = (
    "eval arithmetic --limit 24 --samples 8 --report none --out runs/first",
    "eval arithmetic --limit 24 --samples 8 --report none --method target-only --out runs/target-only",
    "report runs/first --compare-to runs/target-only",
    "calibration report runs/first --out calibration.html",
    "sweep arithmetic[:16] --over samples=2,4,8 --over rate=0.1,0.3 --out runs/sweep",
)


def main() -> None:
    """Make every picture, from runs of the embedded models in a temporary folder."""
    argparse.ArgumentParser(prog="pictures", description=__doc__).parse_args()
    program = os.environ.get("ATTS_CHROMIUM") or shutil.which("chromium")
    if program is None:
        sys.exit("pictures: install chromium, or name it with ATTS_CHROMIUM")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (PICTURES / "resume.svg").write_text(drawn(recorded(folder)))
        for words in COMMANDS:
            _run(words, folder)
        with Browser(program, folder / "profile") as browser:
            page = browser.page()
            page.look(1100, 760, "light")
            for picture, path in PAGES.items():
                page.open((folder / path).as_uri())
                page.picture(PICTURES / picture)
            live(page, folder)
    for made in sorted(PICTURES.iterdir()):
        print(f"pictures: {made.relative_to(ROOT)}, {made.stat().st_size / 1024:.0f} KiB")


def _command(words: str) -> list[str]:
    return [sys.executable, "-m", "atts", *shlex.split(words)]


def _environment() -> dict[str, str]:
    quiet = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def _run(words: str, folder: Path) -> str:
    """Run a command of atts and return what it prints."""
    done = subprocess.run(
        _command(words),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"pictures: atts {words} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def live(page: Page, folder: Path) -> None:
    """Take the picture of `atts view` in the middle of a run."""
    journal = folder / "runs" / "live" / "journal.jsonl"
    with _started(LIVE, folder) as running:
        while running.poll() is None and _count_lines(journal) < LIVE_AT:
            time.sleep(0.02)
        with _started("view runs/live --port 0", folder) as viewer:
            assert viewer.stdout is not None, "the output is piped"
            page.open(viewer.stdout.readline().split()[-1])
            page.wait("!document.querySelector('main').hidden")
            page.picture(PICTURES / "live.png")
        if running.poll() is not None:
            sys.exit("pictures: the live run ended before its picture was taken")


@contextmanager
def _started(words: str, folder: Path) -> Generator[subprocess.Popen[str]]:
    """Run a command of atts in the background, and kill it in the end."""
    with subprocess.Popen(
        _command(words),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a recorded terminal, and the second at which it appears."""

    text: str
    second: float
    is_typed: bool = False


def recorded(folder: Path) -> list[Line]:
    """Run an evaluation, kill it in the middle, and run the same command again."""
    lines = [Line(f"$ atts {EVAL}", 0.0, is_typed=True)]
    journal = folder / "runs" / "long" / "journal.jsonl"
    # Output of the killed process is not shown: it was never flushed to a terminal.
    running = subprocess.Popen(
        _command(EVAL),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while running.poll() is None and _count_lines(journal) < KILL_AT:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    if running.wait() != -signal.SIGKILL:
        sys.exit("pictures: the run ended before it could be killed")
    lines.append(Line("Killed                      (kill -9 from another terminal)", 2.5))
    lines += _shown("runs runs", folder, 4.0)
    lines += _shown(EVAL, folder, 7.0)
    lines += _shown("journal check runs/long", folder, 11.0)
    return lines


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _shown(words: str, folder: Path, second: float) -> list[Line]:
    """Run a command and return it with its output, which appears a second later."""
    printed = [line.rstrip() for line in _run(words, folder).splitlines()]
    kept = [line for line in printed if line and not line.startswith(("loading", "ended;"))]
    typed = Line(f"$ atts {words}", second, is_typed=True)
    return [typed, *(Line(line, second + 1.0) for line in kept)]


_WIDTH = 100
_STEP = 17
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee6;white-space:pre}"
    ".typed{fill:#8fd18f}.line{opacity:0;animation:show .01s linear forwards}"
    "@keyframes show{to{opacity:1}}"
    "@media (prefers-reduced-motion:reduce){.line{animation-delay:0s!important}}"
)


def drawn(lines: Sequence[Line]) -> str:
    """Draw a recorded terminal as an SVG file whose lines appear one after the other."""
    rows = list[str]()
    for number, line in enumerate(lines):
        text = line.text if len(line.text) <= _WIDTH else line.text[: _WIDTH - 1] + "…"
        kind = "line typed" if line.is_typed else "line"
        rows.append(
            f'<text class="{kind}" style="animation-delay:{line.second:g}s" x="16" '
            f'y="{28 + _STEP * number}">{escape(text)}</text>'
        )
    height = 28 + _STEP * len(lines) + 8
    label = "A terminal: an evaluation is killed, and the same command resumes it"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'aria-label="{label}"><style>{_STYLE}</style>'
        f'<rect width="760" height="{height}" rx="6" fill="#1b1f24"/>{"".join(rows)}</svg>\n'
    )


if __name__ == "__main__":
    main()
