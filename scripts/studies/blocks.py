"""Compare a zoo of shared blocks with whole models: live on one core, and on virtual GPUs."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import heapq
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import anyio
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atts.accel import Zoo, accelerated
from atts.accel.engine import PlannedLoop
from atts.accel.options import LoopPlan
from atts.accel.zoo.many_models import ChainModel
from atts.accel.zoo.placement import Demand, Instance, dispatched, placed
from atts.accel.zoo.shared_worker import AddModel
from atts.concurrency import collect
from atts.core import SampleRequest, Sampling
from atts.evaluators.datasets.arithmetic import Exercise, Split, exercises
from atts.local import LocalOptions
from atts.local.builder import build_loop
from atts.local.cpu.model import NativeModel
from atts.local.loop import StepLoop
from atts.local.messages import LoopReport, SampleReply, Submit, WorkerConfig
from atts.local.model_config import check_model
from atts.models import path
from atts.sampling import Seed
from scripts.studies.harness import Options, Row, Table, children, say
from scripts.studies.modelled import DRAFT_8B as COST
from scripts.studies.real_models import MODELS, CannotBeMadeError, folder_of
from scripts.studies.train import ALPHA, RANK, LowRank

VIRTUAL_TENANTS = 20
BASES = 3
MODEL_BYTES = 16.1e9
ROOM = 72e9  # bytes of GPU memory for weights, keys and values
KV_BYTES = 131_072
# bytes of a token's hidden state, which one block passes to the next
STATE_BYTES = 8_192
NODE = 4  # number of GPUs in a node, joined by a fast link
# latency in seconds and bandwidth in bytes per second of a link, within a node and between nodes
FAST = (5e-6, 200e9)
SLOW = (20e-6, 12.5e9)
# Mean numbers of tokens of prompts and outputs. Lengths follow exponential distributions, but no
# length is below a third of its mean.
VIRTUAL_PROMPT = 512
VIRTUAL_LENGTH = 96
MOST = 64  # largest number of rows in one run of a block
Serving = Literal["models", "models, spread", "blocks"]
Arrivals = Literal["even", "bursts"]


class Part(NamedTuple):
    """Consecutive layers of a model, placed together on one GPU."""

    name: str
    share: float  # share of the model's layers


@dataclass(slots=True)
class Request:
    """A request; each of its tokens passes all parts of its model."""

    tenant: int
    arrived: float
    fed: int  # number of tokens that the next pass processes
    left: int  # number of tokens that are still to be written
    held: int = 0  # number of tokens whose keys and values are cached
    at: int = 0  # index of the next part in the chain
    server: int = -1
    owners: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Server:
    """A GPU, which runs one block at a time, for up to `MOST` waiting requests in the order of
    their arrival.
    """

    waiting: dict[str, list[Request]] = field(default_factory=lambda: defaultdict(list))
    is_busy: bool = False
    ends: float = 0.0
    busy: float = 0.0


class Outcome(NamedTuple):
    """Latencies, throughput and memory of one way to serve the requests."""

    p50: float
    p95: float
    busy: float  # share of the GPUs' time spent computing
    tokens_per_busy_second: float
    weights: float  # bytes of weights, replicas included
    once: float  # bytes of weights, replicas excluded


def virtual_requests(
    count: int, rate: float, kind: Arrivals, skew: float, seed: int
) -> list[Request]:
    """Generate requests; the share of the tenant with popularity rank r is proportional to r **
    -skew.

    In bursts, the gaps between requests have three times the standard deviation.
    """
    rng = random.Random(seed)
    weights = [(1 + at) ** -skew for at in range(VIRTUAL_TENANTS)]
    now = 0.0
    found = list[Request]()
    order = list(range(VIRTUAL_TENANTS))
    rng.shuffle(order)
    for _ in range(count):
        shape = 1.0 if kind == "even" else 1 / 9
        now += rng.gammavariate(shape, 1 / (rate * shape))
        prompt, length = (
            max(mean // 3, int(rng.expovariate(1 / mean)))
            for mean in (VIRTUAL_PROMPT, VIRTUAL_LENGTH)
        )
        found.append(Request(rng.choices(order, weights)[0], now, prompt, length))
    return found


def chain_of(tenant: int, serving: Serving, sharing: float) -> tuple[Part, ...]:
    """Return the parts of a tenant's model: shared base layers and the tenant's own layers, or the
    whole model as one part.
    """
    if serving != "blocks" or not sharing:
        return (Part(f"model {tenant}", 1.0),)
    trunk = Part(f"base {tenant % BASES}", sharing)
    return (trunk, Part(f"own {tenant}", 1 - sharing)) if sharing < 1 else (trunk,)


class Cluster:
    """A cluster of GPUs that hold parts of models; time is virtual."""

    def __init__(
        self, requests: Sequence[Request], servers: int, serving: Serving, sharing: float
    ) -> None:
        self._requests = requests
        self._servers = [Server() for _ in range(servers)]
        self._chains = [chain_of(tenant, serving, sharing) for tenant in range(VIRTUAL_TENANTS)]
        self._shares = {part.name: part.share for chain in self._chains for part in chain}
        self._events: list[tuple[float, int, object]] = []
        self._count = 0
        self.places = self._placed(serving)

    def _placed(self, serving: Serving) -> dict[str, list[int]]:
        """Place the parts on servers: one server per model, or replicas of parts under high load."""
        work = dict.fromkeys(self._shares, 0.0)
        transitions = Counter[tuple[str, str]]()
        for request in self._requests:
            chain = self._chains[request.tenant]
            for part in chain:
                work[part.name] += part.share
            transitions.update((a.name, b.name) for a, b in zip(chain, chain[1:], strict=False))
        scale = len(self._servers) / sum(work.values())
        if serving == "models":
            scale = min(scale, 1 / max(work.values()))
        demands = {
            name: Demand(share * MODEL_BYTES, work[name] * scale)
            for name, share in self._shares.items()
        }
        return placed(demands, transitions, [ROOM * 0.8] * len(self._servers))

    def run(self) -> Outcome:
        """Serve all requests until they are complete, and return the measurements."""
        for request in self._requests:
            self._push(request.arrived, request)
        ends = list[float]()
        tokens = 0
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, Request):
                self._dispatch(what, now)
                continue
            assert isinstance(what, tuple)
            server, batch = what
            self._servers[server].is_busy = False
            for request in batch:
                done = self._advance(request, server)
                tokens += done
                if request.left:
                    self._dispatch(request, now)
                else:
                    ends.append(now - request.arrived)
            self._start(server, now)
        ends.sort()
        last = max(server.ends for server in self._servers)
        busy = sum(server.busy for server in self._servers)
        weights = sum(
            self._shares[name] * MODEL_BYTES * len(at) for name, at in self.places.items()
        )
        once = MODEL_BYTES * sum(self._shares.values())
        median, late = (ends[min(len(ends) - 1, int(share * len(ends)))] for share in (0.5, 0.95))
        return Outcome(median, late, busy / last / len(self._servers), tokens / busy, weights, once)

    def _push(self, at: float, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what))

    def _advance(self, request: Request, server: int) -> int:
        """Move a request on to its next part.

        Return the number of tokens written: 1 if the finished part was the model's last part,
        otherwise 0.
        """
        chain = self._chains[request.tenant]
        request.owners[chain[request.at].name] = server
        request.server = server
        request.at = (request.at + 1) % len(chain)
        if request.at:
            return 0
        request.held = request.held + request.fed
        request.fed = 1
        request.left = request.left - 1
        return 1

    def _dispatch(self, request: Request, now: float) -> None:
        """Queue a request at the GPU that will finish the request's next part first."""
        part = self._chains[request.tenant][request.at]
        places = self.places[part.name]
        server = places[0]
        if len(places) > 1:
            options = [self._instance(request, part, at, now) for at in places]
            server = places[dispatched(options)]
        if request.held and part.name in request.owners:
            request.owners[part.name] = server
        self._servers[server].waiting[part.name].append(request)
        self._start(server, now)

    def _instance(self, request: Request, part: Part, at: int, now: float) -> Instance:
        server = self._servers[at]
        wait = max(0.0, server.ends - now) if server.is_busy else 0.0
        wait += sum(
            self._seconds(self._shares[name], waiting)
            for name, waiting in server.waiting.items()
            if waiting
        )
        begin, speed = FAST if request.server < 0 or at // NODE == request.server // NODE else SLOW
        hop = 0.0 if request.server in (-1, at) else begin + request.fed * STATE_BYTES / speed
        owns = not request.held or request.owners.get(part.name) == at
        move = begin + request.held * KV_BYTES * part.share / speed
        recompute = COST.prefilled * request.held * part.share
        return Instance(wait, self._seconds(part.share, [request]), owns, move, recompute, hop)

    def _seconds(self, share: float, batch: Sequence[Request]) -> float:
        """Return the seconds of one run of a part, in proportion to the part's share of the model.

        The run prefills requests whose prompts are unread, and decodes one token of every other
        request.
        """
        fed = sum(request.fed for request in batch if request.fed > 1)
        decoding = [request.held for request in batch if request.fed == 1]
        return share * COST.seconds(len(decoding), sum(decoding), fed)

    def _start(self, at: int, now: float) -> None:
        """Run a block for all requests that wait for it.

        Blocks late in a chain run first, so that larger batches gather at the early blocks.
        """
        server = self._servers[at]
        if server.is_busy:
            return
        names = [name for name, waiting in server.waiting.items() if waiting]
        if not names:
            return
        name = min(
            names, key=lambda name: (-server.waiting[name][0].at, server.waiting[name][0].arrived)
        )
        batch = server.waiting[name][:MOST]
        server.waiting[name] = server.waiting[name][MOST:]
        seconds = self._seconds(self._shares[name], batch)
        server.is_busy = True
        server.ends = now + seconds
        server.busy += seconds
        self._push(server.ends, (at, batch))


