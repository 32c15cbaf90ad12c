"""Engine on one HTTP server, probed when it opens and again when it may have been replaced."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
from anyio import to_thread

from atts.concurrency import clock
from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import BaseEngine, Capability, EngineSpec, Tokenizer, opened
from atts.errors import EngineError, EngineUnavailable, OptionError, UnsupportedByEngine
from atts.servers.chat import ChatDialect, TextTokenizer
from atts.servers.client import Client, Traffic
from atts.servers.dialect import Dialect, DialectClient, Identity, Rater, Scorer
from atts.servers.llamacpp import LlamaCppDialect
from atts.servers.ollama import OllamaDialect
from atts.servers.options import DIALECTS, DialectName, RemoteOptions, is_url
from atts.servers.probing import Finding, Known, ServerProbe, refuse, same_as_before
from atts.servers.sglang import SglangDialect
from atts.servers.vllm import VllmDialect

_log = logging.getLogger("atts.servers")
_log.addHandler(logging.NullHandler())
_LOOK_AGAIN_SECONDS = 5.0  # at a server that did not come back in time
_AUTO = (
    ("/server_info", "sglang"),
    ("/props", "llamacpp"),
    ("/version", "vllm"),
    ("/api/version", "ollama"),
)
_KNOWN: Mapping[str, type[Dialect]] = {
    kind.name: kind
    for kind in (VllmDialect, SglangDialect, LlamaCppDialect, OllamaDialect, ChatDialect)
}


async def wait_ready(client: Client) -> None:
    """Wait while the server says that it is loading.

    :raises EngineUnavailable: it cannot be reached, or still loads after `wait_seconds`.
    """
    now = clock()
    patience = client.options.wait_seconds
    told = False
    give_up = now() + patience
    while (reply := await client.look("/health")).status == 503:
        if now() >= give_up:
            raise EngineUnavailable(
                client.name, f"{client.url} is still loading after {patience:g} s"
            )
        if not told:
            _log.warning(
                "engine %s: %s is still loading; waiting up to %g s",
                client.name,
                client.url,
                patience,
            )
            told = True
        await anyio.sleep(min(1.0, patience / 10))
    if reply.status in (401, 403):
        raise client.refusal(reply)


class Watch:
    """Waits for a server that was lost; of the calls that ask at once, one looks and the others
    hear what it saw.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._now = clock()
        self._lost_at: float | None = None
        self._looked_at = 0.0
        self._one = anyio.Lock()

    def seen(self) -> None:
        """It has answered."""
        self._lost_at = None

    async def comes_back(self) -> bool:
        """Whether it is there, or there again within `wait_seconds` of its loss."""
        was_lost = self._lost_at is not None
        async with self._one:
            if self._lost_at is None and (was_lost or await self._is_there()):
                return True
            if self._lost_at is None:
                self._lost_at = self._now()
                self._say(
                    "is lost; waiting up to %g s for it to come back",
                    self._client.options.wait_seconds,
                )
            return await self._wait(self._lost_at, self._client.options.wait_seconds)

    async def _wait(self, since: float, patience: float) -> bool:
        now = self._now
        if now() - since >= patience and now() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return False  # said before
        while not await self._is_there():
            if now() - since >= patience:
                self._say("did not come back within %g s", patience)
                return False
            await anyio.sleep(min(1.0, patience / 10))
        self._say("is back after %.0f s", now() - since)
        self._lost_at = None
        return True

    def _say(self, words: str, seconds: float) -> None:
        _log.warning(f"engine %s: %s {words}", self._client.name, self._client.url, seconds)

    async def _is_there(self) -> bool:
        self._looked_at = self._now()
        try:
            return (await self._client.look("/health")).status != 503
        except EngineError:
            return False


async def find_dialect(client: Client, name: str) -> Dialect:
    """The dialect of that name; "auto" asks each in turn.

    :raises UnsupportedByEngine: nothing known answers.
    """
    if name != "auto":
        return _KNOWN[name](client.options)
    replies = [(await client.look(path), candidate) for path, candidate in _AUTO]
    for reply, candidate in replies:
        if reply.status == 200:
            return _KNOWN[candidate](client.options)
    for reply, _ in replies:
        if reply.status in (401, 403):
            raise client.refusal(reply)
    advice = f"Is the URL right? Or say which dialect it speaks: {', '.join(DIALECTS)}"
    raise UnsupportedByEngine(client.name, f"nothing at {client.url} is known", advice)


async def identify(client: Client, dialect: Dialect, model: str) -> Identity:
    """Who answers.

    :raises UnsupportedByEngine: it speaks another dialect, or lacks the model.
    """
    try:
        return await dialect.identify(client, model)
    except ValueError as error:
        advice = "Is it another kind of server?"
        raise UnsupportedByEngine(
            client.name, f"{client.url} does not speak {dialect.name}", advice
        ) from error


def describe(name: str, dialect: Dialect, identity: Identity, tokenizer: Tokenizer) -> EngineSpec:
    """The server as an engine, before anything was seen of what it claims.

    :raises UnsupportedByEngine: it does not say how long its context is.
    """
    if identity.context_length <= dialect.spare:
        raise UnsupportedByEngine(name, "it does not say how long its context is")
    end: Any = getattr(tokenizer, "end_id", None)
    return EngineSpec(
        name=name,
        model=identity.model,
        tokenizer=tokenizer.digest,
        chat_template=getattr(tokenizer, "template_digest", ""),
        context_length=identity.context_length - dialect.spare,
        end_ids=tuple(getattr(tokenizer, "end_ids", () if end is None else (end,))),
        vocabulary=vocabulary_of(tokenizer),
        engine=identity.engine,
        dtype="of the server",
        logprobs=dialect.logprobs,
        capabilities=claimed(dialect),
    )


def claimed(dialect: Dialect) -> frozenset[Capability]:
    """What servers of this kind can do at best."""
    optional: dict[Capability, bool] = {
        "score": isinstance(dialect, Scorer),
        "rate": isinstance(dialect, Rater),
    }
    return frozenset({"sample", *(capability for capability, there in optional.items() if there)})


def require(
    name: str, identity: Identity, can: frozenset[Capability], needs: frozenset[Capability]
) -> None:
    """Refuse a kind of server that cannot do what is needed; one that scores can rate.

    :raises UnsupportedByEngine: naming what it lacks.
    """
    missing = needs - can - ({"rate"} if "score" in can else frozenset())
    if missing:
        problem = (
            f"{identity.engine} cannot {' or '.join(sorted(missing))}, which the pipeline needs"
        )
        raise UnsupportedByEngine(name, problem, "Serve this model with vLLM or SGLang")


async def open_tokenizer(wanted: Tokenizer | str | Path | None, hint: str, name: str) -> Tokenizer:
    """The tokenizer that was given, or the one at the folder or hub id that was named or that the
    server named.

    :raises ModelLoadError: there is none.
    """
    if wanted is not None and not isinstance(wanted, str | Path):
        return wanted
    return await to_thread.run_sync(_load_tokenizer, str(wanted or hint), name)


def _load_tokenizer(model: str, name: str) -> Tokenizer:
    from atts.models.folders import find_tokenizer
    from atts.models.tokenizers import ModelTokenizer

    return ModelTokenizer(find_tokenizer(model, name), name)


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """How many ids there are.

    :raises OptionError: the tokenizer does not say.
    """
    found: Any = getattr(tokenizer, "vocabulary", None)
    if not isinstance(found, int):
        raise OptionError(
            "tokenizer",
            f"{type(tokenizer).__name__} has no attribute `vocabulary`, the number of its ids",
        )
    return found


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
