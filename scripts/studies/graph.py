"""Measure the task graph under load: its CPU time, its growth, idle slots, and long runs.

The last part checks long runs for leaks, and killed runs for lost data.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from atts.core import CallSpan
from atts.graph import Admit, Graph, Limit, ProblemScope, RolloutScope, Sink, Timing, measure
from atts.journal import JOURNAL, JournalOptions, Manifest, open_journal
from atts.testing import run_virtual
from scripts.studies.harness import (
    Chart,
    Options,
    Row,
    Spread,
    Table,
    cpu_seconds,
    interleaved,
    ratio,
    say,
)
from scripts.studies.modelled import Recording, recorded_rollouts
from tests.run import crashing
from tests.run.soaking import Kind, Level, Tally, soak

SLOTS = {"draft": 16, "target": 4}
REPLAYED_SAMPLES = 16
Stage = tuple[str, str, int, float]
"""One call of a rollout: (stage, engine, turn, seconds)."""
Questions = Mapping[str, Sequence[Sequence[Stage]]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the recorded run."""

    id: str


def conserved() -> list[Table]:
    """Replay recorded rollouts on limited slots, and compare the time with its lower bound; return
    no table if the recorded traces are absent.
    """
    rollouts = recorded_rollouts()
    if rollouts is None:
        say(
            "graph: the recorded traces are missing, so the study leaves out the table of work "
            "conservation"
        )
        return []
    questions = stages(rollouts)
    ways: Sequence[tuple[str, Admit, int]] = (
        ("as they come, 32 in flight", "each", 32),
        ("as they come, 16 in flight", "each", 16),
        ("question by question: the barrier", "together", 16),
    )
    found = {
        name: run_virtual(partial(replayed, questions, admit, places))
        for name, admit, places in ways
    }
    ours, recording = found[ways[0][0]]
    bound = lower_bound(measure(recording.nodes()))
    rows: list[Row] = []
    for name, (seconds, recording) in found.items():
        timing = measure(recording.nodes())
        idle = 1 - timing.busy_seconds["target"] / (SLOTS["target"] * timing.seconds)
        rows.append((name, seconds, seconds / bound, seconds / ours, idle, timing.sibling_seconds))
    table = Table.of(
        "Work conservation on recorded rollouts, virtual time",
        "admission | virtual s | over the least possible (bar: 1.03) | over the first row (bar: "
        "1.35 with a barrier) | "
        "target slots idle | s waiting for siblings",
        rows,
        f"The study replays {len(rollouts)} recorded rollouts of {len(questions)} questions. The draft has "
        f"{SLOTS['draft']} slots and the target {SLOTS['target']}; calls are served in "
        "the order in which they arrive.",
    )
    return [table]


def lower_bound(timing: Timing) -> float:
    """Return a lower bound, in seconds, for any schedule on these slots.

    The bound is the busy time of the most loaded engine divided by its slots, or the longest chain
    of calls if that takes longer.
    """
    return max(
        timing.critical_path.seconds,
        *(timing.busy_seconds[name] / count for name, count in SLOTS.items()),
    )


def stages(rollouts: Sequence[Mapping[str, Any]]) -> Questions:
    """Return the stages of every rollout of a recorded run, with durations that are fitted to the
    run.
    """
    questions: dict[str, list[list[Stage]]] = {}
    for record in rollouts:
        found: list[Stage] = []
        for turn in record["turns"]:
            number = turn["turn"]
            found.append(("draft", "draft", number, 0.1943 + 0.002420 * turn["draft_chars"]))
            if turn["ppl"] is not None:
                found.append(("score", "target", number, 0.1499))
            if turn["escalated"]:
                found.append(
                    ("escalate", "target", number, 0.2139 + 0.004994 * turn["target_chars"])
                )
        questions.setdefault(str(record["question_id"]), []).append(found)
    return questions


async def replayed(questions: Questions, admit: Admit, rollouts: int) -> tuple[float, Recording]:
    """Run the recorded stages through the graph, and return its seconds and nodes."""
    recording = Recording()
    graph = Graph(
        rollouts=rollouts, limits={name: Limit(n) for name, n in SLOTS.items()}, sink=recording
    )

    async def solve(question: Question, scope: ProblemScope) -> None:
        async def rollout(line: RolloutScope[None]) -> None:
            for stage, engine, turn, seconds in questions[question.id][line.sample]:
                await line.call(stage, anyio.sleep, seconds, engine=engine, turn=turn)

        await scope.rollouts(rollout, REPLAYED_SAMPLES, admit=admit)

    began = anyio.current_time()
    await graph.drive([Question(name) for name in questions], solve, lambda result: None)
    return anyio.current_time() - began, recording


SAMPLES = 16
TURNS = 4
# each rollout has 12 nodes
STAGES = (("draft", "draft"), ("score", "target"), ("escalate", "target"))
IN_FLIGHT = 1000


@dataclass(frozen=True, slots=True)
class Named:
    """A problem that has nothing but a name."""

    id: str


@dataclass(frozen=True, slots=True)
class Load:
    """A workload: the number of rollouts, the number of slots, and the number of rollouts in
    flight.
    """

    backend: str
    rollouts: int
    draft: int
    target: int
    places: int = IN_FLIGHT


