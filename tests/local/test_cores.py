"""Tests of threads and cores: open engines share the cores, and their threads sleep while they
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from atts.accel import SpeculationOptions, StageOptions
from atts.accel.engine import Acceleration
from atts.concurrency import collect
from atts.core import SampleRequest, Sampling
from atts.local import LocalEngine, LocalOptions, builder, messages, worker
from atts.local.messages import Command, ShareCores, WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.worker import OpenLoops, ProcessWorker, worker_environment
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed

Make = Callable[..., Path]
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def config_of(folder: Path, **options: Any) -> WorkerConfig:
    """Make the first message to a step loop of the model in a folder."""
    model = read_model_config(folder, "tiny")
    return WorkerConfig("tiny", folder, model, (), LocalOptions(**options))


def test_a_worker_process_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OpenMP threads of a worker process sleep while they wait, unless the user set another
    policy.
    """
    for name in PASSIVE:
        monkeypatch.delenv(name, raising=False)
    assert PASSIVE.items() <= worker_environment().items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert worker_environment()["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_an_engines_process_gets_the_openmp_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process sets the OpenMP settings before any of its libraries loads OpenMP."""
    for name in PASSIVE:
        monkeypatch.delenv(name, raising=False)
    worker = ProcessWorker()
    try:
        assert worker._process is not None  # pyright: ignore[reportPrivateUsage]
        pid = worker._process.pid  # pyright: ignore[reportPrivateUsage]
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    finally:
        worker.close()
    assert {f"{name}={value}" for name, value in PASSIVE.items()} <= set(words)


def listening(names: str) -> tuple[dict[str, ShareCores], dict[str, Callable[[Command], None]]]:
    """Return the latest message to each loop, and a function that sends a message to a loop."""
    heard: dict[str, ShareCores] = {}

    def send(name: str, command: Command) -> None:
        assert isinstance(command, ShareCores)
        heard[name] = command

    return heard, {name: partial(send, name) for name in names}


def test_loops_learn_how_many_share_the_cores() -> None:
    """Whenever a loop opens or closes, all loops receive the number of loops that share the cores.

    Closing a loop twice counts once.
    """
    loops = OpenLoops()
    heard, send = listening("abc")
    assert [loops.register(send[name]) for name in "abc"] == [1, 2, 3]
    assert {name: counts.open_loops for name, counts in heard.items()} == {"a": 3, "b": 3}
    loops.leave(send["b"])
    loops.leave(send["b"])
    assert {name: counts.open_loops for name, counts in heard.items()} == {"a": 2, "b": 3, "c": 2}


def test_loops_learn_how_many_are_busy() -> None:
    """All loops receive the number of busy loops.

    A loop is busy while any of its requests is neither answered nor dropped. A loop that is not
    registered is not counted.
    """
    loops = OpenLoops()
    heard, send = listening("abc")
    for name in "ab":
        loops.register(send[name])
    loops.begin(send["a"], 1)
    assert heard == {"a": ShareCores(2, 1), "b": ShareCores(2, 1)}
    loops.begin(send["a"], 2)
    loops.begin(send["b"], 1)
    loops.begin(send["c"], 1)
    assert heard == {"a": ShareCores(2, 2), "b": ShareCores(2, 2)}
    loops.end(send["a"], [1])
    assert heard["b"] == ShareCores(2, 2)
    loops.end(send["a"], [2, 2])
    loops.end(send["a"], [1])
    assert heard == {"a": ShareCores(2, 1), "b": ShareCores(2, 1)}
    loops.leave(send["b"])
    assert heard["a"] == ShareCores(1, 0)
    loops.end(send["b"], [1])
    assert heard["a"] == ShareCores(1, 0)


def test_cores_are_divided_between_large_models(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model gets one core, an explicit option has priority, and each loop gets at least one
    core.
    """
    folder = make_model("llama")
    assert config_of(folder).threads(8) == 1
    monkeypatch.setattr(messages, "SMALL_MODEL", 1)
    shared = [replace(config_of(folder), sharers=loops).threads(8) for loops in (1, 2, 3, 20)]
    assert shared == [8, 4, 2, 1]
    assert replace(config_of(folder, threads=5), sharers=2).threads(8) == 5


def test_a_drafter_in_a_process_of_its_own_has_half_of_the_cores(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that computes at the same time as its target gets half of the cores.

    The target keeps all cores if the drafter is small, or if drafter and target take turns.
    """
    folder = make_model("llama")
    tokenizer = ModelTokenizer(folder, "tiny")

    def threads(**speculation: Any) -> int:
        options = SpeculationOptions(drafter=str(folder), **speculation)
        acceleration = Acceleration(options, StageOptions())
        return acceleration.prepare(config_of(folder), tokenizer).threads(8)

    assert threads(speculate="pearl") == 1
    monkeypatch.setattr(messages, "SMALL_MODEL", 1)
    assert threads(speculate="pearl") == 4
    assert threads(speculate="draft") == 8
    stages = Acceleration(SpeculationOptions(), StageOptions(stages=2, stage_replicas="3"))
    assert stages.prepare(config_of(folder), tokenizer).threads(8) == 2


@pytest.mark.anyio
async def test_two_engines_opened_together_divide_the_cores(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a second engine is open, the first one uses only half of its threads."""
    monkeypatch.setattr(messages, "SMALL_MODEL", 1)
    monkeypatch.setattr(builder, "_MOST_THREADS", 6)
    monkeypatch.setattr(worker, "OPEN_LOOPS", OpenLoops())
    counts: list[tuple[str, int]] = []
    monkeypatch.setattr(builder, "set_threads", lambda config: counts.append(key(config)))

    def key(config: WorkerConfig) -> tuple[str, int]:
        return config.name, config.threads(6)

    options = LocalOptions(worker="thread", kernel="torch")
    async with AsyncExitStack() as stack:
        first = LocalEngine(make_model("llama"), name="first", options=options)
        second = LocalEngine(make_model("llama"), name="second", options=options)
        third = LocalEngine(make_model("llama"), name="third", options=replace(options, threads=5))
        await stack.enter_async_context(first)
        async with second, third:
            for engine in (first, second, third):
                await engine.sample(SampleRequest((5, 6), 2))
        await first.sample(SampleRequest((5, 6), 2))
    assert alternations([count for name, count in counts if name == "first"]) == [6, 3, 6]
    assert alternations([count for name, count in counts if name == "second"]) == [3]
    assert [count for name, count in counts if name == "third"] == [5]


def alternations(values: list[int]) -> list[int]:
    """Return the values, with each run of equal values reduced to one value."""
    return [value for value, _ in groupby(values)]


@pytest.mark.anyio
@pytest.mark.parametrize("kernel", ["native", "torch"])
async def test_an_idle_engine_lends_its_cores(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    """While one of two engines has no request, the other one computes with all cores, and its
    results stay bit-identical.

    Torch's sums depend on the number of threads, so with torch an engine keeps its number.
    """
    monkeypatch.setattr(messages, "SMALL_MODEL", 1)
    monkeypatch.setattr(builder, "_MOST_THREADS", 4)
    monkeypatch.setattr(worker, "OPEN_LOOPS", OpenLoops())
    seen: list[tuple[str, int]] = []
    shared = builder.share_cores

    def spied(config: WorkerConfig, model: Any, counts: ShareCores) -> None:
        use = model.use_threads

        def noted(threads: int) -> None:
            seen.append((config.name, threads))
            use(threads)

        model.use_threads = noted
        shared(config, model, counts)
        del model.use_threads

    monkeypatch.setattr(builder, "share_cores", spied)
    options = LocalOptions(worker="thread", kernel=kernel)
    request = SampleRequest((5, 6, 7), 24, Sampling(0.8), Seed(1))
    async with AsyncExitStack() as stack:
        engines = [
            LocalEngine(make_model("llama"), name=name, options=options) for name in ("a", "b")
        ]
        for engine in engines:
            await stack.enter_async_context(engine)
        first, second = engines
        alone = [await first.sample(request), await second.sample(replace(request, ids=(9, 8)))]
        both = await collect(
            [
                partial(first.sample, request),
                partial(second.sample, replace(request, ids=(9, 8))),
            ]
        )
        opened = list(seen)
    assert [(one.ids, one.logprobs) for one in both] == [(one.ids, one.logprobs) for one in alone]
    expected = {("a", 4), ("b", 4), ("a", 2), ("b", 2)}
    assert set(opened) == (expected if kernel == "native" else {("a", 2), ("b", 2)})
