"""Compare methods on the same problems, block by block in turn, and save every finished shard.

The last part compares methods at equal cost. For this part, every method runs live on the embedded
pair. The tokens of the runs are then priced as if two larger models had processed them: in
arithmetic and in GPU seconds. So accuracies are measured on the embedded pair, and prices are those
of the larger models.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

import anyio
import numpy as np
import torch

from atts import api
from atts.accel import accelerated
from atts.api import Setup
from atts.calibration import MODES
from atts.calibration.online import rate_metrics
from atts.core import Outcome, Problem, Turn
from atts.engine import Engine
from atts.errors import UsageError
from atts.evaluators import Estimate, compare_runs, mean_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Limit
from atts.local import LocalEngine, LocalOptions
from atts.models import info
from atts.models import path as model_path
from atts.pipelines import Chunking, CoinGate, Gate, RoundGate, ScoreRule
from atts.pipelines.policy import Takeover
from atts.run import RunOptions, RunSpec, evaluate
from atts.testing import Latency, ScriptedEngine, run_virtual, toy_problems
from scripts.studies.harness import (
    Chart,
    Options,
    Parts,
    Row,
    Spread,
    Table,
    interval,
    pair_name,
    points,
    say,
    tree_seconds,
)
from scripts.studies.modelled import DRAFT_1B, DRAFT_8B, TARGET_70B, Cost

RATE = Setup().rate
CONTEXT = 128
"""Mean context length, in tokens, at which the arithmetic of the embedded pair is counted."""
Schedule = Literal["together", "one by one"]
Variant = Literal["plain", "proposed to", "rounding"]
"""Variants of the target: without options, with tokens proposed by the draft, or with scores in
bfloat16.
"""
Watch = Callable[[str, Sequence[Outcome]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Arm:
    """A row of a comparison: a name, and the settings of its runs.

    `Pair.plan` derives the seed of the arm's random numbers from the study's seed and the arm's
    name.
    """

    name: str
    setup: Setup
    target_threads: int = 1
    schedule: Schedule = "together"
    variant: Variant = "plain"

    def but(self, name: str = "", **changes: Any) -> Arm:
        """Return a copy of the arm with other settings of its policy, and another name if one is
        given.
        """
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

    Without `method`, the name of the arm is also its method. `changes` override fields of the setup
    or of its policy.
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
    """The open embedded engines: one draft, and one target for each number of threads in use."""

    def __init__(
        self, threads: Iterable[int] = (1,), variants: Iterable[Variant] = (), **changes: Any
    ) -> None:
        """Open one target per number of threads, and one single-threaded target per variant.

        `changes` override fields of `LocalOptions`."""
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

        Each arm gets different random numbers, so that no cache holds texts that another arm wrote.
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
    """Run one block under a plan; return its outcomes in the order of the problems, and the seconds
    that the block took.
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
    """Return the scores of all chunks, grouped by rollout."""
    turns = (turn for outcome in outcomes for line in outcome.rollouts for turn in line.turns)
    return tuple(turn.score for turn in turns if turn.score is not None)


@dataclass(frozen=True, slots=True)
class Solved:
    """Measurements of one problem under one arm; tables are computed from them."""

    problem: str
    level: int
    right: float
    share: float  # share of finished rollouts that are correct
    draft: int
    scored: int
    target: int
    # one decision: (position in the order of requests, turn, True if the chunk escalated)
    decisions: Sequence[tuple[int, int, bool]]
    drawn: int = 0  # number of tokens that the target sampled while it scored a chunk
    # number of tokens in chunks that have a score; if equal chunks share one score, the tokens of
    # each chunk count
    judged: int = 0

    @classmethod
    def of(cls, outcome: Outcome) -> Solved:
        """Summarise the outcome of one problem."""
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
        """Count the escalated chunks."""
        return sum(over for _, _, over in self.decisions)


