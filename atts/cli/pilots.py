"""The command `atts pilot`: whether a gate helps a pair of models, before a run is paid for."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli import options
from atts.cli.terminal import print_result, tell
from atts.interrupts import run_async

if TYPE_CHECKING:
    from atts.analysis import PilotReport, PilotRow
    from atts.api import PilotEnd, SweepPoint
    from atts.run import Listener

_KEYS = "dataset rate samples turns max_tokens pair backend draft target"


@options.with_keys(f"{_KEYS} limit file column seed concurrency out config pairs as_json")
def pilot(
    context: typer.Context,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory of the pilot's runs; the same command continues it.",
            show_default="one below runs/",
            metavar="DIRECTORY",
        ),
    ] = None,
    config: options.ConfigFile = None,
    pairs: options.Pairs = None,
    as_json: options.Json = False,
) -> None:
    """Measure on some problems whether a gate helps this pair, and recommend what to take.

    40 problems of 4 rollouts by default, each under both models alone, the target drafted
    (`exact`), a coin, and the gate with every score that the models allow. If a score beats the coin,
    other takeovers and rates of it are run as well. The recommendation is a method with its score,
    takeover and rate, or `exact`, `target-only` or `draft-only`, with the reason. Problems need
    reference answers.

    Example: atts pilot math500 --pair r1-1.5b/r1-70b --limit 40
    """
    end = _run(options.flags_of(context), pairs or (), config)
    if end.report is not None:
        report = end.report
        print_result(_facts(report) if as_json else report, as_json, lambda _: _lines(end, report))
    if end.last is not None:
        tell(f"atts: {end.last.status}: {end.last.why}; the same command continues the pilot")
    raise typer.Exit(end.exit_code)


def _run(flags: dict[str, object], pairs: Sequence[str], config: Any) -> PilotEnd:
    from atts.api import run_pilot

    @asynccontextmanager
    async def watch(point: SweepPoint, number: int) -> AsyncGenerator[Sequence[Listener]]:
        from atts.cli.progress import progress_display
        from atts.run import Progress

        tell(f"atts: {point.name}")
        progress = Progress(loading=[])
        async with progress_display(progress):
            yield (progress,)

    async def main() -> PilotEnd:
        return await run_pilot(flags, pairs, file=config, watch=watch)

    return run_async(main)


def _lines(end: PilotEnd, report: PilotReport) -> list[str]:
    from atts.analysis import pilot_lines

    return [*pilot_lines(report), "", f"pilot     {end.directory}"]


def _facts(report: PilotReport) -> dict[str, Any]:
    """Return plain data of the report; of each arm without its single rollouts."""
    return {
        "take": report.take,
        "flags": dict(report.flags),
        "reason": report.reason,
        "headroom": report.headroom.as_json(),
        "arms": [_row(row) for row in report.rows],
        "unavailable": {arm.name: arm.unavailable for arm in report.unavailable},
        "power": None if report.power is None else str(report.power),
    }


def _row(row: PilotRow) -> dict[str, Any]:
    numbers = {
        "p_value": row.p_value,
        "rate": row.arm.rate,
        "cost": row.cost,
        "cost_per_point": row.cost_per_point,
    }
    return {
        "name": row.arm.name,
        "flags": dict(row.arm.flags),
        "accuracy": row.accuracy.as_json(),
        "gain": None if row.gain is None else row.gain.as_json(),
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }
