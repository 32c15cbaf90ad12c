"""Tests of optional request fields: a thinking budget, a key for the prompt cache, priorities."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from atts.core import Outcome, Rollout, SampleRequest, ScoreRequest
from atts.engine import Engine
from atts.errors import OptionError, UnsupportedByEngine
from atts.graph import Graph, ProblemScope
from atts.pipelines import Answers, Chunking, Context, FixedGate, Policy, solve
from atts.run import EngineCalls
from atts.servers import RemoteEngine, RemoteOptions, read_server
from atts.servers.chat import ChatDialect
from atts.servers.client import Client, HttpReply
from atts.servers.sglang import SglangDialect
from atts.servers.vllm import VllmDialect
from atts.testing import (
    DialectServer,
    ScriptedEngine,
    ServerQuirks,
    ToyTokenizer,
    toy_answer,
    toy_groups,
    toy_problems,
)
from tests.servers.conftest import QUICK

Serve = Callable[..., DialectServer]
BUDGET = 24
POLICY = Policy(
    samples=3,
    drafter="target",
    early_stop="none",
    chunking=Chunking(400, 400, ()),
    instruction="<think>",
    thinking_tokens=BUDGET,
)


async def written(
    server: DialectServer, options: RemoteOptions, policy: Policy = POLICY
) -> list[Rollout]:
    """Write the rollouts of two problems with the server's model alone."""
    engine = RemoteEngine(server.url, tokenizer=ToyTokenizer(), options=options)
    answers = Answers(toy_answer, toy_groups)
    async with engine as target, ScriptedEngine("draft") as draft:
        context = Context(draft, target, FixedGate("accept"), answers, EngineCalls)

        async def one(problem: Any, scope: ProblemScope) -> Outcome:
            return await solve(problem, policy, context, scope)

        results = await Graph(rollouts=8).run(toy_problems(2, 5), one)
    return [r for result in results if result.value for r in result.value.rollouts]


def make() -> Engine:
    """Make an engine whose context has room for long chunks."""
    return ScriptedEngine(context_length=1024)


@pytest.mark.anyio
async def test_vllm_closes_the_block_in_the_same_request(serve: Serve) -> None:
    """With thinking=send the server itself ends the thinking block, within a single request.
    Otherwise atts ends the block at the budget and sends further requests.
    """
    server = serve(make=make)
    ours = await written(server, QUICK)
    stopped = [rollout for rollout in ours if any(turn.is_forced for turn in rollout.turns)]
    assert stopped
    assert all(len(rollout.turns) == 3 for rollout in stopped)
    theirs = await written(server, replace(QUICK, thinking="send"))
    assert not any(turn.is_forced for rollout in theirs for turn in rollout.turns)
    closed = [rollout for rollout in theirs if "</think>" in rollout.text]
    assert closed
    tokenizer = ToyTokenizer()
    for rollout in closed:
        assert len(tokenizer.encode(rollout.text.partition("</think>")[0])) <= BUDGET
    assert all(len(rollout.turns) == 1 for rollout in theirs)


@pytest.mark.anyio
async def test_atts_closes_the_block_if_the_server_ignores_the_budget(serve: Serve) -> None:
    """If the server ignores the thinking budget, atts closes the block after the request that
    exceeded it, and the turn records this.
    """
    server = serve(make=make, quirks=ServerQuirks(thinking="ignored"))
    policy = replace(POLICY, chunking=Chunking(BUDGET + 6, BUDGET + 6, ()))
    rollouts = await written(server, replace(QUICK, thinking="send"), policy)
    forced = [turn for rollout in rollouts for turn in rollout.turns if turn.is_forced]
    assert forced
    assert all("the server did not end the thinking" in turn.note for turn in forced)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("quirks", "words"),
    [
        (ServerQuirks(thinking="refused"), "Start vLLM with --reasoning-parser"),
        (ServerQuirks(version="0.18.1"), "vLLM 0.18.1 ignores thinking_token_budget"),
    ],
)
async def test_a_server_without_the_budget_is_refused(
    serve: Serve, quirks: ServerQuirks, words: str
) -> None:
    """A server without a thinking budget is refused before a run begins, with a remedy."""
    server = serve(make=make, quirks=quirks)
    options = replace(QUICK, thinking="send")
    with pytest.raises(UnsupportedByEngine, match=words):
        async with RemoteEngine(server.url, tokenizer=ToyTokenizer(), options=options):
            pass
    async with RemoteEngine(server.url, tokenizer=ToyTokenizer(), options=QUICK) as engine:
        assert "thinking" not in engine.spec.capabilities