def _judged(turn: Turn) -> int:
    chunk = turn.drafted
    return 0 if turn.score is None or chunk is None else len(chunk.target_ids)


@dataclass(slots=True)
class Piece:
    """The results of one arm on one shard of the problems, in the order of the problems, with the
    seconds of each block.
    """

    arm: str
    samples: int
    seed: int
    shard: int
    solved: list[Solved] = field(default_factory=list[Solved])
    seconds: list[float] = field(default_factory=list[float])
    # CPU seconds of this process and its engines, per block
    processor: list[float] = field(default_factory=list[float])

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Return the arm, the number of samples, the seed and the shard of this piece."""
        return self.arm, self.samples, self.seed, self.shard


class Ledger:
    """All finished pieces; a piece is one arm on one shard. With a path, the ledger also has the
    pieces of earlier sessions.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._parts = Parts(path)
        found = [read_piece(value) for value in self._parts.values()]
        self.pieces: dict[tuple[str, int, int, int], Piece] = {piece.key: piece for piece in found}

    def add(self, piece: Piece) -> None:
        """Save a piece. Several processes may write to the same file."""
        self.pieces[piece.key] = piece
        self._parts.keep("|".join(map(str, piece.key)), asdict(piece))

    def of(self, arm: str, samples: int | None = None) -> Sum:
        """Return all pieces of an arm, ordered by seed and shard."""
        found = [p for p in self.pieces.values() if p.arm == arm and samples in (None, p.samples)]
        return Sum(sorted(found, key=lambda piece: (piece.samples, piece.seed, piece.shard)))


def read_piece(record: dict[str, Any]) -> Piece:
    """Rebuild a piece from its JSON record."""
    solved: list[dict[str, Any]] = [
        {**one, "decisions": [*map(tuple, one["decisions"])]} for one in record["solved"]
    ]
    fields: dict[str, Any] = {**record, "solved": [Solved(**one) for one in solved]}
    return Piece(**fields)


@dataclass(frozen=True, slots=True)
class Grid:
    """The problems of a comparison, cut into shards. Arms take turns on the blocks of each shard."""

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

    Pieces that are already in the ledger do not run again. Each shard has one gate, which keeps
    what it learned from one block to the next, as in a run over the whole shard.
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
    """The results of one arm of a study, added up over all shards of the problems and all seeds."""

    pieces: Sequence[Piece]

    @classmethod
    def of(cls, name: str, outcomes: Sequence[Outcome], seconds: float = 0.0) -> Sum:
        """Add up the outcomes of one block."""
        return cls([Piece(name, 0, 0, 0, [Solved.of(outcome) for outcome in outcomes], [seconds])])

    @cached_property
    def solved(self) -> list[Solved]:
        """Return every solved problem, once per seed."""
        return [one for piece in self.pieces for one in piece.solved]

    def by_problem(self, value: Value) -> dict[str, float]:
        """Return the mean over seeds for each problem.

        Confidence intervals treat each problem as one observation, even if the problem was run with
        several seeds.
        """
        found: defaultdict[str, list[float]] = defaultdict(list)
        for one in self.solved:
            found[one.problem].append(value(one))
        return {name: float(np.mean(values)) for name, values in found.items()}

    def estimate(self, value: Value) -> Estimate:
        """Estimate the mean over problems with a confidence interval."""
        return mean_estimate(list(self.by_problem(value).values()), len(self.solved))

    def minus(self, base: Sum, value: Value) -> Estimate:
        """Estimate the difference between two arms, paired by problem, for the problems that were
        run with both arms.
        """
        first = base.by_problem(value)
        second = self.by_problem(value)
        names = sorted(first.keys() & second.keys())
        return compare_runs(
            [first[name] for name in names], [second[name] for name in names]
        ).difference

    def each(self, kind: Literal["draft", "scored", "target", "judged"]) -> float:
        """Return the mean number of tokens of one kind per problem."""
        return self.total(kind) / max(1, len(self.solved))

    def total(self, kind: Literal["draft", "scored", "target", "drawn", "judged"]) -> int:
        """Return the total number of tokens of one kind."""
        return sum(getattr(one, kind) for one in self.solved)

    @property
    def gflops(self) -> float:
        """Return the arithmetic of draft and target per problem, counting each token once."""
        draft = info("draft").flops_per_token(CONTEXT)
        target = info("target").flops_per_token(CONTEXT)
        return (
            self.each("draft") * draft + (self.each("target") + self.each("scored")) * target
        ) / 1e9

    @property
    def seconds(self) -> float:
        """Return the total seconds of all blocks."""
        return sum(sum(piece.seconds) for piece in self.pieces)

    @property
    def rate(self) -> float | None:
        """Return the share of decisions that escalated, or None if there were no decisions."""
        asked = sum(len(one.decisions) for one in self.solved)
        return sum(one.escalated for one in self.solved) / asked if asked else None

    def rate_error(self, nominal: float) -> float:
        """Return the root mean square, over all questions, of the realised rate minus the nominal
        rate.
        """
        rates = [one.escalated / len(one.decisions) for one in self.solved if one.decisions]
        return (
            float(np.sqrt(np.mean([(rate - nominal) ** 2 for rate in rates])))
            if rates
            else float("nan")
        )

    def speed_up(
        self, base: Sum, clock: Literal["seconds", "processor"] = "seconds"
    ) -> Spread | None:
        """Return the time of the base arm divided by the time of this arm, for each block.

        Only blocks with the same shard, seed and position are compared. Return None if there are no
        such blocks.
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
    """Return 1 if the vote of the rollouts is correct, else 0."""
    return one.right


def share(one: Solved) -> float:
    """Return the share of finished rollouts whose answer is correct."""
    return one.share


DRAFT = Latency(per_sample=0.02, sampled_token=0.012, prefilled_token=2e-5, jitter=0.4)
TARGET = Latency(
    per_sample=0.05,
    sampled_token=0.045,
    per_score=0.05,
    scored_token=3e-4,
    prefilled_token=1e-4,
    jitter=0.4,
)
"""Simulated call durations like those of a 1.5B draft and a 32B target."""
SLOTS = {"draft": Limit(slots=16), "target": Limit(slots=4)}


def cases(stored: Sequence[float]) -> list[Arm]:
    """Return one arm per method, with the settings of the method's authors.

    The published rule needs scores of first chunks before a run; `stored` contains these scores.
    """
    # In this arm, the target also writes the rest of an escalated rollout, and chunks that contain
    # an answer can be escalated too.
    theirs: dict[str, Any] = {"takeover": "continue", "answers": "verify", "repeats": 15}
    made = [
        arm("atts (ours), default settings", "atts"),
        arm(
            "the paper's policy, our gate by question and turn",
            "atts",
            rate_scope="question-turn",
            score=ScoreRule("mean"),
            **theirs,
        ),
        arm(
            "published: static scores, question by question",
            "paper-marginal",
            schedule="one by one",
            stored=tuple(stored),
        ),
        arm("published rule on our scheduler", "paper-marginal", stored=tuple(stored)),
        arm("sorted rounds (top-b)", "top-b"),
        arm("SpecReason", "spec-reason"),
        arm("Speculative Thinking", "speculative-thinking"),
        arm("target-only"),
        arm("draft-only"),
    ]
    every = [one.but(early_stop="none") for one in made]
    return [replace(one, setup=replace(one.setup, limits={})) for one in every]


def study_against(options: Options) -> list[Table]:
    """Compare methods on scripted engines in virtual time, then on the embedded pair."""
    torch.set_num_threads(1)
    virtual = _table("scripted engines, virtual time", "seconds", _scripted(options))
    embedded = _table("embedded pair, live", "processor", anyio.run(_embedded, options))
    return [virtual, embedded]


def _turn_zero(samples: int) -> Arm:
    """Return the arm that collects first-chunk scores for the published rule."""
    return arm("atts", samples=samples, turns=1, early_stop="none")


def _scripted(options: Options) -> dict[str, Sum]:
    problems = toy_problems(options.pick(16, 40, 200), seed=options.seed)
    found = dict[str, Sum]()
    at_once = Latency()
    before = toy_problems(20, seed=options.seed + 1)
    _, outcomes = run_virtual(scripted, _turn_zero(4), before, options.seed, at_once, at_once)
    for case in cases(scores_of(outcomes)):
        say(f"against: scripted, {case.name}")
        limited = replace(case, setup=replace(case.setup, limits=SLOTS))
        found[case.name], _ = run_virtual(scripted, limited, problems, options.seed)
    return found


async def scripted(
    case: Arm,
    problems: Sequence[Problem],
    seed: int,
    drafts: Latency = DRAFT,
    targets: Latency = TARGET,
) -> tuple[Sum, tuple[Outcome, ...]]:
    """Run an arm on scripted engines with the given latencies, timed by the event loop's clock."""
    async with (
        ScriptedEngine("draft", latency=drafts) as draft,
        ScriptedEngine("target", latency=targets) as target,
    ):
        plan = replace(case.setup, seed=seed).plan(draft, target, problems[0].kind)
        outcomes, seconds = await run_block(problems, plan, case.schedule, anyio.current_time)
    return Sum.of(case.name, outcomes, seconds), outcomes


async def _embedded(options: Options) -> dict[str, Sum]:
    grid = Grid(options.pick(12, 40, 500), (options.seed,), 500, options.pick(4, 20, 50))
    # Engines run in threads of this process, so its CPU time includes the work of the engines.
    async with Pair(worker="thread") as pair:
        first = pair.plan(_turn_zero(4), 9_999)
        outcomes, _ = await run_block(arithmetic("calibration", options.pick(8, 30, 60)), first)
        arms = cases(scores_of(outcomes))
        ledger = Ledger()
        await run_grid(arms, grid, ledger, pair, "against: embedded")
    return {one.name: ledger.of(one.name) for one in arms}


def _table(where: str, clock: Literal["seconds", "processor"], found: Mapping[str, Sum]) -> Table:
    alone = found["target-only"]
    by = {"seconds": "in virtual time", "processor": "in processor time"}[clock]
    names = ("published: static", "the paper's policy", "atts (ours)")
    live = [one for name in names for title, one in found.items() if title.startswith(name)]
    rates = [f"{one.rate or 0:.2g} (error by question {one.rate_error(RATE):.2g})" for one in live]
    return Table.of(
        f"Methods side by side: {where}, {len(alone.solved)} problems x 8 samples, nominal rate "
        f"{RATE:g}",
        f"method | accuracy | speed-up, {by} | target tokens, share of target-only's | "
        "draft and scored tokens | realised rate | RMS error by turn | RMS error by question | "
        "largest error in 500 decisions",
        [_method_row(name, clock, one, alone) for name, one in found.items()],
        "Draft and target share two cores. The study compares processor times, because wall "
        "times depend on the load of the machine."
        if clock == "processor"
        else "The engines are toy models with exact log-probabilities. At most 16 draft "
        "requests and 4 target requests run at once. A draft token takes 12 ms and a "
        "target token 45 ms, about as in the published runs.",
        headline=f"at rate {RATE:g} the published rule escalates {rates[0]}, atts with the same "
        f"policy {rates[1]}. "
        f"The default of atts, with no promise by question, escalates {rates[2]}",
    )


