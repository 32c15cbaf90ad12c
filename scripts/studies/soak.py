"""Solving without end under faults, cancels and drift: nothing may grow, nothing may be left, the journal tells all."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import anyio

from atts.api import Setup
from atts.api.setup import EMBEDDED_CHUNKS
from atts.core import Outcome, Problem
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Policy as Retries
from atts.graph import ProblemScope
from atts.local import LocalEngine, LocalOptions
from atts.models import EMBEDDED, path
from atts.pipelines import Context, Policy, solve
from atts.run import Plan, RunResult, Session, evaluate
from atts.testing import FaultKind, Faults, FaultyEngine, Latency, ScoreDrift, ScriptedEngine, toy_problems
from scripts.studies.charts import Chart
from scripts.studies.harness import Cell, Options, Table, say

Kind = Literal["faults", "cancelled and resumed", "drift", "embedded pair", "embedded pair, cancelled"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHARES: Mapping[FaultKind, float] = {
    "refused": 0.01, "slow": 0.01, "dropped": 0.01, "timeout": 0.005, "wrong_length": 0.005, "nan": 0.005,
    "empty": 0.005, "wrong_ids": 0.005, "hang": 0.001,
}  # fmt: skip
_SETS = 6  # sets of problems, again and again under other seeds: the toy models remember every law they ever made
_CACHE = 8192  # KV tokens of each local engine
_NOISE = 0.02  # share by which memory and objects may rise and still be called flat
_WARM_UP = 30  # runs until every kind has met every set: caches fill and allocators settle meanwhile


@dataclass(frozen=True, slots=True)
class Level:
    """What a process holds at one moment between two runs."""

    seconds: float
    memory_mib: float
    objects: int
    threads: int
    files: int
    tasks: int
    in_flight: int  # requests the engines still know of
    blocks: int  # KV tokens locked by a sequence in the local engines
    temporary: int  # files left in the folder of runs


@dataclass(slots=True)
class Tally:
    """What was done and what went wrong."""

    episodes: dict[Kind, int] = field(default_factory=dict[Kind, int])
    problems: int = 0
    failed_rollouts: int = 0
    compared: int = 0
    differences: list[str] = field(default_factory=list[str])
    levels: list[Level] = field(default_factory=list[Level])


@dataclass(frozen=True, slots=True)
class Station:
    """The engines of a kind of episode; they stay open for the whole study."""

    draft: Engine
    target: Engine
    problems: Callable[[int, int], Sequence[Problem]]  # number of problems, number of the episode
    policy: Policy
    models: tuple[LocalEngine, ...] = ()  # whose blocks are counted


def study(options: Options) -> list[Table]:
    """Two minutes, four, or an hour; the table of levels, and what was found."""
    seconds = options.pick(120.0, 240.0, 3600.0)
    with tempfile.TemporaryDirectory() as folder:
        tally = anyio.run(soak, Path(folder), seconds, options.seed)
    return tables(tally)


def tables(tally: Tally) -> list[Table]:
    """What was found: the verdict, the curve, what was run."""
    return [verdict(tally), _levels(tally), _episodes(tally)]


async def soak(folder: Path, seconds: float, seed: int, kinds: Sequence[Kind] = KINDS) -> Tally:
    """Episodes of these kinds in turn until the time is over; levels are read between them."""
    tally, number, said = Tally(), 0, 0.0
    async with AsyncExitStack() as stack:
        stations = await _stations(stack, kinds)
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            kind = kinds[number % len(kinds)]
            await _episode(kind, stations[kind], folder / f"run {number}", tally, seed + number)
            tally.levels.append(_level(folder, stations, time.perf_counter() - began))
            number += 1
            if passed - said > 30:
                said = passed
                say(f"soak: {passed:.0f} of {seconds:.0f} s, {number} runs, {tally.levels[-1]}")
    return tally


async def _stations(stack: AsyncExitStack, kinds: Sequence[Kind]) -> dict[Kind, Station]:
    """Those that these kinds of episodes need."""
    stations: dict[Kind, Station] = {}
    if "faults" in kinds or "cancelled and resumed" in kinds:
        stations["faults"] = stations["cancelled and resumed"] = await _scripted(stack, ScoreDrift())
    if "drift" in kinds:
        stations["drift"] = await _scripted(stack, ScoreDrift(after=500, factor=1.3))
    if "embedded pair" in kinds or "embedded pair, cancelled" in kinds:
        stations["embedded pair"] = stations["embedded pair, cancelled"] = await _embedded(stack)
    return stations


async def _scripted(stack: AsyncExitStack, drift: ScoreDrift) -> Station:
    faults = Faults(SHARES, delay_seconds=0.02)
    latency = Latency(per_sample=0.001, per_score=0.001, sampled_token=2e-5)
    drafts = ScriptedEngine("draft", latency=latency, concurrency=16, faults=faults)
    targets = ScriptedEngine("target", latency=latency, concurrency=8, faults=faults, drift=drift)
    draft, target = await stack.enter_async_context(drafts), await stack.enter_async_context(targets)
    policy = Policy(samples=4, timeout_seconds=1.0)
    return Station(draft, target, lambda count, number: toy_problems(count, seed=number), policy)


async def _embedded(stack: AsyncExitStack) -> Station:
    # A small cache is soon full, so that what grows later is a leak; with threads it is this process that grows.
    options = LocalOptions(worker="thread", kv_tokens=_CACHE)
    models = tuple(LocalEngine(path(role), name=role, options=options) for role in EMBEDDED)
    draft, target = [
        await stack.enter_async_context(FaultyEngine(model, Faults({"dropped": 0.01}))) for model in models
    ]
    policy = Policy(samples=4, max_tokens=256, chunking=EMBEDDED_CHUNKS)
    return Station(draft, target, lambda count, number: arithmetic("calibration", count, number), policy, models)


async def _episode(kind: Kind, station: Station, directory: Path, tally: Tally, number: int) -> None:
    """One run, interrupted where its kind says so, and its journal beside what was seen live."""
    problems = list(station.problems(4, number % _SETS))
    live: dict[str, Outcome] = {}
    if kind in ("cancelled and resumed", "embedded pair, cancelled"):
        with anyio.move_on_after(0.15 + 0.01 * (number % 40)):
            await _run(station, problems, directory, live, number)
    result = await _run(station, problems, directory, live, number)
    _compare(result, live, tally, f"{kind}, run {number}")
    if all(line.status != "failed" for line in result.problems):  # those that failed would be tried again
        await _recall(kind, station, problems, directory, result, tally, number)
    tally.episodes[kind] = tally.episodes.get(kind, 0) + 1
    tally.problems += len(problems)
    tally.failed_rollouts += sum(line.finish == "failed" for p in result.problems for line in p.samples)
    shutil.rmtree(directory)


async def _recall(
    kind: Kind,
    station: Station,
    problems: Sequence[Problem],
    directory: Path,
    result: RunResult,
    tally: Tally,
    number: int,
) -> None:
    """A finished run that is asked for again is the same, and costs no call."""
    requests = [engine.stats().requests for engine in (station.draft, station.target)]
    again = await _run(station, problems, directory, {}, number)
    if again.problems != result.problems or requests != [e.stats().requests for e in (station.draft, station.target)]:
        tally.differences.append(f"{kind}, run {number}: a finished run was not recalled as it was")


async def _run(
    station: Station, problems: Sequence[Problem], directory: Path, live: dict[str, Outcome], number: int
) -> RunResult:
    async def watched(problem: Problem, policy: Policy, context: Context, scope: ProblemScope) -> Outcome:
        live[problem.id] = outcome = await solve(problem, policy, context, scope)
        return outcome

    setup = Setup(method="atts", rate=0.2, seed=number, policy=station.policy, rollouts=32)
    plan: Plan = replace(
        setup.plan(station.draft, station.target),
        pipeline=watched,
        retries=Retries(calls=3, rollouts=2, delay_seconds=0.005, give_up_after=None),
    )
    return await evaluate(problems, plan, Session(directory, engines="are open", signals="ignore"))


def _compare(result: RunResult, live: Mapping[str, Outcome], tally: Tally, name: str) -> None:
    """The journal's outcomes are those that were seen as they happened, to the last token and decision."""
    for outcome in result.outcomes():
        seen = live.get(outcome.problem.id)
        if seen is None:
            continue  # it ended in the session that was cancelled after its last word
        tally.compared += 1
        if not _same(outcome, seen):
            tally.differences.append(f"{name}: problem {outcome.problem.id} is told otherwise by the journal")


