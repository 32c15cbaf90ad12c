"""Blocks on 12 to 64 virtual GPUs beside a whole model for each tenant: the same arrivals, costs
and memory.

A step of some layers costs their share of a model's step, by the published fit of an 8B model that
the virtual-time study uses too. Twenty tenants are tuned from three bases and share a fraction of
their layers with these. A block batches what waits for it, whoever's it is; a request goes on where
`atts.placement` sends it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple, get_args

from atts.placement import Demand, Instance, dispatched, placed
from scripts.studies.harness import Options, Row, Table, say
from scripts.studies.modelled import DRAFT_8B as COST

TENANTS = 20
BASES = 3
MODEL_BYTES = 16.1e9
ROOM = 72e9  # of weights, and of a GPU for them and for keys and values
KV_BYTES = 131_072
STATE_BYTES = 8_192  # of a token: all layers' keys and values; what goes from block to block
NODE = 4  # GPUs that are joined by a fast link
FAST = (5e-6, 200e9)
SLOW = (20e-6, 12.5e9)  # seconds to begin, bytes a second: within a node, between nodes
PROMPT = 512
# mean tokens; both are drawn from exponential laws, as far as a third of the mean at least
LENGTH = 96
MOST = 64  # rows of one run of a block
Serving = Literal["models", "models, spread", "blocks"]
Arrivals = Literal["even", "bursts"]


class Part(NamedTuple):
    """Layers that are placed together."""

    name: str
    share: float  # of a model


@dataclass(slots=True)
class Request:
    """One that passes the parts of its model again and again."""

    tenant: int
    arrived: float
    fed: int  # tokens of the next pass
    left: int  # tokens to write
    held: int = 0  # tokens whose keys and values there are
    at: int = 0  # part of the chain
    server: int = -1
    owners: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Server:
    """A GPU: one run of one block at a time, oldest request first."""

    waiting: dict[str, list[Request]] = field(default_factory=lambda: defaultdict(list))
    is_busy: bool = False
    ends: float = 0.0
    busy: float = 0.0


class Outcome(NamedTuple):
    """What one way of serving comes to."""

    p50: float
    p95: float
    busy: float  # share of the GPUs' time
    tokens_per_busy_second: float
    weights: float  # bytes, replicas included
    once: float  # the same without replicas


def arrive(count: int, rate: float, kind: Arrivals, skew: float, seed: int) -> list[Request]:
    """Requests of tenants whose shares fall like rank ** -skew; bursts have gaps of thrice the
    deviation.
    """
    rng = random.Random(seed)
    weights = [(1 + at) ** -skew for at in range(TENANTS)]
    now = 0.0
    found = list[Request]()
    order = list(range(TENANTS))
    rng.shuffle(order)
    for _ in range(count):
        shape = 1.0 if kind == "even" else 1 / 9
        now += rng.gammavariate(shape, 1 / (rate * shape))
        prompt, length = (
            max(mean // 3, int(rng.expovariate(1 / mean))) for mean in (PROMPT, LENGTH)
        )
        found.append(Request(rng.choices(order, weights)[0], now, prompt, length))
    return found


def chain_of(tenant: int, serving: Serving, sharing: float) -> tuple[Part, ...]:
    """The parts of a tenant's model: the base's layers and its own, or all of them as one."""
    if serving != "blocks" or not sharing:
        return (Part(f"model {tenant}", 1.0),)
    trunk = Part(f"base {tenant % BASES}", sharing)
    return (trunk, Part(f"own {tenant}", 1 - sharing)) if sharing < 1 else (trunk,)


class Cluster:
    """GPUs that hold parts of models; time is virtual."""

    def __init__(
        self, requests: Sequence[Request], servers: int, serving: Serving, sharing: float
    ) -> None:
        self._requests = requests
        self._servers = [Server() for _ in range(servers)]
        self._chains = [chain_of(tenant, serving, sharing) for tenant in range(TENANTS)]
        self._shares = {part.name: part.share for chain in self._chains for part in chain}
        self._events: list[tuple[float, int, object]] = []
        self._count = 0
        self.places = self._placed(serving)

    def _placed(self, serving: Serving) -> dict[str, list[int]]:
        """By each part's share of the work; one server for each model, or as many as its load asks
        for.
        """
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
        """Serve all requests to their end."""
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
        last = max(s.ends for s in self._servers)
        busy = sum(s.busy for s in self._servers)
        weights = sum(
            self._shares[name] * MODEL_BYTES * len(at) for name, at in self.places.items()
        )
        once = MODEL_BYTES * sum(self._shares.values())
        p50, p95 = (ends[min(len(ends) - 1, int(q * len(ends)))] for q in (0.5, 0.95))
        return Outcome(p50, p95, busy / last / len(self._servers), tokens / busy, weights, once)

    def _push(self, at: float, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what))

    def _advance(self, request: Request, server: int) -> int:
        """Past a part; how many tokens were written: one at the end of the chain."""
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
        """Let it wait where it is through first."""
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
        """One run of a part: its share of a model's step; prompts are fed, the others decode."""
        fed = sum(request.fed for request in batch if request.fed > 1)
        decoding = [request.held for request in batch if request.fed == 1]
        return share * COST.seconds(len(decoding), sum(decoding), fed)

    def _start(self, at: int, now: float) -> None:
        """Run a block for all that wait for it: one late in its chain first, so that many gather
        before the others.
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
    """Requests a second that models on their own serve at batches of eight, all servers busy: the
    unit of load.
    """
    step = COST.seconds(8, 8 * (PROMPT + LENGTH / 2)) / 8
    return servers / (LENGTH * step + COST.prefilled * PROMPT)


def compared(
    servers: int, load: float, kind: Arrivals, at: tuple[float, float, int, int]
) -> Iterator[tuple[Serving, Outcome]]:
    """All ways of serving, the same requests; `at`: what is shared, skew of tenants, number of
    requests and seed.
    """
    sharing, skew, count, seed = at
    for serving in get_args(Serving):
        requests = arrive(count, load * capacity(servers), kind, skew, seed)
        yield serving, Cluster(requests, servers, serving, sharing).run()


def study(options: Options) -> list[Table]:
    """A grid of sizes, loads and arrivals, then of what the published figures need."""
    count = options.pick(300, 800, 8000)
    rows = list[Row]()
    sizes = options.pick((12,), (12, 64), (12, 24, 48, 64))
    loads = options.pick((0.7,), (0.3, 0.7), (0.3, 0.5, 0.7))
    for servers, load, kind in product(sizes, loads, get_args(Arrivals)):
        say(f"{servers} GPUs at {load:.0%}, {kind}")
        found = dict(compared(servers, load, kind, (0.8, 1.0, count, options.seed)))
        rows += [
            _row((servers, load, kind, name), one, found["models"]) for name, one in found.items()
        ]
    header = (
        "GPUs | load | arrivals | served as | p50 s | p95 s | p95 to models | busy share | tokens "
        "a busy second | "
        "to models | weights GB | each once"
    )
    title = f"{TENANTS} tenants of {BASES} bases that share 80 % of their layers, {count} requests"
    first = Table.of(
        title, header, rows, "Virtual time; 8B models at the published fit of one H100."
    )
    return [first, _published(options, count)]


def _row(lead: Row, one: Outcome, base: Outcome) -> Row:
    late, more = _beside(one, base)
    busy = (f"{one.busy:.1%}", one.tokens_per_busy_second, f"{more:+.1%}")
    return (*lead, one.p50, one.p95, f"{late:+.1%}", *busy, one.weights / 1e9, one.once / 1e9)


def _beside(one: Outcome, base: Outcome) -> tuple[float, float]:
    """How much more of p95, and of tokens a busy second."""
    return one.p95 / base.p95 - 1, one.tokens_per_busy_second / base.tokens_per_busy_second - 1


def _published(options: Options, count: int) -> Table:
    """Under which assumptions the paper's -33.5 % and +20.1 % are reached on its 12 GPUs."""
    rows = list[Row]()
    loads = options.pick((0.5,), (0.3, 0.5, 0.7), (0.3, 0.5, 0.7))
    for sharing, skew, load in product((0.5, 0.8, 1.0), (0.0, 1.0), loads):
        found = dict(compared(12, load, "even", (sharing, skew, count, options.seed)))
        for base in ("models", "models, spread"):
            late, more = _beside(found["blocks"], found[base])
            reached = ("yes" if late <= -0.335 else "no", "yes" if more >= 0.201 else "no")
            rows.append(
                (sharing, skew, load, base, f"{late:+.1%}", reached[0], f"{more:+.1%}", reached[1])
            )
    header = "shared | skew | load | beside | p95 | -33.5 % reached | tokens a busy second | +20.1 % reached"
    return Table.of("What the published figures need, 12 GPUs", header, rows)