def _method_row(name: str, clock: Literal["seconds", "processor"], one: Sum, alone: Sum) -> Row:
    made = [
        (issue, solved.problem, turn, over)
        for solved in one.solved
        for issue, turn, over in solved.decisions
    ]
    _, questions, turns, taken = zip(*sorted(made), strict=True) if made else [()] * 4
    metrics = rate_metrics(questions, turns, [1.0] * len(made), taken, RATE)
    errors = (metrics["turn_rms"], metrics["question_rms"], metrics["worst_rolling_500"])
    target = f"{100 * one.total('target') / alone.total('target'):.1f} %"
    tokens = f"{one.total('draft')}, {one.total('scored')}"
    return (
        name,
        interval(one.estimate(right)),
        str(one.speed_up(alone, clock)),
        target,
        tokens,
        one.rate,
        *errors,
    )


SAMPLES = 8
# If an option's votes are not better than the default's, the option replaces the default only if it
# saves this share of arithmetic or time.
_WORTH = 0.05
# With fewer problems no default is changed, because the intervals of accuracy are wider than one
# percentage point.
_ENOUGH = 100
# an option is rejected if the lower bound of its difference in accuracy is below this value
_LOSS = -0.01


def study_ablations(options: Options) -> list[Table]:
    """Compare every option of the policy with the default; each block of problems is run with every
    arm in turn.

    With an output folder, finished pieces are kept and not run again.
    """
    chosen = choices(options.seed)
    grid = Grid(options.pick(20, _ENOUGH, 1000), (options.seed,), 2000, options.pick(10, 25, 50))
    ledger = Ledger(options.file(f"ablations-{options.effort}-{pair_name()}.jsonl"))
    anyio.run(_run, [arm("atts"), *(one for arms in chosen.values() for one in arms)], grid, ledger)
    default = ledger.of("atts", SAMPLES)
    found = [
        (choice, one.name, ledger.of(one.name, SAMPLES))
        for choice, arms in chosen.items()
        for one in arms
    ]
    count = len(default.solved)
    verdicts = list[Row]()
    for choice in chosen:
        words = {name: _verdict(one, default) for of, name, one in found if of == choice}
        wins = [f"{name}: {word}" for name, word in words.items() if word]
        change = "change" if count >= _ENOUGH else "ask again with more problems"
        verdicts.append((choice, "; ".join(wins) or "none", change if wins else "keep"))
    changed = [str(row[0]) for row in verdicts if row[2] != "keep"]
    return [
        Table.of(
            "Ablations of the default policy",
            "choice | option | accuracy | minus the default's, points | target tokens | "
            "arithmetic | time | realised rate | rate error by question",
            [_ablation_row(*each, default) for each in [("default", "atts", default), *found]],
            f"The run has {count} problems with {SAMPLES} samples each, at nominal rate {RATE:g}. "
            "The columns *arithmetic* and *time* are relative to the default, which has 1. "
            "Brackets contain 95 % intervals; differences in accuracy are paired by problem.",
        ),
        Table.of(
            "Which defaults would change",
            "choice | options that win | verdict",
            verdicts,
            "An option can win in two ways. Either it is more accurate than the default (interval "
            "of the difference above 0) and needs no more arithmetic. Or it saves "
            f"{100 * _WORTH:.0f} % of arithmetic or time, and the lower end of the interval is "
            f"above {100 * _LOSS:g} point. If no option wins, the default stays.",
            f"A default changes only after a run of at least {_ENOUGH} problems; this run has "
            f"{count}. The study compares many options, so one narrow win may be chance.",
            headline=f"defaults that another option beats: {', '.join(changed) or 'none'} "
            f"(of {len(chosen)})",
        ),
    ]


async def _run(arms: Sequence[Arm], grid: Grid, ledger: Ledger) -> None:
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "ablations")


