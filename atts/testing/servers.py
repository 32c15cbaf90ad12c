"""HTTP servers around any engine that speak a serving engine's dialect, quirks included, and fail
on demand.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from anyio.from_thread import start_blocking_portal

from atts.engine import Engine
from atts.errors import ContextOverflow, EngineError, OptionError, UnsupportedByEngine, UsageError
from atts.testing.faults import drawn
from atts.testing.server_core import (
    NO_SERVER_FAULTS,
    PLAIN_SERVER,
    Refusal,
    Routes,
    ServerCall,
    ServerDialect,
    ServerFault,
    ServerFaults,
    ServerQuirks,
    ServerState,
)

if TYPE_CHECKING:
    from aiohttp import web


class DialectServer:
    """A server in a thread with its own loop, on a loopback port, from `with` to the end of the
    block.

    `make` makes the engine it serves, anew at every start. `kill` breaks every connection off,
    `restart` begins again on the same port; `faults` may be set while it runs. Needs aiohttp: `pip
    install 'atts[servers]'`.

    >>> from atts.testing import ScriptedEngine
    >>> import urllib.request
    >>> with DialectServer(ScriptedEngine, "vllm") as server:
    ...     urllib.request.urlopen(server.url + "/health").status
    200
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        dialect: ServerDialect = "vllm",
        *,
        model: str = "toy",
        key: str = "",
        quirks: ServerQuirks = PLAIN_SERVER,
        faults: ServerFaults = NO_SERVER_FAULTS,
        loading_seconds: float = 0.0,
        port: int = 0,
    ) -> None:
        if dialect not in get_args(ServerDialect):
            raise OptionError("dialect", f"{dialect!r} is unknown", get_args(ServerDialect))
        self.dialect: ServerDialect = dialect
        self.quirks = quirks
        self.faults = faults
        self.calls: list[str] = []  # the path of every call that does work
        self._make = make
        self._model = model
        self.key = key  # what it wants; may be changed while it runs
        self._loading_seconds = loading_seconds
        self._port = port
        self._random = random.Random(faults.seed)
        self._open: ExitStack | None = None
        self._state: ServerState | None = None
        self._ready_at: float | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> int:
        """How many requests it is at work on."""
        return len(self._state.jobs) if self._state else 0

    @property
    def served(self) -> int:
        """How many completions and scores it has given since its start."""
        return self._state.served if self._state else 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Listen; returns when it does.

        :raises BaseException: what kept it from starting.
        """
        assert self._open is None, "it runs already"
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(self._serving()))
            self._open = stack.pop_all()

    def kill(self) -> None:
        """Break off every connection and stop listening, as a killed process does; twice is fine."""
        stack = self._open
        self._open = None
        if stack is not None:
            stack.close()

    def restart(self, *, quirks: ServerQuirks | None = None) -> None:
        """Kill it and begin again on the same port, with other quirks if given."""
        self.kill()
        self.quirks = quirks or self.quirks
        self.start()

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None]:
        from aiohttp import web

        async with self._make() as engine:
            self._state = ServerState(engine, self._model, self.quirks)
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._answer)
            cancels = self.quirks.disconnect == "abort"
            runner = web.AppRunner(
                app, handler_cancellation=cancels, access_log=None, shutdown_timeout=0.0
            )
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self._port, backlog=4096, reuse_address=True)
            await site.start()
            self._port = runner.addresses[0][1]
            self._ready_at = None
            yield
            for scope in list(self._state.jobs.values()):
                scope.cancel()
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        path = request.path
        if self._is_loading():
            return _error(503, "Loading model", "unavailable_error")
        if path == "/health":
            return web.Response()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _json({"error": "Unauthorized"}, 401)
        routes = routes_of(self.dialect)
        fault: ServerFault | None = None
        if path in routes.work:
            self.calls.append(path)
            fault = drawn(self.faults.shares, self._random.random()) if self.faults.shares else None
        elif path not in routes.questions:
            return _json({"detail": "Not Found"}, 404)
        return await self._respond(request, routes, fault)

    def _is_loading(self) -> bool:
        """It loads from the first look on, so that it is seen to load however busy the machine is."""
        now = asyncio.get_running_loop().time()
        if self._ready_at is None:
            self._ready_at = now + self._loading_seconds
        return now < self._ready_at

    async def _respond(
        self, request: web.Request, routes: Routes, fault: ServerFault | None
    ) -> web.StreamResponse:
        from aiohttp import web

        state = self._state
        assert state is not None, "it serves while it has an engine"
        if fault == "refused":
            return _broken(request)
        if fault == "429":
            return _json(
                {"error": {"message": "Too many requests"}},
                429,
                {"Retry-After": self.faults.retry_after},
            )
        if fault == "500":
            return _error(500, "Internal server error", "InternalServerError")
        if fault == "hang":
            await asyncio.sleep(3600)
        try:
            body: Any = await request.json() if request.can_read_body else {}
            call = ServerCall(state, body, request.headers, fault)
            path = request.path
            reply = (
                await routes.work[path](call)
                if path in routes.work
                else routes.questions[path](call)
            )
        except Refusal as refusal:
            return _error(refusal.status, str(refusal), "BadRequestError")
        except (
            UsageError,
            ContextOverflow,
            UnsupportedByEngine,
            KeyError,
            ValueError,
            TypeError,
        ) as error:
            return _error(400, str(error), "BadRequestError")
        except EngineError as error:
            return _error(500, str(error), "InternalServerError")
        if isinstance(reply, str):
            return web.Response(text=reply)
        return await _delivered(request, json.dumps(reply).encode(), fault)


async def _delivered(
    request: web.Request, data: bytes, fault: ServerFault | None
) -> web.StreamResponse:
    from aiohttp import web

    kind = "application/json"
    if fault == "truncated":
        return web.Response(body=data[: len(data) // 2], content_type=kind)
    if fault not in ("reset", "slow_loris"):
        return web.Response(body=data, content_type=kind)
    response = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(len(data))})
    await response.prepare(request)
    if fault == "reset":
        await response.write(data[: len(data) // 2])
        return _broken(request, response)
    for byte in data:
        await response.write(bytes([byte]))
        await asyncio.sleep(1.0)
    return response


def _broken(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    from aiohttp import web

    if request.transport is not None:
        request.transport.abort()
    return response or web.Response()


def _json(value: Any, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    from aiohttp import web

    return web.Response(
        body=json.dumps(value).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def _error(status: int, message: str, kind: str) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "code": status}}, status)


def routes_of(dialect: ServerDialect) -> Routes:
    """What a dialect answers, and how."""
    found: Routes = importlib.import_module(f"atts.testing.servers_{dialect}").ROUTES
    return found
