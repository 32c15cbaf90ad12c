"""Tests of chat API and Ollama servers, which accept only text: what they can be used for, and what
is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from atts.api import build_engine
from atts.concurrency import collect
from atts.core import Chunk, Message, SampleRequest, Sampling, ScoreRequest
from atts.engine import Engine
from atts.errors import (
    BadReply,
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    OptionError,
    UnsupportedByEngine,
)
from atts.methods import preset
from atts.pipelines import Chunking, FixedGate, Gate, Policy, ThresholdGate
from atts.run import RunOptions, RunSpec, evaluate
from atts.servers import ApiKey, RemoteEngine, RemoteOptions, read_server
from atts.servers.chat import TextTokenizer
from atts.testing import (
    CheckOptions,
    DialectServer,
    ScriptedEngine,
    ServerFaults,
    ServerQuirks,
    Skill,
    ToyModel,
    ToyTokenizer,
    check_engine,
    toy_problems,
)

Serve = Callable[..., DialectServer]
Simple = Callable[..., Any]
OPTIONS = RemoteOptions(
    timeout_seconds=60.0,
    delay_seconds=0.01,
    wait_seconds=20.0,
    prefill="continue",
    extras="send",
    idle_seconds=1e9,
    recheck_seconds=1e9,
    recheck_requests=10**9,
)
QUESTION = Message("user", "Start at 4. +3, -2. What is the result?")
RATING = "\n\nI think the quality score is: "


@pytest.mark.parametrize("share", [0.8, 1.3])
def test_a_long_text_is_cut_into_the_servers_number_of_tokens(share: float) -> None:
    """A long text is cut into exactly as many pieces as the server counted tokens, in time that
    grows linearly with the text.
    """
    tokenizer = TextTokenizer()
    text = "So x_{1} = 12345, which is 7 more than before.\n\n" * 800
    count = int(len(tokenizer.encode(text)) * share)
    began = process_time()
    ids = tokenizer.pieces(text, count)
    assert process_time() - began < 2.0
    assert (len(ids), tokenizer.decode(ids)) == (count, text)


def test_a_long_run_of_spaces_is_made_of_known_ids() -> None:
    """A long run of spaces is cut into ids of the vocabulary, none of which has more bytes than the
    longest token.
    """
    tokenizer = TextTokenizer()
    text = "a" + " " * 200 + "\n" * 200
    assert max(tokenizer.encode(text)) < tokenizer.vocabulary
    assert tokenizer.decode(tokenizer.encode(text)) == text


def chat(server: DialectServer, options: RemoteOptions = OPTIONS, **settings: Any) -> RemoteEngine:
    """Make an engine on a chat API server."""
    return RemoteEngine(
        server.url + "/v1", dialect="chat", name="remote", options=options, **settings
    )


def ollama(
    server: DialectServer, options: RemoteOptions = OPTIONS, **settings: Any
) -> RemoteEngine:
    """Make an engine on an Ollama server."""
    return RemoteEngine(server.url, dialect="ollama", name="remote", options=options, **settings)


def contents(folder: Path) -> list[bytes]:
    """Return the content of every file below a folder, in bytes."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def prompt(engine: Engine, begun: str = "") -> tuple[int, ...]:
    """Render the question, followed by the given beginning of its answer."""
    return engine.tokenizer.render([QUESTION, *([Message("assistant", begun)] if begun else [])])


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [chat, ollama])
async def test_a_text_server_passes_the_conformance_suite(serve: Serve, kind: Simple) -> None:
    """Engines on text servers pass the conformance suite.

    The suite never fills the context completely, because only the server can count its tokens.
    """
    server = serve("chat" if kind is chat else "ollama")
    options = CheckOptions(
        tokens=9, long_tokens=96, boundary=0, timeout_seconds=600, settle_seconds=60
    )
    report = await check_engine(lambda: kind(server), options=options)
    assert not report.broken
    assert server.running == 0


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [chat, ollama])
async def test_a_text_in_two_requests_equals_one(serve: Serve, kind: Simple) -> None:
    """A text requested in two parts equals the text of one request, wherever the first part ends.

    Tokens are counted as the server counts them.
    """
    server = serve("chat" if kind is chat else "ollama")
    async with kind(server) as remote:
        greedy = Sampling(0.0)
        whole = await remote.sample(SampleRequest(prompt(remote), 40, greedy))
        first = await remote.sample(SampleRequest(prompt(remote), 10, greedy))
        rest = await remote.sample(SampleRequest(prompt(remote) + first.ids, 30, greedy))
        assert first.text + rest.text == whole.text
        assert (len(first.ids), first.ended, first.logprobs) == (10, "length", ())
        ended = await remote.sample(SampleRequest(prompt(remote), 400, greedy))
        assert (ended.ended, ended.ids[-1]) == ("end", remote.spec.end_ids[0])


