"""Measure HTTP in two directions: calls from atts to servers, and the endpoint that atts serves.

Calls are compared with a bare aiohttp loop, and timed on servers that imitate the times of a GPU.
The endpoint is compared with a server that echoes requests. A soak test watches the endpoint's
memory, threads and files for half an hour.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import anyio
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from anyio.from_thread import BlockingPortal, start_blocking_portal

from atts.api import Setup, answers_for, evaluate
from atts.api.setup import embedded_scores
from atts.concurrency import collect
from atts.core import (
    HOLD,
    Completion,
    Outcome,
    Problem,
    Role,
    SampleRequest,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import Engine, EngineSpec, Tokenizer
from atts.evaluators import compare_runs
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Graph, Limit, ProblemScope, measure
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.pipelines import Chunking, Context, Policy, ScoreRule, solve
from atts.pipelines.scores import ScoreKind
from atts.run import EngineCalls, RunResult
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions
from atts.serving import ServeOptions, Service, run_server
from atts.testing import (
    DialectServer,
    ScriptedEngine,
    Selector,
    ServerQuirks,
    ToyTokenizer,
    run_virtual,
    toy_problems,
)
from scripts.studies.harness import Options, Row, Spent, Spread, Table, interval, points, say
from scripts.studies.modelled import PAIRS, BatchedEngine, Cost, Pair, Recording

DELAY_SECONDS = 0.05
# time limit of requests and of connections; thousands of connections take long on a busy machine
PATIENCE_SECONDS = 300.0
TOKENS = 8
PROMPT = tuple(range(4, 68))


def study_remote(options: Options) -> list[Table]:
    """Measure requests per second and processor time per request, at 1,000 and 4,000 in flight."""
    repeats = options.pick(1, 3, 5)
    requests = options.pick(400, 4000, 20000)
    rows: list[Row] = []
    # The command line of atts sets the same thresholds of the garbage collector. Here they apply to
    # all three clients.
    gc.set_threshold(20_000, 10, 10)
    with _server() as url:
        for in_flight in options.pick((100,), (1000, 4000), (256, 1000, 4000)):
            count = max(requests, 2 * in_flight)
            small = min(count, 4 * in_flight, 2000)
            costs: dict[str, list[tuple[float, float]]] = {
                "aiohttp": [],
                "atts": [],
                "atts on trio": [],
            }
            for number in range(repeats + 1):
                say(f"{in_flight} in flight, round {number} of {repeats}")
                costs["aiohttp"].append(anyio.run(_bare, url, in_flight, count))
                costs["atts"].append(anyio.run(_ours, url, in_flight, count))
                costs["atts on trio"].append(
                    anyio.run(_ours, url, in_flight, small, backend="trio")
                )
            base = [speed for speed, _ in costs["aiohttp"][1:]]
            for name, each in costs.items():
                speeds, cpu = zip(*each[1:], strict=True)
                shares = [mine / theirs for mine, theirs in zip(speeds, base, strict=True)]
                rows.append(
                    (in_flight, name, *(str(Spread.of(values)) for values in (speeds, shares, cpu)))
                )
    ours = [row for row in rows if row[1] == "atts"][-1]
    table = Table.of(
        "Throughput of servers",
        "in flight | client | requests/s | relative to aiohttp | client CPU ms/request",
        rows,
        f"A test server in another process returns {TOKENS} tokens after "
        f"{DELAY_SECONDS * 1000:g} ms. Server and client share the machine's cores, so the "
        "server's speed also limits the requests per second. Each ratio compares neighbouring "
        "rounds of atts and aiohttp. The first round is discarded. Python collects garbage every "
        "20,000 new objects, as in the command `atts`.",
        headline=f"{ours[2]} requests/s at {ours[0]} in flight, {ours[3]} times a bare aiohttp loop",
    )
    return [table]


async def _ours(url: str, in_flight: int, count: int) -> tuple[float, float]:
    """Measure calls through the engine of atts, which pipelines use to call a server."""
    options = RemoteOptions(
        in_flight=in_flight, connect_seconds=PATIENCE_SECONDS, recheck_seconds=3600
    )
    async with RemoteEngine(
        url, dialect="vllm", tokenizer=ToyTokenizer(), options=options
    ) as engine:
        return await _timed(
            lambda number: engine.sample(SampleRequest(PROMPT, TOKENS, seed=Seed(sample=number))),
            in_flight,
            count,
        )


async def _bare(url: str, in_flight: int, count: int) -> tuple[float, float]:
    """Measure a simple loop of aiohttp calls.

    Requests have the same fields as those of atts, but the loop has no limits, retries, checks or
    aborts.
    """
    body = {
        "model": "toy", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True, "stop_token_ids": [1],
    }  # fmt: skip
    async with ClientSession(
        connector=TCPConnector(limit=0), timeout=ClientTimeout(PATIENCE_SECONDS)
    ) as session:

        async def ask(number: int) -> tuple[list[int], list[float]]:
            data = json.dumps({**body, "seed": number}).encode()
            async with session.post(url + "/v1/completions", data=data) as reply:
                choice = json.loads(await reply.read())["choices"][0]
                return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        return await _timed(ask, in_flight, count)


async def _timed(
    ask: Callable[[int], Awaitable[Any]], in_flight: int, count: int
) -> tuple[float, float]:
    """Return requests per second, and milliseconds of CPU time per request."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await ask(number)

    began = time.perf_counter()
    cpu = time.process_time()
    await collect([work] * in_flight)
    took = time.perf_counter() - began
    return count / took, 1000 * (time.process_time() - cpu) / count


