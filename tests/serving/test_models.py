"""Tests of a server's model names: single models, voting models, policies, and requests that chat
programs send themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from atts.api import Setup, solve
from atts.core import Problem, Role
from atts.ledger import Amount
from atts.pipelines import Policy
from atts.serving import VOTES
from atts.testing import ToyTokenizer
from tests.serving.conftest import MODEL, QUESTION, body, serving, stream_events, toy_setup

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")


def one_model(**changes: Any) -> Setup:
    """Make a server's setup with one model."""
    return toy_setup(method="draft-only", **changes)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_model_can_be_asked_alone(role: Role) -> None:
    """A request that names a single model gets one rollout of that model, with the whole text as
    content and without votes.
    """

    async def main() -> None:
        async with serving() as client:
            names = [role, client.service.engines[role].spec.model]
            replies = [(await client.chat(model=name, seed=4)).json() for name in names]
            for reply in replies:
                message = reply["choices"][0]["message"]
                assert "\\boxed{5}" in message["content"]
                assert message["reasoning"] == ""
                facts = reply["atts"]
                assert (facts["answer"], facts["votes"], facts["combine"]) == (None, {}, "none")
                assert facts["policy"] == role
                assert facts["samples"]["started"] == 1
                other = "target" if role == "draft" else "draft"
                assert facts["by_model"][other]["completion"] == 0
                assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
            assert replies[0]["choices"] == replies[1]["choices"]
            got = await stream_events(client, model=role, seed=4)
            deltas = [event["choices"][0]["delta"] for event in got]
            content = "".join(delta.get("content", "") for delta in deltas)
            assert content == replies[0]["choices"][0]["message"]["content"]
            assert not any("reasoning" in delta for delta in deltas)

    anyio.run(main)