def capacity(servers: int) -> float:
    """Return the request rate that counts as load 1: the rate at which whole models keep all
    servers busy with batches of eight.
    """
    step = COST.seconds(8, 8 * (VIRTUAL_PROMPT + VIRTUAL_LENGTH / 2)) / 8
    return servers / (VIRTUAL_LENGTH * step + COST.prefilled * VIRTUAL_PROMPT)


def compared(
    servers: int, load: float, kind: Arrivals, at: tuple[float, float, int, int]
) -> Iterator[tuple[Serving, Outcome]]:
    """Compare shared blocks with whole models on the same requests.

    `at` is a tuple of the shared fraction of layers, the skew of the tenants' popularity, the
    number of requests, and the seed.
    """
    sharing, skew, count, seed = at
    for serving in get_args(Serving):
        requests = virtual_requests(count, load * capacity(servers), kind, skew, seed)
        yield serving, Cluster(requests, servers, serving, sharing).run()


def study_simulated(options: Options) -> list[Table]:
    """Measure a grid of sizes, loads and arrivals, and find the conditions under which shared
    blocks reach the figures of the paper.
    """
    count = options.pick(300, 800, 8000)
    rows = list[Row]()
    sizes = options.pick((12,), (12, 64), (12, 24, 48, 64))
    loads = options.pick((0.7,), (0.3, 0.7), (0.3, 0.5, 0.7))
    for servers, load, kind in product(sizes, loads, get_args(Arrivals)):
        say(f"{servers} GPUs at {100 * load:.0f} %, {kind}")
        found = dict(compared(servers, load, kind, (0.8, 1.0, count, options.seed)))
        rows += [
            _row((servers, load, kind, name), one, found["models"]) for name, one in found.items()
        ]
    header = (
        "GPUs | load | arrivals | served as | p50 s | p95 s | p95 relative to models | "
        "busy share | tokens per busy second | relative to models | weights GB | "
        "without replicas"
    )
    title = f"{VIRTUAL_TENANTS} tenants of {BASES} bases that share 80 % of their layers, {count} requests"
    first = Table.of(
        title,
        header,
        rows,
        "Times are simulated with the step times that were published for an 8B model on one H100.",
    )
    return [first, _published(options, count)]


