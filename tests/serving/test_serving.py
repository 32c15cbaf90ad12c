"""Tests of the endpoint: replies, streams, caps, refusals, overload, and clients that
disconnect.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.api import Setup, solve
from atts.concurrency import task_group
from atts.core import Completion, Problem, Role, SampleRequest
from atts.errors import OptionError
from atts.ledger import LEDGER, Account, Amount, Caps, Price, read_ledger
from atts.pipelines import Policy
from atts.serving import POLICIES, ServeOptions
from atts.serving.requests import Offer, parse_chat
from atts.serving.streams import NEXT_LINE
from atts.testing import Faults, Latency, ScriptedEngine
from tests.serving.conftest import MODEL, QUESTION, body, serving, stream_events, toy_setup

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
SLOW = Latency(per_sample=0.05, per_score=0.02, sampled_token=0.002)
PRICES = {"draft": Price(0.1, 0.4), "target": Price(1.0, 4.0)}


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine."""
    anyio.run(main)


def test_a_reply_has_answer_reasoning_usage_and_facts() -> None:
    """A reply has the fields that clients read, and its usage equals the usage in the ledger."""

    async def main() -> None:
        async with serving(prices=PRICES) as client:
            response = await client.chat(seed=3, metadata={"a": 1})
            reply = response.json()
            assert response.status_code == 200
            message = reply["choices"][0]["message"]
            assert message["content"] == reply["atts"]["answer"] == "5"
            assert message["reasoning"] == message["reasoning_content"]
            assert "\\boxed{5}" in message["reasoning"]
            assert reply["choices"][0]["finish_reason"] == "stop"
            usage = reply["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            spent = reply["atts"]["spent"]
            late = spent.get("cancelled", {"total_tokens_at_most": 0})["total_tokens_at_most"]
            assert usage["total_tokens"] == spent["total_tokens"] - late
            assert usage["cost"] == spent["cost"] > 0
            assert reply["atts"]["ignored"] == ["metadata"]
            assert client.service.account.spent.calls == spent["calls"]
            samples = reply["atts"]["samples"]
            assert samples["finished"] + samples["cancelled"] == POLICIES["balanced"].samples

    run(main)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_answer_of_solve(policy: str) -> None:
    """With a seed, the endpoint gives the answer of `atts.solve` under every policy and at every
    repetition.
    """

    async def main() -> None:
        setup = POLICIES[policy].applied(toy_setup(seed=11))
        alone = await solve(Problem("problem", QUESTION), setup)
        async with serving() as client:
            for _ in range(2):
                reply = (await client.chat(model=f"{MODEL}:{policy}", seed=11)).json()
                assert reply["atts"]["answer"] == alone.answer
                assert reply["atts"]["votes"] == dict(alone.votes)
                texts = [one.text for one in alone.rollouts if one.answer == alone.answer]
                assert reply["choices"][0]["message"]["reasoning"] in texts

    run(main)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_says_what_a_whole_reply_says(seed: int) -> None:
    """A stream has, in this order, the role, the reasoning, the content (once), the finish reason
    and the usage of a whole reply.
    """

    async def main() -> None:
        async with serving() as client:
            whole = (await client.chat(seed=seed)).json()
            got = await stream_events(client, seed=seed, stream_options={"include_usage": True})
            assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            last = got.pop()
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert last["atts"]["votes"] == whole["atts"]["votes"]
            deltas = [event["choices"][0]["delta"] for event in got]
            reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
            message = whole["choices"][0]["message"]
            assert reasoning.split(NEXT_LINE)[-1] == message["reasoning"]
            assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
            assert got[-1]["choices"][0]["finish_reason"] == "stop"
            assert len({event["id"] for event in got}) == 1

    run(main)


def test_a_stream_separates_a_rollout_that_begins_again() -> None:
    """If the target writes a rollout again from the prompt, the stream sends a separating line and
    the new text once.
    """

    async def main() -> None:
        fields = {"method": "coin", "rate": 0.4, "samples": 1}
        parts = Counter[int]()
        async with serving(toy_setup(policy=Policy(escalates="rollout"))) as client:
            for seed in range(8):
                whole = (await client.chat(seed=seed, atts=fields)).json()
                got = await stream_events(client, seed=seed, atts=fields)
                sent = "".join(event["choices"][0]["delta"].get("reasoning", "") for event in got)
                message = whole["choices"][0]["message"]["reasoning"]
                assert sent.split(NEXT_LINE)[-1] == message
                parts[sent.count(NEXT_LINE) + 1] += 1
        assert parts.keys() == {1, 2}

    run(main)


class HeldEngine(ScriptedEngine):
    """An engine whose calls end only when the test allows it."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self.begun = anyio.Event()
        self.release = anyio.Event()

    async def _sample(self, request: SampleRequest) -> Completion:
        self.begun.set()
        await self.release.wait()
        return await super()._sample(request)


@pytest.mark.parametrize("model", [MODEL, "draft"])
def test_a_stream_begins_before_any_engine_call_has_ended(model: str) -> None:
    """A stream's status, headers and role are sent before any engine call has ended."""

    async def main() -> None:
        draft = HeldEngine("draft")
        async with serving(Setup(draft=draft, target="scripted")) as client:
            given = body(stream=True, model=model)
            with anyio.fail_after(60):
                async with client.http.stream("POST", "/chat/completions", json=given) as response:
                    assert response.status_code == 200
                    lines = response.aiter_lines()
                    first = json.loads((await anext(lines)).removeprefix("data: "))
                    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                    await draft.begun.wait()
                    assert client.service.account.reserved.calls > 0
                    draft.release.set()
                    rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"

    run(main)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"atts": {"sampels": 2}}, 400, "did you mean atts.samples?"),
        ({"atts": {"samples": 0}}, 400, "expected 1 to 64"),
        ({"atts": {"samples": "2"}}, 400, "atts.samples is not a whole number"),
        ({"atts": {"rate": 1.5}}, 400, "outside [0, 1]"),
        ({"atts": {"early_stop": "maybe"}}, 400, "early_stop"),
        ({"atts": {"max_cost": 1.0}}, 400, "has no price"),
        ({"atts": {"max_calls": 0}}, 400, "a limit of 0 allows no calls"),
        ({"atts": {"on_limit": "x"}}, 400, "best or error"),
        ({"atts": []}, 400, "atts is not an object"),
        ({"model": "atts/toi"}, 404, "did you mean 'atts/toy'?"),
        ({"model": 3}, 400, "model is not a string"),
        ({"messages": []}, 400, "a user message that is not empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "not text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ({"n": 2}, 400, "n must be 1"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 2}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "expected at least 1"),
        ({"seed": -1}, 400, "seed"),
        ({"reasoning_effort": "huge"}, 400, "reasoning_effort"),
        ({"stream": "yes"}, 400, "stream is not true or false"),
    ],
)
def test_impossible_chat_requests_are_refused(
    fields: dict[str, Any], status: int, words: str
) -> None:
    """An impossible chat request is refused before any work is done, with an error in OpenAI's form
    that names the field.
    """

    async def main() -> None:
        async with serving() as client:
            response = await client.chat(**fields)
            assert response.status_code == status
            error = response.json()["error"]
            assert words in error["message"]
            assert error["param"]
            assert client.service.account.spent == Amount()

    run(main)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b'{"model": NaN}', 400),
        (b"x" * 2_000_000, 413),
    ],
)
def test_malformed_bodies_are_refused(data: bytes, status: int) -> None:
    """A broken, deeply nested or huge body gets a client error, and the server continues."""

    async def main() -> None:
        async with serving() as client:
            response = await client.http.post("/chat/completions", content=data)
            assert response.status_code == status
            assert (await client.chat()).status_code == 200

    run(main)


