"""One engine in one Ray actor, asked from any event loop, and replaced when it is lost."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine, EngineCounters, EngineSpec, EngineStats, Tokenizer, check_sample, check_score
from atts.errors import EngineError, EngineUnavailable, FingerprintError, OptionError, UnsupportedByEngine
from atts.remote.host import Failure, Host
from atts.remote.pace import Pace
from atts.tasks import clock, shielded, soon

T = TypeVar("T")
_CLOSE_SECONDS = 10.0
_PATIENCE = 2.0  # for a replacement that is starting: whoever asked goes elsewhere meanwhile


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


class ActorReplica:
    """An `atts.remote.Replica` whose engine lives in an actor; `recheck` opens it, and starts another when it died."""

    def __init__(self, make: Callable[[], Engine], name: str, options: RayOptions) -> None:
        self._make = make
        self._name = name
        self._options = options
        self._state: Literal["new", "open", "closed"] = "new"
        self._handle: Any = None
        self._opening: Any = None  # the reference to what `Host.open` will say
        self._spec: EngineSpec | None = None
        self._tokenizer: Tokenizer | None = None
        self._pace: Pace | None = None
        self._counts = EngineCounters()
        self._busy_since = 0.0
        self._clock: Callable[[], float] = lambda: 0.0  # the loop's, once there is one

    @property
    def spec(self) -> EngineSpec:
        """Known once the actor is open."""
        if self._spec is None:
            raise EngineUnavailable(self._name, "it is not open yet", "Call it inside `async with engine:`")
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's, a copy."""
        if self._tokenizer is None:
            raise EngineUnavailable(self._name, "it is not open yet", "Call it inside `async with engine:`")
        return self._tokenizer

    @property
    def handle(self) -> Any:
        """Ray's own handle of the actor, such as `ray.kill` takes; None before it was started."""
        return self._handle

    def stats(self) -> EngineStats:
        """Counters so far, of what was asked from here."""
        counts = self._counts
        return counts.snapshot(busy_for=self._clock() - self._busy_since if counts.in_flight else 0.0)

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
            raise EngineUnavailable(self._name, "it is closed", "Make a new one")
        if self._pace is None:
            self._clock = clock()
            self._pace = Pace(self._options.in_flight, self._clock)
        if self._handle is None:
            self.start()
        patience = self._options.open_seconds if self._state == "new" else _PATIENCE
        with anyio.move_on_after(patience):
            return await self._open()
        wanted = f"{self._options.cpus:g} cores and {self._options.gpus:g} GPUs"
        advice = f"Has the cluster {wanted} free for each actor? See `ray status`"
        raise EngineUnavailable(self._name, f"its actor is not there after {patience:g} s", advice)

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids; see `atts.engine.Engine`."""
        self._admit("sample")
        check_sample(request, self.spec)
        done: Completion = await self._ask("sample", request)
        self._counts.sampled(request, done)
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix; see `atts.engine.Engine`."""
        self._admit("score")
        check_score(request, self.spec)
        done: Scores = await self._ask("score", request)
        self._counts.scored(request, done)
        return done

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
                    await _arrival(handle.close.remote())
                except _ray(".exceptions").RayError:
                    pass  # it is gone, which is what was wanted
            _ray().kill(handle)
        return None

    async def _open(self) -> None:

        try:
            said = await _arrival(self._opening if self._state == "new" else self._handle.open.remote())
        except _ray(".exceptions").RayError as error:
            self.start()
            raise EngineUnavailable(self._name, f"its actor died ({_short(error)})", "Another is started") from error
        if isinstance(said, Failure):
            raise said.error(self._name)
        spec, tokenizer = said
        if self._spec is not None and (ours := self._spec.fingerprint()) != (theirs := spec.fingerprint()):
            differences = [(name, ours.get(name), theirs.get(name)) for name in ours if ours[name] != theirs.get(name)]
            raise FingerprintError(self._name, differences, "Every node must have the same model and versions")
        self._spec, self._tokenizer, self._state = spec, tokenizer, "open"

    async def _ask(self, method: Literal["sample", "score"], request: SampleRequest | ScoreRequest) -> Any:

        counts, pace = self._counts, self._pace
        assert pace is not None, "an open replica has a pace"
        counts.requests += 1
        if not counts.in_flight:
            self._busy_since = self._clock()
        counts.in_flight += 1
        try:
            await pace.enter()
            try:
                said = await _arrival(getattr(self._handle, method).remote(request))
            finally:
                pace.leave()
            if isinstance(said, Failure):
                raise said.error(self._name)
            return said
        except anyio.get_cancelled_exc_class():
            counts.cancelled += 1
            raise
        except _ray(".exceptions").RayActorError as error:
            counts.failed += 1
            raise EngineUnavailable(self._name, f"its actor died ({_short(error)})") from error
        except _ray(".exceptions").RayError as error:
            counts.failed += 1
            raise EngineError(self._name, f"its actor failed ({_short(error)})") from error
        except EngineError:
            counts.failed += 1
            raise
        finally:
            counts.in_flight -= 1
            if not counts.in_flight:
                counts.busy_seconds += self._clock() - self._busy_since

    def _admit(self, verb: Literal["sample", "score"]) -> None:
        if self._state != "open":
            state = "closed" if self._state == "closed" else "not open yet"
            raise EngineUnavailable(self._name, f"it is {state}", "Call it inside `async with engine:`")
        if verb not in self.spec.capabilities:
            raise UnsupportedByEngine(self._name, f"{self.spec.engine} cannot {verb}")


async def _arrival(reference: Any) -> Any:
    """What a reference comes to, awaited on asyncio and trio; given up, the work behind it is cancelled."""

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
