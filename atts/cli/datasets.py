"""The commands `atts datasets`, which shows problems, and `atts grade`, which grades answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from atts.cli.options import Json, named_values
from atts.cli.terminal import print_json, print_result, say, tell
from atts.errors import DatasetError, OptionError, counted

if TYPE_CHECKING:
    from atts.core import Problem
    from atts.evaluators import BadRecord, Benchmark, Dataset, GradedRecord


datasets_app = typer.Typer(invoke_without_command=True)

Cache = Annotated[
    Path | None,
    typer.Option(help="Cache folder of the Hugging Face hub, if it is not the default one."),
]


@datasets_app.callback()
def datasets(context: typer.Context, as_json: Json = False) -> None:
    """List datasets, or show the problems of a dataset.

    Example: atts datasets; atts datasets show "math500[:3]"; atts datasets show mine.csv --column
    text=Question
    """
    if context.invoked_subcommand is None:
        list_datasets(as_json)


@datasets_app.command("list")
def list_datasets(as_json: Json = False, cache: Cache = None) -> None:
    """List the benchmarks that atts knows by name, and which of them this machine has; use no
    network.

    Example: atts datasets list --json
    """
    from atts.evaluators import BENCHMARKS

    for benchmark in BENCHMARKS.values():
        facts = _facts(benchmark, cache)
        if as_json:
            print_json(facts)
        else:
            say(f"{benchmark.name:<14}{benchmark.size:>6}  {facts['here']:<11}{benchmark.title}")
    if not as_json:
        tell("A dataset can also be a file (.jsonl .json .csv .tsv .parquet) or hub:OWNER/NAME.")


@datasets_app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="Dataset: the name of a benchmark, a file, or hub:OWNER/NAME; [:5] after it "
            "selects the first 5 problems."
        ),
    ],
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print JSON: the dataset's source and digest on the first line, then one "
            "problem per line.",
        ),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Read the benchmark from this file instead of downloading it from the Hugging "
            "Face hub."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column that contains a field: text=Question reads each problem's text from "
            "the column Question; repeatable."
        ),
    ] = None,
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit of the dataset on the hub.")
    ] = "main",
    split: Annotated[
        str,
        typer.Option(
            help="Split to read, for generated problems and for hub datasets that atts does not "
            "know by name."
        ),
    ] = "test",
    config: Annotated[
        str,
        typer.Option(
            help="Configuration to read, for hub datasets that atts does not know by name."
        ),
    ] = "",
    level: Annotated[
        list[int] | None, typer.Option(help="Show only problems of this level; repeatable.")
    ] = None,
    subject: Annotated[
        list[str] | None, typer.Option(help="Show only problems of this subject; repeatable.")
    ] = None,
    identity: Annotated[
        list[str] | None,
        typer.Option("--id", help="Show only the problem with this id; repeatable."),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Show only a random sample of this many problems.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed for --sample, and for the order of the choices of multiple-choice "
            "problems."
        ),
    ] = 0,
    answers: Annotated[
        Literal["required", "optional"],
        typer.Option(
            help="Reference answers: required (a problem without one is an error), optional "
            "(problems may lack one)."
        ),
    ] = "required",
    network: Annotated[
        Literal["auto", "never"],
        typer.Option(
            help="Whether to download missing files: auto (yes), never (a missing file is an "
            "error)."
        ),
    ] = "auto",
    cache: Cache = None,
    limit: Annotated[
        int, typer.Option(help="Number of problems to print; --json prints all problems.")
    ] = 3,
) -> None:
    """Show the source of a dataset, its digest and its problems.

    Example: atts datasets show math500 --file math500.jsonl --level 5 --json
    """
    from atts.evaluators import LoadOptions, Selection, load_dataset

    dataset = load_dataset(
        name,
        Selection(tuple(identity or ()), tuple(level or ()), tuple(subject or ()), sample, seed),
        LoadOptions(
            columns=named_values(column or (), "column", "FIELD=COLUMN, such as text=Question"),
            file=file,
            revision=revision,
            split=split,
            config=config,
            answers=answers,
            seed=seed,
            network=network,
            cache=cache,
        ),
    )
    if as_json:
        _print_json(dataset)
    else:
        _print_words(dataset, limit)


def _facts(benchmark: Benchmark, cache: Path | None) -> dict[str, object]:
    from atts.evaluators import cached_snapshot

    copies = [hub.repo for hub in benchmark.hubs]
    cached = [
        hub.repo for hub in benchmark.hubs if cached_snapshot(hub.repo, "main", hub.files, cache)
    ]
    here = "built in"
    if cached:
        here = "cached"
    elif copies:
        here = "on the hub"
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        "problems": benchmark.size,
        "kind": benchmark.kind,
        "hub": copies,
        "cached": cached,
        "here": here,
        "quirks": {hub.repo: hub.quirk for hub in benchmark.hubs if hub.quirk},
        "note": benchmark.note,
    }


def _print_json(dataset: Dataset) -> None:
    record = {
        name: getattr(dataset, name) for name in ("name", "source", "revision", "digest", "notes")
    }
    print_json({"type": "dataset", **record, "problems": len(dataset)})
    for problem in dataset:
        print_json({"type": "problem", **asdict(problem)})


def _print_words(dataset: Dataset, limit: int) -> None:
    say(f"{dataset.name}: {counted(len(dataset), 'problem')}")
    say(f"  source    {dataset.source}")
    say(f"  revision  {dataset.revision}")
    say(f"  digest    {dataset.digest}")
    for note in dataset.notes:
        say(f"  note      {note}")
    for problem in dataset.problems[: max(0, limit)]:
        words = f"{_heading(problem)}\n{problem.text}\n→ {problem.answer or 'no reference answer'}"
        say(f"\n{words}")
    if len(dataset) > limit:
        tell(f"({len(dataset) - limit} more; --limit or --json shows them)")


def _heading(problem: Problem) -> str:
    facts = [f"level {problem.level}" if problem.level is not None else "", problem.subject]
    return " · ".join([problem.id, *filter(None, facts)])


def grade(
    file: Annotated[
        str,
        typer.Argument(
            help="JSONL file of records, or - for stdin. A record has the field gold (the "
            "reference), and one of the fields answer and text."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one verdict per line, then a summary.")
    ] = False,
    kind: Annotated[
        Literal["math", "choice", "text"],
        typer.Option(
            help="Kind of the answers, for records without the field kind: math (numbers and "
            "formulas), choice (the letter of a choice), text (words)."
        ),
    ] = "math",
    fallback: Annotated[
        Literal["none", "statement", "number"],
        typer.Option(
            help="How to find the answer in a text without \\boxed{} and without a mark such as "
            '"Answer: 5": none (the text has no answer), statement (a value stated in the last '
            "sentence), number (the last number)."
        ),
    ] = "statement",
    relative: Annotated[
        float,
        typer.Option(
            help="Relative tolerance for a number whose reference is a decimal number; 0.01 "
            "allows a difference of 1 %."
        ),
    ] = 0.0,
    absolute: Annotated[
        float,
        typer.Option(
            help="Absolute tolerance for a number; 0.5 allows a difference of 0.5 from the "
            "reference."
        ),
    ] = 0.0,
    units: Annotated[
        Literal["optional", "required"],
        typer.Option(
            help="Unit of an answer: optional (a unit may be missing or added), required (an "
            "answer must have a unit if and only if the reference has one)."
        ),
    ] = "optional",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Stop with an error at the first record that cannot be graded."
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Below each verdict, print the compared answers and the reason for the verdict.",
        ),
    ] = False,
    judge: Annotated[
        str,
        typer.Option(
            help="Model that judges answers which the grading rules cannot score, such as "
            "vllm:URL; same formats as --target of `atts eval`. Its verdicts are marked "
            "`judged`."
        ),
    ] = "",
    judge_prompt: Annotated[
        Path | None,
        typer.Option(
            help="File with the prompt for --judge; the prompt must contain {reference} and "
            "{answer}."
        ),
    ] = None,
) -> None:
    """Grade answers against references as equal, different or unscored, and name the rule behind
    each verdict.

    A record that cannot be graded is reported on stderr, and the other records are graded.

    Example: atts grade answers.jsonl --json

    Example: echo '{"gold": "1/2", "answer": "0.5"}' | atts grade -
    """
    from atts.core import Grading
    from atts.evaluators import BadRecord, GradeTally, grade_all, read_records

    if judge_prompt is not None and not judge:
        raise OptionError("--judge-prompt", "this option needs --judge")
    tally = GradeTally()
    with _opened(file) as lines:
        results = grade_all(
            read_records(lines, file),
            kind,
            fallback=fallback,
            grading=Grading(relative, absolute, units),
            source=file,
        )
        if judge:
            results = iter(_judged(results, judge, judge_prompt, strict))
        first_error: DatasetError | None = None
        for each in results:
            if isinstance(each, BadRecord):
                if strict:
                    raise each.error
                first_error = first_error or each.error
                tally.bad_records += 1
                tell(f"not graded: {each.error}")
                if as_json:
                    print_json(each.as_json())
                continue
            tally.add(each)
            if as_json:
                print_json(each.as_json())
            else:
                say(f"{each.id:<16}{each.verdict.status:<11}{each.verdict.rule}")
            if explain and not as_json:
                say("\n".join(f"    {line}" for line in _explained(each)))
    summary = tally.as_json()
    if first_error is not None and not summary["n"]:
        raise DatasetError(file, f"no record could be graded; the first error: {first_error}")
    print_result(summary, as_json, lambda counted: [_words(counted)])


def _judged(
    results: Iterable[GradedRecord | BadRecord], model: str, prompt: Path | None, strict: bool
) -> list[GradedRecord | BadRecord]:
    """Let a model grade the results that the rules left unscored. Return all results in their
    original order.
    """
    from functools import partial

    import anyio

    from atts.api import judge_unscored, read_judge_prompt
    from atts.evaluators import BadRecord

    instructions = read_judge_prompt(prompt)
    everything: list[GradedRecord | BadRecord] = []
    for each in results:
        if strict and isinstance(each, BadRecord):
            raise each.error  # Raise the error here, before a judge model is loaded.
        everything.append(each)
    graded = [each for each in everything if not isinstance(each, BadRecord)]
    judged = iter(anyio.run(partial(judge_unscored, graded, model, instructions)))
    return [each if isinstance(each, BadRecord) else next(judged) for each in everything]


def _explained(graded: GradedRecord) -> Iterator[str]:
    """Yield lines that explain a verdict: the compared answers, how the answer was extracted, and
    what the rule means.
    """
    from atts.evaluators import RULES

    for gold in graded.golds:
        yield f"reference  {gold}"
    yield f"answer     {graded.answer if graded.answer is not None else '-'} ({graded.found_by})"
    yield f"rule       {graded.verdict.rule}: {RULES[graded.verdict.rule]}"
    if graded.verdict.detail:
        yield f"detail     {graded.verdict.detail}"


def _opened(file: str) -> AbstractContextManager[IO[str]]:
    if file == "-":
        return nullcontext(sys.stdin)
    path = Path(file)
    if not path.is_file():
        raise DatasetError(file, "is not a file", "Give a JSONL file, or - for stdin")
    return path.open(encoding="utf-8", errors="replace")


def _words(summary: dict[str, Any]) -> str:
    bad = summary["bad_records"]
    not_graded = f"; {counted(bad, 'record')} not graded" if bad else ""
    if not summary["n"]:
        return f"no records{not_graded}"
    low, high = summary["interval"]
    counts = ", ".join(
        f"{summary[name]} {name.replace('_', ' ')}" for name in _COUNTS if summary[name]
    )
    share = f"accuracy {summary['accuracy']:.4g} [{low:.4g}, {high:.4g}] (95 % Wilson interval)"
    return f"{counted(summary['n'], 'record')}: {counts}; {share}{not_graded}"


_COUNTS = ("equal", "different", "unscored", "judged", "no_answer", "cut")
