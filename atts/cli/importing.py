"""The commands that import and export rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import ObjectJson, RunDirectory, named_values
from atts.cli.terminal import print_result, tell
from atts.interrupts import run_async

if TYPE_CHECKING:
    from atts.analysis import Exported
    from atts.importers import Imported


def import_run(
    format: Annotated[
        str,
        typer.Argument(
            help="Format of the files: inspect, lm-eval, nemo-skills, matharena, "
            "monkey-business, deepconf or jsonl."
        ),
    ],
    path: Annotated[Path, typer.Argument(help="File, or directory of files, of that format.")],
    out: Annotated[Path, typer.Option(help="Directory for the run.", metavar="DIRECTORY")],
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="With jsonl: column of a field, such as text=output or score.reward=rm; repeatable.",
            metavar="FIELD=COLUMN",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Dataset whose ids and references replace those of the files for equal questions."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Import only the rollouts of this model.")
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(help="With lm-eval: import only the answers of this filter."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Score that says whether an answer is correct.", show_default="the first"
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of the answers: math, choice or text.",
            show_default="choice if there are choices, else math",
        ),
    ] = None,
    grades: Annotated[
        str,
        typer.Option(
            help="Verdicts: `recorded` by the other tool if there are any, or `again` by atts."
        ),
    ] = "recorded",
    as_json: ObjectJson = False,
) -> None:
    """Import the rollouts in another tool's files as a run.

    `atts report`, `compare`, `replay`, `plan` and `export` read the run like one of atts. Answers
    that the tool did not extract are extracted here, and rollouts that it did not grade are graded
    here. An import that was interrupted continues with the same command.

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
    words: Any = {"kind": kind, "grades": grades}  # the options check this again
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


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, which is plural unless there is one."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _lines(made: Imported) -> Iterator[str]:
    """Yield lines on what was imported, and what is unknown."""
    yield str(made.directory)
    yield (
        f"{_count(made.rollouts, 'rollout')} of {_count(made.problems, 'problem')}, up to "
        f"{made.most_rollouts:,} each, from {_count(made.files, 'file')} of {made.format}"
        f"{f' ({made.model})' if made.model else ''}"
    )
    if made.already:
        yield f"imported before: {_count(made.already, 'problem')}"
    parts = {
        "answers": made.with_answer,
        "verdicts": made.graded,
        "tokens": made.with_tokens,
        "seconds": made.with_seconds,
        "costs": made.with_dollars,
    }
    known = [f"{name} of {count:,}" for name, count in parts.items() if count]
    yield f"recorded by the tool: {', '.join(known) if known else 'texts only'}"
    if made.scores:
        yield f"scores: {', '.join(made.scores)}"
    if made.dollars:
        yield f"cost: ${made.dollars:,.4f}"
    if not made.referenced and not made.graded:
        yield "nothing could be graded: the files have no references; name a dataset with --dataset"
    if made.unknown:
        yield (
            "not in the dataset, so they keep the ids of the files: "
            f"{_count(made.unknown, 'problem')}"
        )


def export(
    directory: RunDirectory,
    kind: Annotated[
        str,
        typer.Option(
            "--as",
            help="opd (token ids with both models' log-probabilities), sft, preference or verifiers.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl or .parquet.", metavar="FILE")],
    keep: Annotated[
        str | None,
        typer.Option(
            help="Rollouts to export: correct, answered or all.",
            show_default="correct as sft, else all",
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(help="With --as preference: most pairs per problem.")] = 4,
    seed: Annotated[
        int, typer.Option(help="With --as preference: random seed of the choice of pairs.")
    ] = 0,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="With --as opd: model that reads each rollout again, usually the run's target: "
            "embedded:target, hf:MODEL or vllm:URL.",
            metavar="MODEL",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            help="With --teacher: number of most likely tokens to write at each position."
        ),
    ] = 20,
    as_json: ObjectJson = False,
) -> None:
    """Write a run's rollouts as training data.

    Each record names its schema and version, such as atts.opd/2, and the models that wrote it. The
    file is replaced atomically. Parquet needs the extra `parquet`.

    Example: atts export runs/first --as opd --out distil.jsonl

    Example: atts export runs/first --as opd --out distil.jsonl --teacher embedded:target

    Example: atts export runs/theirs --as preference --out pairs.parquet --pairs 2
    """
    from atts.analysis import ExportOptions, export_run
    from atts.api import open_teacher
    from atts.journal import open_run

    words: Any = {"kind": kind, "keep": keep}  # checked there
    options = ExportOptions(pairs=pairs, seed=seed, **words)
    run = open_run(directory)
    if teacher is None:
        made = export_run(run, out, options)
    else:
        with open_teacher(teacher, top) as opened:
            made = export_run(run, out, options, opened)
    print_result(made.as_json(), as_json, lambda _: _export_lines(made))


def _export_lines(made: Exported) -> Iterator[str]:
    """Yield lines on what was written, and on rollouts that were left out."""
    yield str(made.path)
    trained = f", {made.trained_tokens:,} tokens to train on" if made.kind == "opd" else ""
    records = _count(made.records, "record")
    yield f"{records} of {_count(made.problems, 'problem')} as {made.kind}{trained}"
    for reason, count in made.skipped.items():
        yield f"left out: {_count(count, 'rollout')} ({reason})"
