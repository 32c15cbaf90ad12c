"""HTTP client for one server: connections, retries, and strict decoding of replies."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import re
import ssl
import uuid
import zlib
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import anyio
import msgspec
from msgspec import Meta, Raw, Struct

from atts.concurrency import SlotQueue, backoff, clock, shielded
from atts.errors import (
    BadReply,
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    MissingExtra,
    OptionError,
    UnsupportedByEngine,
)
from atts.servers.options import RemoteOptions

T = TypeVar("T")
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Tokens = tuple[Token, ...]
# A finite log-probability at or below this number is an error of the server.
LOWEST = -1e6
# Rounding may make a log-probability slightly positive; values up to this number are accepted.
HIGHEST = 1e-4
# The number that vLLM sends instead of minus infinity, which JSON cannot express.
CLAMPED = -9999.0
_MINUS_INFINITY = -1e300
_WORDS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|NaN|-?Infinity', re.DOTALL)
# Servers send NaN and infinities, although JSON does not allow them. Replace them with numbers that
# no valid reply contains. Later checks refuse 1e300, and read -1e300 as minus infinity.
_NUMBERS = {b"NaN": b"1e300", b"Infinity": b"1e300", b"-Infinity": b"-1e300"}


def decode(text: bytes, kind: Any) -> Any:
    """Read JSON as a value of the type `kind`, without converting values of other types.

    NaN and Infinity are accepted although JSON forbids them, because servers written in Python send
    them.

    >>> decode(b'{"logprob": -0.5}', dict[str, float])
    {'logprob': -0.5}

    :raises ValueError: the text is not complete JSON, is nested too deeply, or has another type.
        For example, `true` and "1" are not numbers.
    """
    decoder = _decoder(kind)
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if b"NaN" not in text and b"Infinity" not in text:
                raise
        return decoder.decode(_WORDS.sub(lambda word: _NUMBERS.get(word[0], word[0]), text))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def logprob_of(value: float) -> float:
    """Convert a number from a reply to a log-probability.

    JSON cannot represent minus infinity, so servers send certain very low numbers instead. These
    become minus infinity again.
    """
    if LOWEST < value <= CLAMPED or value == _MINUS_INFINITY:
        return -math.inf
    return value


def is_score(value: float) -> bool:
    """Return whether a value is a possible log-probability of a scored token. Minus infinity is
    possible, because the model may give such a token probability 0.
    """
    return LOWEST < value <= HIGHEST or value == -math.inf


def are_logprobs(values: Sequence[float | None]) -> bool:
    """Return whether all values can be log-probabilities of sampled tokens. None means unknown and
    is ignored.

    NaN, infinities, clearly positive numbers, and numbers at or below -1,000,000 are impossible.
    """
    known = cast("Sequence[float]", values)
    if None in values:
        known = [value for value in values if value is not None]
    if not known:
        return True
    # The built-in functions are faster than a loop over the values. `min` and `max` may overlook a
    # NaN, but `sum` does not.
    return LOWEST < min(known) and max(known) <= HIGHEST and not math.isnan(sum(known))


def are_scores(values: Sequence[float]) -> bool:
    """Return whether all values are possible log-probabilities of scored tokens. Minus infinity is
    possible, because the model may give a scored token probability 0.
    """
    return are_logprobs(values) or all(map(is_score, values))


def finish_of(word: str | None) -> Literal["stop", "length"]:
    """Return the finish reason of a reply, which must be "stop" or "length".

    :raises ValueError: for any other reason, such as an abort that atts did not request.
    """
    if word == "stop":
        return "stop"
    if word == "length":
        return "length"
    raise ValueError(f"the server ended the text for an unknown reason, {word!r:.80}")


class ModelRow(Struct):
    """One model listed at /v1/models. Servers use different field names for the context length."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Count | None = None
    context_length: Count | None = None
    context_window: Count | None = None


class ModelRows(Struct):
    """The models listed at /v1/models."""

    data: tuple[ModelRow, ...]


class Version(Struct):
    """The server's version, as returned by /version."""

    version: str


class Tokenized(Struct):
    """The token ids of a text, as returned by /tokenize."""

    tokens: Tokens


class _Cached(Struct):
    cached_tokens: Count | None = None


class _Reasoning(Struct):
    reasoning_tokens: Count | None = None


