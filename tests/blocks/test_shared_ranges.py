"""Tests of zoo models whose layers are spread over workers: shared ranges are loaded once, and
replies stay bit-identical.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import anyio
import numpy as np
import pytest

from atts.accel import StageOptions, Zoo, accelerated
from atts.accel.build import build_stage
from atts.accel.zoo import stage_line, stage_workers
from atts.accel.zoo.placement import Instance, dispatched
from atts.accel.zoo.shared_worker import AddModel
from atts.accel.zoo.stage_line import InFlightStep, LayerRange, StageExecutor
from atts.accel.zoo.staged_loop import StagedModel
from atts.accel.zoo.stages import BuildStage, StageReply, StageSetup
from atts.concurrency import collect
from atts.core import Completion, SampleRequest, Sampling
from atts.errors import EngineUnavailable, ModelLoadError
from atts.local.batch import single_rows
from atts.local.messages import Command, FailureReply, LoopReport, Reply, Submit, WorkerConfig
from atts.models.stored_blocks import unit_digests
from atts.sampling import Seed
from tests.local.speculating import Script
from tests.local.test_stages import StageHere, stage_processes

from .test_chains import SHARED, build, config_of, family, requests, run, schedule

__all__ = ["family"]
NAMES = ("base", "end", "middle", "head", "narrow", "wide")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[StageHere]:
    """Run the workers in the test's own process."""
    StageHere.made = []
    monkeypatch.setitem(stage_workers.KINDS, "process", StageHere)
    return StageHere


def staged(zoo: Zoo, name: str, stages: int = 2, **settings: Any) -> WorkerConfig:
    """Configure a model of a zoo in ranges of layers."""
    tokens = settings.pop("kv_tokens", None)
    config = config_of(zoo, name, stages=stages, **settings)
    return replace(config, options=replace(config.options, kv_tokens=tokens or 4096))


def driven(
    first: WorkerConfig, steps: Sequence[Sequence[Command]]
) -> tuple[dict[int, Reply], StageExecutor]:
    """Return a loop's replies and the executor of its ranges."""
    replies = dict[int, Reply]()

    def tell(report: LoopReport) -> None:
        replies.update({reply.request_id: reply for reply in report.replies})

    loop, ready = build(first, tell)
    assert ready.takes_models
    loop.run(Script([list(step) for step in steps]))
    assert isinstance(loop._model, StagedModel)
    return replies, loop._model._line