@contextmanager
def _server() -> Generator[str]:
    """Start a server that answers like vLLM after a fixed delay, in its own process."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    asyncio.run(_answer(pipe))


async def _answer(pipe: Connection) -> None:
    """Answer every request with a fixed completion.

    Requests of atts's probe get a plausible word.
    """
    tokenizer = ToyTokenizer()
    model = {"id": "toy", "root": "toy", "max_model_len": 8192}
    fixed: dict[str, Any] = {
        "/version": {"version": "0.33.0"},
        "/v1/models": {"data": [model]},
        "/health": {},
    }

    async def plain(request: web.Request) -> web.Response:
        if request.path == "/tokenize":
            return web.json_response({"tokens": tokenizer.encode((await request.json())["prompt"])})
        return web.json_response(
            fixed.get(request.path, {}), status=200 if request.path in fixed else 404
        )

    async def completions(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        count = int(body["max_tokens"])
        choice: dict[str, Any] = {
            "token_ids": list(range(4, 4 + count)),
            "finish_reason": "length",
            "index": 0,
        }
        choice["logprobs"] = {"token_logprobs": [-0.5] * count}
        if body.get("prompt_logprobs") is not None:
            rows = [
                {str(token): {"logprob": -0.5 if token < 4 + 12 else -9.0}}
                for token in body["prompt"][1:]
            ]
            choice["prompt_logprobs"] = [None, *rows]
        await asyncio.sleep(DELAY_SECONDS)
        return web.json_response({"choices": [choice], "usage": {}})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", completions)
    app.router.add_route("*", "/{path:.*}", plain)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
    await site.start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()


FASTER = 2.0
"""Factor by which the paced servers are faster than GPU servers if this machine is idle. On a busy
machine, the factor is 1.

On this machine, a call takes some milliseconds of processor time for client and server together,
and 64 rollouts call at once. With a factor of ten, these calls would take a third of a turn.
"""
GRAIN = 32
"""Number of real tokens that each token of the embedded pair stands for.

