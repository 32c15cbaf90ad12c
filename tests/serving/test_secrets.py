"""Tests that no secret leaves a server: neither the keys of its clients nor the keys of upstream
servers.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import pytest

from atts.api import Setup
from atts.core import Role
from atts.servers import ApiKey, RemoteEngine, RemoteOptions
from atts.serving import responses
from atts.testing import ScriptedEngine, ToyTokenizer
from atts.testing.servers import DialectServer, ServerDialect
from tests.serving.conftest import QUESTION, serving

if TYPE_CHECKING:
    from aiohttp import web

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
ROOT = Path(__file__).resolve().parents[2]
ALICE = "canary-alice/4711"
BOB = "canary-bob+0815"
UPSTREAM = "canary-upstream/1234"
WRONG = "canary-wrong-5678"
STATUSES = (200, 400, 401, 404, 500)


class Echoing(DialectServer):
    """An upstream server that replies with the request's own headers, once the test has set a
    status for its replies.
    """

    echo: int = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if not self.echo:
            return await super()._answer(request)
        words = f"cannot take {dict(request.headers)}"
        return web.json_response({"error": {"message": words}}, status=self.echo)


def echoing(name: Role, dialect: ServerDialect) -> Echoing:
    """Make a server of a toy engine that requires the upstream key."""
    return Echoing(lambda: ScriptedEngine(name), dialect, key=UPSTREAM)


def texts_in(folder: Path) -> dict[str, str]:
    """Return the content of each file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes().decode(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


def echoes(got: Iterable[tuple[int, str]]) -> int:
    """Count the replies that contain request headers echoed by an upstream server; atts has
    replaced the key in them.
    """
    return sum("[API key]" in text for _, text in got)


def leaks(texts: Iterable[str]) -> list[str]:
    """Return the texts that contain a part of a secret."""
    return [text for text in texts if "canary" in text]


async def replies_of(address: str, name: str, upstream: Iterable[Echoing]) -> list[tuple[int, str]]:
    """Send requests with wrong and correct keys, broken bodies and failing upstream servers.

    Return the status and text of every reply, and finally the server's description of itself.
    """
    got: list[tuple[int, str]] = []
    chat = {"model": name, "messages": [{"role": "user", "content": QUESTION}]}
    traced = {**chat, "atts": {"trace": "full", "samples": 2}}
    respond = {"model": name, "input": QUESTION}

    async with httpx2.AsyncClient(base_url=address.removesuffix("/v1"), timeout=60) as http:

        async def send(method: str, path: str, key: str = f"Bearer {ALICE}", **given: Any) -> Any:
            headers = {"Authorization": key} if key else {}
            reply = await http.request(method, path, headers=headers, **given)
            got.append((reply.status_code, f"{dict(reply.headers)} {reply.text}"))
            return reply

        async def in_background() -> None:
            reply = await send("POST", "/v1/responses", json={**respond, "background": True})
            path = f"/v1/responses/{reply.json()['id']}"
            with anyio.fail_after(60):
                while reply.json()["status"] in ("queued", "in_progress"):
                    await anyio.sleep(0.02)
                    reply = await send("GET", path)

        for key in ("", f"Bearer {WRONG}", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}{WRONG}"):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/metrics")):
                reply = await send(method, path, key, json=chat)
                assert reply.status_code == 401
        for broken in (b'{"model": ', b"\xff", b"[1]", b'{"model": "x"}', b'{"atts": {"key": 1}}'):
            reply = await send("POST", "/v1/chat/completions", content=broken)
            assert reply.status_code in (400, 404)
        await send("GET", "/none")
        await send("PUT", "/v1/models")
        for key in (f"Bearer {ALICE}", f"Bearer {BOB}"):
            reply = await send("POST", "/v1/chat/completions", key, json=traced)
            assert reply.json()["atts"]["trace"][0]["chunks"]
        await send("POST", "/v1/chat/completions", json={**traced, "stream": True})
        await send("POST", "/v1/responses", json=respond)
        await in_background()

        for status in STATUSES:
            for server in upstream:
                server.echo = status
            reply = await send("POST", "/v1/chat/completions", json=traced)
            assert reply.status_code in (200, 502)
            await send("POST", "/v1/chat/completions", json={**traced, "stream": True})
            await in_background()

        for path in ("/metrics", "/atts/runs", "/atts/status", "/atts/view", "/v1/models"):
            assert (await send("GET", path)).status_code == 200
        for run in (await send("GET", "/atts/runs")).json()["data"]:
            await send("GET", f"/atts/runs/{run['run']}?text")
    return got


