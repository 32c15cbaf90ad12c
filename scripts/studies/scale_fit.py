"""Fits the cost formula to this machine and asks whether it predicts runs that it was not fitted to."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

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
from scripts.studies.harness import Calm, Options, Table, say
from scripts.studies.harness import Cell as TableCell
from scripts.studies.scale_costs import Cost, Observation, fit, shared
from scripts.studies.scale_engine import BatchedEngine, Host
from scripts.studies.scale_tape import InstantEngine, Tape, TapedEngine, TapedLaw

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


@dataclass(frozen=True, slots=True)
class Taken:
    """What something took: wall seconds, processor seconds of this process, and processors that others used."""

    wall: float
    processor: float
    others: float


@dataclass(frozen=True, slots=True)
class Run:
    """One live run: which problems, what it took, what the engines said, and the same without engines."""

    first: int
    taken: Taken
    law: TapedLaw
    host: float  # processor seconds per call of everything but the models


@dataclass(slots=True)
class Seen:
    """Everything measured, round by round."""

    pieces: dict[tuple[str, Micro], list[Observation]] = field(
        default_factory=dict[tuple[str, Micro], list[Observation]]
    )
    alone: list[float] = field(default_factory=list[float])  # processor seconds of both engines' work, one by one
    together: list[float] = field(default_factory=list[float])  # and at once
    runs: dict[Live, list[Run]] = field(default_factory=dict[Live, list[Run]])


def local_validation(options: Options) -> list[Table]:
    """The fitted costs of this machine, and predicted beside measured times of live runs."""
    torch.set_num_threads(1)
    rounds, problems = options.pick(2, 4, 12), options.pick(4, 8, 24)
    lives = [Live(method, 8, problems, 64) for method in ("atts", "top-b", "target-only", "draft-only")]
    lives += [Live("atts", 8, problems, 16)] if options.effort != "quick" else []
    seen = Seen()
    anyio.run(_measure, seen, rounds, lives, options.seed)
    costs, table = _fitted(seen)
    return [table, _predicted(seen, costs, options)]


def _predicted(seen: Seen, costs: Mapping[str, Cost], options: Options) -> Table:
    rows: list[Row] = []
    errors: dict[str, list[float]] = {"wall": [], "processor": []}
    for live, every in seen.runs.items():
        kept = sorted(every, key=lambda run: run.taken.others)[: max(1, len(every) // 3)]
        host = min(run.host for run in every)
        engines = {role: shared(cost, _stretch(seen), host) for role, cost in costs.items()}
        guesses = [run_virtual(_predict, live, run, engines, options.seed) for run in kept]
        pairs = list(zip(guesses, kept, strict=True))
        ratios = {
            "wall": median(guess.wall / run.taken.wall for guess, run in pairs),
            "processor": median(guess.processor / run.taken.processor for guess, run in pairs),
        }
        for kind, ratio in ratios.items():
            errors[kind].append(ratio - 1)
        missed = sum(run.law.missed for run in kept) / sum(run.law.tape.calls for run in kept)
        took = [median(getattr(run.taken, kind) for run in kept) for kind in ("wall", "processor")]
        words = (live.name, kept[0].law.tape.calls, took[0], f"{ratios['wall'] - 1:+.1%}", took[1])
        rows.append(
            (*words, f"{ratios['processor'] - 1:+.1%}", 1e3 * host, f"{missed:.1%}", max(r.taken.others for r in kept))
        )
    columns = (
        "live run on the embedded pair", "calls", "wall s", "predicted", "processor s", "predicted, processor",
        "host ms a call", "elsewhere", "others' processors",
    )  # fmt: skip
    notes = (
        f"Wall time: {_words(errors['wall'])}. Processor time: {_words(errors['processor'])} (bar: 10 %).",
        f"{next(iter(seen.runs)).problems} problems a run, none twice; the calmest third of "
        f"{max(map(len, seen.runs.values()))} rounds. Others' processors: how many other programs used meanwhile, at "
        "most; wall time means something where they used none.",
        "Fitted to processor seconds of pieces of work alone: no run was used. Host: processor time per call of the "
        "same pipelines on engines that answer at once, the least of all rounds. Elsewhere: calls that the simulated "
        "run asked for where the live one had none, so that a similar chunk stood in.",
    )
    return Table("Predicted and measured times on this machine", columns, tuple(rows), notes)


def _words(errors: Sequence[float]) -> str:
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return f"root mean square error {rms:.1%}, largest {max(map(abs, errors)):.1%}"


def _fitted(seen: Seen) -> tuple[Mapping[str, Cost], Table]:
    costs: dict[str, Cost] = {}
    rows: list[Row] = []
    for role in ("draft", "target"):
        kinds = [values for (name, _), values in seen.pieces.items() if name == role]
        cost, error = fit([min(values, key=lambda o: o.seconds) for values in kinds])
        costs[role] = replace(cost, origin="fitted on this machine")
        coefficients = (1e3 * cost.step, 1e6 * cost.sequence, 1e9 * cost.cached, 1e6 * cost.prefilled)
        rows.append((role, *coefficients, 1e6 * cost.call, _stretch(seen), error))
    columns = (
        "engine", "a, ms a step", "b, us a sequence", "c, ns a KV token", "d, us a fed token",
        "us a call", "stretched beside the other", "fit's relative error",
    )  # fmt: skip
    notes = (
        f"Least squares over {len(seen.pieces) // 2} kinds of work on each engine, processor seconds, the least of all "
        "rounds; no coefficient below 0. Stretched: both engines' work at once over one after the other.",
    )
    return costs, Table("The embedded pair's costs on this machine", columns, tuple(rows), notes)


def _stretch(seen: Seen) -> float:
    return max(1.0, median(both / one for both, one in zip(seen.together, seen.alone, strict=True)))


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
            for place, live in enumerate(lives[number % len(lives) :] + lives[: number % len(lives)]):
                for role, engine in engines.items():
                    for piece in pieces[place % 2 :: 2]:
                        found = await _observe(engine, piece, seed + 10_000 * number + 100 * place)
                        seen.pieces.setdefault((role, piece), []).append(found)
                first = (number * len(lives) + place) * live.problems  # the caches know none of them yet
                seen.runs.setdefault(live, []).append(await _live(live, first, draft, target, seed))
            await _contend(seen, engines, seed + 10_000 * number + 5_000)


async def _live(live: Live, first: int, draft: LocalEngine, target: LocalEngine, seed: int) -> Run:
    tape = Tape()
    calm, began = Calm(), time.process_time()
    wall = await _run(live, first, TapedEngine(draft, "draft", tape), TapedEngine(target, "target", tape), seed)
    taken = Taken(wall, time.process_time() - began, calm.disturbance)
    law = TapedLaw(tape, draft, target)
    began = time.process_time()
    await _run(live, first, InstantEngine("draft", law), InstantEngine("target", law), seed)
    return Run(first, taken, law, (time.process_time() - began) / tape.calls)


async def _observe(engine: LocalEngine, piece: Micro, seed: int) -> Observation:
    """Give the engine one piece of work it has not seen, and read its counters."""
    prompts = _prompts(engine, piece.batch, piece.prompt, seed)
    half = piece.prompt // 2
    if not piece.tokens:  # what is scored comes on top of a warm prefix, as in a rollout
        await collect([partial(engine.score, ScoreRequest(ids[:1], ids[1:half])) for ids in prompts])
    before, began = engine.loop_stats(), time.process_time()
    if piece.tokens:
        law = Sampling(temperature=0.7)
        asked = [SampleRequest(ids, piece.tokens, law, Seed(seed, sample=n)) for n, ids in enumerate(prompts)]
        written = [len(done.ids) for done in await collect([partial(engine.sample, one) for one in asked])]
    else:
        await collect([partial(engine.score, ScoreRequest(ids[:half], ids[half:])) for ids in prompts])
        written = []
    seconds, after = time.process_time() - began, engine.loop_stats()
    fed = after.prefilled_tokens + after.scored_tokens - before.prefilled_tokens - before.scored_tokens
    cached = sum(count * piece.prompt + count * (count - 1) / 2 for count in written)
    return Observation(after.steps - before.steps, sum(written), cached, fed, seconds, piece.batch)


def _prompts(engine: LocalEngine, count: int, length: int, seed: int) -> list[TokenIds]:
    generator = torch.Generator().manual_seed(seed + 7919 * count + length)
    rows = torch.randint(10, engine.spec.vocabulary - 10, (count, length), generator=generator)
    return [tuple(row) for row in rows.tolist()]


async def _contend(seen: Seen, engines: Mapping[str, LocalEngine], seed: int) -> None:
    """The same amount of work on both engines, one after the other, then at once."""
    piece = Micro(16, 48, 48)
    began = time.process_time()
    for engine in engines.values():
        await _observe(engine, piece, seed + 17)
    alone = time.process_time()
    await collect([partial(_observe, engine, piece, seed + 31) for engine in engines.values()])
    seen.alone.append(alone - began)
    seen.together.append(time.process_time() - alone)


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


async def _predict(live: Live, run: Run, costs: Mapping[str, Cost], seed: int) -> Taken:
    host, law = Host(), run.law
    law.missed = 0
    async with (
        BatchedEngine("draft", law, costs["draft"], chunk=512, batch=256, host=host) as draft,
        BatchedEngine("target", law, costs["target"], chunk=512, batch=256, host=host) as target,
    ):
        wall = await _run(live, run.first, draft, target, seed)
        calls = sum(engine.stats().requests * engine.cost.call for engine in (draft, target))
        return Taken(wall, draft.load.busy + target.load.busy + calls, 0.0)