@pytest.mark.anyio
async def test_a_hosted_model_gets_the_answer_so_far_in_the_question(serve: Serve) -> None:
    """A hosted model gets the answer written so far as part of the question.

    Hosted servers refuse unknown fields, so atts sends none, and refuses `top_k`, which would need
    one.
    """
    server = serve("chat", quirks=ServerQuirks(prefill="closed"))
    async with chat(server, RemoteOptions()) as remote:
        assert (await remote.sample(SampleRequest(prompt(remote, "First, 4 plus"), 10))).text
        with pytest.raises(UnsupportedByEngine, match="top_k"):
            await remote.sample(SampleRequest(prompt(remote), 10, Sampling(top_k=5)))
    with pytest.raises(EngineError, match="Unrecognized request argument"):
        async with chat(server) as told:
            await told.sample(SampleRequest(prompt(told, "First"), 10))


@pytest.mark.anyio
async def test_prefix_continues_a_message_like_continue(serve: Serve) -> None:
    """Some servers continue a message if the request sets `prefix`, others if it sets `continue`;
    the text is the same.
    """
    marked = serve("chat", quirks=ServerQuirks(prefill="prefix"))
    flagged = serve("chat")
    options = RemoteOptions(prefill="prefix")
    async with chat(marked, options) as one, chat(flagged) as other:
        request = SampleRequest(prompt(one, "So 4 plus 3 is"), 12, Sampling(0.0))
        assert (await one.sample(request)).text == (await other.sample(request)).text


@pytest.mark.anyio
async def test_a_rating_costs_one_request(serve: Serve) -> None:
    """The scores of all ten digits come from a single request, even if its first caller is
    cancelled or fails.
    """
    server = serve("chat")
    async with chat(server) as remote, ScriptedEngine(context_length=1024) as behind:
        assert remote.spec.capabilities == {"sample", "rate"}
        ids = (*prompt(remote, "So 4 plus 3 is 7."), *remote.tokenizer.encode(RATING))
        digits = [remote.tokenizer.encode(str(digit)) for digit in range(10)]
        before = len(server.calls)
        scores = await collect(
            [partial(remote.score, ScoreRequest(ids, digit)) for digit in digits]
        )
        assert len(server.calls) == before + 1
        own = behind.tokenizer.render(
            [QUESTION, Message("assistant", "So 4 plus 3 is 7." + RATING)]
        )
        for digit, found in enumerate(scores):
            want = await behind.score(ScoreRequest(own, behind.tokenizer.encode(str(digit))[:1]))
            assert found.logprobs == pytest.approx(want.logprobs, abs=1e-6)
        unlikely = await remote.score(ScoreRequest(ids, remote.tokenizer.encode("x")))
        assert unlikely.logprobs == (float("-inf"),)
        with pytest.raises(UnsupportedByEngine, match="cannot score"):
            await remote.score(ScoreRequest(ids, digits[1] + digits[2]))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset", EngineUnavailable), ("429", EngineUnavailable), ("500", EngineUnavailable), ("truncated", BadReply),
        ("wrong_ids", BadReply), ("nan", BadReply), ("hang", EngineTimeout),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [chat, ollama])
async def test_failures_are_tried_a_few_times_and_named(
    serve: Serve, kind: Simple, fault: str, error: type[EngineError]
) -> None:
    """A failed request is retried a limited number of times, and then raises the error class of its
    failure.
    """
    server = serve("chat" if kind is chat else "ollama")
    async with kind(server) as remote:
        server.faults = ServerFaults({fault: 1.0})  # type: ignore[dict-item]
        before = len(server.calls)
        for patience in (0.5, 2.0, 8.0, 32.0) if fault == "hang" else (60.0,):
            client = remote._opened()
            client.options = replace(client.options, timeout_seconds=patience)
            before = len(server.calls)
            with pytest.raises(error):
                await remote.sample(SampleRequest(prompt(remote), 10))
            # a busy machine may need more time than the deadline to send the request
            if len(server.calls) > before:
                break
        assert len(server.calls) - before == (1 if fault == "hang" else 3)
        server.faults = ServerFaults()


