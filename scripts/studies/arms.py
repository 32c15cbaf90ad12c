"""Methods compared on the same problems: run in turn block by block, every finished piece
remembered on disk.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from atts.accel import accelerated
from atts.api import Setup
from atts.core import Outcome, Problem, Turn
from atts.engine import Engine
from atts.evaluators import Estimate, compare_runs, mean_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine, LocalOptions
from atts.models import info
from atts.models import path as model_path
from atts.pipelines import Gate, RoundGate
from atts.run import RunOptions, RunSpec, evaluate
from scripts.studies.harness import Parts, Spread, say, tree_seconds

RATE = Setup().rate
CONTEXT = 128
"""Tokens that a token of the embedded pair sees on average, for the arithmetic it costs."""
Schedule = Literal["together", "one by one"]
Variant = Literal["plain", "proposed to", "rounding"]
"""Of the target: the draft proposes tokens to it, or it rounds what it scores."""
Watch = Callable[[str, Sequence[Outcome]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Arm:
    """A row of a comparison: a name, and the setup it runs with.

    The seed is the run's and the arm's own.
    """

    name: str
    setup: Setup
    target_threads: int = 1
    schedule: Schedule = "together"
    variant: Variant = "plain"

    def but(self, name: str = "", **changes: Any) -> Arm:
        """Return the same arm with another policy, perhaps under another name."""
        return replace(
            self,
            name=name or self.name,
            setup=replace(self.setup, policy=replace(self.setup.policy, **changes)),
        )


def arm(
    name: str,
    method: str = "",
    *,
    samples: int = 8,
    rate: float = RATE,
    threads: int = 1,
    **changes: Any,
) -> Arm:
    """Return an arm of a method.

    The method is the arm's name unless one is given; `changes` are of the setup or of its policy.
    """
    base = Setup()
    schedule = changes.pop("schedule", "together")
    variant = changes.pop("variant", "plain")
    own = {
        key: changes.pop(key)
        for key in ("rate_scope", "stored", "limits", "concurrency", "gate")
        if key in changes
    }
    policy = replace(base.policy, samples=samples, **changes)
    setup = replace(base, method=method or name, rate=rate, policy=policy, **own)
    return Arm(name, setup, threads, schedule, variant)


class Pair:
    """The embedded engines, open; the target once per number of threads that an arm asks for."""

    def __init__(
        self, threads: Iterable[int] = (1,), variants: Iterable[Variant] = (), **changes: Any
    ) -> None:
        """Open targets of these variants too, with one thread.

        `changes` are fields of `LocalOptions`.
        """
        options = replace(LocalOptions(), **changes)
        self._stack = AsyncExitStack()
        self.draft: Engine = LocalEngine(model_path("draft"), name="draft", options=options)
        self.targets: dict[int | Variant, Engine] = {
            count: LocalEngine(
                model_path("target"), name="target", options=replace(options, threads=count)
            )
            for count in sorted(set(threads))
        }
        for variant in variants:
            one = replace(
                options, threads=1, scores="bfloat16" if variant == "rounding" else options.scores
            )
            lent = str(model_path("draft")) if variant == "proposed to" else ""
            self.targets[variant] = accelerated(
                model_path("target"), name="target", options=one, lent=lent
            )

    async def __aenter__(self) -> Self:
        for engine in (self.draft, *self.targets.values()):
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def plan(self, arm: Arm, seed: int, gate: Gate | RoundGate | None = None) -> RunSpec:
        """Return the arm's plan.

        Its random numbers are its own, so that no arm finds its texts in a cache.
        """
        own = seed * 1009 + sum(arm.name.encode()) % 997
        setup = replace(arm.setup, seed=own, gate=gate if gate is not None else arm.setup.gate)
        target = arm.target_threads if arm.variant == "plain" else arm.variant
        return setup.plan(self.draft, self.targets[target])


async def run_block(
    problems: Sequence[Problem],
    plan: RunSpec,
    schedule: Schedule = "together",
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[Outcome, ...], float]:
    """Run one block under one plan, and return its outcomes in the order of the problems with the
    seconds it took.
    """
    began = clock()
    found = dict[str, Outcome]()
    for group in (
        [list(problems)] if schedule == "together" else [[problem] for problem in problems]
    ):
        result = await evaluate(group, plan, RunOptions(engines="are open", signals="ignore"))
        found |= {outcome.problem.id: outcome for outcome in result.kept}
    seconds = clock() - began
    return tuple(found[problem.id] for problem in problems), seconds


def scores_of(outcomes: Iterable[Outcome]) -> tuple[float, ...]:
    """Return the scores of all chunks, rollout by rollout."""
    turns = (turn for outcome in outcomes for line in outcome.rollouts for turn in line.turns)
    return tuple(turn.score for turn in turns if turn.score is not None)


@dataclass(frozen=True, slots=True)
class Solved:
    """A problem under one arm, in the numbers that tables are made of."""

    problem: str
    level: int
    right: float
    share: float  # share of the finished rollouts that are correct
    draft: int
    scored: int
    target: int
    # place in the order of asking, turn, whether the target took over
    decisions: Sequence[tuple[int, int, bool]]
    drawn: int = 0  # target tokens drawn while it scored
    # tokens of chunks that were decided on by a score, whether the target was asked for it or not
    judged: int = 0

    @classmethod
    def of(cls, outcome: Outcome) -> Solved:
        """Summarise what the run kept of one problem."""
        problem = outcome.problem
        usage = outcome.usage
        ended = [line for line in outcome.rollouts if line.finish not in ("settled", "cancelled")]
        made = [turn.decision for line in outcome.rollouts for turn in line.turns if turn.decision]
        return cls(
            problem=problem.id,
            level=problem.level or 0,
            right=float(outcome.answer == problem.answer),
            share=sum(line.answer == problem.answer for line in ended) / max(1, len(ended)),
            draft=usage.draft_tokens,
            scored=usage.scored_tokens,
            target=usage.target_tokens,
            decisions=[(one.issue or 0, one.turn, one.escalate) for one in made],
            drawn=usage.drawn_tokens,
            judged=sum(_judged(turn) for line in outcome.rollouts for turn in line.turns),
        )

    @property
    def escalated(self) -> int:
        """Count the escalations."""
        return sum(over for _, _, over in self.decisions)


def _judged(turn: Turn) -> int:
    chunk = turn.drafted
    return 0 if turn.score is None or chunk is None else len(chunk.target_ids)


@dataclass(slots=True)
class Piece:
    """The results of one arm on one piece of the problems, in order, with the seconds of each
    block.
    """

    arm: str
    samples: int
    seed: int
    shard: int
    solved: list[Solved] = field(default_factory=list[Solved])
    seconds: list[float] = field(default_factory=list[float])
    # seconds of this process and its engines
    processor: list[float] = field(default_factory=list[float])

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Return the arm, seed and shard that the piece belongs to."""
        return self.arm, self.samples, self.seed, self.shard


