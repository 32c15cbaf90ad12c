"""Tests of several servers as one engine: caches are reused, load is shared, and a lost server
loses no rollout.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

from atts.concurrency import collect, task_group
from atts.core import Completion, Message, SampleRequest
from atts.errors import EngineError, EngineUnavailable, FingerprintError, OptionError
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions, ReplicaPool
from atts.testing import (
    CheckOptions,
    Latency,
    ScriptedEngine,
    ServerQuirks,
    ToyTokenizer,
    check_engine,
    run_virtual,
)
from atts.testing.servers import DialectServer

Serve = Callable[..., DialectServer]
Connect = Callable[..., RemoteEngine]
PROMPT = ToyTokenizer().render([Message("user", "Start at 4. +3, -2. What is the result?")])
PATIENT = CheckOptions(draws=24, tokens=6, long_tokens=64, timeout_seconds=600, settle_seconds=60)
QUICK = RemoteOptions(
    timeout_seconds=60.0,
    attempts=2,
    delay_seconds=0.01,
    idle_seconds=1e9,
    recheck_seconds=1e9,
    recheck_requests=10**9,
)


def request(number: int, rollout: str = "") -> SampleRequest:
    return SampleRequest(PROMPT, 24, seed=Seed(run=number), rollout=rollout)


def pool_of(
    client: Connect, *servers: DialectServer, options: RemoteOptions = QUICK
) -> ReplicaPool:
    return ReplicaPool(
        [
            (str(number), client(server.url, options=options))
            for number, server in enumerate(servers)
        ]
    )


async def until(true: Callable[[], bool]) -> None:
    """Wait until a condition is true, however slow the machine is."""
    with anyio.fail_after(120):
        while not true():  # noqa: ASYNC110  # what a server in a thread does can only be polled
            await anyio.sleep(0.002)


@pytest.mark.anyio
async def test_a_pool_passes_the_conformance_suite(serve: Serve, client: Connect) -> None:
    """A pool of two replicas passes the conformance suite."""
    servers = serve("sglang"), serve("sglang")
    report = await check_engine(lambda: pool_of(client, *servers), options=PATIENT)
    assert not report.broken
    assert [server.running for server in servers] == [0, 0]


@pytest.mark.anyio
async def test_a_rollout_stays_where_its_cache_is(serve: Serve, client: Connect) -> None:
    """All requests of a rollout go to the replica with its cache, and many rollouts use both
    replicas.
    """
    first = serve("vllm")
    second = serve("vllm")
    async with pool_of(client, first, second) as pool:
        before = [first.served, second.served]
        for number in range(6):
            await pool.sample(request(number, "one"))
        grown = sorted([first.served - before[0], second.served - before[1]])
        assert grown == [0, 6]
        await collect([partial(pool.sample, request(number, f"r{number}")) for number in range(40)])
        loads = [load.requests for load in pool.load()]
        assert sum(loads) == 46
        assert min(loads) >= 8


@pytest.mark.anyio
async def test_a_busy_replica_spills_over(serve: Serve, client: Connect) -> None:
    """If one rollout sends many requests, the idle server takes some of them."""

    def slow() -> ScriptedEngine:
        return ScriptedEngine(context_length=1024, latency=Latency(per_sample=0.05))

    servers = serve("sglang", slow), serve("sglang", slow)
    async with pool_of(client, *servers) as pool:
        await collect([partial(pool.sample, request(number, "one")) for number in range(60)])
        assert min(load.requests for load in pool.load()) >= 10


@pytest.mark.anyio
async def test_a_lost_replica_loses_no_rollout(serve: Serve, client: Connect) -> None:
    """If one of two servers is killed during a run and returns, each request gets its usual
    reply.
    """

    def slowish() -> ScriptedEngine:
        return ScriptedEngine(context_length=1024, latency=Latency(sampled_token=0.005))

    steady = serve("vllm", slowish)
    victim = serve("vllm", slowish)
    async with client(steady.url) as alone:
        want = [(await alone.sample(request(number))).ids for number in range(12)]
    answers: dict[int, list[Completion]] = {}

    async def ask(number: int) -> None:
        while len(answers.setdefault(number, [])) < 4 or back.is_set() is False:
            answers[number].append(await pool.sample(request(number, f"r{number}")))

    back = anyio.Event()
    async with pool_of(client, steady, victim) as pool, task_group() as group:
        opened = victim.served
        for number in range(12):
            group.start_soon(ask, number)
        await until(lambda: victim.served > opened and victim.running > 0)
        await anyio.to_thread.run_sync(victim.kill)
        await until(lambda: pool.load()[1].failures > 0)
        await anyio.to_thread.run_sync(victim.start)
        back.set()
    assert min(len(answers[number]) for number in range(12)) >= 4
    assert all(done.ids == want[number] for number in range(12) for done in answers[number])
    assert steady.running == victim.running == 0


@pytest.mark.anyio
async def test_a_killed_replica_is_used_again_after_it_returned(
    serve: Serve, client: Connect
) -> None:
    """A killed replica is used again after it returns.

    The circuit breaker opens when the replica is lost, half-opens after a pause, and closes after a
    successful check.
    """
    steady = serve("vllm")
    victim = serve("vllm")
    async with pool_of(client, steady, victim) as pool:
        victim.kill()
        for number in range(12):
            await pool.sample(request(number, f"r{number}"))
        assert pool.load()[1].state == "down"
        assert (
            "cannot reach" in pool.load()[1].reason
            or "lost the connection" in pool.load()[1].reason
        )
        victim.start()
        with anyio.fail_after(120):
            while pool.load()[1].state == "down":
                await pool.sample(request(99))
                await anyio.sleep(0.05)
        assert pool.load()[1].state == "up"


@pytest.mark.anyio
async def test_a_replica_that_returns_changed_is_not_used_again(
    serve: Serve, client: Connect
) -> None:
    """If a replica returns with other log-probabilities, for example after an upgrade, it is not
    used again and the other replicas do its work.
    """
    steady = serve("sglang")
    upgraded = serve("sglang")
    async with pool_of(client, steady, upgraded) as pool:
        upgraded.kill()
        for number in range(12):
            await pool.sample(request(number, f"r{number}"))
        upgraded.restart(quirks=ServerQuirks(logprobs="raw"))
        with anyio.fail_after(120):
            while pool.load()[1].state == "down":
                await pool.sample(request(99))
                await anyio.sleep(0.05)
        assert pool.load()[1].state == "refused"
        assert "processed" in pool.load()[1].reason
        before = upgraded.served
        for number in range(12):
            await pool.sample(request(number, f"r{number}"))
        assert upgraded.served == before


@pytest.mark.anyio
async def test_without_any_replica_the_error_is_retryable_and_says_why(
    serve: Serve, client: Connect
) -> None:
    """If all replicas are lost, the pool fails at once with a retryable error that has each
    replica's reason.
    """
    server = serve("vllm")
    async with pool_of(client, server) as pool:
        server.kill()
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                await pool.sample(request(0))
    with pytest.raises(EngineUnavailable, match="no replica can be used"):
        await pool_of(client, server).__aenter__()


class Lost(ScriptedEngine):
    """A replica that fails one call and is available again at once, but takes time to be
    checked.
    """

    lost = is_open = False

    async def recheck(self) -> None:
        """Open the engine, or check its identity."""
        if not self.is_open:
            self.is_open = True
            await self.__aenter__()
        await anyio.sleep(0.05)

    async def comes_back(self) -> bool:
        """Report that the engine is available."""
        return True

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample as the toy engine does, unless the replica is lost."""
        if self.lost:
            raise EngineUnavailable("lost", "the connection broke")
        return await super().sample(request)


