"""The live progress of a run: a table on a terminal, plain lines elsewhere, and `progress.json`."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import anyio

from atts import concurrency
from atts.cli.terminal import json_line, sanitized
from atts.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from atts.core import Role
    from atts.run import Progress, ProgressSnapshot

FILE = "progress.json"
REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0
LOADING_SECONDS = 1.0
FILE_SECONDS = 1.0
_BAR = 28


@asynccontextmanager
async def progress_display(
    progress: Progress, stream: TextIO | None = None
) -> AsyncGenerator[None, None]:
    """Show the progress of a run on `stream` (by default stderr) during the block, and at its end.

    As soon as the run has a directory, `progress.json` in the directory is replaced atomically
    every second.
    """
    with _display(progress, sys.stderr if stream is None else stream) as refresh:
        async with concurrency.background(_follow, refresh, progress):
            yield
        progress.over()
        refresh()
        save(progress.snapshot())


async def _follow(refresh: Callable[[], None], progress: Progress) -> None:
    saved = -math.inf
    while True:
        refresh()
        await anyio.sleep(REFRESH_SECONDS)
        if anyio.current_time() - saved >= FILE_SECONDS:
            saved = anyio.current_time()
            save(progress.snapshot())


def save(snapshot: ProgressSnapshot) -> None:
    """Replace `progress.json` in the run directory atomically, so a reader never sees an incomplete
    file.

    :raises StorageError: the file cannot be written.
    """
    from atts.files import write_atomic

    if snapshot.directory is None or not snapshot.directory.is_dir():
        return
    text = json_line(snapshot.as_json()) + "\n"
    write_atomic(snapshot.directory / FILE, text.encode(), durable=False)


@contextmanager
def _display(progress: Progress, stream: TextIO) -> Generator[Callable[[], None]]:
    """Yield a function that shows the current progress, as a redrawn table or as plain lines."""
    if not stream.isatty():
        yield PlainLines(progress, stream).refresh
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, highlight=False)
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield partial(_redraw, live, progress, list[str]())


def _redraw(live: Live, progress: Progress, printed: list[str]) -> None:
    """Draw the table of the current progress, and print new warnings above the table."""
    for text in progress.warnings[len(printed) :]:
        live.console.print(sanitized(f"atts: {text}"), markup=False)
        printed.append(text)
    live.update(table(progress.snapshot()), refresh=True)


@dataclass(slots=True)
class PlainLines:
    """A display that prints one line of progress every few seconds, and at once if the run's state
    changes.
    """

    progress: Progress
    stream: TextIO
    next: float = LINE_SECONDS
    state: str = ""
    num_warned: int = 0  # number of warnings of the run that have been printed

    def refresh(self) -> None:
        """Print a line of progress if enough seconds have passed or the run's state has changed."""
        for text in self.progress.warnings[self.num_warned :]:
            print(sanitized(f"atts: {text}"), file=self.stream, flush=True)
        self.num_warned = len(self.progress.warnings)
        snapshot = self.progress.snapshot()
        is_new = snapshot.state != self.state
        self.state = snapshot.state
        if is_new and self.state in ("loading", "running"):
            # Wait before the first line, so that a short run prints only its last line.
            wait = LOADING_SECONDS if self.state == "loading" else LINE_SECONDS
            self.next = snapshot.seconds + wait
        elif is_new or snapshot.seconds >= self.next:
            self.next = snapshot.seconds + LINE_SECONDS
            print(sanitized(line(snapshot)), file=self.stream, flush=True)


def line(snapshot: ProgressSnapshot) -> str:
    """Return the progress of the run as one line of text."""
    if snapshot.state == "loading":
        return f"{snapshot.note}; {duration(snapshot.seconds)}"
    parts = [_problems(snapshot), *(f"{name} {words}" for name, words in _facts(snapshot))]
    time = duration(snapshot.seconds)
    if snapshot.left:
        time += f", about {duration(snapshot.left)} left"
    if snapshot.state == "draining":
        parts.insert(0, "stopping: waiting for the calls in flight, to save their results")
    elif snapshot.state == "over":
        parts.insert(0, "ended")
    return "; ".join([*parts, time])


