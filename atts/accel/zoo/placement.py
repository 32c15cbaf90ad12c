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
    """A server that holds a block, as one request sees it; all in seconds."""

    wait: float  # for what is before it
    run: float
    owns: bool  # the request's keys and values of this block are there
    move: float  # seconds to bring keys and values there
    recompute: float  # seconds to compute them there again
    hop: float  # seconds to bring the states there

    @property
    def cost(self) -> float:
        """Return the seconds until this instance would have served the request."""
        return (
            self.wait + self.run + (0.0 if self.owns else min(self.move, self.recompute)) + self.hop
        )


def dispatched(instances: Sequence[Instance]) -> int:
    """Choose the cheapest; where several are, one that owns the keys and values.

    >>> busy, idle = Instance(0.5, 0.1, True, 0, 0, 0), Instance(0.0, 0.1, False, 0.3, 0.9, 0.01)
    >>> dispatched([busy, idle]), dispatched([busy._replace(wait=0.3), idle])
    (1, 0)
    """
    return min(range(len(instances)), key=lambda at: (instances[at].cost, not instances[at].owns))


class Demand(NamedTuple):
    """Demand for a block: its bytes, and the servers' time that it takes, in servers."""

    bytes: float
    load: float


def placed(
    blocks: Mapping[str, Demand], transitions: Mapping[tuple[str, str], int], rooms: Sequence[float]
) -> dict[str, list[int]]:
    """Place each block on as many servers as its load asks for, near its neighbours.

    The busiest block is placed first. Then a block goes where its neighbours by counted transitions
    are, while there is room and no other server is idler by half a server; at least one server
    holds it. Room that is left takes smaller neighbours, so that fewer requests hop.

    :raises ValueError: a block fits nowhere.
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
    for one, other in near:  # no hop where a neighbour fits in as well
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
"""Rollouts and problems of which it is known what a replica has cached."""
_FIRST = 1e-2, 1e-4
"""Seconds a request, and a token of a prompt, before any was served."""


def replicated(engines: Sequence[LocalEngine], name: str) -> ReplicaPool:
    """Make one engine of several on the same model, each made as another replica."""
    from atts.servers import ReplicaPool  # placing blocks needs no servers

    return ReplicaPool(
        [(str(at), one) for at, one in enumerate(engines)],
        name=name,
        prefer=Dispatch(engines).choose,
    )


class Dispatch:
    """Chooses by `placement.dispatched`: wait + run + what is not cached there, computed again.

    Requests that are in a replica's loop, whichever model's they are, are waited for, each for as
    long as one has taken so far. Keys and values are not moved between processes, and a request's
    way into one costs as much as into another.
    """

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self._engines = engines
        self._cached = OrderedDict[
            tuple[str, str], int
        ]()  # tokens, by replica and rollout or problem

    def choose(self, free: Sequence[ReplicaLoad], request: SampleRequest | ScoreRequest) -> int:
        """Choose one of the replicas that are up."""
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
        """Return the loop's mean seconds for a request, and for a token of it, so far."""
        stats = [engine.stats() for engine in engines]
        busy = sum(one.busy_seconds for one in stats)
        tokens = sum(one.prefilled_tokens + one.scored_tokens + one.sampled_tokens for one in stats)
        done = sum(one.requests - one.in_flight for one in stats)
        return (busy / done, busy / tokens) if busy and done and tokens else _FIRST
