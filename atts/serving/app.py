"""The routes of the endpoint: who may ask, what is read of a request, and how replies are sent."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atts.concurrency import task_group
from atts.errors import ATTSError
from atts.files import from_json
from atts.serving.metrics import metrics_text
from atts.serving.policies import POLICIES
from atts.serving.requests import RequestError, parse_chat
from atts.serving.service import Reply, Service
from atts.serving.streams import ChatStream

_log = logging.getLogger("atts.serving")
_OPEN_PATHS = ("/health", "/ready")


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service, which its caller opens and closes."""
    endpoint = _Endpoint(service)
    routes = [
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
        Route("/v1/models", endpoint.models, methods=["GET"]),
        Route("/atts/runs", endpoint.runs, methods=["GET"]),
        Route("/atts/runs/{run}", endpoint.run, methods=["GET"]),
        Route("/atts/runs/{run}/cancel", endpoint.cancel, methods=["POST"]),
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
    return _Guard(app, service.options.api_key)


class _Guard:
    """Refuses requests without the key, before anything else of them is read."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and scope["path"] not in _OPEN_PATHS
        if self._key is not None and is_checked:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):
                error = RequestError(
                    "the API key is missing or wrong", status=401, code="invalid_api_key"
                )
                await _json(error.body, error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Endpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion, whole or as a stream."""
        service = self._service
        options = service.options
        body = await _body(request, options.body_bytes)
        asked = parse_chat(body, request.headers, options.name, options.request_caps)
        service.check(asked)
        if asked.stream:
            # Refuse before the headers are sent: an overloaded server must answer with a status.
            service.check_room()
            return ChatStream(service, asked)

        async def solve() -> Reply:
            async with service.admitted():
                return await service.solve(asked)

        reply = await _until_disconnect(request, solve)
        if reply is None:
            return Response(status_code=499)
        return _json(completion(reply))

    async def models(self, request: Request) -> Response:
        """List the model names that are served: the pair, and the pair under each policy."""
        name = self._service.options.name
        names = [name, *(f"{name}:{policy}" for policy in POLICIES)]
        created = int(time.time())
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
        """List the latest runs, newest first."""
        latest = [served.as_json() for served in reversed(self._service.runs.values())]
        return _json({"object": "list", "data": latest})

    async def run(self, request: Request) -> Response:
        """Return one run, as it stands now."""
        return _json(self._service.find(request.path_params["run"]).as_json())

    async def cancel(self, request: Request) -> Response:
        """Cancel one run; its client gets status 409, or an error event in its stream."""
        return _json(self._service.cancel(request.path_params["run"]).as_json())

    async def health(self, request: Request) -> Response:
        """Answer as long as the process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answer 200 while requests are taken, else 503, for load balancers."""
        is_ready = self._service.is_ready
        return _json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Return counters in Prometheus's text format."""
        return PlainTextResponse(
            metrics_text(self._service), media_type="text/plain; version=0.0.4"
        )


def completion(reply: Reply) -> dict[str, Any]:
    """Return the body of a whole chat completion."""
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
    """Return the parsed JSON body.

    :raises RequestError: the body is too large, or not JSON.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise RequestError(f"the body is larger than {most} bytes", status=413)
    try:
        return from_json(data.decode())
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error


async def _until_disconnect(
    request: Request, solve: Callable[[], Awaitable[Reply]]
) -> Reply | None:
    """Return the reply, or None after the client has left; leaving cancels the work."""
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
    assert isinstance(error, RequestError), "registered for this error alone"
    headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return _json(error.body, error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this error alone"
    words = {404: "no such route", 405: "this route has no such method"}
    refusal = RequestError(words.get(error.status_code, error.detail), status=error.status_code)
    return _json(refusal.body, refusal.status)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer an error of ours: the log has its words, the client learns no internals."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    refusal = RequestError("an error of the server", status=500, kind="server_error")
    return _json(refusal.body, refusal.status)
