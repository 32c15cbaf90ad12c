"""`atts sweep`: one evaluation under many settings, and its scaling curves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli import options
from atts.cli.interrupts import run_async
from atts.cli.output import json_line
from atts.cli.terminal import say, tell
from atts.errors import OptionError

if TYPE_CHECKING:
    from atts.analysis import ScalingPoint
    from atts.api import Sweep, SweepEnd, SweepPoint
    from atts.run import Listener


@options.with_keys(
    f"dataset over {options.SETUP} limit seed rollouts out config pairs dry_run as_json"
)
def sweep(
    context: typer.Context,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A key and its values: rate=.1,.2,.4, or a JSON list; every choice of them is "
            "run; repeatable.",
            metavar="KEY=VALUE,VALUE",
            show_default="rate=.1,.2,.4",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory of the set; the same command goes on there.",
            show_default="one below runs/",
            metavar="DIRECTORY",
        ),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; run nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object per run, then a summary.")
    ] = False,
) -> None:
    """Evaluate under every choice of some settings, and draw accuracy against tokens, seconds and
    samples.

    Each choice is a run of its own in one directory, with the target alone and the draft alone
    beside them. What two runs ask of the same model in the same words and with the same seed is
    asked once. The same command goes on where it was, whatever ended it; more values of the same
    keys make more runs there.

    Example: atts sweep --over rate=.1,.2,.4 --over samples=2,4,8

    Example: atts sweep math500 --pair r1-1.5b/r1-70b --over max_tokens=4000,8000,16000 --dry-run
    """
    from atts.api import plan_sweep

    flags = options.flags_of(context)
    planned = plan_sweep(axes(over or ["rate=.1,.2,.4"]), flags, pairs or (), file=config)
    for note in planned.notes:
        tell(f"atts: {note}")
    if dry_run:
        say("\n".join(_planned(planned, as_json)))
        return
    end = _run(planned)
    say("\n".join(_objects(end) if as_json else _lines(end)))
    if end.last is not None:
        tell(f"atts: {end.last.status}: {end.last.why}; the same command goes on from here")
    raise typer.Exit(end.exit_code)


def _run(planned: Sweep) -> SweepEnd:
    """Every run in turn, each with its progress."""
    from atts.api import run_sweep

    @asynccontextmanager
    async def watch(point: SweepPoint, number: int) -> AsyncGenerator[Sequence[Listener]]:
        from atts.cli.progress import progress_display
        from atts.run import Progress

        tell(f"atts: run {number} of {len(planned.points)}: {point.name}")
        progress = Progress(loading=(point.configuration["draft"], point.configuration["target"]))
        async with progress_display(progress):
            yield (progress,)

    async def main() -> SweepEnd:
        return await run_sweep(planned, watch)

    return run_async(main)


def axes(said: Sequence[str]) -> dict[str, list[object]]:
    """The keys and values of `--over`.

    >>> axes(["rate=.1,.2", 'draft=["hf:a", "hf:b"]'])
    {'rate': ['.1', '.2'], 'draft': ['hf:a', 'hf:b']}

    :raises OptionError: one is not of that form, or a key comes twice.
    """
    found = dict[str, list[object]]()
    for words in said:
        name, mark, values = (part.strip() for part in words.partition("="))
        if not (name and mark and values.strip(", ")):
            raise OptionError("--over", f"{words!r} is not KEY=VALUE,VALUE, such as rate=.1,.2,.4")
        if name in found:
            raise OptionError("--over", f"{name} comes twice; put all its values into one --over")
        found[name] = _listed(values, words)
    return found


def _listed(values: str, words: str) -> list[object]:
    if not values.startswith("["):
        return [value.strip() for value in values.split(",") if value.strip()]
    try:
        listed: list[object] = json.loads(values)
    except ValueError as error:
        raise OptionError("--over", f"{words!r} is not a JSON list ({error})") from error
    return listed


def _planned(planned: Sweep, as_json: bool) -> list[str]:
    if as_json:
        return [
            json_line(
                {
                    "type": "run",
                    "name": one.name,
                    "kind": one.kind,
                    "values": one.values,
                    "directory": str(one.directory),
                }
            )
            for one in planned.points
        ]
    problems = len(planned.points[-1].configuration.job.load().problems)
    runs = [
        f"  {one.name:<40} {one.configuration['samples']:>4} rollouts  {one.directory}"
        for one in planned.points
    ]
    head = f"{len(planned.points)} runs of {problems} problems each, in {planned.directory}"
    return [head, *runs, "Nothing was run."]


def _lines(end: SweepEnd) -> list[str]:
    from atts.analysis import sweep_lines

    return [
        *sweep_lines(end.report),
        "",
        f"{'sweep':<10}{end.report.directory}",
        f"{'picture':<10}{end.page}",
    ]


def _objects(end: SweepEnd) -> list[str]:
    report = end.report
    runs = [json_line({"type": "run", **_facts(point)}) for point in report.points]
    status = "finished" if end.last is None else end.last.status
    summary = {
        "type": "summary",
        "status": status,
        "directory": report.directory,
        "page": str(end.page),
    }
    return [*runs, json_line({**summary, "over": report.over, "runs": len(report.points)})]


def _facts(point: ScalingPoint) -> dict[str, Any]:
    return {
        field.name: getattr(point, field.name) for field in fields(point) if field.name != "right"
    }
