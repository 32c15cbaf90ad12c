"""Stored responses; background responses run without a client, and survive a restart."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope

from atts import concurrency
from atts.core import Recent
from atts.errors import ATTSError
from atts.files import read_ordinary, write_atomic
from atts.serving.requests import RequestError
from atts.serving.responses import (
    ResponseRequest,
    parse_response,
    response_body,
    response_id,
)
from atts.serving.service import Service, new_run

_log = logging.getLogger("atts.serving")
_MOST_KEPT = 200  # most responses in memory that are not background responses
_LOOK_SECONDS = 600.0  # seconds between two removals of old responses
_ID = re.compile(r"resp_[0-9a-f]{16}")
_REQUEST = "request.json"
_RESPONSE = "response.json"
_RUN = "run"
CAP_HEADERS = ("x-atts-max-seconds", "x-atts-max-cost")


class _Stored(msgspec.Struct):
    """The record that is written before a background response is acknowledged."""

    body: Any  # the unchanged body of the request
    headers: dict[str, str]
    user: str
    created: int


class _Finished(msgspec.Struct):
    """The record that is written once a background response has ended."""

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
    """The responses that a server stores, and the tasks of background responses.

    A background response has a folder. It contains the request, which is on disk before the client
    gets a reply, the journal of the run, and the response, which is written atomically. A server
    that starts continues every folder without a response. A folder is removed some time after its
    response was written.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        state = service.options.state
        self._folder = None if state is None else state / "responses"
        self._running = dict[str, _Running]()
        self._kept = Recent[str, _Finished](_MOST_KEPT)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Open the service, and continue the unfinished responses of earlier sessions.

        :raises ATTSError: the service cannot be opened.
        """
        left = self._unfinished()
        async with self._service.open(keep=[_run_of(name) for name in left]):
            for name in left:
                self._continue(name)
            async with concurrency.background(self._remove_often):
                yield

    async def _remove_often(self) -> None:
        """Remove old responses at intervals."""
        if self._folder is None:
            return
        keep = self._service.options.response_seconds
        while True:
            await anyio.to_thread.run_sync(_remove_ended, self._folder, time.time() - keep)
            await anyio.sleep(min(_LOOK_SECONDS, keep / 4))

    def _unfinished(self) -> list[str]:
        """Return the ids of unfinished responses, oldest first."""
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
                # the server was killed before it acknowledged the request
                shutil.rmtree(folder, ignore_errors=True)
        return [name for _, name in sorted(found)]

    def _continue(self, name: str) -> None:
        """Continue a response of an earlier session.

        A response that this server cannot continue gets an error instead of a reply.
        """
        assert self._folder is not None, "its folder was listed by this name"
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
        """Begin a background response, and return its current state.

        :raises RequestError: if the server has no folder for it.
        """
        if self._folder is None:
            raise RequestError(
                "background responses need a server with --state DIR", param="background"
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
        """Run a response until it ends, and write its result.

        A server that closes cancels this task; then nothing is written, and the next session
        continues.
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
                told = RequestError("an error of the server", status=500, kind="server_error")
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
        """Store a response that is not a background response, until newer ones replace it."""
        self._kept[body["id"]] = _Finished(user, body)

    async def find(self, name: str, user: str) -> dict[str, Any]:
        """Return the current state of a response.

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
        """Cancel a response with its engine calls, and return it; a finished response does not
        change.

        :raises RequestError: if this user has no such response.
        """
        running = self._running.get(name)
        if running is not None and _may_see(user, running.asked.solve.user):
            running.scope.cancel()
            await running.ended.wait()
        return await self.find(name, user)

    async def delete(self, name: str, user: str) -> dict[str, Any]:
        """Cancel a response if it runs, and delete it.

        :raises RequestError: if this user has no such response.
        """
        await self.cancel(name, user)
        self._kept.pop(name, None)
        if self._folder is not None and _ID.fullmatch(name):
            await anyio.to_thread.run_sync(_remove, self._folder / name)
        return {"id": name, "object": "response", "deleted": True}


def _may_see(user: str, owner: str) -> bool:
    """Return whether a user may read a request of `owner`; a key without a name may read all."""
    return not user or user == owner


def _run_of(name: str) -> str:
    return "r_" + name.removeprefix("resp_")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def _remove_ended(responses: Path, before: float) -> None:
    """Remove the responses that were written before a time."""
    try:
        for folder in responses.iterdir() if responses.is_dir() else ():
            path = folder / _RESPONSE
            if _ID.fullmatch(folder.name) and path.exists() and path.stat().st_mtime < before:
                _remove(folder)
    except OSError as error:  # the next removal finds files that this one left
        _log.error("old responses in %s cannot be removed: %s", responses, error)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
