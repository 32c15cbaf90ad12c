"""Processes that each hold a zoo's models: a request goes to the one in which it costs least."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from atts.blocks.placement import Instance, dispatched
from atts.core import SampleRequest, ScoreRequest
from atts.local import LocalEngine
from atts.remote import ReplicaLoad, ReplicaPool

_REMEMBERED = 10_000
"""Rollouts and problems of which it is known what a replica has cached."""
_FIRST = 1e-2, 1e-4
"""Seconds a request, and a token of a prompt, before any was served."""


def replicated(engines: Sequence[LocalEngine], name: str) -> ReplicaPool:
    """One engine of several on the same model, made as different replicas: of each there is one process for its zoo."""
    return ReplicaPool([(str(at), one) for at, one in enumerate(engines)], name=name, prefer=Dispatch(engines).choose)


class Dispatch:
    """Chooses by `placement.dispatched`: wait + run + what is not cached there, computed anew.

    Requests that are in a replica's loop, whichever model's they are, are waited for, each for as long as one has taken
    so far. Keys and values are not moved between processes, and a request's way into one costs as much as into another.
    """

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self._engines = engines
        self._cached = OrderedDict[tuple[str, str], int]()  # tokens, by replica and rollout or problem

    def choose(self, free: Sequence[ReplicaLoad], request: SampleRequest | ScoreRequest) -> int:
        """Which of the replicas that are up."""
        given = len(request.ids if isinstance(request, SampleRequest) else request.prefix + request.suffix)
        engines = [self._engines[int(load.name)] for load in free]
        each, token = self._seconds(engines)
        instances = list[Instance]()
        for load, engine in zip(free, engines, strict=True):
            missing = given - self._known(load.name, request.rollout, given)
            instances.append(Instance(engine.in_loop * each, each, not missing, math.inf, missing * token, 0.0))
        chosen = dispatched(instances)
        self._remember(free[chosen].name, request.rollout, given)
        return chosen

    @staticmethod
    def _seconds(engines: Sequence[LocalEngine]) -> tuple[float, float]:
        """What a request, and a token of it, has taken of its loop's time so far."""
        stats = [engine.stats() for engine in engines]
        busy = sum(one.busy_seconds for one in stats)
        tokens = sum(one.prefilled_tokens + one.scored_tokens + one.sampled_tokens for one in stats)
        done = sum(one.requests - one.in_flight for one in stats)
        return (busy / done, busy / tokens) if busy and done and tokens else _FIRST

    def _known(self, name: str, rollout: str, given: int) -> int:
        """How many of so many tokens a replica has cached: of the rollout, or of its problem's prompt."""
        return min(given, max((self._cached.get((name, key), 0) for key in _keys(rollout)), default=0))

    def _remember(self, name: str, rollout: str, given: int) -> None:
        for key in _keys(rollout)[1:]:
            self._cached.setdefault((name, key), given)
        for key in _keys(rollout)[:1]:
            self._cached[name, key] = given
        while len(self._cached) > _REMEMBERED:
            self._cached.popitem(last=False)


def _keys(rollout: str) -> list[str]:
    """What a request's tokens may be known by: its rollout, and the problem that its siblings are of."""
    return [key for key in (rollout, rollout.rpartition("/")[0]) if key]
