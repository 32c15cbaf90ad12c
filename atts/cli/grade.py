"""`atts grade`: answers against references."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer

from atts.cli.output import print_json, print_result
from atts.cli.terminal import say
from atts.errors import DatasetError


def grade(
    file: Annotated[
        str,
        typer.Argument(help="A JSONL file of records with gold and answer or text; - is stdin."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One verdict per line, then a summary, as JSON.")
    ] = False,
    kind: Annotated[
        Literal["math", "choice", "text"],
        typer.Option(help="Of answers whose record does not say."),
    ] = "math",
    fallback: Annotated[
        Literal["none", "statement", "number"],
        typer.Option(
            help="Without a box or mark: nothing, a value the last sentence states, or the last "
            "number."
        ),
    ] = "statement",
    relative: Annotated[
        float, typer.Option(help="By what share a number may differ from a decimal reference.")
    ] = 0.0,
    absolute: Annotated[
        float, typer.Option(help="By how much a number may differ from its reference.")
    ] = 0.0,
    units: Annotated[
        Literal["optional", "required"], typer.Option(help="May a unit be left out?")
    ] = "optional",
) -> None:
    """Grade answers against references: equal, different or unscored, with the rule that decided.

    Example: atts grade answers.jsonl --json

    Example: echo '{"gold": "1/2", "answer": "0.5"}' | atts grade -
    """
    from atts.core import Grading
    from atts.evaluators import GradeTally, json_lines
    from atts.evaluators import grade as graded

    tally = GradeTally()
    with _opened(file) as lines:
        records = (record for _, record in json_lines(lines, file))
        for each in graded(
            records,
            kind,
            fallback=fallback,
            grading=Grading(relative, absolute, units),
            source=file,
        ):
            tally.add(each)
            if as_json:
                print_json(each.as_json())
            else:
                detail = f" ({each.verdict.detail})" if each.verdict.detail else ""
                say(f"{each.id:<16}{each.verdict.status:<11}{each.verdict.rule}{detail}")
    summary = tally.as_json()
    print_result(summary, as_json, lambda counted: [_words(counted)])


def _opened(file: str) -> AbstractContextManager[IO[str]]:
    if file == "-":
        return nullcontext(sys.stdin)
    path = Path(file)
    if not path.is_file():
        raise DatasetError(file, "is not a file", "Give a JSONL file, or - for stdin")
    return path.open(encoding="utf-8", errors="replace")


def _words(summary: dict[str, Any]) -> str:
    if not summary["n"]:
        return "no records"
    low, high = summary["interval"]
    counts = ", ".join(
        f"{summary[name]} {name.replace('_', ' ')}" for name in _COUNTS if summary[name]
    )
    return f"{summary['n']} records: {counts}; equal {summary['accuracy']:.4g} [{low:.4g}, {high:.4g}] (95 % Wilson)"


_COUNTS = ("equal", "different", "unscored", "no_answer", "cut")
