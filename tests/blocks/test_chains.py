"""Tests of several models of a zoo in one step loop: outputs are bit-identical, and shared blocks
run once.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.accel import SpeculationOptions, StageOptions, Zoo, accelerated
from atts.accel.engine import PlannedLoop
from atts.accel.options import LoopPlan
from atts.accel.zoo import shared_worker
from atts.accel.zoo.many_models import ChainModel
from atts.accel.zoo.shared_worker import AddModel
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.errors import EngineUnavailable, ZooError
from atts.local import LocalEngine, LocalOptions
from atts.local.batch import Ints, StepBatch
from atts.local.builder import build_loop
from atts.local.cache import SlotIds
from atts.local.loop import StepLoop
from atts.local.messages import (
    Cancel,
    Command,
    LoopReport,
    Reply,
    Submit,
    WorkerConfig,
    WorkerReady,
)
from atts.local.model_config import read_model_config
from atts.local.options import WorkerKind
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed
from atts.testing import check_engine
from tests.local.speculating import Script
from tests.local.test_engine import loop_process

from .conftest import MakeZoo, Tune
from .test_adapters import asked
from .test_zoo import damaged

Make = Callable[..., Path]
OPTIONS = LocalOptions(
    device="cpu", kernel="native", kv_tokens=4096, max_batch=16, chunk_tokens=2048, threads=1
)
SHARED = replace(OPTIONS, worker="thread")


@pytest.fixture
def family(make_zoo: MakeZoo) -> Zoo:
    """Make a base, two adapters of it, and models whose last layers, middle layers or head are
    fine-tuned.
    """
    wide = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tuned = {"end": ("layers.2.",), "middle": ("layers.1.mlp",), "head": ("lm_head", "model.norm")}
    return make_zoo(tuned, {"narrow": ("q_proj", "v_proj"), "wide": wide})


def config_of(zoo: Zoo, name: str, *, shares: bool = True, **stages: Any) -> WorkerConfig:
    """Make the configuration of a loop for one model of a zoo."""
    folder = zoo.folder(name)
    pieces = ModelTokenizer(folder, name).pieces
    plan = LoopPlan(stages=StageOptions(**stages), is_shared=True)
    builder = PlannedLoop(plan) if shares else None
    return WorkerConfig(name, folder, read_model_config(folder, name), pieces, OPTIONS, builder)


def build(config: WorkerConfig, tell: Callable[[LoopReport], None]) -> tuple[StepLoop, WorkerReady]:
    """Build the step loop of this configuration."""
    made = (
        build_loop(config, tell) if config.builder is None else config.builder.build(config, tell)
    )
    assert isinstance(made[0], StepLoop)
    return made[0], made[1]


def requests(rng: random.Random, count: int) -> list[SampleRequest | ScoreRequest]:
    """Make requests that continue or score prompts with different first tokens."""
    made = list[SampleRequest | ScoreRequest]()
    for number in range(count):
        ids = (number + 3, *(rng.randrange(3, 300) for _ in range(rng.randrange(4, 40))))
        if rng.random() < 0.4:
            made.append(ScoreRequest(ids[:3], ids[3:]))
        else:
            law = rng.choice([Sampling(0.0), Sampling(0.9), Sampling(1.0, top_p=0.9)])
            made.append(
                SampleRequest(
                    ids, rng.randrange(3, 25), law, seed=Seed(number, "p", 0, 0, "target", 0)
                )
            )
    return made


def run(first: WorkerConfig, steps: Sequence[Sequence[Command]]) -> tuple[dict[int, Reply], object]:
    """Return a loop's replies to commands that arrive at the given steps."""
    replies = dict[int, Reply]()

    def tell(report: LoopReport) -> None:
        replies.update({reply.request_id: reply for reply in report.replies})

    loop, ready = build(first, tell)
    assert ready.takes_models == (first.builder is not None)
    loop.run(Script([list(step) for step in steps]))
    return replies, loop._model


def schedule(
    rng: random.Random, asked: Mapping[int, Submit], late: float = 0.6
) -> list[list[Command]]:
    """Submit the same requests at random steps, in groups of random size."""
    steps: list[list[Command]] = [[]]
    for number in sorted(asked):
        while rng.random() < late:
            steps.append([])
        steps[-1].append(asked[number])
    return steps


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_model_in_a_shared_loop_gives_its_own_replies(seed: int, family: Zoo) -> None:
    """A model gives bit-identical replies from its own folder, alone in the zoo's loop, and
    together with five other models.
    """
    rng = random.Random(seed)
    names = ["base", "end", "middle", "head", "narrow", "wide"]
    chosen = {
        number: (rng.randrange(len(names)), ask) for number, ask in enumerate(requests(rng, 24), 1)
    }
    alone = dict[int, Reply]()
    for at, name in enumerate(names):
        mine = {number: ask for number, (chain, ask) in chosen.items() if chain == at}
        for shares in (True, False):
            said, _ = run(
                config_of(family, name, shares=shares),
                [[Submit(n, ask)] for n, ask in mine.items()],
            )
            if shares:
                alone |= said
            # an adapter opened from its own folder is merged into the weights, which rounds
            # differently
            elif name not in ("narrow", "wide"):
                assert said == {number: alone[number] for number in mine}
    added = [AddModel(config_of(family, name)) for name in names[1:]]
    submits = {number: Submit(number, ask, chain) for number, (chain, ask) in chosen.items()}
    for late in (0.0, 0.6, 0.9):
        said, _ = run(config_of(family, "base"), [added, *schedule(rng, submits, late)])
        assert said == alone


