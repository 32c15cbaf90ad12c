"""Tests of several processes with one zoo: each request is sent to the cheapest process, and gets
its reply even if a process is killed.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from atts.accel import Zoo, accelerated, replicated
from atts.accel.zoo import shared_worker
from atts.accel.zoo.placement import Dispatch
from atts.api import build_engine
from atts.concurrency import collect
from atts.core import Completion, SampleRequest, Sampling, ScoreRequest
from atts.engine import EngineStats
from atts.errors import OptionError
from atts.local import LocalEngine, LocalOptions
from atts.sampling import Seed
from atts.servers import ReplicaLoad, ReplicaPool
from atts.testing import check_engine

from .conftest import Tune
from .test_chains import SHARED


@pytest.fixture
def zoo(base: Path, tune: Tune, tmp_path: Path) -> Zoo:
    """Make a zoo of two models that share all but their heads."""
    found = Zoo(tmp_path / "zoo")
    found.add("base", base)
    found.add("other", tune("other", "lm_head"))
    return found


def pool_of(zoo: Zoo, name: str, count: int = 2, options: LocalOptions = SHARED) -> ReplicaPool:
    """Return a pool of a model's replicas as one engine."""
    return replicated(
        [accelerated(zoo.folder(name), options=options, replica=at) for at in range(count)], name
    )


def asks(count: int, tokens: int = 12) -> list[SampleRequest]:
    """Make requests of different rollouts."""
    law = Sampling(0.9)
    return [
        SampleRequest(
            (at + 5, 6, 7), tokens, law, rollout=f"p{at}/0", seed=Seed(at, "p", 0, 0, "target", 0)
        )
        for at in range(count)
    ]


@pytest.mark.anyio
async def test_replicas_give_the_replies_of_one_engine(zoo: Zoo) -> None:
    """Replicas give the same replies as one engine.

    Each replica has its own loop, which other models of the zoo may use too.
    """
    async with accelerated(zoo.folder("base"), options=SHARED) as one:
        wanted = await collect([partial(one.sample, ask) for ask in asks(8)])
        async with pool_of(zoo, "base") as pool, pool_of(zoo, "other") as other:
            assert len(shared_worker._HOSTS) == 2
            found = await collect([partial(pool.sample, ask) for ask in asks(8)])
            assert [done.ids for done in found] == [done.ids for done in wanted]
            # the share of each replica depends on its speed
            assert sum([load.requests for load in pool.load()]) == 8
            assert other.stats().requests == 0
            done = await other.sample(asks(1)[0])
            assert done.ids != wanted[0].ids
            assert pool.spec.fingerprint() == one.spec.fingerprint()
    assert shared_worker._HOSTS == {}


class Loop:
    """A stand-in for a replica, with only the attributes that the dispatcher reads."""

    def __init__(self, in_loop: int, stats: EngineStats) -> None:
        self.in_loop = in_loop
        self.stats = lambda: stats


def dispatch_of(*in_loop: int, seconds: float = 10.0) -> tuple[Dispatch, list[ReplicaLoad]]:
    """Make a dispatcher over replicas; each number in `in_loop` is the number of requests that one
    replica holds.

    Each replica has served ten requests of a hundred tokens in `seconds`.
    """
    stats = EngineStats(requests=10, sampled_tokens=400, prefilled_tokens=600, busy_seconds=seconds)
    loops = [Loop(count, stats) for count in in_loop]
    loads = [ReplicaLoad(str(at), "up", 0, 0, 0) for at in range(len(loops))]
    return Dispatch(cast("list[LocalEngine]", loops)), loads


def turn(tokens: int, rollout: str = "p/0") -> ScoreRequest:
    """Make a score request with this number of tokens for a rollout."""
    return ScoreRequest(tuple(range(tokens - 4)), (1, 2, 3, 4), rollout)


