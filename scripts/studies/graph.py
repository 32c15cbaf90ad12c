"""Overhead of the task graph beside the same work written by hand, and how both grow with the
number of rollouts.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from anyio.lowlevel import checkpoint

from atts.graph import Graph, Limit, ProblemScope, RolloutScope, Sink
from atts.journal import CallSpan, JournalOptions, Manifest, open_journal
from scripts.studies.harness import (
    Options,
    Row,
    Spread,
    Table,
    cpu_seconds,
    interleaved,
    ratio,
    say,
)
from tests.studies.recorded_work import conserved
from tests.studies.recording import Recording

SAMPLES = 16
TURNS = 4
STAGES = (("draft", "draft"), ("score", "target"), ("escalate", "target"))  # 12 nodes a rollout
IN_FLIGHT = 1000


@dataclass(frozen=True, slots=True)
class Named:
    """A problem."""

    id: str


@dataclass(frozen=True, slots=True)
class Load:
    """One workload: how many rollouts, on how many slots, how many of them in flight."""

    backend: str
    rollouts: int
    draft: int
    target: int
    places: int = IN_FLIGHT


def study(options: Options) -> list[Table]:
    """Measure overhead and flatness, memory with a journal, then the conservation of work."""
    return [_overhead(options), _flatness(options), _memory(options), *conserved()]


async def answer(turn: int) -> int:
    """Return the turn after giving way once, as any engine must: an engine without latency."""
    await checkpoint()
    return turn


async def with_graph(load: Load, sink: Sink | None) -> None:
    """Run the work as a pipeline would write it."""

    async def rollout(line: RolloutScope[None]) -> None:
        for turn in range(TURNS):
            for stage, engine in STAGES:
                await line.call(stage, answer, turn, engine=engine, turn=turn)

    async def solve(problem: Named, scope: ProblemScope) -> None:
        await scope.rollouts(rollout, SAMPLES)

    limits = {"draft": Limit(load.draft), "target": Limit(load.target)}
    graph = Graph(rollouts=load.places, limits=limits, sink=sink)
    await graph.drive(_problems(load.rollouts), solve, lambda result: None)


async def by_hand(load: Load, keep: Callable[[tuple[object, ...]], object]) -> None:
    """Run the same work with anyio's tasks and limiters, and time stamps around every call."""
    places = anyio.CapacityLimiter(load.places)
    limits = {
        "draft": anyio.CapacityLimiter(load.draft),
        "target": anyio.CapacityLimiter(load.target),
    }

    async def call(stage: str, engine: str, problem: str, sample: int, turn: int) -> None:
        queued = anyio.current_time()
        async with limits[engine]:
            started = anyio.current_time()
            await answer(turn)
            ended = anyio.current_time()
        keep((stage, engine, problem, sample, turn, queued, started, ended))

    async def rollout(problem: str, sample: int) -> None:
        try:
            for turn in range(TURNS):
                for stage, engine in STAGES:
                    await call(stage, engine, problem, sample, turn)
        finally:
            places.release_on_behalf_of((problem, sample))

    async with anyio.create_task_group() as tasks:
        for problem in _problems(load.rollouts):
            for sample in range(SAMPLES):
                await places.acquire_on_behalf_of((problem.id, sample))
                tasks.start_soon(rollout, problem.id, sample)


