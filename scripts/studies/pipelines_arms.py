"""Runs arms of a comparison side by side on the embedded pair, and remembers every finished piece on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from atts.api import Setup
from atts.core import Outcome, Problem
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine, LocalOptions
from atts.models import path as model_path
from atts.pipelines import Gate, RoundGate
from atts.run import Plan, Session, evaluate
from scripts.studies.harness import say

Split = Literal["calibration", "test"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of a comparison: a name, and the setup it runs with. The seed is the unit's and the arm's own."""

    name: str
    setup: Setup
    target_threads: int = 1


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem under one arm, in the numbers that tables are made of."""

    problem: str
    level: int
    right: float
    share: float  # of the rollouts that ran to their end, how many were right
    ended: int
    draft: int
    scored: int
    target: int
    prefill: int
    wasted: int
    turns: Mapping[str, tuple[int, int]]  # decisions and escalations by turn
    status: str = "answered"

    @classmethod
    def of(cls, outcome: Outcome) -> Solved:
        """From what the run kept."""
        problem, usage = outcome.problem, outcome.usage
        ended = [line for line in outcome.rollouts if line.finish not in ("settled", "cancelled")]
        turns: dict[str, tuple[int, int]] = {}
        for line in outcome.rollouts:
            for decision in (turn.decision for turn in line.turns if turn.decision):
                asked, over = turns.get(str(decision.turn), (0, 0))
                turns[str(decision.turn)] = asked + 1, over + decision.escalate
        return cls(
            problem.id, problem.level or 0, float(outcome.answer == problem.answer),
            sum(line.answer == problem.answer for line in ended) / max(1, len(ended)), len(ended),
            usage.draft_tokens, usage.scored_tokens, usage.target_tokens,
            usage.draft_prefill_tokens + usage.target_prefill_tokens, usage.wasted_tokens, turns, outcome.status,
        )  # fmt: skip

    @property
    def decisions(self) -> int:
        """How often the gate was asked."""
        return sum(asked for asked, _ in self.turns.values())

    @property
    def escalated(self) -> int:
        """How often the target took over."""
        return sum(over for _, over in self.turns.values())


@dataclass(slots=True)
class Piece:
    """What one arm came to on one piece of the problems: in order, with the seconds of each block."""

    arm: str
    samples: int
    seed: int
    shard: int
    solved: list[Solved] = field(default_factory=list[Solved])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What it is a piece of."""
        return self.arm, self.samples, self.seed, self.shard


class Ledger:
    """Every finished piece; with a path, those of earlier sessions too, so that a killed study goes on."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.pieces: dict[tuple[str, int, int, int], Piece] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._take(line)

    def add(self, piece: Piece) -> None:
        """A finished piece, on disk before anything else is begun; several processes may share the file."""
        self._keep(piece)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            newline = "\n" if self._is_torn() else ""
            line = f"{json.dumps(asdict(piece))}\n"
            with self._path.open("ab", buffering=0) as file:  # one write, so that no other process's comes between
                file.write(f"{newline}{line}".encode())

    def of(self, arm: str, samples: int | None = None) -> list[Piece]:
        """An arm's pieces, by seed and shard."""
        found = [p for p in self.pieces.values() if p.arm == arm and samples in (None, p.samples)]
        return sorted(found, key=lambda piece: (piece.samples, piece.seed, piece.shard))

    def _keep(self, piece: Piece) -> None:
        self.pieces[piece.key] = piece

    def _is_torn(self) -> bool:
        data = self._path.read_bytes() if self._path is not None and self._path.exists() else b""
        return bool(data) and not data.endswith(b"\n")

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return say(f"{self._path}: a line was torn by a kill; its piece is run again")
        return self._keep(_piece(record))


def _piece(record: dict[str, Any]) -> Piece:
    solved = [_solved(one) for one in record.pop("solved")]
    return Piece(**record, solved=solved)