class Ledger:
    """Every finished piece; with a path, those of earlier sessions too."""

    def __init__(self, path: Path | None = None) -> None:
        self._parts = Parts(path)
        found = [read_piece(value) for value in self._parts.values()]
        self.pieces: dict[tuple[str, int, int, int], Piece] = {piece.key: piece for piece in found}

    def add(self, piece: Piece) -> None:
        """Keep a piece; several processes may share the file."""
        self.pieces[piece.key] = piece
        self._parts.keep("|".join(map(str, piece.key)), asdict(piece))

    def of(self, arm: str, samples: int | None = None) -> Sum:
        """Return the pieces of an arm by seed and shard."""
        found = [p for p in self.pieces.values() if p.arm == arm and samples in (None, p.samples)]
        return Sum(sorted(found, key=lambda piece: (piece.samples, piece.seed, piece.shard)))


def read_piece(record: dict[str, Any]) -> Piece:
    """Read a piece back from its JSON."""
    solved: list[dict[str, Any]] = [
        {**one, "decisions": [*map(tuple, one["decisions"])]} for one in record["solved"]
    ]
    fields: dict[str, Any] = {**record, "solved": [Solved(**one) for one in solved]}
    return Piece(**fields)


@dataclass(frozen=True, slots=True)
class Grid:
    """The problems of a comparison: shards of `shard` problems, run in blocks of `block`, arms in
    turn.
    """

    problems: int
    seeds: Sequence[int] = (0,)
    shard: int = 500
    block: int = 50

    def shards(self) -> list[tuple[Problem, ...]]:
        """Cut the test problems into shards."""
        found = arithmetic("test", self.problems)
        return [tuple(found[i : i + self.shard]) for i in range(0, len(found), self.shard)]


async def run_grid(
    arms: Sequence[Arm],
    grid: Grid,
    ledger: Ledger,
    pair: Pair,
    label: str = "pipelines",
    watch: Watch | None = None,
) -> None:
    """Run every arm on every shard and seed, interleaved block by block.

    What the ledger has is not run again.

    A gate lives for a shard: it learns from block to block as in one run of that many problems.
    """
    for seed in grid.seeds:
        for number, shard in enumerate(grid.shards()):
            missing = [
                one
                for one in arms
                if (one.name, one.setup.policy.samples, seed, number) not in ledger.pieces
            ]
            if missing:
                say(
                    f"{label}: m={missing[0].setup.policy.samples} seed={seed} problems from "
                    f"{number * grid.shard}"
                )
                pieces = [
                    Piece(one.name, one.setup.policy.samples, seed, number) for one in missing
                ]
                await _run_shard(
                    list(zip(missing, pieces, strict=True)), shard, grid.block, pair, watch
                )
                for piece in pieces:
                    ledger.add(piece)