def _problems(rollouts: int) -> Iterator[Named]:
    return (Named(f"problem-{number}") for number in range(rollouts // SAMPLES))


WAYS: Mapping[str, Callable[[Load], Awaitable[None]]] = {
    "graph": lambda load: with_graph(load, Recording()),
    "hand": lambda load: by_hand(load, list[object]().append),
}


def _microseconds(way: str, load: Load) -> float:
    """Return processor time per rollout, in microseconds."""
    gc.collect()
    # the collector looks at what this work makes, not again and again at what was imported before
    # it
    gc.freeze()
    try:
        seconds = cpu_seconds(lambda: anyio.run(WAYS[way], load, backend=load.backend))
    finally:
        gc.unfreeze()
    return 1e6 * seconds / (load.rollouts // SAMPLES * SAMPLES)


def _overhead(options: Options) -> Table:
    repeats = options.pick(3, 5, 9)
    rollouts = options.pick(1_600, 4_000, 8_000)
    rows = list[Row]()
    for backend in ("asyncio", "trio"):
        for draft, target in ((IN_FLIGHT, IN_FLIGHT), (256, 64)):
            load = Load(backend, rollouts, draft, target)
            say(f"overhead: {load}")
            values = interleaved({way: partial(_microseconds, way, load) for way in WAYS}, repeats)
            spreads = [str(Spread.of(values[way])) for way in WAYS]
            rows.append((backend, f"{draft}/{target}", *spreads, str(ratio(values, *WAYS))))
    return Table.of(
        f"CPU microseconds per rollout of 12 nodes, {IN_FLIGHT} rollouts in flight, {rollouts} "
        f"rollouts",
        "back end | slots draft/target | graph, recording | by hand, recording | graph / hand "
        "(bar: 2.5)",
        rows,
        headline=f"{rows[0][2]} us of processor per rollout of 12 calls; where calls wait for "
        f"slots {rows[1][2]} us",
    )


def _flatness(options: Options) -> Table:
    sizes = options.pick((1_000, 10_000), (1_000, 10_000, 30_000), (1_000, 10_000, 100_000))
    rows = list[Row]()
    for places, draft, target in (
        (IN_FLIGHT, IN_FLIGHT, IN_FLIGHT),
        (IN_FLIGHT, 256, 64),
        (IN_FLIGHT // 4, 64, 16),
    ):
        every = sizes if places == IN_FLIGHT else sizes[:2]
        loads = [Load("asyncio", size, draft, target, places) for size in every]
        say(f"flatness: {loads}")
        arms = {
            f"{way} {load.rollouts}": partial(_microseconds, way, load)
            for load in loads
            for way in WAYS
        }
        values = interleaved(arms, options.pick(2, 3, 3), warmup=0)
        for size in every:
            spreads = [str(Spread.of(values[f"{way} {size}"])) for way in WAYS]
            growth = [str(ratio(values, f"{way} {size}", f"{way} {sizes[0]}")) for way in WAYS]
            rows.append((places, f"{draft}/{target}", size, *spreads, *growth))
    return Table.of(
        "CPU microseconds per rollout as the number of rollouts grows, everything recorded in "
        "memory",
        "in flight | slots draft/target | rollouts | graph | by hand | graph / its smallest (bar: "
        "1.25) | "
        "hand / its smallest",
        rows,
        f"With {IN_FLIGHT} in flight the smallest size is over while its queues still fill: the "
        f"same calls, probably "
        "cheaper for touching less memory. The collector of garbage explains a part: without it, "
        "it grows less.",
        f"With {IN_FLIGHT // 4} in flight it is four waves, and what grows is growth with the "
        f"number of rollouts.",
    )


def _memory(options: Options) -> Table:
    rows: list[Row] = []
    for problems in options.pick((100, 400), (125, 1_250), (250, 2_500)):
        say(f"memory: {problems} problems")
        with tempfile.TemporaryDirectory() as folder:
            tracemalloc.start()
            anyio.run(
                _journalled, Load("asyncio", problems * SAMPLES, 256, 64), Path(folder) / "run"
            )
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            written = sum(file.stat().st_size for file in (Path(folder) / "run").iterdir())
        rows.append((problems, peak / 2**20, written / 2**20))
    return Table.of(
        "Peak memory with the journal on (MiB, Python's own allocations)",
        "problems | peak MiB | journal MiB on disk",
        rows,
        f"{IN_FLIGHT} rollouts in flight; results are handed over and not kept. Python "
        f"{sys.version.split()[0]}.",
    )


async def _journalled(load: Load, folder: Path) -> None:
    async with open_journal(folder, Manifest(), JournalOptions(durability="close")) as journal:
        await with_graph(
            load, lambda event: journal.record(event) if isinstance(event, CallSpan) else None
        )
