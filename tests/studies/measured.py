"""Measures pieces of work and whole runs on the embedded pair, thread by thread."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import anyio
import torch

from atts.api import answers_for, build_engine
from atts.calibration import Calibrator
from atts.concurrency import collect
from atts.core import Problem, Role, SampleRequest, Sampling, ScoreRequest, TokenIds
from atts.engine import Engine
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Graph, ProblemScope
from atts.local import LocalEngine, LocalOptions
from atts.methods import GateInputs, preset
from atts.pipelines import Context, Policy, ThresholdGate, solve
from atts.run import EngineCalls
from atts.sampling import Seed
from scripts.studies.harness import say
from tests.studies.fitted import Observation
from tests.studies.taped import InstantEngine, Tape, TapedEngine

THREADS = Path("/proc/self/task")
ROLES: tuple[Role, ...] = ("draft", "target")
_INSTANT = 3  # repeats of a run on engines that answer at once: each is short
_SIBLINGS = 8  # rollouts of a piece that share a prompt


@dataclass(frozen=True, slots=True)
class Micro:
    """A piece of work given to one engine: `batch` rollouts on prompts of `prompt` tokens, `turns`
    requests each.

    Each request writes `tokens` tokens, or has that many scored; rollouts of more than one turn ask
    for more and for fewer in turn, so that requests come and go while others are under way, as in a
    run.
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
"""What each engine does alone and beside the other."""


def pieces_of(role: Role) -> tuple[Micro, ...]:
    """What an engine does in a run: a draft never scores."""
    return PIECES if role == "target" else tuple(piece for piece in PIECES if not piece.is_scored)


@dataclass(frozen=True, slots=True)
class Live:
    """A run whose time is to be predicted."""

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
    """What something took: wall seconds, processor seconds of the engines and of the event loop."""

    wall: float
    engines: Mapping[Role, float]
    loop: float
    # seconds that one thread was ready and had no processor, the most of any thread
    waited: float = 0.0

    @property
    def processor(self) -> float:
        """Of all threads."""
        return self.loop + sum(self.engines.values())


@dataclass(frozen=True, slots=True)
class Piece:
    """One measured piece of work: what one engine and the event loop did."""

    seen: Observation
    taken: Taken
    calls: int


@dataclass(frozen=True, slots=True)
class Run:
    """One live run: which problems, what it took, what the engines said, and the same without
    engines.
    """

    first: int
    taken: Taken
    tape: Tape
    host: float  # processor seconds per call of everything but engines and handing over


@dataclass(slots=True)
class Seen:
    """Everything measured, round by round; `beside`: an engine's work while the other rests, and
    while it is busy.
    """

    pieces: dict[tuple[Role, Micro], list[Piece]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[Role, list[tuple[Taken, Taken]]] = field(default_factory=lambda: defaultdict(list))
    runs: dict[Live, list[Run]] = field(default_factory=lambda: defaultdict(list))


class Meter:
    """What each thread of this process uses from now on, as Linux counts it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._before = _threads()

    def read(self) -> Taken:
        """Since it was made; threads other than the engines' are the event loop and its helpers."""
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
    """Seconds that each thread ran, and was ready to run but had to wait."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, tuple[float, float]] = {}
    for folder in THREADS.iterdir():
        try:
            ran, waited, _ = (folder / "schedstat").read_text().split()
        except OSError:
            continue  # it ended meanwhile
        found[names.get(int(folder.name), folder.name)] = (int(ran) / 1e9, int(waited) / 1e9)
    return found


async def measure(rounds: int, lives: Sequence[Live], seed: int) -> Seen:
    """Rounds of all pieces and all runs, in turn, each on texts that no cache has met."""
    seen = Seen()
    here = LocalOptions(worker="thread")
    async with (
        build_engine("embedded", "draft", here) as draft,
        build_engine("embedded", "target", here) as target,
    ):
        assert isinstance(draft, LocalEngine)
        assert isinstance(target, LocalEngine)
        engines: dict[Role, LocalEngine] = {"draft": draft, "target": target}
        # what is computed first compiles kernels and fills caches
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
                first = (
                    number * len(lives) + place
                ) * live.problems  # the caches know none of them yet
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
    """Give the engine one piece of work it has not seen, and read its counters."""
    prompts = _prompts(engine, piece, seed)
    if piece.is_scored:  # what is scored comes on top of a warm prefix, as in a rollout
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
    """One rollout's requests, one after the other; the KV tokens that its decoding read."""
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
    """A prompt a rollout, or one for every few siblings where they have several turns."""
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
    """The same amount of work on each engine, alone and while the other has always something to do."""
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
    """One run of the pipelines; its seconds by the loop's clock.

    The gate of `atts` is frozen: the same run on other engines asks for the same chunks, whatever
    ends first.
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
