"""Measure in virtual time the gains from asynchrony, drafting and scale, and check the fitted costs
against real runs.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any, Literal, Self, get_args

import anyio
import numpy as np
import torch
from anyio.lowlevel import checkpoint

from atts.api import answers_for, build_engine
from atts.calibration import Calibrator
from atts.concurrency import collect
from atts.core import (
    HOLD,
    Completion,
    Outcome,
    Problem,
    Role,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import Engine, EngineAround, EngineSpec, EngineStats
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Graph, Limit, ProblemScope, measure
from atts.local import LocalEngine, LocalOptions
from atts.methods import GateInputs, preset
from atts.pipelines import Chunking, Context, Gate, Policy, RoundGate, ThresholdGate, solve
from atts.run import EngineCalls
from atts.sampling import Seed
from atts.servers import ReplicaPool
from atts.testing import run_virtual
from scripts.studies.harness import (
    Chart,
    Options,
    Parts,
    Row,
    Table,
    pair_mark,
    pair_name,
    say,
    times,
)
from scripts.studies.modelled import (
    ANSWERS,
    CHUNK,
    PAIRS,
    BatchedEngine,
    Cost,
    Host,
    Pair,
    Recording,
    TraceLaw,
    find_library,
)


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured piece of work: its steps, its duration in seconds, and the number of tokens that
    its steps processed.
    """

    steps: float
    sequences: float
    cached: float
    fed: float
    seconds: float
    calls: float = 0.0


def fit(seen: Sequence[Observation]) -> tuple[Cost, float]:
    """Fit the coefficients of step costs, and return them with the root mean square of the relative
    errors.

    The fit minimises the squared relative errors, with coefficients of at least 0.
    """
    from scipy.optimize import nnls

    rows = np.array([[o.steps, o.sequences, o.cached, o.fed, o.calls] for o in seen])
    seconds = np.array([o.seconds for o in seen])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seen)))
    step, sequence, cached, prefilled, request = (float(value) for value in found / scale)
    error = (rows @ (found / scale)) / seconds - 1
    return Cost(step, sequence, cached, prefilled, request), float(np.sqrt(np.mean(error**2)))


class Tape:
    """A recording of a run's replies: completions by the position of their request, and
    log-probabilities by rollout and prefix length.
    """

    grain = 1

    def __init__(self, draft: Engine, target: Engine) -> None:
        self.tokenizer = draft.tokenizer
        self.written: dict[tuple[Role, str, int, int, int], Completion] = {}
        self.scored: dict[tuple[str, int], tuple[float, ...]] = {}
        self._specs: dict[Role, EngineSpec] = {"draft": draft.spec, "target": target.spec}

    @property
    def calls(self) -> int:
        """Return the number of recorded calls."""
        return len(self.written) + len(self.scored)

    def spec(self, role: Role) -> EngineSpec:
        """Return the real engine's spec."""
        return self._specs[role]

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """Return the completion recorded for this request.

        :raises KeyError: the recorded run had no such request.
        """
        return self.written[_place(role, request.seed)]

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """Return the log-probabilities recorded for this request; raise as `write` does."""
        return self.scored[request.rollout, len(request.prefix)]


def _place(role: Role, seed: Seed) -> tuple[Role, str, int, int, int]:
    return role, seed.problem, seed.turn, seed.sample, seed.attempt