def _solved(record: dict[str, Any]) -> Solved:
    turns: dict[str, list[int]] = record.pop("turns")
    return Solved(**record, turns={turn: (asked, over) for turn, (asked, over) in turns.items()})


class Pair:
    """The embedded engines, open; the target once per number of threads that an arm asks for."""

    def __init__(self, threads: Iterable[int] = (1,), **changes: Any) -> None:
        """`changes` are those of `LocalOptions`."""
        options = replace(LocalOptions(), **changes)
        self._stack = AsyncExitStack()
        self.draft: Engine = LocalEngine(model_path("draft"), name="draft", options=options)
        self.targets: dict[int, Engine] = {
            count: LocalEngine(model_path("target"), name="target", options=replace(options, threads=count))
            for count in sorted(set(threads))
        }

    async def __aenter__(self) -> Self:
        for engine in (self.draft, *self.targets.values()):
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def plan(self, arm: Arm, seed: int, gate: Gate | RoundGate | None = None) -> Plan:
        """The arm's plan; its random numbers are no other arm's, so that none finds its texts in a cache."""
        own = seed * 1009 + sum(arm.name.encode()) % 997
        setup = replace(arm.setup, seed=own, gate=gate if gate is not None else arm.setup.gate)
        return setup.plan(self.draft, self.targets[arm.target_threads])


async def run_block(problems: Sequence[Problem], plan: Plan) -> tuple[tuple[Outcome, ...], float]:
    """One block under one plan: its outcomes in the order of the problems, and the seconds it took."""
    began = time.perf_counter()
    result = await evaluate(problems, plan, Session(engines="are open", signals="ignore"))
    seconds = time.perf_counter() - began
    found = {outcome.problem.id: outcome for outcome in result.kept}
    return tuple(found[problem.id] for problem in problems), seconds


@dataclass(frozen=True, slots=True)
class Grid:
    """Which problems, how often: shards of `shard` problems, run in blocks of `block`, arms in turn."""

    problems: int
    seeds: Sequence[int] = (0,)
    shard: int = 500
    block: int = 50
    split: Split = "test"

    def shards(self) -> list[tuple[Problem, ...]]:
        """The problems, cut."""
        found = arithmetic(self.split, self.problems)
        return [tuple(found[i : i + self.shard]) for i in range(0, len(found), self.shard)]


async def run_grid(arms: Sequence[Arm], grid: Grid, ledger: Ledger, pair: Pair, label: str = "pipelines") -> None:
    """Every arm on every shard and seed, interleaved block by block; what the ledger has is not run again.

    A gate lives for a shard: it learns from block to block as in one run of that many problems.
    """
    for seed in grid.seeds:
        for number, shard in enumerate(grid.shards()):
            missing = [arm for arm in arms if (arm.name, arm.setup.policy.samples, seed, number) not in ledger.pieces]
            if missing:
                say(f"{label}: m={missing[0].setup.policy.samples} seed={seed} problems from {number * grid.shard}")
                for piece in await _shard(missing, shard, grid, (seed, number), pair):
                    ledger.add(piece)


async def _shard(
    arms: Sequence[Arm], shard: Sequence[Problem], grid: Grid, place: tuple[int, int], pair: Pair
) -> list[Piece]:
    seed, number = place
    plans = {arm.name: pair.plan(arm, seed * 31 + number) for arm in arms}
    pieces = {arm.name: Piece(arm.name, arm.setup.policy.samples, seed, number) for arm in arms}
    blocks = [shard[i : i + grid.block] for i in range(0, len(shard), grid.block)]
    for count, block in enumerate(blocks):
        turn = count % len(plans)
        for name in [*plans][turn:] + [*plans][:turn]:
            outcomes, seconds = await run_block(block, plans[name])
            pieces[name].seconds.append(seconds)
            pieces[name].solved += [Solved.of(outcome) for outcome in outcomes]
    return [pieces[arm.name] for arm in arms]
