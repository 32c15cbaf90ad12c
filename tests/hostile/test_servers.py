"""Tests of hostile servers with both transports: bombs, endless bodies, redirects, forged
certificates, echoed keys.
"""

from __future__ import annotations

import ssl
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from atts.errors import BadReply, EngineError, EngineUnavailable
from atts.servers import RemoteOptions
from atts.servers.client import (
    AiohttpTransport,
    Call,
    Client,
    HttpxTransport,
)

pytestmark = pytest.mark.anyio
Reply = tuple[int, Mapping[str, str], Iterable[bytes]]
CANARY = "sk-canary-12/34567890abcdef"
CERTIFICATE = Path(__file__).with_name("self_signed.pem")
# Clients check the server's identity again only after a lost connection or a changed model name,
# not after some time. Tests count requests, and on a busy machine seconds may pass between two
# requests.
QUICK = RemoteOptions(
    timeout_seconds=60.0,
    delay_seconds=0.001,
    connect_seconds=20.0,
    attempts=2,
    idle_seconds=1e9,
    recheck_seconds=1e9,
    recheck_requests=10**9,
)


class HostileServer:
    """A server whose function `answer` decides each reply, and which records requests and
    headers.
    """

    def __init__(self, answer: Callable[[str], Reply], certificate: Path | None = None) -> None:
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                asked.append((self.path, dict(self.headers)))
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, chunks = answer(self.path)
                self.close_connection = True
                try:
                    self.send_response(status)
                    for name, value in {"Connection": "close", **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for chunk in chunks:
                        self.wfile.write(chunk)
                except OSError:
                    return  # the client closed the connection, as it should

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # ignore errors of handshakes that the client aborted

        self._server = Server(("127.0.0.1", 0), Handler)
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            scheme = "https"
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Generator[HostileServer]:
        """Listen until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def once(body: bytes, status: int = 200, **headers: str) -> Reply:
    """Make a reply that is sent at once."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, {"Content-Length": str(len(body)), **named}, (body,)


def endless(first: bytes, again: bytes, status: int = 200, **headers: str) -> Reply:
    """Make a reply that never ends."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, chain((first,), iter(lambda: again, None))


@pytest.fixture
def hostile() -> Iterator[Callable[..., HostileServer]]:
    """Return a function that starts servers, which stop at the end of the test."""
    with ExitStack() as stack:

        def start(answer: Callable[[str], Reply], **settings: Any) -> HostileServer:
            return stack.enter_context(HostileServer(answer, **settings).serving())

        yield start


@pytest.fixture(params=["aiohttp on asyncio", "httpx2 on asyncio", "httpx2 on trio"])
def meeting(request: pytest.FixtureRequest) -> str:
    """Choose a transport and its event loop."""
    return str(request.param)


@pytest.fixture
def anyio_backend(meeting: str) -> str:
    """Choose the event loop of that transport."""
    return meeting.split(" on ")[1]


@pytest.fixture
def connect(meeting: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Client]:
    """Return a function that makes clients on that transport."""
    kind = AiohttpTransport if meeting.startswith("aiohttp") else HttpxTransport
    monkeypatch.setattr("atts.servers.client.open_transport", kind)
    return lambda url, options=QUICK: Client("hostile", url, options)


async def ask(client: Client, tokens: int = 100) -> bytes:
    """Send one call, and return its unparsed reply."""

    def make(rid: str) -> Call:
        return Call("/work", {})

    return await client.ask(make, bytes, lambda rid: None, tokens)


MEBIBYTE = 1 << 20
DEFLATED = zlib.compress(bytes(32 * MEBIBYTE))
BOMB = b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + DEFLATED[2:]
FLOODS: dict[str, Callable[[str], Reply]] = {
    "gzip bomb": lambda path: once(BOMB, Content_Encoding="gzip"),
    "deflate bomb": lambda path: once(DEFLATED, Content_Encoding="deflate"),
    "gzip that is none": lambda path: once(b"[1, 2]", Content_Encoding="gzip"),
    "brotli": lambda path: once(b"\x8b\x02\x80[1, 2]\x03", Content_Encoding="br"),
    "gzip in gzip": lambda path: once(BOMB, Content_Encoding="gzip, gzip"),
    "no end": lambda path: endless(b"[", b"1," * 8192),
    "no end, empty blocks": lambda path: endless(
        b"\x78\x9c", b"\x00\x00\x00\xff\xff" * 4096, Content_Encoding="deflate"
    ),
    "a gigabyte": lambda path: endless(b"[", b"1," * 8192, Content_Length=str(1 << 30)),
    "a header without end": lambda path: once(b"[]", X_Long="x" * MEBIBYTE),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_replys_size_is_bounded_by_the_request(
    hostile: Callable[..., HostileServer], connect: Callable[..., Client], flood: str
) -> None:
    """A reply that is larger than its request allows is refused after the permitted number of
    attempts.

    Decompression of a compressed reply stops at this limit.
    """
    server = hostile(FLOODS[flood])
    client = connect(server.url)
    tracemalloc.start()
    try:
        with pytest.raises((BadReply, EngineUnavailable)):
            await ask(client)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        await client.aclose()
    assert peak < 8 * MEBIBYTE
    assert len(server.asked) == QUICK.attempts


async def test_what_is_within_the_limit_is_read(
    hostile: Callable[..., HostileServer], connect: Callable[..., Client]
) -> None:
    """The limit on a reply's size grows with the number of requested tokens. A reply in gzip is
    accepted although atts does not request compression.
    """
    text = b"[" + b"1," * (MEBIBYTE // 2) + b"1]"
    packed = zlib.compressobj(wbits=31)
    replies = {"/work": once(packed.compress(text) + packed.flush(), Content_Encoding="gzip")}
    client = connect(hostile(replies.__getitem__).url)
    assert await ask(client, 1000) == text
    await client.aclose()


@pytest.mark.parametrize("status", [500, 400, 401, 404])
async def test_an_endless_error_body_is_cut(
    hostile: Callable[..., HostileServer], connect: Callable[..., Client], status: int
) -> None:
    """The error about an endless error body quotes only its beginning, in a line of limited
    length.
    """
    server = hostile(lambda path: endless(b"out of luck", b" and so on" * 1000, status))
    client = connect(server.url)
    with pytest.raises(EngineError, match="out of luck") as refused:
        await ask(client)
    await client.aclose()
    assert not isinstance(refused.value, BadReply)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(
    hostile: Callable[..., HostileServer],
    connect: Callable[..., Client],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither handshakes nor calls follow a redirect, which would send the key to another
    server.
    """
    monkeypatch.setenv("ATTS_API_KEY", CANARY)
    elsewhere = hostile(lambda path: once(b"[]"))
    client = connect(hostile(lambda path: once(b"", status, Location=f"{elsewhere.url}/steal")).url)
    assert (await client.look("/health")).status == status
    assert (await client.look("/tokenize", {})).status == status
    with pytest.raises(EngineError, match=str(status)):
        await ask(client)
    await client.aclose()
    assert not elsewhere.asked


async def test_certificates_are_verified(
    hostile: Callable[..., HostileServer],
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unknown certificate and a certificate for another name are refused before the key is sent."""
    monkeypatch.setenv("ATTS_API_KEY", CANARY)
    server = hostile(lambda path: once(b"[]"), certificate=CERTIFICATE)
    trusting = replace(QUICK, ca_file=CERTIFICATE)
    for url, options in (
        (server.url, QUICK),
        (server.url.replace("127.0.0.1", "localhost"), trusting),
    ):
        client = connect(url, options)
        with pytest.raises(EngineUnavailable, match=r"(?i)certificate"):
            await ask(client)
        await client.aclose()
    assert not server.asked
    client = connect(server.url, trusting)
    assert await ask(client) == b"[]"
    await client.aclose()


async def test_retry_after_is_limited_to_half_a_minute(
    hostile: Callable[..., HostileServer],
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client waits as long as the server's Retry-After header says, but at most 30 seconds.
    Dates, negative numbers and other values are ignored.
    """
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    wishes = [
        ("31536000", 30),
        ("1e308", 30),
        ("inf", 30),
        ("nan", 1),
        ("-5", 1),
        ("soon", 1),
        ("7", 7),
    ]
    client = connect(hostile(lambda path: once(b"later", 429, Retry_After=wishes[0][0])).url)
    with monkeypatch.context() as patched:
        patched.setattr("atts.servers.client.anyio.sleep", sleep)
        while wishes:
            with pytest.raises(EngineUnavailable, match="later"):
                await ask(client)
            (waited,) = slept
            (_, most) = wishes.pop(0)
            assert waited == most if most > 1 else waited < 1
            slept.clear()
    await client.aclose()


ECHOES: dict[str, bytes] = {
    "plain": b"Authorization: Bearer %b",
    "JSON": b'{"error": {"message": "bad token \\"%b\\" in Authorization"}}',
    "nested": b'{"error": {"error": [{"headers": {"Authorization": ["Bearer %b"]}}]}}',
}


@pytest.mark.parametrize("echo", ECHOES)
async def test_no_echo_of_the_key_leaves_the_client(
    hostile: Callable[..., HostileServer],
    connect: Callable[..., Client],
    echo: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any status, neither the reply nor the error contains the key, plain or escaped as in JSON
    and URLs.
    """
    monkeypatch.setenv("ATTS_API_KEY", CANARY)
    forms = (
        CANARY,
        CANARY.replace("/", "\\/"),
        CANARY.replace("/", "%2F"),
        CANARY.replace("/", "\\u002f"),
    )
    replies = [
        once(ECHOES[echo] % form.encode(), status)
        for form in forms
        for status in (200, 400, 401, 404, 500)
    ]
    client = connect(hostile(lambda path: replies[0]).url, replace(QUICK, attempts=1))
    while replies:
        told = [(await client.look("/version")).body.decode()]
        try:
            told.append((await ask(client)).decode())
        except EngineError as error:
            told.append(f"{error!r} {error}")
        assert "[API key]" in told[0]
        assert not [text for text in told if "canary" in text]
        replies.pop(0)
    await client.aclose()


async def test_a_key_in_a_transport_error_is_hidden(
    hostile: Callable[..., HostileServer],
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transport's error may quote bytes that it could not read, so a key in them is hidden."""
    monkeypatch.setenv("ATTS_API_KEY", CANARY)
    client = connect(hostile(lambda path: once(b"", Content_Encoding=CANARY)).url)
    with pytest.raises(BadReply, match="encoded as") as refused:
        await ask(client)
    await client.aclose()
    assert "canary" not in str(refused.value)