class TokenCounts(Struct):
    """The token counts in a reply. A count is None if the server does not send it."""

    completion_tokens: Count | None = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoning | None = None

    @property
    def cached(self) -> int:
        """Return how many prompt tokens came from the server's cache, or 0 if the server does not
        report it.
        """
        details = self.prompt_tokens_details
        if details is None or details.cached_tokens is None:
            return 0
        return details.cached_tokens

    @property
    def reasoning(self) -> int:
        """Return how many tokens were spent on reasoning, or 0 if the server does not report it."""
        details = self.completion_tokens_details
        if details is None or details.reasoning_tokens is None:
            return 0
        return details.reasoning_tokens


def error_text(reply: bytes) -> str:
    """Return the error message in the body of a reply, as one line of at most 300 characters."""
    try:
        # Servers nest the error message in up to three objects, such as {"error": {"message":
        # ...}}. Each pass of the loop opens one object.
        while True:
            fields = decode(reply, dict[str, Raw])
            names = [name for name in ("error", "message", "detail", "object") if name in fields]
            reply = bytes(fields[names[0]]) if names else b'""'
    except ValueError:
        pass
    try:
        text: str = decode(reply, str)
    except ValueError:
        text = reply.decode(errors="replace")
    return " ".join(text.split())[:300] or "no reason given"


# Number of connection pools. httpx2 looks at every connection of a pool to find a free one, so many
# small pools are faster than one large pool.
SHARDS = 16
# Largest number of bytes that are read from an error reply; the rest is cut off.
ERROR_BYTES = 1 << 16
# atts closes a connection that has been idle for this time. uvicorn closes it after 5 s, and a
# request sent at that moment would be lost.
KEEP_ALIVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A server's reply: status, body and Retry-After header. The status may be an error."""

    status: int
    body: bytes
    retry_after: str = ""


class ConnectionLost(Exception):
    """Error for a request that got no complete reply.

    `sent` is False only if the server cannot have received the request.
    """

    def __init__(self, problem: str, *, sent: bool) -> None:
        super().__init__(problem)
        self.sent = sent