def test_a_dialect_that_cannot_send_the_budget_says_so() -> None:
    """A dialect that cannot send the thinking budget raises an error instead of ignoring the
    setting.
    """
    address = read_server("sglang:http://localhost:1/m?thinking=send")
    assert address.options.thinking == "send"
    with pytest.raises(
        OptionError, match="servers of dialect sglang do not accept a thinking budget"
    ):
        SglangDialect(address.options)
    with pytest.raises(OptionError, match="thinking"):
        read_server("vllm:http://localhost:1/m?thinking=maybe")


class Host:
    """A hosted service that lists its models, for a dialect that checks the service's identity."""

    name = "host"

    def __init__(self, url: str) -> None:
        self.url = url

    async def look(self, path: str, body: Mapping[str, Any] | None = None) -> HttpReply:
        data = json.dumps({"data": [{"id": "m"}]}).encode()
        return HttpReply(200, data, "")


async def fields(url: str, options: RemoteOptions, **changes: Any) -> dict[str, Any]:
    """Return the request body that the chat dialect sends to this service."""
    dialect = ChatDialect(options)
    await dialect.identify(cast(Client, Host(url)), "m")
    request = SampleRequest((1, 70, 2), 50, rollout="p7/3", **changes)
    return dict(dialect.sample_call(request, "rid").body or {})


@pytest.mark.anyio
async def test_a_rollouts_requests_go_to_one_cache_at_openai() -> None:
    """At OpenAI, all requests of a rollout have the same prompt-cache key.

    Other services do not get this field, because they may refuse it.
    """
    body = await fields("https://api.openai.com/v1", QUICK)
    again = await fields("https://api.openai.com/v1", QUICK)
    assert body["prompt_cache_key"] == again["prompt_cache_key"]
    assert len(body["prompt_cache_key"]) <= 64
    assert "prompt_cache_key" not in await fields("https://host.example/v1", QUICK)


@pytest.mark.anyio
async def test_a_chat_service_gets_the_budget_in_its_own_field() -> None:
    """OpenRouter gets the thinking budget in its own field; OpenAI has no field for it."""
    send = replace(QUICK, thinking="send")
    assert (await fields("https://host.example/v1", send, thinking_budget=9))[
        "thinking_token_budget"
    ] == 9
    body = await fields("https://openrouter.ai/api/v1", send, thinking_budget=9)
    assert body["reasoning"] == {"max_tokens": 9}
    assert "thinking_token_budget" not in body
    with pytest.raises(OptionError, match="OpenAI does not accept a thinking budget"):
        await fields("https://api.openai.com/v1", send)


def test_earlier_problems_have_priority_at_the_server() -> None:
    """Requests of earlier problems have priority at the server, including requests for scores.

    SGLang uses the opposite sign for priorities.
    """
    send = replace(QUICK, priorities="send")
    for dialect, sign in ((VllmDialect(send), 1), (SglangDialect(send), -1)):
        order = [
            (dialect.sample_call(SampleRequest((1,), 5, rollout=name), "r").body or {})["priority"]
            for name in ("p1/0", "p2/0", "p1/1", "p3/0", "p2/1")
        ]
        assert order == [sign * place for place in (1, 2, 1, 3, 2)]
        scored = dialect.score_call(ScoreRequest((1,), (2,), "p3/4"), "r", "read").body or {}
        assert scored["priority"] == 3 * sign
    quiet = VllmDialect(QUICK).sample_call(SampleRequest((1,), 5, rollout="p1/0"), "r")
    assert "priority" not in (quiet.body or {})
