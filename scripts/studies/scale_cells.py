"""One point of the scale study: a method on two modelled engines, run through the real graph and pipelines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from atts.calibration import Calibrator
from atts.core import Outcome, Problem, Role
from atts.engine import Engine
from atts.graph import Graph, Limit, ProblemScope, Recording, measure
from atts.methods import GateInputs, preset
from atts.pipelines import Chunking, Context, Gate, Policy, RoundGate, solve
from atts.remote import ReplicaPool
from atts.testing import run_virtual
from scripts.studies.scale_costs import Cost, Pair
from scripts.studies.scale_engine import BatchedEngine
from scripts.studies.scale_work import ANSWERS, CHUNK, TraceLaw

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

_PRESET: dict[Method, str] = {
    "atts": "atts",
    "atts, question by question": "atts",
    "atts, votes settle": "atts",
    "atts, chunks replaced": "atts",
    "top-b": "top-b",
    "target-only": "target-only",
    "draft-only": "draft-only",
}


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
    budget: int | None = None  # KV tokens the graph admits to the target, per replica; None: no bound of the graph's
    room: Literal["as installed", "without end"] = "as installed"
    seed: int = 0

    def key(self) -> str:
        """A name that changes with anything in it; what came later and is not set leaves it as it was."""
        fields = asdict(self)
        for role in ("draft", "target"):
            if not fields["pair"][role]["request"]:
                del fields["pair"][role]["request"]
        return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def places(self) -> int:
        """Rollouts in flight over the whole installation."""
        if self.order == "one request at a time":
            return 1
        return max(self.samples, self.in_flight * self.replicas)


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it; times are virtual seconds."""

    seconds: float
    rollouts: int
    draft_tokens: int
    target_tokens: int
    scored_tokens: int
    realised: float  # share of judged chunks that were handed over
    arithmetic: float  # Tc, Tm, Ts: call-seconds of scoring, of decoding, of waiting for siblings
    memory: float
    siblings: float
    intensity: float
    draft_busy: float
    target_busy: float
    target_peak: float  # KV tokens at work at once on one replica
    calls: int

    @property
    def throughput(self) -> float:
        """Tokens written a second."""
        return (self.draft_tokens + self.target_tokens) / self.seconds


def run_cell(cell: Cell, law: TraceLaw, keep_load: bool = False) -> tuple[Found, list[BatchedEngine]]:
    """Run it under virtual time; with the target's engines, whose load over time they kept if asked."""
    return run_virtual(_run, cell, law, keep_load)


async def _run(cell: Cell, law: TraceLaw, keep_load: bool) -> tuple[Found, list[BatchedEngine]]:
    drafts = _engines(cell, law, "draft", cell.pair.draft, cell.pair.draft_kv, keep_load)
    targets = _engines(cell, law, "target", cell.pair.target, cell.pair.target_kv, keep_load)
    policy, gate = _plan(cell, law)
    recording = Recording()
    budget = None if cell.budget is None else Limit(tokens=max(1, cell.budget * cell.replicas // law.grain))
    limits = {"draft": Limit(), "target": budget or Limit()}
    async with AsyncExitStack() as stack:
        draft: Engine = await stack.enter_async_context(_pool(drafts))
        target: Engine = await stack.enter_async_context(_pool(targets))
        context = Context(draft, target, gate, ANSWERS, cell.seed)
        graph = Graph(rollouts=cell.places, limits=limits, sink=recording)
        outcomes: list[Outcome] = []

        async def one(problem: Problem, scope: ProblemScope) -> None:
            outcomes.append(await solve(problem, policy, context, scope))

        for batch in _batches(cell, law):
            await graph.run(batch, one)
        seconds = graph.stats().seconds
    return _found(cell, seconds, outcomes, recording, drafts, targets, law.grain), targets


def _engines(cell: Cell, law: TraceLaw, role: Role, cost: Cost, room: int, keep_load: bool) -> list[BatchedEngine]:
    tokens = math.inf if cell.room == "without end" else room
    return [BatchedEngine(role, law, cost, tokens, keep_load=keep_load) for _ in range(cell.replicas)]


def _pool(engines: Sequence[BatchedEngine]) -> BatchedEngine | ReplicaPool:
    if len(engines) == 1:
        return engines[0]
    return ReplicaPool([(f"replica {number}", engine) for number, engine in enumerate(engines)])


def _plan(cell: Cell, law: TraceLaw) -> tuple[Policy, Gate | RoundGate]:
    chosen = preset(_PRESET[cell.method])
    tokens = CHUNK // law.grain
    base = Policy(
        samples=cell.samples,
        turns=cell.turns,
        max_tokens=1 << 20,
        chunking=Chunking(tokens, tokens, ()),
        early_stop="certain" if cell.method == "atts, votes settle" else "none",
        takeover="replace" if cell.method == "atts, chunks replaced" else "continue",
        answers="verify" if cell.method == "atts, chunks replaced" else "stop",
        timeout_seconds=1e9,
    )
    gate = chosen.gate(GateInputs(Calibrator(cell.rate, seed=cell.seed)))
    return chosen.policy(base), gate


def _batches(cell: Cell, law: TraceLaw) -> Iterator[list[Problem]]:
    problems = law.problems(cell.problems)
    if cell.order == "question by question" or cell.method == "atts, question by question":
        yield from ([problem] for problem in problems)
    else:
        yield problems


def _found(
    cell: Cell,
    seconds: float,
    outcomes: Sequence[Outcome],
    recording: Recording,
    drafts: Sequence[BatchedEngine],
    targets: Sequence[BatchedEngine],
    grain: int,
) -> Found:
    timing = measure(recording.nodes())
    decisions = [t.decision for o in outcomes for r in o.rollouts for t in r.turns if t.decision is not None]
    usage = [o.usage for o in outcomes]
    return Found(
        seconds,
        cell.samples * cell.problems,
        grain * sum(u.draft_tokens for u in usage),
        grain * sum(u.target_tokens for u in usage),
        grain * sum(u.scored_tokens for u in usage),
        sum(d.escalate for d in decisions) / len(decisions) if decisions else math.nan,
        timing.arithmetic_seconds,
        timing.memory_seconds,
        timing.sibling_seconds,
        timing.intensity,
        sum(e.load.busy for e in drafts) / seconds / len(drafts),
        sum(e.load.busy for e in targets) / seconds / len(targets),
        max(e.load.peak for e in targets),
        sum(u.calls for u in usage),
    )


class Results:
    """Cells that are done, on disk where a folder is given: a study that was stopped goes on where it was."""

    def __init__(self, law: TraceLaw, folder: Path | None) -> None:
        self._law = law
        self._done: dict[str, Found] = {}
        self._file = None if folder is None else folder / "scale-cells.jsonl"
        if self._file is not None and self._file.exists():
            for line in self._file.read_text().splitlines():
                record = json.loads(line)
                self._done[record["key"]] = Found(**record["found"])

    def __len__(self) -> int:
        return len(self._done)

    def get(self, cell: Cell) -> Found:
        """The cell's result, now or from before."""
        key = f"2-{cell.key()}-{self._law.library.origin[:9]}"  # 2: the version of the policy that cells run with
        if key not in self._done:
            found, _ = run_cell(cell, self._law)
            self._done[key] = found
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                record = {"key": key, "cell": asdict(replace(cell, pair=cell.pair)), "found": asdict(found)}
                with self._file.open("a") as out:
                    out.write(json.dumps(record) + "\n")
        return self._done[key]