class ReplyRejected(ConnectionLost):
    """Error for a reply that is too long, or whose compression atts did not request."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, sent=True)


def open_transport(options: RemoteOptions) -> Transport:
    """Open HTTP connections with the library for the running event loop: aiohttp under asyncio if
    it is installed, or else httpx2.

    :raises MissingExtra: neither aiohttp nor httpx2 can be used.
    :raises OptionError: the certificate file cannot be read.
    """
    asynchronous = _is_asyncio()
    if asynchronous and importlib.util.find_spec("aiohttp"):
        return AiohttpTransport(options)
    if importlib.util.find_spec("httpx2"):
        return HttpxTransport(options)
    needed = "aiohttp" if asynchronous else "httpx2"
    raise MissingExtra("a server engine", needed, "servers")


class AiohttpTransport:
    """HTTP connections through aiohttp, which runs only under asyncio."""

    def __init__(self, options: RemoteOptions) -> None:
        import aiohttp

        self._library = aiohttp
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ssl=_certificates(options)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_seconds),
            trust_env=options.proxy == "environment",
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def send(
        self, url: str, body: bytes | None, headers: Mapping[str, str], most: int
    ) -> HttpReply:
        """Send one request without retries, and return the reply. The request is a POST if it has a
        body, or else a GET.

        Redirects are not followed, because that would send the API key to another server.

        :raises ReplyRejected: the reply is longer than `most` bytes.
        :raises ConnectionLost: no complete reply came.
        """
        library = self._library
        try:
            method = "GET" if body is None else "POST"
            request = self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            )
            # The end of this block returns the connection to the pool. If the reply was not read
            # completely, the connection is closed instead.
            async with request as response:
                whole = await _whole(
                    response.status, response.headers, response.content.iter_any(), most
                )
                return HttpReply(response.status, whole, response.headers.get("Retry-After", ""))
        except (library.ClientConnectorError, library.ConnectionTimeoutError) as error:
            raise ConnectionLost(_error_words(error), sent=False) from error
        except library.InvalidURL as error:
            raise OptionError("url", f"{url!r} is not a URL") from error
        except (library.ClientError, OSError) as error:  # OSError includes time-outs
            raise ConnectionLost(_error_words(error), sent=True) from error

    async def aclose(self) -> None:
        """Close all connections. Calling this again has no effect."""
        await self._session.close()


class HttpxTransport:
    """HTTP connections through httpx2, in several small pools, under asyncio or trio."""

    def __init__(self, options: RemoteOptions) -> None:
        import httpx2

        self._library = httpx2
        context = _certificates(options)
        self._clients = [
            httpx2.AsyncClient(
                verify=context
                if isinstance(context, ssl.SSLContext)
                else ssl.create_default_context(),
                trust_env=options.proxy == "environment",
                timeout=httpx2.Timeout(None, connect=options.connect_seconds),
                limits=httpx2.Limits(
                    max_connections=None,
                    max_keepalive_connections=None,
                    keepalive_expiry=KEEP_ALIVE_SECONDS,
                ),
                follow_redirects=False,
            )
            for _ in range(SHARDS)
        ]
        self._load = [0] * SHARDS

    async def send(
        self, url: str, body: bytes | None, headers: Mapping[str, str], most: int
    ) -> HttpReply:
        """Send one request; see `AiohttpTransport.send`."""
        library = self._library
        shard = min(range(SHARDS), key=self._load.__getitem__)
        self._load[shard] += 1
        try:
            method = "GET" if body is None else "POST"
            async with self._clients[shard].stream(
                method, url, content=body, headers=dict(headers)
            ) as response:
                chunks = response.aiter_raw()
                try:
                    whole = await _whole(response.status_code, response.headers, chunks, most)
                finally:
                    await response.aclose()
                    with suppress(library.HTTPError, library.StreamError):
                        # If the reply was not read completely, the generators inside `chunks` are
                        # still open. The response is closed now, so reading once more ends them.
                        async for _ in chunks:
                            continue
                return HttpReply(
                    response.status_code, whole, response.headers.get("Retry-After", "")
                )
        except (library.ConnectError, library.ConnectTimeout, library.ProxyError) as error:
            raise ConnectionLost(_error_words(error), sent=False) from error
        except (library.UnsupportedProtocol, library.InvalidURL) as error:
            raise OptionError("url", f"{url!r} is not a URL") from error
        except library.HTTPError as error:
            raise ConnectionLost(_error_words(error), sent=True) from error
        finally:
            self._load[shard] -= 1

    async def aclose(self) -> None:
        """Close all connections. Calling this again has no effect."""
        for client in self._clients:
            await client.aclose()


Transport = AiohttpTransport | HttpxTransport
"""HTTP connections to one server. If a request is cancelled, its connection is closed."""


async def _whole(
    status: int, headers: Mapping[str, str], chunks: AsyncIterable[bytes], most: int
) -> bytes:
    """Read the body of a reply, decompressing it as it arrives.

    A reply with status 200 is rejected if its decompressed body has more than `most` bytes. An
    error reply is cut to `ERROR_BYTES` instead.

    :raises ReplyRejected: the body is too long, or has an encoding that atts did not request.
    """
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "deflate"):
        raise ReplyRejected(
            f"the reply is encoded as {encoding[:40]!r}, which atts did not request"
        )
    body = _Body(
        most if status == 200 else ERROR_BYTES,
        zlib.decompressobj(47) if encoding in ("gzip", "deflate") else None,
    )
    async for chunk in chunks:
        if not body.take(chunk):
            break
    if body.flaw and status == 200:
        raise ReplyRejected(f"the reply {body.flaw}")
    return bytes(body.text[: body.most])


class _Body:
    """The part of a reply's body that has arrived so far, decompressed. `flaw` says why the body
    must be rejected; it is empty if nothing is wrong.
    """

    def __init__(self, most: int, inflater: Any) -> None:
        self.most = most
        self.text = bytearray()
        self.flaw = ""
        self._inflater = inflater
        self._came = 0

    def take(self, chunk: bytes) -> bool:
        """Append the next bytes of the body. Return False if the body is too long or cannot be
        decompressed.
        """
        self._came += len(chunk)
        try:
            room = self.most + 1 - len(self.text)
            self.text += chunk if self._inflater is None else self._inflater.decompress(chunk, room)
        except zlib.error as error:
            self.flaw = f"cannot be decompressed ({error})"
        if max(self._came, len(self.text)) > self.most:
            self.flaw = f"is longer than {self.most:,} bytes, the limit for a reply to this request"
        return not self.flaw


def proxy_hint(url: str, options: RemoteOptions) -> str:
    """Return advice about the proxy for the message of a failed connection. Return "" if the
    environment sets no proxy.
    """
    scheme = urlsplit(url).scheme
    names = [
        name
        for name in (f"{scheme}_proxy", "all_proxy")
        for name in (name, name.upper())
        if os.environ.get(name)
    ]
    if not names:
        return ""
    if options.proxy == "never":
        return (
            f"{names[0]} is set but was not used; to use this proxy, add ?proxy=environment to "
            "the end of the engine's address"
        )
    return (
        f"The connection used the proxy in {names[0]}; to connect without it, add ?proxy=never "
        "to the end of the engine's address"
    )


def _certificates(options: RemoteOptions) -> Any:
    """Return the TLS context. It always verifies the server's certificate, against `ca_file` if
    this option is set.
    """
    if options.ca_file is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise OptionError("ca_file", f"{options.ca_file} cannot be read ({error})") from error


def _is_asyncio() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _error_words(error: BaseException) -> str:
    """Return a readable message for a connection error.

    If the error or one of its causes has a system error number, return the operating system's
    message. Otherwise return the name of the error's class and the first message in its chain of
    causes.
    """
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    for cause in causes:
        # Use the system's text for the error number, because libraries add internal names to the
        # message. TLS errors have other numbers, so they are excluded.
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, ssl.SSLError):
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    message = next((str(cause) for cause in causes if str(cause)), "")
    name = type(error).__name__
    return f"{name}: {message}" if message else name


_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_OVERLOADED = frozenset({429, 503, 529})
_OVERFLOW = (
    "context length",
    "maximum context",
    "context size",
    "longer than the model",
    "max_model_len",
    "too long",
)
# Time limit, in seconds, for requests about the server itself, such as its version. It is short,
# because the server runs no model for them.
_LOOK_SECONDS = 10.0
_LOOK_BYTES = 16 << 20
# Largest size of a reply, in bytes: `_BASE_BYTES`, plus `_TOKEN_BYTES` for each token of the
# request and the reply.
_BASE_BYTES = 1 << 18
_TOKEN_BYTES = 1 << 10
_MARK = re.compile(rb'"(?:model|system_fingerprint|weight_version)"\s*:\s*(?:"[^"\\]*"|\d+)')
# Only this number of bytes at the beginning, and as many at the end of a reply, are searched for
# `_MARK`.
_MARK_BYTES = 2048
# Largest number of different model names and fingerprints that the client remembers. After that, it
# does not notice new ones.
_MOST_MARKS = 64
# Longest wait, in seconds, before a request is sent again, even if the server's Retry-After is
# longer.
_LONGEST_WAIT = 30.0
HIDDEN = b"[API key]"
# Only secrets of at least this number of characters are hidden in messages. A shorter secret may be
# an ordinary word that also occurs elsewhere.
_SHORTEST_SECRET = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a server: path, JSON body and extra headers."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


class Refused(EngineUnavailable):
    """Error for a request that the server did not answer now, but may answer later.

    `wait` is the number of seconds that the server asks clients to wait.
    """

    def __init__(self, engine: str, problem: str, wait: float) -> None:
        super().__init__(engine, problem, "Try again later, or with fewer requests in flight")
        self.wait = wait


@dataclass(slots=True)
class Traffic:
    """Counts of the requests to a server.

    `renamed` counts replies with a new model name or fingerprint. `uncached` counts scoring
    requests that were repeated without the server's cache.
    """

    attempts: int = 0
    retries: int = 0
    lost: int = 0
    renamed: int = 0
    aborts: int = 0
    aborts_failed: int = 0
    uncached: int = 0

    @property
    def doubts(self) -> int:
        """Return the count of events after which the server may have changed: lost connections, and
        replies with a new model name or fingerprint.

        Whenever this count grows, the server must be identified again.
        """
        return self.lost + self.renamed


class AdaptiveLimit(SlotQueue):
    """A limit on concurrent requests that shrinks when the server refuses one, then grows back to
    the configured limit.

    After a single refusal, the limit does not grow for one second, then doubles every second. Each
    further refusal makes the wait longer (up to 15 seconds) and the growth slower (down to 5 % per
    second). If the server's Retry-After is longer than the wait, the limit waits for that time. A
    busy server is therefore not overloaded repeatedly. A server error only delays the growth.
    """

    SHRINK = 0.8
    FASTEST_GROWTH = 2.0
    SLOWEST_GROWTH = 1.05
    STEP_SECONDS = 1.0
    LONGEST_PAUSE = 15.0
    # If the server has refused nothing for this number of seconds, the next refusal resets the
    # pause and the growth to their initial values. The time must be longer than the longest pause,
    # because a pause itself may prevent refusals.
    MEMORY_SECONDS = 40.0

    __slots__ = (
        "_clock",
        "_grow_at",
        "_growth",
        "_limit",
        "_most",
        "_pause",
        "_refused_at",
        "_shrunk_at",
    )

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        super().__init__(most)
        self._most = most
        self._clock = clock
        self._limit = float(most)
        self._growth = self.FASTEST_GROWTH
        self._pause = self.STEP_SECONDS
        self._refused_at = -math.inf
        self._shrunk_at = -math.inf
        self._grow_at = -math.inf

    def refused(self, sent_at: float, retry_after: float = 0.0) -> None:
        """Shrink the limit because the server refused a request, which was sent at time `sent_at`.

        The limit does not shrink again if this request was sent before the limit last shrank. So a
        burst of refusals shrinks it only once, but each refusal delays the growth.
        """
        now = self._clock()
        if sent_at >= self._shrunk_at:
            if now - self._refused_at >= self.MEMORY_SECONDS:
                self._growth = self.FASTEST_GROWTH
                self._pause = self.STEP_SECONDS
            else:
                self._growth = max(self.SLOWEST_GROWTH, math.sqrt(self._growth))
                self._pause = min(self.LONGEST_PAUSE, 2 * self._pause)
            # The limit may be far above the number of requests that were in flight. Shrink from the
            # smaller of these two numbers.
            was_too_much = min(self._limit, max(self.in_use, 1))
            self._set(max(1.0, was_too_much * self.SHRINK))
            self._shrunk_at = now
        self._refused_at = now
        self._grow_at = max(self._grow_at, now + max(self._pause, retry_after))

    def erred(self) -> None:
        """Pause the growth after a server error. The limit itself does not shrink."""
        self._grow_at = max(self._grow_at, self._clock() + self._pause)

    def answered(self) -> None:
        """Raise the limit after a successful reply, unless the growth is paused."""
        if self._limit >= self._most:
            return
        now = self._clock()
        if now >= self._grow_at:
            grown = max(self._limit * self._growth, self._limit + 1)
            self._set(min(float(self._most), grown))
            self._grow_at = now + self.STEP_SECONDS

    def _set(self, limit: float) -> None:
        self._limit = limit
        self.resize(max(1, int(limit)))


class Client:
    """HTTP client of one server, with retries and a limit on concurrent requests.

    It must be created and used in the same running event loop.
    """

    def __init__(self, name: str, url: str, options: RemoteOptions) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.options = options
        self.traffic = Traffic()
        self._clock = clock()
        self.limit = AdaptiveLimit(options.in_flight, self._clock)
        # The beginning of all request ids of this client; it is random, so that ids of two clients
        # differ.
        self._prefix = uuid.uuid4().hex[:16]
        self._made = 0
        self._marks = set[bytes]()
        key = options.key.read()
        self._has_key = bool(key)
        self._hide = redactor(key, options)
        self._transport = open_transport(options)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def look(self, path: str, body: dict[str, Any] | None = None) -> HttpReply:
        """Send one short request about the server itself, such as its version. It is not retried,
        and a reply with any status is returned.

        The request is a POST if it has a body, or else a GET.

        :raises EngineUnavailable: if no complete reply came.
        :raises EngineTimeout: if no reply came in time.
        """
        data = None if body is None else msgspec.json.encode(body)
        try:
            with anyio.fail_after(min(_LOOK_SECONDS, self.options.timeout_seconds)):
                return await self._send(self.url + path, data, self._headers, _LOOK_BYTES)
        except ConnectionLost as lost:
            raise self._unreachable(lost) from lost
        except TimeoutError as late:
            raise EngineTimeout(self.name, f"{self.url}{path} does not answer") from late

    async def ask(
        self,
        make: Callable[[str], Call],
        read: Callable[[bytes], T],
        abort: Callable[[str], Call | None],
        tokens: int,
    ) -> T:
        """Send a request, and repeat it until a reply can be read. Each attempt has a new request
        id.

        All attempts share one deadline. If an attempt is cancelled or loses its connection, it is
        also aborted on the server. `tokens` is the number of tokens in the request and its reply;
        it limits the reply's size in bytes.

        :raises EngineTimeout: if the deadline passed.
        :raises EngineError: if every attempt failed, or the server refused the request for good.
        """
        attempt = 1
        last = ""
        most_bytes = _BASE_BYTES + _TOKEN_BYTES * tokens
        with anyio.CancelScope(deadline=self._clock() + self.options.timeout_seconds):
            while True:
                try:
                    return read(await self._attempt(make, abort, most_bytes))
                except EngineError as error:
                    if not error.retryable or attempt == self.options.attempts:
                        raise
                    asked_wait = error.wait if isinstance(error, Refused) else 0.0
                    last = f"; the previous attempt failed: {error.problem}"
                self.traffic.retries += 1
                salt = int(self._prefix, 16) + self._made
                own_wait = backoff(attempt, self.options.delay_seconds, salt=salt)
                await anyio.sleep(max(asked_wait, own_wait))
                attempt += 1
        raise EngineTimeout(self.name, f"no answer within {self.options.timeout_seconds:g} s{last}")

    async def _attempt(
        self, make: Callable[[str], Call], abort: Callable[[str], Call | None], most_bytes: int
    ) -> bytes:
        """Send a request once, and return the body of its reply.

        :raises EngineError: for another status, or if no complete reply came.
        """
        self._made += 1
        # All ids have the same length, so that no id is the beginning of another id. SGLang aborts
        # every request whose id begins with the given id.
        rid = f"{self._prefix}{self._made:016x}"
        url, body, headers = self._packed(make(rid))
        if not self.limit.take_nowait():
            await self.limit.take()
        sent_at = self._clock()
        try:
            self.traffic.attempts += 1
            reply = await self._send(url, body, headers, most_bytes)
        except ConnectionLost as lost:
            self.traffic.lost += 1
            if lost.sent:
                await self._abort(abort(rid))
            raise self._unreachable(lost) from lost
        except anyio.get_cancelled_exc_class():
            await self._abort(abort(rid))
            raise
        finally:
            self.limit.give()
        return self._judge(reply, sent_at)

    async def _send(
        self, url: str, body: bytes | None, headers: Mapping[str, str], most_bytes: int
    ) -> HttpReply:
        """Send a request, and remove the API key and passwords from its reply, because a server may
        echo them.
        """
        try:
            reply = await self._transport.send(url, body, headers, most_bytes)
        except ConnectionLost as lost:
            lost.args = (self._hide(str(lost).encode(errors="replace")).decode(),)
            raise
        return HttpReply(reply.status, self._hide(reply.body), reply.retry_after)

    def _packed(self, call: Call) -> tuple[str, bytes, dict[str, str]]:
        """Return the URL, the encoded body and the headers of a call.

        Calls are encoded before they wait for a free slot. Thousands of calls may wait, and
        unencoded bodies would slow down the garbage collector.
        """
        headers = {**self._headers, **call.headers} if call.headers else self._headers
        return self.url + call.path, msgspec.json.encode(call.body), headers

    async def _abort(self, call: Call | None) -> None:
        """Ask the server to abort a request whose connection is already closed. Wait only a short
        time for the server's answer.
        """
        if call is None:
            return
        self.traffic.aborts += 1
        is_done = False
        with shielded(self.options.cancel_seconds):
            # If the connection is lost, the request runs no longer. The failed abort is still
            # counted below.
            with suppress(ConnectionLost):
                data = msgspec.json.encode(call.body)
                reply = await self._send(self.url + call.path, data, self._headers, _BASE_BYTES)
                is_done = reply.status == 200
        if not is_done:
            self.traffic.aborts_failed += 1

    def _judge(self, reply: HttpReply, sent_at: float) -> bytes:
        """Return the body of a reply with status 200, or raise the error for any other status.
        Adapt the limit on concurrent requests accordingly.
        """
        if reply.status == 200:
            self.limit.answered()
            self._recognise(reply.body)
            return reply.body
        if reply.status not in _RETRIED:
            raise self.refusal(reply)
        wait = _seconds(reply.retry_after)
        if reply.status in _OVERLOADED:
            self.limit.refused(sent_at, wait)
        else:
            self.limit.erred()
        raise Refused(self.name, f"status {reply.status}: {error_text(reply.body)}", wait)

    def _recognise(self, body: bytes) -> None:
        """Count a reply whose model name or fingerprint is new.

        A new name means that the server may have changed although no connection was lost.
        """
        ends = body
        if len(body) > 2 * _MARK_BYTES:
            ends = body[:_MARK_BYTES] + b"\n" + body[-_MARK_BYTES:]
        marks = b",".join(_MARK.findall(ends))
        if marks not in self._marks and len(self._marks) < _MOST_MARKS:
            if self._marks:
                self.traffic.renamed += 1
            self._marks.add(marks)

    def refusal(self, reply: HttpReply) -> EngineError:
        """Return the error for a status that a retry would not change."""
        words = error_text(reply.body)
        if reply.status in (401, 403):
            return self._key_refused(reply.status, words)
        if reply.status in (400, 413, 422) and any(sign in words.lower() for sign in _OVERFLOW):
            overflow = ContextOverflow(self.name, 0, 0)
            overflow.args = (
                f"engine {self.name}: the request does not fit the server's context ({words})",
            )
            return overflow
        if reply.status == 404:
            return UnsupportedByEngine(
                self.name, f"not found: {words}", "Check the URL, the dialect and the model name"
            )
        return EngineError(
            self.name, f"the server refused the request (status {reply.status}: {words})"
        )

    def _key_refused(self, status: int, words: str) -> EngineError:
        source = self.options.key
        problem = (
            "the server refused the API key" if self._has_key else ("the server needs an API key")
        )
        if source.file:
            advice = f"Put a valid key into {source.file}"
        else:
            advice = f"Set {source.variable} to a valid key"
        return UnsupportedByEngine(self.name, f"{problem} (status {status}: {words})", advice)

    def _unreachable(self, lost: ConnectionLost) -> EngineError:
        if isinstance(lost, ReplyRejected):
            return BadReply(self.name, str(lost))
        advice = proxy_hint(self.url, self.options)
        if lost.sent:
            return EngineUnavailable(
                self.name, f"lost the connection to {self.url} ({lost})", advice
            )
        # vLLM refuses connections while it loads, as a wrong address does. So atts does not wait.
        if not advice:
            advice = (
                "Check the address, and that the server is running; vLLM opens its port only "
                "when its model is loaded"
            )
        return EngineUnavailable(self.name, f"cannot reach {self.url} ({lost})", advice)


def _seconds(words: str) -> float:
    """Convert a Retry-After header to seconds, at most 30. A date or an invalid value becomes 0."""
    try:
        return min(_LONGEST_WAIT, max(0.0, float(words)))
    except ValueError:
        return 0.0


def redactor(key: str, options: RemoteOptions) -> Callable[[bytes], bytes]:
    r"""Return a function that replaces the API key and the passwords of proxies in a reply by "[API
    key]".

    Secrets are also found if they are escaped, as in JSON or URLs. Secrets shorter than 8
    characters are not replaced.

    >>> redactor("sk-12/3456", RemoteOptions())(rb'{"error": "Bearer sk-12\/3456, sk-12%2F3456"}')
    b'{"error": "Bearer [API key], [API key]"}'
    """
    secrets = [key]
    if options.proxy == "environment":
        for name, value in os.environ.items():
            if name.lower().endswith("_proxy"):
                secrets.append(urlsplit(value).password or "")
    patterns = [
        "".join(map(_escaped_forms, secret))
        for secret in secrets
        if len(secret) >= _SHORTEST_SECRET
    ]
    if not patterns:
        return bytes
    return partial(re.compile("|".join(patterns).encode()).sub, HIDDEN)


def _escaped_forms(letter: str) -> str:
    if letter.isalnum():
        return letter
    code = ord(letter)
    return rf"(?:\\?{re.escape(letter)}|\\u00{code:02x}|\\u00{code:02X}|%{code:02x}|%{code:02X})"
