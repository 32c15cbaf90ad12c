"""Ray engine: a pool of replicas that run in the actors of a Ray cluster, each with its own GPUs or
cores.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio
import anyio.to_thread

from atts.concurrency import SlotQueue, clock, loop_caller, shielded
from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import BaseEngine, Engine, EngineSpec, Tokenizer, not_open
from atts.errors import (
    ATTSError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    MissingExtra,
    OptionError,
    counted,
)
from atts.servers.pool import ReplicaPool, require_alike

T = TypeVar("T")
_CLOSE_SECONDS = 10.0
# Time limit, in seconds, for a new actor to replace a dead actor. Meanwhile, the other replicas
# answer the requests.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Options of a Ray engine: how many actors to start, the resources of each actor, and the
    cluster.

    `address` is the address of a cluster. "auto" means the cluster running on this machine. ""
    means the same, but starts a new cluster if none runs. Each actor gets at most `in_flight`
    requests at a time, and further requests wait in this process. An actor counts as lost if it has
    not loaded its model after `open_seconds`.

    :raises OptionError: an option has an impossible value.
    """

    actors: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    address: str = ""
    in_flight: int = 256
    open_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, floor in (
            ("actors", 1),
            ("in_flight", 1),
            ("cpus", 0),
            ("gpus", 0),
            ("open_seconds", 0.001),
        ):
            if not getattr(self, name) >= floor:
                raise OptionError(name, f"{getattr(self, name)} is below {floor:g}")


_DEFAULTS = RayOptions()


