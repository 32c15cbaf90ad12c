"""The live progress display: a table on a terminal, lines elsewhere, and `progress.json` for programs."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TextIO

import anyio

from atts import tasks
from atts.cli.output import interval, json_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from atts.run import Progress, ProgressSnapshot

FILE = "progress.json"
REFRESH_SECONDS, LINE_SECONDS, FILE_SECONDS = 0.25, 5.0, 1.0
_BAR = 28


@asynccontextmanager
async def progress_display(progress: Progress, stream: TextIO | None = None) -> AsyncGenerator[None, None]:
    """Show the run on `stream` (stderr) as long as the block lasts, and once more at its end.

    The run's directory, once it has one, holds `progress.json`, replaced whole every second.
    """
    out: TextIO = sys.stderr if stream is None else stream
    display = _Table(progress, out) if out.isatty() else _Lines(progress, out)
    with display:
        async with tasks.background(_follow, display, progress):
            yield
        progress.over()
        display.refresh()
        save(progress.snapshot())


async def _follow(display: _Display, progress: Progress) -> None:
    saved = -math.inf
    while True:
        display.refresh()
        await anyio.sleep(REFRESH_SECONDS)
        if anyio.current_time() - saved >= FILE_SECONDS:
            saved = anyio.current_time()
            save(progress.snapshot())


def save(snapshot: ProgressSnapshot) -> None:
    """Replace `progress.json` in the run directory; a reader sees the old one or the new one, never half of one.

    :raises StorageError: the disk refuses.
    """
    from atts.files import write_atomic

    if snapshot.directory is None or not snapshot.directory.is_dir():
        return
    text = json_line(snapshot.as_json()) + "\n"
    write_atomic(snapshot.directory / FILE, text.encode(), durable=False)


class _Display:
    """A way to show progress; a context manager that is refreshed from time to time."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def refresh(self) -> None:
        """Show the run as it stands, if it is time to."""
        raise NotImplementedError


class _Lines(_Display):
    """One plain line every few seconds, and at once when the state changes."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        super().__init__(progress, stream)
        self._next = LINE_SECONDS
        self._state = "running"

    def refresh(self) -> None:
        snapshot = self._progress.snapshot()
        now = snapshot.seconds
        if now < self._next and snapshot.state == self._state:
            return
        self._next, self._state = now + LINE_SECONDS, snapshot.state
        print(line(snapshot), file=self._stream, flush=True)


class _Table(_Display):
    """A table that is drawn over itself; what is said meanwhile goes above it."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(progress, stream)
        self._console: Console = Console(file=stream, highlight=False)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=False, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> _Display:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def refresh(self) -> None:
        self._live.update(table(self._progress.snapshot()), refresh=True)


def line(snapshot: ProgressSnapshot) -> str:
    """The run in one line of plain words."""
    parts = [_problems(snapshot), *(f"{name} {words}" for name, words in _facts(snapshot))]
    time = f"{duration(snapshot.seconds)}" + (f", about {duration(snapshot.left)} left" if snapshot.left else "")
    note = {"draining": "stopping: saving calls in flight", "over": "ended"}.get(snapshot.state)
    return "; ".join([*([note] if note else []), *parts, time])


def table(snapshot: ProgressSnapshot) -> RenderableType:
    """The run as a few rows for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("problems", _bar(snapshot))
    for name, words in (*_facts(snapshot), *_models(snapshot)):
        rows.add_row(name, words)
    parts: list[Any] = [rows]
    if snapshot.note and snapshot.state != "over":
        parts.append(Text(snapshot.note, style="bold yellow"))
    return Group(*parts)


def _bar(snapshot: ProgressSnapshot) -> Any:
    from rich.text import Text

    text = Text()
    if snapshot.problems:
        full = round(_BAR * snapshot.done / snapshot.problems)
        text.append("━" * full, "green").append("╌" * (_BAR - full), "bright_black").append("  ")
    text.append(_problems(snapshot)).append(f"  {duration(snapshot.seconds)}", "dim")
    if snapshot.left is not None:
        text.append(f", about {duration(snapshot.left)} left", "dim")
    return text


def _problems(snapshot: ProgressSnapshot) -> str:
    of = f"/{snapshot.problems}" if snapshot.problems is not None else ""
    return f"{snapshot.done}{of} problems" + (f", {snapshot.failed} failed" if snapshot.failed else "")


def _facts(snapshot: ProgressSnapshot) -> list[tuple[str, str]]:
    """Name and words of every row but the first; rows without anything to say are left out."""
    tokens, speeds, at = snapshot.tokens, snapshot.speeds, snapshot.stages
    chunks = f"{snapshot.accepted:,} accepted, {snapshot.escalated:,} handed over"
    chunks += f" ({snapshot.forced:,} without a score)" if snapshot.forced else ""
    chunks += f", {snapshot.rejected:,} thrown away" if snapshot.rejected else ""
    nominal = "" if snapshot.nominal is None else f", asked for {snapshot.nominal:g}"
    busy = (
        f"{at['draft']} drafting, {at['score']} being judged, {at['target']} with the target, {at['wait']} waiting, "
        f"{snapshot.rollouts_done:,} ended"
    )
    share = f"{snapshot.target_share:.1%} by the target"
    speed = f"draft {speeds['draft']:,.0f}/s, target {speeds['target']:,.0f}/s, scored {speeds['scored']:,.0f}/s"
    rows = [
        ("rollouts", busy if snapshot.state != "over" else f"{snapshot.rollouts_done:,} ended"),
        ("chunks", chunks if snapshot.accepted + snapshot.escalated else ""),
        ("rate", f"{interval(snapshot.rate)}{nominal}" if snapshot.rate.n_problems else ""),
        ("accuracy", interval(snapshot.accuracy) if snapshot.graded else ""),
        ("tokens", f"{share}; {speed}" if tokens["draft"] + tokens["target"] else ""),
        ("trouble", _trouble(snapshot)),
    ]
    return [(name, words) for name, words in rows if words]


def _models(snapshot: ProgressSnapshot) -> list[tuple[str, str]]:
    tokens, models = snapshot.tokens, snapshot.models
    if not models["draft"]:
        return []
    return [
        ("draft", f"{models['draft']}: {tokens['draft']:,} tokens"),
        ("target", f"{models['target']}: {tokens['target']:,} tokens, {tokens['scored']:,} scored"),
    ]


def _trouble(snapshot: ProgressSnapshot) -> str:
    parts = [
        f"{snapshot.alarms} drift alarms" if snapshot.alarms else "",
        f"{snapshot.failed_calls:,} calls failed" if snapshot.failed_calls else "",
    ]
    return ", ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(4.2), duration(75), duration(7300)
    ('4 s', '1:15', '2:01:40')
    """
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{whole} s"
