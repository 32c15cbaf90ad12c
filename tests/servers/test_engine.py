"""Tests that engines over HTTP satisfy the engine protocol in every server dialect."""

import json
from collections.abc import Callable

import pytest

from atts.core import Message, SampleRequest, Sampling, ScoreRequest
from atts.errors import UnsupportedByEngine
from atts.sampling import Seed
from atts.servers import DIALECTS, RemoteEngine, RemoteOptions
from atts.servers.chat import TextDialect
from atts.servers.dialect import Scorer
from atts.servers.llamacpp import LlamaCppDialect
from atts.servers.sglang import SglangDialect
from atts.testing import CheckOptions, ScriptedEngine, ServerQuirks, ToyTokenizer, check_engine
from atts.testing.servers import DialectServer

OPTIONS = CheckOptions(draws=32, tokens=9, long_tokens=96, timeout_seconds=600, settle_seconds=60)
Serve = Callable[..., DialectServer]
Connect = Callable[..., RemoteEngine]
PROMPT = ToyTokenizer().render([Message("user", "Start at 4. +3, -2. What is the result?")])
# these lists contain every dialect of `DIALECTS`, including new ones
WITH_IDS = sorted(name for name, kind in DIALECTS.items() if not issubclass(kind, TextDialect))
SCORING = sorted(name for name, kind in DIALECTS.items() if issubclass(kind, Scorer))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dialect", "quirks"),
    [
        pytest.param("vllm", ServerQuirks(), id="vllm from the cache"),
        pytest.param("vllm", ServerQuirks(cached_scores="off"), id="vllm by prompt log-probs"),
        pytest.param(
            "vllm", ServerQuirks(cached_scores="refused"), id="vllm with an older model runner"
        ),
        *(pytest.param(name, ServerQuirks(), id=name) for name in WITH_IDS if name != "vllm"),
    ],
)
async def test_each_dialect_passes_the_conformance_suite(
    serve: Serve, client: Connect, dialect: str, quirks: ServerQuirks
) -> None:
    """Engines pass the conformance suite in each dialect, and afterwards the server has no request
    left.
    """
    server = serve(dialect, quirks=quirks)
    report = await check_engine(lambda: client(server.url), options=OPTIONS)
    assert not report.broken
    assert server.running == 0


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", WITH_IDS)
async def test_a_server_answers_as_its_engine_does(
    serve: Serve, client: Connect, dialect: str
) -> None:
    """Ids, text, ending and raw log-probabilities from a server equal those of the engine behind
    it, at any temperature.
    """
    server = serve(dialect)
    bits = 63 if dialect == "vllm" else 31
    async with client(server.url) as remote, ScriptedEngine(context_length=1024) as behind:
        for number, law in enumerate((Sampling(), Sampling(0.0), Sampling(0.7, top_p=0.9))):
            if dialect == "llamacpp" and law.temperature not in (0.0, 1.0):
                law = Sampling()
            seed = Seed(run=number, problem="x")
            request = SampleRequest(PROMPT, 40, law, seed, stop=("\n\n",))
            got = await remote.sample(request)
            wire = Seed(run=seed.key() & ((1 << bits) - 1))
            want = await behind.sample(SampleRequest(PROMPT, 40, law, wire, stop=("\n\n",)))
            assert (got.ids, got.text, got.ended) == (want.ids, want.text, want.ended)
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)


@pytest.mark.anyio
async def test_a_scored_chunk_that_is_cached_is_scored_again_without_the_cache(
    serve: Serve, client: Connect
) -> None:
    """If a scored chunk is cached, the scores are requested once more without the cache, and both
    requests are counted.

    vLLM returns no scores for cached positions.
    """
    server = serve("vllm")
    prefix = PROMPT * 2
    suffix = PROMPT[:40]
    async with client(server.url) as remote:
        before = remote.traffic.uncached
        first = await remote.score(ScoreRequest(prefix, suffix))
        again = await remote.score(ScoreRequest(prefix, suffix))
        assert remote.traffic.uncached == before + 1
        assert again.logprobs == pytest.approx(first.logprobs)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", SCORING)
