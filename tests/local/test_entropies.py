"""Tests of entropies: every engine that can compute them returns the entropy of each next-token
distribution over a text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from atts.api.engines import build_engine
from atts.concurrency import collect
from atts.core import ScoreRequest
from atts.engine import Engine
from atts.errors import UnsupportedByEngine
from atts.local import LocalOptions
from atts.servers.engine import least_entropy
from atts.testing import ScriptedEngine

HERE = LocalOptions(worker="thread", kv_tokens=4096, threads=1, device="cpu")


async def enumerated(engine: Engine, prefix: tuple[int, ...]) -> float:
    """Return the entropy after a prefix, computed from the log-probability of every possible next
    token.
    """
    requests = [ScoreRequest(prefix, (token,)) for token in range(engine.spec.vocabulary)]
    scores = await collect([partial(engine.score, request) for request in requests])
    logprobs = [one.logprobs[0] for one in scores]
    return -math.fsum(math.exp(value) * value for value in logprobs if value > -math.inf)


@pytest.mark.anyio
@pytest.mark.parametrize("kernel", ["native", "torch"])
async def test_an_entropy_is_that_of_all_tokens_and_poisons_no_cache(kernel: str) -> None:
    """The entropy at a position equals the sum over all tokens of the vocabulary.

    Cached scores are never returned as entropies of the same text, nor cached entropies as scores.
    """
    async with build_engine(f"embedded:draft?kernel={kernel}", "draft", HERE) as engine:
        ids = engine.tokenizer.encode("Tom has 39 caps. Ana has 12 more caps.")
        plain = ScoreRequest(ids[:6], ids[6:])
        wanted = replace(plain, entropies=True)
        before = await engine.score(plain)
        entropies = await engine.score(wanted)
        again = await collect([partial(engine.score, one) for one in (wanted, plain, wanted)])
        assert again[1].logprobs == pytest.approx(before.logprobs, abs=1e-4)
        for other in (again[0], again[2]):
            assert other.logprobs == pytest.approx(entropies.logprobs, abs=1e-4)
        for place in (0, 3, len(ids) - 7):
            exact = await enumerated(engine, ids[: 6 + place])
            assert -entropies.logprobs[place] == pytest.approx(exact, abs=1e-3)


@pytest.mark.anyio
async def test_the_toy_model_gives_its_entropies_too() -> None:
    """The scripted engine's entropies equal the entropies of the distributions from which it
    samples.
    """
    async with ScriptedEngine("draft") as engine:
        ids = engine.tokenizer.encode("Start at 4. 4 plus 3 is 7.")
        scores = await engine.score(ScoreRequest(ids[:4], ids[4:], entropies=True))
        for place in range(len(ids) - 4):
            exact = await enumerated(engine, ids[: 4 + place])
            assert -scores.logprobs[place] == pytest.approx(exact, abs=1e-9)


@pytest.mark.anyio
async def test_an_engine_that_cannot_give_them_says_so() -> None:
    """If entropies are requested from an engine that cannot compute them, it raises an error and
    does not return log-probabilities instead.
    """
    async with ScriptedEngine("draft", capabilities=frozenset({"sample", "score"})) as engine:
        ids = engine.tokenizer.encode("Start at 4.")
        with pytest.raises(UnsupportedByEngine, match="give entropies"):
            await engine.score(ScoreRequest(ids[:1], ids[1:], entropies=True))


def test_the_likeliest_tokens_bound_an_entropy_from_below() -> None:
    """If only the most likely tokens are known, atts computes a lower bound of the entropy. The
    bound rises with the number of known tokens, and is exact if all are known.
    """
    masses = [2.0**-n for n in range(1, 11)]
    masses.append(masses[-1])
    exact = -math.fsum(mass * math.log(mass) for mass in masses)
    bounds = [
        least_entropy([math.log(mass) for mass in masses[:count]])
        for count in range(1, len(masses) + 1)
    ]
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(exact)