def test_all_callers_continue_once_one_has_checked_the_replica(anyio_backend: Any) -> None:
    """Once one caller has checked a returned replica, all callers use it again, even after several
    failures.
    """

    async def main() -> None:
        engine = Lost()
        async with ReplicaPool([("only", engine)]) as pool:
            engine.lost = True
            for _ in range(2):
                with pytest.raises(EngineUnavailable):
                    await pool.sample(request(1))
            engine.lost = False

            async def again() -> str:
                assert await pool.comes_back()
                return (await pool.sample(request(1))).text

            assert len(set(await collect([again] * 3))) == 1

    run_virtual(main, backend=anyio_backend)


class Slow(Lost):
    """A replica that answers some requests with a failure after a delay."""

    fails_after = 0.0

    async def sample(self, request: SampleRequest) -> Completion:
        """Fail at once, later, or not at all."""
        if self.fails_after and request.rollout == "late":
            await anyio.sleep(self.fails_after)
            raise EngineUnavailable("slow", "the connection broke")
        return await super().sample(request)


def test_a_late_failure_does_not_take_a_recovered_replica_down(anyio_backend: Any) -> None:
    """A call that begins before a replica's check and fails after it does not remove the replica
    from the pool.
    """

    async def main() -> None:
        engine = Slow()
        async with ReplicaPool([("only", engine)]) as pool:
            engine.fails_after = 5.0
            async with task_group() as group:

                async def lose() -> None:
                    with pytest.raises(EngineUnavailable):
                        await pool.sample(request(1, "late"))

                group.start_soon(lose)
                await anyio.sleep(0.1)
                engine.lost = True
                with pytest.raises(EngineUnavailable):
                    await pool.sample(request(2))
                assert pool.load()[0].state == "down"
                engine.lost = False
                assert await pool.comes_back()
                assert pool.load()[0].state == "up"
                await anyio.sleep(10.0)
            assert pool.load()[0].state == "up"
            # a call that is lost after the check counts as a failure of the replica
            with pytest.raises(EngineUnavailable):
                await pool.sample(request(3, "late"))
            assert pool.load()[0].state == "down"

    run_virtual(main, backend=anyio_backend)


@pytest.mark.anyio
async def test_replicas_must_be_alike(serve: Serve, client: Connect) -> None:
    """Servers of different versions are refused as a pool, and so is an empty list of servers."""
    servers: Any = serve("vllm"), serve("vllm", quirks=ServerQuirks(version="0.34.0"))
    with pytest.raises(FingerprintError, match="vllm 0.34"):
        await pool_of(client, *servers).__aenter__()
    with pytest.raises(OptionError):
        ReplicaPool([])


@pytest.mark.anyio
async def test_a_request_all_replicas_refuse_costs_no_replica(
    serve: Serve, client: Connect
) -> None:
    """An impossible request gets an error, and all replicas stay in the pool."""
    async with pool_of(client, serve("vllm"), serve("vllm")) as pool:
        with pytest.raises(EngineError):
            await pool.sample(replace(request(0), max_tokens=5000))
        assert {load.state for load in pool.load()} == {"up"}
