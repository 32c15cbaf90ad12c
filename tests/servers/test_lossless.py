"""Tests of servers that speculate: they are recognised, and refused if speculation changes their
distribution.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import EngineAround
from atts.errors import UnsupportedByEngine
from atts.servers import RemoteEngine, probe
from atts.testing import ScriptedEngine, ServerQuirks, ToyTokenizer
from atts.testing.servers import DialectServer

Serve = Callable[..., DialectServer]
Connect = Callable[..., RemoteEngine]
LOSSLESS = ServerQuirks(speculation="lossless")
pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def told(engine: RemoteEngine) -> tuple[str, str]:
    """Return the probe's finding about speculation."""
    found = next(found for found in engine.findings if found.name == "speculation")
    return found.answer, found.seen


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("vllm", "75 % of 1,200,"),
        ("sglang", "the server speculates with STANDALONE"),
    ],
)
async def test_a_lossless_server_is_accepted_with_its_speculation_reported(
    serve: Serve, client: Connect, dialect: str, words: str
) -> None:
    """A server whose speculation keeps the distribution is accepted, and the probe reports it.

    A server without speculation is not tested.
    """
    plain = serve(dialect)
    async with client(plain.url) as engine:
        assert told(engine) == ("yes", "the server does not speculate")
    async with client(serve(dialect, quirks=LOSSLESS).url) as engine:
        answer, seen = told(engine)
        assert answer == "yes"
        assert words in seen
        assert "96 sampled tokens follow the model's distribution" in seen


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dialect", "flaw", "words"),
    [
        ("vllm", "hot", "nats less likely than tokens requested one at a time"),
        ("sglang", "greedy", "greedy text"),
    ],
)
async def test_a_server_whose_speculation_changes_its_distribution_is_refused(
    serve: Serve, client: Connect, dialect: str, flaw: Any, words: str
) -> None:
    """A server that writes garbage at one temperature is refused as draft and as target."""
    server = serve(dialect, quirks=ServerQuirks(speculation=flaw))
    with pytest.raises(UnsupportedByEngine, match=words) as caught:
        async with client(server.url, needs=frozenset({"sample"})):
            pass
    assert "serve the model without speculation" in str(caught.value)


class TooHot(EngineAround):
    """An engine that samples correctly one token at a time, but at a higher temperature if several
    tokens are requested after a prompt that repeats itself, as n-gram proposals would.
    """

    heat = 8.0

    async def sample(self, request: SampleRequest) -> Completion:
        tail = request.ids[-4:]
        repeats = any(request.ids[at : at + 4] == tail for at in range(len(request.ids) - 4))
        if request.max_tokens == 1 or not request.sampling.temperature or not repeats:
            return await super().sample(request)
        hot = replace(request.sampling, temperature=self.heat)
        return await super().sample(replace(request, sampling=hot))


class SlightlyTooHot(TooHot):
    """An engine that samples at a temperature of 1.6 instead of 0.7."""

    heat = 1.6


class OddToken(EngineAround):
    """An engine that once begins a text with a token that is 40 nats less likely than others."""

    odd = ToyTokenizer().vocabulary - 1
    is_written = False

    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        if self.is_written or request.max_tokens != 12 or request.sampling.temperature != 0.7:
            return done
        self.is_written = True
        return replace(done, ids=(self.odd, *done.ids[1:]))

    async def score(self, request: ScoreRequest) -> Scores:
        scores = await super().score(request)
        pairs = zip(request.suffix, scores.logprobs, strict=True)
        return replace(scores, logprobs=tuple(-40.0 if one == self.odd else p for one, p in pairs))


@pytest.mark.anyio
async def test_a_single_impossible_token_is_found(serve: Serve) -> None:
    """A token that is too unlikely to be sampled proves an error, even among correct tokens."""
    engine = partial(OddToken, ScriptedEngine(context_length=1024), "own")
    report = await probe(serve("vllm", engine, quirks=LOSSLESS).url, tokenizer=ToyTokenizer())
    assert "sample" not in report.can
    seen = next(found.seen for found in report.findings if found.name == "speculation")
    assert "practically impossible" in seen


@pytest.mark.anyio
async def test_garbage_after_repeated_text_is_found(serve: Serve) -> None:
    """Speculation by n-grams proposes tokens only where a text repeats itself, so the probe's texts
    follow a prompt that repeats itself. A small deviation is tested on further texts.
    """
    for kind, fewest in ((TooHot, 96), (SlightlyTooHot, 100)):
        server = serve(
            "vllm", partial(kind, ScriptedEngine(context_length=1024), "own"), quirks=LOSSLESS
        )
        report = await probe(server.url, tokenizer=ToyTokenizer())
        assert "sample" not in report.can
        seen = next(found.seen for found in report.findings if found.name == "speculation")
        assert "nats less likely" in seen
        tokens = int(re.findall(r"(\d+) tokens sampled", seen)[0])
        assert tokens >= fewest


class TooSure(EngineAround):
    """An engine that samples correctly one token at a time, but takes the most likely tokens if
    several are requested.
    """

    async def sample(self, request: SampleRequest) -> Completion:
        heat = 0.0 if request.max_tokens > 1 or not request.sampling.temperature else 8.0
        return await super().sample(
            replace(request, sampling=replace(request.sampling, temperature=heat))
        )


@pytest.mark.anyio
async def test_text_that_is_too_likely_is_found_and_the_probe_reports_it(
    serve: Serve,
) -> None:
    """The probe notices and reports a server that takes the most likely tokens, instead of
    sampling, if several are requested.

    Such a server writes sensible text, but not from its distribution.
    """
    server = serve(
        "vllm", lambda: TooSure(ScriptedEngine(context_length=1024), "own"), quirks=LOSSLESS
    )
    report = await probe(server.url, tokenizer=ToyTokenizer())
    assert report.can == ("entropy", "rate", "score")
    assert "nats more likely" in next(
        found.seen for found in report.findings if found.name == "speculation"
    )
