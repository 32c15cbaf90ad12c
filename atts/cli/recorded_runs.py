"""The commands that show, merge, repair, import and export recorded runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from atts.cli.options import Json, ObjectJson, RunDirectory, named_values
from atts.cli.terminal import hand_out, json_line, print_json, print_result, say, tell
from atts.errors import CheckFailed, JournalCorrupt, JournalError, OptionError, counted
from atts.interrupts import run_async

if TYPE_CHECKING:
    from atts.analysis import BuiltReport, Exported, RunLine
    from atts.importers import Imported
    from atts.journal import JournalCheck


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run directories, or folders that contain run directories.",
            show_default="runs",
            metavar="[FOLDER]...",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run.")] = False,
) -> None:
    """List runs by age, the newest last: status, problems, accuracy, rate, tokens, method and
    models.

    If a run's journal cannot be read, the list shows the reason.

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
    partly = ""
    if any(line.standing not in ("finished", None) for line in listed):
        partly = " Tokens are those of finished problems."
    yield f"{counted(len(listed), 'run')}. Brackets are 95 % intervals over problems.{partly}"


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
        str,
        typer.Option(
            help="Format of the report: html (a page with charts), markdown (a short text) or "
            "json (all numbers)."
        ),
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write the report to; - is stdout. By default report.html, report.md or "
            "report.json in the run directory."
        ),
    ] = None,
    compare_to: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of another run to compare with in the report; repeatable."),
    ] = None,
    following: Annotated[
        bool,
        typer.Option(
            "--follow", help="Write the report again every few seconds until the run ends."
        ),
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
    """Write a report of a finished or unfinished run as one HTML file, as Markdown or as JSON.

    The file is replaced atomically, so a reader never sees an incomplete report.

    Example: atts report runs/first --compare-to runs/target-only

    Example: atts report runs/first --follow
    """
    from atts.analysis import FORMATS, as_format, build_report, render, save_report

    named = as_format(format, FORMATS)
    if every is not None and not (following and 0 < every <= _DAY):
        raise OptionError(
            "--every",
            f"{every:g} is out of range; with --follow, the interval must be more than 0 seconds "
            "and at most one day",
        )
    if out is not None and str(out) == "-":
        if following:
            raise OptionError(
                "--follow",
                "--follow rewrites its report, which is not possible on standard output; name "
                "a file with --out",
            )
        hand_out(render(build_report(directory, compare_to or ()), named))
        return

    def write() -> tuple[BuiltReport, Path]:
        built = build_report(directory, compare_to or ())
        return built, save_report(built, named, out)

    if following:
        tell(
            "atts: updating the report until the run ends; Ctrl-C stops the updates, but not "
            "the run"
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
    """Call `write` now, each time the journal has grown, and once more when the run has ended.
    Return the last result.

    During the run, successful calls are at least `every` seconds apart. A journal line that is
    still being written looks damaged, so damage is reported only after the run has ended.

    :raises JournalError: there is no run, or the run is over and its journal cannot be read.
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
            journal.parent,
            "there is no run here",
            "Give the run directory, as passed to `atts eval --out`",
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

    In the trace, each engine is shown as a process, with one thread for each slot of the engine.
    Another process shows the rollouts and their waiting times.

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
        tell("Open this file at https://ui.perfetto.dev or chrome://tracing.")


CALIBRATOR = "calibrator.json"


def merge(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Run directories of the shards (as passed to `atts eval --out`)."),
    ],
    out: Annotated[Path, typer.Option(help="New directory for the merged run.")],
    as_json: Json = False,
) -> None:
    """Merge the shards of an evaluation into one run.

    `atts report`, `compare`, `replay` and `trace` read the merged run like any other run. If the
    gate does not learn from scores, the merged run equals a run by a single process. A gate that
    learns has learnt only from the scores of its own shard. The merged calibrator is saved as
    calibrator.json in the run directory.

    Example: atts merge runs/part-1 runs/part-2 runs/part-3 --out runs/whole
    """
    from atts.api import calibrator_of
    from atts.api import merge as merge_runs
    from atts.errors import CalibrationInputError, OptionError

    if str(out) == "-":
        raise OptionError("--out", "'-' is not a directory; name a directory for the merged run")
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
    problems, runs = counted(made.problems, "problem"), counted(len(made.parts), "run")
    tell(f"Merged {problems} of {runs}. Next: atts report {out}")
    if facts["calibrator"] is None:
        tell(f"No calibrator was merged: {facts['why']}")
    else:
        tell(f"Merged calibrator of the runs: {facts['calibrator']}")


journal_app = typer.Typer(no_args_is_help=True)


@journal_app.command()
def check(run: RunDirectory, as_json: Json = False) -> None:
    """Read every line of a run's journal, and fail (exit code 5) if a line is damaged, missing or
    repeated.

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
        Path,
        typer.Option(help="New directory for a copy of the undamaged part.", metavar="DIRECTORY"),
    ],
    as_json: Json = False,
) -> None:
    """Copy everything before the first damaged line into a new directory.

    The damaged run is not changed. To continue the run, repeat its command with --out set to the
    new directory; the work after the damage is done again.

    Example: atts journal salvage runs/first --out runs/saved
    """
    from atts.journal import salvage as save

    saved = save(run, out)
    print_result(
        {**saved.as_json(), "out": str(out)},
        as_json,
        lambda _: [
            *_journal_lines(saved),
            f"Saved in {out}. To continue the run, repeat its command with --out {out}",
        ],
    )