def _row(lead: Row, one: Outcome, base: Outcome) -> Row:
    late, more = _beside(one, base)
    busy = (f"{100 * one.busy:.1f} %", one.tokens_per_busy_second, f"{100 * more:+.1f} %")
    return (
        *lead,
        one.p50,
        one.p95,
        f"{100 * late:+.1f} %",
        *busy,
        one.weights / 1e9,
        one.once / 1e9,
    )


def _beside(one: Outcome, base: Outcome) -> tuple[float, float]:
    """Return how much `one` differs from `base`, as a fraction of `base`: in p95 latency, and in
    tokens per busy second.
    """
    return one.p95 / base.p95 - 1, one.tokens_per_busy_second / base.tokens_per_busy_second - 1


def _published(options: Options, count: int) -> Table:
    """Tabulate which assumptions reach the paper's figures on 12 GPUs: 33.5 % lower p95 latency,
    and 20.1 % more tokens per busy second.
    """
    rows = list[Row]()
    loads = options.pick((0.5,), (0.3, 0.5, 0.7), (0.3, 0.5, 0.7))
    for sharing, skew, load in product((0.5, 0.8, 1.0), (0.0, 1.0), loads):
        found = dict(compared(12, load, "even", (sharing, skew, count, options.seed)))
        for base in ("models", "models, spread"):
            late, more = _beside(found["blocks"], found[base])
            reached = ("yes" if late <= -0.335 else "no", "yes" if more >= 0.201 else "no")
            rows.append(
                (
                    sharing,
                    skew,
                    load,
                    base,
                    f"{100 * late:+.1f} %",
                    reached[0],
                    f"{100 * more:+.1f} %",
                    reached[1],
                )
            )
    header = (
        "share of layers shared | skew | load | compared with | change of p95 | -33.5 % "
        "reached | change of tokens per busy second | +20.1 % reached"
    )
    return Table.of("Conditions for the published figures, 12 GPUs", header, rows)