def choices(seed: int = 0) -> dict[str, list[Arm]]:
    """Return the options to compare with the default policy, gate and vote."""
    atts = arm("atts")
    scores = {
        "per byte": ScoreRule("byte"),
        "mean": ScoreRule("mean"),
        "speculative": ScoreRule("speculative"),
    }

    return {
        "score": [atts.but(f"score: {name}", score=rule) for name, rule in scores.items()],
        "mode": [
            arm(f"mode: {mode}", "atts", rate_scope=mode) for mode in MODES if mode != "split"
        ],
        "chunk": [
            atts.but(f"chunk: {n} tokens", chunking=Chunking(n, n, ())) for n in (8, 16, 32, 64)
        ],
        "takeover": [
            atts.but(f"takeover: {takeover}", takeover=takeover) for takeover in get_args(Takeover)
        ],
        "gate": [
            arm("gate: coin", "atts", gate=CoinGate(RATE, seed)),
            arm("gate: sorted rounds", "top-b"),
            arm("gate: words", "speculative-thinking"),
            arm("gate: rating", "spec-reason"),
        ],
        "vote": [atts.but("vote: confidence", vote="confidence")],
        "early stop": [
            atts.but("stop: none", early_stop="none"),
            atts.but("stop: likely .95", early_stop="likely"),
            atts.but("stop: likely .8", early_stop="likely", confidence=0.8),
        ],
        "optimistic": [atts.but("optimistic: on", optimistic=True)],
    }


def _ablation_row(choice: str, name: str, one: Sum, default: Sum) -> Row:
    minus = "-" if one is default else points(one.minus(default, right))
    costs = (one.each("target"), one.gflops / default.gflops, _time(one, default))
    return (
        choice,
        name,
        interval(one.estimate(right)),
        minus,
        *costs,
        one.rate,
        one.rate_error(RATE),
    )


def _time(one: Sum, default: Sum) -> float:
    """Return the seconds of an option relative to the default: the median of the ratios of blocks."""
    ratio = one.speed_up(default)
    assert ratio is not None, "all arms run every block"
    return 1 / ratio.median


def _verdict(one: Sum, default: Sum) -> str:
    """Describe the gain of an option over the default; return "" if there is no gain. The rule for
    this verdict is printed under the table.
    """
    votes = one.minus(default, right)
    cost = one.gflops / default.gflops
    seconds = _time(one, default)
    if votes.low > 0 and cost <= 1.0:
        return f"better votes {points(votes)}"
    if votes.low > _LOSS and cost <= 1 - _WORTH:
        return f"arithmetic {100 * cost:.0f} % at {points(votes)}"
    if votes.low > _LOSS and seconds <= 1 - _WORTH:
        return f"time {100 * seconds:.0f} % at {points(votes)}"
    return ""