class RayEngine(ReplicaPool):
    """Pool of identical engines, each in its own actor of a Ray cluster, used as one engine.

    `make` is called in each actor to create the engine, so it must be picklable, for example
    `functools.partial(LocalEngine, folder)`. `atts` must be installed on every node.

    A rollout stays with the actor whose cache holds its prefix. If an actor dies, another actor
    repeats its requests from the token ids, and a new actor takes the place of the dead one.
    """

    def __init__(
        self, make: Callable[[], Engine], *, name: str = "ray", options: RayOptions = _DEFAULTS
    ) -> None:
        self._options = options
        # whether to keep or to end the connection to the Ray cluster when this engine closes
        self._shut: Literal["leave it", "end it"] = "leave it"
        self._actors = [
            ActorReplica(make, f"{name}/{number}", options) for number in range(options.actors)
        ]
        super().__init__(
            [(f"actor {number}", actor) for number, actor in enumerate(self._actors)], name=name
        )

    @property
    def actors(self) -> tuple[ActorReplica, ...]:
        """Return the pool's replicas, one per actor."""
        return tuple(self._actors)

    async def __aenter__(self) -> Self:
        """Connect to a cluster or start one, then open an engine in every actor.

        :raises MissingExtra: Ray is not installed.
        :raises EngineUnavailable: there is no such cluster, or no actor could be started.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("an engine on a cluster", "ray", "ray")
        self._shut = await anyio.to_thread.run_sync(_join, self._name, self._options.address)
        try:
            for actor in self._actors:
                # `start` does not wait, so all actors load their models at the same time
                actor.start()
            await super().__aenter__()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        await super().__aexit__(kind, error, trace)
        await self._leave()
        return None

    async def _leave(self) -> None:
        if self._shut == "end it":
            self._shut = "leave it"
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_ray().shutdown)


def _join(name: str, address: str) -> Literal["leave it", "end it"]:
    """Connect to a Ray cluster, or start one on this machine if no address is given and none runs.

    Return "end it" if this call connected this process to Ray: the connection must then end when
    the engine closes. Return "leave it" if the process was already connected.
    """
    if _ray().is_initialized():
        return "leave it"
    # Turn off Ray's usage statistics, which Ray would send over the internet.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        _ray().init(address=address or "auto", **quiet)
    except (ConnectionError, ValueError) as error:
        if address:
            advice = (
                "Start a cluster with `ray start --head`, or leave the address out to use a "
                "cluster on this machine"
            )
            raise EngineUnavailable(
                name, f"there is no Ray cluster at {address!r} ({error})", advice
            ) from error
        _begin(name, quiet)
    return "end it"


def _begin(name: str, quiet: dict[str, Any]) -> None:
    """Start a Ray cluster on this machine and connect to it."""
    try:
        _ray().init(address="local", include_dashboard=False, **quiet)
    except Exception as error:  # Ray does not raise a more specific error
        _ray().shutdown()
        advice = (
            "Ray waits only 30 s, which may be too short on a busy machine: start the cluster "
            "first with `ray start --head`"
        )
        problem = f"no Ray cluster could be started here ({str(error).splitlines()[0][:200]})"
        raise EngineUnavailable(name, problem, advice) from error


class ActorReplica(BaseEngine):
    """Replica of a pool whose engine runs in a Ray actor.

    `recheck` opens the engine. If the actor has died, it also starts a new one.
    """

    def __init__(self, make: Callable[[], Engine], name: str, options: RayOptions) -> None:
        super().__init__(name)
        self._make = make
        self._options = options
        self._slots = SlotQueue(options.in_flight)
        self._handle: Any = None
        # Ray's object reference, from which the result of `Host.open` can be awaited
        self._opening: Any = None

    @property
    def handle(self) -> Any:
        """Return Ray's handle of the actor, for example to call `ray.kill`. It is None if no actor
        has been requested.
        """
        return self._handle

    def start(self) -> None:
        """Request an actor from Ray, without waiting until it runs.

        If the cluster is full, Ray creates the actor once resources become free.
        """
        options = self._options
        limits = {
            "num_cpus": options.cpus,
            "num_gpus": options.gpus,
            "max_concurrency": options.in_flight + 8,
        }
        actor: Any = _ray().remote(Host)
        self._handle = actor.options(**limits, max_restarts=0, max_task_retries=0).remote(
            self._make
        )
        self._opening = self._handle.open.remote()

    async def recheck(self) -> None:
        """Open the engine, or check that its actor still runs. If the actor has died, request a new
        one.

        :raises EngineUnavailable: the actor died, or the new actor does not run yet.
        :raises FingerprintError: the engine in the new actor is different.
        """
        if self._state == "closed":
            raise not_open(self._name, self._state)
        self._clock = clock()
        if self._handle is None:
            self.start()
        patience = self._options.open_seconds if self._state == "new" else _PATIENCE
        with anyio.move_on_after(patience):
            return await self._reopen()
        options = self._options
        wanted = f"{counted(options.cpus, 'core')} and {counted(options.gpus, 'GPU')}"
        advice = f"Check with `ray status` that the cluster has {wanted} free for each actor"
        raise EngineUnavailable(
            self._name, f"the engine's actor did not start within {patience:g} s", advice
        )

    async def comes_back(self) -> bool:
        """Wait until the engine runs again in a new actor, for at most `open_seconds`. Return
        whether it does.
        """
        with anyio.move_on_after(self._options.open_seconds):
            while self._state == "open":
                try:
                    await self.recheck()
                    return True
                except EngineUnavailable:
                    await anyio.sleep(_PATIENCE / 4)
        return False

    async def open(self) -> None:
        """Open the engine in its actor; see `recheck`."""
        await self.recheck()

    async def _close(self) -> None:
        handle = self._handle
        self._handle = None
        if handle is not None:
            with shielded(_CLOSE_SECONDS):
                try:
                    await _result(handle.close.remote())
                except _ray(".exceptions").RayError:
                    # The actor has died already, so its engine need not be closed.
                    pass
            _ray().kill(handle)

    async def _reopen(self) -> None:
        try:
            is_new = self._state == "new"
            reply = await _result(self._opening if is_new else self._handle.open.remote())
        except _ray(".exceptions").RayError as error:
            self.start()
            advice = "atts starts another actor and waits for it"
            raise EngineUnavailable(
                self._name, f"the engine's actor died ({_short(error)})", advice
            ) from error
        if isinstance(reply, Failure):
            raise reply.error(self._name)
        spec, tokenizer = reply
        if self._spec is not None:
            require_alike(
                self._name,
                self._spec,
                spec,
                "Every node must have the same model and the same software versions",
            )
        self._spec = spec
        self._tokenizer = tokenizer
        self._state = "open"

    async def _sample(self, request: SampleRequest) -> Completion:
        done: Completion = await self._ask("sample", request)
        return done

    async def _score(self, request: ScoreRequest) -> Scores:
        done: Scores = await self._ask("score", request)
        return done

    async def _ask(
        self, method: Literal["sample", "score"], request: SampleRequest | ScoreRequest
    ) -> Any:
        if not self._slots.take_nowait():
            await self._slots.take()
        try:
            reply = await _result(getattr(self._handle, method).remote(request))
        except _ray(".exceptions").RayActorError as error:
            raise EngineUnavailable(
                self._name, f"the engine's actor died ({_short(error)})"
            ) from error
        except _ray(".exceptions").RayError as error:
            raise EngineError(self._name, f"the engine's actor failed ({_short(error)})") from error
        finally:
            self._slots.give()
        if isinstance(reply, Failure):
            raise reply.error(self._name)
        return reply


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a form that can be sent between processes.

    The exception itself is not sent, because pickle can restore only exceptions whose constructors
    take a single string.
    """

    kind: type[ATTSError]
    words: str

    def error(self, engine: str) -> ATTSError:
        """Return the exception, with its original type and message."""
        made = self.kind.__new__(self.kind, self.words)
        if isinstance(made, EngineError):
            made.engine = engine
        if isinstance(made, ContextOverflow):
            made.needed = made.context_length = 0
        return made


