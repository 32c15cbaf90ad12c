"""How fast servers are spoken to: against a bare aiohttp loop, in the same run, at the same server."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import anyio
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from atts.concurrency import collect
from atts.core import SampleRequest
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions
from atts.testing import ToyTokenizer
from scripts.studies.harness import Options, Row, Spread, Table, say

DELAY_SECONDS = 0.05
# for connections, too: on a busy machine thousands of them take their time
PATIENCE_SECONDS = 300.0
TOKENS = 8
PROMPT = tuple(range(4, 68))


def study(options: Options) -> list[Table]:
    """Requests a second and processor time a request, at 1,000 and 4,000 in flight."""
    repeats = options.pick(1, 3, 5)
    requests = options.pick(400, 4000, 20000)
    rows: list[Row] = []
    gc.set_threshold(20_000, 10, 10)  # as the command line does, here for all three
    with _server() as url:
        for in_flight in options.pick((100,), (1000, 4000), (256, 1000, 4000)):
            count = max(requests, 2 * in_flight)
            small = min(count, 4 * in_flight, 2000)
            costs: dict[str, list[tuple[float, float]]] = {
                "aiohttp": [],
                "atts": [],
                "atts on trio": [],
            }
            for number in range(repeats + 1):
                say(f"{in_flight} in flight, round {number} of {repeats}")
                costs["aiohttp"].append(anyio.run(_bare, url, in_flight, count))
                costs["atts"].append(anyio.run(_ours, url, in_flight, count))
                costs["atts on trio"].append(
                    anyio.run(_ours, url, in_flight, small, backend="trio")
                )
            base = [speed for speed, _ in costs["aiohttp"][1:]]
            for name, each in costs.items():
                speeds, cpu = zip(*each[1:], strict=True)
                shares = [mine / theirs for mine, theirs in zip(speeds, base, strict=True)]
                rows.append(
                    (in_flight, name, *(str(Spread.of(values)) for values in (speeds, shares, cpu)))
                )
    ours = [row for row in rows if row[1] == "atts"][-1]
    table = Table.of(
        "Throughput of servers",
        "in flight | client | requests/s | of aiohttp | client CPU ms/request",
        rows,
        f"A server in a process of its own answers completions of {TOKENS} tokens after "
        f"{DELAY_SECONDS * 1000:g} ms. "
        "Server and client share the machine's cores, so requests a second are the two's together; "
        "the ratio is of "
        "rounds measured in turn, and processor time is the client's alone. The first round is not "
        "counted. "
        "All collect garbage as the command line does, every 20,000 new objects.",
        headline=f"{ours[2]} requests/s at {ours[0]} in flight, {ours[3]} of a bare aiohttp loop's",
    )
    return [table]


async def _ours(url: str, in_flight: int, count: int) -> tuple[float, float]:
    """As pipelines call it."""
    options = RemoteOptions(
        in_flight=in_flight, connect_seconds=PATIENCE_SECONDS, recheck_seconds=3600
    )
    async with RemoteEngine(
        url, dialect="vllm", tokenizer=ToyTokenizer(), options=options
    ) as engine:
        return await _timed(
            lambda number: engine.sample(SampleRequest(PROMPT, TOKENS, seed=Seed(sample=number))),
            in_flight,
            count,
        )


async def _bare(url: str, in_flight: int, count: int) -> tuple[float, float]:
    """As one writes it by hand: the same fields out, ids and log-probs in; no limits, retries,
    checks or aborts.
    """
    body = {
        "model": "toy", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True, "stop_token_ids": [1],
    }  # fmt: skip
    async with ClientSession(
        connector=TCPConnector(limit=0), timeout=ClientTimeout(PATIENCE_SECONDS)
    ) as session:

        async def ask(number: int) -> tuple[list[int], list[float]]:
            data = json.dumps({**body, "seed": number}).encode()
            async with session.post(url + "/v1/completions", data=data) as reply:
                choice = json.loads(await reply.read())["choices"][0]
                return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        return await _timed(ask, in_flight, count)


async def _timed(
    ask: Callable[[int], Awaitable[Any]], in_flight: int, count: int
) -> tuple[float, float]:
    """Requests a second, and milliseconds of processor time for each."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await ask(number)

    began = time.perf_counter()
    cpu = time.process_time()
    await collect([work] * in_flight)
    took = time.perf_counter() - began
    return count / took, 1000 * (time.process_time() - cpu) / count


@contextmanager
def _server() -> Generator[str]:
    """A server that answers what vLLM would, at once but for the delay, in a process of its own."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    asyncio.run(_answer(pipe))


async def _answer(pipe: Connection) -> None:
    """Completions are canned, but for the probe's questions, which get a plausible word."""
    tokenizer = ToyTokenizer()
    model = {"id": "toy", "root": "toy", "max_model_len": 8192}
    fixed: dict[str, Any] = {
        "/version": {"version": "0.33.0"},
        "/v1/models": {"data": [model]},
        "/health": {},
    }

    async def plain(request: web.Request) -> web.Response:
        if request.path == "/tokenize":
            return web.json_response({"tokens": tokenizer.encode((await request.json())["prompt"])})
        return web.json_response(
            fixed.get(request.path, {}), status=200 if request.path in fixed else 404
        )

    async def completions(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        count = int(body["max_tokens"])
        choice: dict[str, Any] = {
            "token_ids": list(range(4, 4 + count)),
            "finish_reason": "length",
            "index": 0,
        }
        choice["logprobs"] = {"token_logprobs": [-0.5] * count}
        if body.get("prompt_logprobs") is not None:
            rows = [
                {str(token): {"logprob": -0.5 if token < 4 + 12 else -9.0}}
                for token in body["prompt"][1:]
            ]
            choice["prompt_logprobs"] = [None, *rows]
        await asyncio.sleep(DELAY_SECONDS)
        return web.json_response({"choices": [choice], "usage": {}})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", completions)
    app.router.add_route("*", "/{path:.*}", plain)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
    await site.start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()
