"""The commands that show, merge and repair recorded runs: runs, report, trace, merge, journal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from atts.cli.options import Json, RunDirectory
from atts.cli.terminal import hand_out, json_line, print_json, print_result, say, tell
from atts.errors import CheckFailed, JournalCorrupt, JournalError, OptionError

if TYPE_CHECKING:
    from atts.analysis import BuiltReport, RunLine
    from atts.journal import JournalCheck


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of runs, or run directories.", show_default="runs", metavar="[FOLDER]..."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run.")] = False,
) -> None:
    """List runs, the latest last: status, problems, accuracy, rate, tokens, method and models.

    A run whose journal cannot be read is listed with the reason.

    Example: atts runs; atts runs runs/sweep-1 --json
    """
    from dataclasses import asdict

    from atts.analysis import list_runs

    named = folders or [Path("runs")]
    listed = list_runs(named)
    if as_json:
        for line in listed:
            say(json_line(asdict(line)))
    elif listed:
        say("\n".join(_table(listed)))
    if not listed:
        tell(f"atts: no run in {', '.join(map(str, named))}; `atts eval` creates one")


def _table(listed: Sequence[RunLine]) -> Iterator[str]:
    wide = max(len("run"), *(len(line.directory) for line in listed))
    yield (
        f"{'run':<{wide}}  {'begun':<16}  {'status':<11}  {'problems':>11}  {'accuracy':<20}  "
        f"{'rate':>5}  "
        f"{'target tokens':>13}  {'method':<12}  models"
    )
    for line in listed:
        yield _row(line, wide).rstrip()
    yield f"{len(listed)} run{'s' * (len(listed) != 1)}. Brackets are 95 % intervals over problems."


def _row(line: RunLine, wide: int) -> str:
    when = datetime.fromtimestamp(line.begun).strftime("%Y-%m-%d %H:%M") if line.begun else ""
    if line.standing is None or line.accuracy is None or line.rate is None:
        return f"{line.directory:<{wide}}  {when:<16}  {'unreadable':<11}  {line.problem}"
    of = "?" if line.problems is None else f"{line.problems:,}"
    rate = line.rate.value
    return (
        f"{line.directory:<{wide}}  {when:<16}  {line.standing:<11}  {f'{line.done:,}/{of}':>11}  "
        f"{line.accuracy.brief('-'):<20}  {'-' if rate != rate else f'{rate:.3f}':>5}  "
        f"{line.target_tokens:>13,}  "
        f"{line.method:<12}  {line.models}"
    )


_DAY = 86_400.0


def report(
    directory: RunDirectory,
    format: Annotated[
        str, typer.Option(help="Format of the report: html, markdown or json.")
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; - is stdout. By default report.html, .md or .json in the run directory."
        ),
    ] = None,
    compare_to: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with; repeatable.")
    ] = None,
    following: Annotated[
        bool,
        typer.Option("--follow", help="Update the report until the run ends."),
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(help="With --follow: seconds between two reports.", show_default="10"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object: the path of the report, and its verdict."
        ),
    ] = (False),
) -> None:
    """Write the report of a run, finished or not, as one HTML file, as Markdown or as JSON.

    The file is replaced atomically, so a reader never sees half of it.

    Example: atts report runs/first --compare-to runs/target-only

    Example: atts report runs/first --follow
    """
    from atts.analysis import FORMATS, as_format, build_report, render, save_report

    named = as_format(format, FORMATS)
    if every is not None and not (following and 0 < every <= _DAY):
        raise OptionError(
            "--every",
            f"{every:g} is not possible; give seconds, at most a day, together with --follow",
        )
    if out is not None and str(out) == "-":
        if following:
            raise OptionError(
                "--follow", "standard output cannot be written twice; name a file with --out"
            )
        hand_out(render(build_report(directory, compare_to or ()), named))
        return

    def write() -> tuple[BuiltReport, Path]:
        built = build_report(directory, compare_to or ())
        return built, save_report(built, named, out)

    if following:
        tell(
            "atts: the report is written again until the run ends; Ctrl-C stops the reports, "
            "not the run"
        )
        built, path = follow(directory, write, EVERY_SECONDS if every is None else every)
    else:
        built, path = write()
    verdict = built.report.verdict
    sentence = built.report.headline.sentence
    if as_json:
        print_json(
            {
                "report": str(path),
                "standing": verdict.standing,
                "sentence": sentence,
                "verdict": verdict.line,
            }
        )
    else:
        say(path)
        tell(sentence)
        tell(verdict.line)


T = TypeVar("T")
EVERY_SECONDS = 10.0
LOOK_SECONDS = 0.5


def follow(
    directory: Path,
    write: Callable[[], T],
    every: float = EVERY_SECONDS,
    wait: Callable[[float], None] = time.sleep,
) -> T:
    """Call `write` now, then repeatedly while the run continues, and once when it has ended.

    Return the result of the last call. A line that is read while it is being written looks damaged,
    so the journal is then read again.

    :raises JournalError: there is no run, or it is over and cannot be read.
    """
    from atts.analysis import is_running
    from atts.journal import JOURNAL

    left = 0.0
    seen = -1
    while True:
        goes_on = is_running(directory)
        size = _size(directory / JOURNAL)
        if not goes_on:
            return write()
        if size != seen and left <= 0:
            with suppress(JournalCorrupt):
                write()
                left = every
                seen = size
        wait(LOOK_SECONDS)
        left -= LOOK_SECONDS


def _size(journal: Path) -> int:
    try:
        return journal.stat().st_size
    except OSError as error:
        raise JournalError(
            journal.parent, "there is no run here", "Give the directory of `atts eval --out`"
        ) from error


def trace(
    directory: RunDirectory,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; - is stdout.", show_default="trace.json in the run"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's engine calls as a trace for https://ui.perfetto.dev or chrome://tracing.

    In the trace each engine is a process whose threads are its slots; another process shows the
    rollouts and their waiting times.

    Example: atts trace runs/first
    """
    if out is not None and str(out) == "-":
        from atts.graph import write_trace
        from atts.journal import open_run

        write_trace(list(open_run(directory).nodes()), sys.stdout)
        return
    from atts.api import trace as write

    path = write(directory, out)
    say(json_line({"trace": str(path), "bytes": path.stat().st_size}) if as_json else path)
    if not as_json:
        tell("Open it at https://ui.perfetto.dev or chrome://tracing.")


