"""The format of OpenAI's Responses API: its requests, response objects and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from atts.ledger import Caps
from atts.serving.policies import Offer
from atts.serving.replies import Reply
from atts.serving.requests import (
    RequestError,
    SolveRequest,
    build_request,
    checked,
    text_of,
    turns_of,
)
from atts.serving.streams import Events, event

_KINDS = {
    "model": "text",
    "instructions": "text",
    "stream": "flag",
    "background": "flag",
    "store": "flag",
    "metadata": "object",
    "max_output_tokens": "whole",
    "temperature": "number",
    "top_p": "number",
    "reasoning": "object",
    "text": "object",
    "user": "text",
    "safety_identifier": "text",
    "seed": "whole",
    "atts": "object",
}
_KNOWN = {*_KINDS, "input"}
_UNSUPPORTED = (
    "tools",
    "previous_response_id",
    "conversation",
    "prompt",
    "top_logprobs",
    "stop",
)
"""Standard fields whose absence from the response would mislead the client."""
_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request of the Responses API that was checked."""

    solve: SolveRequest
    instructions: str | None = None
    metadata: Mapping[str, Any] | None = None
    background: bool = False
    store: bool = True


def parse_response(
    body: Any, headers: Mapping[str, str], offer: Offer, ceiling: Caps
) -> ResponseRequest:
    """Return the request of a parsed JSON body.

    :raises RequestError: if the server would not do something that the body requests.
    """
    given = checked(body, _KINDS, _UNSUPPORTED, needed=("model", "input"))
    background = given.get("background", False)
    store = given.get("store", True)
    if background and given.get("stream", False):
        raise RequestError(
            "a background response cannot be streamed; poll GET /v1/responses/ID", param="stream"
        )
    if background and not store:
        raise RequestError("a background response is always stored; leave store out", param="store")
    if given.get("max_output_tokens", 1) < 1:
        raise RequestError("max_output_tokens is below 1", param="max_output_tokens")
    layout = given.get("text", {}).get("format", {})
    if not isinstance(layout, dict) or cast(dict[str, Any], layout).get("type", "text") != "text":
        raise RequestError("text.format must be text", param="text.format")
    effort = given.get("reasoning", {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning.effort is not a text", param="reasoning.effort")
    instructions = given.get("instructions")
    turns = _turns(given["input"])
    if instructions:
        turns = (("system", instructions), *turns)
    request = build_request(
        given,
        headers,
        offer,
        ceiling,
        turns=turns,
        effort=effort,
        max_tokens=given.get("max_output_tokens"),
        ignored=given.keys() - _KNOWN,
    )
    return ResponseRequest(request, instructions, given.get("metadata"), background, store)


def _turns(given: Any) -> tuple[tuple[str, str], ...]:
    """Return role and text of each input message; the reasoning of earlier replies is dropped."""
    if isinstance(given, str):
        return turns_of([{"role": "user", "content": given}])
    if not isinstance(given, list):
        raise RequestError("input is neither a text nor a list", param="input")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} is not an object", param=where)
        one = cast(dict[str, Any], item)
        kind = one.get("type", "message")
        if kind == "reasoning":
            continue
        if kind != "message":
            raise RequestError(f"{where}.type {kind!r} is not supported", param=f"{where}.type")
        content = text_of(one.get("content"), f"{where}.content", _PARTS)
        messages.append({"role": one.get("role"), "content": content})
    return turns_of(messages)


def response_id(run: str) -> str:
    """Return the id of the response of a run.

    >>> response_id("r_0a")
    'resp_0a'
    """
    return "resp_" + run.removeprefix("r_")


def response_body(
    asked: ResponseRequest,
    run: str,
    created: int,
    status: str,
    reply: Reply | None = None,
    error: RequestError | None = None,
) -> dict[str, Any]:
    """Return the response object in its current state."""
    request = asked.solve
    is_cut = reply is not None and reply.finish_reason == "length"
    body: dict[str, Any] = {
        "id": response_id(run),
        "object": "response",
        "created_at": created,
        "status": "incomplete" if is_cut else status,
        "background": asked.background,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": asked.instructions,
        "max_output_tokens": request.max_tokens,
        "metadata": asked.metadata or {},
        "model": request.model,
        "output": [] if reply is None else _output(reply),
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": asked.store,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user or None,
    }
    if error is not None:
        detail = error.body["error"]
        body["error"] = {"code": detail["code"] or detail["type"], "message": detail["message"]}
    if reply is not None:
        body["usage"] = _usage(reply)
        body["atts"] = reply.facts()
    return body


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage()
    plain: dict[str, Any] = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
    if "cost" in usage:
        plain["cost"] = usage["cost"]
    return plain


def _output(reply: Reply) -> list[dict[str, Any]]:
    number = reply.run.removeprefix("r_")
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(_reasoning_item(number, reply.reasoning))
    items.append(_message_item(number, reply.content, "completed"))
    return items


def _reasoning_item(number: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content}


def _message_item(number: str, text: str | None, status: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents(Events):
    """The events of a response: its creation, reasoning, the message, its completion."""

    def __init__(self, asked: ResponseRequest, run: str, created: int) -> None:
        self._asked = asked
        self._run = run
        self._created = created
        self._number = run.removeprefix("r_")
        self._sequence = 0
        self._index = -1  # index of the open output item; -1: none was opened
        self._open = ""  # the kind of the open item: "reasoning" or "message"
        self._text = ""  # text of the open item

    def begin(self) -> Iterator[bytes]:
        """Yield the response without output."""
        body = response_body(self._asked, self._run, self._created, "in_progress")
        yield self._event("response.created", response=body)
        yield self._event("response.in_progress", response=body)

    def written(self, text: str) -> Iterator[bytes]:
        """Yield reasoning; the text of a model that answers alone belongs to the message."""
        kind = "message" if self._asked.solve.policy.is_plain else "reasoning"
        yield from self._add(kind, text)

    def end(self, reply: Reply) -> Iterator[bytes]:
        """Yield the ends of the items, then the complete response."""
        if self._open == "reasoning":
            yield from self._close()
        if self._open != "message":
            yield from self._add("message", reply.content)
        yield from self._close()
        body = response_body(self._asked, self._run, self._created, "completed", reply)
        yield self._event(f"response.{body['status']}", response=body)

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """Yield the response with its error."""
        body = response_body(self._asked, self._run, self._created, "failed", error=error)
        yield self._event("response.failed", response=body)

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield more text of an item, which is opened if it is not open yet."""
        if self._open != kind:
            self._open = kind
            self._index += 1
            yield self._event(
                "response.output_item.added", output_index=self._index, item=self._item(None)
            )
            yield self._event("response.content_part.added", **self._where(), part=self._part(""))
        self._text += text
        yield self._event(f"response.{self._word}.delta", **self._where(), delta=text)

    def _close(self) -> Iterator[bytes]:
        text = self._text
        yield self._event(f"response.{self._word}.done", **self._where(), text=text)
        yield self._event("response.content_part.done", **self._where(), part=self._part(text))
        yield self._event(
            "response.output_item.done", output_index=self._index, item=self._item(text)
        )
        self._open = ""
        self._text = ""

    @property
    def _word(self) -> str:
        return "reasoning_text" if self._open == "reasoning" else "output_text"

    def _item(self, text: str | None) -> dict[str, Any]:
        if self._open == "reasoning":
            return _reasoning_item(self._number, text)
        return _message_item(self._number, text, "in_progress" if text is None else "completed")

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return _text_part(text)

    def _where(self) -> dict[str, Any]:
        item = "rs" if self._open == "reasoning" else "msg"
        return {
            "item_id": f"{item}_{self._number}",
            "output_index": self._index,
            "content_index": 0,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)