Chunks of the pair have a dozen tokens, but chunks of reasoning models have about 500.
"""
_SEED_BITS = 63
_AT_ONCE = Cost(1e-6, 0.0, 0.0, 0.0, origin="a server during its first requests")
_ROLES: tuple[Role, ...] = ("draft", "target")


@dataclass(frozen=True, slots=True)
class Arm:
    """A method, and the order of questions: all at once, or one after another."""

    name: str
    method: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    order: Literal["all together", "question by question"] = "all together"


ARMS = (
    Arm("target-only", "target-only"),
    Arm("published schedule", "published", {"barrier": True}, "question by question"),
    Arm("sorted rounds", "top-b"),
    Arm("atts", "atts"),
)


@dataclass(frozen=True, slots=True)
class Came:
    """The duration, the waiting time, the accuracy and the cost of one run."""

    seconds: float
    waiting: float  # share of the calls' time in which rollouts waited for siblings
    right: int
    calls: int
    processor: float  # processor seconds of this process


class PairLaw:
    """Texts and scores of the embedded pair for engines in simulated time.

    Each text and score is computed once and remembered.
    """

    def __init__(self, portal: BlockingPortal, engines: Mapping[Role, LocalEngine]) -> None:
        self._portal = portal
        self._engines = engines
        self.written: dict[tuple[object, ...], Completion] = {}
        self._scored: dict[tuple[Role, ScoreRequest], tuple[float, ...]] = {}
        self._scorer: Role = "target"

    def scored_by(self, role: Role) -> PairLaw:
        """Return a copy in which the given model computes the scores. The copy shares the
        remembered texts and scores.
        """
        other = copy(self)
        other._scorer = role
        return other

    @property
    def known(self) -> int:
        """Count the remembered texts and scores."""
        return len(self.written) + len(self._scored)

    @property
    def grain(self) -> int:
        """Return the number of real tokens that one id stands for."""
        return GRAIN

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that both models share."""
        return self._engines["draft"].tokenizer

    def spec(self, role: Role) -> EngineSpec:
        """Return the engine's spec, without drawing during scoring, which servers do not offer."""
        return replace(self._engines[role].spec, capabilities=frozenset({"sample", "score"}))

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """Return the text for a request.

        Texts are remembered with the seed as one number, because servers receive a seed in this
        form.
        """
        own = request.seed
        number = (
            own.run if own == Seed(run=own.run) and own.run else own.key() & ((1 << _SEED_BITS) - 1)
        )
        key = (role, request.ids, request.max_tokens, request.sampling, request.stop, number)
        if key not in self.written:
            asked = SampleRequest(
                request.ids, request.max_tokens, request.sampling, Seed(run=number), request.stop
            )
            self.written[key] = self._portal.call(self._engines[role].sample, asked)
        return self.written[key]

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """Return the log-probabilities from the model that `scored_by` chose."""
        key = self._scorer, ScoreRequest(request.prefix, request.suffix)
        if key not in self._scored:
            self._scored[key] = self._portal.call(
                self._engines[self._scorer].score, key[1]
            ).logprobs
        return self._scored[key]


class RecognisingEngine(BatchedEngine):
    """An engine that finds the rollout of a request by its ids, as a server's prefix cache does."""

    def __init__(self, role: Role, law: PairLaw, cost: Cost, kv_tokens: float) -> None:
        super().__init__(role, law.scored_by(role), cost, kv_tokens)
        self._names = defaultdict[TokenIds, list[str]](list)
        self._lengths: set[int] = set()

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the remembered text, after the time that a server would need."""
        name = self._recognise(request.ids)
        done = await super().sample(replace(request, rollout=name))
        self._remember(request.ids + done.ids, name)
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the remembered scores, after the time that a server would need."""
        name = self._recognise(request.prefix)
        found = await super().score(replace(request, rollout=name))
        self._remember(request.prefix + request.suffix, name)
        return found

    def _recognise(self, ids: TokenIds) -> str:
        for length in sorted((one for one in self._lengths if one <= len(ids)), reverse=True):
            # several rollouts may have written the same text, and any of their prefixes that is in
            # the cache can be used
            if names := self._names.get(ids[:length]):
                return next((name for name in names if name in self._warm), names[-1])
        return f"{hash(ids)}/{len(self._names)}-{self.stats().requests}"

    def _remember(self, ids: TokenIds, name: str) -> None:
        if name not in self._names[ids]:
            self._names[ids].append(name)
        self._lengths.add(len(ids))


def study_paced(options: Options) -> list[Table]:
    """Run every pair, number of rollouts and method, first in virtual time, then on real clocks."""
    rows = list[Row]()
    lives = list[Came]()
    spent = Spent()
    faster = FASTER if os.getloadavg()[0] < (os.cpu_count() or 1) else 1.0
    pairs = options.pick(("8B/70B",), ("8B/70B", "1.5B/70B"), ("8B/70B", "1.5B/70B"))
    problems = arithmetic("test", options.pick(1, 1, 8))
    with pair_law() as law:
        for name, samples in product(pairs, options.pick((8,), (8, 16, 64), (8, 16, 64))):
            pair = paced(PAIRS[name], faster)
            found = dict[str, tuple[Came, Came]]()
            for arm in ARMS:
                predicted = run_virtual(direct, arm, problems, samples, pair, law)
                known = law.known
                live = anyio.run(over_http, arm, problems, samples, pair, law)
                say(f"paced: {name}, {samples}, {arm.name}: {predicted.seconds:.2f} s, live "
                    f"{live.seconds:.2f} s, "
                    f"{law.known - known} texts were not computed in advance")  # fmt: skip
                found[arm.name] = predicted, live
                lives.append(live)
            rows += _rows(name, samples, found)
    return [_table(rows, lives, len(problems), faster=faster, spent=spent)]