async def _run_shard(
    arms: list[tuple[Arm, Piece]],
    shard: Sequence[Problem],
    block: int,
    pair: Pair,
    watch: Watch | None,
) -> None:
    plans = {one.name: pair.plan(one, piece.seed * 31 + piece.shard) for one, piece in arms}
    for count, start in enumerate(range(0, len(shard), block)):
        turn = count % len(arms)
        for one, piece in arms[turn:] + arms[:turn]:
            used = tree_seconds()
            outcomes, seconds = await run_block(
                shard[start : start + block], plans[one.name], one.schedule
            )
            piece.processor.append(tree_seconds() - used)
            piece.seconds.append(seconds)
            piece.solved += [Solved.of(outcome) for outcome in outcomes]
            if watch is not None:
                await watch(one.name, outcomes)


Value = Callable[[Solved], float]


@dataclass(frozen=True)
class Sum:
    """The results of an arm over all of its pieces."""

    pieces: Sequence[Piece]

    @classmethod
    def of(cls, name: str, outcomes: Sequence[Outcome], seconds: float = 0.0) -> Sum:
        """Add up the pieces of one block."""
        return cls([Piece(name, 0, 0, 0, [Solved.of(outcome) for outcome in outcomes], [seconds])])

    @cached_property
    def solved(self) -> list[Solved]:
        """Return every problem, once per seed."""
        return [one for piece in self.pieces for one in piece.solved]

    def by_problem(self, value: Value) -> dict[str, float]:
        """Return each problem's mean over seeds.

        A problem stays one unit however often it was run.
        """
        found: defaultdict[str, list[float]] = defaultdict(list)
        for one in self.solved:
            found[one.problem].append(value(one))
        return {name: float(np.mean(values)) for name, values in found.items()}

    def estimate(self, value: Value) -> Estimate:
        """Estimate the mean over problems, with its interval."""
        return mean_estimate(list(self.by_problem(value).values()), len(self.solved))

    def minus(self, base: Sum, value: Value) -> Estimate:
        """Estimate the difference to another arm, paired by problem, over the problems that both
        have.
        """
        first = base.by_problem(value)
        second = self.by_problem(value)
        names = sorted(first.keys() & second.keys())
        return compare_runs(
            [first[name] for name in names], [second[name] for name in names]
        ).difference

    def each(self, kind: Literal["draft", "scored", "target", "judged"]) -> float:
        """Return the tokens of a kind per problem."""
        return self.total(kind) / max(1, len(self.solved))

    def total(self, kind: Literal["draft", "scored", "target", "drawn", "judged"]) -> int:
        """Return the tokens of a kind."""
        return sum(getattr(one, kind) for one in self.solved)

    @property
    def gflops(self) -> float:
        """Return the arithmetic of both models per problem: tokens written, scored and read, each
        once.
        """
        draft = info("draft").flops_per_token(CONTEXT)
        target = info("target").flops_per_token(CONTEXT)
        return (
            self.each("draft") * draft + (self.each("target") + self.each("scored")) * target
        ) / 1e9

    @property
    def seconds(self) -> float:
        """Return the seconds of all blocks."""
        return sum(sum(piece.seconds) for piece in self.pieces)

    @property
    def rate(self) -> float | None:
        """Return the share of decisions that escalated, or None if nothing was decided."""
        asked = sum(len(one.decisions) for one in self.solved)
        return sum(one.escalated for one in self.solved) / asked if asked else None

    def rate_error(self, nominal: float) -> float:
        """Return the root mean square over questions of realised minus nominal rate."""
        rates = [one.escalated / len(one.decisions) for one in self.solved if one.decisions]
        return (
            float(np.sqrt(np.mean([(rate - nominal) ** 2 for rate in rates])))
            if rates
            else float("nan")
        )

    def speed_up(
        self, base: Sum, clock: Literal["seconds", "processor"] = "seconds"
    ) -> Spread | None:
        """Return the base's time over this arm's, for blocks that both ran at the same place.

        None without such a block.
        """
        mine = {piece.key[1:]: getattr(piece, clock) for piece in self.pieces}
        pairs = [
            (getattr(piece, clock), mine[piece.key[1:]])
            for piece in base.pieces
            if piece.key[1:] in mine
        ]
        ratios = [a / b for first, second in pairs for a, b in zip(first, second, strict=False)]
        return Spread.of(ratios) if ratios else None


def right(one: Solved) -> float:
    """Return 1 if the vote is correct, else 0."""
    return one.right


def share(one: Solved) -> float:
    """Return the share of ended rollouts whose answer is correct."""
    return one.share
