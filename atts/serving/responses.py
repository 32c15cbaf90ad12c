"""OpenAI's Responses API: formats of requests, responses and events, and storage of responses.

Background responses run without a connected client, and continue after a restart of the server.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope

from atts import concurrency
from atts.core import Recent
from atts.errors import ATTSError
from atts.files import read_ordinary, write_atomic
from atts.ledger import Caps
from atts.serving.replies import Reply
from atts.serving.requests import (
    Offer,
    RequestError,
    SolveRequest,
    build_request,
    checked,
    text_of,
    turns_of,
)
from atts.serving.service import Service, new_run
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
"""Fields of OpenAI's API that atts cannot support. Requests with one of them are rejected instead
of ignoring the field, because clients may rely on its effect.
"""
_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked request of the Responses API."""

    solve: SolveRequest
    instructions: str | None = None
    metadata: Mapping[str, Any] | None = None
    background: bool = False
    store: bool = True


def parse_response(
    body: Any, headers: Mapping[str, str], offer: Offer, ceiling: Caps
) -> ResponseRequest:
    """Convert the parsed JSON body of a Responses API request to a `ResponseRequest`.

    :raises RequestError: if the server does not support something that the body requests.
    """
    given = checked(body, _KINDS, _UNSUPPORTED, needed=("model", "input"))
    background = given.get("background", False)
    store = given.get("store", True)
    if background and given.get("stream", False):
        raise RequestError(
            "a background response cannot be streamed; poll GET /v1/responses/ID", param="stream"
        )
    if background and not store:
        raise RequestError(
            "a background response is always stored; leave out the field store", param="store"
        )
    if given.get("max_output_tokens", 1) < 1:
        raise RequestError("max_output_tokens is below 1", param="max_output_tokens")
    layout = given.get("text", {}).get("format", {})
    if not isinstance(layout, dict) or cast(dict[str, Any], layout).get("type", "text") != "text":
        raise RequestError("text.format must be text", param="text.format")
    effort = given.get("reasoning", {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning.effort is not a string", param="reasoning.effort")
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
    """Return the role and the text of each input message. Reasoning items of earlier responses are
    skipped.
    """
    if isinstance(given, str):
        return turns_of([{"role": "user", "content": given}])
    if not isinstance(given, list):
        raise RequestError("input is neither a string nor a list", param="input")
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
    """Return the id of the response that a run produces.

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
    """Return the JSON body of a response. The reply or the error is included once there is one."""
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
    """The event format of a streamed response: creation, reasoning, message and completion."""

    def __init__(self, asked: ResponseRequest, run: str, created: int) -> None:
        self._asked = asked
        self._run = run
        self._created = created
        self._number = run.removeprefix("r_")
        self._sequence = 0
        self._index = -1  # index of the latest output item; -1 before the first item begins
        # kind of the output item that is being sent: "reasoning" or "message"; "" between items
        self._open = ""
        self._text = ""  # text so far of the output item that is being sent

    def begin(self) -> Iterator[bytes]:
        """Yield the events that start a response. It has no output yet."""
        body = response_body(self._asked, self._run, self._created, "in_progress")
        yield self._event("response.created", response=body)
        yield self._event("response.in_progress", response=body)

    def written(self, text: str) -> Iterator[bytes]:
        """Yield the events for new text of a rollout.

        If one model answers alone, the text belongs to the message. Otherwise it is reasoning.
        """
        kind = "message" if self._asked.solve.policy.is_plain else "reasoning"
        yield from self._add(kind, text)

    def end(self, reply: Reply) -> Iterator[bytes]:
        """Yield the events that end the output items, then the event with the complete response."""
        if self._open == "reasoning":
            yield from self._close()
        if self._open != "message":
            yield from self._add("message", reply.content)
        yield from self._close()
        body = response_body(self._asked, self._run, self._created, "completed", reply)
        yield self._event(f"response.{body['status']}", response=body)

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """Yield the event of a failed response, with the error."""
        body = response_body(self._asked, self._run, self._created, "failed", error=error)
        yield self._event("response.failed", response=body)

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events that add text to an output item. If the item is not open yet, first
        yield the events that open it.
        """
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


_log = logging.getLogger("atts.serving")
# largest number of responses in memory; background responses are stored on disk instead
_MOST_KEPT = 200
# longest time, in seconds, between two removals of old responses from the disk
_LOOK_SECONDS = 600.0
_ID = re.compile(r"resp_[0-9a-f]{16}")
_REQUEST = "request.json"
_RESPONSE = "response.json"
_RUN = "run"
CAP_HEADERS = ("x-atts-max-seconds", "x-atts-max-cost")


class _Stored(msgspec.Struct):
    """The request of a background response. It is written to disk before the client gets a
    reply.
    """

    body: Any  # JSON body of the request, as the client sent it
    headers: dict[str, str]
    user: str
    created: int


class _Finished(msgspec.Struct):
    """The final state of a background response. It is written to disk when the response has
    ended.
    """

    user: str
    response: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Running:
    asked: ResponseRequest
    run: str
    created: int
    scope: CancelScope = field(default_factory=CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class Responses:
    """The stored responses of a server, and the tasks that run background responses.

    Each background response has a folder with the request, the journal of the run and, at the end,
    the finished response. The request is on disk before the client gets a reply. When a server
    starts, it continues every response whose folder lacks the finished response. A folder is
    deleted `ServeOptions.response_seconds` after the response finished.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        state = service.options.state
        self._folder = None if state is None else state / "responses"
        self._running = dict[str, _Running]()
        self._kept = Recent[str, _Finished](_MOST_KEPT)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Open the service for the `with` block, and continue the unfinished background responses
        of earlier sessions.

        :raises ATTSError: the service cannot be opened.
        """
        left = self._unfinished()
        async with self._service.open(keep=[_run_of(name) for name in left]):
            for name in left:
                self._continue(name)
            async with concurrency.background(self._remove_often):
                yield

    async def _remove_often(self) -> None:
        """Delete old finished responses from disk at regular intervals.

        `ServeOptions.response_seconds` says how long finished responses are kept.
        """
        if self._folder is None:
            return
        keep = self._service.options.response_seconds
        while True:
            await anyio.to_thread.run_sync(_remove_ended, self._folder, time.time() - keep)
            await anyio.sleep(min(_LOOK_SECONDS, keep / 4))

    def _unfinished(self) -> list[str]:
        """Return the ids of background responses that an earlier session did not finish, oldest
        first. Clean up leftover files.
        """
        if self._folder is None or not self._folder.is_dir():
            return []
        found: list[tuple[float, str]] = []
        for folder in self._folder.iterdir():
            if not _ID.fullmatch(folder.name):
                continue
            if (folder / _RESPONSE).exists():
                shutil.rmtree(folder / _RUN, ignore_errors=True)
            elif (folder / _REQUEST).exists():
                found.append(((folder / _REQUEST).stat().st_mtime, folder.name))
            else:
                # The folder has no request: the server was killed before it had written the
                # request's file.
                shutil.rmtree(folder, ignore_errors=True)
        return [name for _, name in sorted(found)]

    def _continue(self, name: str) -> None:
        """Continue an unfinished background response of an earlier session.

        If this server cannot continue it, store it as failed.
        """
        assert self._folder is not None, "a stored response needs a server with a state folder"
        options = self._service.options
        stored: _Stored | None = None
        try:
            stored = msgspec.json.decode(
                read_ordinary(self._folder / name / _REQUEST), type=_Stored
            )
            asked = parse_response(
                stored.body, stored.headers, self._service.offer, options.request_caps
            )
        except (RequestError, OSError, msgspec.DecodeError) as error:
            _log.error("the background response %s cannot be continued: %s", name, error)
            failed = {
                "id": name,
                "object": "response",
                "created_at": int(time.time()),
                "status": "failed",
                "background": True,
                "error": {"code": "cannot_continue", "message": str(error)},
                "output": list[Any](),
            }
            user = "" if stored is None else stored.user
            data = msgspec.json.encode(_Finished(user, failed))
            _write(self._folder / name / _RESPONSE, data)
            self._service.close_account(_run_of(name))
            return
        asked = replace(asked, solve=replace(asked.solve, user=stored.user))
        self._start(_Running(asked, _run_of(name), stored.created))

    async def submit(
        self, asked: ResponseRequest, body: Any, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Start a background response, and return its current state.

        :raises RequestError: if the server has no folder for background responses.
        """
        if self._folder is None:
            raise RequestError(
                "background responses need a server that was started with --state DIR",
                param="background",
            )
        run = new_run()
        running = _Running(asked, run, int(time.time()))
        kept = {name: headers[name] for name in CAP_HEADERS if name in headers}
        stored = _Stored(body, kept, asked.solve.user, running.created)
        path = self._folder / response_id(run) / _REQUEST
        await anyio.to_thread.run_sync(_write, path, msgspec.json.encode(stored))
        self._start(running)
        return self._standing(running)

    def _start(self, running: _Running) -> None:
        self._running[response_id(running.run)] = running

        async def work() -> None:
            await self._work(running)

        self._service.start(work)

    async def _work(self, running: _Running) -> None:
        """Run a background response to its end, and write its final state to disk.

        If the server closes, this task is cancelled and writes nothing. The next session then
        continues the response.
        """
        assert self._folder is not None, "the request was checked when it was submitted"
        name = response_id(running.run)
        folder = self._folder / name
        asked = running.asked
        end: dict[str, Any] | None = None
        with running.scope:
            try:
                reply = await self._service.solve(
                    asked.solve, run=running.run, directory=folder / _RUN
                )
                reply = replace(reply, created=running.created)
                end = response_body(asked, running.run, running.created, "completed", reply)
            except RequestError as error:
                status = "cancelled" if error.status == 409 else "failed"
                end = response_body(asked, running.run, running.created, status, error=error)
            except Exception as error:  # noqa: BLE001 - no client waits; the response says it
                _log.exception("the background response %s failed", name)
                told = RequestError(
                    "an internal error occurred; see the server's log for details",
                    status=500,
                    kind="server_error",
                )
                told.__cause__ = error
                end = response_body(asked, running.run, running.created, "failed", error=told)
        if end is None:
            end = response_body(asked, running.run, running.created, "cancelled")
        finished = _Finished(asked.solve.user, end)
        try:
            data = msgspec.json.encode(finished)
            await anyio.to_thread.run_sync(_write, folder / _RESPONSE, data)
        except (ATTSError, OSError) as error:
            _log.error("%s cannot be written: %s", folder / _RESPONSE, error)
            self._kept[name] = finished
        else:
            self._service.close_account(running.run)
            await anyio.to_thread.run_sync(_remove, folder / _RUN)
        del self._running[name]
        running.ended.set()

    def keep(self, user: str, body: dict[str, Any]) -> None:
        """Store a response that did not run in the background, in memory.

        If there are too many, the oldest stored response is dropped.
        """
        self._kept[body["id"]] = _Finished(user, body)

    async def find(self, name: str, user: str) -> dict[str, Any]:
        """Return a response in its current state.

        :raises RequestError: if this user has no such response.
        """
        if name in self._running and _may_see(user, self._running[name].asked.solve.user):
            return self._standing(self._running[name])
        finished = self._kept.get(name)
        if finished is None and self._folder is not None and _ID.fullmatch(name):
            path = self._folder / name / _RESPONSE
            with suppress(OSError):
                data = await anyio.to_thread.run_sync(read_ordinary, path)
                finished = msgspec.json.decode(data, type=_Finished)
        if finished is None or not _may_see(user, finished.user):
            raise RequestError(f"there is no response {name!r}", status=404, param="response_id")
        return finished.response

    def _standing(self, running: _Running) -> dict[str, Any]:
        served = self._service.runs.get(running.run)
        status = "queued" if served is None or served.status == "waiting" else "in_progress"
        return response_body(running.asked, running.run, running.created, status)

    async def cancel(self, name: str, user: str) -> dict[str, Any]:
        """Cancel a background response and its engine calls, and return its final state.

        A finished response does not change.

        :raises RequestError: if this user has no such response.
        """
        running = self._running.get(name)
        if running is not None and _may_see(user, running.asked.solve.user):
            running.scope.cancel()
            await running.ended.wait()
        return await self.find(name, user)

    async def delete(self, name: str, user: str) -> dict[str, Any]:
        """Delete a response. If it is still running, cancel it first.

        :raises RequestError: if this user has no such response.
        """
        await self.cancel(name, user)
        self._kept.pop(name, None)
        if self._folder is not None and _ID.fullmatch(name):
            await anyio.to_thread.run_sync(_remove, self._folder / name)
        return {"id": name, "object": "response", "deleted": True}


def _may_see(user: str, owner: str) -> bool:
    """Return whether a client may read responses of `owner`.

    `user` is the user of the client's API key. A client whose key has no user may read all
    responses.
    """
    return not user or user == owner


def _run_of(name: str) -> str:
    return "r_" + name.removeprefix("resp_")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def _remove_ended(responses: Path, before: float) -> None:
    """Delete all background responses from disk that were finished before a given time."""
    try:
        for folder in responses.iterdir() if responses.is_dir() else ():
            path = folder / _RESPONSE
            if _ID.fullmatch(folder.name) and path.exists() and path.stat().st_mtime < before:
                _remove(folder)
    except OSError as error:  # the next removal tries again
        _log.error("old responses in %s cannot be removed: %s", responses, error)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