@contextmanager
def pair_law() -> Generator[PairLaw]:
    """Open the embedded pair in its own thread."""
    options = LocalOptions(worker="thread", threads=1, device="cpu")
    engines: dict[Role, LocalEngine] = {
        role: LocalEngine(path(role), name=role, options=options) for role in _ROLES
    }
    with start_blocking_portal() as portal, ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(portal.wrap_async_context_manager(engine))
        yield PairLaw(portal, engines)


def paced(pair: Pair, faster: float) -> Pair:
    """Return the pair with all step times divided by `faster`."""

    def scaled(cost: Cost) -> Cost:
        names = ("step", "sequence", "cached", "prefilled")
        return replace(cost, **{name: getattr(cost, name) / faster for name in names})

    return replace(pair, draft=scaled(pair.draft), target=scaled(pair.target))


def engine(role: Role, pair: Pair, law: PairLaw) -> RecognisingEngine:
    """Make the draft's or the target's engine."""
    cost, room = (pair.draft, pair.draft_kv) if role == "draft" else (pair.target, pair.target_kv)
    return RecognisingEngine(role, law, cost, room)


async def direct(
    arm: Arm, problems: Sequence[Problem], samples: int, pair: Pair, law: PairLaw
) -> Came:
    """Run the arm on engines without HTTP; times are those of the running event loop's clock."""
    async with AsyncExitStack() as stack:
        draft, target = [
            await stack.enter_async_context(engine(role, pair, law)) for role in _ROLES
        ]
        return await _solved(arm, problems, samples, (draft, target))


async def over_http(
    arm: Arm, problems: Sequence[Problem], samples: int, pair: Pair, law: PairLaw
) -> Came:
    """Run the arm on two HTTP servers on this machine."""
    served: dict[Role, RecognisingEngine] = {}

    def make(role: Role) -> Engine:
        served[role] = engine(role, replace(pair, draft=_AT_ONCE, target=_AT_ONCE), law)
        return served[role]

    with ExitStack() as servers:
        urls = [
            servers.enter_context(DialectServer(partial(make, role), "vllm", model=role)).url
            for role in _ROLES
        ]
        async with AsyncExitStack() as stack:
            options = RemoteOptions(in_flight=1024, recheck_seconds=1e6, idle_seconds=1e6)
            draft, target = [
                await stack.enter_async_context(
                    RemoteEngine(
                        url, dialect="vllm", name=role, tokenizer=law.tokenizer, options=options
                    )
                )
                for url, role in zip(urls, _ROLES, strict=True)
            ]
            # a client's first requests to a server take longer, so they are not timed
            await _solved(arm, arithmetic("calibration", 1), 1, (draft, target))
            # from this point on, the servers take as long as GPU servers
            served["draft"].cost = pair.draft
            served["target"].cost = pair.target
            return await _solved(arm, problems, samples, (draft, target))


async def _solved(
    arm: Arm, problems: Sequence[Problem], samples: int, engines: tuple[Engine, Engine]
) -> Came:
    stored = embedded_scores()
    setup = Setup(
        method=arm.method,
        policy=replace(Setup().run_policy, samples=samples, **arm.changes),
        stored=stored,
    )
    policy = replace(setup.run_policy, **arm.changes)
    (gate, _) = setup.decider()
    context = Context(*engines, gate, answers_for("math"), EngineCalls)
    recording = Recording()
    outcomes = list[Outcome]()
    used = time.process_time()
    graph = Graph(
        rollouts=samples * len(problems),
        limits={"draft": Limit(), "target": Limit()},
        sink=recording,
    )

    async def one(problem: Problem, scope: ProblemScope) -> None:
        outcomes.append(await solve(problem, policy, context, scope))

    for batch in (
        [[each] for each in problems] if arm.order == "question by question" else [problems]
    ):
        await graph.run(batch, one)
    used = time.process_time() - used
    # leave out the nodes in which a rollout waits for a score that it requested earlier
    nodes = [node for node in recording.nodes() if node.stage != HOLD]
    timing = measure(nodes)
    whole = timing.sibling_seconds + timing.memory_seconds + timing.arithmetic_seconds
    right = sum(outcome.answer == outcome.problem.answer for outcome in outcomes)
    waiting = timing.sibling_seconds / whole if whole else 0.0
    return Came(graph.stats().seconds, waiting, right, calls=len(nodes), processor=used)


