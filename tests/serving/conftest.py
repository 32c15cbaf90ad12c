"""Fixtures of a server on a free port of this machine, in the test's own event loop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2

from atts.api import Setup
from atts.concurrency import background
from atts.serving import ServeOptions, Service, run_server
from atts.testing import Latency, ScriptedEngine

MODEL = "atts/toy"
QUESTION = "Start at 4. +3, -2. What is the result?"


def toy_setup(latency: Latency | None = None, **changes: Any) -> Setup:
    """Make settings with scripted engines of this latency, in seconds."""
    if latency is None:
        return Setup(draft="scripted", target="scripted", **changes)
    return Setup(
        draft=ScriptedEngine("draft", latency=latency),
        target=ScriptedEngine("target", latency=latency),
        **changes,
    )


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the server, and the service behind it."""

    service: Service
    http: httpx2.AsyncClient

    async def chat(self, **fields: Any) -> httpx2.Response:
        """Ask the toy question, or the question given in the fields."""
        return await self.http.post("/chat/completions", json=body(**fields))


def body(**fields: Any) -> dict[str, Any]:
    """Return a request's body."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": MODEL, "messages": messages, **fields}


@asynccontextmanager
async def serving(
    setup: Setup | None = None, key: str | None = None, **options: Any
) -> AsyncGenerator[Client]:
    """Run a server until the end of the block."""
    if key is not None:
        options["keys"] = {key: ""}
    service = Service(setup or toy_setup(), ServeOptions(name=MODEL, **options))
    listening = anyio.Event()
    addresses: list[str] = []

    def heard(address: str) -> None:
        addresses.append(address)
        listening.set()

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with background(partial(run_server, service, "127.0.0.1", 0, heard)):
        await listening.wait()
        async with httpx2.AsyncClient(base_url=addresses[0], headers=headers, timeout=60) as http:
            yield Client(service, http)


async def stream_events(client: Client, **fields: Any) -> list[Any]:
    """Return the events of a streamed reply, without the end mark."""
    got: list[Any] = []
    async with client.http.stream(
        "POST", "/chat/completions", json=body(stream=True, **fields)
    ) as response:
        assert response.status_code == 200
        assert response.headers["cache-control"] == "no-cache, no-transform"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                got.append(line.removeprefix("data: "))
    assert got.pop() == "[DONE]"
    return [json.loads(line) for line in got]


def started_server(
    state: Path, seconds: float = 0.0, requests: int = 64
) -> tuple[subprocess.Popen[str], str]:
    """Start a server with this latency per call, in seconds; return its process and its address."""
    words = [str(state), str(seconds), str(requests)]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.serving.server_process", *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert server.stdout is not None
    return server, server.stdout.readline().strip()