def study(options: Options) -> list[Table]:
    """Measure the overhead of the graph, its growth, the memory of a journal, and idle slots."""
    return [_overhead(options), _flatness(options), _memory(options), *conserved()]


async def answer(turn: int) -> int:
    """Answer after one pass of the event loop, like an engine without latency."""
    await checkpoint()
    return turn


async def with_graph(load: Load, sink: Sink | None) -> None:
    """Run the work through the task graph, as a pipeline does."""

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
    """Return the CPU time per rollout, in microseconds."""
    gc.collect()
    # freeze the objects of imports, so that the garbage collector skips them during the measured
    # work
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
        headline=f"{rows[0][2]} us of processor time per rollout of 12 calls; {rows[1][2]} us if "
        f"calls wait for slots",
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
        f"With {IN_FLIGHT} rollouts in flight, the smallest run ends before its queues are full. "
        "Its calls are probably cheaper, because they touch less memory. Garbage collection "
        "explains a part of the growth: without the collector, the time per rollout grows less.",
        f"With {IN_FLIGHT // 4} rollouts in flight, even the smallest run fills its queues. So "
        "growth in these rows comes from the number of rollouts alone.",
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
        f"{IN_FLIGHT} rollouts are in flight. atts passes each result to the caller and does not keep it. "
        f"The study ran on Python {sys.version.split()[0]}.",
    )


async def _journalled(load: Load, folder: Path) -> None:
    async with open_journal(folder, Manifest(), JournalOptions(durability="close")) as journal:

        def record(event: object) -> None:
            if isinstance(event, CallSpan):
                journal.record(event)

        await with_graph(load, record)


# memory and the number of objects count as constant if they rise by at most this share
_NOISE = 0.02
# number of warm-up runs; after these, each kind of run has had each set of problems, so the caches
# are full
_WARM_UP = 30


def study_soak(options: Options) -> list[Table]:
    """Run for two minutes, four minutes or an hour, and return the process's memory, objects,
    threads and files over time."""
    seconds = options.pick(120.0, 240.0, 3600.0)
    with tempfile.TemporaryDirectory() as folder:
        tally = anyio.run(soak, Path(folder), seconds, options.seed)
    return tables(tally)


def tables(tally: Tally) -> list[Table]:
    """Return three tables: the verdict, the curve, and the list of runs."""
    return [verdict(tally), _levels(tally), _episodes(tally)]


def verdict(tally: Tally) -> Table:
    """Compare the last third of the soak after its warm-up with the first third, and extrapolate to
    an hour.
    """
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
        f"The process made {sum(tally.episodes.values())} runs of {tally.problems} problems in "
        f"{tally.levels[-1].seconds / 60:.0f} "
        f"minutes. {tally.failed_rollouts} rollouts failed because the study made their calls fail, "
        "and the journal records these failures.",
        f"The study compared {tally.compared} outcomes in the journal with the live outcomes and "
        f"found {len(wrong)} differences"
        + (
            f" (first: {wrong[0]})"
            if wrong
            else ". Every finished run could be read from its journal without a call to an engine."
        ),
        f"The first {_WARM_UP} runs are a warm-up, in which the caches of the process fill. Memory and "
        f"the number of objects are called flat if they rise by at most {100 * _NOISE:.0f} % over all "
        "later runs.",
    )
    measures_by_trend = dict[str, list[str]]()
    for row in rows:
        measures_by_trend.setdefault(str(row[-1]), []).append(str(row[0]))
    words = "; ".join(
        f"**{trend}**: {', '.join(names)}" for trend, names in measures_by_trend.items()
    )
    headline = f"{words}. {notes[0]} {notes[1]}"
    header = (
        "between runs | median of the first third | median of the last third | maximum | "
        "growth per hour | verdict"
    )
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
    """Return whether a resource does not grow.

    The number of threads may rise by one, and memory and Python objects by the noise. All other
    counts must not rise.
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
        "cancelled and resumed": "a run with these faults, stopped in the middle, then finished from its journal",
        "drift": "the perplexities of chunks rise in the middle of the study",
        "embedded pair": "real models, one call in a hundred dropped",
        "embedded pair, cancelled": "a run of the embedded pair, stopped in the middle and then finished",
    }
    rows = [(kind, count, what[kind]) for kind, count in tally.episodes.items()]
    return Table.of("Soak: kinds of runs", "kind | runs | what", rows)


def study_crash(options: Options) -> list[Table]:
    """Kill each run up to ten times. The function `crash` raises an error if a resumed run changed
    a recorded result or computed it again.
    """
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
        f"The {len(rows)} runs had {kills} SIGKILLs, about half of them in the middle of a write, and "
        f"{full} full disks.",
        f"The process makes at most {crashing.SLOTS} calls at a time, so a kill interrupts at most "
        f"{crashing.SLOTS} calls.",
    )
    same = sum(row[6] == row[7] == "identical" for row in rows)
    headline = f"{same} of {len(rows)} runs end with identical decisions and outcomes. {notes[0]}"
    header = (
        "run | kills | full disks | sessions | calls read from journal | calls repeated | decisions | "
        "outcomes | seconds"
    )
    return [Table.of("Runs killed again and again", header, rows, *notes, headline=headline)]
