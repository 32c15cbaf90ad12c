"""HTTP client of one server: retries, deadlines, aborts and the errors that statuses stand for."""

from __future__ import annotations

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
from atts.servers.replies import said
from atts.servers.transport import HttpReply, Lost, Unacceptable, open_transport, proxy_hint

T = TypeVar("T")
_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_OVERFLOW = (
    "context length",
    "maximum context",
    "context size",
    "longer than the model",
    "max_model_len",
    "too long",
)
_LOOK_SECONDS = 10.0  # for a question about the server, which takes it no work
_LOOK_BYTES = 16 << 20
_BASE_BYTES = 1 << 18
_TOKEN_BYTES = 1 << 10  # of a reply to a call: in all, and for each token of it
_MARK = re.compile(rb'"(?:model|system_fingerprint|weight_version)"\s*:\s*(?:"[^"\\]*"|\d+)')
_MARK_BYTES = 2048  # of a reply's beginning and end, where servers put these
_MOST_MARKS = 64  # a server that says another name each time says nothing
_LONGEST_WAIT = 30.0  # a Retry-After beyond this is for people, not for a call
SHRINK = 0.8
GROW = 1.05
COOL_SECONDS = 15.0  # one burst of refusals counts once
CLEAN_SECONDS = 1.0  # without trouble, before the limit grows again


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be sent: where, what, and under which id."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


class Refused(EngineUnavailable):
    """The server said "not now"; `wait` is how long it asked to be left alone."""

    def __init__(self, engine: str, problem: str, wait: float) -> None:
        super().__init__(engine, problem, "Try again later, or send less at once")
        self.wait = wait