class TapedEngine(EngineAround):
    """A wrapper that records the answers of an engine; the owner of the engine opens and closes it."""

    def __init__(self, engine: Engine, role: Role, tape: Tape) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._tape = tape

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample with the real engine, and record the completion."""
        completion = await self._engine.sample(request)
        self._tape.written[_place(self._role, request.seed)] = completion
        return completion

    async def score(self, request: ScoreRequest) -> Scores:
        """Score with the real engine, and record the scores."""
        scores = await self._engine.score(request)
        self._tape.scored[request.rollout, len(request.prefix)] = scores.logprobs
        return scores


class InstantEngine:
    """An engine that answers from a tape without delay, so that a run takes only the time of the
    pipelines.
    """

    def __init__(self, role: Role, tape: Tape) -> None:
        self._role: Role = role
        self._tape = tape
        self.spec = tape.spec(role)
        self.tokenizer = tape.tokenizer

    def stats(self) -> EngineStats:
        """Return empty counters, because this engine counts nothing."""
        return EngineStats()

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the recorded completion without delay."""
        await checkpoint()
        return self._tape.write(self._role, request)

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the recorded scores without delay."""
        await checkpoint()
        return Scores(self._tape.score(request))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        return None


THREADS = Path("/proc/self/task")
ROLES: tuple[Role, ...] = ("draft", "target")
_INSTANT = 3  # a run on engines without delay is short, so it is repeated this many times
_SIBLINGS = 8  # number of rollouts in a piece of work that share a prompt


@dataclass(frozen=True, slots=True)
class Micro:
    """A piece of work for one engine: `batch` rollouts on prompts of `prompt` tokens, with `turns`
    requests each.

    Each request writes `tokens` tokens, or scores as many. In rollouts of several turns the length
    varies from turn to turn. So requests begin and end while others are in progress, as in a run.
    """

    batch: int
    prompt: int
    tokens: int
    turns: int = 1
    is_scored: bool = False


PIECES = (
    *(
        Micro(*sizes)
        for sizes in (
            (1, 48, 48),
            (8, 48, 48),
            (32, 48, 32),
            (64, 48, 16),
            (8, 256, 32),
            (16, 256, 16),
        )
    ),
    *(Micro(*sizes) for sizes in ((2, 48, 12, 4), (8, 64, 12, 4), (32, 64, 12, 3))),
    *(
        Micro(*sizes, is_scored=True)
        for sizes in ((1, 32, 32), (8, 32, 32), (32, 32, 32), (8, 128, 128))
    ),
    *(Micro(*sizes, is_scored=True) for sizes in ((4, 64, 16, 4), (16, 64, 16, 3))),
)
FOREGROUND = Micro(16, 48, 48)
"""The piece of work that each engine does alone, and while the other engine is busy."""


def pieces_of(role: Role) -> tuple[Micro, ...]:
    """Return the pieces of work for an engine of this role. A draft scores nothing in a run, so it
    has no pieces with scoring.
    """
    return PIECES if role == "target" else tuple(piece for piece in PIECES if not piece.is_scored)


@dataclass(frozen=True, slots=True)
class Live:
    """A kind of live run whose time is to be predicted."""

    method: str
    samples: int
    problems: int
    in_flight: int

    @property
    def name(self) -> str:
        """Return the name of this kind of run in tables."""
        return f"{self.method}, {self.samples} samples, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class Taken:
    """Wall seconds, processor seconds of the engines, and processor seconds of the event loop."""

    wall: float
    engines: Mapping[Role, float]
    loop: float
    # longest time that any thread was ready to run but had to wait for a processor
    waited: float = 0.0

    @property
    def processor(self) -> float:
        """Return the processor seconds of all threads together."""
        return self.loop + sum(self.engines.values())


@dataclass(frozen=True, slots=True)
class Piece:
    """The measurements of one piece of work of one engine."""

    seen: Observation
    taken: Taken
    calls: int


@dataclass(frozen=True, slots=True)
class Run:
    """A live run: its first problem, its times, the recorded answers of its engines, and its time
    per call without engines.
    """

    first: int
    taken: Taken
    tape: Tape
    # processor seconds per call, without the work of engines and without passing requests to
    # engines
    host: float


@dataclass(slots=True)
class Seen:
    """All measurements of a validation, in lists by round.

    `beside` has the times of an engine's work, first while the other engine rests, and then while
    it is busy.
    """

    pieces: dict[tuple[Role, Micro], list[Piece]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[Role, list[tuple[Taken, Taken]]] = field(default_factory=lambda: defaultdict(list))
    runs: dict[Live, list[Run]] = field(default_factory=lambda: defaultdict(list))


class Meter:
    """A meter of the processor time of each thread of this process since the meter was made, from
    Linux's counters.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._before = _threads()

    def read(self) -> Taken:
        """Return the time since the meter was made.

        Threads other than the engines' count as the event loop.
        """
        wall = time.perf_counter() - self._began
        none = (0.0, 0.0)
        used = {
            name: (ran - self._before.get(name, none)[0], waited - self._before.get(name, none)[1])
            for name, (ran, waited) in _threads().items()
        }
        engines: dict[Role, float] = {role: used.get(f"atts-{role}", none)[0] for role in ROLES}
        loop = sum(ran for ran, _ in used.values()) - sum(engines.values())
        return Taken(wall, engines, loop, max(waited for _, waited in used.values()))


