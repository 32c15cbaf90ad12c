"""Tests of paced servers: they give the pair's replies, cache prefixes as servers do, and take the
requested time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from atts.concurrency import collect
from atts.core import SampleRequest, ScoreRequest
from atts.evaluators.datasets.arithmetic import problems
from atts.testing import run_virtual

servers = pytest.importorskip("scripts.studies.servers", reason="needs a checkout")
PAIR = servers.PAIRS["8B/70B"]


def test_virtual_and_live_runs_write_the_same() -> None:
    """A live run over HTTP writes every text that the run in virtual time predicted, and the votes
    are equal.
    """
    fast = servers.paced(PAIR, 2000.0)
    found = problems("test", 1)
    with servers.pair_law() as law:
        predicted = run_virtual(servers.direct, servers.ARMS[0], found, 2, fast, law)
        foreseen = {key: done.ids for key, done in law.written.items()}
        law.written.clear()
        live = anyio.run(servers.over_http, servers.ARMS[0], found, 2, fast, law)
        assert live.right == predicted.right
        assert len(foreseen) > 2
        assert foreseen.items() <= {key: done.ids for key, done in law.written.items()}.items()


async def _conversation(law: Any) -> list[int]:
    """Return the number of cached tokens for a prompt, for its continuation, for a chunk to score,
    and for a sibling.
    """
    async with servers.engine("target", PAIR, law) as engine:
        prompt = tuple(range(10, 30))
        done = await engine.sample(SampleRequest(prompt, 4))
        again = await engine.sample(SampleRequest(prompt + done.ids, 4))
        scored = await engine.score(ScoreRequest(prompt + done.ids + again.ids, (7, 8, 9)))
        sibling = await engine.sample(SampleRequest(prompt, 4))
        return [
            done.cached_tokens,
            again.cached_tokens,
            scored.cached_tokens,
            sibling.cached_tokens,
        ]


def test_requests_without_names_find_their_prefix() -> None:
    """A rollout finds its whole prefix in the cache, and a sibling finds the prompt except the last
    token. A server's cache does the same.
    """
    with servers.pair_law() as law:
        first, again, scored, sibling = run_virtual(_conversation, law)
    assert (first, sibling) == (0, 19)
    assert again >= 20
    assert scored >= again + 3


async def _equal_siblings(law: Any) -> list[int]:
    """Return the numbers of cached tokens of two rollouts that wrote the same text and continue
    when both have finished.

    Over HTTP all of these tokens are cached.
    """
    async with servers.engine("target", PAIR, law) as engine:
        prompt = tuple(range(10, 30))
        written = await collect([partial(engine.sample, SampleRequest(prompt, 4))] * 2)
        rest = [partial(engine.sample, SampleRequest(prompt + done.ids, 4)) for done in written]
        return [done.cached_tokens for done in await collect(rest)]


def test_rollouts_that_wrote_the_same_keep_a_prefix_each() -> None:
    """Two rollouts that wrote the same text each find their prefix in the cache, so no known token
    is fed again.
    """
    with servers.pair_law() as law:
        first, second = run_virtual(_equal_siblings, law)
    assert first == second > 20


def test_lateness_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins when the previous one was due to end, even if this process wakes up late."""

    async def late(seconds: float, sleep: Any = anyio.sleep) -> None:
        await sleep(seconds + 0.004 if seconds > 0 else 0)

    async def seconds(law: Any) -> float:
        async with servers.engine("target", PAIR, law) as engine:
            began = anyio.current_time()
            # the prefill takes about ten steps
            await engine.score(ScoreRequest((7,) * 600, (7, 8, 9)))
            return anyio.current_time() - began

    with servers.pair_law() as law:
        law.score = lambda request: (-1.0,) * len(request.suffix)
        whole = run_virtual(seconds, law)
        monkeypatch.setattr("scripts.studies.modelled.anyio.sleep", late)
        assert run_virtual(seconds, law) == pytest.approx(whole + 0.004)


def test_a_pair_paces_as_much_faster_as_is_said() -> None:
    """If a pair is paced to be faster, all costs of a step shrink by the same factor, but the
    engine's capacity stays the same.
    """
    fast = servers.paced(PAIR, 10.0)
    assert fast.target.seconds(8, 1000.0, 50.0) == pytest.approx(
        PAIR.target.seconds(8, 1000.0, 50.0) / 10
    )
    assert fast.target_kv == PAIR.target_kv
