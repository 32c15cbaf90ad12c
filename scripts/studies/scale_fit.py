"""Fits the cost formula to this machine and asks whether it predicts runs that it was not fitted to."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import anyio
import torch

from atts.api import answers_for, build_engine
from atts.api.setup import EMBEDDED_CHUNKS
from atts.calibration import Calibrator
from atts.core import Problem, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.engine import Engine
from atts.evaluators.arithmetic import problems as arithmetic
from atts.graph import Graph, ProblemScope
from atts.local import LocalEngine
from atts.pipelines import Context, Material, Policy, preset, solve
from atts.seeds import Seed
from atts.tasks import collect
from atts.testing import run_virtual
from scripts.studies.harness import Calm, Options, Spread, Table, say
from scripts.studies.harness import Cell as TableCell
from scripts.studies.scale_costs import Cost, Observation, fit, shared
from scripts.studies.scale_engine import BatchedEngine, Host
from scripts.studies.scale_tape import Tape, TapedEngine, TapedLaw

T = TypeVar("T")
Row = tuple[TableCell, ...]


@dataclass(frozen=True, slots=True)
class Micro:
    """A piece of work given to one engine at once: `batch` requests on prompts of `prompt` tokens."""

    batch: int
    prompt: int
    tokens: int  # sampled each; 0: the prompt's second half is scored


@dataclass(frozen=True, slots=True)
class Live:
    """A run whose wall time is to be predicted."""

    method: str
    samples: int
    problems: int
    in_flight: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.method}, {self.samples} samples, {self.in_flight} in flight"


@dataclass(slots=True)
class Seen:
    """Everything measured, round by round, each with how much others disturbed it."""

    pieces: dict[tuple[str, Micro], list[tuple[float, Observation]]] = field(
        default_factory=dict[tuple[str, Micro], list[tuple[float, Observation]]]
    )
    steps: dict[tuple[str, str], list[tuple[float, float]]] = field(
        default_factory=dict[tuple[str, str], list[tuple[float, float]]]
    )
    runs: dict[Live, list[tuple[float, Run]]] = field(default_factory=dict[Live, list[tuple[float, "Run"]]])


@dataclass(frozen=True, slots=True)
class Run:
    """One live run: which problems, how long, and what the engines said."""

    first: int
    seconds: float
    law: TapedLaw


def local_validation(options: Options) -> list[Table]:
    """The fitted costs of this machine, and predicted beside measured wall time of live runs."""
    torch.set_num_threads(1)
    rounds, problems = options.pick(1, 5, 12), options.pick(4, 12, 24)
    lives = [Live(method, 8, problems, 64) for method in ("atts", "top-b", "target-only", "draft-only")]
    lives += [Live("atts", 8, problems, 16)] if options.effort != "quick" else []
    seen = Seen()
    anyio.run(_measure, seen, rounds, lives, options.seed)
    costs, table = _fitted(seen)
    return [table, _predicted(seen, costs, options)]


def _predicted(seen: Seen, costs: Mapping[str, Cost], options: Options) -> Table:
    rows: list[Row] = []
    errors: list[float] = []
    for live, every in seen.runs.items():
        kept = _calmest(every)
        host = min(_host_seconds(live, run, options.seed) for _, run in kept)
        engines = {role: shared(cost, _share(seen, role), host) for role, cost in costs.items()}
        predicted = [run_virtual(_predict, live, run, engines, options.seed) for _, run in kept]
        ratios = Spread.of([guess / run.seconds for guess, (_, run) in zip(predicted, kept, strict=True)])
        errors.append(ratios.median - 1)
        missed = sum(run.law.missed for _, run in kept) / sum(run.law.tape.calls for _, run in kept)
        measured = Spread.of([run.seconds for _, run in kept])
        calls = kept[0][1].law.tape.calls
        words = (live.name, calls, str(measured), str(Spread.of(predicted)), str(ratios), f"{errors[-1]:+.1%}")
        rows.append((*words, 1e3 * host, f"{missed:.1%}", max(others for others, _ in kept)))
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    rounds, problems = max(map(len, seen.runs.values())), next(iter(seen.runs)).problems
    columns = (
        "live run on the embedded pair", "calls", "seconds, live", "seconds, predicted", "ratio", "error",
        "host ms a call", "elsewhere", "others' processors",
    )  # fmt: skip
    notes = (
        f"Root mean square error {rms:.1%}, largest {max(map(abs, errors)):.1%} (bar: 10 %). {problems} "
        f"problems a run, no problem twice; {rounds} rounds, pieces of work and whole runs in turn; the calmest count.",
        "Others' processors: how many were taken by other programs in the most disturbed round that counts.",
        "Fitted to pieces of work alone: no run was used. Host: processor time per call of the same pipelines on "
        "engines that do nothing. Elsewhere: calls that the run under prediction put where a similar chunk stood in.",
    )
    return Table("Predicted and measured wall time on this machine", columns, tuple(rows), notes)


def _calmest(values: Sequence[tuple[float, T]]) -> list[tuple[float, T]]:
    """The third of the measurements that others disturbed least, at least one."""
    ordered = sorted(values, key=lambda value: value[0])
    return ordered[: max(1, len(ordered) // 3)]


def _fitted(seen: Seen) -> tuple[Mapping[str, Cost], Table]:
    costs: dict[str, Cost] = {}
    rows: list[Row] = []
    for role in ("draft", "target"):
        kinds = [_calmest(values) for (name, _), values in seen.pieces.items() if name == role]
        cost, error = fit([min((o for _, o in kept), key=lambda o: o.seconds) for kept in kinds])
        costs[role] = replace(cost, origin="fitted on this machine")
        share = _share(seen, role)
        rows.append((role, 1e3 * cost.step, 1e6 * cost.sequence, 1e9 * cost.cached, 1e6 * cost.prefilled, share, error))
    columns = (
        "engine", "a, ms a step", "b, us a sequence", "c, ns a KV token", "d, us a fed token",
        "stretched beside the other", "fit's relative error",
    )  # fmt: skip
    notes = (
        f"Least squares over {len(seen.pieces) // 2} kinds of work on each engine, calmest rounds; no coefficient "
        "below 0. Stretched: a step while the other engine steps too, over the same step alone.",
    )
    return costs, Table("The embedded pair's costs on this machine", columns, tuple(rows), notes)


def _share(seen: Seen, role: str) -> float:
    beside, alone = (min(seconds for _, seconds in _calmest(seen.steps[role, how])) for how in ("beside", "alone"))
    return max(1.0, beside / alone)


async def _measure(seen: Seen, rounds: int, lives: list[Live], seed: int) -> None:
    pieces = [Micro(b, p, t) for b, p, t in ((1, 48, 48), (8, 48, 48), (32, 48, 48), (64, 48, 32), (16, 256, 32))]
    pieces += [Micro(1, 64, 0), Micro(8, 64, 0), Micro(32, 64, 0), Micro(8, 256, 0)]
    async with build_engine("embedded", "draft") as draft, build_engine("embedded", "target") as target:
        assert isinstance(draft, LocalEngine)
        assert isinstance(target, LocalEngine)
        engines: dict[str, LocalEngine] = {"draft": draft, "target": target}
        await _contend(Seen(), engines, seed - 10_000)  # what is computed first compiles kernels and fills caches
        for number in range(rounds):
            say(f"scale: validation, round {number + 1} of {rounds}")
            for live in lives[number % len(lives) :] + lives[: number % len(lives)]:
                for role, engine in engines.items():
                    for piece in pieces[number % 2 :: 2]:
                        calm = Calm()
                        found = await _observe(engine, piece, seed + 10_000 * number + 100 * lives.index(live))
                        seen.pieces.setdefault((role, piece), []).append((calm.disturbance, found))
                first = (number * len(lives) + lives.index(live)) * live.problems  # the caches know none of them yet
                tape = Tape()
                taped = TapedEngine(draft, "draft", tape), TapedEngine(target, "target", tape)
                calm = Calm()
                run = Run(first, await _run(live, first, *taped, seed), TapedLaw(tape, draft, target))
                seen.runs.setdefault(live, []).append((calm.disturbance, run))
            await _contend(seen, engines, seed + 10_000 * number + 5_000)


async def _observe(engine: LocalEngine, piece: Micro, seed: int) -> Observation:
    """Give the engine one piece of work it has not seen, and read its counters."""
    prompts = _prompts(engine, piece.batch, piece.prompt, seed)
    half = piece.prompt // 2
    if not piece.tokens:  # what is scored comes on top of a warm prefix, as in a rollout
        await collect([partial(engine.score, ScoreRequest(ids[:1], ids[1:half])) for ids in prompts])
    before, began = engine.loop_stats(), time.perf_counter()
    if piece.tokens:
        law = Sampling(temperature=0.7)
        asked = [SampleRequest(ids, piece.tokens, law, Seed(seed, sample=n)) for n, ids in enumerate(prompts)]
        written = [len(done.ids) for done in await collect([partial(engine.sample, one) for one in asked])]
    else:
        await collect([partial(engine.score, ScoreRequest(ids[:half], ids[half:])) for ids in prompts])
        written = []
    seconds, after = time.perf_counter() - began, engine.loop_stats()
    fed = after.prefilled_tokens + after.scored_tokens - before.prefilled_tokens - before.scored_tokens
    cached = sum(count * piece.prompt + count * (count - 1) / 2 for count in written)
    return Observation(after.steps - before.steps, sum(written), cached, fed, seconds)


def _prompts(engine: LocalEngine, count: int, length: int, seed: int) -> list[TokenIds]:
    generator = torch.Generator().manual_seed(seed + 7919 * count + length)
    rows = torch.randint(10, engine.spec.vocabulary - 10, (count, length), generator=generator)
    return [tuple(row) for row in rows.tolist()]


async def _contend(seen: Seen, engines: Mapping[str, LocalEngine], seed: int) -> None:
    """A step alone, then beside the other engine at work."""
    piece = Micro(16, 48, 48)
    for role, engine in engines.items():
        calm = Calm()
        seconds = await _step_seconds(engine, piece, seed + 17)
        seen.steps.setdefault((role, "alone"), []).append((calm.disturbance, seconds))
    calm = Calm()
    both = await collect([partial(_step_seconds, engine, piece, seed + 31) for engine in engines.values()])
    for role, seconds in zip(engines, both, strict=True):
        seen.steps.setdefault((role, "beside"), []).append((calm.disturbance, seconds))


async def _step_seconds(engine: LocalEngine, piece: Micro, seed: int) -> float:
    total = steps = 0.0
    for number in range(3):
        found = await _observe(engine, piece, seed + 97 * number)
        total, steps = total + found.seconds, steps + found.steps
    return total / steps


async def _run(live: Live, first: int, draft: Engine, target: Engine, seed: int) -> float:
    """One run of the pipelines; its seconds by the loop's clock."""
    base = Policy(samples=live.samples, max_tokens=512, chunking=EMBEDDED_CHUNKS, early_stop="none")
    chosen = preset(live.method)
    policy = chosen.policy(base)
    gate = chosen.gate(Material(0.2, seed, Calibrator(0.2, seed=seed)))
    context = Context(draft, target, gate, answers_for("math"), seed)
    graph = Graph(rollouts=live.in_flight)

    async def one(problem: Problem, scope: ProblemScope) -> None:
        await solve(problem, policy, context, scope)

    problems = arithmetic("calibration", first + live.problems)[first:]
    began = anyio.current_time()
    await graph.run(problems, one)
    return anyio.current_time() - began


async def _predict(live: Live, run: Run, costs: Mapping[str, Cost], seed: int) -> float:
    host, law = Host(), run.law
    law.missed = 0
    async with (
        BatchedEngine("draft", law, costs["draft"], chunk=512, batch=256, host=host) as draft,
        BatchedEngine("target", law, costs["target"], chunk=512, batch=256, host=host) as target,
    ):
        return await _run(live, run.first, draft, target, seed)


def _host_seconds(live: Live, run: Run, seed: int) -> float:
    """Processor seconds per call of everything but the models: the same run on engines that take no time."""
    free = {role: Cost(1e-9, 0.0, 0.0, 0.0) for role in ("draft", "target")}
    times: list[float] = []
    for _ in range(3):
        began = time.process_time()
        run_virtual(_predict, live, run, free, seed)
        times.append(time.process_time() - began)
    return min(times) / max(1, run.law.tape.calls)