async def test_the_cached_prefix_is_reported(serve: Serve, client: Connect, dialect: str) -> None:
    """If another chunk is scored after the same prefix, the reply reports how many prefix tokens
    came from the cache, in whole blocks.
    """
    server = serve(dialect)
    async with client(server.url) as remote:
        await remote.score(ScoreRequest(PROMPT * 3, PROMPT[:3]))
        scores = await remote.score(ScoreRequest(PROMPT * 3, PROMPT[4:9]))
        assert 0 < scores.cached_tokens <= len(PROMPT) * 3
        assert scores.cached_tokens % 16 == 0


@pytest.mark.anyio
@pytest.mark.parametrize("law", [Sampling(temperature=0.6), Sampling(top_p=0.9), Sampling(top_k=3)])
async def test_processed_log_probs_are_replaced_by_scores(
    serve: Serve, client: Connect, law: Sampling
) -> None:
    """The probe recognises a vLLM server with processed log-probabilities; atts then scores
    completions again to get raw ones.
    """
    plain = serve("vllm")
    processed = serve("vllm", quirks=ServerQuirks(logprobs="processed"))
    request = SampleRequest(PROMPT, 20, law)
    async with client(plain.url) as raw, client(processed.url) as other:
        assert "processed" in next(
            found.seen for found in other.findings if found.name == "convention"
        )
        want = await raw.sample(request)
        got = await other.sample(request)
        assert got.ids == want.ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", SCORING)
async def test_a_server_that_ignores_scoring_is_refused(
    serve: Serve, client: Connect, dialect: str
) -> None:
    """A server that accepts a scoring request but returns no scores is refused as a target."""
    server = serve(dialect, quirks=ServerQuirks(scoring="ignored", cached_scores="off"))
    with pytest.raises(UnsupportedByEngine, match="scores"):
        await client(server.url, needs=frozenset({"sample", "score"})).__aenter__()


@pytest.mark.anyio
async def test_llamacpp_is_refused_as_a_target(serve: Serve, client: Connect) -> None:
    """llama.cpp is refused as a target because it cannot score, and the error lists servers that
    can.
    """
    server = serve("llamacpp")
    with pytest.raises(UnsupportedByEngine, match="cannot score.*vLLM"):
        await client(server.url, needs=frozenset({"score"})).__aenter__()


@pytest.mark.anyio
async def test_a_dialect_without_tokenize_is_probed_all_the_same(
    serve: Serve, client: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a dialect lacks the method `tokenize`, the probe names the method to override, and
    continues with its other checks.
    """
    monkeypatch.delattr(LlamaCppDialect, "tokenize")
    async with client(serve("llamacpp").url) as remote:
        finding = dict(remote.spec.findings)["tokenizer"]
    assert finding.startswith("unknown")
    assert "Override tokenize in LlamaCppDialect" in finding


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", WITH_IDS)
async def test_the_dialect_is_detected(serve: Serve, client: Connect, dialect: str) -> None:
    """The engine's spec names the server software and version that were detected, even if the
    caller named another dialect.
    """
    server = serve(dialect)
    async with client(server.url) as remote:
        assert remote.spec.engine.startswith(dialect + " ")
        # the server reserves some positions of the context for itself
        assert remote.spec.context_length < 1024


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[None, 1, None], [-0.5, 8, None]],
            "scored 1 other token ids instead of the 1 requested ones",
        ),
        ([[None, 1, None], [None, 2, None]], "sent 0 log-probabilities for 1 requested token id"),
    ],
)
def test_wrong_scores_of_sglang_are_described_correctly(rows: object, message: str) -> None:
    """If scores cannot be used, the error says if ids are wrong or a log-probability is missing."""
    reply = json.dumps({"text": "", "meta_info": {"input_token_logprobs": rows}}).encode()
    with pytest.raises(ValueError, match=message):
        SglangDialect(RemoteOptions()).read_scores(reply, ScoreRequest((1,), (2,)))
