"""Measure in virtual time what asynchrony, drafting and scale are worth on engines with known costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from atts.calibration import Calibrator
from atts.core import HOLD, Outcome, Problem, Role
from atts.graph import Graph, Limit, ProblemScope, measure
from atts.methods import GateInputs, preset
from atts.pipelines import Chunking, Context, Gate, Policy, RoundGate, solve
from atts.run import EngineCalls
from atts.servers import ReplicaPool
from atts.testing import run_virtual
from scripts.studies.graph import Recording
from scripts.studies.harness import Chart, Options, Parts, Row, Table, pair_name, say, times
from scripts.studies.modelled import (
    ANSWERS,
    CHUNK,
    PAIRS,
    BatchedEngine,
    Cost,
    Pair,
    TraceLaw,
    find_library,
)
from scripts.studies.validation import local_validation

Method = Literal[
    "atts",
    "atts, question by question",
    "atts, votes settle",
    "atts, chunks replaced",
    "top-b",
    "target-only",
    "draft-only",
]
Order = Literal["all together", "question by question", "one request at a time"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid: the pair, the method and the sizes of one simulated run."""

    pair: Pair
    method: Method
    problems: int
    samples: int = 16
    turns: int = 15
    rate: float = 0.2
    replicas: int = 1
    in_flight: int = 256  # rollouts, per replica
    order: Order = "all together"
    # KV tokens the graph admits to the target, per replica; None: no bound of the graph's
    budget: int | None = None
    room: Literal["as installed", "without end"] = "as installed"
    seed: int = 0

    def key(self) -> str:
        """Return a name that changes with anything in the cell."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def places(self) -> int:
        """Return the rollouts in flight over the whole installation."""
        return (
            1
            if self.order == "one request at a time"
            else max(self.samples, self.in_flight * self.replicas)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a cell; times are virtual seconds."""

    seconds: float
    draft_tokens: int
    target_tokens: int
    realised: float  # share of judged chunks that were handed over
    waiting: float  # share of call-seconds that rollouts spent waiting for siblings
    intensity: float
    draft_busy: float
    target_busy: float
    target_peak: float  # KV tokens at work at once on one replica

    @property
    def busy(self) -> tuple[float, float]:
        """Return the shares of the time that draft and target worked."""
        return self.draft_busy, self.target_busy

    @property
    def throughput(self) -> float:
        """Return the tokens written per second."""
        return (self.draft_tokens + self.target_tokens) / self.seconds


def run_cell(cell: Cell, law: TraceLaw) -> Found:
    """Run it under virtual time."""
    return run_virtual(_run, cell, law)


