"""Tests of servers that speculate: they are recognised, and refused if speculation changes their
distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from atts.core import Completion, SampleRequest
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