def _rows(pair: str, samples: int, found: Mapping[str, tuple[Came, Came]]) -> list[Row]:
    base = found["target-only"]
    return [
        (
            pair, samples, name, round(live.seconds, 2), round(base[1].seconds / live.seconds, 2),
            round(base[0].seconds / predicted.seconds, 2), f"{100 * (live.seconds / predicted.seconds - 1):+.0f} %",
            f"{100 * live.waiting:.0f} %", f"{100 * predicted.waiting:.0f} %", live.right,
        )
        for name, (predicted, live) in found.items()
    ]  # fmt: skip


def _table(
    rows: Sequence[Row], lives: Sequence[Came], problems: int, *, faster: float, spent: Spent
) -> Table:
    off = [float(str(row[6]).rstrip("%")) for row in rows]
    within = sum(abs(value) <= 10 for value in off)
    each = sum(live.processor for live in lives) / max(1, sum(live.calls for live in lives))
    return Table.of(
        "Paced servers: every method over HTTP on real clocks",
        "pair | rollouts | method | seconds | speed-up | speed-up in virtual time | "
        "time relative to virtual time | waiting for siblings | waiting in virtual time "
        "| correct",
        rows,
        f"Number of problems: {problems}. Both paced servers run {faster:g} times as fast as "
        "the GPUs that they imitate (8B: one H100, 70B: four). Each token of the embedded pair "
        f"stands for {GRAIN} tokens of a larger model. Most texts are computed before the timed "
        "run; only texts that depend on the real order of events are computed during the run. "
        "Method `exact` is missing, because vLLM cannot draw tokens while it scores.",
        f"{within} of {len(rows)} measured times are within 10 % of virtual time. Clients "
        "and servers share the cores of this machine. Together they need "
        f"{1e3 * each:.1f} ms of processor time per call. {spent.disturbance()}",
    )


# Hosted targets: servers with a chat API that reports no log-probabilities.

HOSTED_RATE = 0.2
HOSTED_SAMPLES = 4
_CHUNKS = Chunking(64, 64, ("\n\n",))


@dataclass(frozen=True, slots=True)
class HostedArm:
    """A row of the comparison: the score, the kind of target, and whether chunks or whole problems
    are escalated.
    """

    name: str
    method: str
    kind: ScoreKind = "mean"
    unit: Literal["chunks", "problems"] = "chunks"
    is_hosted: bool = True  # False: the target is a local engine, and reports log-probabilities

    @property
    def coin(self) -> str:
        """Return the name of the coin to compare with. It escalates chunks or problems, as this arm
        does.
        """
        return f"coin, {self.unit}"

    def setup(self, target: str | Engine, draft: str | Engine, seed: int) -> Setup:
        """Return the setup of the arm with these models."""
        policy = Policy(
            samples=HOSTED_SAMPLES,
            max_tokens=512,
            chunking=_CHUNKS,
            early_stop="none",
            score=ScoreRule(self.kind),
            escalates="problem" if self.unit == "problems" else "chunk",
        )
        return Setup(draft, target, method=self.method, rate=HOSTED_RATE, policy=policy, seed=seed)


HOSTED_ARMS = (
    HostedArm("draft alone", "draft-only"),
    HostedArm("coin, chunks", "coin"),
    HostedArm("continuation", "atts", "continuation"),
    HostedArm("rating in text", "atts", "rating"),
    HostedArm("verdict in text", "atts", "verdict"),
    HostedArm("mean, with log-probabilities", "atts", "mean", is_hosted=False),
    HostedArm("coin, problems", "coin", "disagreement", "problems"),
    HostedArm("disagreement", "cascade", "disagreement", "problems"),
    HostedArm("target alone", "target-only"),
)


