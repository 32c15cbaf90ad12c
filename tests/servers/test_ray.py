"""Tests of engines in the actors of a two-node Ray cluster; they are skipped without Ray."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from atts.api import Setup, build_engine, solve
from atts.concurrency import collect
from atts.core import Completion, Message, Outcome, SampleRequest, Sampling
from atts.engine import Engine
from atts.errors import ContextOverflow, EngineUnavailable, OptionError, UsageError
from atts.pipelines import Chunking, Policy, ThresholdGate
from atts.run import RunOptions, RunSpec, evaluate
from atts.sampling import Seed
from atts.servers import RayEngine, RayOptions
from atts.testing import CheckOptions, Latency, ScriptedEngine, ToyTokenizer, check_engine

PROMPT = ToyTokenizer().render([Message("user", "Start at 4. +3, -2. What is the result?")])
HALF = RayOptions(actors=2, cpus=0.5, open_seconds=120.0)
# Ray's own warnings are ignored, because atts cannot prevent them.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two nodes of one core each on this machine, and join this process to them."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'atts-llm[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray: Any = importlib.import_module("ray")
    nodes = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()
    nodes.shutdown()


def toy() -> Engine:
    """Make a toy engine with some latency per call."""
    return ScriptedEngine(context_length=1024, latency=Latency(sampled_token=0.002), concurrency=64)


def request(number: int) -> SampleRequest:
    """Make a request with this number as its seed."""
    return SampleRequest(PROMPT, 24, seed=Seed(run=number), rollout=f"r{number}")


@pytest.mark.anyio
async def test_ray_actors_pass_the_conformance_suite(cluster: Any) -> None:
    """Two actors on two nodes pass the conformance suite as one engine, and both actors are
    used.
    """
    async with RayEngine(toy, options=HALF) as engine:
        report = await check_engine(
            engine, options=CheckOptions(draws=24, tokens=6, long_tokens=64)
        )
        assert not report.broken
        assert min(load.requests for load in engine.load()) > 10
    with pytest.raises(EngineUnavailable):
        await engine.sample(request(0))


@pytest.mark.anyio
async def test_a_dead_actor_loses_no_request(cluster: Any) -> None:
    """If one of two actors is killed while it works, each reply is as usual and a new actor
    replaces it.
    """
    async with ScriptedEngine(context_length=1024) as alone:
        want = [(await alone.sample(request(number))).ids for number in range(24)]
    async with RayEngine(toy, options=HALF) as engine:

        async def ask(number: int) -> list[Completion]:
            return [await engine.sample(request(number)) for _ in range(4)]

        async def kill() -> list[Completion]:
            await anyio.sleep(0.1)
            cluster.kill(engine.actors[0].handle)
            return []

        work: list[Callable[[], Awaitable[list[Completion]]]] = [
            *(partial(ask, number) for number in range(24)),
            kill,
        ]
        answers = await collect(work)
        assert all(done.ids == want[number] for number in range(24) for done in answers[number])
        assert engine.load()[0].failures > 0
        with anyio.fail_after(120):
            while engine.load()[0].state != "up":
                await engine.sample(request(0))
                await anyio.sleep(0.1)
        await collect([partial(engine.sample, request(number)) for number in range(24)])


@pytest.mark.anyio
async def test_errors_keep_their_kind_on_the_way_back(cluster: Any) -> None:
    """An error raised by the engine in an actor reaches the caller with its class and message."""
    async with RayEngine(_small, options=RayOptions(cpus=0.5)) as engine:
        with pytest.raises(ContextOverflow, match="but the context has only"):
            await engine.actors[0]._ask("sample", SampleRequest(PROMPT, 500))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(OptionError, match="no setting of a local engine"):
        await RayEngine(
            partial(build_engine, "embedded?treads=1", "draft"), options=RayOptions(cpus=0.5)
        ).__aenter__()


def test_the_embedded_evaluation_is_that_of_one_process(cluster: Any, tmp_path: Path) -> None:
    """With draft and target in actors on two nodes, the rollouts equal those of one process with
    the same seeds and a fixed gate.
    """
    from atts.api.setup import answers_for, grade, load_problems

    problems = load_problems("arithmetic[:6]")
    policy = Policy(samples=4, max_tokens=256, chunking=Chunking(64, 64), early_stop="none",
                    sampling=Sampling(temperature=0.7))  # fmt: skip

    def run(name: str, make: Callable[[str], Engine]) -> dict[str, Outcome]:
        plan = RunSpec(
            make("draft"), make("target"), policy, ThresholdGate(1.2), answers_for("math"), grade
        )
        result = anyio.run(
            partial(evaluate, problems, plan, RunOptions(tmp_path / name, signals="ignore"))
        )
        return {outcome.problem.id: outcome for outcome in result.outcomes()}

    one = run(
        "one",
        lambda role: build_engine("embedded?threads=1", "target" if role == "target" else "draft"),
    )
    words = "ray:embedded?threads=1&actors=2&cpus=0.25"
    two = run("two", lambda role: build_engine(words, "target" if role == "target" else "draft"))
    assert {name: outcome.answer for name, outcome in one.items()} == {
        n: outcome.answer for n, outcome in two.items()
    }
    texts = [
        (ours.text, theirs.text)
        for name in one
        for ours, theirs in zip(one[name].rollouts, two[name].rollouts, strict=False)
    ]
    # a tie between two logits may change one rollout
    assert sum(ours == theirs for ours, theirs in texts) >= len(texts) - 1


def stage_actors() -> list[int]:
    """Return the processes of the actors that have layers of the model."""
    found = [
        path.parent
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"StageActor" in path.read_bytes()
    ]
    return [int(path.name) for path in found]


@pytest.mark.anyio
async def test_stages_in_actors_give_the_bits_of_one_process(cluster: Any) -> None:
    """A model whose layers are divided among stages in actors gives the same bits as the model in
    one process.

    If an actor is killed, a call fails and the engine becomes available again.
    """
    words = "embedded:target?threads=1&kv_tokens=4096"
    law = Sampling(0.8)
    ask = SampleRequest((5, 6, 7), 40, law, Seed(run=1), rollout="r")
    async with build_engine(words, "target") as alone:
        wanted = await alone.sample(ask)
    async with build_engine(f"ray:{words}&stages=3&cpus=0.25", "target") as engine:
        assert (await engine.sample(ask)).logprobs == wanted.logprobs
        assert (await engine.sample(ask)).ids == wanted.ids
        stages = stage_actors()
        assert len(stages) == 2
        os.kill(stages[0], signal.SIGKILL)
        with anyio.fail_after(120):
            with pytest.raises(EngineUnavailable, match="the stage of layers . to . died"):
                await engine.sample(ask)
            # wait until the engine is available again, as a run does before it retries
            assert await cast(RayEngine, engine).comes_back()
            assert (await engine.sample(ask)).logprobs == wanted.logprobs


@pytest.mark.anyio
async def test_a_killed_replica_of_a_stage_loses_no_reply(cluster: Any) -> None:
    """If two actors have the same layers and one is killed, the other answers for both.

    `solve` accepts such an engine too.
    """
    words = "embedded:target?threads=1&kv_tokens=4096"
    law = Sampling(0.8)
    asks = [
        SampleRequest((5, 6, 7 + at), 80, law, Seed(run=1), rollout=f"r{at}") for at in range(4)
    ]
    async with build_engine(words, "target") as alone:
        wanted = await collect([partial(alone.sample, ask) for ask in asks])
    staged = f"ray:{words}&stages=2&stage_replicas=2&cpus=0.25"
    async with build_engine(staged, "target") as engine:
        assert await collect([partial(engine.sample, ask) for ask in asks])
        stages = stage_actors()
        assert len(stages) == 2
        os.kill(stages[0], signal.SIGKILL)
        found = await collect([partial(engine.sample, ask) for ask in asks])
        assert [done.ids for done in found] == [done.ids for done in wanted]
    policy = replace(Setup().policy, samples=2, max_tokens=64)
    outcome = await solve(
        "Start at 4. +3, -2. What is the result?", Setup(target=staged, policy=policy)
    )
    assert len(outcome.rollouts) == 2


def test_without_ray_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray, the error names the extra to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'atts-llm\[ray\]'"):
        anyio.run(RayEngine(toy).__aenter__)


def _small() -> Engine:
    """Make an engine that reports a longer context than it has, so that only the check inside the
    actor refuses a request.
    """
    return ScriptedEngine(context_length=64)
