"""Replica in a Ray actor: opened, asked and replaced when it is lost, from any event loop."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine
from atts.errors import EngineError, EngineUnavailable, OptionError
from atts.remote.base import BaseEngine, not_open, require_alike
from atts.remote.ray_host import Failure, Host
from atts.slots import SlotQueue
from atts.tasks import clock, shielded, soon

_CLOSE_SECONDS = 10.0
_PATIENCE = 2.0  # for a replacement that is starting: requests go elsewhere meanwhile


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How many actors, what each is given, and where.

    `address` is a cluster's ("auto": the one that is running here; "": that, or a new one in this machine). At most
    `in_flight` requests are at an actor at once; more wait here, where they can still go elsewhere. An actor that is
    not there after `open_seconds` (its model loaded) counts as lost.

    :raises OptionError: a value no actor can be made with.
    """

    actors: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    address: str = ""
    in_flight: int = 256
    open_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, floor in (("actors", 1), ("in_flight", 1), ("cpus", 0), ("gpus", 0), ("open_seconds", 0.001)):
            if not getattr(self, name) >= floor:
                raise OptionError(name, f"{getattr(self, name)} is below {floor:g}")


class ActorReplica(BaseEngine):
    """An `atts.remote.Replica` whose engine lives in an actor; `recheck` opens it, and starts another when it died."""

    def __init__(self, make: Callable[[], Engine], name: str, options: RayOptions) -> None:
        super().__init__(name)
        self._make = make
        self._options = options
        self._slots = SlotQueue(options.in_flight)
        self._handle: Any = None
        self._opening: Any = None  # the reference to what `Host.open` will say

    @property
    def handle(self) -> Any:
        """Ray's own handle of the actor, such as `ray.kill` takes; None before it was started."""
        return self._handle

    def start(self) -> None:
        """Have the actor made, without waiting; a cluster without room makes it when there is some."""
        options = self._options
        limits = {"num_cpus": options.cpus, "num_gpus": options.gpus, "max_concurrency": options.in_flight + 8}
        actor: Any = _ray().remote(Host)
        self._handle = actor.options(**limits, max_restarts=0, max_task_retries=0).remote(self._make)
        self._opening = self._handle.open.remote()

    async def recheck(self) -> None:
        """Open it, or see that it still lives; a lost one is replaced by a new actor.

        :raises EngineUnavailable: it died, or its replacement is not there yet.
        :raises FingerprintError: the replacement is another engine.
        """
        if self._state == "closed":
            raise not_open(self._name, self._state)
        self._clock = clock()
        if self._handle is None:
            self.start()
        patience = self._options.open_seconds if self._state == "new" else _PATIENCE
        with anyio.move_on_after(patience):
            return await self._open()
        wanted = f"{self._options.cpus:g} cores and {self._options.gpus:g} GPUs"
        advice = f"Has the cluster {wanted} free for each actor? See `ray status`"
        raise EngineUnavailable(self._name, f"its actor is not there after {patience:g} s", advice)

    async def __aenter__(self) -> Self:
        await self.recheck()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        self._state = "closed"
        handle, self._handle = self._handle, None
        if handle is not None:
            with shielded(_CLOSE_SECONDS):
                try:
                    await _result(handle.close.remote())
                except _ray(".exceptions").RayError:
                    pass  # it is gone, which is what was wanted
            _ray().kill(handle)
        return None

    async def _open(self) -> None:
        try:
            reply = await _result(self._opening if self._state == "new" else self._handle.open.remote())
        except _ray(".exceptions").RayError as error:
            self.start()
            raise EngineUnavailable(self._name, f"its actor died ({_short(error)})", "Another is started") from error
        if isinstance(reply, Failure):
            raise reply.error(self._name)
        spec, tokenizer = reply
        if self._spec is not None:
            require_alike(self._name, self._spec, spec, "Every node must have the same model and versions")
        self._spec, self._tokenizer, self._state = spec, tokenizer, "open"

    async def _sample(self, request: SampleRequest) -> Completion:
        done: Completion = await self._ask("sample", request)
        return done

    async def _score(self, request: ScoreRequest) -> Scores:
        done: Scores = await self._ask("score", request)
        return done

    async def _ask(self, method: Literal["sample", "score"], request: SampleRequest | ScoreRequest) -> Any:
        if not self._slots.take_nowait():
            await self._slots.take()
        try:
            reply = await _result(getattr(self._handle, method).remote(request))
        except _ray(".exceptions").RayActorError as error:
            raise EngineUnavailable(self._name, f"its actor died ({_short(error)})") from error
        except _ray(".exceptions").RayError as error:
            raise EngineError(self._name, f"its actor failed ({_short(error)})") from error
        finally:
            self._slots.give()
        if isinstance(reply, Failure):
            raise reply.error(self._name)
        return reply


async def _result(reference: Any) -> Any:
    """The value of a reference, awaited on asyncio and trio; given up, the work behind it is cancelled."""
    arrived = anyio.Event()
    hand_over = soon()
    future = reference.future()
    future.add_done_callback(lambda _: hand_over(arrived.set))
    try:
        await arrived.wait()
    except BaseException:
        _ray().cancel(reference)
        raise
    return future.result()


def _ray(module: str = "") -> Any:
    """Ray, an extra that is imported where it is used; `RayEngine` says how to install it."""
    return importlib.import_module(f"ray{module}")


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