def _journal_lines(checked: JournalCheck) -> list[str]:
    """Return lines that describe a checked journal: its directory, its lines, its problems and its
    damage.
    """
    after = "damaged" if checked.damage else "an incomplete last line"
    lines = counted(checked.lines, "undamaged line")
    return [
        f"{checked.directory}: {lines} of {counted(checked.sessions, 'session')}; "
        f"{counted(checked.complete, 'problem')} complete, {checked.open:,} unfinished",
        *([f"the {checked.lost:,} bytes after these lines are {after}"] if checked.lost else []),
    ]


def import_run(
    format: Annotated[
        str,
        typer.Argument(
            help="Format of the files, named after the tool that wrote them: inspect (Inspect "
            "AI), lm-eval (lm-evaluation-harness), nemo-skills, matharena, "
            "monkey-business, deepconf, or jsonl (JSON Lines of any tool, read with "
            "--column)."
        ),
    ],
    path: Annotated[Path, typer.Argument(help="File to import, or directory with such files.")],
    out: Annotated[Path, typer.Option(help="Directory for the run.", metavar="DIRECTORY")],
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="With jsonl: column that contains a field. text=output reads the texts from "
            "the column output, and score.reward=rm reads a score from the column rm; "
            "repeatable.",
            metavar="FIELD=COLUMN",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Dataset with the same questions; the dataset's ids and reference answers "
            "replace those of the files."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Import only rollouts written by this model.")
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            help="With lm-eval: import only the answers that this filter of lm-eval extracted."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Name of the recorded score that decides whether an answer is correct.",
            show_default="the first",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of the answers: math (numbers and formulas), choice (the letter of a "
            "choice), text (words).",
            show_default="choice if the questions have choices, otherwise math",
        ),
    ] = None,
    grades: Annotated[
        str,
        typer.Option(
            help="Source of the verdicts: recorded (those of the other tool; atts grades only "
            "answers without a verdict), again (atts grades every answer)."
        ),
    ] = "recorded",
    as_json: ObjectJson = False,
) -> None:
    """Import the rollouts in another tool's files as a run.

    `atts report`, `compare`, `replay`, `plan` and `export` read the run like any other run. If the
    tool did not extract an answer or did not grade a rollout, atts does so. The same command
    continues an interrupted import.

    Example: atts import nemo-skills results/aime25 --out runs/theirs --dataset aime25

    Example: atts import jsonl samples.jsonl --out runs/mine --column question=prompt --column
    text=completion
    """
    from typing import get_args

    from atts.core import AnswerKind
    from atts.errors import OptionError
    from atts.evaluators import load_dataset
    from atts.importers import FORMATS, ImportOptions, check_format, check_out, import_rollouts

    chosen = check_format(format, FORMATS)
    check_out(out)
    if kind is not None and kind not in get_args(AnswerKind):
        raise OptionError("--kind", f"{kind!r} is unknown", get_args(AnswerKind))
    # typed `Any`, because `ImportOptions` checks whether these are allowed values
    words: Any = {"kind": kind, "grades": grades}
    options = ImportOptions(
        columns=named_values(column or (), "--column", "FIELD=COLUMN"),
        metric=metric or "",
        model=model or "",
        filter=filter or "",
        known=tuple(load_dataset(dataset)) if dataset else (),
        known_as=dataset or "",
        **words,
    )
    made = run_async(lambda: import_rollouts(chosen, path, out, options))
    print_result(made.as_json(), as_json, lambda _: _lines(made))
    if not as_json:
        tell(f"Next: atts report {out}; atts replay {out} --rules all")


