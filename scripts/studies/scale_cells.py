"""One point of the scale study: a method on two modelled engines, run through the real graph and
pipelines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from atts.calibration import Calibrator
from atts.core import HOLD, Outcome, Problem, Role
from atts.graph import Graph, Limit, ProblemScope, measure
from atts.methods import GateInputs, preset
from atts.pipelines import Chunking, Context, Gate, Policy, RoundGate, solve
from atts.run import EngineCalls
from atts.servers import ReplicaPool
from atts.testing import run_virtual
from scripts.studies.parts import Parts
from scripts.studies.scale_costs import Cost, Pair
from scripts.studies.scale_work import ANSWERS, CHUNK, TraceLaw
from tests.studies.batched_engine import BatchedEngine
from tests.studies.recording import Recording

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
    """What is run."""

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
        """A name that changes with anything in it."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def places(self) -> int:
        """Rollouts in flight over the whole installation."""
        return (
            1
            if self.order == "one request at a time"
            else max(self.samples, self.in_flight * self.replicas)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it; times are virtual seconds."""

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
        """Shares of the time that draft and target worked."""
        return self.draft_busy, self.target_busy

    @property
    def throughput(self) -> float:
        """Tokens written a second."""
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
        """The cell's result, now or from before."""
        key = f"{cell.key()}-{self._law.library.origin[:9]}"
        if key not in self._done:
            self._done.keep(key, asdict(run_cell(cell, self._law)))
        return Found(**self._done[key])