def _threads() -> dict[str, tuple[float, float]]:
    """Return for each thread its seconds of running, and its seconds of waiting for a processor."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, tuple[float, float]] = {}
    for folder in THREADS.iterdir():
        try:
            ran, waited, _ = (folder / "schedstat").read_text().split()
        except OSError:
            continue  # the thread ended while its counters were read
        found[names.get(int(folder.name), folder.name)] = (int(ran) / 1e9, int(waited) / 1e9)
    return found


async def measure_rounds(rounds: int, lives: Sequence[Live], seed: int) -> Seen:
    """Time rounds of all pieces and all runs, in turn, each on texts that no cache holds."""
    seen = Seen()
    here = LocalOptions(worker="thread")
    async with (
        build_engine("embedded", "draft", here) as draft,
        build_engine("embedded", "target", here) as target,
    ):
        assert isinstance(draft, LocalEngine)
        assert isinstance(target, LocalEngine)
        engines: dict[Role, LocalEngine] = {"draft": draft, "target": target}
        # the first computation compiles kernels and fills caches
        await _contend(Seen(), engines, seed - 10_000)
        for number in range(rounds):
            say(f"scale: validation, round {number + 1} of {rounds}")
            turn = number % len(lives)
            for place, live in enumerate([*lives[turn:], *lives[:turn]]):
                for role, engine in engines.items():
                    for piece in pieces_of(role)[place :: len(lives)]:
                        found = await _observe(
                            engine, role, piece, seed + 10_000 * number + 100 * place
                        )
                        seen.pieces[role, piece].append(found)
                # number of the first problem; no earlier run had the same problems, so no cache
                # holds their texts
                first = (number * len(lives) + place) * live.problems
                seen.runs[live].append(await _live(live, first, draft, target, seed))
            await _contend(seen, engines, seed + 10_000 * number + 5_000)
    return seen


async def _live(live: Live, first: int, draft: LocalEngine, target: LocalEngine, seed: int) -> Run:
    tape = Tape(draft, target)
    meter = Meter()
    wall = await run(
        live, first, TapedEngine(draft, "draft", tape), TapedEngine(target, "target", tape), seed
    )
    taken = meter.read()
    hosts = list[float]()
    for _ in range(_INSTANT):
        meter = Meter()
        await run(live, first, InstantEngine("draft", tape), InstantEngine("target", tape), seed)
        hosts.append(meter.read().loop / tape.calls)
    return Run(first, replace(taken, wall=wall), tape, median(hosts))


async def _observe(engine: LocalEngine, role: Role, piece: Micro, seed: int) -> Piece:
    """Give the engine a piece of work on new texts. Return the time and the counters of the work."""
    prompts = _prompts(engine, piece, seed)
    if piece.is_scored:  # scored text follows a warm prefix, as in a rollout
        await collect(
            [partial(engine.score, ScoreRequest(ids[:1], ids[1:])) for ids in set(prompts)]
        )
    before = engine.loop_stats()
    meter = Meter()
    rollouts = [
        partial(_rollout, engine, piece, ids, number, seed) for number, ids in enumerate(prompts)
    ]
    cached = sum(await collect(rollouts))
    taken = meter.read()
    after = engine.loop_stats()
    fed = (
        after.prefilled_tokens
        + after.scored_tokens
        - before.prefilled_tokens
        - before.scored_tokens
    )
    seen = Observation(
        steps=after.steps - before.steps,
        sequences=after.sampled_tokens - before.sampled_tokens,
        cached=cached,
        fed=fed,
        seconds=taken.engines[role],
        calls=piece.batch * piece.turns,
    )
    return Piece(seen, taken, piece.batch * piece.turns)


async def _rollout(
    engine: LocalEngine, piece: Micro, ids: TokenIds, number: int, seed: int
) -> float:
    """Run one rollout's requests one after the other, and return the KV tokens that its decoding
    read.
    """
    read = 0.0
    sampling = Sampling(temperature=0.7)
    name = f"piece {seed}/{number}"
    drawn = torch.Generator().manual_seed(seed + number)
    for turn in range(piece.turns):
        swing = (number + turn) % 3 - 1 if piece.turns > 1 else 0
        size = piece.tokens + swing * piece.tokens // 3
        if piece.is_scored:
            chunk = tuple(
                torch.randint(10, engine.spec.vocabulary - 10, (size,), generator=drawn).tolist()
            )
            await engine.score(ScoreRequest(ids, chunk, rollout=name))
            ids += chunk
        else:
            request = SampleRequest(
                ids, size, sampling, Seed(seed, "piece", number, turn), rollout=name
            )
            done = await engine.sample(request)
            read += len(done.ids) * (len(ids) + (len(done.ids) - 1) / 2)
            ids += done.ids
    return read


def _prompts(engine: LocalEngine, piece: Micro, seed: int) -> list[TokenIds]:
    """Make a prompt for each rollout; in pieces of several turns, _SIBLINGS rollouts share a
    prompt.
    """
    generator = torch.Generator().manual_seed(
        seed + 7919 * piece.batch + piece.prompt + 31 * piece.turns
    )
    rows = torch.randint(
        10, engine.spec.vocabulary - 10, (piece.batch, piece.prompt), generator=generator
    )
    share = _SIBLINGS if piece.turns > 1 else 1
    prompts = [tuple(row) for row in rows.tolist()]
    return [prompts[number - number % share] for number in range(piece.batch)]


async def _contend(seen: Seen, engines: Mapping[Role, LocalEngine], seed: int) -> None:
    """Time the same work on each engine twice: alone, and while the other engine is always busy."""
    for role, engine in engines.items():
        other = engines["target" if role == "draft" else "draft"]
        done = anyio.Event()
        alone = await _observe(engine, role, FOREGROUND, seed + 17)

        async def keep_busy(other: LocalEngine = other, done: anyio.Event = done) -> None:
            number = 50
            while not done.is_set():
                await _observe(other, "draft", Micro(16, 48, 12), seed + number)
                number += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_busy)
            beside = await _observe(engine, role, FOREGROUND, seed + 31)
            seen.beside[role].append((alone.taken, beside.taken))
            done.set()


async def run(live: Live, first: int, draft: Engine, target: Engine, seed: int) -> float:
    """Run the pipelines once, and return the seconds by the event loop's clock.

    The gate of method `atts` is frozen, so its decisions do not depend on the order in which
    requests end. A run on other engines therefore requests the same chunks.
    """
    base = Policy(samples=live.samples, early_stop="none")
    chosen = preset(live.method)
    policy = chosen.policy(base)
    gate = chosen.gate(GateInputs(Calibrator(0.2, seed=seed)))
    gate = ThresholdGate(1.2) if live.method == "atts" else gate
    context = Context(draft, target, gate, answers_for("math"), EngineCalls, seed)
    graph = Graph(rollouts=live.in_flight)

    async def one(problem: Problem, scope: ProblemScope) -> None:
        await solve(problem, policy, context, scope)

    problems = arithmetic("calibration", first + live.problems)[first:]
    began = anyio.current_time()
    await graph.run(problems, one)
    return anyio.current_time() - began


Clock = Literal["wall", "processor"]


def local_validation(options: Options) -> list[Table]:
    """Fit this machine's costs, and compare predicted with measured times of live runs.

    Return no tables without Linux's counters of threads.
    """
    if not THREADS.exists():
        say(
            "scale: no validation, because this system does not count the processor time of threads"
        )
        return []
    torch.set_num_threads(1)
    rounds = options.pick(2, 4, 12)
    problems = options.pick(4, 8, 16)
    lives = [
        Live(method, 8, problems, 64) for method in ("atts", "top-b", "target-only", "draft-only")
    ]
    lives += [Live("atts", 8, problems, 16)] if options.effort != "quick" else []
    seen = anyio.run(measure_rounds, rounds, lives, options.seed)
    costs, table = _fitted(seen)
    return [table, _predicted(seen, costs, options.seed)]


def _fitted(seen: Seen) -> tuple[Mapping[Role, Cost], Table]:
    """Fit the costs of each engine to pieces of work done alone, and tabulate the coefficients and
    the error.
    """
    costs: dict[Role, Cost] = {}
    rows: list[Row] = []
    for role in ROLES:
        kinds = [
            [piece.seen for piece in pieces]
            for (name, _), pieces in seen.pieces.items()
            if name == role
        ]
        cost, error = fit([_typical(every) for every in kinds])
        costs[role] = replace(cost, origin="fitted on this machine")
        coefficients = (
            1e3 * cost.step,
            1e6 * cost.sequence,
            1e9 * cost.cached,
            1e6 * cost.prefilled,
        )
        shares = (_stretch(seen, role, "processor"), _stretch(seen, role, "wall"))
        rows.append((role, *coefficients, 1e6 * cost.request, *shares, error))
    return costs, Table.of(
        "The embedded pair's costs on this machine",
        "engine | a, ms per step | b, us per sequence | c, ns per KV token | d, us per fed "
        "token | us per request | other engine busy, processor time | other engine busy, wall "
        "time | fit's relative error",
        rows,
        "The numbers a to d are fitted by least squares to "
        f"{len(pieces_of('draft'))} kinds of work of the draft and {len(pieces_of('target'))} "
        "of the target. None of them may be negative. The kinds of work are decoding at several "
        "batch sizes and lengths, rollouts that come and go, and scoring by the target. Times are "
        "median processor times of the engine's thread.",
        f"Passing a request to an engine takes {1e6 * _handing(seen):.0f} us of the event loop. "
        "The columns *other engine busy* show how many times as long the same work takes while "
        "the other engine is busy.",
    )


def _typical(every: Sequence[Observation]) -> Observation:
    return Observation(
        steps=fmean(one.steps for one in every),
        sequences=fmean(one.sequences for one in every),
        cached=fmean(one.cached for one in every),
        fed=fmean(one.fed for one in every),
        seconds=median(one.seconds for one in every),
        calls=fmean(one.calls for one in every),
    )


def _handing(seen: Seen) -> float:
    """Return the event loop's processor seconds for passing one request to an engine.

    The value is measured on pieces of several turns, whose requests begin and end at different
    times, as in a run.
    """
    busy = [
        pieces for (_, kind), pieces in seen.pieces.items() if kind.turns > 1 and kind.batch > 2
    ]
    return median(piece.taken.loop / piece.calls for pieces in busy for piece in pieces)


def _stretch(seen: Seen, role: Role, clock: Clock) -> float:
    """Return the factor by which work takes longer while the other engine is busy."""

    def took(taken: Taken) -> float:
        return taken.wall if clock == "wall" else taken.engines[role]

    return max(1.0, median(took(beside) / took(alone) for alone, beside in seen.beside[role]))


def _predicted(seen: Seen, costs: Mapping[Role, Cost], seed: int) -> Table:
    """Compare every live run with its simulation, part by part."""
    rows: list[Row] = []
    errors: dict[Clock, list[float]] = {"wall": [], "processor": []}
    for live, every in seen.runs.items():
        guesses = [_guess(seen, costs, live, one, seed) for one in every]
        taken = [one.taken for one in every]
        for clock in get_args(Clock):
            errors[clock].append(
                _off([getattr(g, clock) for g in guesses], [getattr(t, clock) for t in taken])
            )
        parts = [
            _off([g.engines[role] for g in guesses], [t.engines[role] for t in taken])
            for role in ROLES
        ]
        parts.append(_off([g.loop for g in guesses], [t.loop for t in taken]))
        wall = sum(one.wall for one in taken)
        waited = sum(one.waited for one in taken)
        calls = fmean(one.tape.calls for one in every)
        processor = fmean(one.processor for one in taken)
        measured = (
            live.name,
            len(every),
            round(calls),
            processor,
            _percent(errors["processor"][-1]),
        )
        walls = (wall / len(every), _percent(errors["wall"][-1]), f"{100 * waited / wall:.0f} %")
        rows.append((*measured, *map(_percent, parts), *walls))
    runs = [one for every in seen.runs.values() for one in every]
    waited = sum(one.taken.waited for one in runs) / sum(one.taken.wall for one in runs)
    words = f"Wall time is {_words(errors['wall'])}" if waited < 0.05 else (
        "Wall time cannot be judged on this machine, because threads waited for a processor for "
        f"{100 * waited:.0f} % of the time; it is {_words(errors['wall'])}"
    )  # fmt: skip
    summary = (
        f"In {len(runs)} live runs of {len(seen.runs)} kinds, the simulated processor time is "
        f"{_words(errors['processor'])} (goal: 10 %). {words}."
    )
    return Table.of(
        "Predicted and measured times on this machine",
        "live run on the embedded pair | runs | calls | processor s | error | of the "
        "draft | of the target | of the event loop | wall s | error of wall | waited "
        "for a processor",
        rows,
        summary,
        f"Embedded pair: {pair_mark()}. {next(iter(seen.runs)).problems} new problems per run. "
        "Seconds are means over runs. The columns *of the draft*, *of the target* and *of the "
        "event loop* have the errors for single threads. *Waited for a processor* is the longest time that "
        "one thread was ready to run but had no processor, as a share of wall time.",
        "The formula was fitted to other work than these runs. Only the event loop's time was "
        "measured with the same methods, on engines that answer at once. The "
        "gate of atts is frozen, so the simulated run requests the same chunks as the live run.",
        headline=summary,
    )


def _off(guess: Sequence[float], real: Sequence[float]) -> float:
    return sum(guess) / sum(real) - 1 if sum(real) > 1e-3 else math.nan


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %" if math.isfinite(error) else "-"


def _words(errors: Sequence[float]) -> str:
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return (
        f"off by {100 * rms:.1f} % (root mean square), {100 * max(map(abs, errors)):.1f} % at most"
    )


def _guess(seen: Seen, costs: Mapping[Role, Cost], live: Live, one: Run, seed: int) -> Taken:
    """Return the predicted times of a run.

    The other engine slows down wall time and processor time differently. Each of the two times is
    therefore simulated with its own slow-down.
    """
    call = one.host + _handing(seen)
    found = dict[Clock, Taken]()
    for clock in get_args(Clock):
        shared: dict[Role, Cost] = {}
        for role, cost in costs.items():
            shared[role] = replace(cost, share=_stretch(seen, role, clock), call=call)
        found[clock] = run_virtual(_predict, live, one, shared, seed)
    return replace(found["processor"], wall=found["wall"].wall)


async def _predict(live: Live, one: Run, costs: Mapping[Role, Cost], seed: int) -> Taken:
    """Simulate the run on engines with the fitted costs."""
    host = Host()
    tape = one.tape
    async with (
        BatchedEngine("draft", tape, costs["draft"], chunk=512, batch=256, host=host) as draft,
        BatchedEngine("target", tape, costs["target"], chunk=512, batch=256, host=host) as target,
    ):
        wall = await run(live, one.first, draft, target, seed)
        calls = sum(engine.stats().requests * engine.cost.call for engine in (draft, target))
        return Taken(wall, {"draft": draft.load.busy, "target": target.load.busy}, calls)


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
    """A point of the grid: pair, method and sizes of one simulated run."""

    pair: Pair
    method: Method
    problems: int
    samples: int = 16
    turns: int = 15
    rate: float = 0.2
    replicas: int = 1
    in_flight: int = 256  # number of rollouts in flight per replica
    order: Order = "all together"
    # limit of KV tokens that the graph admits to the target, per replica; None: no limit
    budget: int | None = None
    room: Literal["as installed", "without end"] = "as installed"
    seed: int = 0

    def key(self) -> str:
        """Return a name that differs between different cells."""
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def places(self) -> int:
        """Return the number of rollouts in flight over all replicas."""
        return (
            1
            if self.order == "one request at a time"
            else max(self.samples, self.in_flight * self.replicas)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a cell; times are seconds of virtual time."""

    seconds: float
    draft_tokens: int
    target_tokens: int
    realised: float  # share of judged chunks that escalated
    waiting: float  # share of the calls' time in which rollouts waited for siblings
    intensity: float
    draft_busy: float
    target_busy: float
    target_peak: float  # largest number of KV tokens in use on one replica

    @property
    def busy(self) -> tuple[float, float]:
        """Return the shares of time in which draft and target worked."""
        return self.draft_busy, self.target_busy

    @property
    def throughput(self) -> float:
        """Return tokens written per second."""
        return (self.draft_tokens + self.target_tokens) / self.seconds


