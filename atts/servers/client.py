"""The HTTP client of one server, with retries, deadlines, aborts, and errors for statuses."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec

from atts.concurrency import SlotQueue, backoff, clock, shielded
from atts.errors import (
    BadReply,
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    UnsupportedByEngine,
)
from atts.servers.options import RemoteOptions
from atts.servers.replies import error_text
from atts.servers.transport import (
    ConnectionLost,
    HttpReply,
    ReplyRejected,
    open_transport,
    proxy_hint,
)

T = TypeVar("T")
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
# A question about the server costs it no work, so it answers soon or never.
_LOOK_SECONDS = 10.0
_LOOK_BYTES = 16 << 20
# The most bytes of a reply to a call: a fixed number, and a number for each token of the call.
_BASE_BYTES = 1 << 18
_TOKEN_BYTES = 1 << 10
_MARK = re.compile(rb'"(?:model|system_fingerprint|weight_version)"\s*:\s*(?:"[^"\\]*"|\d+)')
# Servers put these names near the beginning or the end of a reply.
_MARK_BYTES = 2048
# If every reply has a different name, the name means nothing.
_MOST_MARKS = 64
# A longer Retry-After is too long for a call to wait.
_LONGEST_WAIT = 30.0
HIDDEN = b"[API key]"
# A shorter secret may be an ordinary word in replies.
_SHORTEST_SECRET = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be sent."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


class Refused(EngineUnavailable):
    """The server is overloaded; `wait` is the number of seconds after which it accepts requests
    again.
    """

    def __init__(self, engine: str, problem: str, wait: float) -> None:
        super().__init__(engine, problem, "Try again later, or send less at once")
        self.wait = wait


@dataclass(slots=True)
class Traffic:
    """The counts of requests and replies, including failures.

    `renamed` replies had another model or fingerprint than all earlier ones; `uncached` scores were
    requested again without the server's cache.
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
        """Return how many times there was a reason to identify the server again."""
        return self.lost + self.renamed