def study_frontier(options: Options) -> list[Table]:
    """Run each method at each rate and number of samples, with a journal for each run.

    Finished runs do not run again.
    """
    rates = options.pick((0.2,), (0.05, 0.1, 0.2, 0.4), (0.05, 0.1, 0.2, 0.4))
    samples = options.pick((2, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    arms = [
        arm(f"{method}-{m}", method, samples=m)
        for method in ("draft-only", "target-only")
        for m in samples
    ]
    arms += [
        arm(f"atts-{rate:g}-{m}", "atts", samples=m, rate=rate) for rate in rates for m in samples
    ]
    count = options.pick(8, 40, 500)
    found = dict[str, Sum]()
    with tempfile.TemporaryDirectory() as folder:
        place = options.file(f"frontier-{options.effort}") or Path(folder)
        for one in arms:
            found[one.name] = anyio.run(
                partial(frontier_run, one, count, place / "runs" / one.name, seed=options.seed)
            )
    return [frontier_table(found)]


async def frontier_run(one: Arm, problems: int, directory: Path, seed: int) -> Sum:
    """Start or resume the run of an arm, and return its results.

    :raises UsageError: the run ended without all of its problems.
    """
    say(f"frontier: {one.name}")
    result = await api.evaluate(
        "arithmetic", replace(one.setup, seed=seed), limit=problems, directory=directory
    )
    if result.status != "finished":
        raise UsageError(
            f"the run {one.name} ended with status {result.status}; the same command resumes it"
        )
    return Sum.of(one.name, tuple(result.outcomes()))


def frontier_table(found: Mapping[str, Sum]) -> Table:
    """Return the table of all runs, sorted by cost.

    The name of each run ends with its number of samples.
    """
    rows: list[Row] = []
    for name, one in sorted(found.items(), key=lambda item: item[1].gflops):
        vote = one.estimate(right)
        accuracy = (round(vote.value, 4), interval(vote).partition(" ")[2])
        costs = (
            round(one.each("target"), 1),
            one.gflops,
            "yes" if _is_unbeaten(one, found) else "",
        )
        rows.append((name, name.rpartition("-")[0], *accuracy, *costs))
    return Table.of(
        f"The frontier: accuracy of votes against arithmetic, {len(next(iter(found.values())).solved)} "
        f"problems, live",
        "run | method | accuracy | 95 % | target tokens | GFLOPs | Pareto-optimal",
        rows,
        chart=Chart("GFLOPs", "accuracy", "method", "log"),
    )


def _is_unbeaten(one: Sum, found: Mapping[str, Sum]) -> bool:
    """Return whether the run is Pareto-optimal: every run that is more accurate costs more, and
    every cheaper run is less accurate.
    """
    mine, *others = ((each.estimate(right).value, -each.gflops) for each in (one, *found.values()))
    return not any(
        other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others
    )


PRICED_BATCH = 64  # number of sequences that are decoded in one step
PRICED_CONTEXT = 1000  # number of cached tokens of each sequence


def scaled(cost: Cost, share: float, origin: str) -> Cost:
    """Return the costs of a model with `share` times as many weights, on the same number of GPUs."""
    return replace(
        cost,
        step=cost.step * share,
        sequence=cost.sequence * share,
        prefilled=cost.prefilled * share,
        origin=origin,
    )


@dataclass(frozen=True, slots=True)
class Prices:
    """The costs of a pair: for each model its parameters, the seconds of a step, and its number of
    GPUs.
    """

    name: str
    draft_parameters: float
    target_parameters: float
    draft: Cost
    target: Cost
    draft_gpus: int = 1
    target_gpus: int = 4

    def tflops(self, one: Sum) -> float:
        """Return the arithmetic per problem in teraflops: two operations per parameter and token."""
        draft = one.each("draft") * self.draft_parameters
        target = (one.each("target") + one.each("scored")) * self.target_parameters
        return 2 * (draft + target) / 1e12

    def gpu_seconds(self, one: Sum) -> float:
        """Return the seconds of a problem summed over all GPUs, if every batch is full.

        Tokens that the target samples while it scores a chunk need no decoding step, so they add no
        decoding time.
        """
        count = max(1, len(one.solved))
        decoded = decoded_by_target(one)
        draft = one.each("draft") * decoding_seconds(self.draft)
        target = decoded * decoding_seconds(self.target)
        target += one.total("scored") / count * self.target.prefilled
        return self.draft_gpus * draft + self.target_gpus * target


def decoding_seconds(cost: Cost) -> float:
    """Return the seconds per decoded token: those of a decoding step, divided by the number of
    sequences in the batch.
    """
    return cost.seconds(PRICED_BATCH, PRICED_BATCH * PRICED_CONTEXT) / PRICED_BATCH


def decoded_by_target(one: Sum) -> float:
    """Return the number of target tokens per problem, counting only tokens that took a decoding
    step.
    """
    return (one.total("target") - one.total("drawn")) / max(1, len(one.solved))


_OF_70B = "the 70B row scaled by weights"
PRICES = (
    Prices("1.5B/70B", 1.54e9, 70.6e9, DRAFT_1B, TARGET_70B),
    Prices("8B/32B", 8.03e9, 32.8e9, DRAFT_8B, scaled(TARGET_70B, 32.8 / 70.6, _OF_70B)),
)


def field_arms(options: Options) -> list[tuple[str, Arm]]:
    """Return an arm for every run, with the name of its method."""
    few = options.effort == "quick"
    samples = (2,) if few else (1, 4, 8)
    made: list[tuple[str, Arm]] = []

    def add(method: str, name: str, m: int, rate: float = 0.2, **changes: Any) -> None:
        made.append((method, arm(f"{method} {rate:g} {m}", name, samples=m, rate=rate, **changes)))

    for m in (4,) if few else (4, 8, 16):
        add("draft alone, early stop", "draft-only", m, early_stop="likely")
    for m in samples:
        add("target alone, early stop", "target-only", m, early_stop="likely")
    for rate in (0.3,) if few else (0.1, 0.3, 0.6):
        add("cascade by vote", "cascade", 8, rate)
    for m in samples[:2]:
        add("SpecReason", "spec-reason", m)
    for m in () if few else (8, 16):
        add("DeepConf", "deep-conf", m)
    for m in samples:
        add("ATTS as published", "atts", m, takeover="continue")
        add("ATTS, default", "atts", m)
    for m in samples[:2]:
        add("exact", "exact", m)
    return made


def study_field(options: Options) -> list[Table]:
    """Run every method, and price its tokens as those of each pair. Runs that have finished do not
    run again.
    """
    count = options.pick(6, 40, 200)
    found: list[tuple[str, Sum]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = options.file(f"field-{options.effort}") or Path(folder)
        for number, (method, one) in enumerate(field_arms(options)):
            directory = place / "runs" / f"{number:02d}"
            run = partial(frontier_run, one, count, directory, seed=options.seed)
            found.append((method, anyio.run(run)))
    return [field_table(prices, found) for prices in PRICES]


def field_table(prices: Prices, found: Sequence[tuple[str, Sum]]) -> Table:
    """Tabulate accuracy and costs of every run at a pair's prices, the cheapest first."""
    rows: list[Row] = []
    best = pareto({number: _point(prices, one) for number, (_, one) in enumerate(found)})
    for number, (method, one) in enumerate(found):
        vote = one.estimate(right)
        rows.append(
            (
                method,
                round(vote.value, 4),
                interval(vote).partition(" ")[2],
                round(vote.low, 4),
                round(vote.high, 4),
                round(decoded_by_target(one), 1),
                round(one.each("scored"), 1),
                round(one.each("draft"), 1),
                round(prices.tflops(one), 2),
                round(prices.gpu_seconds(one), 3),
                "yes" if number in best else "",
            )
        )
    rows.sort(key=lambda row: (float(str(row[9])), str(row[0])))
    count = len(found[0][1].solved) if found else 0
    return Table.of(
        f"The field at the prices of {prices.name}, {count} problems",
        "method | accuracy | 95 % | low | high | target tokens decoded | target tokens read | "
        "draft tokens | TFLOPs | GPU seconds | Pareto-optimal",
        rows,
        "Costs are per problem. The accuracies were measured with the embedded pair. The costs "
        f"are computed for models of {prices.name}, as if the draft ran on {prices.draft_gpus} "
        f"GPU and the target on {prices.target_gpus} GPUs. Each step of a model is assumed to "
        f"process {PRICED_BATCH} sequences of {PRICED_CONTEXT:,} tokens.",
        chart=Chart("GPU seconds", "accuracy", "method", "log", low="low", high="high"),
    )


def _point(prices: Prices, one: Sum) -> tuple[float, float]:
    return prices.gpu_seconds(one), one.estimate(right).value


def pareto(points: Mapping[int, tuple[float, float]]) -> set[int]:
    """Return the keys of the Pareto-optimal points: no other point is at least as cheap and as
    accurate.

    >>> sorted(pareto({1: (1.0, 0.5), 2: (2.0, 0.5), 3: (3.0, 0.9)}))
    [1, 3]
    """
    best: set[int] = set()
    for name, (cost, accuracy) in points.items():
        beaten = any(
            other != (cost, accuracy) and other[0] <= cost and other[1] >= accuracy
            for other in points.values()
        )
        if not beaten:
            best.add(name)
    return best