def _lines(made: Imported) -> Iterator[str]:
    """Yield lines that describe the imported rollouts, and lines on facts that the files do not
    contain.
    """
    yield str(made.directory)
    yield (
        f"{counted(made.rollouts, 'rollout')} of {counted(made.problems, 'problem')}, up to "
        f"{made.most_rollouts:,} per problem, from {counted(made.files, 'file')} in the format "
        f"{made.format}{f' ({made.model})' if made.model else ''}"
    )
    if made.already:
        yield f"skipped, because already imported: {counted(made.already, 'problem')}"
    parts = {
        "answers": made.with_answer,
        "verdicts": made.graded,
        "tokens": made.with_tokens,
        "seconds": made.with_seconds,
        "costs": made.with_dollars,
    }
    known = [f"{name} of {counted(count, 'rollout')}" for name, count in parts.items() if count]
    yield f"the tool recorded: {', '.join(known) if known else 'only texts'}"
    if made.scores:
        yield f"scores: {', '.join(made.scores)}"
    if made.dollars:
        yield f"cost: ${made.dollars:,.4f}"
    if not made.referenced and not made.graded:
        yield (
            "no answer could be graded, because the files have no reference answers; "
            "name a dataset with --dataset"
        )
    if made.unknown:
        yield (
            "not in the dataset, so the ids of the files are kept: "
            f"{counted(made.unknown, 'problem')}"
        )


def export(
    directory: RunDirectory,
    kind: Annotated[
        str,
        typer.Option(
            "--as",
            help="Kind of the training data: opd (token ids with the log-probabilities of "
            "both models, for on-policy distillation), sft (prompts with solutions, for "
            "supervised fine-tuning), preference (pairs of a correct and a wrong "
            "solution), verifiers (rollouts with rewards, in the format of the library "
            "verifiers).",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write the records to; its name ends in .jsonl or .parquet.",
            metavar="FILE",
        ),
    ],
    keep: Annotated[
        str | None,
        typer.Option(
            help="Rollouts to export: correct (those with a correct answer), answered (those "
            "with any answer), all.",
            show_default="correct for sft, all for other kinds",
        ),
    ] = None,
    pairs: Annotated[
        int, typer.Option(help="With --as preference: largest number of pairs per problem.")
    ] = 4,
    seed: Annotated[
        int, typer.Option(help="With --as preference: random seed for choosing the pairs.")
    ] = 0,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="With --as opd: model that computes the most likely tokens at each position of "
            "a rollout, usually the target of the run. Formats: embedded:target, hf:MODEL "
            "or vllm:URL.",
            metavar="MODEL",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            help="With --teacher: how many of the most likely tokens to write for each position."
        ),
    ] = 20,
    as_json: ObjectJson = False,
) -> None:
    """Write a run's rollouts as training data.

    Each record names its schema and version, such as atts.opd/2, and the models that wrote the
    rollout. The file is replaced atomically. Parquet needs the extra `parquet`.

    Example: atts export runs/first --as opd --out distil.jsonl

    Example: atts export runs/first --as opd --out distil.jsonl --teacher embedded:target

    Example: atts export runs/theirs --as preference --out pairs.parquet --pairs 2
    """
    from atts.analysis import ExportOptions, export_run
    from atts.api import open_teacher
    from atts.journal import open_run

    # typed `Any`, because `ExportOptions` checks whether these are allowed values
    words: Any = {"kind": kind, "keep": keep}
    options = ExportOptions(pairs=pairs, seed=seed, **words)
    run = open_run(directory)
    if teacher is None:
        made = export_run(run, out, options)
    else:
        with open_teacher(teacher, top) as opened:
            made = export_run(run, out, options, opened)
    print_result(made.as_json(), as_json, lambda _: _export_lines(made))


def _export_lines(made: Exported) -> Iterator[str]:
    """Yield lines on the records that were written, and on the rollouts that were left out."""
    yield str(made.path)
    trained = f", {made.trained_tokens:,} tokens to train on" if made.kind == "opd" else ""
    records = counted(made.records, "record")
    yield f"{records} of kind {made.kind} from {counted(made.problems, 'problem')}{trained}"
    for reason, count in made.skipped.items():
        yield f"left out: {counted(count, 'rollout')} ({reason})"
