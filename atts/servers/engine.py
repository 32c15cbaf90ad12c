"""Engine for one HTTP server, which is probed when it opens and checked again whenever it may have
changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from atts.concurrency import clock
from atts.core import Completion, SampleRequest, ScoreRequest, Scores, TokenIds
from atts.engine import (
    BaseEngine,
    Capability,
    Engine,
    EngineSpec,
    Tokenizer,
    check_score,
    opened,
)
from atts.errors import EngineError, EngineUnavailable, OptionError, UnsupportedByEngine
from atts.servers.addresses import AUTO, DIALECTS, read_servers
from atts.servers.chat import TextTokenizer
from atts.servers.client import Client, Traffic
from atts.servers.dialect import (
    Dialect,
    DialectClient,
    DraftCounts,
    Identity,
    LogProbs,
    Rater,
    Scorer,
    TopScorer,
)
from atts.servers.options import RemoteOptions, is_url
from atts.servers.pool import ReplicaPool
from atts.servers.probing import Finding, Known, Seen, ServerProbe, refuse_broken, require_unchanged

T = TypeVar("T")
R = TypeVar("R", SampleRequest, ScoreRequest)
_log = logging.getLogger("atts.servers")
_log.addHandler(logging.NullHandler())
_DEFAULTS = RemoteOptions()
# After atts has given up waiting for a lost server, calls fail at once. Only one call in this
# number of seconds first checks whether the server is back.
_LOOK_AGAIN_SECONDS = 5.0


def server_engine(
    scheme: str,
    rest: str,
    name: str,
    needs: frozenset[Capability],
    defaults: RemoteOptions = _DEFAULTS,
) -> Engine:
    """Create the engine for the address "SCHEME:REST", without opening it. `docs/servers.md` lists
    the settings.

    Several URLs, separated by commas, become one pool of replicas. The scheme "server" detects the
    dialect. The schemes "openai" and "chat" are for the chat API, whose URL ends with its version.
    An example is "openai:https://api.openai.com/v1/MODEL?key=OPENAI_API_KEY", where the environment
    variable OPENAI_API_KEY contains the key.

    `defaults` gives the options that the address does not set.

    >>> server_engine("vllm", "http://a:8000/Qwen/Qwen3-8B?in_flight=64", "target", frozenset({"score"})).url
    'http://a:8000'

    :raises OptionError: the address has no URL, or an unknown or impossible setting.
    """
    engines = [
        RemoteEngine(
            server.url,
            dialect=server.dialect,
            model=server.model,
            name=name,
            tokenizer=server.tokenizer,
            needs=needs,
            options=server.options,
        )
        for server in read_servers(scheme, rest, defaults)
    ]
    if len(engines) == 1:
        return engines[0]
    return ReplicaPool([(engine.url, engine) for engine in engines], name=name)


class RemoteEngine(BaseEngine):
    """An engine that sends its calls to an HTTP server of any known dialect; see
    `atts.engine.Engine`.

    `needs` lists the capabilities that the caller will use. Opening fails if the server lacks one
    of them. If `tokenizer` is None, the model's own tokenizer is loaded. It must be the same as the
    server's.

    :raises OptionError: the dialect is unknown, or the URL is not valid.
    """

    def __init__(
        self,
        url: str,
        *,
        dialect: str = AUTO,
        model: str = "",
        name: str = "",
        tokenizer: Tokenizer | str | Path | None = None,
        needs: frozenset[Capability] = frozenset({"sample"}),
        options: RemoteOptions = _DEFAULTS,
    ) -> None:
        if dialect not in (AUTO, *DIALECTS):
            raise OptionError("dialect", f"{dialect!r} is unknown", (AUTO, *DIALECTS), dialect)
        if not is_url(url):
            raise OptionError("url", f"{url!r} is not a URL such as http://HOST:PORT")
        super().__init__(name or model or url)
        self.url = url.rstrip("/")
        self.options = options
        self._dialect_name = dialect
        self._model = model
        self._wanted_tokenizer = tokenizer
        self._needs = needs
        # These attributes are None until the engine has been opened.
        self._client: Client | None = None
        self._dialect_client: DialectClient | None = None
        self._identity: Identity | None = None
        self._known: Known | None = None
        self._watch: Watch | None = None
        # After the time `_trusted_until`, atts must check again that the server has not changed.
        # `_doubts_checked` is the value of `Traffic.doubts` at the latest check.
        self._trusted_until = 0.0
        self._doubts_checked = 0
        # number of answers since atts last checked that the server still has the same model
        self._unchecked = 0
        self._checking = anyio.Lock()
        self._changed: UnsupportedByEngine | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the results of the tests that ran when the engine opened."""
        return self._known.findings if self._known else ()

    @property
    def traffic(self) -> Traffic:
        """Return the counts of the requests sent so far."""
        return self._opened().traffic

    async def open(self) -> None:
        """Connect to the server, wait until it has loaded its model, identify it, and probe the
        needed capabilities.

        :raises UnsupportedByEngine: if the server lacks a needed capability.
        :raises FingerprintError: if the server has another tokenizer.
        :raises EngineUnavailable: if the server cannot be reached.
        """
        self._client = client = Client(self._name, self.url, self.options)
        self._clock = clock()
        self._watch = Watch(client)
        try:
            await wait_ready(client)
            dialect = await find_dialect(client, self._dialect_name)
            self._identity = identity = await identify(client, dialect, self._model)
            require_capabilities(self._name, identity, claimed_by(dialect), self._needs)
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
        """Wait until a lost server is back, and return whether it is; see
        `atts.engine.Returning`.
        """
        if self._watch is None or self._state != "open":
            return False
        return await self._watch.comes_back()

    async def recheck(self) -> None:
        """Identify the server again, and check that it is the same as when the engine opened.

        A restarted server may have another model.

        :raises UnsupportedByEngine: the server's engine, version, model or log-prob convention has
            changed since the engine opened.
        :raises EngineUnavailable: the server cannot be reached.
        """
        if self._state == "new":
            await self.open()
            return
        if self._changed is not None:
            raise self._changed
        assert self._known is not None, "an open engine must have been probed"
        assert self._identity is not None, "an open engine must have identified its server"
        client = self._opened()
        requests = self._requests()
        # Read `doubts` before the checks. If a connection is lost during the checks, `doubts` grows,
        # and the server is checked again.
        doubts = client.traffic.doubts
        await wait_ready(client)
        identity = await identify(client, requests.dialect, self._model)
        self._compare(identity, await ServerProbe(requests).again(self._known))
        self._trust(doubts)
        self._idle_since = self._clock()

    def _compare(self, identity: Identity, seen: Seen) -> None:
        """Compare the server with its state when the engine opened. If it has changed, all later
        calls are refused too.

        :raises UnsupportedByEngine: the server has changed.
        """
        assert self._known is not None, "an open engine must have been probed"
        assert self._identity is not None, "an open engine must have identified its server"
        try:
            require_unchanged(self._name, self._identity, identity, self._known, seen)
        except UnsupportedByEngine as changed:
            # Keep the error, so that all later calls are refused. The answers of the changed server
            # must not be mixed with earlier answers of this run.
            self._changed = changed
            raise

    async def _glance(self) -> None:
        """Check with one short request that the server's model has not changed since the engine
        opened.

        A model may be replaced under the same name, without a lost connection or a pause.
        """
        async with self._checking:
            self._unchecked = 0
            assert self._known is not None, "an open engine must have been probed"
            assert self._identity is not None, "an open engine must have identified its server"
            seen = await ServerProbe(self._requests()).glance(self._known)
            self._compare(self._identity, seen)

    async def _sample(self, request: SampleRequest) -> Completion:
        return await self._trusted(self._requests().sample, request)

    async def _score(self, request: ScoreRequest) -> Scores:
        if request.entropies:
            lists = await self.top_tokens(request.prefix, request.suffix, _ENTROPY_TOP)
            return Scores(tuple(-least_entropy(list(row.values())) for row in lists))
        return await self._trusted(self._requests().score, request)

    async def top_tokens(
        self, prefix: TokenIds, suffix: TokenIds, top: int
    ) -> list[dict[int, float]]:
        """Return the `top` most likely tokens at each position of the suffix, as a dict from token
        id to log-prob.

        :raises UnsupportedByEngine: the server does not list likely tokens.
        """
        self._admit("score")
        request = ScoreRequest(prefix, suffix)
        check_score(request, self.spec)

        async def listed(asked: ScoreRequest) -> list[dict[int, float]]:
            return await self._requests().top_tokens(asked.prefix, asked.suffix, top)

        return await self._trusted(listed, request)

    async def _trusted(self, work: Callable[[R], Awaitable[T]], request: R) -> T:
        """Send a request, and return its answer only if the server is still known to be the same.

        The server is checked before the request if the last check or the last request was long ago.
        It is checked after the request if a connection was lost or a reply named another model. A
        shorter check follows after every `recheck_requests` answers.
        """
        watch = self._watch
        assert watch is not None, "the engine must be open"
        now = self._clock()
        traffic = self.traffic
        is_first = self._counts.in_flight == 1
        if is_first and now - self._idle_since >= self.options.idle_seconds:
            # The server may have been replaced while no request was running. No connection was lost
            # then, so a check is due now.
            self._trusted_until = now
        try:
            if now >= self._trusted_until:
                await self._recheck(traffic.doubts)
            result = await work(request)
            self._unchecked += 1
            if self._unchecked >= self.options.recheck_requests:
                # If another call is checking already, return this answer without waiting for the
                # check. A check would otherwise delay all calls.
                if not self._checking.locked():
                    await self._glance()
        except EngineUnavailable as error:
            if watch.has_given_up:
                raise watch.given_up(error) from error
            raise
        watch.seen()
        doubts = traffic.doubts
        if doubts > self._doubts_checked:
            # A connection was lost, or a reply had another model name. The answer is valid only if
            # a check finds that the server is the same.
            await self._recheck(doubts)
        return result

    async def _recheck(self, doubts: int) -> None:
        """Check the server again, unless another task has just done so. Concurrent callers wait
        for the same check.
        """
        async with self._checking:
            if self._clock() >= self._trusted_until or self._doubts_checked < doubts:
                await self.recheck()

    def _trust(self, doubts: int) -> None:
        self._trusted_until = self._clock() + self.options.recheck_seconds
        self._doubts_checked = doubts
        self._unchecked = 0

    def _admit(self, verb: Capability) -> None:
        super()._admit(verb)
        if self._changed is not None:
            raise UnsupportedByEngine(
                self._name, "the server changed while in use"
            ) from self._changed

    async def _find_tokenizer(self, dialect: Dialect, identity: Identity) -> Tokenizer:
        if dialect.speaks == "text":
            if self._wanted_tokenizer is not None:
                problem = f"{identity.engine} takes text, so it needs no tokenizer"
                raise OptionError("tokenizer", f"{problem}; leave out the tokenizer setting")
            return TextTokenizer()
        return await open_tokenizer(self._wanted_tokenizer, identity.tokenizer, self._name)

    async def _probe(self) -> Known:
        """Test each capability that the dialect claims.

        If a test fails, its capability is removed from the engine's spec.

        :raises UnsupportedByEngine: a needed capability fails.
        """
        requests = self._requests()
        spec = self.spec
        known = await ServerProbe(requests).run()
        refuse_broken(self._name, known.findings, self._needs)
        requests.hot_convention = known.hot_convention
        if spec.logprobs == "none":
            convention: LogProbs = "none"
        elif "score" in spec.capabilities:
            # A server that can score always gives raw log-probs: if it does not send them with
            # sampled tokens, atts requests them as scores.
            convention = "raw"
        else:
            convention = known.hot_convention
        broken = {finding.needed for finding in known.findings if finding.answer == "no"}
        findings = [
            (finding.name, f"{finding.answer}: {finding.seen}") for finding in known.findings
        ]
        self._spec = requests.spec = replace(
            spec,
            logprobs=convention,
            capabilities=spec.capabilities - broken,
            findings=tuple(findings),
            known_logprobs=known.fingerprint,
        )
        return known

    async def drafted(self) -> DraftCounts | None:
        """Return the counts of draft tokens that the server's own speculation has proposed and
        accepted so far.

        The result is None if the server does not speculate or does not report the counts.

        :raises EngineError: the engine is not open, or the server cannot be reached.
        """
        return await self._requests().dialect.drafted(self._opened())

    async def _close(self) -> None:
        client = self._client
        self._client = None
        if client is not None:
            await client.aclose()

    def _opened(self) -> Client:
        return opened(self._client, self._name)

    def _requests(self) -> DialectClient:
        return opened(self._dialect_client, self._name)