def test_a_batch_is_laid_out_once_while_its_members_stay(
    family: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of a batch is computed once while the batch's requests stay the same; each step
    only updates tokens, positions and slots. If a new model joins, the layout is computed again.
    """
    laid = list[int]()
    inner = ChainModel._prepared

    def counted(model: ChainModel, given: StepBatch, units: Ints, table: SlotIds) -> object:
        laid.append(len(given.tokens))
        return inner(model, given, units, table)

    monkeypatch.setattr(ChainModel, "_prepared", counted)
    asks = [SampleRequest((n, 5, 6, 7, 8), 40, Sampling(1.0), seed=Seed(n)) for n in range(3, 7)]
    steps: list[list[Command]] = [
        [Submit(n, ask, n % 2) for n, ask in enumerate(asks, 1)],
        *([[]] * 9),
    ]
    added = [AddModel(config_of(family, name)) for name in ("end", "head")]
    alone = {
        n: run(config_of(family, "base"), [added, [Submit(n, ask, n % 2)]])[0][n]
        for n, ask in enumerate(asks, 1)
    }
    laid.clear()
    found, _ = run(
        config_of(family, "base"), [added, *steps, [Submit(9, ScoreRequest((9,), (3,)), 2)]]
    )
    assert {n: found[n] for n in alone} == alone
    assert laid[:2] == [20, 4]
    assert len(laid) <= 5  # the layout is computed at most five times in about forty steps


@pytest.mark.parametrize("most", [1, 7])
def test_a_block_takes_no_more_rows_than_its_limit(most: int, family: Zoo) -> None:
    """A batch above a block's row limit is split into several runs with bit-identical results; a
    prompt longer than the limit is a separate run.
    """
    asks = dict(enumerate(requests(random.Random(3), 16), 1))
    submits: list[Command] = [Submit(n, ask, n % 2) for n, ask in asks.items()]
    found = list[dict[int, Reply]]()
    calls = list[float]()
    for rows in (None, most):
        first, other = (config_of(family, name, block_rows=rows) for name in ("base", "narrow"))
        said, model = run(first, [[AddModel(other)], submits])
        assert isinstance(model, ChainModel)
        found.append(said)
        calls.append(model.unit_rows / model.unit_calls)
    assert found[0] == found[1]
    assert calls[1] < calls[0] / 1.5


def chain_model(zoo: Zoo, *names: str) -> ChainModel:
    """Load models of a zoo in one loop."""
    _, model = run(
        config_of(zoo, names[0]), [[AddModel(config_of(zoo, name)) for name in names[1:]]]
    )
    assert isinstance(model, ChainModel)
    for number in range(len(names)):
        model.open(number)
    return model


def test_shared_blocks_run_once_per_step(family: Zoo) -> None:
    """Models are computed separately where their blocks differ and together again later; adapters
    share every block of their base.
    """
    model = chain_model(family, "base", "end", "middle", "head", "narrow", "wide")

    def stages(*chains: int) -> list[tuple[int, int, tuple[tuple[int, ...], ...]]]:
        """Return the ranges of layers and, for each range, which of the models run it together.
        Neighbouring ranges with the same groups of models are joined.
        """
        found = list[tuple[int, int, tuple[tuple[int, ...], ...]]]()
        for start, stop, groups in model.spans(chains):
            if found and found[-1][2] == groups:
                start = found.pop()[0]
            found.append((start, stop, groups))
        return found

    assert stages(0, 4, 5) == [(0, 8, ((0, 4, 5),))]
    assert stages(0, 2) == [(0, 4, ((0, 2),)), (4, 5, ((0,), (2,))), (5, 8, ((0, 2),))]
    assert stages(1, 4) == [(0, 5, ((1, 4),)), (5, 7, ((1,), (4,))), (7, 8, ((1, 4),))]
    assert stages(0, 3) == [(0, 7, ((0, 3),)), (7, 8, ((0,), (3,)))]


def test_rows_of_shared_blocks_are_contiguous(family: Zoo) -> None:
    """Rows of shared blocks are contiguous in a batch, whatever the order in which the models were
    opened.
    """
    names = ["base", "end", "middle", "head", "narrow", "wide"]
    for seed in range(4):
        model = chain_model(family, *random.Random(seed).sample(names, len(names)))
        units = [model._chains[chain].units for chain in model._order]

        def pieces(order: Sequence[Sequence[str]]) -> int:
            return sum(len(list(groupby(blocks))) for blocks in zip(*order, strict=True))

        assert pieces(units) == min(map(pieces, permutations(units)))


def test_six_models_take_the_memory_of_their_unique_blocks(family: Zoo) -> None:
    """Six related models need little more memory than one."""
    model = chain_model(family, "base", "end", "middle", "head", "narrow", "wide")
    single = chain_model(family, "base")
    for loaded, count in ((model, 6), (single, 1)):
        loaded.spans(tuple(range(count)))
    assert 1.4 * single.num_bytes < model.num_bytes < 2.4 * single.num_bytes


def test_a_draft_of_first_layers_runs_in_its_targets_blocks(
    base: Path, tune: Tune, tmp_path: Path
) -> None:
    """A draft made of its target's first layers and its own head runs through the target's blocks."""
    import json

    from safetensors.torch import load_file, save_file

    zoo = Zoo(tmp_path / "zoo")
    folder = tune("shallow", "lm_head")
    tensors = {
        name: part
        for name, part in load_file(folder / "model.safetensors").items()
        if "layers.2." not in name
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(said | {"num_hidden_layers": 2, "layer_types": None})
    )
    zoo.add("deep", base)
    zoo.add("shallow", folder)
    model = chain_model(zoo, "deep", "shallow")
    assert [stage.groups for stage in model.spans((0, 1))][0] == ((0, 1),)
    asks = dict(enumerate(requests(random.Random(5), 10), 1))
    alone, _ = run(
        config_of(zoo, "shallow", shares=False),
        [[Submit(n, ask)] for n, ask in asks.items() if n % 2],
    )
    both, _ = run(
        config_of(zoo, "deep"),
        [[AddModel(config_of(zoo, "shallow"))], [Submit(n, ask, n % 2) for n, ask in asks.items()]],
    )
    assert {n: both[n] for n in alone} == alone


def test_cancelling_requests_of_one_model_changes_no_other(family: Zoo) -> None:
    """If requests of one model are cancelled, requests of other models get the same replies as
    without the cancellation.
    """
    asks = dict(enumerate(requests(random.Random(7), 12), 1))
    submits: list[Command] = [Submit(n, ask, n % 2) for n, ask in asks.items()]
    added = [AddModel(config_of(family, "end"))]
    whole, _ = run(config_of(family, "base"), [added, submits])
    part, _ = run(
        config_of(family, "base"), [added, submits, [], [Cancel(n) for n in asks if n % 3 == 0]]
    )
    assert {n: whole[n] for n in part} == part
    assert len(part) < len(whole)


@pytest.mark.anyio
async def test_engines_of_a_zoo_share_a_loop(family: Zoo) -> None:
    """Two engines share one loop but have separate counters, and one continues when the other is
    closed.
    """
    alone = {name: await asked(family.folder(name), kernel="native") for name in ("base", "end")}
    request = SampleRequest((5, 6, 7), 12, Sampling(0.8), seed=Seed(1, "p", 0, 0, "target", 0))
    async with accelerated(family.folder("base"), options=SHARED) as first:
        async with accelerated(family.folder("end"), options=SHARED) as second:
            assert "shared blocks" in second.kernel
            assert len(shared_worker._HOSTS) == 1
            done = await first.sample(request)
            assert (first.stats().sampled_tokens, second.stats().sampled_tokens) == (
                len(done.ids),
                0,
            )
            other = await second.sample(request)
            assert other.ids != done.ids
            assert second.stats().sampled_tokens == len(other.ids)
            assert first.spec.weights != second.spec.weights
        assert (await first.sample(request)).ids == done.ids
        with pytest.raises(EngineUnavailable):
            await second.sample(request)
    assert shared_worker._HOSTS == {}
    assert alone == {
        name: await asked(family.folder(name), kernel="native") for name in ("base", "end")
    }


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_an_engine_of_a_zoo_passes_the_conformance_suite(
    family: Zoo, worker: WorkerKind
) -> None:
    """An adapter's engine passes the conformance suite while another model is open in the same
    loop.
    """
    options = replace(SHARED, worker=worker, kv_tokens=8192)
    async with accelerated(family.folder("base"), options=options) as other:
        await check_engine(lambda: accelerated(family.folder("narrow"), options=options))
        assert other.stats().in_flight == 0


@pytest.mark.anyio
async def test_engines_that_cannot_share_have_loops_of_their_own(
    family: Zoo, make_model: Make
) -> None:
    """An engine whose options, shapes or kernel differ from those of the open loops gets its own
    loop, and all engines work.
    """
    family.add("wider", make_model("llama", intermediate_size=128))
    others = {"base": SHARED, "end": replace(SHARED, kv_tokens=999), "wider": SHARED}
    engines = [
        accelerated(family.folder(name), options=options) for name, options in others.items()
    ]
    engines.append(accelerated(family.folder("head"), options=replace(SHARED, kernel="torch")))
    opened = [await engine.__aenter__() for engine in engines]
    assert len(shared_worker._HOSTS) == 3
    scores = [await engine.score(ScoreRequest((5, 6), (7, 8, 9))) for engine in opened]
    assert len({found.logprobs for found in scores}) == 4
    for engine in reversed(opened):
        await engine.__aexit__(None, None, None)
    assert shared_worker._HOSTS == {}


@pytest.mark.anyio
async def test_a_zoo_target_with_a_drafter_gets_its_own_loop(family: Zoo, base: Path) -> None:
    """In a zoo, a target with a drafter gets its own loop and writes the same text as without a
    drafter.
    """
    request = SampleRequest((5, 6, 7), 20, Sampling(0.0), seed=Seed(1, "p", 0, 0, "target", 0))
    async with accelerated(family.folder("base"), options=SHARED) as plain:
        wanted = await plain.sample(request)
        async with accelerated(family.folder("base"), options=SHARED, lent=str(base)) as engine:
            assert "shared" not in engine.kernel
            assert (await engine.sample(request)).ids == wanted.ids
            found = engine.loop_stats().speculation
            assert found is not None


@pytest.mark.anyio
async def test_a_damaged_block_stops_only_models_that_use_it(family: Zoo) -> None:
    """An engine whose model needs the damaged block names the block in its error; an engine without
    the block works.
    """
    digest = damaged(family, "end", "base")
    async with accelerated(family.folder("base"), options=SHARED) as engine:
        with pytest.raises(ZooError, match=digest):
            await accelerated(family.folder("end"), options=SHARED).__aenter__()
        assert len((await engine.score(ScoreRequest((5, 6), (7, 8)))).logprobs) == 2
    drafting = SpeculationOptions(drafter=str(family.folder("end")))
    with pytest.raises(ZooError, match=digest):
        await accelerated(family.folder("base"), options=SHARED, speculation=drafting).__aenter__()


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_killed_loop_leaves_the_zoo_whole(
    make_model: Make, tune: Tune, tmp_path: Path
) -> None:
    """If a loop is killed, all its callers get the error, and engines opened afterwards give the
    same replies as before.
    """
    zoo = Zoo(tmp_path / "zoo")
    endless = make_model("llama", eos_token_id=None, max_position_embeddings=100_000)
    for name, word in (("first", "nothing"), ("second", "lm_head")):
        zoo.add(name, tune(name, word, source=endless))
    folders = [zoo.folder(name) for name in ("first", "second")]
    options = replace(SHARED, worker="process", kv_tokens=200_000)
    ask = ScoreRequest((5, 6), (7, 8))
    said = list[object]()
    for is_killed in (True, False):
        async with (
            accelerated(folders[0], options=options) as one,
            accelerated(folders[1], options=options) as other,
        ):
            assert "shared blocks" in other.kernel
            said.append([(await engine.score(ask)).logprobs for engine in (one, other)])
            if is_killed:
                errors = list[EngineUnavailable]()

                async def wait(
                    engine: LocalEngine, errors: list[EngineUnavailable] = errors
                ) -> None:
                    with pytest.raises(EngineUnavailable) as told:
                        await engine.sample(SampleRequest((5, 6), 90_000))
                    errors.append(told.value)

                with anyio.fail_after(60):
                    async with anyio.create_task_group() as group:
                        for engine in (one, other):
                            group.start_soon(wait, engine)
                        await anyio.sleep(0.3)
                        os.kill(loop_process(), signal.SIGKILL)
                assert len(errors) == 2
    assert said[0] == said[1]
    assert zoo.damage() == []


@pytest.mark.anyio
async def test_engines_of_a_zoo_can_open_and_close_concurrently(family: Zoo) -> None:
    """Five engines are opened concurrently in one process, in any order, one of them twice."""
    found = dict[int, tuple[float, ...]]()

    async def use(number: int, name: str) -> None:
        async with accelerated(family.folder(name), options=SHARED) as engine:
            found[number] = (await engine.score(ScoreRequest((5, 6), (7, 8, 9)))).logprobs

    async with anyio.create_task_group() as group:
        for number, name in enumerate(("base", "end", "middle", "wide", "base")):
            group.start_soon(use, number, name)
    assert found[0] == found[4]
    assert len(set(found.values())) == 4
    assert shared_worker._HOSTS == {}