def run_cell(cell: Cell, law: TraceLaw) -> Found:
    """Simulate a cell in virtual time."""
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
    # leave out the nodes in which a rollout waits for a score that it requested earlier
    rounds = [node for node in recording.nodes() if node.stage != HOLD]
    timing = measure(rounds)
    usage = [outcome.usage for outcome in outcomes]
    decisions = [
        turn.decision
        for outcome in outcomes
        for rollout in outcome.rollouts
        for turn in rollout.turns
        if turn.decision is not None
    ]
    num_escalated = sum(decision.escalate for decision in decisions)
    whole = timing.sibling_seconds + timing.memory_seconds + timing.arithmetic_seconds
    return Found(
        seconds=seconds,
        draft_tokens=law.grain * sum(one.draft_tokens for one in usage),
        target_tokens=law.grain * sum(one.target_tokens for one in usage),
        realised=num_escalated / len(decisions) if decisions else math.nan,
        waiting=timing.sibling_seconds / whole,
        intensity=timing.intensity,
        draft_busy=sum(engine.load.busy for engine in drafts) / seconds / len(drafts),
        target_busy=sum(engine.load.busy for engine in targets) / seconds / len(targets),
        target_peak=max(engine.load.peak for engine in targets),
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
    """The results of finished cells; stored in `file` if a file is given."""

    def __init__(self, law: TraceLaw, file: Path | None) -> None:
        self._law = law
        self._done = Parts(file)

    def __len__(self) -> int:
        return len(self._done)

    def get(self, cell: Cell) -> Found:
        """Return the result of a cell; simulate the cell first if there is no result."""
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
    """Validate the fitted costs on this machine, then simulate the grids.

    Results that are in the output folder are not computed again.
    """
    law = TraceLaw(find_library(), options.seed)
    results = Results(law, options.file("scale-cells.jsonl"))
    say(f"scale: work from {law.library.origin}; {len(results)} cells are already finished")
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
    """Tabulate the costs of the simulated engines."""

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
        "engine | a, ms per step | b, us per sequence | c, ns per KV token | d, us per "
        "prefilled token | KV tokens | tokens/s at batch 1 | at batch 128 | origin",
        [
            row("70B target", EIGHT.target, EIGHT.target_kv),
            row("8B draft", EIGHT.draft, EIGHT.draft_kv),
            row("1.5B draft", SMALL.draft, SMALL.draft_kv),
        ],
        f"The simulated work is {law.library.origin}, with prompts of 150 tokens and chunks of "
        "up to 500 tokens. All methods write equally many tokens.",
    )


