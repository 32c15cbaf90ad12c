"""HTTP transports: aiohttp on asyncio, httpx2 elsewhere."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import ssl
import zlib
from collections.abc import AsyncIterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from atts.errors import MissingExtra, OptionError
from atts.servers.options import RemoteOptions

# httpx2's pool is searched linearly: many small ones are faster than one large one.
SHARDS = 16
# The limit for the body of an error, which only people read.
ERROR_BYTES = 1 << 16
# Shorter than the servers' (uvicorn closes after 5), so that they never close first.
KEEP_ALIVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class HttpReply:
    """The reply of a server, whatever its status."""

    status: int
    body: bytes
    retry_after: str = ""


class ConnectionLost(Exception):
    """No complete reply came; `sent` says whether the server may be processing the request."""

    def __init__(self, problem: str, *, sent: bool) -> None:
        super().__init__(problem)
        self.sent = sent


class ReplyRejected(ConnectionLost):
    """A reply is too long, or compressed in a way that was not asked for."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, sent=True)


def open_transport(options: RemoteOptions) -> Transport:
    """Open the fastest transport that runs here.

    It is aiohttp under asyncio, and httpx2 under trio or where aiohttp is missing.

    :raises MissingExtra: neither is installed.
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
    """A transport that sends by aiohttp, on asyncio only."""

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
        """Send one request, a POST where it has a body.

        It is never retried, nor redirected, because the API key would go elsewhere.

        :raises ReplyRejected: the reply is longer than `most` bytes.
        :raises ConnectionLost: no whole reply came.
        """
        library = self._library
        try:
            method = "GET" if body is None else "POST"
            request = self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            )
            # gives the connection back, or closes it when not all was read
            async with request as response:
                whole = await _whole(
                    response.status, response.headers, response.content.iter_any(), most
                )
                return HttpReply(response.status, whole, response.headers.get("Retry-After", ""))
        except (library.ClientConnectorError, library.ConnectionTimeoutError) as error:
            raise ConnectionLost(_error_words(error), sent=False) from error
        except library.InvalidURL as error:
            raise OptionError("url", f"{url!r} is not a URL") from error
        except (library.ClientError, OSError) as error:  # time-outs are OSErrors
            raise ConnectionLost(_error_words(error), sent=True) from error

    async def aclose(self) -> None:
        """Close every connection; closing twice is fine."""
        await self._session.close()


class HttpxTransport:
    """A transport that sends by httpx2, in shards, on asyncio and trio."""

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
                        # ends every generator that hands them on, where not all was read
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
        """Close every connection; closing twice is fine."""
        for client in self._clients:
            await client.aclose()


Transport = AiohttpTransport | HttpxTransport
"""An open set of connections; cancelling a call closes its connection."""


async def _whole(
    status: int, headers: Mapping[str, str], chunks: AsyncIterable[bytes], most: int
) -> bytes:
    """Read a body, and inflate it as it comes.

    Neither the bytes that come nor those they become are ever more than `most`: an error is then
    cut, an answer refused.

    :raises ReplyRejected: it is longer, or in an encoding that nothing here asked for.
    """
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "deflate"):
        raise ReplyRejected(f"its reply is encoded as {encoding[:40]!r}, which was not asked for")
    body = _Body(
        most if status == 200 else ERROR_BYTES,
        zlib.decompressobj(47) if encoding in ("gzip", "deflate") else None,
    )
    async for chunk in chunks:
        if not body.take(chunk):
            break
    if body.flaw and status == 200:
        raise ReplyRejected(f"its reply {body.flaw}")
    return bytes(body.text[: body.most])


class _Body:
    """The part of a reply that was read, and its flaw if it has one."""

    def __init__(self, most: int, inflater: Any) -> None:
        self.most = most
        self.text = bytearray()
        self.flaw = ""
        self._inflater = inflater
        self._came = 0

    def take(self, chunk: bytes) -> bool:
        """Add the next bytes; return whether the reply is still acceptable."""
        self._came += len(chunk)
        try:
            room = self.most + 1 - len(self.text)
            self.text += chunk if self._inflater is None else self._inflater.decompress(chunk, room)
        except zlib.error as error:
            self.flaw = f"is not compressed as it says ({error})"
        if max(self._came, len(self.text)) > self.most:
            self.flaw = f"is longer than {self.most:,} bytes: what was asked for takes less"
        return not self.flaw


def proxy_hint(url: str, options: RemoteOptions) -> str:
    """Return advice for a failed connection if a proxy is set in the environment, else nothing."""
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
        return f"{names[0]} is set and was not used; ?proxy=environment at the end of its address uses it"
    return f"The connection went by the proxy of {names[0]}; ?proxy=never at the end of its address goes straight"


def _certificates(options: RemoteOptions) -> Any:
    """Return the certificates that TLS trusts; they are verified in any case."""
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
    """Return the system's words for the error, or its name with the first message that it or its
    causes have.
    """
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    for cause in causes:
        # Libraries add names of their own parts to what the system said. The numbers of TLS errors
        # are not the system's.
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, ssl.SSLError):
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    message = next((str(cause) for cause in causes if str(cause)), "")
    name = type(error).__name__
    return f"{name}: {message}" if message else name
