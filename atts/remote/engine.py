"""One server as an engine: opened by asking who it is, believed only where it was seen to do what it says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Capability, EngineCounters, EngineSpec, EngineStats, Tokenizer, check_sample, check_score
from atts.errors import EngineError, EngineUnavailable, OptionError, UnsupportedByEngine
from atts.remote.client import Client, Traffic
from atts.remote.dialects import Dialect, Identity
from atts.remote.exchange import Exchange
from atts.remote.opening import claimed, describe, find_dialect, identify, require, wait_ready
from atts.remote.options import DIALECTS, DialectName, RemoteOptions
from atts.remote.probing import Finding, Known, Prober, refuse, same_as_before
from atts.remote.text import TextTokenizer
from atts.remote.tokenizer import open_tokenizer
from atts.tasks import clock

T = TypeVar("T")
R = TypeVar("R", SampleRequest, ScoreRequest)
_DEFAULTS = RemoteOptions()


class RemoteEngine:
    """A server of any known dialect that keeps the promises of `atts.engine.Engine`.

    `needs` is what the caller will ask for: a server that cannot is refused when it opens, with the reason. The
    tokenizer is opened here, from the model's folder or name, unless one is given; the server must have the same.

    :raises OptionError: an unknown dialect.
    """

    def __init__(
        self,
        url: str,
        *,
        dialect: DialectName | Literal["auto"] = "auto",
        model: str = "",
        name: str = "",
        tokenizer: Tokenizer | str | Path | None = None,
        needs: frozenset[Capability] = frozenset({"sample"}),
        options: RemoteOptions = _DEFAULTS,
    ) -> None:
        if dialect not in ("auto", *DIALECTS):
            raise OptionError("dialect", f"{dialect!r} is unknown", ("auto", *DIALECTS))
        if not url.startswith(("http://", "https://")):
            raise OptionError("url", f"{url!r} is not a URL; it begins with http:// or https://")
        self.url = url.rstrip("/")
        self.options = options
        self._dialect_name = dialect
        self._model = model
        self._name = name or model or url
        self._wanted_tokenizer = tokenizer
        self._needs = needs
        self._state: Literal["new", "open", "closed"] = "new"
        self._client: Client | None = None
        self._exchange: Exchange | None = None
        self._identity: Identity | None = None
        self._tokenizer: Tokenizer | None = None
        self._spec: EngineSpec | None = None
        self._known: Known | None = None
        self._counts = EngineCounters()
        self._trusted_until = 0.0
        self._lost_checked = 0
        self._idle_since = 0.0
        self._clock: Callable[[], float] = lambda: 0.0  # the loop's, once there is one
        self._checking = anyio.Lock()
        self._changed: UnsupportedByEngine | None = None
        self._busy_since = 0.0

    @property
    def spec(self) -> EngineSpec:
        """Known once the engine is open."""
        if self._spec is None:
            raise EngineUnavailable(self._name, "it is not open yet", "Call it inside `async with engine:`")
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, in this process; the server's was compared with it."""
        if self._tokenizer is None:
            raise EngineUnavailable(self._name, "it is not open yet", "Call it inside `async with engine:`")
        return self._tokenizer

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the probe found when the engine opened."""
        return self._known.findings if self._known else ()

    @property
    def traffic(self) -> Traffic:
        """Attempts, retries and aborts so far."""
        return self._opened().traffic

    def stats(self) -> EngineStats:
        """Counters so far, as seen from here; busy is the time in which at least one request was under way."""
        counts = self._counts
        return counts.snapshot(busy_for=self._clock() - self._busy_since if counts.in_flight else 0.0)

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the ids; see `atts.engine.Engine`."""
        self._admit("sample")
        check_sample(request, self.spec)
        done = await self._count(self._exchanging().sample, request)
        self._counts.sampled(request, done)
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix; see `atts.engine.Engine`."""
        self._admit("score" if len(request.suffix) != 1 or "rate" not in self.spec.capabilities else "rate")
        check_score(request, self.spec)
        done = await self._count(self._exchanging().score, request)
        self._counts.scored(request, done)
        return done

    async def __aenter__(self) -> Self:
        if self._state == "closed":
            raise EngineUnavailable(self._name, "it is closed", "Make a new one")
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        self._state = "closed"
        await self._close()
        return None

    async def open(self) -> None:
        """Connect, wait while the server loads, learn who it is, and see it do what is needed.

        :raises UnsupportedByEngine: it cannot do what is needed.
        :raises FingerprintError: its tokenizer is another.
        :raises EngineUnavailable: it cannot be reached.
        """
        self._client = client = Client(self._name, self.url, self.options)
        self._clock = clock()
        try:
            await wait_ready(client)
            dialect = await find_dialect(client, self._dialect_name)
            self._identity = identity = await identify(client, dialect, self._model)
            require(self._name, identity, claimed(dialect), self._needs)
            if self._tokenizer is None:
                self._tokenizer = await self._find_tokenizer(dialect, identity)
            self._spec = describe(self._name, dialect, identity, self._tokenizer)
            self._exchange = Exchange(client, dialect, self._spec, self._tokenizer)
            self._known = await self._probe()
        except BaseException:
            await self._close()
            raise
        self._state = "open"
        self._idle_since = self._clock()
        self._trust(self._client.traffic.lost)

    async def recheck(self) -> None:
        """Ask again who is there, and compare: a server that was restarted may be another.

        :raises UnsupportedByEngine: it is another engine, version, model or convention than was opened.
        :raises EngineUnavailable: it cannot be reached.
        """
        if self._state == "new":
            return await self.open()
        if self._changed is not None:
            raise self._changed
        assert self._known is not None, "an open engine was probed"
        assert self._identity is not None, "an open engine was identified"
        lost = self._opened().traffic.lost
        client = self._opened()
        await wait_ready(client)
        now = await identify(client, self._exchanging().dialect, self._model)
        fresh = await self._prober().canary(self._known)
        try:
            same_as_before(self._name, self._identity, now, self._known, fresh)
        except UnsupportedByEngine as changed:
            self._changed = changed  # for good: what it would answer belongs to another run
            raise
        self._trust(lost)
        self._idle_since = self._clock()
        return None

    async def _count(self, work: Callable[[R], Awaitable[T]], request: R) -> T:
        """Count a request, and be sure before and after that the server is still the one that was opened."""
        counts = self._counts
        counts.requests += 1
        now, traffic = self._clock(), self._opened().traffic
        if not counts.in_flight:
            self._busy_since = now
            if now - self._idle_since >= self.options.idle_seconds:
                self._trusted_until = now  # it may be another by now
        counts.in_flight += 1
        try:
            if now >= self._trusted_until:
                await self._recheck(traffic.lost)
            done = await work(request)
            if (lost := traffic.lost) > self._lost_checked:
                await self._recheck(lost)  # a connection broke meanwhile: who answered?
            return done
        except anyio.get_cancelled_exc_class():
            counts.cancelled += 1
            raise
        except EngineError:
            counts.failed += 1
            raise
        finally:
            counts.in_flight -= 1
            if not counts.in_flight:
                self._idle_since = self._clock()
                counts.busy_seconds += self._idle_since - self._busy_since

    async def _recheck(self, lost: int) -> None:
        """One task checks, and its answer holds for all who waited for it and for the connections lost before it."""
        async with self._checking:
            if self._clock() >= self._trusted_until or self._lost_checked < lost:
                await self.recheck()

    def _trust(self, lost: int) -> None:
        self._trusted_until = self._clock() + self.options.recheck_seconds
        self._lost_checked = lost

    def _admit(self, verb: Capability) -> None:
        if self._state != "open":
            state = "closed" if self._state == "closed" else "not open yet"
            raise EngineUnavailable(self._name, f"it is {state}", "Call it inside `async with engine:`")
        if verb not in self.spec.capabilities:
            raise UnsupportedByEngine(self._name, f"{self.spec.engine} cannot {verb}")
        if self._changed is not None:
            raise UnsupportedByEngine(self._name, "the server changed while in use") from self._changed

    async def _find_tokenizer(self, dialect: Dialect, identity: Identity) -> Tokenizer:
        if dialect.speaks == "text":
            if self._wanted_tokenizer is not None:
                problem = f"{identity.engine} takes text: its tokens are its own affair"
                raise OptionError("tokenizer", f"{problem}; leave the setting out")
            return TextTokenizer()
        return await open_tokenizer(self._wanted_tokenizer, identity.tokenizer, self._name)

    async def _probe(self) -> Known:
        """See the server do what its kind claims; what it was seen not to do is taken from the spec.

        :raises UnsupportedByEngine: it does not do what is needed.
        """
        known = await self._prober().run()
        refuse(self._name, known.findings, self._needs)
        exchange, spec = self._exchanging(), self.spec
        exchange.sampled = known.sampled
        logprobs = (
            spec.logprobs if spec.logprobs == "none" else "raw" if "score" in spec.capabilities else known.sampled
        )
        broken = {found.needed for found in known.findings if found.answer == "no"}
        seen = tuple((found.name, f"{found.answer}: {found.seen}") for found in known.findings)
        self._spec = exchange.spec = replace(
            spec, logprobs=logprobs, capabilities=spec.capabilities - broken, findings=seen
        )
        return known

    def _prober(self) -> Prober:
        exchange = self._exchanging()
        return Prober(exchange, self.spec, self.tokenizer)

    async def _close(self) -> None:
        client, self._client = self._client, self._client
        if client is not None:
            await client.aclose()

    def _opened(self) -> Client:
        if self._client is None:
            raise EngineUnavailable(self._name, "it is not open yet", "Call it inside `async with engine:`")
        return self._client

    def _exchanging(self) -> Exchange:
        assert self._exchange is not None, "an open engine knows how to speak"
        return self._exchange