CALIBRATOR = "calibrator.json"


def merge(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Run directories of the shards, as given to `atts eval --out`."),
    ],
    out: Annotated[Path, typer.Option(help="New directory for the merged run.")],
    as_json: Json = False,
) -> None:
    """Merge the shards of an evaluation into one run.

    `atts report`, `compare`, `replay` and `trace` read it like any other run. With a gate that
    learns nothing the result equals that of a single process. A gate that learns has learnt from
    its shard only; the merged calibrator is saved in the run as calibrator.json.

    Example: atts merge runs/part-1 runs/part-2 runs/part-3 --out runs/whole
    """
    from atts.api import calibrator_of
    from atts.api import merge as merge_runs
    from atts.errors import CalibrationInputError, OptionError

    if str(out) == "-":
        raise OptionError("--out", "'-' is not a directory; name one for the run")
    made = merge_runs(directories, out)
    facts: dict[str, object] = {
        "run": str(out),
        "runs": len(made.parts),
        "problems": made.problems,
        "calibrator": None,
    }
    try:
        calibrator = calibrator_of(out)
    except CalibrationInputError as none:
        facts["why"] = str(none)
    else:
        calibrator.save(out / CALIBRATOR)
        facts |= {"calibrator": str(out / CALIBRATOR), "decisions": calibrator.decided}
        facts |= {"escalated": calibrator.escalated, "guarantee": calibrator.guarantee}
    if as_json:
        print_json(facts)
        return
    say(out)
    tell(f"{made.problems} problems of {len(made.parts)} runs. Next: atts report {out}")
    if facts["calibrator"] is None:
        tell(f"No calibrator: {facts['why']}")
    else:
        tell(f"Their merged calibrator: {facts['calibrator']}")


journal_app = typer.Typer(no_args_is_help=True)


@journal_app.command()
def check(run: RunDirectory, as_json: Json = False) -> None:
    """Read every line of a run, and fail (exit code 5) if a line is damaged, missing or repeated.

    Example: atts journal check runs/first
    """
    from atts.journal import check_journal

    result = check_journal(run)
    print_result(result.as_json(), as_json, lambda _: _journal_lines(result))
    if result.damage:
        raise CheckFailed(result.damage)


@journal_app.command()
def salvage(
    run: RunDirectory,
    out: Annotated[
        Path, typer.Option(help="New directory for the saved part.", metavar="DIRECTORY")
    ],
    as_json: Json = False,
) -> None:
    """Copy everything before the first damaged line into a new directory.

    The damaged run does not change. The command of the run with --out set to the new directory
    continues there, and repeats the work after the damage.

    Example: atts journal salvage runs/first --out runs/saved
    """
    from atts.journal import salvage as save

    saved = save(run, out)
    print_result(
        {**saved.as_json(), "out": str(out)},
        as_json,
        lambda _: [
            *_journal_lines(saved),
            f"Saved in {out}: run the same command with --out {out}",
        ],
    )


def _journal_lines(checked: JournalCheck) -> list[str]:
    """Return lines for people on the journal that was read."""
    after = "damaged" if checked.damage else "a torn last line"
    sessions = "1 session" if checked.sessions == 1 else f"{checked.sessions:,} sessions"
    return [
        f"{checked.directory}: {checked.lines:,} whole lines of {sessions}; "
        f"{checked.complete:,} {'problem' if checked.complete == 1 else 'problems'} complete, {checked.open:,} open",
        *([f"{checked.lost:,} bytes after them are {after}"] if checked.lost else []),
    ]
