"""HTTP routes of the endpoint: check API keys, parse requests and send replies."""

from __future__ import annotations

import hmac
import logging
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atts.concurrency import task_group
from atts.errors import ATTSError, UsageError
from atts.files import from_json
from atts.serving.replies import Reply, ServedRun
from atts.serving.requests import RequestError, SolveRequest, parse_chat
from atts.serving.responses import ResponseEvents, Responses, parse_response, response_body
from atts.serving.service import Service, new_run
from atts.serving.status import metrics_text, page, server_status
from atts.serving.streams import ChatEvents, EventStream

_log = logging.getLogger("atts.serving")
_OPEN_PATHS = ("/health", "/ready", "/atts/view")
_CLOSE = {"Connection": "close"}
"""Header of a reply that rejects a request before its body was read. It closes the connection, so
that the server need not read the rest of the body.
"""
_USER = "atts.user"
"""Key in a request's ASGI scope under which the name of the API key's user is stored."""


def build_app(service: Service, responses: Responses) -> ASGIApp:
    """Return the ASGI application for a service. The caller must open the service."""
    endpoint = _Endpoint(service, responses)
    routes = [
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
        Route("/v1/responses", endpoint.respond, methods=["POST"]),
        Route("/v1/responses/{response}", endpoint.response, methods=["GET"]),
        Route("/v1/responses/{response}", endpoint.delete_response, methods=["DELETE"]),
        Route("/v1/responses/{response}/cancel", endpoint.cancel_response, methods=["POST"]),
        Route("/v1/models", endpoint.models, methods=["GET"]),
        Route("/atts/runs", endpoint.runs, methods=["GET"]),
        Route("/atts/runs/{run}", endpoint.run, methods=["GET"]),
        Route("/atts/runs/{run}/cancel", endpoint.cancel, methods=["POST"]),
        Route("/atts/status", endpoint.status, methods=["GET"]),
        Route("/atts/view", endpoint.view, methods=["GET"]),
        Route("/health", endpoint.health, methods=["GET"]),
        Route("/ready", endpoint.ready, methods=["GET"]),
        Route("/metrics", endpoint.metrics, methods=["GET"]),
    ]

    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_route,
            ATTSError: _failed,
            Exception: _failed,
        },
    )
    return _Guard(app, service.options.keys)


