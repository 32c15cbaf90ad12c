"""Streams of the endpoint: server-sent events while a request is worked on."""

from __future__ import annotations

import math
import time
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atts.concurrency import task_group
from atts.serving.requests import ChatRequest, RequestError
from atts.serving.service import Reply, Service

NEXT_LINE = "\n\n- another line of thought -\n\n"
"""Text between two rollouts in the reasoning of a stream."""
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",  # nginx would collect the events
}
_Item = tuple[int, str] | Reply | RequestError


class ChatStream(Response):
    """A chat completion as a stream: the role at once, reasoning turn by turn, then the answer.

    The reasoning is that of one rollout, the first that finishes a turn. If another one gives the
    answer, its reasoning follows after a line of its own. When the client leaves, everything is
    cancelled down to the engines.
    """

    def __init__(self, service: Service, request: ChatRequest) -> None:
        super().__init__(headers=_HEADERS)
        self.raw_headers = [
            (name, value) for name, value in self.raw_headers if name != b"content-length"
        ]
        self._service = service
        self._request = request
        self._created = int(time.time())
        self._id = f"chatcmpl-{self._created}-{id(self):x}"
        self._leader: int | None = None
        self._sent = ""  # the leader's reasoning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and cancel the work when the client leaves."""
        start: dict[str, Any] = {
            "type": "http.response.start",
            "status": 200,
            "headers": self.raw_headers,
        }
        await send(start)
        into, items = anyio.create_memory_object_stream[_Item](math.inf)
        async with task_group() as group:
            with into, items:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                group.start_soon(self._solve, into)
                await self._send_all(items, send)
                group.cancel_scope.cancel()

    async def _solve(self, into: MemoryObjectSendStream[_Item]) -> None:
        """Work on the request; turns, then the reply or the error, go into the stream."""

        def written(sample: int, text: str) -> None:
            into.send_nowait((sample, text))

        try:
            async with self._service.admitted():
                end: Reply | RequestError = await self._service.solve(self._request, written)
        except RequestError as error:
            end = error
        into.send_nowait(end)

    async def _send_all(self, items: MemoryObjectReceiveStream[_Item], send: Send) -> None:
        await _send(send, self._chunk({"role": "assistant", "content": ""}))
        while True:
            item: _Item | None = None
            with anyio.move_on_after(self._service.options.keepalive_seconds):
                item = await items.receive()
            if item is None:
                # Proxies close connections that are silent for a minute.
                await _body(send, b": keepalive\n\n")
            elif isinstance(item, RequestError):
                await _send(send, item.body)
                break
            elif isinstance(item, Reply):
                await self._end(item, send)
                break
            elif self._leader in (None, item[0]):
                self._leader = item[0]
                self._sent += item[1]
                await _send(send, self._chunk(_reasoning(item[1])))
        await _body(send, b"data: [DONE]\n\n", more=False)

    async def _end(self, reply: Reply, send: Send) -> None:
        """Send the rest of the reasoning, the content, the reason of the end, and the usage."""
        speaker = reply.speaker
        rest = reply.reasoning
        if speaker is not None and speaker.sample == self._leader:
            rest = rest.removeprefix(self._sent)
        elif self._sent and rest:
            rest = NEXT_LINE + rest
        if rest:
            await _send(send, self._chunk(_reasoning(rest)))
        await _send(send, self._chunk({"content": reply.content}))
        await _send(send, self._chunk({}, reply.finish_reason))
        last = {**self._envelope(), "choices": list[Any](), "atts": reply.facts()}
        last["usage"] = reply.usage()
        if self._request.stream_usage:
            await _send(send, last)
        else:
            # Strict clients expect a choice in every chunk unless they asked for usage.
            await _send(send, {**self._chunk({}), "atts": reply.facts(), "usage": reply.usage()})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {**self._envelope(), "choices": [choice]}

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
        }


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


async def _send(send: Send, event: dict[str, Any]) -> None:
    await _body(send, b"data: " + msgspec.json.encode(event) + b"\n\n")


async def _body(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
