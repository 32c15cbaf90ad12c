"""Ray engine: a pool of alike engines in the actors of a cluster, one per GPU or per so many cores."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import anyio.to_thread

from atts.engine import Engine
from atts.errors import EngineUnavailable, UsageError
from atts.remote.pool import ReplicaPool
from atts.remote.ray_replica import ActorReplica, RayOptions

_DEFAULTS = RayOptions()


class RayEngine(ReplicaPool):
    """Alike engines in the actors of a Ray cluster, as one engine.

    `make` makes the engine in the actor, so it must be picklable there (`functools.partial(LocalEngine, folder)`), and
    `atts` must be installed on every node. A rollout stays where its cache is; an actor that dies loses none: what it
    was asked is asked again elsewhere, from the token ids it carries, and a new actor is started in its place.
    """

    def __init__(self, make: Callable[[], Engine], *, name: str = "ray", options: RayOptions = _DEFAULTS) -> None:
        self._options = options
        self._shut: Literal["leave it", "end it"] = "leave it"  # the cluster, when this engine closes
        self._actors = [ActorReplica(make, f"{name}/{number}", options) for number in range(options.actors)]
        super().__init__([(f"actor {number}", actor) for number, actor in enumerate(self._actors)], name=name)

    @property
    def actors(self) -> tuple[ActorReplica, ...]:
        """The replicas, one per actor."""
        return tuple(self._actors)

    async def __aenter__(self) -> Self:
        """Join or start the cluster, and open an engine in every actor.

        :raises UsageError: Ray is not installed.
        :raises EngineUnavailable: there is no such cluster, or no actor could be started.
        """
        if importlib.util.find_spec("ray") is None:
            raise UsageError("Ray is not installed: pip install 'atts[ray]'")
        self._shut = await anyio.to_thread.run_sync(_join, self._name, self._options.address)
        try:
            for actor in self._actors:
                actor.start()  # all load at once; the pool then waits for each
            await super().__aenter__()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        await super().__aexit__(kind, error, trace)
        await self._leave()
        return None

    async def _leave(self) -> None:
        if self._shut == "end it":
            self._shut = "leave it"
            ray: Any = importlib.import_module("ray")

            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(ray.shutdown)


def _join(name: str, address: str) -> Literal["leave it", "end it"]:
    """Connect to the cluster, or start one here; says what is to become of it afterwards."""
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        return "leave it"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address or "auto", **quiet)
    except (ConnectionError, ValueError) as error:
        if address:
            advice = "Start it with `ray start --head`, or leave the address out for one in this machine"
            raise EngineUnavailable(name, f"there is no Ray cluster at {address!r} ({error})", advice) from error
        _begin(name, quiet)
    return "end it"


def _begin(name: str, quiet: dict[str, Any]) -> None:
    """Start a cluster in this machine."""
    ray: Any = importlib.import_module("ray")
    try:
        ray.init(address="local", include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises nothing more telling
        ray.shutdown()
        advice = "A busy machine may be slower than Ray's 30 s: start it first with `ray start --head`"
        problem = f"no Ray cluster could be started here ({str(error).splitlines()[0][:200]})"
        raise EngineUnavailable(name, problem, advice) from error
