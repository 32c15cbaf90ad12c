"""Streamed replies of the endpoint, which send events to a client while its request runs."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atts.concurrency import task_group
from atts.serving.replies import Reply, StoppedText
from atts.serving.requests import RequestError, SolveRequest
from atts.serving.service import Service

NEXT_LINE = "\n\n- another line of thought -\n\n"
"""Separator in streamed reasoning between the text of one rollout and that of another."""
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    # without this header, nginx would collect events before it sends them
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that a rollout has written in one turn."""

    sample: int
    text: str
    restarts: bool  # True if the text replaces all earlier text of the rollout


_Item = _Text | Reply | RequestError


class Events(ABC):
    """Interface for the event format of one API. Each method yields events as bytes."""

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """Yield the events that start a stream."""

    @abstractmethod
    def written(self, text: str) -> Iterator[bytes]:
        """Yield the events that send new text of a rollout."""

    @abstractmethod
    def end(self, reply: Reply) -> Iterator[bytes]:
        """Yield the events that finish a stream after a complete reply."""

    @abstractmethod
    def fail(self, error: RequestError) -> Iterator[bytes]:
        """Yield the events that finish a stream after an error."""


class EventStream(Response):
    """Streamed HTTP reply that shows one rollout turn by turn, and then the answer.

    The rollout shown is the one that finishes a turn first. If another rollout gives the answer,
    its text follows after a separator. If the target writes the shown rollout again from its
    beginning, the new text follows after a separator, too. If the client disconnects, the request
    and its engine calls are cancelled.

    `keep`, if it is given, stores the complete reply before the stream ends.
    """

    def __init__(
        self,
        service: Service,
        request: SolveRequest,
        events: Events,
        run: str,
        keep: Callable[[Reply], object] | None = None,
    ) -> None:
        super().__init__(headers=_HEADERS)
        self.raw_headers = [
            (name, value) for name, value in self.raw_headers if name != b"content-length"
        ]
        self._service = service
        self._request = request
        self._events = events
        self._run = run
        self._keep = keep
        self._leader: int | None = None
        # text of the rollout `_leader` that was sent since this rollout last began
        self._sent = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and send its events to the client. Cancel the request if the client
        disconnects.
        """
        start: dict[str, Any] = {
            "type": "http.response.start",
            "status": 200,
            "headers": self.raw_headers,
        }
        await send(start)
        into, items = anyio.create_memory_object_stream[_Item](math.inf)
        # Close the stream of items only after all tasks have ended. A task may still put a reply
        # into it after the client has left.
        with into, items:
            async with task_group() as group:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                group.start_soon(self._solve, into)
                await self._send_all(items, send)
                group.cancel_scope.cancel()

    async def _solve(self, into: MemoryObjectSendStream[_Item]) -> None:
        """Run the request. Put each turn's text into the channel, followed by the reply or the
        error.
        """

        def written(sample: int, text: str, restarts: bool) -> None:
            into.send_nowait(_Text(sample, text, restarts))

        try:
            self._service.check_room(self._request.user)
            end: Reply | RequestError = await self._service.solve(
                self._request, written, run=self._run
            )
        except RequestError as error:
            end = error
        into.send_nowait(end)

    async def _send_all(self, items: MemoryObjectReceiveStream[_Item], send: Send) -> None:
        events = self._events
        await _body(send, b"".join(events.begin()))
        while True:
            item: _Item | None = None
            with anyio.move_on_after(self._service.options.keepalive_seconds):
                item = await items.receive()
            if item is None:
                # Proxies close a connection on which nothing is sent for about a minute, so send an
                # SSE comment.
                await _body(send, b": keepalive\n\n")
            elif isinstance(item, RequestError):
                await _body(send, b"".join(events.fail(item)), more=False)
                return
            elif isinstance(item, Reply):
                if self._keep is not None:
                    self._keep(item)
                rest = self._rest(item)
                blocks = [*(events.written(rest) if rest else ()), *events.end(item)]
                await _body(send, b"".join(blocks), more=False)
                return
            elif self._leader in (None, item.sample):
                self._leader = item.sample
                begins_again = item.restarts and self._sent
                self._sent = item.text if begins_again else self._sent + item.text
                text = NEXT_LINE + item.text if begins_again else item.text
                await _body(send, b"".join(events.written(text)))

    def _rest(self, reply: Reply) -> str:
        """Return the part of the reply's text that must still be sent. If the stream has shown
        another rollout than the reply, this part is a separator and the reply's whole text.
        """
        speaker = reply.speaker
        if speaker is not None and speaker.sample == self._leader:
            return reply.text.removeprefix(self._sent)
        return NEXT_LINE + reply.text if self._sent and reply.text else reply.text


class ChatEvents(Events):
    """The event format of a streamed chat completion: role, reasoning, content and usage."""

    def __init__(self, request: SolveRequest, run: str) -> None:
        self._request = request
        self._created = int(time.time())
        self._id = f"chatcmpl-{run}"
        self._content = StoppedText(request.stop)

    def begin(self) -> Iterator[bytes]:
        """Yield the event that starts the stream, with the assistant's role."""
        yield self._chunk({"role": "assistant", "content": ""})

    def written(self, text: str) -> Iterator[bytes]:
        """Yield the event for new text of a rollout.

        If one model answers alone, the text is content. Otherwise it is reasoning.
        """
        if self._request.policy.is_plain:
            yield from self._shown(self._content.add(text))
        else:
            yield self._chunk({"reasoning": text, "reasoning_content": text})

    def end(self, reply: Reply) -> Iterator[bytes]:
        """Yield the events with content, finish reason and usage, then the event that ends the
        stream.
        """
        if self._request.policy.is_plain:
            yield from self._shown(self._content.end())
        else:
            yield self._chunk({"content": reply.content})
        yield self._chunk({}, reply.finish_reason)
        last = {"usage": reply.usage(), "atts": reply.facts()}
        if self._request.stream_usage:
            yield event({**self._envelope(), "choices": list[Any](), **last})
        else:
            # Strict clients expect a choice in every event. Only clients that requested the usage
            # accept an event without a choice.
            yield self._chunk({}, more=last)
        yield _DONE

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """Yield the event with the error, then the event that ends the stream."""
        yield event(error.body)
        yield _DONE

    def _shown(self, content: str) -> Iterator[bytes]:
        if content:
            yield self._chunk({"content": content})

    def _chunk(
        self,
        delta: dict[str, Any],
        finish: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event({**self._envelope(), "choices": [choice], **(more or {})})

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
        }


_DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any], kind: str = "") -> bytes:
    """Return the bytes of one server-sent event. `kind` is its event type, if it has one."""
    head = f"event: {kind}\n".encode() if kind else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _body(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