def study_hosted(options: Options) -> list[Table]:
    """Run every score that needs no log-probabilities over a chat API without log-probabilities."""
    count = options.pick(40, 100, 400)
    toy = DialectServer(
        partial(ScriptedEngine, "target", selector=Selector(judge=0.8)),
        "chat",
        quirks=ServerQuirks(ratings="off"),
    )
    tables = [
        anyio.run(
            _hosted_table,
            "scripted pair, whose target judges a step correctly with probability 0.8",
            (toy, "scripted", "scripted"),
            toy_problems(count, options.seed),
            HOSTED_ARMS,
            options.seed,
        )
    ]
    embedded = DialectServer(
        partial(LocalEngine, path("target"), name="target", options=LocalOptions(threads=1)),
        "chat",
        quirks=ServerQuirks(ratings="off"),
    )
    asked = [one for one in HOSTED_ARMS if one.kind not in ("rating", "verdict")]
    tables.append(
        anyio.run(
            _hosted_table,
            "embedded pair, whose models answer no questions",
            (embedded, "embedded", "embedded"),
            arithmetic("test", options.pick(20, 40, 200)),
            asked,
            options.seed,
        )
    )
    return tables


async def _hosted_table(
    title: str,
    engines: tuple[DialectServer, str, str],
    problems: Sequence[Problem],
    arms: Sequence[HostedArm],
    seed: int,
) -> Table:
    """Run the arms on the same problems, and return their table."""
    server, draft, local = engines
    results: dict[str, RunResult] = {}
    with server:
        hosted = f"openai:{server.url}/v1/toy?context=2048&prefill=continue"
        for one in arms:
            say(f"hosted: {one.name}, {title}")
            setup = one.setup(hosted if one.is_hosted else local, draft, seed)
            results[one.name] = await evaluate(problems, setup)
    rows: list[Row] = []
    for one in arms:
        result = results[one.name]
        usage = result.usage
        gain = "-"
        if one.kind != "mean" or one.method == "atts":
            coin = results[one.coin]
            if one.name != one.coin:
                gain = points(compare_runs(_shares(coin), _shares(result)).difference, digits=1)
        rows.append(
            (
                one.name,
                result.rate.counted() if result.rate.n_samples else "-",
                interval(result.summary.samples_right),
                interval(result.accuracy),
                gain,
                round(usage.target_tokens / len(problems)),
                round(usage.scored_tokens / len(problems)),
                round(usage.calls / len(problems), 1),
            )
        )
    return Table.of(
        f"Scores over a chat API without log-probabilities: {title}",
        "score | escalated | pass@1 | accuracy | pass@1 minus the coin's, points | "
        "target tokens written per problem | scored | calls",
        rows,
        f"{len(problems)} problems, {HOSTED_SAMPLES} rollouts each, nominal rate {HOSTED_RATE}; "
        "95 % intervals over problems. Each score is compared with the coin that escalates the "
        "same unit, on the same problems. The scripted target's replies to one question are "
        "independent, so four replies judge better than one; a real model's replies are not "
        "independent.",
    )


def _shares(result: RunResult) -> list[float]:
    """Return the share of correct rollouts of each problem."""
    shares: list[float] = []
    for problem in result.problems:
        verdicts = [one.verdict for one in problem.complete_samples]
        shares.append(verdicts.count("correct") / max(1, len(verdicts)))
    return shares