class AdaptiveLimit(SlotQueue):
    """Slots whose number shrinks after a refusal, and grows back to the configured number.

    A single refusal has no effect after a few seconds: growth begins after a second, and doubles
    the limit every second. Repeated refusals mean a real limit: each makes the pause longer and the
    growth slower, down to 15 seconds and 5 %, so that a busy server is not overloaded all the time.
    A server error only pauses the growth.
    """

    SHRINK = 0.8
    FASTEST_GROWTH = 2.0
    SLOWEST_GROWTH = 1.05
    STEP_SECONDS = 1.0
    LONGEST_PAUSE = 15.0
    # After this time without a refusal, the next one counts as a single refusal again. It is longer
    # than the longest pause and the growth that follows it, so that a real limit is not forgotten.
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
        """Shrink the limit, because a request sent at this time was too much for the server.

        Requests in flight when the limit last shrank are ignored, so that a burst of refusals
        counts once.
        """
        now = self._clock()
        if sent_at >= self._shrunk_at:
            if now - self._refused_at >= self.MEMORY_SECONDS:
                self._growth = self.FASTEST_GROWTH
                self._pause = self.STEP_SECONDS
            else:
                self._growth = max(self.SLOWEST_GROWTH, math.sqrt(self._growth))
                self._pause = min(self.LONGEST_PAUSE, 2 * self._pause)
            # The number in flight may be far below the limit, which then says nothing.
            was_too_much = min(self._limit, max(self.in_use, 1))
            self._set(max(1.0, was_too_much * self.SHRINK))
            self._shrunk_at = now
        self._refused_at = now
        self._grow_at = max(self._grow_at, now + max(self._pause, retry_after))

    def erred(self) -> None:
        """Pause the growth after a failure of the server, which is not a reason to send less."""
        self._grow_at = max(self._grow_at, self._clock() + self._pause)

    def answered(self) -> None:
        """Let the limit grow after a good reply, if the pause is over."""
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
    """An open connection to one server, which is made inside a running loop and works only in that
    loop.
    """

    def __init__(self, name: str, url: str, options: RemoteOptions) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.options = options
        self.traffic = Traffic()
        self._clock = clock()
        self.limit = AdaptiveLimit(options.in_flight, self._clock)
        # The prefix of every request id of this client.
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
        """Close every connection."""
        await self._transport.aclose()

    async def look(self, path: str, body: dict[str, Any] | None = None) -> HttpReply:
        """Send one short question about the server, without retries; any status is an answer.

        It is a POST if it has a body.

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
        """Send a request, with a new id per attempt, until its reply can be read.

        All attempts share one deadline. An attempt that was given up, or whose reply was lost, is
        aborted on the server. `tokens` is the number of tokens in the request and its reply; a
        reply that is too long for them is not read to its end.

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
                    last = f"; the attempt before failed: {error.problem}"
                self.traffic.retries += 1
                salt = int(self._prefix, 16) + self._made
                own_wait = backoff(attempt, self.options.delay_seconds, salt=salt)
                await anyio.sleep(max(asked_wait, own_wait))
                attempt += 1
        raise EngineTimeout(self.name, f"no answer within {self.options.timeout_seconds:g} s{last}")

    async def _attempt(
        self, make: Callable[[str], Call], abort: Callable[[str], Call | None], most_bytes: int
    ) -> bytes:
        """Send a request once; return the body of a reply with status 200.

        :raises EngineError: for another status, or if no complete reply came.
        """
        self._made += 1
        # All ids have the same length, because SGLang aborts every request whose id begins with the
        # given one.
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
        """Return a reply without secrets of atts, even if the server echoes them."""
        try:
            reply = await self._transport.send(url, body, headers, most_bytes)
        except ConnectionLost as lost:
            lost.args = (self._hide(str(lost).encode(errors="replace")).decode(),)
            raise
        return HttpReply(reply.status, self._hide(reply.body), reply.retry_after)

    def _packed(self, call: Call) -> tuple[str, bytes, dict[str, str]]:
        """Return URL, body and headers of a call.

        The body is encoded before the call waits for a slot. Thousands of calls may wait at once,
        and the garbage collector visits every object that they keep alive.
        """
        headers = {**self._headers, **call.headers} if call.headers else self._headers
        return self.url + call.path, msgspec.json.encode(call.body), headers

    async def _abort(self, call: Call | None) -> None:
        """Ask the server, with a short time limit, to free a request whose connection is already
        closed.
        """
        if call is None:
            return
        self.traffic.aborts += 1
        is_done = False
        with shielded(self.options.cancel_seconds):
            # If the server is gone, there is nothing to abort; the failure is counted below.
            with suppress(ConnectionLost):
                data = msgspec.json.encode(call.body)
                reply = await self._send(self.url + call.path, data, self._headers, _BASE_BYTES)
                is_done = reply.status == 200
        if not is_done:
            self.traffic.aborts_failed += 1

    def _judge(self, reply: HttpReply, sent_at: float) -> bytes:
        """Return the reply's body, or raise the error for its status."""
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
        """Count a reply with another name, because the server may have changed without a broken
        connection.
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
        """Return the error of a status that another attempt would get again."""
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
        return EngineError(self.name, f"it refused the request (status {reply.status}: {words})")

    def _key_refused(self, status: int, words: str) -> EngineError:
        source = self.options.key
        problem = "it refused the API key" if self._has_key else "it wants an API key"
        if source.file:
            advice = f"Put a valid key into {source.file}"
        else:
            advice = f"Set {source.variable} to a valid key"
        return UnsupportedByEngine(self.name, f"{problem} (status {status}: {words})", advice)

    def _unreachable(self, lost: ConnectionLost) -> EngineError:
        if isinstance(lost, ReplyRejected):
            return BadReply(self.name, str(lost))
        what = "lost the connection to" if lost.sent else "cannot reach"
        return EngineUnavailable(
            self.name, f"{what} {self.url} ({lost})", proxy_hint(self.url, self.options)
        )


def _seconds(words: str) -> float:
    """Return a Retry-After in seconds; dates and invalid values count as none."""
    try:
        return min(_LONGEST_WAIT, max(0.0, float(words)))
    except ValueError:
        return 0.0


def redactor(key: str, options: RemoteOptions) -> Callable[[bytes], bytes]:
    r"""Return a function that takes the API key and the proxies' passwords out of a text.

    They are found literally, and in the forms in which JSON and URLs escape them.

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
