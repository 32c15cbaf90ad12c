"""Consecutive runs under faults, cancellations and drift, with measurements of resources between
them.

The tests make such runs for one second or two minutes, the study `soak` for an hour.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import anyio

from atts.api import Setup
from atts.core import Outcome, Problem
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import ProblemScope, RetryPolicy
from atts.local import LocalEngine, LocalOptions
from atts.models import EMBEDDED, path
from atts.pipelines import Context, Policy, solve
from atts.run import RunOptions, RunResult, RunSpec, evaluate
from atts.testing import (
    FaultKind,
    Faults,
    FaultyEngine,
    Latency,
    ScoreDrift,
    ScriptedEngine,
    toy_problems,
)

Kind = Literal[
    "faults", "cancelled and resumed", "drift", "embedded pair", "embedded pair, cancelled"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHARES: Mapping[FaultKind, float] = {
    "refused": 0.01, "slow": 0.01, "dropped": 0.01, "timeout": 0.005, "wrong_length": 0.005, "nan": 0.005,
    "empty": 0.005, "wrong_ids": 0.005, "hang": 0.001,
}  # fmt: skip
# the same problems under different seeds, because the toy models keep every distribution that they
# made, so new problems would take memory
_SETS = 6
_CACHE = 8192  # number of KV tokens that each local engine can cache


@dataclass(frozen=True, slots=True)
class Level:
    """The resources that a process uses between two runs."""

    seconds: float
    memory_mib: float
    objects: int
    threads: int
    files: int
    tasks: int
    in_flight: int  # number of requests that the engines have in flight
    blocks: int  # number of KV tokens that sequences lock in the local engines
    temporary: int  # number of files left in the folder of runs


@dataclass(slots=True)
class Tally:
    """Numbers of problems, calls and failures of all episodes."""

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
    problems: Callable[
        [int, int], Sequence[Problem]
    ]  # called with the number of problems and the index of the episode
    policy: Policy
    models: tuple[LocalEngine, ...] = ()  # local engines whose locked KV tokens `soak` adds up


async def soak(folder: Path, seconds: float, seed: int, kinds: Sequence[Kind] = KINDS) -> Tally:
    """Run episodes of these kinds in turn until the time is up, and measure resources between them."""
    tally = Tally()
    number = 0
    said = 0.0
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
                sys.stderr.write(
                    f"soak: {passed:.0f} of {seconds:.0f} s, {number} runs, {tally.levels[-1]}\n"
                )
    return tally


async def _stations(stack: AsyncExitStack, kinds: Sequence[Kind]) -> dict[Kind, Station]:
    """Start the stations that these kinds of episodes need."""
    stations: dict[Kind, Station] = {}
    if "faults" in kinds or "cancelled and resumed" in kinds:
        stations["faults"] = stations["cancelled and resumed"] = await _scripted(
            stack, ScoreDrift()
        )
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
    draft = await stack.enter_async_context(drafts)
    target = await stack.enter_async_context(targets)
    policy = Policy(samples=4, timeout_seconds=1.0)
    return Station(draft, target, lambda count, number: toy_problems(count, seed=number), policy)


async def _embedded(stack: AsyncExitStack) -> Station:
    # A small cache is soon full, so memory that grows later is a leak. Threads instead of child
    # processes make the leak visible in this process.
    options = LocalOptions(worker="thread", kv_tokens=_CACHE)
    models = tuple(LocalEngine(path(role), name=role, options=options) for role in EMBEDDED)
    draft, target = [
        await stack.enter_async_context(FaultyEngine(model, Faults({"dropped": 0.01})))
        for model in models
    ]
    policy = Policy(samples=4, max_tokens=256)
    return Station(
        draft,
        target,
        lambda count, number: arithmetic("calibration", count, number),
        policy,
        models,
    )


async def _episode(
    kind: Kind, station: Station, directory: Path, tally: Tally, number: int
) -> None:
    """Run one episode, interrupted if its kind requires it, and compare its journal with the
    outcomes reported live.
    """
    problems = list(station.problems(4, number % _SETS))
    live: dict[str, Outcome] = {}
    if kind in ("cancelled and resumed", "embedded pair, cancelled"):
        with anyio.move_on_after(0.15 + 0.01 * (number % 40)):
            await _run(station, problems, directory, live, number)
    result = await _run(station, problems, directory, live, number)
    _compare(result, live, tally, f"{kind}, run {number}")
    failed = any(sample.finish == "failed" for line in result.problems for sample in line.samples)
    # failed problems would be tried again, so a run with failed problems is not checked
    if not failed:
        await _recall(kind, station, problems, directory, result, tally=tally, number=number)
    tally.episodes[kind] = tally.episodes.get(kind, 0) + 1
    tally.problems += len(problems)
    tally.failed_rollouts += sum(
        line.finish == "failed" for p in result.problems for line in p.samples
    )
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
    """Check that a finished run gives the same result when it is requested again, without any
    call.
    """
    requests = [engine.stats().requests for engine in (station.draft, station.target)]
    again = await _run(station, problems, directory, {}, number)
    if again.problems != result.problems or requests != [
        e.stats().requests for e in (station.draft, station.target)
    ]:
        tally.differences.append(f"{kind}, run {number}: a finished run was not recalled as it was")


async def _run(
    station: Station,
    problems: Sequence[Problem],
    directory: Path,
    live: dict[str, Outcome],
    number: int,
) -> RunResult:
    async def watched(
        problem: Problem, policy: Policy, context: Context, scope: ProblemScope
    ) -> Outcome:
        live[problem.id] = outcome = await solve(problem, policy, context, scope)
        return outcome

    setup = Setup(method="atts", rate=0.2, seed=number, policy=station.policy, concurrency=32)
    plan: RunSpec = replace(
        setup.plan(station.draft, station.target),
        pipeline=watched,
        retries=RetryPolicy(calls=3, rollouts=2, delay_seconds=0.005, failures_in_row=None),
    )
    return await evaluate(
        problems, plan, RunOptions(directory, engines="are open", signals="ignore")
    )


def _compare(result: RunResult, live: Mapping[str, Outcome], tally: Tally, name: str) -> None:
    """Check that the journal's outcomes equal the outcomes reported live, including every token and
    decision.
    """
    for outcome in result.outcomes():
        seen = live.get(outcome.problem.id)
        if seen is None:
            # the problem ended during the cancellation, so the listener did not get its event
            continue
        tally.compared += 1
        if not _same(outcome, seen):
            tally.differences.append(
                f"{name}: problem {outcome.problem.id} is told otherwise by the journal"
            )


def _same(told: Outcome, seen: Outcome) -> bool:
    plain = (told.answer, dict(told.votes), told.status, told.usage, len(told.rollouts))
    # compared as text, in which a NaN score equals itself
    return plain == (
        seen.answer,
        dict(seen.votes),
        seen.status,
        seen.usage,
        len(seen.rollouts),
    ) and all(
        repr(one) == repr(other) for one, other in zip(told.rollouts, seen.rollouts, strict=True)
    )


def _level(folder: Path, stations: Mapping[Kind, Station], seconds: float) -> Level:
    gc.collect()
    engines = {
        id(e): e for station in stations.values() for e in (station.draft, station.target)
    }.values()
    models = {id(m): m for station in stations.values() for m in station.models}.values()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Level(
        seconds=seconds,
        memory_mib=resident / 2**20,
        objects=len(gc.get_objects()),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        tasks=len(anyio.get_running_tasks()),
        in_flight=sum(engine.stats().in_flight for engine in engines),
        blocks=sum(model.loop_stats().kv_locked for model in models),
        temporary=sum(1 for _ in folder.rglob("*")),
    )