@dataclass(slots=True)
class Traffic:
    """What went over the wire, failures included; `uncached` scores had to be asked for again past
    the cache.

    `renamed` replies bore another model or fingerprint than any before them.
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
        """How often there was reason to ask who answers."""
        return self.lost + self.renamed


class AdaptiveLimit(SlotQueue):
    """Slots (AIMD): a refusal shrinks their number, a server error stops its growth, quiet lets it
    grow.
    """

    __slots__ = ("_clock", "_grow_after", "_limit", "_most", "_shrink_after")

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        super().__init__(most)
        self._most = most
        self._clock = clock
        self._limit = float(most)
        self._shrink_after = self._grow_after = 0.0

    def refused(self) -> None:
        """The server said that it was too much."""
        now = self._clock()
        if now >= self._shrink_after:
            self._set(max(1, min(self._limit, max(self.in_use, 1)) * SHRINK))
            self._shrink_after = now + COOL_SECONDS
        self._grow_after = now + COOL_SECONDS

    def erred(self) -> None:
        """The server failed: no reason to send less, none to send more."""
        self._grow_after = max(self._grow_after, self._clock() + COOL_SECONDS)

    def answered(self) -> None:
        """The server answered well."""
        if self._limit >= self._most:
            return
        now = self._clock()
        if now >= self._grow_after:
            self._set(min(self._most, max(self._limit * GROW, self._limit + 1)))
            self._grow_after = now + CLEAN_SECONDS

    def _set(self, limit: float) -> None:
        self._limit = limit
        self.resize(max(1, int(limit)))


class Client:
    """An open connection to one server; made inside a running loop, and good for that loop only."""

    def __init__(self, name: str, url: str, options: RemoteOptions) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.options = options
        self.traffic = Traffic()
        self._clock = clock()
        self.limit = AdaptiveLimit(options.in_flight, self._clock)
        self._prefix = uuid.uuid4().hex[:16]  # of every request id of this client
        self._made = 0
        key = options.key.read()
        self._marks = set[bytes]()
        self._hide = redactor(key, options)
        self._transport = open_transport(options)
        head = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._headers = head | ({"Authorization": f"Bearer {key}"} if key else {})
        self._has_key = bool(key)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def look(self, path: str, body: dict[str, Any] | None = None) -> HttpReply:
        """One short question about the server itself, posted where it has a body, not retried; any
        status is an answer.

        :raises EngineUnavailable: no whole reply came.
        :raises EngineTimeout: none came in time.
        """
        data = None if body is None else msgspec.json.encode(body)
        try:
            with anyio.fail_after(min(_LOOK_SECONDS, self.options.timeout_seconds)):
                return await self._send(self.url + path, data, self._headers, _LOOK_BYTES)
        except Lost as lost:
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
        """Send a request under a fresh id until its reply can be read; one deadline holds for all
        attempts.

        An attempt that was given up, or whose reply was lost on the way, is aborted on the server.
        `tokens` is how many the request is about, given and wanted: a reply that is longer than
        they can account for is not read to its end.

        :raises EngineTimeout: the deadline passed.
        :raises EngineError: every attempt failed, or the server refused the request for good.
        """
        attempt = 1
        last = ""
        with anyio.CancelScope(deadline=self._clock() + self.options.timeout_seconds):
            while True:
                try:
                    return read(
                        self._judge(
                            await self._once(make, abort, _BASE_BYTES + _TOKEN_BYTES * tokens)
                        )
                    )
                except EngineError as error:
                    if not error.retryable or attempt == self.options.attempts:
                        raise
                    wait = error.wait if isinstance(error, Refused) else 0.0
                    last = f"; the attempt before failed: {error.problem}"
                self.traffic.retries += 1
                salt = int(self._prefix, 16) + self._made
                await anyio.sleep(
                    max(wait, backoff(attempt, self.options.delay_seconds, salt=salt))
                )
                attempt += 1
        raise EngineTimeout(self.name, f"no answer within {self.options.timeout_seconds:g} s{last}")

    async def _once(
        self, make: Callable[[str], Call], abort: Callable[[str], Call | None], most: int
    ) -> HttpReply:
        self._made += 1
        # of one length: SGLang aborts every id that begins like the one named
        rid = f"{self._prefix}{self._made:016x}"
        url, body, headers = self._packed(make(rid))
        if not self.limit.take_nowait():
            await self.limit.take()
        try:
            self.traffic.attempts += 1
            return await self._send(url, body, headers, most)
        except Lost as lost:
            self.traffic.lost += 1
            if lost.sent:
                await self._abort(abort(rid))
            raise self._unreachable(lost) from lost
        except anyio.get_cancelled_exc_class():
            await self._abort(abort(rid))
            raise
        finally:
            self.limit.give()

    async def _send(
        self, url: str, body: bytes | None, headers: Mapping[str, str], most: int
    ) -> HttpReply:
        """A reply in which no secret of ours is left, whatever the server echoes."""
        try:
            reply = await self._transport.send(url, body, headers, most)
        except Lost as lost:
            lost.args = (self._hide(str(lost).encode(errors="replace")).decode(),)
            raise
        return HttpReply(reply.status, self._hide(reply.body), reply.retry_after)

    def _packed(self, call: Call) -> tuple[str, bytes, dict[str, str]]:
        """The call as bytes: thousands wait at once, and what they keep alive the garbage collector
        visits.
        """
        headers = {**self._headers, **call.headers} if call.headers else self._headers
        return self.url + call.path, msgspec.json.encode(call.body), headers

    async def _abort(self, call: Call | None) -> None:
        """Tell the server, briefly, to free a request; the connection is closed already."""
        if call is None:
            return
        self.traffic.aborts += 1
        done = False
        with shielded(self.options.cancel_seconds):
            with suppress(Lost):  # counted below: a server that is gone has nothing left to abort
                data = msgspec.json.encode(call.body)
                reply = await self._send(self.url + call.path, data, self._headers, _BASE_BYTES)
                done = reply.status == 200
        self.traffic.aborts_failed += not done

    def _judge(self, reply: HttpReply) -> bytes:
        """The reply's body, or the error its status stands for."""
        if reply.status == 200:
            self.limit.answered()
            self._recognise(reply.body)
            return reply.body
        if reply.status in _RETRIED:
            (self.limit.refused if reply.status in (429, 503, 529) else self.limit.erred)()
            raise Refused(
                self.name, f"status {reply.status}: {said(reply.body)}", _seconds(reply.retry_after)
            )
        raise self.refusal(reply)

    def _recognise(self, body: bytes) -> None:
        """Count a reply under another name: the server may be another, though no connection broke."""
        ends = (
            body
            if len(body) <= 2 * _MARK_BYTES
            else body[:_MARK_BYTES] + b"\n" + body[-_MARK_BYTES:]
        )
        marks = b",".join(_MARK.findall(ends))
        if marks not in self._marks and len(self._marks) < _MOST_MARKS:
            self.traffic.renamed += bool(self._marks)
            self._marks.add(marks)

    def refusal(self, reply: HttpReply) -> EngineError:
        """The error of a status that another attempt would meet again."""
        words = said(reply.body)
        if reply.status in (401, 403):
            source = self.options.key
            where = str(source.file) if source.file else source.variable
            problem = "it refused the API key" if self._has_key else "it wants an API key"
            advice = (
                f"Put a valid key into {where}" if source.file else f"Set {where} to a valid key"
            )
            return UnsupportedByEngine(
                self.name, f"{problem} (status {reply.status}: {words})", advice
            )
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

    def _unreachable(self, lost: Lost) -> EngineError:
        if isinstance(lost, Unacceptable):
            return BadReply(self.name, str(lost))
        what = "lost the connection to" if lost.sent else "cannot reach"
        return EngineUnavailable(
            self.name, f"{what} {self.url} ({lost})", proxy_hint(self.url, self.options)
        )


def _seconds(words: str) -> float:
    """A Retry-After in seconds; dates and nonsense count as none."""
    try:
        return min(_LONGEST_WAIT, max(0.0, float(words)))
    except ValueError:
        return 0.0


HIDDEN = b"[API key]"
_SHORTEST = 8  # a shorter one is no secret, and may be a word that replies are made of


def redactor(key: str, options: RemoteOptions) -> Callable[[bytes], bytes]:
    r"""Takes the API key and the passwords of the proxies in use out of a text, also as JSON or
    URLs escape them.

    >>> redactor("sk-12/3456", RemoteOptions())(rb'{"error": "Bearer sk-12\/3456, sk-12%2F3456"}')
    b'{"error": "Bearer [API key], [API key]"}'
    """
    proxies = [value for name, value in os.environ.items() if name.lower().endswith("_proxy")]
    passwords = [
        urlsplit(proxy).password or "" for proxy in proxies if options.proxy == "environment"
    ]
    patterns = [
        "".join(map(_forms, secret)) for secret in (key, *passwords) if len(secret) >= _SHORTEST
    ]
    return partial(re.compile("|".join(patterns).encode()).sub, HIDDEN) if patterns else bytes


def _forms(letter: str) -> str:
    if letter.isalnum():
        return letter
    code = ord(letter)
    return rf"(?:\\?{re.escape(letter)}|\\u00{code:02x}|\\u00{code:02X}|%{code:02x}|%{code:02X})"