CONNECTIONS = 16
_LOOKS = 20  # number of times that a soak inspects the process
_SOAK_RATE = 12  # number of requests per second; at this rate, they need a quarter of a core
QUESTION = "Start at 4. +3, -2. What is the result?"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def study_serve(options: Options) -> list[Table]:
    """Measure the CPU time that the endpoint and a server that echoes requests need per request, in
    turn.
    """
    repeats = options.pick(1, 3, 5)
    count = options.pick(100, 400, 2_000)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "bare Starlette echo": ("echo", {}),
        "one rollout of the draft": ("atts", _body(model="draft")),
        "policy fast": ("atts", _body(model="atts/toy:fast")),
        "policy balanced": ("atts", _body()),
        "policy balanced, streamed": ("atts", _body(stream=True)),
        "policy balanced, journalled ledger": ("state", _body()),
    }
    costs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    with _servers() as servers:
        for number in range(repeats + 1):
            for name, (server, body) in kinds.items():
                say(f"{name}, round {number} of {repeats}")
                cost = anyio.run(_measure, *servers[server], body, count)
                if number:  # the first round warms up the servers
                    costs[name].append(cost)
    rows: list[Row] = []
    for name, each in costs.items():
        cpu, speeds, calls = zip(*each, strict=True)
        per_request = sum(calls) / len(calls)
        rows.append((name, str(Spread.of(cpu)), str(Spread.of(speeds)), round(per_request, 1)))
    table = Table.of(
        "Processor time of the endpoint",
        "request | server CPU ms/request | requests/s | engine calls/request",
        rows,
        f"In each of {repeats} rounds, a client sends {count} requests of every kind over "
        f"{CONNECTIONS} connections. *Server CPU* is the processor time of the server's process, "
        "including its scripted models. Client and servers share the machine's cores.",
        headline=f"{rows[1][1]} ms CPU for one rollout; a bare echo takes {rows[0][1]} ms",
    )
    return [table]


def study_soak(options: Options) -> list[Table]:
    """Send requests to one server for half an hour at a modest rate, and watch its memory, threads
    and files.
    """
    seconds = options.pick(10, 60, 1_800)
    draw = random.Random(options.seed)
    done = Counter[str]()
    looks: list[Row] = []
    with _endpoint("soak") as (address, pid):
        began = time.monotonic()
        for number in range(1, _LOOKS + 1):
            until = began + seconds * number / _LOOKS
            anyio.run(_mixture, address, until, draw.randrange(1 << 30), done)
            held = anyio.run(_status, address)
            looks.append(
                (
                    round(time.monotonic() - began),
                    sum(done.values()),
                    held["counts"]["in flight"],
                    sum(one["reserved"] for one in held["budgets"]),
                    len(os.listdir(f"/proc/{pid}/fd")),
                    len(os.listdir(f"/proc/{pid}/task")),
                    round(_resident(pid) / 1e6, 1),
                )
            )
            say(f"soak: {looks[-1]}")
    middle = looks[_LOOKS // 2 - 1]
    last = looks[-1]
    return [
        Table.of(
            "Soak of the endpoint: what the process holds",
            "seconds | requests | in flight | reserved | file descriptors | threads | resident MB",
            looks,
            f"The client sends about {_SOAK_RATE} requests a second. Their kinds are random (seed "
            f"{options.seed}); the numbers of requests are: "
            f"{', '.join(f'{name} {number:,}' for name, number in sorted(done.items()))}. "
            "In kind *left*, the client disconnects early; requests of kind *refused* are "
            "invalid. The server is measured while no client is connected. It keeps its latest "
            "1,000 runs in memory, so its memory grows until it has 1,000 runs. In this test, it "
            "keeps the results of background requests for one minute.",
            headline=f"{middle[6]} MB and {middle[4]} file descriptors at half time, {last[6]} MB "
            f"and {last[4]} after {last[1]:,} requests in {last[0]:,} s",
        )
    ]


def _body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "atts/toy",
        "messages": [{"role": "user", "content": QUESTION}],
        **fields,
    }