async def _run(cell: Cell, law: TraceLaw) -> Found:
    drafts = _engines(cell, law, "draft", cell.pair.draft, cell.pair.draft_kv)
    targets = _engines(cell, law, "target", cell.pair.target, cell.pair.target_kv)
    recording = Recording()
    outcomes = list[Outcome]()
    tokens = None if cell.budget is None else max(1, cell.budget * cell.replicas // law.grain)
    graph = Graph(
        rollouts=cell.places,
        limits={"draft": Limit(), "target": Limit(tokens=tokens)},
        sink=recording,
    )
    policy, gate = _plan(cell, law)
    async with _pool(drafts) as draft, _pool(targets) as target:
        context = Context(draft, target, gate, ANSWERS, EngineCalls, cell.seed)

        async def one(problem: Problem, scope: ProblemScope) -> None:
            outcomes.append(await solve(problem, policy, context, scope))

        for batch in _batches(cell, law):
            await graph.run(batch, one)
        seconds = graph.stats().seconds
    # not the wait for a score asked for already
    rounds = [node for node in recording.nodes() if node.stage != HOLD]
    timing = measure(rounds)
    usage = [outcome.usage for outcome in outcomes]
    decisions = [
        t.decision for o in outcomes for r in o.rollouts for t in r.turns if t.decision is not None
    ]
    whole = timing.sibling_seconds + timing.memory_seconds + timing.arithmetic_seconds
    return Found(
        seconds=seconds,
        draft_tokens=law.grain * sum(u.draft_tokens for u in usage),
        target_tokens=law.grain * sum(u.target_tokens for u in usage),
        realised=sum(d.escalate for d in decisions) / len(decisions) if decisions else math.nan,
        waiting=timing.sibling_seconds / whole,
        intensity=timing.intensity,
        draft_busy=sum(e.load.busy for e in drafts) / seconds / len(drafts),
        target_busy=sum(e.load.busy for e in targets) / seconds / len(targets),
        target_peak=max(e.load.peak for e in targets),
    )


def _engines(cell: Cell, law: TraceLaw, role: Role, cost: Cost, room: int) -> list[BatchedEngine]:
    tokens = math.inf if cell.room == "without end" else room
    return [BatchedEngine(role, law, cost, tokens) for _ in range(cell.replicas)]


def _pool(engines: Sequence[BatchedEngine]) -> BatchedEngine | ReplicaPool:
    if len(engines) == 1:
        return engines[0]
    return ReplicaPool([(f"replica {number}", engine) for number, engine in enumerate(engines)])


def _plan(cell: Cell, law: TraceLaw) -> tuple[Policy, Gate | RoundGate]:
    chosen = preset(cell.method.partition(",")[0])
    tokens = CHUNK // law.grain
    replaces = cell.method == "atts, chunks replaced"
    base = Policy(
        samples=cell.samples,
        turns=cell.turns,
        max_tokens=1 << 20,
        chunking=Chunking(tokens, tokens, ()),
        early_stop="certain" if cell.method == "atts, votes settle" else "none",
        takeover="replace" if replaces else "continue",
        answers="verify" if replaces else "stop",
        timeout_seconds=1e9,
    )
    gate = chosen.gate(GateInputs(Calibrator(cell.rate, seed=cell.seed)))
    return chosen.policy(base), gate


def _batches(cell: Cell, law: TraceLaw) -> list[list[Problem]]:
    problems = law.problems(cell.problems)
    is_split = "question by question" in (cell.order, cell.method.removeprefix("atts, "))
    return [[problem] for problem in problems] if is_split else [problems]


class Results:
    """Cells that are done, on disk where a file is given."""

    def __init__(self, law: TraceLaw, file: Path | None) -> None:
        self._law = law
        self._done = Parts(file)

    def __len__(self) -> int:
        return len(self._done)

    def get(self, cell: Cell) -> Found:
        """Return the cell's result, from now or from before."""
        key = f"{cell.key()}-{self._law.library.origin[:9]}"
        if key not in self._done:
            self._done.keep(key, asdict(run_cell(cell, self._law)))
        return Found(**self._done[key])


EIGHT = PAIRS["8B/70B"]
SMALL = PAIRS["1.5B/70B"]
METHODS: tuple[Method, ...] = ("atts", "atts, votes settle", "top-b", "target-only", "draft-only")
GAINED: tuple[Method, ...] = (
    "atts", "top-b", "atts, question by question", "atts, votes settle", "atts, chunks replaced"
)  # fmt: skip
_Scaled = tuple[Method, int, float, float, float, float, float, float]
PAPER_SPEEDUP = 56.7
PAPER_THROUGHPUT = 4.14
_SCALING = "method | replicas | seconds | tokens/s | speed-up over 1 | efficiency | draft busy | target busy"


def study(options: Options) -> list[Table]:
    """Validate on this machine, then run the grids.

    What an earlier run left in the folder is not repeated.
    """
    law = TraceLaw(find_library(), options.seed)
    results = Results(law, options.file("scale-cells.jsonl"))
    say(f"scale: work from {law.library.origin}; {len(results)} cells are there already")
    kept = Parts(options.file("scale-validation.jsonl"))
    name = f"{options.effort} {pair_name()}"
    if name not in kept:
        kept.keep(name, [asdict(table) for table in local_validation(options)])
    return [*(Table.read(fields) for fields in kept[name]), *tables(options, law, results)]


def tables(options: Options, law: TraceLaw, results: Results) -> list[Table]:
    """Return every table of the grids in virtual time."""
    grids = _Grids(options, results)
    made = [costs_table(law), grids.gains()]
    made += [grids.samples(pair) for pair in grids.pairs]
    for make in (grids.turns, grids.rates, grids.replicas, grids.growing, grids.headlines):
        say(f"scale: {make.__name__}")
        made.append(make())
    return made


def costs_table(law: TraceLaw) -> Table:
    """Describe the simulated engines."""

    def row(name: str, cost: Cost, room: int) -> Row:
        coefficients = (
            1e3 * cost.step,
            1e6 * cost.sequence,
            1e9 * cost.cached,
            1e6 * cost.prefilled,
        )
        rates = (1 / cost.seconds(1, 1000), 128 / cost.seconds(128, 128_000))
        return name, *coefficients, room, *rates, cost.origin

    return Table.of(
        "The modelled engines",
        "engine | a, ms a step | b, us a sequence | c, ns a KV token | d, us a prefilled token | "
        "KV tokens | "
        "tokens/s at batch 1 | at batch 128 | origin",
        [
            row("70B target", EIGHT.target, EIGHT.target_kv),
            row("8B draft", EIGHT.draft, EIGHT.draft_kv),
            row("1.5B draft", SMALL.draft, SMALL.draft_kv),
        ],
        f"Work: {law.library.origin}; prompts of 150 tokens, chunks of up to 500, all methods "
        f"write equally much.",
    )


@dataclass(frozen=True, slots=True)
class _Grids:
    """The grids of one effort; each table is a walk over cells."""

    options: Options
    results: Results

    @property
    def pairs(self) -> Sequence[Pair]:
        """Return the installations that most tables compare."""
        return self.options.pick((EIGHT,), (EIGHT, SMALL), (EIGHT, SMALL))

    @property
    def sizes(self) -> Sequence[int]:
        """Return the numbers of samples."""
        return self.options.pick((4, 16), (1, 4, 16, 64, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def cell(self, pair: Pair, method: Method, samples: int, **changes: Any) -> Cell:
        """Return a cell with the same number of rollouts, whatever the number of samples."""
        problems = max(self.options.pick(2, 2, 16), self.options.pick(128, 256, 1600) // samples)
        return replace(Cell(pair, method, problems, samples, seed=self.options.seed), **changes)

    def get(self, cell: Cell, **changes: Any) -> Found:
        """Return the result of a cell with these changes."""
        return self.results.get(replace(cell, **changes))

    def samples(self, pair: Pair) -> Table:
        """Return time, throughput and r against the number of samples."""
        rows: list[Row] = []
        for samples in self.sizes:
            for method in METHODS:
                cell = self.cell(pair, method, samples)
                found = self.get(cell)
                measured = (
                    found.seconds / cell.problems,
                    found.throughput,
                    found.intensity,
                    *found.busy,
                )
                rows.append((samples, method, *measured, found.realised))
        return Table.of(
            f"Samples per question, {pair.name}: 1 replica, 256 rollouts in flight, rate 0.2, up "
            f"to 15 turns",
            "samples | method | s a question | tokens/s | r | draft busy | target busy | realised "
            "rate",
            rows,
            chart=Chart("samples", "tokens/s", "method", "log", "log"),
        )

    def gains(self) -> Table:
        """Compare with target-only, and with the rounds of top-B at the same budget."""
        rows = list[Row]()
        parts = list[str]()
        for pair in self.pairs:
            for samples in self.options.pick((4, 16), (16, 64, 256), (16, 64, 256)):
                alone = self.get(self.cell(pair, "target-only", samples)).seconds
                for rate in self.options.pick((0.2,), (0.2, 0.4), (0.05, 0.1, 0.2, 0.4, 0.6)):
                    cell = self.cell(pair, "atts", samples, rate=rate)
                    ours, rounds, queue, settled, replaced = (
                        self.get(cell, method=how).seconds for how in GAINED
                    )
                    gains = (
                        alone / ours,
                        alone / settled,
                        alone / replaced,
                        rounds / ours,
                        queue / ours,
                    )
                    rows.append((pair.name, samples, rate, *gains))
                    if samples == 16 and rate == 0.2:
                        parts.append(
                            f"{pair.name.split('/')[0]} draft: **{times(gains[0])}** the target "
                            f"alone "
                            f"({times(gains[1])} where decided votes stop), {times(gains[3])} "
                            f"sorted rounds, "
                            f"{times(gains[4])} question by question"
                        )
        return Table.of(
            "What is gained: the same work and the same share of target tokens",
            "pair | samples | rate | over target-only | votes settle | chunks replaced | over "
            "top-b rounds | "
            "over question by question",
            rows,
            headline="with a 70B target, 16 samples, rate 0.2: " + "; ".join(parts),
        )

    def turns(self) -> Table:
        """Show how the cost of rounds grows with their number, for few and many samples."""
        rows: list[Row] = []
        for samples in self.options.pick((16,), (16, 64), (16, 64, 256)):
            for turns in self.options.pick(
                (1, 4), (1, 2, 4, 8, 15, 30), (1, 2, 3, 4, 6, 8, 11, 15, 22, 30)
            ):
                cell = self.cell(EIGHT, "atts", samples, turns=turns)
                ours = self.get(cell)
                rounds = self.get(cell, method="top-b")
                target = self.get(cell, method="target-only").seconds
                ratios = (target / ours.seconds, rounds.seconds / ours.seconds)
                rows.append(
                    (samples, turns, *ratios, rounds.waiting, ours.intensity, rounds.intensity)
                )
        return Table.of(
            "Turns: 8B/70B, rate 0.2",
            "samples | turns at most | over target-only | over top-b | Ts share of top-b | r of "
            "atts | r of top-b",
            rows,
            chart=Chart("turns at most", "Ts share of top-b", "samples"),
        )

    def rates(self) -> Table:
        """Return speed against the share that escalates."""
        samples = self.options.pick(16, 16, 64)
        rows = list[Row]()
        for pair in self.pairs:
            base = self.cell(pair, "atts", samples)
            alone = self.get(base, method="target-only").seconds
            for rate in self.options.pick(
                (0.05, 0.6), (0.05, 0.1, 0.2, 0.4, 0.6), (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)
            ):
                found = self.get(base, rate=rate)
                share = found.target_tokens / (found.target_tokens + found.draft_tokens)
                rows.append(
                    (
                        pair.name,
                        rate,
                        found.realised,
                        alone / found.seconds,
                        found.throughput,
                        share,
                        *found.busy,
                    )
                )
        return Table.of(
            f"The rate: {samples} samples, up to 15 turns",
            "pair | rate | realised rate | over target-only | tokens/s | target's share of tokens "
            "| draft busy | "
            "target busy",
            rows,
            chart=Chart("rate", "over target-only", "pair"),
        )

    def replicas(self) -> Table:
        """Give a fixed amount of work to more and more replicas, until it saturates."""
        questions = self.options.pick(16, 50, 500)
        rows = list[_Scaled]()
        for method in self.options.pick(METHODS[:1], ("atts", "top-b", "target-only"), METHODS):
            places = self.options.pick((1, 4), (1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64))
            rows += self._scaling(method, dict.fromkeys(places, questions))
        atts = [
            (replicas, gain, share)
            for name, replicas, _, _, gain, share, *_ in rows
            if name == "atts"
        ]
        well = max(replicas for replicas, _, share in atts if share >= 0.5)
        return Table.of(
            f"Replicas of both engines: 8B/70B, {questions} questions x 16 samples, rate 0.2, 256 "
            f"rollouts each in "
            "flight",
            _SCALING,
            rows,
            headline=f"a fixed evaluation uses up to {well} replicas well (efficiency above one "
            f"half) and gets "
            f"{times(atts[-1][1])} from {atts[-1][0]}",
            chart=Chart("replicas", "tokens/s", "method", "log", "log"),
        )

    def growing(self) -> Table:
        """Give every replica as much work: the rate that a cluster sustains."""
        rows: list[_Scaled] = []
        for method in self.options.pick(
            METHODS[:1], ("atts", "target-only"), ("atts", "top-b", "target-only")
        ):
            places = self.options.pick((1, 4), (1, 4, 16), (1, 2, 4, 8, 16, 32, 64))
            rows += self._scaling(method, {replicas: 16 * replicas for replicas in places})
        last = [row for row in rows if row[0] == "atts"][-1]
        return Table.of(
            "Work that grows with the replicas: 8B/70B, 16 questions x 16 samples for each, rate "
            "0.2",
            _SCALING,
            rows,
            headline=f"with as much work per replica, {last[1]} replicas write **{last[3]:,.0f} "
            f"tokens/s** at "
            f"efficiency {last[5]:.2g}",
            chart=Chart("replicas", "tokens/s", "method", "log", "log"),
        )

    def _scaling(self, method: Method, questions: dict[int, int]) -> list[_Scaled]:
        """Compare a method on more and more replicas with itself on the fewest, each with its own
        number of questions.
        """
        rows: list[_Scaled] = []
        first: tuple[int, float] | None = None
        for replicas, count in questions.items():
            found = self.get(
                Cell(EIGHT, method, count, 16, replicas=replicas, seed=self.options.seed)
            )
            first = first or (replicas, found.throughput)
            gain = found.throughput / first[1] * first[0]
            rows.append(
                (
                    method,
                    replicas,
                    found.seconds,
                    found.throughput,
                    gain,
                    gain / replicas,
                    *found.busy,
                )
            )
        return rows

    def headlines(self) -> Table:
        """Show which assumptions reach the published factors, with the conditions of each."""
        rows = list[Row]()
        best = dict[str, float]()
        for pair in self.options.pick((SMALL,), (EIGHT, SMALL), (EIGHT, SMALL)):
            for samples in self.options.pick((16,), (16, 64, 256), (16, 64, 256)):
                setting = f"{pair.name}, {samples} samples"
                speeds = self._speedups(self.cell(pair, "target-only", samples))
                throughputs = self._throughputs(self.cell(pair, "top-b", samples, rate=0.4))
                rows += [
                    (setting, name, ratio, _reached(ratio, PAPER_SPEEDUP)) for name, ratio in speeds
                ]
                rows += [
                    (setting, name, ratio, _reached(ratio, PAPER_THROUGHPUT))
                    for name, ratio in throughputs
                ]
                best |= {
                    name: max(best.get(name, 0.0), ratio) for name, ratio in speeds + throughputs
                }
        return Table.of(
            "The published headline figures: which baseline reaches them",
            "setting | baseline | ratio | published figure",
            rows,
            headline=f"{PAPER_THROUGHPUT:g}x in throughput: "
            f"{_compared(best, 'throughput, ', PAPER_THROUGHPUT)}. "
            f"{PAPER_SPEEDUP:g}x in time: {_compared(best, 'target-only, ', PAPER_SPEEDUP)}",
        )

    def _speedups(self, alone: Cell) -> list[tuple[str, float]]:
        ours = self.get(alone, method="atts", rate=0.05).seconds
        together = self.get(alone)
        queue = self.get(alone, order="question by question")
        samples = min(alone.samples, 64)
        few = self.get(
            alone, order="one request at a time", problems=max(1, 64 // samples), samples=samples
        )
        return [
            ("target-only, all together", together.seconds / ours),
            ("target-only, question by question", queue.seconds / ours),
            (
                "target-only, one request at a time",
                few.seconds / few.target_tokens * together.target_tokens / ours,
            ),
        ]

    def _throughputs(self, rounds: Cell) -> list[tuple[str, float]]:
        ours = self.get(rounds, method="atts").throughput
        queue = self.get(rounds, order="question by question")
        return [
            ("throughput, top-b in rounds", ours / self.get(rounds).throughput),
            ("throughput, top-b, question by question", ours / queue.throughput),
        ]


def _reached(ratio: float, figure: float) -> str:
    return f"reached ({figure:g}x)" if ratio >= figure else f"{ratio / figure:.0%} of {figure:g}x"


def _compared(best: Mapping[str, float], kind: str, figure: float) -> str:
    """Split the baselines of a kind into those against which the figure is reached, and the others."""
    mine = {
        name.removeprefix("throughput, "): ratio
        for name, ratio in best.items()
        if name.startswith(kind)
    }
    reached = [f"{name} ({times(ratio)})" for name, ratio in mine.items() if ratio >= figure]
    others = [f"{name} ({times(ratio)} at most)" for name, ratio in mine.items() if ratio < figure]
    groups = {"reached against": reached, "not against": others}
    return "; ".join(f"{words} {', '.join(names)}" for words, names in groups.items() if names)