@pytest.mark.anyio
async def test_ollama_never_cuts_a_prompt_in_silence(serve: Serve) -> None:
    """atts sets Ollama's context in each call.

    A prompt that does not fit raises ContextOverflow, either in atts or at the server.
    """
    server = serve("ollama")
    async with ollama(server, replace(OPTIONS, context=100)) as remote:
        assert remote.spec.context_length == 100
        with pytest.raises(ContextOverflow):
            await remote.sample(SampleRequest(prompt(remote), 90))
        # the server counts each of these characters as three tokens
        bytes_only = remote.tokenizer.render([Message("user", "\u4e2d" * 60)])
        with pytest.raises(ContextOverflow, match="input length"):
            await remote.sample(SampleRequest(bytes_only, 10))


@pytest.mark.anyio
async def test_engines_are_refused_before_a_run_for_what_they_lack(serve: Serve) -> None:
    """An engine is refused before a run if it cannot give the scores that the gate needs, or the
    log-probabilities that the method needs.
    """
    texts = serve("ollama")
    rater = serve("chat")
    policy = Policy(samples=2, turns=4, chunking=Chunking(12, 12, ()), early_stop="none")
    unsure = preset("deep-conf").policy(policy)
    cases: list[tuple[DialectServer, Policy, Gate, str]] = [
        (rater, policy, ThresholdGate(1.3), "cannot score.*method spec-reason"),
        (rater, unsure, FixedGate("accept"), "no log-probabilities.*deep-conf"),
        (
            rater,
            replace(policy, vote="confidence"),
            FixedGate("accept"),
            "no log-probabilities.*vote",
        ),
    ]
    for server, asked, gate, said in cases:
        plan = RunSpec(ollama(texts), chat(server), asked, gate, _answers())
        with pytest.raises(UnsupportedByEngine, match=said):
            await evaluate(toy_problems(1, 3), plan, RunOptions(signals="ignore"))


