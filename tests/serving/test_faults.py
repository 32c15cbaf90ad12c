"""Tests of faults around the endpoint: kill -9, clients that disconnect, slow readers, huge
requests.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import httpx2
import pytest

from atts.api import Setup
from atts.concurrency import task_group
from atts.core import Completion, SampleRequest
from atts.ledger import LEDGER, Amount, read_ledger
from atts.serving import POLICIES, RequestError, ServeOptions, Service, SolveRequest
from atts.testing import Faults, Latency, ScriptedEngine
from tests.serving.conftest import body, serving, toy_setup

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
ROOT = Path(__file__).resolve().parents[2]
CLOSED = (anyio.EndOfStream, anyio.BrokenResourceError)


def started(state: Path) -> tuple[subprocess.Popen[str], str]:
    """Start `atts serve` with scripted engines; return the process and its address."""
    words = ["serve", "--draft", "scripted", "--target", "scripted", "--name", "atts/toy"]
    server = subprocess.Popen(
        [sys.executable, "-m", "atts", *words, "--port", "0", "--state", str(state)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


def spent(state: Path) -> Amount:
    """Return the total amount that a ledger file records as spent."""
    return sum(read_ledger(state / LEDGER).values(), Amount())


def test_a_server_killed_in_a_stream_forgets_nothing_it_spent(tmp_path: Path) -> None:
    """After kill -9 the ledger counts at least the cost of all replies, and after a restart its
    total only grows.
    """
    replied = 0
    before = Amount()
    for _ in range(2):
        server, address = started(tmp_path)
        assert server.stdout is not None
        with server.stdout, httpx2.Client(base_url=address, timeout=60) as client:
            for _ in range(3):
                reply = client.post("/chat/completions", json=body()).json()
                replied += reply["atts"]["spent"]["calls"]
            with client.stream("POST", "/chat/completions", json=body(stream=True)) as response:
                next(response.iter_lines())
                os.kill(server.pid, signal.SIGKILL)
        server.wait()
        now = spent(tmp_path)
        assert now.calls >= replied
        assert now.calls > before.calls
        before = now


@pytest.mark.parametrize("clients", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_hundred_disconnecting_clients_leave_nothing(clients: int) -> None:
    """After a hundred clients disconnected, every counter of work in flight returns to 0 and the
    server still answers.
    """

    async def main() -> None:
        setup = toy_setup(Latency(per_sample=0.05, per_score=0.05))
        async with serving(setup, requests=32) as client:
            address = client.http.base_url
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
            data = httpx2.Request("POST", "http://a", json=body(stream=True)).content
            message = head + str(len(data)).encode() + b"\r\n\r\n" + data

            async def leave() -> None:
                stream = await anyio.connect_tcp(address.host, address.port or 80)
                async with stream:
                    await stream.send(message)
                    await stream.receive()  # the headers have arrived, so the work has begun

            for start in range(0, clients, 50):
                async with task_group() as group:
                    for _ in range(start, min(clients, start + 50)):
                        group.start_soon(leave)
            service = client.service
            with anyio.fail_after(60):
                while service.in_flight:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert service.account.reserved == Amount()
            assert service.counts.requests == clients
            assert service.counts.cancelled + service.counts.answered == clients
            engine = setup.draft
            assert isinstance(engine, ScriptedEngine)
            assert engine.stats().in_flight == 0
            assert (await client.chat()).status_code == 200

    anyio.run(main)


def test_a_slow_reader_delays_no_other_client() -> None:
    """The server pauses the stream of a slow reader, and answers other clients meanwhile."""

    async def main() -> None:
        async with serving() as client:
            address = client.http.base_url
            data = httpx2.Request("POST", "http://a", json=body(stream=True)).content
            message = (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
                + str(len(data)).encode()
                + b"\r\n\r\n"
                + data
            )
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                slow.setblocking(False)
                with anyio.fail_after(60):
                    stream = await anyio.connect_tcp(address.host, address.port or 80)
                    async with stream:
                        await stream.send(message)
                        replies: list[Any] = [await client.chat() for _ in range(5)]
            assert [reply.status_code for reply in replies] == [200] * 5

    anyio.run(main)


class Wordy(ScriptedEngine):
    """A draft that writes long chunks, and then waits in the middle of its text."""

    CHUNKS = 40

    def __init__(self) -> None:
        super().__init__("draft")
        self.asked = 0

    async def _sample(self, request: SampleRequest) -> Completion:
        self.asked += 1
        if self.asked > self.CHUNKS:
            await anyio.sleep_forever()
        written = await super()._sample(request)
        return replace(written, text="x" * 4_000, ended="length")


def buffered() -> int:
    """Return the largest number of bytes that any connection of this process has buffered."""
    transports = [one for one in gc.get_objects() if isinstance(one, asyncio.WriteTransport)]
    return max(one.get_write_buffer_size() for one in transports)


def test_a_reader_that_stops_fills_a_bounded_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a reader stops reading, the server pauses its stream and answers other clients.

    When the reader disconnects, the work is cancelled.
    """
    create = socket.create_server

    def small_buffers(*given: Any, **named: Any) -> socket.socket:
        """Listen on sockets with small buffers, so that far less than a megabyte fills them."""
        listener = create(*given, **named)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        return listener

    monkeypatch.setattr(socket, "create_server", small_buffers)

    async def main() -> None:
        draft = Wordy()
        async with serving(Setup(draft=draft, target="scripted")) as client:
            address = client.http.base_url
            asked = body(stream=True, model="draft")
            data = httpx2.Request("POST", "http://a", json=asked).content
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}"
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
                slow.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(slow, (address.host, address.port or 80))
                await loop.sock_sendall(slow, head.encode() + b"\r\n\r\n" + data)
                with anyio.fail_after(60):
                    while buffered() < 1 << 16:
                        assert (await client.chat(model="target")).status_code == 200
                # text that does not fit into the buffers waits in the server; the request's caps
                # limit its size
                with anyio.fail_after(60):
                    while draft.asked <= Wordy.CHUNKS:
                        assert (await client.chat(model="target")).status_code == 200
                assert buffered() < 1 << 17
                assert client.service.in_flight == 1
                reset = struct.pack("ii", 1, 0)
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            with anyio.fail_after(20):
                while client.service.in_flight:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            assert client.service.counts.cancelled == 1
            assert client.service.account.reserved == Amount()
            assert draft.stats().in_flight == 0

    anyio.run(main)