class Host:
    """Object in a Ray actor that runs the engine.

    One asyncio task both opens and closes the engine. The engine may have an open task group, which
    only the task that opened it may close.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._open = asyncio.Event()
        self._closing = asyncio.Event()
        self._failure: Failure | None = None
        self._life: asyncio.Task[None] | None = None
        self._again: asyncio.Task[Failure | None] | None = None

    async def open(self) -> tuple[EngineSpec, Tokenizer] | Failure:
        """Open the engine if necessary, and return its spec and tokenizer, or its error.

        If the engine is already open, `recheck` is called on it. A local engine is then opened
        again if the task that runs its model has ended.
        """
        if self._life is None:
            self._life = asyncio.create_task(self._live())
        await self._open.wait()
        if self._failure is not None or self._engine is None:
            return self._failure or Failure(EngineUnavailable, "the engine is closed")
        if self._again is None or self._again.done():
            self._again = asyncio.create_task(self._recheck(self._engine))
        # The shield keeps the check running if this call is cancelled. The next call then waits for
        # the same check.
        failure = await asyncio.shield(self._again)
        return failure or (self._engine.spec, self._engine.tokenizer)

    async def sample(self, request: SampleRequest) -> Completion | Failure:
        """Return the engine's completion, or a `Failure` if the engine raised an error."""
        return await self._ask(lambda engine: engine.sample(request))

    async def score(self, request: ScoreRequest) -> Scores | Failure:
        """Return the engine's scores, or a `Failure` if the engine raised an error."""
        return await self._ask(lambda engine: engine.score(request))

    async def close(self) -> None:
        """Close the engine, and wait until it is closed."""
        self._closing.set()
        if self._life is not None:
            await self._life

    async def _live(self) -> None:
        try:
            async with self._make() as engine:
                self._engine = engine
                self._open.set()
                await self._closing.wait()
        except ATTSError as error:
            self._failure = Failure(type(error), str(error))
        finally:
            self._engine = None
            self._open.set()

    @staticmethod
    async def _recheck(engine: Engine) -> Failure | None:
        try:
            recheck = getattr(engine, "recheck", None)
            if recheck is not None:
                await recheck()
        except ATTSError as error:
            return Failure(type(error), str(error))
        return None

    async def _ask(self, call: Callable[[Engine], Awaitable[T]]) -> T | Failure:
        if self._engine is None:
            return self._failure or Failure(EngineUnavailable, "the engine is closed")
        try:
            return await call(self._engine)
        except ATTSError as error:
            return Failure(type(error), str(error))


async def _result(reference: Any) -> Any:
    """Wait for the value of a Ray object reference, under asyncio or trio.

    If the caller is cancelled, the call in the actor is cancelled too.
    """
    arrived = anyio.Event()
    hand_over = loop_caller()
    future = reference.future()
    future.add_done_callback(lambda _: hand_over(arrived.set))
    try:
        await arrived.wait()
    except BaseException:
        _ray().cancel(reference)
        raise
    return future.result()


def _ray(module: str = "") -> Any:
    """Import and return Ray, or one of its modules. It is imported only when needed, because it is
    an optional dependency.
    """
    return importlib.import_module(f"ray{module}")


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