def _same(told: Outcome, seen: Outcome) -> bool:
    plain = (told.answer, dict(told.votes), told.status, told.usage, len(told.rollouts))
    return plain == (seen.answer, dict(seen.votes), seen.status, seen.usage, len(seen.rollouts)) and all(
        repr(one) == repr(other) for one, other in zip(told.rollouts, seen.rollouts, strict=True)
    )  # representations: a score that is not a number equals itself there


def _level(folder: Path, stations: Mapping[Kind, Station], seconds: float) -> Level:
    gc.collect()
    engines = {id(e): e for station in stations.values() for e in (station.draft, station.target)}.values()
    models = {id(m): m for station in stations.values() for m in station.models}.values()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Level(
        seconds,
        resident / 2**20,
        len(gc.get_objects()),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        len(anyio.get_running_tasks()),
        sum(engine.stats().in_flight for engine in engines),
        sum(model.loop_stats().kv_locked for model in models),
        sum(1 for _ in folder.rglob("*")),
    )


def verdict(tally: Tally) -> Table:
    """After the warm-up: the first third beside the last, and what that would come to in an hour."""
    kept = tally.levels[_WARM_UP:] if _is_settled(tally) else tally.levels
    third = max(1, len(kept) // 3)
    hours = max(1e-9, (kept[-1].seconds - kept[0].seconds) * 2 / 3 / 3600)
    rows: list[tuple[Cell, ...]] = []
    for name, get in _MEASURES.items():
        first, last = median(map(get, kept[:third])), median(map(get, kept[-third:]))
        said = "flat" if _is_flat(name, first, last) else "GROWS" if _is_settled(tally) else "too few runs to say"
        rows.append((name, first, last, max(map(get, kept)), (last - first) / hours, said))
    wrong = tally.differences
    notes = (
        f"{sum(tally.episodes.values())} runs of {tally.problems} problems in {tally.levels[-1].seconds / 60:.0f} "
        f"minutes; {tally.failed_rollouts} rollouts failed as the fault schedule had it and were recorded so.",
        f"Journal beside live: {tally.compared} outcomes compared, {len(wrong)} differences"
        + (f" (first: {wrong[0]})" if wrong else "; every finished run was recalled without a call."),
        f"The first {_WARM_UP} runs are warm-up: every kind of run meets every set of problems, caches fill. Memory "
        f"and objects are flat where they rise by at most {_NOISE:.0%} over all that follows.",
    )
    columns = ("between runs", "median of the first third", "of the last third", "most", "growth an hour", "verdict")
    return Table("Soak: what the process holds after warm-up", columns, tuple(rows), notes)


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
    """Counts must not rise (idle worker threads come and go by one); memory and objects may, by as much as noise."""
    if name.startswith(("memory", "Python")):
        return last - first <= _NOISE * first
    return last <= first + (name == "threads")


def _levels(tally: Tally) -> Table:
    rows = [(level.seconds, level.memory_mib) for level in tally.levels]
    every = max(1, len(rows) // 200)
    chart = Chart("seconds", "memory, MiB")
    return Table("Soak: memory over time", ("seconds", "memory, MiB"), tuple(rows[::every]), (), chart, "chart only")


def _episodes(tally: Tally) -> Table:
    what: Mapping[Kind, str] = {
        "faults": "one call in twenty is refused, late, cut, timed out, impossible, or never comes",
        "cancelled and resumed": "the same, cut off in the middle, then finished from its journal",
        "drift": "perplexities rise in the middle of the study",
        "embedded pair": "real models, one call in a hundred dropped",
        "embedded pair, cancelled": "the same, cut off and finished",
    }
    rows = tuple((kind, count, what[kind]) for kind, count in tally.episodes.items())
    return Table("Soak: what was run", ("kind", "runs", "what"), rows)


def main() -> None:
    """Solve for so long; fails where something grew, was left, or was told otherwise by a journal."""
    parser = argparse.ArgumentParser(prog="soak", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = anyio.run(soak, Path(folder), asked.seconds, asked.seed)
    print("\n".join(table.markdown() for table in tables(tally)))
    grown = [str(row[0]) for row in verdict(tally).rows if row[-1] == "GROWS"]
    if grown or tally.differences:
        sys.exit(f"soak: grown: {', '.join(grown) or 'nothing'}; differences: {len(tally.differences)}")


if __name__ == "__main__":
    main()
