"""Placement of blocks on servers, and the choice of a server or a replica for a request."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from atts.core import SampleRequest, ScoreRequest
from atts.local.engine import LocalEngine

if TYPE_CHECKING:
    from atts.servers import ReplicaLoad, ReplicaPool


class Instance(NamedTuple):
    """A server that has a block, as the dispatcher sees it for one request; all times in seconds."""

    wait: float  # waiting time for earlier requests
    run: float
    owns: bool  # whether the server has the request's keys and values of this block
    move: float  # seconds to copy the keys and values to the server
    recompute: float  # seconds to compute the keys and values again
    hop: float  # seconds to send the hidden states to the server

    @property
    def cost(self) -> float:
        """Return the seconds until this server would have finished the request."""
        return (
            self.wait + self.run + (0.0 if self.owns else min(self.move, self.recompute)) + self.hop
        )


def dispatched(instances: Sequence[Instance]) -> int:
    """Choose the server with the lowest cost; among equal ones, a server that has the keys and
    values.

    >>> busy, idle = Instance(0.5, 0.1, True, 0, 0, 0), Instance(0.0, 0.1, False, 0.3, 0.9, 0.01)
    >>> dispatched([busy, idle]), dispatched([busy._replace(wait=0.3), idle])
    (1, 0)
    """
    return min(range(len(instances)), key=lambda at: (instances[at].cost, not instances[at].owns))


class Demand(NamedTuple):
    """Demand for a block: its bytes, and the work on it as a number of busy servers."""

    bytes: float
    load: float


def placed(
    blocks: Mapping[str, Demand], transitions: Mapping[tuple[str, str], int], rooms: Sequence[float]
) -> dict[str, list[int]]:
    """Place each block on as many servers as its load needs, near its neighbours.

    The busiest block is placed first. Each following block goes to the server of its most frequent
    neighbours, if it has room and no other server has half a server's load less. Every block is on
    at least one server. Remaining room is filled with copies of small neighbours, so that fewer
    requests change servers.

    :raises ValueError: a block fits on no server.
    """
    left = list(rooms)
    loads = [0.0] * len(rooms)
    found = dict[str, list[int]]()
    near = Counter[tuple[str, str]]()
    for (one, other), count in transitions.items():
        near[one, other] += count
        near[other, one] += count
    for name in sorted(blocks, key=lambda name: (-blocks[name].load, name)):
        demand = blocks[name]
        mine = list[int]()
        for _ in range(min(len(rooms), max(1, math.ceil(demand.load)))):
            fits = [at for at, room in enumerate(left) if room >= demand.bytes and at not in mine]
            if not fits:
                break
            beside = {
                at: sum(near[name, other] for other, at_ in found.items() if at in at_)
                for at in fits
            }
            calm = min(loads[at] for at in fits)
            close = [at for at in fits if loads[at] <= calm + 0.5]
            mine.append(max(close, key=lambda at: (beside[at], -loads[at], -at)))
            left[mine[-1]] -= demand.bytes
        if not mine:
            raise ValueError(f"{name} of {demand.bytes / 1e9:.1f} GB fits on no server")
        for at in mine:
            loads[at] += demand.load / len(mine)
        found[name] = mine
    for one, other in near:  # no request changes servers if the neighbour fits on this server too
        for at in found[one]:
            if (
                at not in found[other]
                and left[at] >= blocks[other].bytes
                and blocks[other].bytes < blocks[one].bytes
            ):
                found[other].append(at)
                left[at] -= blocks[other].bytes
    return found


_REMEMBERED = 10_000
"""Most rollouts and problems whose cached tokens are recorded for each replica."""
_FIRST = 1e-2, 1e-4
"""Estimated seconds per request and per prompt token, before any request was served."""


def replicated(engines: Sequence[LocalEngine], name: str) -> ReplicaPool:
    """Create one of several engines on the same model, each as its own replica."""
    from atts.servers import ReplicaPool  # the placement of blocks does not use clients of servers

    return ReplicaPool(
        [(str(at), one) for at, one in enumerate(engines)],
        name=name,
        prefer=Dispatch(engines).choose,
    )


class Dispatch:
    """Chooses a replica with `placement.dispatched`, by waiting time, running time, and time to
    compute uncached tokens.

    The waiting time is the number of requests in the replica's loop, of all models, times the mean
    seconds of a request. Keys and values are not moved between processes, and sending a request
    costs the same for all replicas.
    """

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self._engines = engines
        self._cached = OrderedDict[
            tuple[str, str], int
        ]()  # number of cached tokens, by replica and rollout or problem

    def choose(self, free: Sequence[ReplicaLoad], request: SampleRequest | ScoreRequest) -> int:
        """Choose one of the available replicas."""
        given = len(
            request.ids if isinstance(request, SampleRequest) else request.prefix + request.suffix
        )
        problem = request.rollout.rpartition("/")[0]
        engines = [self._engines[int(load.name)] for load in free]
        each, token = self._seconds(engines)
        instances = list[Instance]()
        for load, engine in zip(free, engines, strict=True):
            known = max(self._cached.get((load.name, key), 0) for key in (request.rollout, problem))
            missing = given - min(given, known)
            instances.append(
                Instance(engine.in_loop * each, each, not missing, math.inf, missing * token, 0.0)
            )
        chosen = dispatched(instances)
        if request.rollout:
            self._cached[free[chosen].name, request.rollout] = given
        if problem:
            self._cached.setdefault((free[chosen].name, problem), given)
        while len(self._cached) > _REMEMBERED:
            self._cached.popitem(last=False)
        return chosen

    @staticmethod
    def _seconds(engines: Sequence[LocalEngine]) -> tuple[float, float]:
        """Return the mean seconds of the loop so far: per request, and per token of a request."""
        stats = [engine.stats() for engine in engines]
        busy = sum(one.busy_seconds for one in stats)
        tokens = sum(one.prefilled_tokens + one.scored_tokens + one.sampled_tokens for one in stats)
        done = sum(one.requests - one.in_flight for one in stats)
        return (busy / done, busy / tokens) if busy and done and tokens else _FIRST
