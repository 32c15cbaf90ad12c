"""Measure the processor time of the task graph, its growth with the load, and idle slots."""

from __future__ import annotations

import gc
import sys
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from atts.core import CallSpan, CallStatus, ProblemSpan, RolloutSpan
from atts.graph import Admit, Graph, Limit, ProblemScope, RolloutScope, Sink, Timing, measure
from atts.journal import JournalOptions, Manifest, open_journal
from atts.testing import run_virtual
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
from scripts.studies.modelled import recorded_rollouts

_ROW = Struct("<qiiiiiddddqibqb")
_STATUS: tuple[CallStatus, ...] = ("done", "failed", "cancelled")
_CODE = {status: code for code, status in enumerate(_STATUS)}
_NO_NODE = -1
_rollout_fields = attrgetter(*RolloutSpan.__struct_fields__)
_problem_fields = attrgetter(*ProblemSpan.__struct_fields__)


class Recording:
    """An event sink that packs its events into little memory and returns them in order.

    Calls are packed into a hundred bytes each: kept as objects, a million of them slow every
    further step, because the garbage collector visits them again and again.
    """

    __slots__ = ("_codes", "_edges", "_names", "_problems", "_rollouts", "_rows", "others")

    def __init__(self) -> None:
        self.others: list[object] = []  # events emitted by pipelines
        # tuples of plain values, which the garbage collector stops tracking
        self._rollouts: list[tuple[Any, ...]] = []
        self._problems: list[tuple[Any, ...]] = []
        self._rows = bytearray()
        self._codes: dict[str, int] = {}
        self._names: list[str] = []
        # edges of calls that waited for other than one call
        self._edges: dict[int, tuple[int, ...]] = {}

    def __call__(self, event: object) -> None:
        """Keep an event."""
        if isinstance(event, CallSpan):
            self._keep(event)
        elif isinstance(event, RolloutSpan):
            self._rollouts.append(_rollout_fields(event))
        elif isinstance(event, ProblemSpan):
            self._problems.append(_problem_fields(event))
        else:
            self.others.append(event)

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._rows) // _ROW.size

    @property
    def rollouts(self) -> list[RolloutSpan]:
        """Return the rollouts in the order in which they ended."""
        return [RolloutSpan(*values) for values in self._rollouts]

    @property
    def problems(self) -> list[ProblemSpan]:
        """Return the problems in the order in which they ended."""
        return [ProblemSpan(*values) for values in self._problems]

    def nodes(self) -> Iterator[CallSpan]:
        """Return the calls, in the order they ended."""
        names = self._names
        for row in _ROW.iter_unpack(self._rows):
            node, stage, engine, problem, sample, turn, *_ = row
            ready, queued, started, ended, first, attempt, status, tokens, live = row[6:]
            yield CallSpan(
                node=node,
                stage=names[stage],
                engine=names[engine],
                problem=names[problem],
                sample=sample,
                turn=turn,
                ready=ready,
                queued=queued,
                started=started,
                ended=ended,
                after=self._edges[node] if first == _NO_NODE else (first,),
                attempt=attempt,
                status=_STATUS[status],
                tokens=tokens,
                source="live" if live else "recalled",
            )

    def _keep(self, span: CallSpan) -> None:
        if len(span.after) == 1:
            first = span.after[0]
        else:
            first = _NO_NODE
            self._edges[span.node] = span.after
        codes = self._codes
        try:
            names = (codes[span.stage], codes[span.engine], codes[span.problem])
        except KeyError:
            names = (self._code(span.stage), self._code(span.engine), self._code(span.problem))
        who = (span.node, *names, span.sample, span.turn)
        times = (span.ready, span.queued, span.started, span.ended)
        done = (first, span.attempt, _CODE[span.status], span.tokens, span.source == "live")
        self._rows += _ROW.pack(*who, *times, *done)

    def _code(self, name: str) -> int:
        if name not in self._codes:
            self._codes[name] = len(self._names)
            self._names.append(name)
        return self._codes[name]


SLOTS = {"draft": 16, "target": 4}
REPLAYED_SAMPLES = 16
Stage = tuple[str, str, int, float]
"""Stage, engine, turn, seconds."""
Questions = Mapping[str, Sequence[Sequence[Stage]]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the recorded run."""

    id: str


def conserved() -> list[Table]:
    """Replay recorded rollouts on limited slots; return no table if the traces are absent."""
    rollouts = recorded_rollouts()
    if rollouts is None:
        say(
            "graph: the recorded traces are not at hand: nothing is said of the conservation of "
            "work"
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
        "admission | virtual s | of the least possible (bar: 1.03) | of the first (bar: 1.35 with "
        "a barrier) | "
        "target slots idle | s waiting for siblings",
        rows,
        f"{len(rollouts)} recorded rollouts of {len(questions)} questions; slots: {SLOTS['draft']} "
        f"of the draft, "
        f"{SLOTS['target']} of the target; first come first served.",
    )
    return [table]


def lower_bound(timing: Timing) -> float:
    """Return the seconds that no schedule on these slots can beat: the most loaded engine's work,
    or the longest chain.
    """
    return max(
        timing.critical_path.seconds,
        *(timing.busy_seconds[name] / count for name, count in SLOTS.items()),
    )


def stages(rollouts: Sequence[Mapping[str, Any]]) -> Questions:
    """Return the stages of every rollout of a recorded run, with durations fitted to it."""
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
STAGES = (("draft", "draft"), ("score", "target"), ("escalate", "target"))  # 12 nodes a rollout
IN_FLIGHT = 1000


@dataclass(frozen=True, slots=True)
class Named:
    """A problem."""

    id: str


@dataclass(frozen=True, slots=True)
class Load:
    """A workload: the number of rollouts, the slots, and the rollouts in flight."""

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
    """Return processor time per rollout, in microseconds."""
    gc.collect()
    # frozen: the garbage collector skips objects from imports, which are not part of this work
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
        f"With {IN_FLIGHT // 4} in flight the smallest size runs four waves, so the growth that is "
        f"left comes from the number of rollouts.",
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

        def record(event: object) -> None:
            if isinstance(event, CallSpan):
                journal.record(event)

        await with_graph(load, record)