def test_paths_and_methods_that_are_not_served_are_refused() -> None:
    """Requests of unknown routes and of manipulated paths are refused and read no file."""

    async def main() -> None:
        async with serving() as client:
            for path in ("/nothing", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"):
                response = await client.http.get(path)
                assert response.status_code == 404
                assert "root:" not in response.text
            assert (await client.http.get("/chat/completions")).status_code == 405

    run(main)


@pytest.mark.parametrize(
    ("caps", "limit"),
    [
        ({"max_calls": 6}, "max_calls"),
        ({"max_total_tokens": 900}, "max_total_tokens"),
        ({"max_target_tokens": 3}, "max_target_tokens"),
        ({"max_cost": 0.0004}, "max_cost"),
        ({"max_seconds": 0.2}, "max_seconds"),
    ],
)
def test_a_cap_ends_a_request_and_is_never_exceeded(caps: dict[str, Any], limit: str) -> None:
    """A reply that a cap ended names the cap; with `on_limit` "error", the request gets an error
    instead.
    """

    async def main() -> None:
        setup = toy_setup(SLOW) if limit == "max_seconds" else toy_setup()
        async with serving(setup, prices=PRICES) as client:
            reply = (await client.chat(seed=1, atts=caps)).json()
            assert reply["atts"]["limit"] == limit
            spent = reply["atts"]["spent"]
            for name, cap in caps.items():
                if name != "max_seconds":
                    assert spent[name.removeprefix("max_")] <= cap
            refusal = await client.chat(seed=1, atts={**caps, "on_limit": "error"})
            assert refusal.status_code == 402
            assert refusal.json()["error"]["code"] == "limit_reached"

    run(main)


def test_the_caps_of_the_server_win() -> None:
    """Neither the body nor the headers of a request can raise the caps set by --request-*."""
    asked = parse_chat(
        body(atts={"max_calls": 900, "max_total_tokens": 50}),
        {"x-atts-max-seconds": "3"},
        Offer(MODEL),
        Caps(max_calls=10, max_total_tokens=100, max_cost=1.0, max_seconds=60),
    )
    assert asked.caps == Caps(10, None, 50, 1.0, 3.0)


def test_a_restart_remembers_what_was_spent(tmp_path: Path) -> None:
    """The server's own cap counts the spending of earlier sessions; a request beyond it is refused
    before any work is done.
    """

    async def main() -> None:
        async with serving(state=tmp_path) as client:
            assert (await client.chat()).status_code == 200
            spent = client.service.account.spent
        assert sum(read_ledger(tmp_path / LEDGER).values(), Amount()) == spent
        caps = Caps(max_calls=spent.calls)
        async with serving(state=tmp_path, server_caps=caps) as client:
            response = await client.chat()
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "insufficient_quota"
            assert client.service.account.spent == spent

    run(main)


def test_without_the_key_only_health_is_served() -> None:
    """On a server with a key, every route except the health check refuses requests without the
    key.
    """

    async def main() -> None:
        async with serving(key="secret") as client:
            assert (await client.chat()).status_code == 200
            for header in ("", "Bearer wrong", "secret", "Bearer secret2"):
                response = await client.http.get("/models", headers={"Authorization": header})
                assert response.status_code == 401
                assert "secret" not in response.text
            root = str(client.http.base_url).removesuffix("v1/")
            for path in ("health", "ready"):
                response = await client.http.get(root + path, headers={"Authorization": ""})
                assert response.status_code == 200
            response = await client.http.get(root + "metrics", headers={"Authorization": ""})
            assert response.status_code == 401

    run(main)


def test_overload_is_refused_with_a_time_to_try_again() -> None:
    """With one request in work and one waiting, a third is refused with a Retry-After header."""

    async def main() -> None:
        async with serving(toy_setup(SLOW), requests=1, queue=1) as client:
            statuses: list[int] = []

            async def ask() -> None:
                response = await client.chat()
                statuses.append(response.status_code)
                if response.status_code == 429:
                    assert int(response.headers["retry-after"]) > 0

            async with task_group() as group:
                for _ in range(3):
                    group.start_soon(ask)
            assert sorted(statuses) == [200, 200, 429]
            assert client.service.in_flight == 0

    run(main)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_calls(stream: bool) -> None:
    """After a client disconnected, no part of its request is left, including its engine calls."""

    async def main() -> None:
        setup = toy_setup(Latency(per_sample=30.0))
        async with serving(setup) as client:
            with anyio.move_on_after(0.5):
                await client.chat(stream=stream)
            service = client.service
            with anyio.fail_after(20):
                while service.in_flight or service.account.reserved.calls:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            engine = setup.draft
            assert isinstance(engine, ScriptedEngine)
            assert engine.stats().in_flight == 0
            assert engine.stats().cancelled > 0
            assert service.counts.cancelled == 1
            assert service.account.unanswered.calls > 0

    run(main)


def test_a_lost_engine_is_an_error_of_the_server() -> None:
    """If an engine is lost, the client gets status 502 without internal details, and the server
    continues.
    """

    async def main() -> None:
        faulty = ScriptedEngine("draft", faults=Faults({"refused": 1.0}))
        async with serving(Setup(draft=faulty, target="scripted")) as client:
            response = await client.chat(atts={"samples": 1})
            assert response.status_code == 502
            assert "Traceback" not in response.text
            root = str(client.http.base_url).removesuffix("v1/")
            assert (await client.http.get(root + "health")).status_code == 200

    run(main)


def test_256_streams_at_once_lose_no_chunk() -> None:
    """Each of 256 simultaneous streams delivers its role, reasoning, answer and end."""

    async def main() -> None:
        async with serving(requests=256) as client:
            whole = (await client.chat(seed=5)).json()["choices"][0]["message"]
            ended = 0

            async def one() -> None:
                nonlocal ended
                got = await stream_events(client, seed=5)
                deltas = [event["choices"][0]["delta"] for event in got]
                reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
                assert reasoning.split(NEXT_LINE)[-1] == whole["reasoning"]
                assert "".join(one.get("content", "") for one in deltas) == whole["content"]
                ended += 1

            async with task_group() as group:
                for _ in range(256):
                    group.start_soon(one)
            assert ended == 256
            assert client.service.account.reserved == Amount()

    run(main)


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_can_be_seen_and_cancelled(stream: bool) -> None:
    """A run is listed while it is in progress.

    If it is cancelled, its calls end and its client gets an error.
    """

    async def main() -> None:
        setup = toy_setup(Latency(per_sample=30.0))
        async with serving(setup) as client:
            root = str(client.http.base_url).removesuffix("v1/") + "atts/runs"
            replies: list[tuple[int, str]] = []

            async def ask() -> None:
                response = await client.chat(stream=stream)
                replies.append((response.status_code, response.text))

            async with task_group() as group:
                group.start_soon(ask)
                listed: list[Any] = []
                while not listed or not listed[0]["reserved_calls"]:
                    await anyio.sleep(0.02)
                    listed = (await client.http.get(root)).json()["data"]
                assert [run["status"] for run in listed] == ["running"]
                response = await client.http.post(f"{root}/{listed[0]['run']}/cancel")
                assert response.status_code == 200
            ((status, text),) = replies
            assert status == (200 if stream else 409)
            assert "the run was cancelled" in text
            shown = (await client.http.get(f"{root}/{listed[0]['run']}")).json()
            assert shown["status"] == "cancelled"
            assert client.service.account.reserved == Amount()
            engine = setup.draft
            assert isinstance(engine, ScriptedEngine)
            assert engine.stats().in_flight == 0
            assert (await client.http.post(f"{root}/r_none/cancel")).status_code == 404

    run(main)


def test_a_finished_run_shows_its_facts_and_no_text() -> None:
    """The page of a finished run shows votes and spending, but not the client's question."""

    async def main() -> None:
        async with serving() as client:
            reply = (await client.chat()).json()
            root = str(client.http.base_url).removesuffix("v1/") + "atts/runs"
            response = await client.http.get(f"{root}/{reply['atts']['run']}")
            shown = response.json()
            assert shown["status"] == "answered"
            assert shown["votes"] == reply["atts"]["votes"]
            assert QUESTION not in response.text
            await client.http.post(f"{root}/{reply['atts']['run']}/cancel")
            assert (await client.http.get(f"{root}/{reply['atts']['run']}")).json() == shown

    run(main)


def test_metrics_count_what_happened() -> None:
    """The server's counters grow with each request, and its gauges return to 0."""

    async def main() -> None:
        async with serving() as client:
            await client.chat()
            root = str(client.http.base_url).removesuffix("v1/")
            text = (await client.http.get(root + "metrics")).text
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            assert values['atts_requests_total{result="answered"}'] == "1"
            assert values["atts_requests_in_flight"] == values["atts_reserved_calls"] == "0"
            assert int(values["atts_tokens_total"]) > 0

    run(main)


def test_an_answerless_chat_has_the_text_of_a_rollout() -> None:
    """If no answer can be extracted from a chat, its content is the text of a rollout."""

    async def main() -> None:
        async with serving() as client:
            reply = (await client.chat(seed=2, max_tokens=4)).json()
            assert reply["atts"]["answer"] is None
            assert reply["choices"][0]["message"]["content"]
            assert reply["choices"][0]["finish_reason"] == "length"

    run(main)


def changed(name: str, value: Any) -> ServeOptions:
    """Return the options with one value changed."""
    changes: dict[str, Any] = {name: value}
    return replace(ServeOptions(), **changes)


@pytest.mark.parametrize("name", ["requests", "body_bytes"])
def test_limits_that_serve_nothing_are_refused(name: str) -> None:
    """A server limit that admits no request is refused as a mistake in the options."""
    with pytest.raises(OptionError, match=name):
        changed(name, 0)


def test_an_account_inside_another_one_spends_from_both() -> None:
    """A call is charged to its inner and its outer account, and the outer account's cap refuses a
    call that the inner cap allows.
    """
    outer = Account(Caps(max_calls=1))
    inner = Account(Caps(max_calls=5), inside=outer)
    with inner.reserved_now(Amount(1)):
        assert outer.reserved == Amount(1)
    assert outer.spent == inner.spent == Amount(1)