def _message(body: Any, path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _measure(
    address: tuple[str, int], pid: int, body: Any, count: int
) -> tuple[float, float, float]:
    """Return CPU milliseconds per request, requests per second, and engine calls per request."""
    before = await _calls(address)
    cpu = _cpu(pid)
    began = time.monotonic()
    left = iter(range(count))
    async with anyio.create_task_group() as group:
        for _ in range(CONNECTIONS):
            group.start_soon(_ask_all, address, _message(body), left)
    seconds = time.monotonic() - began
    spent = _cpu(pid) - cpu
    calls = await _calls(address) - before
    return 1_000 * spent / count, count / seconds, calls / count


async def _ask_all(address: tuple[str, int], message: bytes, left: Iterator[int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    for _ in left:
        writer.write(message)
        status, _ = await _read_response(reader)
        assert status == 200, status
    writer.close()
    await writer.wait_closed()


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one HTTP response, with a content length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split(" ", 2)[1])
    if "transfer-encoding: chunked" not in head:
        length = int(head.split("content-length: ", 1)[1].split("\r\n", 1)[0])
        return status, await reader.readexactly(length)
    parts: list[bytes] = []
    while size := int((await reader.readline()).strip(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, b"".join(parts)


async def _get(address: tuple[str, int], path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    answer = await _read_response(reader)
    writer.close()
    await writer.wait_closed()
    return answer


async def _calls(address: tuple[str, int]) -> int:
    status, text = await _get(address, "/metrics")
    if status != 200:  # the echoing server has no metrics
        return 0
    lines = [line for line in text.decode().splitlines() if line.startswith("atts_calls_total ")]
    return int(lines[0].split()[1])


async def _status(address: tuple[str, int]) -> dict[str, Any]:
    """Return the server's status once no request is in flight."""
    with anyio.fail_after(60):
        while True:
            status: dict[str, Any] = json.loads((await _get(address, "/atts/status"))[1])
            if not status["counts"]["in flight"]:
                return status
            await anyio.sleep(0.05)


async def _mixture(address: tuple[str, int], end: float, seed: int, done: Counter[str]) -> None:
    """Send requests until the time `end`, from several clients.

    Each client sends a mixture of all kinds of requests.
    """
    async with anyio.create_task_group() as group:
        for number in range(CONNECTIONS):
            group.start_soon(_client, address, end, random.Random(seed + number), done)


async def _client(
    address: tuple[str, int], end: float, draw: random.Random, done: Counter[str]
) -> None:
    bodies: dict[str, Any] = {
        "background": {"model": "draft", "input": QUESTION, "background": True},
        "whole": _body(),
        "streamed": _body(stream=True),
        "seeded": _body(seed=draw.randrange(100)),
        "draft": _body(model="draft", user=f"user {draw.randrange(50)}"),
        "refused": _body(atts={"sampels": 1}),
        "left": _body(stream=True),
    }
    while True:
        pause = draw.expovariate(_SOAK_RATE / CONNECTIONS)
        if time.monotonic() + pause >= end:
            await anyio.sleep(max(0.0, end - time.monotonic()))
            return
        await anyio.sleep(pause)
        kind = draw.choice(list(bodies))
        path = "/v1/responses" if kind == "background" else "/v1/chat/completions"
        reader, writer = await asyncio.open_connection(*address)
        writer.write(_message(bodies[kind], path))
        if kind == "left":
            await reader.readuntil(b"\r\n\r\n")
        else:
            await _read_response(reader)
        writer.close()
        await writer.wait_closed()
        done[kind] += 1


def _cpu(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


@contextmanager
def _servers() -> Generator[dict[str, tuple[tuple[str, int], int]]]:
    with _endpoint("echo") as echo, _endpoint("atts") as atts, _endpoint("state") as state:
        yield {"echo": echo, "atts": atts, "state": state}


@contextmanager
def _endpoint(kind: str) -> Generator[tuple[tuple[str, int], int]]:
    """Start a server in its own process; yield its address and its process id."""
    command = [sys.executable, "-m", "scripts.studies.servers", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        try:
            yield (host, int(port)), process.pid
        finally:
            process.terminate()


async def _serve_endpoint(kind: str) -> None:
    """Print the server's address, and serve until SIGTERM."""
    import tempfile

    if kind == "echo":
        await _echo()
        return
    from atts.api import Setup

    with tempfile.TemporaryDirectory() as folder:
        state = None if kind == "atts" else Path(folder)
        setup = Setup(draft=ScriptedEngine("draft"), target=ScriptedEngine("target"))
        options = ServeOptions(name="atts/toy", state=state)
        if kind == "soak":
            options = replace(options, response_seconds=60.0)
        service = Service(setup, options)
        await run_server(service, "127.0.0.1", 0, _heard)


def _heard(address: str) -> None:
    host, port = address.split("//")[1].split("/")[0].split(":")
    print(host, port, flush=True)


async def _echo() -> None:
    """Serve a bare Starlette application that returns the request's body, with the settings of the
    endpoint's server.
    """
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", echo, methods=["POST"])])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, http="h11", lifespan="off", server_header=False
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _heard(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    anyio.run(_serve_endpoint, sys.argv[1])