@pytest.mark.parametrize(("stages", "replicas"), [(2, "1"), (3, "1"), (2, "2")])
def test_models_that_share_ranges_keep_their_own_replies(
    stages: int, replicas: str, family: Zoo, here: type[StageHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six models that share ranges of layers give bit-identical replies to each model alone,
    whichever worker is chosen.

    Equal ranges are loaded once.
    """
    rng = random.Random(stages)
    chosen = {
        number: (rng.randrange(len(NAMES)), ask) for number, ask in enumerate(requests(rng, 24), 1)
    }
    alone = dict[int, Reply]()
    for at, name in enumerate(NAMES):
        mine = [[Submit(number, ask)] for number, (chain, ask) in chosen.items() if chain == at]
        alone |= run(config_of(family, name), mine)[0]

    def anywhere(instances: list[Instance]) -> int:
        """Choose the cheapest worker, or sometimes a random one."""
        return rng.randrange(len(instances)) if rng.random() < 0.2 else dispatched(instances)

    monkeypatch.setattr(stage_line, "dispatched", anywhere)
    added = [AddModel(staged(family, name)) for name in NAMES[1:]]
    submits = {number: Submit(number, ask, chain) for number, (chain, ask) in chosen.items()}
    said, line = driven(
        staged(family, "base", stages, stage_replicas=replicas),
        [added, *schedule(rng, submits, 0.5)],
    )
    assert said == alone
    layers = sorted((held.setup.layers.start, len(held.members)) for held in line.ranges.values())
    assert layers == [(0, 6), (1, 1), (1, 5), (2, 1), (2, 5)]
    copies = 2 if replicas == "2" else 1
    assert all(len(held.holders) >= copies for held in line.ranges.values())
    assert all(stage.kinds["steps"] > 5 for stage in here.made)
    names = {chain: [held.setup.name for held in path] for chain, path in line.paths.items()}
    assert line.handed[names[0][0], names[0][1]] > line.handed[names[2][0], names[2][1]] > 0


def test_every_range_has_the_requested_number_of_workers(
    family: Zoo, here: type[StageHere]
) -> None:
    """Each range of layers gets the requested number of workers whatever the load, although each
    placed range leaves less memory for the next.
    """
    added = [AddModel(staged(family, name)) for name in NAMES[1:]]
    ask = SampleRequest((3, 4, 5), 2, Sampling(0.0))
    _, line = driven(
        staged(family, "base", stage_replicas="2"),
        [added, [Submit(1, ask, 1)], [Submit(2, ask, 2)]],
    )
    assert len(line.ranges) == 5
    rng = random.Random(0)
    for workers in (3, 2, 1):
        for _ in range(20):
            line._since = perf_counter() - 1
            for held in line.ranges.values():
                held.seconds = rng.random()
            assert min(map(len, line._placed().values())) >= min(2, workers)
        line.nodes[workers - 1].error = EngineUnavailable("here", "is gone")


@pytest.mark.parametrize("spare", ["replaced", "not"])
def test_losing_a_worker_of_a_shared_range_loses_no_reply(
    spare: str, family: Zoo, here: type[StageHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker of a shared range is lost, another worker loads the range or a remaining worker
    serves it, and the lost sequences are computed again.
    """
    asks = dict(enumerate(requests(random.Random(5), 16), 1))
    alone = dict[int, Reply]()
    for at, name in enumerate(("base", "narrow")):
        alone |= run(
            config_of(family, name), [[Submit(n, ask)] for n, ask in asks.items() if n % 2 == at]
        )[0]

    class Prepared(Script):
        def take(self, *, wait: bool) -> list[Command]:
            for stage in here.made[: 1 if spare == "replaced" else 9]:
                stage.ends = min(stage.ends, stage.heard + 12)
            return super().take(wait=wait)

    monkeypatch.setattr("tests.blocks.test_shared_ranges.Script", Prepared)
    submits = [[Submit(n, ask, n % 2)] for n, ask in asks.items()]
    said, line = driven(staged(family, "base"), [[AddModel(staged(family, "narrow"))], *submits])
    assert said == alone
    assert len(here.made) == 2
    gone = [node.number for node in line.nodes if node.error]
    assert gone == ([] if spare == "replaced" else [1])


def test_ranges_move_next_to_their_successors(
    family: Zoo, here: type[StageHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop counts the rows that each range computes. From these counts the placement function
    of the simulator moves ranges next to their successors; replies stay bit-identical.
    """
    monkeypatch.setattr("atts.accel.zoo.stage_line._LOOKED_AT", 8)
    asks = dict(enumerate(requests(random.Random(7), 30), 1))
    alone, _ = run(config_of(family, "middle"), [[Submit(n, ask)] for n, ask in asks.items()])
    submits: list[list[Command]] = [[Submit(n, ask, 1)] for n, ask in asks.items()]
    added: list[Command] = [AddModel(staged(family, "middle", 3))]
    first = SampleRequest((3, 4, 5), 30, Sampling(0.0))
    said, line = driven(
        staged(family, "base", 3), [added, [Submit(99, first)], *([[]] * 20), *submits]
    )
    assert {n: said[n] for n in alone} == alone
    homes = {name: held.homes for name, held in line.ranges.items()}
    assert line.crossing(homes) <= line.crossing(line._placed()) / 0.8 + 1
    assert all(set(held.holders) == set(held.homes) for held in line.ranges.values())


def test_a_worker_that_dies_while_it_loads_is_replaced_once(
    family: Zoo, here: type[StageHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker dies before its first computation, it is replaced once, and the replacement needs
    only to load the range.
    """
    made = list[int]()

    class Weak(StageHere):
        def __init__(self, name: str, label: str, build: BuildStage) -> None:
            super().__init__(name, label, build)
            made.append(1)
            self.ends = 1 if len(made) == 1 else self.ends

    monkeypatch.setitem(stage_workers.KINDS, "process", Weak)
    ask = SampleRequest((3, 4, 5), 10, Sampling(1.0), seed=Seed(1))
    alone, _ = run(config_of(family, "base"), [[Submit(1, ask)]])
    assert driven(staged(family, "base"), [[Submit(1, ask)]])[0] == alone
    assert len(made) == 2


def test_a_model_that_cannot_load_stops_no_other(family: Zoo, here: type[StageHere]) -> None:
    """If a damaged model cannot load, its requests get the error, its own ranges are dropped, and
    other models continue.
    """
    digest = unit_digests(family.folder("end"), 3)[-2]
    path = family.folder("end").parent.parent / "blocks" / f"{digest}.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    ask = SampleRequest((3, 4, 5), 10, Sampling(1.0), seed=Seed(1))
    alone, _ = run(config_of(family, "base"), [[Submit(1, ask)]])
    added: list[Command] = [AddModel(staged(family, "end"))]
    said, line = driven(staged(family, "base"), [[*added, Submit(2, ask, 1)], [Submit(1, ask)]])
    assert said[1] == alone[1]
    assert isinstance(said[2], FailureReply)
    assert len(line.paths) == 1


def test_losing_a_worker_while_a_damaged_model_loads_loses_no_reply(
    family: Zoo, here: type[StageHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is lost while a damaged model loads: the new worker first fails to load both models,
    and then loads again without the damaged model.
    """
    digest = next(block.digest for block in family.model("wide").blocks if block.place == "adapter")
    path = family.directory / "blocks" / f"{digest}.safetensors"

    class Prepared(Script):
        def take(self, *, wait: bool) -> list[Command]:
            taken = super().take(wait=wait)
            if any(isinstance(order, Submit) and order.model for order in taken):
                path.write_bytes(path.read_bytes()[:100])
                here.made[0].ends = here.made[0].heard + 1
            return taken

    monkeypatch.setattr("tests.blocks.test_shared_ranges.Script", Prepared)
    ask = SampleRequest((3, 4, 5), 10, Sampling(1.0), seed=Seed(1))
    alone, _ = run(config_of(family, "base"), [[Submit(1, ask)], *[[]] * 30, [Submit(3, ask)]])
    orders: list[list[Command]] = [[AddModel(staged(family, "wide")), Submit(1, ask)], *([[]] * 30)]
    said, _ = driven(staged(family, "base"), [*orders, [Submit(2, ask, 1), Submit(3, ask)]])
    assert isinstance(said.pop(2), FailureReply)
    assert said == alone
    assert len(here.made) == 2


def test_a_reloaded_range_has_the_adapters_of_all_its_models(
    family: Zoo, here: type[StageHere]
) -> None:
    """If a lost range cannot be reloaded, it is loaded when the next model joins, and then has the
    adapters of its earlier models too.
    """
    setups = [
        StageSetup(staged(family, name), range(1), 1, "a", at, is_shared=True)
        for at, name in enumerate(("narrow", "wide"))
    ]
    config = setups[0].config
    broken = list[bool]()
    joined = list[int]()

    class Layers:
        def join(self, setup: StageSetup) -> None:
            joined.append(setup.chain)

    def loaded(setup: StageSetup) -> Any:
        if broken and setup.name == "a":
            raise ModelLoadError("a", "damaged")
        joined.clear()
        return Layers()

    line = StageExecutor(
        replace(config, options=replace(config.options, kv_tokens=64)), loaded, 1, is_shared=True
    )
    setups = [setup._replace(config=line._config) for setup in setups]
    line.start("one")
    line.add(setups[:1])
    line.load()
    broken.append(True)
    here.made[0].ends = here.made[0].heard + 1
    line.add([setups[1]._replace(name="b", chain=2)], 2)
    line.load(2)
    broken.clear()
    line.add(setups[1:], 1)
    line.load(1)
    assert (len(here.made), line.ranges["a"].holders, joined) == (2, {0}, [0, 1])


def test_a_released_range_leaves_nothing_in_its_worker(family: Zoo, here: type[StageHere]) -> None:
    """A released range of layers is not loaded again, neither by late replies nor by a pending
    reload.
    """
    config = staged(family, "base", kv_tokens=64)
    line = StageExecutor(config, build_stage, 1, is_shared=True)
    line.start("one")
    held = line.ranges["a"] = LayerRange(StageSetup(config, range(1), 1, "a", is_shared=True), 1)
    line.paths[0] = [held]
    held.loading[0] = 2
    held._joined(0, None)
    assert held.holders == set()
    held._joined(0, None)
    assert held.holders == {0}
    zero = np.zeros(1, dtype=np.int64)
    table = np.ones((1, 4), dtype=np.int32)
    batch = replace(single_rows(zero, zero, zero, table), models=zero)
    for is_kept in (True, False):
        flight = InFlightStep.of(batch, table, config.model.hidden_size)
        stops = [(stop, zero[:0]) for stop in line._way(flight, 0, zero)]
        if not is_kept:
            held.leave(0)
        line._visited(flight, line.nodes[0], stops, StageReply([flight.rows], [0.0]))
        assert held.kept is not None
        assert (held.kept.held[0, 1], flight.levels.tolist()) == (is_kept, [1])


@pytest.mark.parametrize("part", ["adapter", "layers.1.mlp"])
def test_ranges_that_cannot_be_reloaded_fail_all_models(
    part: str, family: Zoo, here: type[StageHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a lost worker's ranges are damaged on disk, no model can run, and all requests get the
    error.
    """
    digest = next(block.digest for block in family.model("wide").blocks if block.place == part)
    path = family.directory / "blocks" / f"{digest}.safetensors"

    class Prepared(Script):
        def take(self, *, wait: bool) -> list[Command]:
            if here.made and not here.made[0].kinds["steps"]:
                return super().take(wait=wait)
            path.write_bytes(path.read_bytes()[:100])
            here.made[0].ends = min(here.made[0].ends, here.made[0].heard + 1)
            return super().take(wait=wait)

    monkeypatch.setattr("tests.blocks.test_shared_ranges.Script", Prepared)
    asks = [SampleRequest((3 + n, 4, 5), 30, Sampling(1.0), seed=Seed(n)) for n in range(4)]
    submits: list[Command] = [Submit(n, ask, n % 3) for n, ask in enumerate(asks, 1)]
    added = [AddModel(staged(family, name, 3)) for name in ("wide", "narrow")]
    with pytest.raises(
        EngineUnavailable, match=r"layers . to . could not be loaded again \(.*damaged"
    ):
        driven(staged(family, "base", 3), [[*added, *submits]])


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_engines_in_ranges_give_the_replies_of_one_process(
    family: Zoo, here: type[StageHere]
) -> None:
    """Engines in ranges of layers reply like one process, also if the second model has an adapter
    or a last layer of its own.
    """
    ask = SampleRequest((5, 6, 7), 20, Sampling(0.9), seed=Seed(1))
    for name in ("wide", "end"):
        found = list[Completion]()
        for count in (1, 2):
            stages = StageOptions(stages=count)
            async with accelerated(family.folder("base"), options=SHARED, stages=stages) as base:
                await base.sample(ask)
                async with accelerated(
                    family.folder(name), options=SHARED, stages=stages
                ) as engine:
                    found.append(await engine.sample(ask))
        assert found[0] == found[1]
    # the less busy worker loads the layer that only this model has
    assert here.made[0].kinds["steps"] > 5


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_killing_a_worker_of_two_models_loses_no_reply(family: Zoo) -> None:
    """Two engines share a loop, and a worker of this loop is killed while both write: all replies
    are as without the kill, and the worker is replaced.
    """
    stages = StageOptions(stages=2)
    asks = [
        SampleRequest((5, 6, 7 + at), 150, Sampling(0.9), seed=Seed(at), rollout=f"r{at}")
        for at in range(8)
    ]
    engines = [
        accelerated(family.folder(name), name=name, options=SHARED, stages=stages)
        for name in ("base", "narrow")
    ]
    async with engines[0], engines[1]:
        wanted = [[(await engine.sample(ask)).ids for ask in asks] for engine in engines]
        assert len(stage_processes()) == 1
        found = dict[tuple[int, int], Completion]()

        async def again(at: int, number: int) -> None:
            found[at, number] = await engines[at].sample(
                replace(asks[number], rollout=f"again{number}")
            )

        async def kill() -> None:
            await anyio.sleep(0.05)
            os.kill(min(stage_processes()), signal.SIGKILL)

        with anyio.fail_after(120):
            calls: list[Callable[[], Awaitable[None]]] = [kill]
            calls += [partial(again, at, number) for at in (0, 1) for number in range(8)]
            await collect(calls)
            assert all(done.ids == wanted[at][number] for (at, number), done in found.items())
            while len(stage_processes()) < 1:
                await engines[0].sample(asks[0])
    assert not stage_processes()
