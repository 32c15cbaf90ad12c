"""Show that long runs leak nothing, and that killed runs lose nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import anyio

from atts.journal import JOURNAL
from scripts.studies.harness import Chart, Options, Row, Table, say
from tests.run import crashing
from tests.run.soaking import Kind, Level, Tally, soak

_NOISE = 0.02  # share by which memory and objects may rise and still be called flat
# runs until every kind has met every set: caches fill and allocators settle meanwhile
_WARM_UP = 30


def study_soak(options: Options) -> list[Table]:
    """Run for two minutes, four, or an hour, and return the levels of what the process holds."""
    seconds = options.pick(120.0, 240.0, 3600.0)
    with tempfile.TemporaryDirectory() as folder:
        tally = anyio.run(soak, Path(folder), seconds, options.seed)
    return tables(tally)


def tables(tally: Tally) -> list[Table]:
    """Return the verdict, the curve, and what was run."""
    return [verdict(tally), _levels(tally), _episodes(tally)]


def verdict(tally: Tally) -> Table:
    """Compare the last third after the warm-up with the first, and extrapolate to an hour."""
    kept = tally.levels[_WARM_UP:] if _is_settled(tally) else tally.levels
    third = max(1, len(kept) // 3)
    hours = max(1e-9, (kept[-1].seconds - kept[0].seconds) * 2 / 3 / 3600)
    rows: list[Row] = []
    for name, get in _MEASURES.items():
        first = median(map(get, kept[:third]))
        last = median(map(get, kept[-third:]))
        if _is_flat(name, first, last):
            trend = "flat"
        elif _is_settled(tally):
            trend = "GROWS"
        else:
            trend = "too few runs to say"
        rows.append((name, first, last, max(map(get, kept)), (last - first) / hours, trend))
    wrong = tally.differences
    notes = (
        f"{sum(tally.episodes.values())} runs of {tally.problems} problems in "
        f"{tally.levels[-1].seconds / 60:.0f} "
        f"minutes; {tally.failed_rollouts} rollouts failed as the fault schedule had it and were "
        f"recorded so.",
        f"Journal compared with live: {tally.compared} outcomes compared, {len(wrong)} differences"
        + (
            f" (first: {wrong[0]})"
            if wrong
            else "; every finished run was recalled without a call."
        ),
        f"The first {_WARM_UP} runs are warm-up: every kind of run meets every set of problems, "
        f"caches fill. Memory "
        f"and objects are flat where they rise by at most {100 * _NOISE:.0f} % over all that follows.",
    )
    measures_by_trend = dict[str, list[str]]()
    for row in rows:
        measures_by_trend.setdefault(str(row[-1]), []).append(str(row[0]))
    words = "; ".join(
        f"**{trend}**: {', '.join(names)}" for trend, names in measures_by_trend.items()
    )
    headline = f"{words}. {notes[0]} {notes[1]}"
    header = "between runs | median of the first third | of the last third | most | growth an hour | verdict"
    return Table.of(
        "Soak: what the process holds after warm-up", header, rows, *notes, headline=headline
    )


def _is_settled(tally: Tally) -> bool:
    return len(tally.levels) >= 2 * _WARM_UP


_MEASURES: Mapping[str, Callable[[Level], float]] = {
    "memory, MiB": lambda level: level.memory_mib,
    "Python objects": lambda level: level.objects,
    "threads": lambda level: level.threads,
    "open files": lambda level: level.files,
    "tasks": lambda level: level.tasks,
    "requests in engines": lambda level: level.in_flight,
    "locked KV tokens": lambda level: level.blocks,
    "files of runs": lambda level: level.temporary,
}


def _is_flat(name: str, first: float, last: float) -> bool:
    """Return whether a measure is flat.

    Counts must not rise (idle worker threads come and go by one); memory and objects may, by as
    much as noise.
    """
    if name.startswith(("memory", "Python")):
        return last - first <= _NOISE * first
    return last <= first + (name == "threads")


def _levels(tally: Tally) -> Table:
    every = max(1, len(tally.levels) // 200)
    rows = [(level.seconds, level.memory_mib) for level in tally.levels[::every]]
    chart = Chart("seconds", "memory, MiB")
    return Table.of(
        "Soak: memory over time", "seconds | memory, MiB", rows, chart=chart, shown="chart only"
    )


def _episodes(tally: Tally) -> Table:
    what: Mapping[Kind, str] = {
        "faults": "one call in twenty is refused, late, cut, timed out, impossible, or never comes",
        "cancelled and resumed": "the same, cut off in the middle, then finished from its journal",
        "drift": "perplexities rise in the middle of the study",
        "embedded pair": "real models, one call in a hundred dropped",
        "embedded pair, cancelled": "the same, cut off and finished",
    }
    rows = [(kind, count, what[kind]) for kind, count in tally.episodes.items()]
    return Table.of("Soak: what was run", "kind | runs | what", rows)


def study_crash(options: Options) -> list[Table]:
    """Kill runs ten times each; `crash` raises if anything recorded was changed or done again."""
    kills = options.pick(20, 60, 200)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, crashing.nursery() as children:
        whole = Path(folder) / "whole"
        assert children.run(crashing.Order(str(whole))) == 0
        size = (whole / JOURNAL).stat().st_size
        since = time.perf_counter()
        for directory, crashes in crashing.crash_runs(
            children, Path(folder), size, kills, options.seed
        ):
            words = [
                "identical" if find(directory) == find(whole) else "DIFFERENT"
                for find in (crashing.decisions, crashing.outcomes)
            ]
            counts = (
                crashes.kills,
                crashes.full_disks,
                crashes.sessions,
                crashes.recalled,
                crashes.repeated,
            )
            rows.append((directory.name, *counts, *words, round(time.perf_counter() - since, 1)))
            since = time.perf_counter()
            say(f"crash: {rows[-1][0]}: {crashes.kills} kills, {crashes.full_disks} full disks")
    full = sum(int(row[2] or 0) for row in rows)
    notes = (
        f"{kills} SIGKILLs in {len(rows)} runs, about half of them in the middle of a write, and "
        f"{full} full disks.",
        f"A call repeated is one that was in flight when its process ended; at most "
        f"{crashing.SLOTS} can be at a time.",
    )
    same = sum(row[6] == row[7] == "identical" for row in rows)
    headline = f"{same} of {len(rows)} runs end with identical decisions and outcomes. {notes[0]}"
    header = "run | kills | full disks | sessions | calls recalled | calls repeated | decisions | outcomes | seconds"
    return [Table.of("Runs killed again and again", header, rows, *notes, headline=headline)]