def _keep(path: Path) -> None:
    """Keep the folder of a run that has ended."""


def test_no_secret_is_in_a_reply_a_log_or_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No reply, log or file contains a secret, even with journals, the most detailed log level, and
    two engines that use one key file.
    """
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(responses, "_remove", _keep)
    key_file = tmp_path / "key"
    key_file.write_text(UPSTREAM)
    options = RemoteOptions(
        key=ApiKey(file=key_file), attempts=2, delay_seconds=0.01, give_up_after=0.1
    )
    state = tmp_path / "state"

    def engine(name: str, server: Echoing) -> RemoteEngine:
        return RemoteEngine(server.url, name=name, tokenizer=ToyTokenizer(), options=options)

    async def main(draft: Echoing, target: Echoing) -> list[tuple[int, str]]:
        setup = Setup(draft=engine("draft", draft), target=engine("target", target))
        keys = {ALICE: "alice", BOB: "bob"}
        async with serving(setup, keys=keys, state=state) as client:
            got = await replies_of(
                str(client.http.base_url).rstrip("/"), "atts/toy", (draft, target)
            )
            got.append((0, f"{setup!r} {client.service.options!r} {client.service!r}"))
            return got

    with echoing("draft", "vllm") as draft, echoing("target", "vllm") as target:
        got = anyio.run(main, draft, target)
    assert {200, 401, 400, 404, 405, 502} <= {status for status, _ in got}
    assert echoes(got) >= 6, (
        "too few replies echo the key: whole, streamed and background replies must"
    )
    assert not leaks(text for _, text in got)
    files = texts_in(state)
    assert any("journal" in name for name in files), sorted(files)
    assert not leaks(files.values())
    assert caplog.text
    assert not leaks(caplog.text.splitlines())
    assert not leaks(capfd.readouterr())


def test_no_secret_is_printed_by_the_command(tmp_path: Path) -> None:
    """The output of `atts serve` contains neither the upstream key in OPENAI_API_KEY nor the
    clients' keys in a file.
    """
    keys = tmp_path / "keys"
    keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
    state = tmp_path / "state"
    with echoing("draft", "chat") as upstream:
        words = ["--model", f"chat:{upstream.url}/v1/toy?give_up_after=0.1", "--name", "atts/toy"]
        files = ["--api-key-file", str(keys), "--state", str(state)]
        server = subprocess.Popen(
            [sys.executable, "-X", "dev", "-m", "atts", "serve", *words, *files, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **{name: value for name, value in os.environ.items() if name[:5] != "ATTS_"},
                "OPENAI_API_KEY": UPSTREAM,
                "OPENAI_BASE_URL": f"{upstream.url}/v1",
            },
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            got = anyio.run(replies_of, address, "atts/toy", [upstream])
        finally:
            server.send_signal(signal.SIGTERM)
            printed = server.communicate(timeout=60)
    assert server.returncode == 0, printed
    assert {200, 401, 502} <= {status for status, _ in got}
    assert echoes(got) >= 6, (
        "too few replies echo the key: whole, streamed and background replies must"
    )
    assert not leaks(text for _, text in got)
    assert not leaks(printed)
    assert not leaks(texts_in(state).values())
