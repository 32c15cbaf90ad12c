"""Placement of blocks on servers or workers, and the choice of a server or a replica for a
request.
"""

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
    """Estimates of the time in which one server could finish one request. The server has a block
    that the request needs. All times are in seconds.
    """

    wait: float  # time until the server has finished all requests that came before this one
    run: float
    owns: bool  # whether the server has the request's keys and values for this block
    move: float  # time to copy the request's missing keys and values to this server
    # time in which this server would compute the missing keys and values again, instead of copying
    # them
    recompute: float
    hop: float  # time to send the request's hidden states to this server

    @property
    def cost(self) -> float:
        """Return the estimated time until this server would finish the request."""
        return (
            self.wait + self.run + (0.0 if self.owns else min(self.move, self.recompute)) + self.hop
        )


def dispatched(instances: Sequence[Instance]) -> int:
    """Return the index of the server with the lowest cost. If costs are equal, prefer a server that
    has the request's keys and values.

    >>> busy, idle = Instance(0.5, 0.1, True, 0, 0, 0), Instance(0.0, 0.1, False, 0.3, 0.9, 0.01)
    >>> dispatched([busy, idle]), dispatched([busy._replace(wait=0.3), idle])
    (1, 0)
    """
    return min(range(len(instances)), key=lambda at: (instances[at].cost, not instances[at].owns))


class Demand(NamedTuple):
    """The size of a block, and the load that it causes.

    The size is in the same unit as the free space of the servers. A load of 2 means that the
    block's work keeps two servers busy.
    """

    bytes: float
    load: float


def placed(
    blocks: Mapping[str, Demand], transitions: Mapping[tuple[str, str], int], rooms: Sequence[float]
) -> dict[str, list[int]]:
    """Place each block on as many servers as its load requires, or as have enough free space.

    The block with the largest load is placed first. Of the servers with enough free space, those
    are candidates whose load exceeds the lowest one by at most 0.5. Of the candidates, the server
    is chosen whose blocks most often come directly before or after the new block. If space is left
    at the end, small blocks are also copied to the servers of their neighbours, so that fewer
    requests change servers.

    :raises ValueError: no server has room for a block.
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
            raise ValueError(
                f"{name} needs {demand.bytes / 1e9:.1f} GB, but no server has that much free memory"
            )
        for at in mine:
            loads[at] += demand.load / len(mine)
        found[name] = mine
    # If there is room, copy a smaller block to the server of the block before or after it. Then
    # fewer requests change servers.
    for one, other in near:
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
"""Largest number of entries in `Dispatch._cached`. An entry is the number of tokens that one
replica has cached for a rollout or a problem.
"""
_FIRST = 1e-2, 1e-4
"""Assumed seconds per request and seconds per token. They are used until these times can be
measured on finished requests.
"""


def replicated(engines: Sequence[LocalEngine], name: str) -> ReplicaPool:
    """Combine several engines on the same model into one engine. Each of the engines becomes a
    replica.
    """
    # imported only here, because the rest of this module does not need the server clients
    from atts.servers import ReplicaPool

    return ReplicaPool(
        [(str(at), one) for at, one in enumerate(engines)],
        name=name,
        prefer=Dispatch(engines).choose,
    )


class Dispatch:
    """Chooses the replica of an engine that would finish a request first.

    The estimate is the sum of three times: the time until the request starts, its running time, and
    the time to compute tokens that are not cached. The first time is the number of requests in the
    replica's loop (of all models) times the mean seconds per request. Keys and values are never
    copied between replicas. The time to send a request is ignored.
    """

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self._engines = engines
        # number of tokens that a replica has cached for a rollout or a problem; the key is the
        # replica's name, and the name of the rollout or problem
        self._cached = OrderedDict[tuple[str, str], int]()

    def choose(self, free: Sequence[ReplicaLoad], request: SampleRequest | ScoreRequest) -> int:
        """Return the index of the best available replica for a request."""
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
        """Return the mean seconds per finished request and the mean seconds per token. Both are
        means over all these engines together.
        """
        stats = [engine.stats() for engine in engines]
        busy = sum(one.busy_seconds for one in stats)
        tokens = sum(one.prefilled_tokens + one.scored_tokens + one.sampled_tokens for one in stats)
        done = sum(one.requests - one.in_flight for one in stats)
        return (busy / done, busy / tokens) if busy and done and tokens else _FIRST