async def wait_ready(client: Client) -> None:
    """Wait as long as the server reports that it is loading its model. A server that refuses
    connections is not waited for.

    :raises EngineUnavailable: the server cannot be reached, or is still loading after
        `wait_seconds`.
    """
    now = clock()
    patience = client.options.wait_seconds
    deadline = now() + patience
    is_logged = False
    while True:
        reply = await client.look("/health")
        if reply.status in (401, 403):
            raise client.refusal(reply)
        if reply.status != 503:
            return
        if now() >= deadline:
            raise EngineUnavailable(
                client.name, f"{client.url} is still loading after {patience:g} s"
            )
        if not is_logged:
            message = "engine %s: %s is still loading; waiting up to %g s"
            _log.warning(message, client.name, client.url, patience)
            is_logged = True
        await anyio.sleep(min(1.0, patience / 10))


class Watch:
    """An object that waits for a lost server to come back, for at most `give_up_after` seconds
    after the loss.

    If several calls wait, only one polls the server, and the others use its result.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._now = clock()
        # The time at which the server was lost. None: as far as atts knows, it is not lost.
        self._lost_at: float | None = None
        self._looked_at = -math.inf
        self._found_at = -math.inf
        self._looking = anyio.Lock()
        self.has_given_up = False

    def seen(self) -> None:
        """Record that the server has answered, so it is not lost."""
        self._lost_at = None
        self.has_given_up = False

    def given_up(self, error: EngineError) -> EngineUnavailable:
        """Return the error for calls to a server that atts no longer waits for."""
        patience = self._client.options.give_up_after
        problem = f"{self._client.url} did not come back within {patience:g} s ({error.problem})"
        advice = "Start the server again, then repeat the command to continue the run"
        return EngineUnavailable(self._client.name, problem, advice)

    async def comes_back(self) -> bool:
        """Wait until the server is back. Return False if `give_up_after` seconds pass first."""
        asked_at = self._now()
        async with self._looking:
            if self._found_at >= asked_at:
                return True
            if self._lost_at is None:
                self._lost_at = asked_at
            return await self._wait(self._lost_at)

    async def _wait(self, lost_at: float) -> bool:
        patience = self._client.options.give_up_after
        if self.has_given_up and self._now() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return False
        is_logged = self.has_given_up
        while not await self._is_there():
            if self._now() - lost_at >= patience:
                if not self.has_given_up:
                    self._log("did not come back within %g s", patience)
                self.has_given_up = True
                return False
            if not is_logged:
                self._log("is lost; waiting up to %g s for it to come back", patience)
                is_logged = True
            await anyio.sleep(min(1.0, patience / 10))
        self._found_at = self._now()
        if is_logged:
            self._log("is back after %.0f s", self._found_at - lost_at)
        if self.has_given_up:
            # Forget that atts gave up. If the server is lost again, atts waits up to
            # `give_up_after` seconds again.
            self.seen()
        return True

    def _log(self, message: str, seconds: float) -> None:
        _log.warning(f"engine %s: %s {message}", self._client.name, self._client.url, seconds)

    async def _is_there(self) -> bool:
        self._looked_at = self._now()
        try:
            # A server that is still loading replies with status 503. If the server is lost, a
            # gateway replies with 502 or 504.
            return (await self._client.look("/health")).status < 500
        except EngineError:
            return False


async def find_dialect(client: Client, name: str) -> Dialect:
    """Return the dialect with this name. For "auto", request the path `found_at` of each dialect in
    turn, and return the first dialect whose path the server has.

    :raises UnsupportedByEngine: if the server has no known dialect.
    """
    if name != AUTO:
        return DIALECTS[name](client.options)
    refused = None
    for kind in DIALECTS.values():
        if not kind.found_at:
            continue
        reply = await client.look(kind.found_at)
        if reply.status == 200:
            return kind(client.options)
        if reply.status in (401, 403):
            refused = refused or reply
    if refused is not None:
        raise client.refusal(refused)
    advice = f"Check the URL, or name the server's dialect: {', '.join(DIALECTS)}"
    raise UnsupportedByEngine(
        client.name, f"atts does not recognise the server at {client.url}", advice
    )


async def identify(client: Client, dialect: Dialect, model: str) -> Identity:
    """Request the server's identity with the requests of its dialect.

    :raises UnsupportedByEngine: if the server has another dialect, or lacks the model.
    """
    try:
        return await dialect.identify(client, model)
    except ValueError as error:
        raise UnsupportedByEngine(
            client.name,
            f"the server at {client.url} does not speak the dialect {dialect.name}",
            "Check whether the server speaks another dialect",
        ) from error


def describe(name: str, dialect: Dialect, identity: Identity, tokenizer: Tokenizer) -> EngineSpec:
    """Build the engine spec from the server's identity and dialect. It lists all capabilities that
    the dialect claims, because they have not been tested yet.

    :raises UnsupportedByEngine: the server does not report its context length.
    """
    if identity.context_length <= dialect.spare:
        raise UnsupportedByEngine(name, "the server does not report its context length")
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
        capabilities=claimed_by(dialect),
    )


# number of likely tokens to request per position; vLLM allows at most 20 by default
# (--max-logprobs)
_ENTROPY_TOP = 20


def least_entropy(logprobs: Sequence[float]) -> float:
    """Return a lower bound, in nats, on the entropy of a distribution, given its most likely
    tokens.

    The entropy is lowest if a single other token has all the remaining probability.

    >>> round(least_entropy([math.log(0.5), math.log(0.25)]), 4)
    1.0397
    """
    masses = [math.exp(value) for value in logprobs]
    masses.append(1 - math.fsum(masses))
    return -math.fsum(mass * math.log(mass) for mass in masses if mass > 0)


def claimed_by(dialect: Dialect) -> frozenset[Capability]:
    """Return the capabilities that a dialect claims for its servers, before any test."""
    capabilities: set[Capability] = {"sample"}
    if isinstance(dialect, TopScorer):
        capabilities.add("entropy")
    if isinstance(dialect, Scorer):
        capabilities.add("score")
    if isinstance(dialect, Rater):
        capabilities.add("rate")
    if dialect.closes_thinking:
        capabilities.add("thinking")
    return frozenset(capabilities)


def require_capabilities(
    name: str, identity: Identity, can: frozenset[Capability], needs: frozenset[Capability]
) -> None:
    """Check that the needed capabilities are among those that the dialect claims.

    A server that can score can also rate.

    :raises UnsupportedByEngine: if a capability is missing; the message names the missing
        capabilities.
    """
    missing = needs - can
    if "score" in can:
        missing -= {"rate"}
    if missing:
        problem = (
            f"{identity.engine} cannot {' or '.join(sorted(missing))}, which the pipeline needs"
        )
        raise UnsupportedByEngine(name, problem, "Serve this model with vLLM or SGLang")


async def open_tokenizer(wanted: Tokenizer | str | Path | None, hint: str, name: str) -> Tokenizer:
    """Return the given tokenizer, or load it if only its name or folder is given.

    `hint` is the tokenizer that the server names. It is loaded if `wanted` is None.

    :raises ModelLoadError: the tokenizer cannot be found.
    """
    if wanted is not None and not isinstance(wanted, str | Path):
        return wanted
    return await to_thread.run_sync(_load_tokenizer, str(wanted or hint), name)


def _load_tokenizer(model: str, name: str) -> Tokenizer:
    # These modules import transformers, which takes seconds. They are not needed for servers that
    # take text.
    from atts.models.folders import find_tokenizer
    from atts.models.tokenizers import ModelTokenizer

    return ModelTokenizer(find_tokenizer(model, name), name)


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Return the size of a tokenizer's vocabulary.

    :raises OptionError: the tokenizer has no attribute `vocabulary`.
    """
    vocabulary: Any = getattr(tokenizer, "vocabulary", None)
    if not isinstance(vocabulary, int):
        raise OptionError(
            "tokenizer",
            f"{type(tokenizer).__name__} needs an integer attribute `vocabulary`, its number of ids",
        )
    return vocabulary


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The results of probing a server. `str` formats them as a readable list."""

    url: str
    spec: EngineSpec
    findings: tuple[Finding, ...]

    @property
    def can(self) -> tuple[str, ...]:
        """Return the capabilities that pipelines may use on this server, such as "sample", "score"
        and "rate".
        """
        capabilities: set[str] = set(self.spec.capabilities)
        if "score" in capabilities:
            # A rating needs only the score of a single token, so a server that can score can also
            # rate.
            capabilities.add("rate")
        return tuple(sorted(capabilities))

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        spec = self.spec
        findings = [
            {"name": finding.name, "answer": finding.answer, "seen": finding.seen}
            for finding in self.findings
        ]
        return {
            "url": self.url,
            "engine": spec.engine,
            "model": spec.model,
            "context_length": spec.context_length,
            "vocabulary": spec.vocabulary,
            "logprobs": spec.logprobs,
            "can": list(self.can),
            "findings": findings,
        }

    def __str__(self) -> str:
        spec = self.spec
        can = " and ".join(self.can)
        head = f"{self.url}: {spec.engine}, {spec.model}, {spec.context_length} tokens; can {can}"
        return "\n  ".join([head, *map(str, self.findings)])


async def probe(
    url: str,
    *,
    dialect: str = AUTO,
    model: str = "",
    tokenizer: Tokenizer | str | Path | None = None,
    options: RemoteOptions = _DEFAULTS,
) -> ProbeReport:
    """Test a server with about a dozen short requests, or about 200 if it speculates.

    A failed test only appears in the report, but a tokenizer that differs from the given one raises
    an error.

    :raises EngineError: the server cannot be reached, speaks an unknown dialect, or lacks the
        model.
    :raises FingerprintError: the server's tokenizer differs from the given one.
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
