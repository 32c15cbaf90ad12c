"""The engine on one HTTP server, probed when it opens and when it may have been replaced, and the
report of a probe.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio

from atts.concurrency import clock
from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import BaseEngine, Capability, EngineSpec, Tokenizer, opened
from atts.errors import OptionError, UnsupportedByEngine
from atts.servers.client import Client, Traffic
from atts.servers.dialect_client import DialectClient
from atts.servers.dialects import Dialect, Identity
from atts.servers.handshake import (
    Watch,
    claimed,
    describe,
    find_dialect,
    identify,
    open_tokenizer,
    require,
    wait_ready,
)
from atts.servers.options import DIALECTS, DialectName, RemoteOptions, is_url
from atts.servers.probing import Finding, Known, ServerProbe, refuse, same_as_before
from atts.servers.text_tokenizer import TextTokenizer

T = TypeVar("T")
R = TypeVar("R", SampleRequest, ScoreRequest)
_DEFAULTS = RemoteOptions()


class RemoteEngine(BaseEngine):
    """A server of any known dialect that keeps the promises of `atts.engine.Engine`.

    `needs` is what the caller will ask for: a server that cannot is refused when it opens, with the
    reason. The tokenizer is opened here, from the model's folder or name, unless one is given; the
    server must have the same.

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
        if not is_url(url):
            raise OptionError("url", f"{url!r} is not a URL such as http://HOST:PORT")
        super().__init__(name or model or url)
        self.url = url.rstrip("/")
        self.options = options
        self._dialect_name = dialect
        self._model = model
        self._wanted_tokenizer = tokenizer
        self._needs = needs
        self._client: Client | None = None
        self._dialect_client: DialectClient | None = None
        self._identity: Identity | None = None
        self._known: Known | None = None
        self._watch: Watch | None = None
        self._trusted_until = 0.0
        self._doubts_checked = 0
        self._checking = anyio.Lock()
        self._changed: UnsupportedByEngine | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the probe found when the engine opened."""
        return self._known.findings if self._known else ()

    @property
    def traffic(self) -> Traffic:
        """Attempts, retries and aborts so far."""
        return self._opened().traffic

    async def open(self) -> None:
        """Connect, wait while the server loads, learn who it is, and see it do what is needed.

        :raises UnsupportedByEngine: it cannot do what is needed.
        :raises FingerprintError: its tokenizer is another.
        :raises EngineUnavailable: it cannot be reached.
        """
        self._client = client = Client(self._name, self.url, self.options)
        self._clock = clock()
        self._watch = Watch(client)
        try:
            await wait_ready(client)
            dialect = await find_dialect(client, self._dialect_name)
            self._identity = identity = await identify(client, dialect, self._model)
            require(self._name, identity, claimed(dialect), self._needs)
            if self._tokenizer is None:
                self._tokenizer = await self._find_tokenizer(dialect, identity)
            self._spec = describe(self._name, dialect, identity, self._tokenizer)
            self._dialect_client = DialectClient(client, dialect, self._spec, self._tokenizer)
            self._known = await self._probe()
        except BaseException:
            await self._close()
            raise
        self._state = "open"
        self._idle_since = self._clock()
        self._trust(self._client.traffic.doubts)

    async def comes_back(self) -> bool:
        """Wait for a server that was lost; see `atts.engine.Returning`."""
        return self._watch is not None and self._state == "open" and await self._watch.comes_back()

    async def recheck(self) -> None:
        """Ask again who is there, and compare: a server that was restarted may be another.

        :raises UnsupportedByEngine: it is another engine, version, model or convention than was
            opened.
        :raises EngineUnavailable: it cannot be reached.
        """
        if self._state == "new":
            return await self.open()
        if self._changed is not None:
            raise self._changed
        assert self._known is not None, "an open engine was probed"
        assert self._identity is not None, "an open engine was identified"
        client = self._opened()
        requests = self._requests()
        doubts = client.traffic.doubts
        await wait_ready(client)
        now = await identify(client, requests.dialect, self._model)
        fresh = await ServerProbe(requests).again(self._known)
        try:
            same_as_before(self._name, self._identity, now, self._known, *fresh)
        except UnsupportedByEngine as changed:
            self._changed = changed  # for good: what it would answer belongs to another run
            raise
        self._trust(doubts)
        self._idle_since = self._clock()
        return None

    async def _sample(self, request: SampleRequest) -> Completion:
        return await self._trusted(self._requests().sample, request)

    async def _score(self, request: ScoreRequest) -> Scores:
        return await self._trusted(self._requests().score, request)

    async def _trusted(self, work: Callable[[R], Awaitable[T]], request: R) -> T:
        """Do it, sure before and after that the server is still the one that was opened."""
        assert self._watch is not None, "it is open"
        now = self._clock()
        traffic = self.traffic
        if self._counts.in_flight == 1 and now - self._idle_since >= self.options.idle_seconds:
            self._trusted_until = now  # it may be another by now
        if now >= self._trusted_until:
            await self._recheck(traffic.doubts)
        done = await work(request)
        self._watch.seen()
        if (doubts := traffic.doubts) > self._doubts_checked:
            # a connection broke, or a reply bore another name: who answered?
            await self._recheck(doubts)
        return done

    async def _recheck(self, doubts: int) -> None:
        """One task checks, and its answer holds for all who waited for it and for the doubts before
        it.
        """
        async with self._checking:
            if self._clock() >= self._trusted_until or self._doubts_checked < doubts:
                await self.recheck()

    def _trust(self, doubts: int) -> None:
        self._trusted_until = self._clock() + self.options.recheck_seconds
        self._doubts_checked = doubts

    def _admit(self, verb: Capability) -> None:
        super()._admit(verb)
        if self._changed is not None:
            raise UnsupportedByEngine(
                self._name, "the server changed while in use"
            ) from self._changed

    async def _find_tokenizer(self, dialect: Dialect, identity: Identity) -> Tokenizer:
        if dialect.speaks == "text":
            if self._wanted_tokenizer is not None:
                problem = f"{identity.engine} takes text: its tokens are its own affair"
                raise OptionError("tokenizer", f"{problem}; leave the setting out")
            return TextTokenizer()
        return await open_tokenizer(self._wanted_tokenizer, identity.tokenizer, self._name)

    async def _probe(self) -> Known:
        """See the server do what its kind claims; what it was seen not to do is taken from the
        spec.

        :raises UnsupportedByEngine: it does not do what is needed.
        """
        requests = self._requests()
        spec = self.spec
        known = await ServerProbe(requests).run()
        refuse(self._name, known.findings, self._needs)
        requests.sampled = known.sampled
        measured = "raw" if "score" in spec.capabilities else known.sampled
        broken = {found.needed for found in known.findings if found.answer == "no"}
        self._spec = requests.spec = replace(
            spec,
            logprobs=spec.logprobs if spec.logprobs == "none" else measured,
            capabilities=spec.capabilities - broken,
            findings=tuple(
                (found.name, f"{found.answer}: {found.seen}") for found in known.findings
            ),
        )
        return known

    async def _close(self) -> None:
        client = self._client
        self._client = None
        if client is not None:
            await client.aclose()

    def _opened(self) -> Client:
        return opened(self._client, self._name)

    def _requests(self) -> DialectClient:
        return opened(self._dialect_client, self._name)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Everything a probe found at a URL; prints as a list."""

    url: str
    spec: EngineSpec
    findings: tuple[Finding, ...]

    @property
    def can(self) -> tuple[str, ...]:
        """What pipelines may use it for: "sample", "score", "rate"; what scores a text can rate by
        one token.
        """
        found = self.spec.capabilities
        return tuple(sorted(found | {"rate"} if "score" in found else found))

    def as_json(self) -> dict[str, Any]:
        """One object."""
        spec = self.spec
        return {
            "url": self.url,
            "engine": spec.engine,
            "model": spec.model,
            "context_length": spec.context_length,
            "vocabulary": spec.vocabulary,
            "logprobs": spec.logprobs,
            "can": list(self.can),
            "findings": [
                {"name": f.name, "answer": f.answer, "seen": f.seen} for f in self.findings
            ],
        }

    def __str__(self) -> str:
        spec = self.spec
        head = f"{self.url}: {spec.engine}, {spec.model}, {spec.context_length} tokens; can {' and '.join(self.can)}"
        return "\n  ".join([head, *map(str, self.findings)])


async def probe(
    url: str,
    *,
    dialect: DialectName | Literal["auto"] = "auto",
    model: str = "",
    tokenizer: Tokenizer | str | Path | None = None,
    options: RemoteOptions = _DEFAULTS,
) -> ProbeReport:
    """Look at a server with a dozen short requests, some 200 where it speculates; only another
    tokenizer is refused.

    :raises EngineError: it cannot be reached, speaks nothing we know, or lacks the model.
    :raises FingerprintError: its tokenizer is another than the one given.
    """
    engine = RemoteEngine(
        url,
        dialect=dialect,
        model=model,
        name=url,
        tokenizer=tokenizer,
        needs=frozenset(),
        options=options,
    )
    async with engine:
        return ProbeReport(engine.url, engine.spec, engine.findings)