TENANTS = ("base", "adapter-1", "adapter-2", "tuned")
PROMPT = 80
LENGTH = 40  # number of tokens of a reply
LOADS = (0.3, 0.7, 0.9)
OWN = (1, 3)  # number of last layers (of six) that each tenant has for itself
ALIKE = 4  # number of requests with a common prompt
Prompts = Literal["own", "common"]
_LAYERS = 6
RELATIVES = ("draft", "wordings", "operations", "tuned")
FAMILIES: dict[str, tuple[str, ...]] = {
    "the target alone": ("base",),
    "the target and a draft on its trunk": ("base", "draft"),
    "four tenants": ("base", "wordings", "operations", "tuned"),
}
_REQUESTS = 16
_TOKENS = 200
_PROCESS = LocalOptions(device="cpu", threads=1)
_OPTIONS = LocalOptions(device="cpu", kernel="native", kv_tokens=8192, max_batch=64, threads=1)


class Arrival(NamedTuple):
    """A request's arrival time, number, tenant and prompt."""

    at: float
    number: int
    tenant: int
    prompt: int


class Served(NamedTuple):
    """The total time of the core, and the seconds of each request from its arrival until it was
    complete.
    """

    seconds: float
    tokens: int  # number of tokens written
    waits: tuple[float, ...]
    weight_bytes: int
    kv_tokens: int  # peak number of cached tokens, summed over all step loops
    block_rows: int  # number of processed tokens, summed over blocks

    @property
    def tokens_per_second(self) -> float:
        """Return the number of written tokens divided by the core's time in seconds, idle time
        included.
        """
        return self.tokens / self.seconds


class Arm:
    """Step loops that take turns on one core: one loop for all tenants, or one for each tenant."""

    def __init__(self, zoo: Zoo, *, shares: bool) -> None:
        self._finished = list[int]()
        self._tokens = 0
        self._shares = shares
        configs = [_config(zoo, name, shares=shares) for name in TENANTS]
        self._loops: list[StepLoop] = [
            _loop(c, self._hear) for c in (configs[:1] if shares else configs)
        ]
        if shares:
            self._loops[0]._handle([AddModel(config) for config in configs[1:]])

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        """Serve all requests until they are complete, and return the measurements."""
        waiting = sorted(arrivals, reverse=True)
        now = 0.0
        turn = 0
        ends = dict[int, float]()
        self._finished.clear()
        self._tokens = 0
        before = self._block_rows()
        while waiting or self._busy():
            while waiting and waiting[-1].at <= now:
                self._submit(waiting.pop())
            if not (busy := self._busy()):
                now = waiting[-1].at
                continue
            turn = next((at for at in busy if at > turn), busy[0])
            now += self._step(self._loops[turn])
            ends |= {number: now for number in self._finished if number not in ends}
        waits = tuple(ends[arrival.number] - arrival.at for arrival in arrivals)
        kv_peak = sum(loop.stats().kv_peak for loop in self._loops)
        rows = self._block_rows() - before
        return Served(now, self._tokens, waits, sum(map(_weights_of, self._loops)), kv_peak, rows)

    def _block_rows(self) -> int:
        """Count the rows that all blocks have processed.

        An engine for one model does not count its rows, so its count is computed from its tokens:
        each token passes every block.
        """
        model: Any = self._loops[0]._model
        if isinstance(model, ChainModel):
            return model.unit_rows
        stats = [loop.stats() for loop in self._loops]
        return (2 * _LAYERS + 2) * sum(one.prefilled_tokens + one.sampled_tokens for one in stats)

    def _busy(self) -> list[int]:
        return [at for at, loop in enumerate(self._loops) if loop._scheduler.num_unfinished]

    def _step(self, loop: StepLoop) -> float:
        began = time.process_time()
        loop.step()
        if loop._replies:
            loop._report()
        return time.process_time() - began

    def _submit(self, arrival: Arrival) -> None:
        rng = random.Random(arrival.prompt)
        request = _request([rng.randrange(3, 200) for _ in range(PROMPT)], LENGTH, arrival.number)
        chain, loop = (arrival.tenant, 0) if self._shares else (0, arrival.tenant)
        self._loops[loop]._handle([Submit(arrival.number, request, chain)])

    def _hear(self, report: LoopReport) -> None:
        for reply in report.replies:
            assert isinstance(reply, SampleReply), "every request is sampled to its end"
            self._finished.append(reply.request_id)
            self._tokens += len(reply.ids)