def test_a_request_goes_where_it_costs_least() -> None:
    """A rollout stays at the replica with its cache, until waiting there takes longer than
    computing the prefix elsewhere.

    Each request goes to the replica with the lowest cost.
    """
    dispatch, loads = dispatch_of(0, 0)
    assert dispatch.choose(loads, turn(300)) == 0
    # each waiting request takes a second, and each token to compute takes ten milliseconds
    for waiting, home in (
        (0, 0),
        (2, 0),
        (4, 1),
    ):
        assert _with(dispatch, waiting, 0).choose(loads, turn(320)) == home
    # the result is an index among the remaining replicas
    assert dispatch.choose(loads[1:], turn(340)) == 0
    fresh, loads = dispatch_of(3, 1, 2)
    assert fresh.choose(loads, turn(50, "")) == 1
    assert fresh.choose(loads, turn(50, "alone")) == 1
    # rollouts without a problem share no prompt
    assert fresh.choose(loads, turn(50, "other")) == 1
    assert set(fresh._cached) == {("1", "alone"), ("1", "other")}


def _with(dispatch: Dispatch, *in_loop: int) -> Dispatch:
    """Return a dispatcher that knows which prompts replica 0 has cached, but whose replicas hold
    other numbers of requests.
    """
    found, _ = dispatch_of(*in_loop)
    found._cached.update({key: tokens for key, tokens in dispatch._cached.items() if key[0] == "0"})
    return found


def test_siblings_go_where_their_prompt_is_cached() -> None:
    """A new rollout goes to the replica that has cached its problem's prompt, as long as the prompt
    is most of the rollout's work.

    A rollout of another problem may go to any replica.
    """
    dispatch, loads = dispatch_of(0, 1, 0)
    assert dispatch.choose(loads[2:], turn(200, "p/0")) == 0
    assert dispatch.choose(loads, turn(200, "p/1")) == 2
    assert dispatch.choose(loads, turn(200, "q/1")) == 0


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_killed_replica_loses_no_request(zoo: Zoo) -> None:
    """The requests of a killed replica are sent to another replica, and the killed one is restarted
    for later requests.
    """
    from tests.local.test_engine import loop_process

    options = replace(SHARED, worker="process")
    longer = asks(6, 60)
    async with accelerated(zoo.folder("base"), options=SHARED) as one:
        wanted = await collect([partial(one.sample, ask) for ask in longer])
    async with pool_of(zoo, "base", options=options) as pool:

        async def kill() -> Completion | None:
            """Kill a replica once all requests have been sent."""
            await anyio.lowlevel.checkpoint()
            assert all(load.in_flight for load in pool.load())
            os.kill(loop_process(), signal.SIGKILL)
            return None

        calls: list[Callable[[], Awaitable[Completion | None]]] = [
            *(partial(pool.sample, ask) for ask in longer),
            kill,
        ]
        found = (await collect(calls))[:-1]
        assert [done and done.ids for done in found] == [done.ids for done in wanted]
        assert sum(load.failures > 0 for load in pool.load()) <= 1
        with anyio.fail_after(60):
            while not all(load.state == "up" for load in pool.load()):
                await pool.sample(longer[0])
                await anyio.sleep(0.1)
        assert [(await pool.sample(ask)).ids for ask in longer] == [done.ids for done in wanted]


def test_replicas_is_a_positive_number_for_zoo_models(zoo: Zoo) -> None:
    """The setting `replicas` must be an integer of at least 1, and only models of zoos accept it."""
    words = f"zoo:{zoo.directory}/base"
    assert isinstance(build_engine(f"{words}?replicas=1", "target"), LocalEngine)
    pool = build_engine(f"{words}?replicas=3&threads=1", "target")
    assert isinstance(pool, ReplicaPool)
    assert len(pool.load()) == 3
    for count in ("0", "-1", "two", "65", ""):
        with pytest.raises(OptionError, match="replicas"):
            build_engine(f"{words}?replicas={count}", "target")


@pytest.mark.slow
@pytest.mark.anyio
async def test_replicas_pass_the_conformance_suite(zoo: Zoo) -> None:
    """A pool of replicas passes the checks that every engine must pass."""
    await check_engine(lambda: pool_of(zoo, "other", options=replace(SHARED, kv_tokens=8192)))