def table(snapshot: ProgressSnapshot) -> RenderableType:
    """Return the progress of the run as a table for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if snapshot.state == "loading":
        return Text(line(snapshot), style="dim")

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("problems", _bar(snapshot))
    for name, words in (*_facts(snapshot), *_models(snapshot)):
        # A model's name may look like rich's markup, for example "[/]". `Text` prints it unchanged.
        rows.add_row(name, Text(sanitized(words)))
    parts: list[Any] = [rows]
    if snapshot.note and snapshot.state != "over":
        parts.append(Text(sanitized(snapshot.note), style="bold yellow"))
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
    words = counted(snapshot.done, "problem")
    if snapshot.problems is not None:
        words = f"{snapshot.done:,}/{counted(snapshot.problems, 'problem')}"
    if snapshot.failed:
        words += f", {snapshot.failed} not complete"
    return words


def _facts(snapshot: ProgressSnapshot) -> list[tuple[str, str]]:
    """Return the name and the text of each row below the table's first row; empty rows are left
    out.
    """
    tokens = snapshot.tokens
    speeds = snapshot.speeds
    at = snapshot.stages
    chunks = f"{snapshot.accepted:,} accepted, {snapshot.escalated:,} escalated"
    if snapshot.forced:
        chunks += f" ({snapshot.forced:,} without a score)"
    if snapshot.rejected:
        chunks += f", {snapshot.rejected:,} discarded"
    nominal = "" if snapshot.nominal is None else f", nominal {snapshot.nominal:g}"
    busy = (
        f"{at['draft']} drafting, {at['score']} being scored, {at['target']} being written by the "
        f"target, {at['wait']} waiting, {snapshot.rollouts_done:,} ended"
    )
    share = f"{100 * snapshot.target_share:.1f} % written by the target"
    speed = (
        f"draft {speeds['draft']:,.0f}/s, target {speeds['target']:,.0f}/s, scored "
        f"{speeds['scored']:,.0f}/s"
    )
    rows = [
        ("rollouts", busy if snapshot.state != "over" else f"{snapshot.rollouts_done:,} ended"),
        (snapshot.judged_unit, chunks if snapshot.accepted + snapshot.escalated else ""),
        # All finished chunks are counted, not a sample of them. So the rate has no confidence
        # interval.
        ("rate", f"{snapshot.rate.value:.3f}{nominal}" if snapshot.rate.n_samples else ""),
        ("accuracy", snapshot.accuracy.brief() if snapshot.graded else ""),
        ("tokens", f"{share}; {speed}" if tokens["draft"] + tokens["target"] else ""),
        ("waiting", _waiting(snapshot)),
        ("trouble", _trouble(snapshot)),
    ]
    return [(name, words) for name, words in rows if words]


def _models(snapshot: ProgressSnapshot) -> list[tuple[str, str]]:
    tokens = snapshot.tokens
    models = snapshot.models
    rows: list[tuple[Role, str]] = [
        ("draft", f"{models['draft']}: {tokens['draft']:,} tokens"),
        ("target", f"{models['target']}: {tokens['target']:,} tokens, {tokens['scored']:,} scored"),
    ]
    return [(role, words) for role, words in rows if models[role]]


def _waiting(snapshot: ProgressSnapshot) -> str:
    words = (
        f"{counted(count, 'call')}, until the lost {role} server answers again"
        for role, count in snapshot.awaited.items()
    )
    return ", ".join(words)


def _trouble(snapshot: ProgressSnapshot) -> str:
    counts = (
        (snapshot.alarms, "drift alarm", ""),
        (snapshot.failed_calls, "call", " failed"),
        (snapshot.lost, "rollout", " failed"),
    )
    return ", ".join(counted(count, noun) + what for count, noun, what in counts if count)


def duration(seconds: float) -> str:
    """Return a duration as a readable string.

    >>> duration(4.2), duration(75), duration(7300)
    ('4 s', '1:15', '2:01:40')
    """
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{whole} s"