def test_a_flood_of_headers_is_refused() -> None:
    """A request with too many headers gets a client error."""

    async def main() -> None:
        async with serving() as client:
            headers = {f"x-{number}": "v" * 1_000 for number in range(200)}
            try:
                response = await client.http.get("/models", headers=headers)
                assert response.status_code in (400, 431)
            except httpx2.TransportError:
                pass  # the server may also close the connection
            assert (await client.chat()).status_code == 200

    anyio.run(main)


def test_a_body_of_100_megabytes_is_refused_after_the_first() -> None:
    """The server reads a body of 100 megabytes only up to its limit, keeps nothing of it, and
    answers the next request.
    """
    sent = 0

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal sent
        for _ in range(1_600):
            sent += 1 << 16
            yield b" " * (1 << 16)

    async def main() -> None:
        async with serving() as client:
            try:
                response = await client.http.post("/chat/completions", content=endless())
                assert response.status_code == 413
            except httpx2.TransportError:
                pass  # the server closed the connection while the client was still sending
            # the client may have sent more than the server's limit, because the sockets buffer some
            # bytes
            assert sent < 40 << 20
            assert (await client.chat()).status_code == 200
            assert client.service.in_flight == 0

    anyio.run(main)


def test_engines_that_fail_under_many_requests_leave_nothing() -> None:
    """If engines fail under many requests, each request gets a reply or a server error, and no
    reservation is left.
    """

    async def main() -> None:
        draft = ScriptedEngine("draft", faults=Faults({"refused": 0.2}, seed=3))
        async with serving(Setup(draft=draft, target="scripted")) as client:
            statuses: list[int] = []

            async def ask(stream: bool) -> None:
                response = await client.chat(stream=stream, atts={"samples": 1})
                if stream:
                    assert response.text.endswith("data: [DONE]\n\n")
                statuses.append(response.status_code)

            async with task_group() as group:
                for number in range(20):
                    group.start_soon(ask, number % 2 == 0)
            assert set(statuses) <= {200, 502}
            counts = client.service.counts
            assert counts.answered + counts.failed == counts.requests == 20
            assert client.service.in_flight == 0
            assert client.service.account.reserved == Amount()

    anyio.run(main)


def test_a_cancelled_server_closes_idle_connections() -> None:
    """A server that ends closes idle connections, which browsers keep open between two requests."""

    async def main() -> None:
        async with serving() as client:
            url = client.http.base_url
            stream = await anyio.connect_tcp(url.host, url.port or 0)
            await stream.send(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
            assert b" 200 " in await stream.receive()

        async def read_on() -> None:
            while True:
                await stream.receive()

        # the server's own limit for idle connections is five seconds
        async with stream:
            with anyio.fail_after(3), pytest.raises(CLOSED):
                await read_on()

    anyio.run(main)


class EndsLate:
    """A service that refuses a request just after its client disconnected."""

    def __init__(self) -> None:
        self.options = ServeOptions()
        self.has_ended = False

    def check_room(self, user: str) -> None:
        """Accept every request."""

    async def solve(self, *_: object, **__: object) -> None:
        """Ignore the cancellation for a moment, then refuse the request."""
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.01)
        self.has_ended = True
        raise RequestError("too late")


@pytest.mark.anyio
async def test_work_that_ends_as_its_client_leaves_is_not_an_error() -> None:
    """If work ends just as its client disconnects, the reply is dropped and no traceback is
    logged.
    """
    from atts.serving.streams import ChatEvents, EventStream

    service = EndsLate()
    request = SolveRequest("atts/toy", POLICIES["fast"], (("user", "What is 1 + 1?"),), stream=True)
    stream = EventStream(cast(Service, service), request, ChatEvents(request, "run"), "run")
    sent = list[MutableMapping[str, Any]]()

    async def receive() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await stream({"type": "http"}, receive, send)
    assert service.has_ended
    assert sent[0]["status"] == 200
