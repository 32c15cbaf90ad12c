"""Tests of the Responses API: whole, streamed and background responses, also after kill -9 and
restarts.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from atts.errors import OptionError
from atts.ledger import LEDGER, Amount, read_ledger
from atts.serving import ServeOptions
from atts.testing import Latency
from tests.serving.conftest import MODEL, QUESTION, Client, serving, started_server, toy_setup

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
SLOW = Latency(per_sample=0.05, per_score=0.02)


def asked(**fields: Any) -> dict[str, Any]:
    """Return a request's body."""
    return {"model": MODEL, "input": QUESTION, **fields}


async def respond(client: Client, **fields: Any) -> httpx2.Response:
    """Ask the toy question, or the question given in the fields."""
    return await client.http.post("/responses", json=asked(**fields))


async def events_of(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response, after checking that each has the type that the line
    before it names.
    """
    got: list[dict[str, Any]] = []
    kind = ""
    async with client.http.stream(
        "POST", "/responses", json=asked(stream=True, **fields)
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert event["type"] == kind
                got.append(event)
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    return got


def texts(response: dict[str, Any]) -> tuple[str, str]:
    """Return the reasoning and the content of a response."""
    by_type = Counter[str]()
    parts = {"reasoning": "", "message": ""}
    for item in response["output"]:
        by_type[item["type"]] += 1
        parts[item["type"]] += "".join(part["text"] for part in item["content"])
    assert set(by_type.values()) <= {1}
    return parts["reasoning"], parts["message"]


def test_a_response_equals_a_chat() -> None:
    """The Responses API and the chat API give the same answer, votes and usage for the same
    seed.
    """

    async def main() -> None:
        async with serving() as client:
            chat = (await client.chat(seed=3, reasoning_effort="high")).json()
            one = (
                await respond(
                    client, atts={"seed": 3}, reasoning={"effort": "high"}, metadata={"a": "b"}
                )
            ).json()
            message = chat["choices"][0]["message"]
            assert texts(one) == (message["reasoning"], message["content"])
            assert one["status"] == "completed"
            assert one["metadata"] == {"a": "b"}
            assert one["atts"]["policy"] == "careful"
            assert one["atts"]["votes"] == chat["atts"]["votes"]
            usage = one["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            stored = await client.http.get(f"/responses/{one['id']}")
            assert stored.json() == one
            unstored = (await respond(client, store=False)).json()
            gone = await client.http.get(f"/responses/{unstored['id']}")
            assert gone.status_code == 404

    anyio.run(main)


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:exact", "draft"])
def test_a_streamed_response_is_the_whole_one(model: str) -> None:
    """The deltas, final texts and last event of a streamed response agree with the response that is
    not streamed.
    """

    async def main() -> None:
        async with serving() as client:
            whole = (await respond(client, model=model, atts={"seed": 5})).json()
            got = await events_of(client, model=model, atts={"seed": 5})
            kinds = [event["type"] for event in got]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            last = got[-1]["response"]
            assert texts(last) == texts(whole)
            for name, text in zip(("reasoning_text", "output_text"), texts(whole), strict=True):
                deltas = [one for one in got if one["type"] == f"response.{name}.delta"]
                assert (
                    "".join(one["delta"] for one in deltas).split("line of thought -\n\n")[-1]
                    == text
                )
                ends = [one for one in got if one["type"] == f"response.{name}.done"]
                assert len(ends) == bool(text)
                for end in ends:
                    assert {(one["item_id"], one["output_index"]) for one in deltas} == {
                        (end["item_id"], end["output_index"])
                    }
            added = [one["item"] for one in got if one["type"] == "response.output_item.added"]
            done = [one["item"] for one in got if one["type"] == "response.output_item.done"]
            assert [one["id"] for one in added] == [one["id"] for one in done]
            assert [one["id"] for one in done] == [one["id"] for one in last["output"]]
            stored = await client.http.get(f"/responses/{last['id']}")
            assert stored.json() == last
            unstored = (await events_of(client, model=model, store=False))[-1]["response"]
            gone = await client.http.get(f"/responses/{unstored['id']}")
            assert gone.status_code == 404

    anyio.run(main)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": 3}, "input is neither a string nor a list"),
        ({"input": []}, "a user message that is not empty"),
        ({"input": [{"type": "function_call"}]}, "'function_call' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "not text"),
        ({"tools": [{"type": "web_search"}]}, "tools is not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format must be text"),
        ({"reasoning": {"effort": "huge"}}, "is unknown; known"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort is not a string"),
        ({"background": True, "stream": True}, "cannot be streamed; poll"),
        ({"background": True, "store": False}, "is always stored"),
        ({"background": True}, "need a server that was started with --state DIR"),
        ({"max_output_tokens": 0}, "below 1"),
        ({"atts": {"sampels": 1}}, "did you mean atts.samples?"),
    ],
)
def test_impossible_response_requests_are_refused(fields: dict[str, Any], words: str) -> None:
    """An impossible response request is refused before tokens are spent, with an error that names
    the field.
    """

    async def main() -> None:
        async with serving() as client:
            response = await respond(client, **fields)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
            assert client.service.account.spent == Amount()

    anyio.run(main)


def test_input_may_be_a_conversation() -> None:
    """The input may be a conversation: instructions come first, earlier reasoning is dropped, and
    the parts of a message are joined.
    """

    async def main() -> None:
        async with serving() as client:
            parts = [{"type": "input_text", "text": QUESTION}]
            earlier = [{"type": "output_text", "text": "2", "annotations": []}]
            response = await respond(
                client,
                instructions="Be brief.",
                input=[
                    {"role": "user", "content": "1 + 1?"},
                    {"type": "reasoning", "id": "rs_1", "summary": []},
                    {"type": "message", "role": "assistant", "content": earlier},
                    {"role": "user", "content": parts},
                ],
            )
            assert response.status_code == 200
            assert response.json()["instructions"] == "Be brief."

    anyio.run(main)


def test_a_cut_response_is_incomplete() -> None:
    """A response that a limit cut off is incomplete and gives the reason."""

    async def main() -> None:
        async with serving() as client:
            response = (await respond(client, max_output_tokens=4)).json()
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            got = await events_of(client, max_output_tokens=4)
            assert got[-1]["type"] == "response.incomplete"

    anyio.run(main)


def test_a_failed_stream_ends_with_its_error() -> None:
    """If a cap counts as an error, a stream that reaches it ends with the event of a failed
    response.
    """

    async def main() -> None:
        async with serving() as client:
            got = await events_of(client, atts={"max_calls": 1, "on_limit": "error"})
            assert got[-1]["type"] == "response.failed"
            assert got[-1]["response"]["error"]["code"] == "limit_reached"

    anyio.run(main)


async def finished(client: Client, name: str) -> dict[str, Any]:
    """Poll a background response until it has ended."""
    with anyio.fail_after(60):
        while True:
            response: dict[str, Any] = (await client.http.get(f"/responses/{name}")).json()
            if response["status"] not in ("queued", "in_progress"):
                return response
            await anyio.sleep(0.02)


def test_a_background_response_needs_no_client(tmp_path: Path) -> None:
    """A background request returns at once, can be read while it runs, and does not change after it
    has ended.
    """

    async def main() -> None:
        async with serving(toy_setup(SLOW), state=tmp_path) as client:
            first = (await respond(client, background=True)).json()
            assert first["status"] in ("queued", "in_progress")
            assert first["output"] == []
            last = await finished(client, first["id"])
            assert last["status"] == "completed"
            assert texts(last)[1] == "5"
            assert (last["id"], last["created_at"]) == (first["id"], first["created_at"])
        files = sorted(path.name for path in (tmp_path / "responses" / first["id"]).iterdir())
        assert files == ["request.json", "response.json"]
        async with serving(state=tmp_path) as client:
            assert (await client.http.get(f"/responses/{first['id']}")).json() == last
            assert client.service.counts.requests == 0
            deleted = await client.http.delete(f"/responses/{first['id']}")
            assert deleted.json()["deleted"]
            for name in (first["id"], "resp_x", "..%2F..%2Fledger.jsonl"):
                assert (await client.http.get(f"/responses/{name}")).status_code == 404

    anyio.run(main)


def test_background_responses_expire(tmp_path: Path) -> None:
    """The folder of a response that ended long ago is removed.

    A running response keeps its folder, however old its request is.
    """

    async def main() -> None:
        async with serving(toy_setup(SLOW), state=tmp_path) as client:
            old, new, open_ = [(await respond(client, background=True)).json() for _ in range(3)]
            for one in (old, new, open_):
                await finished(client, one["id"])
        folders = {one["id"]: tmp_path / "responses" / one["id"] for one in (old, new, open_)}
        (folders[open_["id"]] / "response.json").unlink()
        for name, path in folders.items():
            if name != new["id"]:
                for file in path.iterdir():
                    os.utime(file, (1.0, 1.0))
        setup = toy_setup(Latency(per_sample=30.0))
        async with serving(setup, state=tmp_path, response_seconds=3_600.0) as client:
            with anyio.fail_after(20):
                while folders[old["id"]].exists():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            statuses = [
                (await client.http.get(f"/responses/{name}")).status_code for name in folders
            ]
            assert statuses == [404, 200, 200]
            assert folders[open_["id"]].exists()

    anyio.run(main)


def test_a_background_response_can_be_cancelled(tmp_path: Path) -> None:
    """After a background response is cancelled, none of its calls is in flight, and a restarted
    server does not start it again.
    """

    async def main() -> None:
        async with serving(toy_setup(Latency(per_sample=30.0)), state=tmp_path) as client:
            first = (await respond(client, background=True)).json()
            with anyio.fail_after(20):
                while not client.service.account.reserved.calls:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            cancelled = (await client.http.post(f"/responses/{first['id']}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert client.service.account.reserved == Amount()
            assert (await client.http.post(f"/responses/{first['id']}/cancel")).json() == cancelled
        async with serving(state=tmp_path) as client:
            assert (await client.http.get(f"/responses/{first['id']}")).json() == cancelled
            assert client.service.in_flight == 0

    anyio.run(main)


def test_only_its_user_may_read_a_response(tmp_path: Path) -> None:
    """A request for a response with another user's key gets 404, as for a response that does not
    exist.
    """

    async def main() -> None:
        keys = {"k-ann": "ann", "k-bob": "bob"}
        async with serving(keys=keys, state=tmp_path) as client:
            ann, bob = ({"Authorization": f"Bearer {key}"} for key in keys)
            for fields in ({}, {"background": True}):
                made = await client.http.post("/responses", json=asked(**fields), headers=ann)
                url = f"/responses/{made.json()['id']}"
                assert (await client.http.get(url, headers=ann)).status_code == 200
                assert (await client.http.get(url, headers=bob)).status_code == 404
                assert (await client.http.post(f"{url}/cancel", headers=bob)).status_code == 404
                assert (await client.http.delete(url, headers=bob)).status_code == 404
                assert (await client.http.get(url, headers=ann)).status_code == 200

    anyio.run(main)


def test_a_closing_server_leaves_background_work_to_the_next(tmp_path: Path) -> None:
    """After a server closes, the next server finishes its unfinished background responses."""

    async def main() -> None:
        async with serving(toy_setup(SLOW), state=tmp_path) as client:
            first = (await respond(client, background=True, atts={"seed": 9})).json()
            with anyio.fail_after(20):
                while client.service.account.spent.calls < 3:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        async with serving(toy_setup(SLOW), state=tmp_path) as client:
            last = await finished(client, first["id"])
            whole = (await client.chat(seed=9)).json()
            assert texts(last) == (
                whole["choices"][0]["message"]["reasoning"],
                whole["choices"][0]["message"]["content"],
            )
            assert last["atts"]["votes"] == whole["atts"]["votes"]

    anyio.run(main)


def test_a_response_that_no_server_can_continue_fails(tmp_path: Path) -> None:
    """If an unfinished response needs a model that is no longer served, it ends with an error."""

    async def main() -> None:
        async with serving(toy_setup(Latency(per_sample=30.0)), state=tmp_path) as client:
            names = [(await respond(client, background=True)).json()["id"] for _ in range(2)]
            exact = await respond(client, background=True, model=f"{MODEL}:exact")
            names.append(exact.json()["id"])
        (tmp_path / "responses" / names[0] / "request.json").write_text("{")
        # the second server has one model, and no policy `exact`
        async with serving(toy_setup(method="draft-only"), state=tmp_path) as client:
            ends = [await finished(client, name) for name in names]
        assert [end["status"] for end in ends] == ["failed"] * 3
        assert [end["error"]["code"] for end in ends] == [
            "cannot_continue",
            "engine_failed",
            "cannot_continue",
        ]
        assert "another run" in ends[1]["error"]["message"]

    anyio.run(main)


def test_background_responses_survive_kill_9_and_finish_once(tmp_path: Path) -> None:
    """After several kills each background response ends exactly once, with the answer of a server
    that was not killed.

    The ledger has every call of every session, and a request's own cap applies to all sessions
    together.
    """
    ids: list[str] = []
    ends: dict[str, dict[str, Any]] = {}
    kills = 0
    for session in range(12):
        # the first sessions are slow, so they are killed before any response ends
        server, address = started_server(tmp_path, 0.4 if session < 4 else 0.02, 4)
        assert server.stdout is not None
        with server.stdout, httpx2.Client(base_url=address, timeout=60) as client:
            if session == 0:
                for seed in range(6):
                    fields = asked(background=True, atts={"seed": seed, "max_calls": 60})
                    ids.append(client.post("/responses", json=fields).json()["id"])
            until = time.monotonic() + (0.8 if session < 4 else 30)
            while time.monotonic() < until and len(ends) < len(ids):
                for name in ids:
                    response = client.get(f"/responses/{name}").json()
                    if response["status"] in ("queued", "in_progress"):
                        assert name not in ends, "a response that had ended is open again"
                    else:
                        assert ends.setdefault(name, response) == response
            os.kill(server.pid, signal.SIGKILL)
            kills += 1
        server.wait()
        if len(ends) == len(ids):
            break
    assert kills > 1
    assert {one["status"] for one in ends.values()} == {"completed"}
    spent = sum(read_ledger(tmp_path / LEDGER).values(), Amount())
    assert spent.calls >= sum(one["atts"]["spent"]["calls"] for one in ends.values())
    for response in ends.values():
        assert response["atts"]["spent"]["calls"] <= 60
    server, address = started_server(tmp_path, 0.05, 4)
    assert server.stdout is not None
    with server.stdout, httpx2.Client(base_url=address, timeout=60) as client:
        for seed, name in enumerate(ids):
            assert client.get(f"/responses/{name}").json() == ends[name]
            body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
            whole = client.post("/chat/completions", json={**body, "seed": seed}).json()
            assert texts(ends[name])[1] == whole["choices"][0]["message"]["content"]
        server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_responses_are_kept_for_a_time_above_0_that_ends(seconds: float) -> None:
    """Responses are kept for a finite time above 0; the error for another time names both limits."""
    with pytest.raises(OptionError, match=r"more than 0 days, and not for ever"):
        ServeOptions(response_seconds=seconds)