@dataclass(frozen=True, slots=True)
class _Grids:
    """The grids of one effort, with a method for each table."""

    options: Options
    results: Results

    @property
    def pairs(self) -> Sequence[Pair]:
        """Return the pairs that most tables compare."""
        return self.options.pick((EIGHT,), (EIGHT, SMALL), (EIGHT, SMALL))

    @property
    def sizes(self) -> Sequence[int]:
        """Return the numbers of samples to compare."""
        return self.options.pick((4, 16), (1, 4, 16, 64, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def cell(self, pair: Pair, method: Method, samples: int, **changes: Any) -> Cell:
        """Return a cell whose number of problems keeps the number of rollouts about constant."""
        problems = max(self.options.pick(2, 2, 16), self.options.pick(128, 256, 1600) // samples)
        return replace(Cell(pair, method, problems, samples, seed=self.options.seed), **changes)

    def get(self, cell: Cell, **changes: Any) -> Found:
        """Return the result of a cell with other settings."""
        return self.results.get(replace(cell, **changes))

    def samples(self, pair: Pair) -> Table:
        """Tabulate time, throughput and r against the number of samples.

        Here r is the time of scoring divided by all other time.
        """
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
            "samples | method | s per question | tokens/s | r | draft busy | target busy | "
            "realised rate",
            rows,
            chart=Chart("samples", "tokens/s", "method", "log", "log"),
        )

    def gains(self) -> Table:
        """Compare atts with target-only, and with top-b at the same share of target tokens."""
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
                            f"{pair.name.split('/')[0]} draft: **{times(gains[0])}** as fast as "
                            f"target-only "
                            f"({times(gains[1])} if decided votes stop), {times(gains[3])} as "
                            f"sorted rounds, "
                            f"{times(gains[4])} as question by question"
                        )
        return Table.of(
            "Gains: the same work and the same share of target tokens",
            "pair | samples | rate | over target-only | with early stop | with chunks "
            "replaced | over top-b rounds | over question by question",
            rows,
            headline="70B target, 16 samples, rate 0.2: " + "; ".join(parts),
        )

    def turns(self) -> Table:
        """Tabulate the cost of synchronised rounds against the number of turns."""
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
            "samples | limit of turns | over target-only | over top-b | Ts share of top-b | "
            "r of atts | r of top-b",
            rows,
            chart=Chart("limit of turns", "Ts share of top-b", "samples"),
        )

    def rates(self) -> Table:
        """Tabulate the speed against the rate."""
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
        """Tabulate the speed of a fixed evaluation against the number of replicas."""
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
            "rollouts in flight on each replica",
            _SCALING,
            rows,
            headline=f"fixed evaluation: efficiency above one half up to {well} replicas; "
            f"{times(atts[-1][1])} as fast with {atts[-1][0]} replicas",
            chart=Chart("replicas", "tokens/s", "method", "log", "log"),
        )

    def growing(self) -> Table:
        """Tabulate the speed against the number of replicas if the work grows with them."""
        rows: list[_Scaled] = []
        for method in self.options.pick(
            METHODS[:1], ("atts", "target-only"), ("atts", "top-b", "target-only")
        ):
            places = self.options.pick((1, 4), (1, 4, 16), (1, 2, 4, 8, 16, 32, 64))
            rows += self._scaling(method, {replicas: 16 * replicas for replicas in places})
        last = [row for row in rows if row[0] == "atts"][-1]
        return Table.of(
            "Work that grows with the replicas: 8B/70B, 16 questions x 16 samples for each replica, rate "
            "0.2",
            _SCALING,
            rows,
            headline=f"constant work per replica: {last[1]} replicas write **{last[3]:,.0f} "
            f"tokens/s** at "
            f"efficiency {last[5]:.2g}",
            chart=Chart("replicas", "tokens/s", "method", "log", "log"),
        )

    def _scaling(self, method: Method, questions: dict[int, int]) -> list[_Scaled]:
        """Compare a method on growing numbers of replicas with its run on the fewest replicas."""
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
        """Tabulate the baselines against which atts reaches the published factors, and the
        conditions under which it does.
        """
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
    return (
        f"reached ({figure:g}x)"
        if ratio >= figure
        else f"{100 * ratio / figure:.0f} % of {figure:g}x"
    )


def _compared(best: Mapping[str, float], kind: str, figure: float) -> str:
    """List the baselines of one kind in two groups: those against which atts reaches the published
    figure, and all others.
    """
    mine = {
        name.removeprefix("throughput, "): ratio
        for name, ratio in best.items()
        if name.startswith(kind)
    }
    reached = [f"{name} ({times(ratio)})" for name, ratio in mine.items() if ratio >= figure]
    others = [f"{name} ({times(ratio)} at most)" for name, ratio in mine.items() if ratio < figure]
    groups = {"reached against": reached, "not against": others}
    return "; ".join(f"{words} {', '.join(names)}" for words, names in groups.items() if names)