@pytest.mark.anyio
async def test_a_run_drafted_and_rated_in_text_ends_and_holds_no_key(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run with an Ollama draft and a chat target that rates chunks ends every problem.

    No file, log or trace contains the key.
    """
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TARGET_KEY", "secret-sesame")
    texts = serve("ollama", lambda: ScriptedEngine("draft"))
    rater = serve("chat", lambda: ScriptedEngine("target"), key="secret-sesame")
    policy = Policy(samples=2, turns=4, chunking=Chunking(24, 24, ()), early_stop="none")
    gate = ThresholdGate(3.0)
    target = chat(rater, replace(OPTIONS, key=ApiKey("TARGET_KEY")))
    plan = RunSpec(ollama(texts), target, preset("spec-reason").policy(policy), gate, _answers())
    result = await evaluate(
        toy_problems(2, 3), plan, RunOptions(tmp_path / "run", signals="ignore")
    )
    assert {outcome.status for outcome in result.outcomes()} <= {"answered", "unanswered"}
    written = contents(tmp_path)
    # the manifest has the probe's findings
    assert any(b"target.rating" in text for text in written)
    assert not any(b"sesame" in text for text in written)
    assert "sesame" not in caplog.text
    assert "sesame" not in repr(vars(target))


def reasoner(serve: Serve, kind: Simple, reasoning: str = "reasoning_content") -> DialectServer:
    """Start a server that returns reasoning in a separate field, or hides it."""
    quirks = ServerQuirks(reasoning=reasoning)  # type: ignore[arg-type]
    return serve("chat" if kind is chat else "ollama", quirks=quirks)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "field"), [(chat, "reasoning_content"), (chat, "reasoning"), (ollama, "reasoning")]
)
async def test_reasoning_in_a_field_of_its_own_is_part_of_the_text(
    serve: Serve, kind: Simple, field: str
) -> None:
    """Reasoning in its own field comes first in the text, between think marks.

    The text of several requests equals the text of one.
    """
    plain = serve("chat" if kind is chat else "ollama")
    server = reasoner(serve, kind, field)
    async with kind(plain) as whole, kind(server) as remote:
        request = SampleRequest(prompt(whole), 400, Sampling(0.0))
        expected = (await whole.sample(request)).text
        written = await remote.sample(request)
        begun, mark, content = written.text.partition("\n</think>\n\n")
        assert begun.startswith("<think>\n")
        assert mark
        assert content.startswith("The answer is")
        assert begun.removeprefix("<think>\n") + content == expected
        ids = request.ids
        for _ in range(40):
            piece = await remote.sample(replace(request, ids=ids, max_tokens=10))
            ids += piece.ids
            if piece.ended == "end":
                break
        in_pieces = remote.tokenizer.decode(ids[len(request.ids) :])
        assert in_pieces.count("<think>\n") == in_pieces.count("\n</think>\n\n") == 1
        assert in_pieces.replace("<think>\n", "").replace("\n</think>\n\n", "") == expected


@pytest.mark.anyio
async def test_a_model_with_hidden_reasoning_is_probed_patiently(
    serve: Serve,
) -> None:
    """The probe gives a model with hidden reasoning more time, at the only temperature that the
    model allows.

    If a chunk consists only of hidden reasoning, it is not requested again.
    """
    server = reasoner(serve, chat, "hidden")
    async with chat(server, replace(OPTIONS, prefill="ask")) as remote:
        findings = {finding.name: finding for finding in remote.findings}
        assert "after reasoning that it does not show" in findings["ids"].seen
        before = len(server.calls)
        with pytest.raises(EngineError, match="spent all 10 tokens on reasoning"):
            await remote.sample(SampleRequest(prompt(remote), 10))
        assert len(server.calls) == before + 1
        whole = await remote.sample(SampleRequest(prompt(remote), 400))
        assert whole.text.startswith("The answer is")
        assert "<think>" not in whole.text


@pytest.mark.anyio
async def test_a_model_that_reasons_longer_than_the_probe_is_opened(serve: Serve) -> None:
    """A model that reasons longer than the probe waits is opened without an answer to the probe,
    and this is reported.
    """
    never = ToyModel(Skill(wander=1.0, verbosity=40.0), ToyTokenizer())
    server = serve(
        "chat",
        lambda: ScriptedEngine(model=never, context_length=256),
        quirks=ServerQuirks(reasoning="hidden"),
    )
    async with chat(server, replace(OPTIONS, context=256)) as remote:
        findings = {finding.name: finding for finding in remote.findings}
        assert "allow chunks more than" in findings["ids"].seen


@pytest.mark.anyio
async def test_a_run_keeps_the_reasoning_and_grades_the_content(
    serve: Serve, tmp_path: Path
) -> None:
    """Rollouts and journal keep the reasoning, and the answer is extracted from the content
    alone.
    """
    server = reasoner(serve, chat)
    texts = serve("ollama", lambda: ScriptedEngine("draft"))
    policy = Policy(samples=2, turns=12, chunking=Chunking(40, 40, ()), early_stop="none")
    plan = RunSpec(chat(server), ollama(texts), policy, FixedGate("accept"), _answers())
    result = await evaluate(
        toy_problems(2, 3), plan, RunOptions(tmp_path / "run", signals="ignore")
    )
    rollouts = [rollout for outcome in result.outcomes() for rollout in outcome.rollouts]
    assert all(rollout.text.startswith("<think>\n") for rollout in rollouts)
    answered = [rollout for rollout in rollouts if rollout.answer is not None]
    assert answered
    for rollout in answered:
        content = rollout.text.partition("\n</think>\n\n")[2]
        assert f"\\boxed{{{rollout.answer}}}" in content
    assert any(b"<think>" in text for text in contents(tmp_path))


@pytest.mark.anyio
async def test_a_rejected_key_and_a_missing_model_are_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error about a rejected key says where a key belongs.

    The error about a missing model lists the existing models. Neither shows the key.
    """
    server = serve("chat", key="good")
    with pytest.raises(UnsupportedByEngine, match="needs an API key.*ATTS_API_KEY"):
        await chat(server).__aenter__()
    monkeypatch.setenv("OTHER_KEY", "secret-expired")
    with pytest.raises(UnsupportedByEngine, match="refused the API key.*OTHER_KEY") as refused:
        await chat(server, replace(OPTIONS, key=ApiKey("OTHER_KEY"))).__aenter__()
    assert "secret" not in str(refused.value)
    with pytest.raises(UnsupportedByEngine, match="has no model 'other'.*toy"):
        await chat(serve("chat"), model="other").__aenter__()
    with pytest.raises(UnsupportedByEngine, match="has no model 'other:latest'.*toy:latest"):
        await ollama(serve("ollama"), model="other").__aenter__()


def test_addresses_of_chat_apis_are_parsed() -> None:
    """In the address of a chat API, the path ends with the version and the model follows.

    The name of the key's variable is a setting; a key itself is refused.
    """
    words = "openai:https://h/api/v1/deepseek/deepseek-r1?key=H_KEY&prefill=prefix&context=4096"
    one = build_engine(words, "target")
    assert isinstance(one, RemoteEngine)
    assert (one.url, one.options.key.variable, one.options.context) == (
        "https://h/api/v1",
        "H_KEY",
        4096,
    )
    for wrong in (
        "chat:https://me:secret@h/v1/m",
        "chat:https://h/v1/m#secret",
        "vllm:http://h:8000/m?in_flight=4#secret",
        "chat:http://h/v1/m?prefill=perhaps",
        "ollama:h:11434/m",
    ):
        with pytest.raises(OptionError) as said:
            build_engine(wrong, "target")
        assert "secret" not in str(said.value)


@pytest.mark.parametrize(
    ("address", "environment", "url", "model", "variable"),
    [
        ("openai:gpt-5", {}, "https://api.openai.com/v1", "gpt-5", "OPENAI_API_KEY"),
        (
            "openai:gpt-5?in_flight=8",
            {"OPENAI_API_KEY": "sk-1", "ATTS_API_KEY": "other"},
            "https://api.openai.com/v1",
            "gpt-5",
            "OPENAI_API_KEY",
        ),
        ("openai:o3", {"ATTS_API_KEY": "sk-2"}, "https://api.openai.com/v1", "o3", "ATTS_API_KEY"),
        (
            "openai:deepseek/deepseek-r1",
            {"OPENAI_BASE_URL": "https://router/api/v1/", "OPENAI_API_KEY": "sk-3"},
            "https://router/api/v1",
            "deepseek/deepseek-r1",
            "OPENAI_API_KEY",
        ),
        (
            "openai:m",
            {"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1"},
            "http://127.0.0.1:8000/v1",
            "m",
            "ATTS_API_KEY",
        ),
        (
            "openai:https://elsewhere/v1/m",
            {"OPENAI_API_KEY": "sk-4"},
            "https://elsewhere/v1",
            "m",
            "ATTS_API_KEY",
        ),
        (
            "openai:gpt-5?key=MY_KEY",
            {"OPENAI_API_KEY": "sk-5"},
            "https://api.openai.com/v1",
            "gpt-5",
            "MY_KEY",
        ),
        (
            "chat:https://api.openai.com/v1/o3",
            {"OPENAI_API_KEY": "sk-6"},
            "https://api.openai.com/v1",
            "o3",
            "OPENAI_API_KEY",
        ),
    ],
)
def test_a_model_of_openai_is_a_complete_address(
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    environment: dict[str, str],
    url: str,
    model: str,
    variable: str,
) -> None:
    """A model of OpenAI needs no address: URL and key come from the usual environment variables,
    and the key is sent to no other host.
    """
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ATTS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server = read_server(address)
    found = (server.url, server.dialect, server.model, server.options.key.variable)
    assert found == (url, "chat", model, variable)


@pytest.mark.parametrize("address", ["openai:localhost:8000", "openai:10.0.0.1:80/m", "openai:"])
def test_a_host_without_a_scheme_is_not_taken_for_an_openai_model(address: str) -> None:
    """A host with a port but without a scheme is not sent to OpenAI as a model's name."""
    with pytest.raises(OptionError, match="openai:http://HOST:PORT/MODEL"):
        read_server(address)


@pytest.mark.anyio
async def test_the_key_of_openai_is_sent_to_its_base_url(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OPENAI_BASE_URL set, a server that requires the key is opened with only the model's
    name.
    """
    server = serve("chat", key="sk-right-key")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right-key")
    engine = build_engine("openai:toy?prefill=continue&extras=send", "target")
    async with engine:
        assert engine.spec.model == "toy"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-key")
    with pytest.raises(UnsupportedByEngine, match="Set OPENAI_API_KEY to a valid key"):
        await build_engine("openai:toy", "target").__aenter__()


def test_a_chunk_without_log_probs_still_has_tokens() -> None:
    """A chunk has the same number of tokens with and without log-probabilities."""
    assert Chunk("draft", "ab", (1, 2), (3,), "length").tokens == 2
    assert Chunk("target", "ab", (1, 2), (3,), "end", (-1.0, -2.0)).tokens == 2


def _answers() -> Any:
    from atts.pipelines import Answers

    def last_word(text: str) -> str | None:
        return (
            text.rsplit("{", 1)[1].split("}")[0]
            if "{" in text and "}" in text.rsplit("{", 1)[1]
            else None
        )

    return Answers(
        last_word, lambda answers: [sorted(set(answers)).index(answer) for answer in answers]
    )
