"""Processes that each hold a zoo's models, and the choice of the cheapest one for a request."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from atts.accel.zoo.placement import Instance, dispatched
from atts.core import SampleRequest, ScoreRequest
from atts.local.engine import LocalEngine
from atts.servers import ReplicaLoad, ReplicaPool

_REMEMBERED = 10_000
"""Rollouts and problems of which it is known what a replica has cached."""
_FIRST = 1e-2, 1e-4
"""Seconds a request, and a token of a prompt, before any was served."""


def replicated(engines: Sequence[LocalEngine], name: str) -> ReplicaPool:
    """Make one engine of several on the same model, each made as another replica."""
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
        """Return what a request, and a token of it, has taken of its loop's time so far."""
        stats = [engine.stats() for engine in engines]
        busy = sum(one.busy_seconds for one in stats)
        tokens = sum(one.prefilled_tokens + one.scored_tokens + one.sampled_tokens for one in stats)
        done = sum(one.requests - one.in_flight for one in stats)
        return (busy / done, busy / tokens) if busy and done and tokens else _FIRST