def _request(ids: Iterable[int], tokens: int, number: int) -> SampleRequest:
    return SampleRequest(tuple(ids), tokens, Sampling(1.0), Seed(number, "p", 0, 0, "target", 0))


def _weights_of(loop: StepLoop) -> int:
    """Return the size of a loop's packed weights in bytes."""
    model: Any = loop._model
    assert isinstance(model, ChainModel | NativeModel)
    return model.num_bytes if isinstance(model, ChainModel) else model.packing.num_bytes


def _loop(config: WorkerConfig, hear: Callable[[LoopReport], None]) -> StepLoop:
    build = build_loop if config.builder is None else config.builder.build
    loop = build(config, hear)[0]
    assert isinstance(loop, StepLoop)
    return loop


def _config(zoo: Zoo, name: str, *, shares: bool) -> WorkerConfig:
    folder = zoo.folder(name)
    config, tokenizer = check_model(folder, name)
    builder = PlannedLoop(LoopPlan(is_shared=True)) if shares else None
    return WorkerConfig(name, folder, config, tokenizer.pieces, _OPTIONS, builder)


def make_family(folder: Path, own: int) -> Zoo:
    """Make a zoo of four tenants: the embedded target, two adapters of rank 8, and a model whose
    last `own` layers are tuned.
    """
    base = path("target")
    zoo = Zoo(folder / "zoo")
    tuned = folder / "tuned"
    weights = load_file(base / "model.safetensors")
    last = tuple(f"model.layers.{at}." for at in range(_LAYERS - own, _LAYERS))
    shutil.copytree(base, tuned)
    torch.manual_seed(0)
    changed = {
        k: (w * (1 + 0.02 * torch.randn_like(w.float()))).to(w.dtype) for k, w in weights.items()
    }
    tensors = {k: changed[k] if k.startswith(last) else w for k, w in weights.items()}
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    zoo.add("base", base)
    zoo.add("tuned", tuned)
    adapted = {
        name: w
        for name, w in weights.items()
        if name.startswith(last) and ("q_proj" in name or "v_proj" in name)
    }
    for number in (1, 2):
        zoo.add(f"adapter-{number}", _adapter(folder / f"adapter-{number}", adapted), "base")
    return zoo