class _Guard:
    """ASGI middleware that rejects requests without a valid API key before their bodies are read.

    It stores the key's user in the request's ASGI scope.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]) -> None:
        self._app = app
        self._users = {f"Bearer {key}".encode(): user for key, user in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and scope["path"] not in _OPEN_PATHS
        if self._users and is_checked:
            given = dict(scope["headers"]).get(b"authorization", b"")
            user: str | None = None
            # compare with all keys, so that the duration reveals nothing about them
            for key, name in self._users.items():
                if hmac.compare_digest(given, key):
                    user = name
            scope[_USER] = user
            if user is None:
                error = RequestError(
                    "the API key is missing or wrong", status=401, code="invalid_api_key"
                )
                await _json(error.body, error.status, _CLOSE)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Endpoint:
    def __init__(self, service: Service, responses: Responses) -> None:
        self._service = service
        self._responses = responses

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion request, as a single reply or as a stream."""
        service = self._service
        options = service.options
        body = await _body(request, options.body_bytes)
        parsed = parse_chat(
            body,
            request.headers,
            service.offer,
            options.request_caps,
            housekeeping=options.housekeeping == "draft",
        )
        asked = self._checked(request, parsed)
        if asked.stream:
            run = new_run()
            return EventStream(service, asked, ChatEvents(asked, run), run)

        reply = await _until_disconnect(request, lambda: service.solve(asked))
        if reply is None:
            return Response(status_code=499)
        return _json(completion(reply))

    def _checked(self, request: Request, asked: SolveRequest) -> SolveRequest:
        """Check that a request can run now, and return it. If the API keys have users, the returned
        request names the user of its key.

        :raises RequestError: a field is wrong (the error names it), or the server is full (status
            429).
        """
        if self._service.options.has_named_keys:
            # The user comes from the API key, and not from the request. A client could otherwise
            # claim the share of another user.
            asked = replace(asked, user=_user(request))
        self._service.check(asked)
        # If the server is overloaded, refuse the request now. A stream sends its status before the
        # run begins, so it could not refuse later.
        self._service.check_room(asked.user)
        return asked

    async def respond(self, request: Request) -> Response:
        """Answer a request of the Responses API, as a single reply, as a stream, or with a
        background response.
        """
        service = self._service
        options = service.options
        body = await _body(request, options.body_bytes)
        parsed = parse_response(body, request.headers, service.offer, options.request_caps)
        asked = replace(parsed, solve=self._checked(request, parsed.solve))
        if asked.background:
            return _json(await self._responses.submit(asked, body, request.headers))
        run = new_run()
        created = int(time.time())

        def completed(reply: Reply) -> dict[str, Any]:
            whole = response_body(asked, run, created, "completed", reply)
            if asked.store:
                self._responses.keep(asked.solve.user, whole)
            return whole

        if asked.solve.stream:
            events = ResponseEvents(asked, run, created)
            return EventStream(service, asked.solve, events, run, completed)
        reply = await _until_disconnect(request, lambda: service.solve(asked.solve, run=run))
        if reply is None:
            return Response(status_code=499)
        return _json(completed(reply))

    async def response(self, request: Request) -> Response:
        """Return a response in its current state."""
        name = request.path_params["response"]
        return _json(await self._responses.find(name, _user(request)))

    async def cancel_response(self, request: Request) -> Response:
        """Cancel a background response, and return it in its final state."""
        name = request.path_params["response"]
        return _json(await self._responses.cancel(name, _user(request)))

    async def delete_response(self, request: Request) -> Response:
        """Delete a response. If it is still running, cancel it first."""
        name = request.path_params["response"]
        return _json(await self._responses.delete(name, _user(request)))

    async def models(self, request: Request) -> Response:
        """List the model names that requests can use."""
        names = self._service.offer.names
        created = int(self._service.began)
        return _json(
            {
                "object": "list",
                "data": [
                    {"id": each, "object": "model", "created": created, "owned_by": "atts"}
                    for each in names
                ],
            }
        )

    async def runs(self, request: Request) -> Response:
        """List the latest runs of the requesting user, newest first."""
        user = _user(request)
        latest = [
            served.as_json()
            for served in reversed(self._service.runs.values())
            if user in ("", served.user)
        ]
        return _json({"object": "list", "data": latest})

    async def run(self, request: Request) -> Response:
        """Return one run in its current state."""
        return _json(self._run(request).as_json(with_text="text" in request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Cancel one run.

        The client that started the run gets status 409, or an error event if it reads a stream.
        """
        served = self._run(request)
        return _json(self._service.cancel(served.run).as_json())

    async def status(self, request: Request) -> Response:
        """Return the server's status as JSON for the page `/atts/view`.

        Users with their own API key see only their own requests.
        """
        return _json(server_status(self._service, _user(request)))

    async def view(self, request: Request) -> Response:
        """Return the HTML page that shows the server's status."""
        return Response(page(), media_type="text/html")

    def _run(self, request: Request) -> ServedRun:
        """Return the run named in a request's path.

        :raises RequestError: if this user has no such run.
        """
        name = request.path_params["run"]
        served = self._service.find(name)
        if _user(request) not in ("", served.user):
            raise RequestError(f"there is no run {name!r}", status=404, param="run")
        return served

    async def health(self, request: Request) -> Response:
        """Answer with status 200 as long as the server process is alive."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answer with status 200 while the server accepts requests, or else with 503. Load
        balancers poll this route.
        """
        is_ready = self._service.is_ready
        return _json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the server's counters and gauges in Prometheus's text format."""
        return PlainTextResponse(
            metrics_text(self._service), media_type="text/plain; version=0.0.4"
        )


def _user(request: Request) -> str:
    """Return the user of a request's API key, or "" if the key has no user."""
    return request.scope.get(_USER) or ""


def completion(reply: Reply) -> dict[str, Any]:
    """Return the JSON body of a chat completion that is not streamed."""
    message = {
        "role": "assistant",
        "content": reply.content,
        "reasoning": reply.reasoning,
        "reasoning_content": reply.reasoning,
    }
    return {
        "id": f"chatcmpl-{reply.run}",
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.request.model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
        ],
        "usage": reply.usage(),
        "atts": reply.facts(),
    }


async def _body(request: Request, most: int) -> Any:
    """Read a request's body and parse it as JSON. The body may have at most `most` bytes.

    :raises RequestError: the body is too large, or is not JSON.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise RequestError(f"the request body is larger than {most} bytes", status=413)
    try:
        return from_json(data.decode())
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error


async def _until_disconnect(
    request: Request, solve: Callable[[], Awaitable[Reply]]
) -> Reply | None:
    """Run `solve` and return its reply. If the client disconnects first, cancel it and return
    None.
    """
    reply: Reply | None = None
    async with task_group() as group:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        reply = await solve()
        group.cancel_scope.cancel()
    return reply


def _json(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    data = msgspec.json.encode(body)
    return Response(data, status, headers=headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "this handler is registered only for RequestError"
    headers = dict(_CLOSE) if error.status == 413 else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return _json(error.body, error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "this handler is registered only for HTTPException"
    words = {404: "no such route", 405: "this route does not accept this HTTP method"}
    refusal = RequestError(words.get(error.status_code, error.detail), status=error.status_code)
    return _json(refusal.body, refusal.status)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer with status 500, because the request failed with an unexpected error.

    The details are written only to the server's log.
    """
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    refusal = RequestError(
        "an internal error occurred; see the server's log for details",
        status=500,
        kind="server_error",
    )
    return _json(refusal.body, refusal.status)


DRAIN_SECONDS = 30
"""Number of seconds that running requests have to finish after the server receives a stop signal.
"""


class _Server(uvicorn.Server):
    """Uvicorn server that stops on SIGTERM or Ctrl-C without raising the signal again.

    uvicorn's own server does raise the signal again after it has stopped. This would end the
    process before the caller has closed the engines.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle stop signals inside the block: finish running requests, then stop the server."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def asked(number: int, frame: object) -> None:
            self._service.is_draining = True
            self.should_exit = True

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, asked) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def run_server(
    service: Service, host: str, port: int, listening: Callable[[str], None]
) -> None:
    """Open the service, and serve it until a stop signal arrives.

    `listening` is called with the server's URL as soon as the port is open.

    :raises UsageError: the server cannot listen on the address.
    :raises ATTSError: the service cannot be opened.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen on this address ({error.strerror})"
        ) from error
    with listener:
        responses = Responses(service)
        async with responses.open():
            config = uvicorn.Config(
                build_app(service, responses),
                log_level="warning",
                access_log=False,
                http="h11",  # unlike httptools, h11 limits the size of headers
                lifespan="off",
                timeout_graceful_shutdown=DRAIN_SECONDS,
                h11_max_incomplete_event_size=1 << 16,
                server_header=False,
            )
            shown = f"[{host}]" if ":" in host else host
            listening(f"http://{shown}:{listener.getsockname()[1]}/v1")
            server = _Server(config, service)
            try:
                await server.serve(sockets=[listener])
            finally:
                # If this task was cancelled, uvicorn has not closed its listener and connections,
                # so close them here.
                for one in getattr(server, "servers", ()):
                    one.close()
                for connection in list(server.server_state.connections):
                    transport = getattr(connection, "transport", None)
                    if transport is not None:
                        transport.abort()
                with anyio.CancelScope(shield=True):
                    # let the event loop run once, because it then closes the transports
                    await anyio.lowlevel.checkpoint()
