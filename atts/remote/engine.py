"""One server as an engine: opened by asking who it is, believed only where it was seen to do what it says."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio

from atts.core import Completion, Ending, SampleRequest, ScoreRequest, Scores
from atts.engine import Capability, EngineCounters, EngineSpec, EngineStats, Tokenizer, check_sample, check_score
from atts.errors import BadReply, EngineError, EngineUnavailable, OptionError, UnsupportedByEngine
from atts.remote.client import Client, Traffic
from atts.remote.dialects import Dialect, Identity, Sampled
from atts.remote.llamacpp import LlamaCppDialect
from atts.remote.options import DIALECTS, DialectName, RemoteOptions
from atts.remote.probing import Finding, Hands, Known, Prober, refuse, same_as_before
from atts.remote.settling import check_sampled, place_of_end, settle
from atts.remote.sglang import SglangDialect
from atts.remote.tokenizer import ends_of, open_tokenizer, vocabulary_of
from atts.remote.vllm import VllmDialect
from atts.tasks import clock, collect

T = TypeVar("T")
_log = logging.getLogger("atts.remote")
_log.addHandler(logging.NullHandler())
_DEFAULTS = RemoteOptions()
_AUTO = (("/server_info", "sglang"), ("/props", "llamacpp"), ("/version", "vllm"))


class RemoteEngine:
    """A vLLM, SGLang or llama.cpp server that keeps the promises of `atts.engine.Engine`.

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
        self._dialect: Dialect | None = None
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
        done = await self._count(partial(self._sample, request))
        counts = self._counts
        counts.sampled_tokens += len(done.ids)
        counts.cached_tokens += done.cached_tokens
        counts.prefilled_tokens += max(0, len(request.ids) - done.cached_tokens)
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix; see `atts.engine.Engine`."""
        self._admit("score")
        check_score(request, self.spec)
        done = await self._count(partial(self._score, request))
        counts = self._counts
        counts.scored_tokens += len(done.logprobs)
        counts.cached_tokens += done.cached_tokens
        counts.prefilled_tokens += max(0, len(request.prefix) + len(request.suffix) - done.cached_tokens)
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
        self._client = Client(self._name, self.url, self.options)
        self._clock = clock()
        try:
            await self._wait_ready()
            self._dialect = await self._find_dialect()
            identity = await self._identify()
            if self._tokenizer is None:
                self._tokenizer = await open_tokenizer(self._wanted_tokenizer, identity.tokenizer, self._name)
            self._spec = self._describe(identity)
            self._known = await self._probe()
            self._spec = replace(self._spec, logprobs="raw" if self._dialect.can_score else self._known.sampled)
        except BaseException:
            await self._close()
            raise
        self._identity = identity
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
        await self._wait_ready()
        identity = await self._identify()
        fresh = await self._prober().canary(self._known)
        try:
            same_as_before(self._name, self._identity, identity, self._known, fresh)
        except UnsupportedByEngine as changed:
            self._changed = changed  # for good: what it would answer belongs to another run
            raise
        self._trust(lost)
        self._idle_since = self._clock()
        return None

    async def _ask_sample(self, request: SampleRequest) -> Sampled:
        """A completion as sent, believable as far as it goes."""
        return (await self._ask_ended(request))[0]

    async def _ask_ended(self, request: SampleRequest) -> tuple[Sampled, int, Ending]:
        """The same, with the place where it ends and why; one that ends for no reason is asked for again."""
        dialect, spec = self._spoken(), self.spec
        wire = replace(request, stop_ids=(*request.stop_ids, *spec.end_ids))

        def read(reply: Any) -> tuple[Sampled, int, Ending]:
            sampled = self._read(lambda: dialect.sampled(reply, request))
            check_sampled(sampled, request, spec)
            return (sampled, *place_of_end(sampled, request, spec, self.tokenizer))

        return await self._opened().ask(partial(dialect.sampling, wire), read, dialect.abort)

    async def _sample(self, request: SampleRequest) -> Completion:
        (sampled, place, ended), spec = await self._ask_ended(request), self.spec
        logprobs = await self._raw(sampled, request, place)
        return settle(sampled, logprobs, place, ended, spec, self.tokenizer)

    async def _raw(self, sampled: Sampled, request: SampleRequest, place: int) -> tuple[float, ...]:
        """Raw log-probs of the ids that count: as sent where those are raw, else asked for."""
        known = [value for value in sampled.logprobs[:place] if value is not None]
        heated = request.sampling.temperature not in (0.0, 1.0)  # at 0 servers take the best at temperature 1
        processed = heated and self._known is not None and self._known.sampled == "processed"
        if len(known) == place and not processed:
            return tuple(known)
        ids, dialect = sampled.ids[:place], self._spoken()
        if dialect.can_score:
            return (await self._score(ScoreRequest(request.ids, ids, request.rollout, request.priority))).logprobs
        missing = [number for number, value in enumerate(sampled.logprobs[:place]) if value is None]
        if processed or dialect.forcing(request.ids, ids[0]) is None:
            raise UnsupportedByEngine(self._name, "it sends no raw log-probabilities", "Sample at temperature 1")
        forced = await collect([partial(self._force, request.ids + ids[:number], ids[number]) for number in missing])
        return (*known, *forced)  # they are missing from one place on

    async def _force(self, ids: tuple[int, ...], token: int) -> float:
        dialect = self._spoken()
        call = dialect.forcing(ids, token)
        assert call is not None, "checked by the caller"

        def read(reply: Any) -> float:
            value = self._read(lambda: dialect.forced(reply, token))
            if not -1e6 < value <= 1e-4:
                raise BadReply(self._name, f"a log-probability of {value}")
            return value

        return await self._opened().ask(lambda rid: call, read, dialect.abort)

    async def _score(self, request: ScoreRequest) -> Scores:
        found = await self._score_once(request, "read")
        if found is None:  # the server scored or wrote this very chunk before, and read it from its cache
            self._opened().traffic.uncached += 1
            found = await self._score_once(request, "skip")
        if found is None:
            raise BadReply(self._name, "scores are missing although the cache was not read")
        return found

    async def _score_once(self, request: ScoreRequest, cache: Literal["read", "skip"]) -> Scores | None:
        dialect = self._spoken()

        def read(reply: Any) -> Scores | None:
            scores = self._read(lambda: dialect.scored(reply, request))
            if scores is not None and len(scores.logprobs) != len(request.suffix):
                raise BadReply(self._name, f"{len(scores.logprobs)} scores for {len(request.suffix)} tokens")
            if scores is not None and not all(value <= 1e-4 for value in scores.logprobs):
                raise BadReply(self._name, "a score is above 0 or not a number")
            return scores

        return await self._opened().ask(lambda rid: dialect.scoring(request, rid, cache), read, dialect.abort)

    def _read(self, reading: Callable[[], T]) -> T:
        try:
            return reading()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            problem = f"the reply has another shape than {self._spoken().name}'s ({type(error).__name__}: {error})"
            raise BadReply(self._name, problem) from error

    async def _count(self, work: Callable[[], Awaitable[T]]) -> T:
        """Count a request, and be sure before and after that the server is still the one that was opened."""
        counts = self._counts
        counts.requests += 1
        if not counts.in_flight:
            self._busy_since = self._clock()
            self._trusted_until = min(
                self._trusted_until, self._idle_since + self.options.idle_seconds
            )  # it may be another by now
        counts.in_flight += 1
        try:
            if self._clock() >= self._trusted_until:
                await self._recheck(self._opened().traffic.lost)
            done = await work()
            if (lost := self._opened().traffic.lost) > self._lost_checked:
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

    async def _wait_ready(self) -> None:
        """Wait while the server says that it is loading.

        :raises EngineUnavailable: it still does after `wait_seconds`.
        """
        client, told = self._opened(), False
        give_up = self._clock() + self.options.wait_seconds
        while (reply := await client.look("/health")).status == 503:
            if self._clock() >= give_up:
                raise EngineUnavailable(
                    self._name, f"{self.url} is still loading after {self.options.wait_seconds:g} s"
                )
            if not told:
                _log.warning("engine %s: %s is still loading; waiting up to %g s", self._name, self.url,
                             self.options.wait_seconds)  # fmt: skip
                told = True
            await anyio.sleep(min(1.0, self.options.wait_seconds / 10))
        if reply.status in (401, 403):
            raise client.refusal(reply)

    async def _find_dialect(self) -> Dialect:
        name = self._dialect_name
        if name == "auto":
            client = self._opened()
            replies = [(await client.look(path), candidate) for path, candidate in _AUTO]
            for reply, candidate in replies:
                if reply.status == 200:
                    return self._make_dialect(candidate)
            for reply, _ in replies:
                if reply.status in (401, 403):
                    raise client.refusal(reply)
            advice = f"Is the URL right? Or say which dialect it speaks: {', '.join(DIALECTS)}"
            raise UnsupportedByEngine(self._name, f"nothing at {self.url} is known", advice)
        return self._make_dialect(name)

    def _make_dialect(self, name: str) -> Dialect:
        priorities = self.options.priorities == "send"
        if name == "vllm":
            return VllmDialect(priorities=priorities)
        if name == "sglang":
            return SglangDialect(priorities=priorities)
        return LlamaCppDialect()

    async def _identify(self) -> Identity:
        dialect = self._spoken()
        try:
            return await dialect.identify(self._opened(), self._model)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            advice = "Is it another kind of server?"
            raise UnsupportedByEngine(self._name, f"{self.url} does not speak {dialect.name}", advice) from error

    def _describe(self, identity: Identity) -> EngineSpec:
        dialect, tokenizer = self._spoken(), self.tokenizer
        can: frozenset[Capability] = frozenset({"sample", "score"} if dialect.can_score else {"sample"})
        if missing := self._needs - can:
            problem = f"{identity.engine} cannot {' or '.join(sorted(missing))}, which the pipeline needs"
            raise UnsupportedByEngine(self._name, problem, "Serve this model with vLLM or SGLang")
        if identity.context_length <= dialect.spare:
            raise UnsupportedByEngine(self._name, "it does not say how long its context is")
        return EngineSpec(
            name=self._name,
            model=identity.model,
            tokenizer=tokenizer.digest,
            context_length=identity.context_length - dialect.spare,
            end_ids=ends_of(tokenizer),
            vocabulary=vocabulary_of(tokenizer),
            engine=identity.engine,
            dtype="of the server",
            capabilities=can,
        )

    async def _probe(self) -> Known:
        known = await self._prober().run()
        refuse(self._name, known.findings, self._needs)
        return known

    def _prober(self) -> Prober:
        hands = Hands(self._ask_sample, self._score)
        return Prober(self._opened(), self._spoken(), self.spec, self.tokenizer, hands)

    async def _close(self) -> None:
        client, self._client = self._client, self._client
        if client is not None:
            await client.aclose()

    def _opened(self) -> Client:
        if self._client is None:
            raise EngineUnavailable(self._name, "it is not open yet", "Call it inside `async with engine:`")
        return self._client

    def _spoken(self) -> Dialect:
        assert self._dialect is not None, "an open engine has a dialect"
        return self._dialect
