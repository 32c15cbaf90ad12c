"""Cost of the endpoint compared with a bare echo, and the resources that it holds after hours."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from atts.serving import ServeOptions, Service, run_server
from atts.testing import ScriptedEngine
from scripts.studies.harness import Options, Row, Spread, Table, say

CONNECTIONS = 16
_LOOKS = 20  # at the process, in a soak
_SOAK_RATE = 12  # requests a second: a quarter of a core
QUESTION = "Start at 4. +3, -2. What is the result?"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def study_serve(options: Options) -> list[Table]:
    """Measure processor time per request, in turn with a bare echo."""
    repeats = options.pick(1, 3, 5)
    count = options.pick(100, 400, 2_000)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "bare Starlette echo": ("echo", {}),
        "one rollout of the draft": ("atts", _body(model="draft")),
        "policy fast": ("atts", _body(model="atts/toy:fast")),
        "policy balanced": ("atts", _body()),
        "policy balanced, streamed": ("atts", _body(stream=True)),
        "policy balanced, journalled ledger": ("state", _body()),
    }
    costs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    with _servers() as servers:
        for number in range(repeats + 1):
            for name, (server, body) in kinds.items():
                say(f"{name}, round {number} of {repeats}")
                cost = anyio.run(_measure, *servers[server], body, count)
                if number:  # the first round warms up
                    costs[name].append(cost)
    rows: list[Row] = []
    for name, each in costs.items():
        cpu, speeds, calls = zip(*each, strict=True)
        per_request = sum(calls) / len(calls)
        rows.append((name, str(Spread.of(cpu)), str(Spread.of(speeds)), round(per_request, 1)))
    table = Table.of(
        "Processor time of the endpoint",
        "request | server CPU ms/request | requests/s | engine calls/request",
        rows,
        f"Scripted engines in the server's process, {CONNECTIONS} connections, {count} requests a round, "
        f"{repeats} rounds measured in turn. Processor time is the server's alone, from /proc, the "
        "scripted engine's included. Client and servers share the machine's cores.",
        headline=f"{rows[1][1]} ms CPU for one rollout; a bare echo takes {rows[0][1]} ms",
    )
    return [table]


def study_soak(options: Options) -> list[Table]:
    """Ask one server for half an hour at a modest rate, and look at what its process holds."""
    seconds = options.pick(10, 60, 1_800)
    draw = random.Random(options.seed)
    done = Counter[str]()
    looks: list[Row] = []
    with _server("soak") as (address, pid):
        began = time.monotonic()
        for number in range(1, _LOOKS + 1):
            until = began + seconds * number / _LOOKS
            anyio.run(_mixture, address, until, draw.randrange(1 << 30), done)
            held = anyio.run(_status, address)
            looks.append(
                (
                    round(time.monotonic() - began),
                    sum(done.values()),
                    held["counts"]["in flight"],
                    sum(one["reserved"] for one in held["budgets"]),
                    len(os.listdir(f"/proc/{pid}/fd")),
                    len(os.listdir(f"/proc/{pid}/task")),
                    round(_resident(pid) / 1e6, 1),
                )
            )
            say(f"soak: {looks[-1]}")
    middle = looks[_LOOKS // 2 - 1]
    last = looks[-1]
    return [
        Table.of(
            "Soak of the endpoint: what the process holds",
            "seconds | requests | in flight | reserved | file descriptors | threads | resident MB",
            looks,
            f"About {_SOAK_RATE} requests a second, in a mixture drawn by seed {options.seed}: "
            f"{', '.join(f'{name} {number:,}' for name, number in sorted(done.items()))}. Counts "
            "are taken when all clients have gone. The server remembers its latest 1,000 runs, so "
            "memory grows until there are as many; background responses are kept for a minute here.",
            headline=f"{middle[6]} MB and {middle[4]} file descriptors at half time, {last[6]} MB "
            f"and {last[4]} after {last[1]:,} requests in {last[0]:,} s",
        )
    ]


def _body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "atts/toy",
        "messages": [{"role": "user", "content": QUESTION}],
        **fields,
    }


def _message(body: Any, path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _measure(
    address: tuple[str, int], pid: int, body: Any, count: int
) -> tuple[float, float, float]:
    """Return CPU milliseconds and engine calls per request, and requests per second."""
    before = await _calls(address)
    cpu = _cpu(pid)
    began = time.monotonic()
    left = iter(range(count))
    async with anyio.create_task_group() as group:
        for _ in range(CONNECTIONS):
            group.start_soon(_ask_all, address, _message(body), left)
    seconds = time.monotonic() - began
    spent = _cpu(pid) - cpu
    calls = await _calls(address) - before
    return 1_000 * spent / count, count / seconds, calls / count


async def _ask_all(address: tuple[str, int], message: bytes, left: Iterator[int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    for _ in left:
        writer.write(message)
        status, _ = await _answer(reader)
        assert status == 200, status
    writer.close()
    await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one HTTP response, of a length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split(" ", 2)[1])
    if "transfer-encoding: chunked" not in head:
        length = int(head.split("content-length: ", 1)[1].split("\r\n", 1)[0])
        return status, await reader.readexactly(length)
    parts: list[bytes] = []
    while size := int((await reader.readline()).strip(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, b"".join(parts)


async def _get(address: tuple[str, int], path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    answer = await _answer(reader)
    writer.close()
    await writer.wait_closed()
    return answer


async def _calls(address: tuple[str, int]) -> int:
    status, text = await _get(address, "/metrics")
    if status != 200:  # the echo has none
        return 0
    lines = [line for line in text.decode().splitlines() if line.startswith("atts_calls_total ")]
    return int(lines[0].split()[1])


async def _status(address: tuple[str, int]) -> dict[str, Any]:
    """Return the status once nothing is in flight."""
    with anyio.fail_after(60):
        while True:
            status: dict[str, Any] = json.loads((await _get(address, "/atts/status"))[1])
            if not status["counts"]["in flight"]:
                return status
            await anyio.sleep(0.05)


async def _mixture(address: tuple[str, int], end: float, seed: int, done: Counter[str]) -> None:
    """Ask until a time, as clients of every kind."""
    async with anyio.create_task_group() as group:
        for number in range(CONNECTIONS):
            group.start_soon(_client, address, end, random.Random(seed + number), done)


async def _client(
    address: tuple[str, int], end: float, draw: random.Random, done: Counter[str]
) -> None:
    bodies: dict[str, Any] = {
        "background": {"model": "draft", "input": QUESTION, "background": True},
        "whole": _body(),
        "streamed": _body(stream=True),
        "seeded": _body(seed=draw.randrange(100)),
        "draft": _body(model="draft", user=f"user {draw.randrange(50)}"),
        "refused": _body(atts={"sampels": 1}),
        "left": _body(stream=True),
    }
    while True:
        pause = draw.expovariate(_SOAK_RATE / CONNECTIONS)
        if time.monotonic() + pause >= end:
            await anyio.sleep(max(0.0, end - time.monotonic()))
            return
        await anyio.sleep(pause)
        kind = draw.choice(list(bodies))
        path = "/v1/responses" if kind == "background" else "/v1/chat/completions"
        reader, writer = await asyncio.open_connection(*address)
        writer.write(_message(bodies[kind], path))
        if kind == "left":
            await reader.readuntil(b"\r\n\r\n")
        else:
            await _answer(reader)
        writer.close()
        await writer.wait_closed()
        done[kind] += 1


def _cpu(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


@contextmanager
def _servers() -> Generator[dict[str, tuple[tuple[str, int], int]]]:
    with _server("echo") as echo, _server("atts") as atts, _server("state") as state:
        yield {"echo": echo, "atts": atts, "state": state}


@contextmanager
def _server(kind: str) -> Generator[tuple[tuple[str, int], int]]:
    """Start a server in a process of its own; yield its address and the process's id."""
    command = [sys.executable, "-m", "scripts.studies.serving", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        try:
            yield (host, int(port)), process.pid
        finally:
            process.terminate()


async def _serve(kind: str) -> None:
    """Serve until SIGTERM, and print the address first."""
    import tempfile

    if kind == "echo":
        await _echo()
        return
    from atts.api import Setup

    with tempfile.TemporaryDirectory() as folder:
        state = None if kind == "atts" else Path(folder)
        setup = Setup(draft=ScriptedEngine("draft"), target=ScriptedEngine("target"))
        options = ServeOptions(name="atts/toy", state=state)
        if kind == "soak":
            options = replace(options, response_seconds=60.0)
        service = Service(setup, options)
        await run_server(service, "127.0.0.1", 0, _heard)


def _heard(address: str) -> None:
    host, port = address.split("//")[1].split("/")[0].split(":")
    print(host, port, flush=True)


async def _echo() -> None:
    """Serve a bare Starlette application that returns the body, under the same settings."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", echo, methods=["POST"])])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, http="h11", lifespan="off", server_header=False
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _heard(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    anyio.run(_serve, sys.argv[1])