def _adapter(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    tensors = dict[str, torch.Tensor]()
    for name, weight in weights.items():
        inner = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{inner}.lora_A.weight"] = 0.02 * torch.randn(8, weight.shape[1])
        tensors[f"{inner}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def arrive(count: int, rate: float, seed: int, prompts: Prompts) -> list[Arrival]:
    """Generate Poisson arrivals at a rate, each from a random tenant."""
    rng = random.Random(seed)
    now = 0.0
    found = list[Arrival]()
    for number in range(1, count + 1):
        now += rng.expovariate(rate)
        prompt = number if prompts == "own" else -(number // ALIKE)
        found.append(
            Arrival(now, number, rng.randrange(len(TENANTS)), 10_000_000 * (seed + 1) + prompt)
        )
    return found


def study(options: Options) -> list[Table]:
    """Measure three things: memory, throughput with equally many requests from each tenant, and
    waiting times under Poisson arrivals.
    """
    torch.set_num_threads(1)
    rounds = options.pick(5, 11, 25)
    count = options.pick(24, 120, 400)
    together_rows = list[Row]()
    rows = list[Row]()
    disk_notes = list[str]()
    for own in OWN:
        with tempfile.TemporaryDirectory() as folder:
            zoo = make_family(Path(folder), own)
            disk = zoo.show()
            shared = 1 - own / _LAYERS
            one = Arm(zoo, shares=True)
            four = Arm(zoo, shares=False)
            together, capacity = at_once(one, four, rounds)
            together_rows += [(shared, *row) for row in together]
            say(
                f"{100 * shared:.0f} % of layers shared: four engines serve {capacity:.1f} requests per "
                f"second of processor time"
            )
            cells = [
                (load, prompts)
                for prompts in get_args(Prompts)
                for load in options.pick(LOADS[1:2], LOADS, LOADS)
            ]
            for number, (load, prompts) in enumerate(cells):
                arrivals = arrive(count, load * capacity, options.seed + number, prompts)
                rows += [(shared, prompts, load, *row) for row in _loaded(one, four, arrivals)]
            disk_notes.append(
                f"If {100 * shared:.0f} % of the layers are shared, the four models take "
                f"{disk.stored / 1e6:.1f} MB of disk in one zoo, but {disk.apart / 1e6:.1f} MB "
                "in separate folders."
            )
    title = (
        f"{count} requests with {PROMPT} prompt tokens and {LENGTH} written tokens, in processor "
        "time of one core"
    )
    header = (
        "layers shared | prompts | load of four engines | arm | p50 s | p95 s | "
        "tokens/s | block rows | cached tokens"
    )
    once = f"One and four requests of each of four tenants at once, median of {rounds} rounds"
    return [
        Table.of(
            once,
            "layers shared | requests of each tenant | arm | tokens/s | relative to four "
            "engines | weights MB",
            together_rows,
        ),
        Table.of(
            f"Poisson arrivals of four tenants: {title}",
            header,
            rows,
            *disk_notes,
        ),
    ]


def at_once(one: Arm, four: Arm, rounds: int) -> tuple[list[Row], float]:
    """Measure weights in memory, and tokens per second with one and with four simultaneous requests
    of each tenant.
    """
    rows = list[Row]()
    capacity = 0.0
    for each in (1, 4):
        found = dict[str, list[Served]]()
        for number in range(rounds + 1):
            numbers = [1000 * number + at + 1 for at in range(each * len(TENANTS))]
            arrivals = [Arrival(0.0, at, at % len(TENANTS), at) for at in numbers]
            for name, arm in (("zoo", one), ("four engines", four)):
                served = arm.serve(arrivals)
                if number:  # the first round is not measured, because it loads the weights
                    found.setdefault(name, []).append(served)
        speeds = {
            name: statistics.median(served.tokens_per_second for served in all_)
            for name, all_ in found.items()
        }
        for name, all_ in found.items():
            ratio = speeds[name] / speeds["four engines"]
            weights = all_[0].weight_bytes / 1e6
            rows.append((each, name, speeds[name], ratio, weights))
        capacity = max(
            capacity, statistics.median(len(s.waits) / s.seconds for s in found["four engines"])
        )
    return rows, capacity


def _loaded(one: Arm, four: Arm, arrivals: Sequence[Arrival]) -> list[Row]:
    rows = list[Row]()
    for name, arm in (("zoo", one), ("four engines", four)):
        found = arm.serve(arrivals)
        waits = (
            sorted(found.waits)[min(len(arrivals) - 1, int(share * len(arrivals)))]
            for share in (0.5, 0.95)
        )
        rows.append((name, *waits, found.tokens_per_second, found.block_rows, found.kv_tokens))
    return rows


def memory(options: Options) -> list[Table]:
    """Measure the memory of the shipped family in one loop and in separate processes.

    Memory is the proportional set size (`Pss`) of the computing processes, read while engines
    write. A page that several processes share, such as library code or mapped weights, therefore
    counts once.
    """
    rows = list[Row]()
    rounds = options.pick(1, 3, 5)
    with tempfile.TemporaryDirectory() as folder:
        zoo = family(Path(folder))
        for words, names in FAMILIES.items():
            together = max(
                anyio.run(_megabytes, zoo, [(name, 0) for name in names]) for _ in range(rounds)
            )
            alone = max(
                anyio.run(_megabytes, zoo, [(n, at) for at, n in enumerate(names)])
                for _ in range(rounds)
            )
            say(f"{words}: {together:.0f} MB, apart {alone:.0f}")
            rows.append(
                (words, len(names), together, alone, f"{100 * (together / alone - 1):+.0f} %")
            )
    title = (
        f"Memory of a family's processes in MB (maximum of {rounds} rounds), after {_REQUESTS} "
        f"requests of {_TOKENS} tokens to each model"
    )
    return [
        Table.of(
            title,
            "models | engines | one loop | separate processes | one loop relative to processes",
            rows,
        )
    ]


def family(folder: Path) -> Zoo:
    """Make a zoo of the embedded target and its shipped relatives."""
    zoo = Zoo(folder / "zoo")
    shipped = path("target").parent / "family"
    zoo.add("base", path("target"))
    for name in RELATIVES:
        zoo.add(name, shipped / name, "base")
    return zoo


async def _megabytes(zoo: Zoo, engines: Sequence[tuple[str, int]]) -> float:
    """Return the megabytes that the processes use after they have written some tokens.

    Models with the same process number share a process.
    """
    async with AsyncExitStack() as stack:
        opened = [
            accelerated(zoo.folder(name), options=_PROCESS, replica=at) for name, at in engines
        ]
        for engine in opened:
            await stack.enter_async_context(engine)
        await collect(
            [
                partial(engine.sample, _request(range(3 + number, 43 + number), _TOKENS, number))
                for number in range(_REQUESTS)
                for engine in opened
            ]
        )
        return sum(map(resident, children())) / 1e3


def resident(process: Path) -> int:
    """Return the memory of processes in kilobytes, with shared pages divided among the processes."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


MODEL = "REAL_FAMILY"
"""Name of the environment variable that selects a model of `real_models` by its key; default
smollm2.
"""
ADAPTED = ("q_proj", "v_proj")
OWN_LAYERS = 2
BATCH = 8
LONGEST = 128  # number of tokens of a training text
HELD_OUT = 4  # number of batches of texts that are kept for tests
RATE = 1e-3  # learning rate of adapters; models with trained layers use a tenth of this rate


@dataclass(frozen=True, slots=True)
class Lesson:
    """A kind of training text: generated arithmetic with the answer alone, or with a worked
    solution.
    """

    what: str
    is_worked: bool
    seed: int

    def told(self, exercise: Exercise) -> str:
        """Return the text that the model learns to write in reply to a question."""
        return exercise.solution if self.is_worked else str(exercise.answer)

    def batches(self, tokenizer: Any, split: Split, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches of token ids with labels; the loss ignores positions labelled -100."""
        found = exercises(split, count * BATCH, self.seed, levels=(1, 2))
        made: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(found), BATCH):
            ids = torch.zeros(BATCH, LONGEST, dtype=torch.long)
            labels = torch.full_like(ids, -100)
            for row, exercise in enumerate(found[first : first + BATCH]):
                asked = tokenizer.apply_chat_template(
                    [{"role": "user", "content": exercise.text}],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                begin = tokenizer.encode(asked, add_special_tokens=False)
                rest = tokenizer.encode(self.told(exercise), add_special_tokens=False)
                text = torch.tensor((begin + rest)[:LONGEST])
                ids[row, : len(text)] = text
                labels[row, len(begin) : len(text)] = text[len(begin) :]
            made.append((ids, labels))
        return made


LESSONS = {
    "adapter-1": Lesson("adapter of every layer, the answer alone", is_worked=False, seed=1),
    "adapter-2": Lesson("adapter of every layer, worked solutions", is_worked=True, seed=2),
    "tuned": Lesson(f"last {OWN_LAYERS} layers, worked solutions", is_worked=True, seed=3),
}


def study_real(options: Options) -> list[Table]:
    """Train relatives of a real model, and compare their zoo with a separate engine for each
    relative.

    :raises SystemExit: the model is not available.
    """
    key = os.environ.get(MODEL, "smollm2")
    if key not in MODELS:
        raise SystemExit(f"{MODEL}={key}: expected one of {', '.join(MODELS)}")
    try:
        base = folder_of(key)
    except CannotBeMadeError as error:
        raise SystemExit(f"the model is not available: {error}") from error
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        zoo = Zoo(Path(scratch) / "zoo")
        zoo.add("base", base)
        learnt = relatives(base, Path(scratch), zoo, options.pick(2, 40, 200))
        contents = zoo.show()
        one, four = (Arm(zoo, shares=shares) for shares in (True, False))
        speeds, _ = at_once(one, four, options.pick(1, 5, 11))
    name = MODELS[key].name
    return [
        learnt,
        Table.of(
            f"Relatives of {name} at once, in one loop and in separate engines",
            "requests of each tenant | arm | tokens/s | relative to four engines | weights MB",
            speeds,
            f"The models are {', '.join(TENANTS)}. Each request has {PROMPT} prompt tokens and "
            f"{LENGTH} written tokens; times are processor times of one core. The models take "
            f"{contents.stored / 1e6:.1f} MB of disk in one zoo, but {contents.apart / 1e6:.1f} "
            "MB in separate folders.",
        ),
    ]


def relatives(base: Path, scratch: Path, zoo: Zoo, steps: int) -> Table:
    """Train every relative, add it to the zoo, and return a table of each relative's loss before
    and after training.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    rows: list[Row] = []
    for name, lesson in LESSONS.items():
        began = time.process_time()
        is_adapter = name != "tuned"
        model = opened(base)
        own = adapted(model) if is_adapter else last_layers(model)
        held_out = lesson.batches(tokenizer, "test", HELD_OUT)
        before = loss(model, held_out)
        train(
            model, own, lesson.batches(tokenizer, "train", steps), RATE / (1 if is_adapter else 10)
        )
        after = loss(model, held_out)
        folder = scratch / name
        if is_adapter:
            save_adapter(model, folder)
            zoo.add(name, folder, "base")
        else:
            save_layers(own, base, folder)
            zoo.add(name, folder)
        seconds = time.process_time() - began
        count = sum(weight.numel() for weight in own.values())
        say(f"{name}: loss {before:.3f} to {after:.3f} in {seconds:.0f} s of processor time")
        rows.append((name, lesson.what, count / 1e6, before, after, round(seconds)))
    return Table.of(
        "Relatives trained by this study",
        "model | kind | own weights, millions | loss before, nats per token | loss "
        "after | processor seconds",
        rows,
        f"Each model was trained for {steps} steps of {BATCH} generated problems; adapters have "
        f"rank {RANK}. The loss is measured on {HELD_OUT * BATCH} problems that were not "
        "trained on.",
    )


def opened(base: Path) -> Any:
    """Load the model in float32 with all weights frozen."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for weight in model.parameters():
        weight.requires_grad = False
    return model


def adapted(model: nn.Module) -> dict[str, nn.Parameter]:
    """Add an adapter to every adapted matrix of every layer, and return the adapters' weights."""
    torch.manual_seed(0)
    own: dict[str, nn.Parameter] = {}
    for name, part in list(model.named_modules()):
        if name.endswith(ADAPTED) and isinstance(part, nn.Linear):
            added = LowRank(part.weight)
            parametrize.register_parametrization(part, "weight", added)
            own |= {f"{name}.up": added.up, f"{name}.down": added.down}
    return own


def last_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Make the weights of the last layers trainable, and return them."""
    names = [name for name, _ in model.named_parameters() if name.startswith("model.layers.")]
    last = max(int(name.split(".")[2]) for name in names)
    chosen = [f"model.layers.{last - back}." for back in range(OWN_LAYERS)]
    own = {
        name: weight for name, weight in model.named_parameters() if name.startswith(tuple(chosen))
    }
    for weight in own.values():
        weight.requires_grad = True
    return own


def train(
    model: Any,
    own: Mapping[str, nn.Parameter],
    batches: Sequence[tuple[Tensor, Tensor]],
    rate: float,
) -> None:
    """Train the weights with one step of AdamW per batch."""
    optimizer = torch.optim.AdamW(own.values(), lr=rate, weight_decay=0.0)
    model.train()
    for ids, labels in batches:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.inference_mode()
def loss(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss per labelled token."""
    total = 0.0
    count = 0
    for ids, labels in batches:
        learnt = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss) * learnt
        count += learnt
    return total / count


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write a trained adapter in the format of peft."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, part in model.named_modules():
        if isinstance(part, LowRank):
            inner = f"base_model.model.{name.removesuffix('.parametrizations.weight.0')}"
            tensors[f"{inner}.lora_A.weight"] = part.down.detach().contiguous()
            tensors[f"{inner}.lora_B.weight"] = part.up.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(ADAPTED),
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def save_layers(own: Mapping[str, nn.Parameter], base: Path, folder: Path) -> None:
    """Write a copy of the model in which the given weights replace the original ones."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(base / "model.safetensors")
    for name, weight in own.items():
        weights[name] = weight.detach().to(weights[name].dtype).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