def test_a_conversation_reaches_a_model_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is rendered by the single model's own chat template, without the system prompt
    of atts.
    """
    seen: list[Any] = []
    render = ToyTokenizer.render

    def watched(self: ToyTokenizer, messages: Any) -> Any:
        seen.append([(one.role, one.content) for one in messages])
        return render(self, messages)

    monkeypatch.setattr(ToyTokenizer, "render", watched)

    async def main() -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Start at 1. +1. What is the result?"},
            {"role": "assistant", "content": "2", "reasoning": "long"},
            {"role": "user", "content": QUESTION},
        ]
        async with serving() as client:
            response = await client.chat(model="draft", messages=messages)
            assert response.status_code == 200
        assert seen[-1] == [(one["role"], one["content"]) for one in messages]

    anyio.run(main)


@pytest.mark.parametrize("policy", VOTES)
def test_one_model_votes_as_solve_does(policy: str) -> None:
    """A server of one model has the usual policies, and with a seed it gives the same answer as
    `atts.solve`.
    """

    async def main() -> None:
        setup = VOTES[policy].applied(one_model(seed=7))
        expected = await solve(Problem("problem", QUESTION), setup)
        async with serving(one_model()) as client:
            reply = (await client.chat(model=f"{MODEL}:{policy}", seed=7)).json()
            assert reply["atts"]["answer"] == expected.answer
            assert reply["atts"]["votes"] == expected.votes
            assert reply["atts"]["by_model"]["target"]["completion"] == 0
            listed = (await client.http.get("/models")).json()["data"]
            spec = client.service.engines["draft"].spec
            assert [one["id"] for one in listed] == [
                MODEL,
                *(f"{MODEL}:{name}" for name in VOTES),
                spec.model,
            ]
            refusal = await client.chat(atts={"method": "atts"})
            assert "known: draft-only" in refusal.json()["error"]["message"]

    anyio.run(main)


def test_a_request_may_name_its_method() -> None:
    """A method in the request replaces that of the policy, and the reply reports it."""

    async def main() -> None:
        setup = toy_setup(method="cascade", rate=0.2, seed=3)
        setup = replace(setup, policy=replace(setup.policy, samples=4, early_stop="likely"))
        expected = await solve(Problem("problem", QUESTION), setup)
        async with serving() as client:
            reply = (await client.chat(seed=3, atts={"method": "cascade"})).json()
            assert reply["atts"]["method"] == "cascade"
            assert reply["atts"]["answer"] == expected.answer
            assert reply["atts"]["votes"] == expected.votes

    anyio.run(main)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"atts": {"combine": "auto"}}, "combine 'auto' is not supported; use vote, select"),
        ({"model": "draft", "atts": {"combine": "select"}}, "does not apply to 'draft'"),
        ({"atts": {"method": "cascades"}}, "did you mean cascade?"),
        ({"atts": {"method": "paper-marginal"}}, "is unknown; known: atts, cascade"),
        ({"atts": {"trace": "all"}}, "none, summary or full"),
        ({"atts": {"thinking_token_budget": 0}}, "expected at least 1"),
        ({"model": "draft", "atts": {"samples": 2}}, "does not apply to 'draft'"),
        ({"model": "target", "atts": {"method": "atts"}}, "does not apply to 'target'"),
    ],
)
def test_impossible_requests_to_a_model_are_refused(fields: dict[str, Any], words: str) -> None:
    """An impossible request to a single model is refused before any work is done, with an error
    that names the field.
    """

    async def main() -> None:
        async with serving() as client:
            response = await client.chat(**fields)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
            assert client.service.account.spent == Amount()

    anyio.run(main)


def test_a_thinking_budget_lets_every_rollout_answer() -> None:
    """When a rollout reaches its thinking budget, atts appends a text that ends the thinking and
    begins the answer.

    `max_tokens` limits the whole rollout.
    """

    async def main() -> None:
        async with serving() as client:
            fields: dict[str, Any] = {"atts": {"thinking_token_budget": 6, "trace": "full"}}
            trace = (await client.chat(seed=1, **fields)).json()["atts"]["trace"]
            assert len(trace) == 4
            for rollout in trace:
                text = "".join(chunk["text"] for chunk in rollout["chunks"])
                thoughts, ended, answer = text.partition("\n\nI have no time left to think")
                assert ended
                assert len(ToyTokenizer().encode(thoughts)) <= 6
                assert answer
            fields = {"max_tokens": 6, "atts": {"thinking_token_budget": 60, "trace": "summary"}}
            trace = (await client.chat(seed=1, **fields)).json()["atts"]["trace"]
            for rollout in trace:
                assert rollout["finish"] == "tokens"
                assert "chunks" not in rollout

    anyio.run(main)


def test_a_trace_has_every_chunk_and_its_decision() -> None:
    """The trace `full` contains the texts that `summary` only counts; `none` contains neither texts
    nor counts.
    """

    async def main() -> None:
        async with serving() as client:
            reply = (await client.chat(seed=2, atts={"trace": "full"})).json()
            trace = reply["atts"]["trace"]
            texts = ["".join(chunk["text"] for chunk in one["chunks"]) for one in trace]
            assert reply["choices"][0]["message"]["reasoning"] in texts
            judged = [chunk for one in trace for chunk in one["chunks"] if chunk["action"]]
            assert len(judged) == reply["atts"]["rate"]["chunks"] > 0
            assert all(chunk["score"] is not None for chunk in judged)
            assert "trace" not in (await client.chat(seed=2)).json()["atts"]
            run = reply["atts"]["report"]
            root = str(client.http.base_url).removesuffix("/v1/")
            assert "trace" not in (await client.http.get(root + run)).json()

    anyio.run(main)


TITLE = f"### Task:\nWrite a title.\n<chat_history>\nUSER: {QUESTION}\n</chat_history>"


@pytest.mark.parametrize("housekeeping", ["draft", "policy"])
def test_a_chat_programs_own_request_costs_one_draft_rollout(housekeeping: Any) -> None:
    """Requests that a chat program sends itself, for titles and the like, cost one draft rollout
    and are counted separately.

    The server can also be set to treat them as usual requests.
    """

    async def main() -> None:
        async with serving(housekeeping=housekeeping) as client:
            messages = [{"role": "user", "content": TITLE}]
            facts = (await client.chat(messages=messages)).json()["atts"]
            is_cheap = housekeeping == "draft"
            assert facts["policy"] == ("housekeeping" if is_cheap else "balanced")
            assert client.service.counts.housekeeping == is_cheap
            if is_cheap:
                assert facts["samples"]["started"] == 1
                assert facts["by_model"]["target"] == {"completion": 0, "prompt": 0, "scored": 0}
            # a request with its own settings does not come from the chat program itself
            facts = (await client.chat(messages=messages, atts={"samples": 2})).json()["atts"]
            assert facts["policy"] == "balanced"

    anyio.run(main)


def test_a_question_about_documents_is_not_a_chat_programs_own() -> None:
    """A question about documents gets the usual policy.

    Open WebUI words such a question like its own tasks, but sends it as the user's message.
    """

    async def main() -> None:
        async with serving() as client:
            task = "### Task:\nAnswer the query from the context.\n<context>\n<source>"
            for document in ("prices", "a log with <chat_history> in it"):
                text = f"{task}{document}</source>\n</context>\n{QUESTION}"
                messages = [{"role": "user", "content": text}]
                facts = (await client.chat(messages=messages)).json()["atts"]
                assert facts["policy"] == "balanced"
            assert client.service.counts.housekeeping == 0

    anyio.run(main)


@pytest.mark.parametrize("combine", ["select", "synthesize"])
def test_a_request_may_combine_its_votes(combine: str) -> None:
    """A request may ask for combining: if its votes split, the target is called, and the target's
    tokens are in the usage.
    """

    async def main() -> None:
        async with serving() as client:
            asked = {"method": "draft-only", "samples": 8, "early_stop": "none"}
            split = 0
            for seed in range(4):
                plain = (await client.chat(seed=seed, atts=asked)).json()["atts"]
                reply = (await client.chat(seed=seed, atts={**asked, "combine": combine})).json()
                facts = reply["atts"]
                assert facts["combine"] == combine
                assert facts["votes"] == plain["votes"]
                is_split = len(facts["votes"]) > 1
                split += is_split
                assert (facts["by_model"]["target"]["completion"] > 0) == is_split
            assert split

    anyio.run(main)


def test_the_body_of_the_page_is_complete() -> None:
    """A request with every field that the page documents is accepted."""

    async def main() -> None:
        async with serving() as client:
            everything = body(
                temperature=0.5,
                top_p=0.9,
                max_completion_tokens=200,
                seed=1,
                reasoning_effort="high",
                user="ann",
                atts={
                    "rate": 0.3,
                    "samples": 3,
                    "method": "atts",
                    "early_stop": "none",
                    "combine": "vote",
                    "max_target_tokens": 5_000,
                    "max_total_tokens": 50_000,
                    "max_calls": 900,
                    "max_seconds": 60,
                    "thinking_token_budget": 150,
                    "on_limit": "error",
                    "trace": "summary",
                    "seed": 1,
                },
            )
            response = await client.http.post("/chat/completions", json=everything)
            assert response.status_code == 200
            assert response.json()["atts"]["ignored"] == []

    anyio.run(main)


@pytest.mark.parametrize("method", ["draft-only", "target-only"])
def test_a_model_alone_needs_no_scores_of_the_pair(method: str) -> None:
    """Either model of the embedded pair can be used alone; the pair's stored scores are not
    needed.
    """
    pytest.importorskip("torch", reason="torch is not installed: pip install 'atts-llm[local]'")

    async def main() -> None:
        policy = Policy(samples=1, max_tokens=60)
        outcome = await solve("What is 3 + 4?", Setup(method=method, policy=policy))
        assert outcome.rollouts[0].text

    anyio.run(main)
