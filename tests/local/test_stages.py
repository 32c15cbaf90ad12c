"""Tests of models whose layers are in several processes: replies are bit-identical, and lost
processes are reported.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
import torch

from atts.accel import options_of
from atts.accel.build import build_stage
from atts.accel.options import StageOptions
from atts.accel.zoo import stage_line, stage_workers
from atts.accel.zoo.placement import Instance, dispatched
from atts.accel.zoo.stage_line import KvResidency, StageCosts
from atts.accel.zoo.stages import BuildStage, StageCall, StageServer, StageSetup, stage_setups
from atts.concurrency import collect
from atts.core import Completion, Message, SampleRequest, Sampling, ScoreRequest
from atts.errors import EngineUnavailable, ModelLoadError, OptionError, UnsupportedByEngine
from atts.local.batch import StepBatch, single_rows
from atts.local.cpu.model import NativeModel
from atts.local.messages import Cancel, Command, Submit, WorkerConfig
from atts.local.model_config import read_model_config
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed
from atts.testing import check_engine

from .speculating import Driven, Script, engine_of, ids_of

Make = Callable[..., Path]
HERE: dict[str, Any] = {"device": "cpu", "worker": "thread", "kv_tokens": 4096, "stages": 3}
LAWS = Sampling(0.0), Sampling(0.9), Sampling(1.0, top_p=0.9)


def crowd() -> list[list[Command]]:
    """Make sampling and scoring requests that need more slots than the cache has. Some share a
    prompt, and some are cancelled.
    """
    steps: list[list[Command]] = [[]]
    for number in range(1, 17):
        ids = ids_of(number % 3, 40) + ids_of(number, 8)
        ask = SampleRequest(ids, 20 + 2 * number, LAWS[number % 3], Seed(3, sample=number))
        steps[-1].append(Submit(number, ScoreRequest(ids[:9], ids[9:]) if number % 5 == 0 else ask))
        if number % 4 == 0:
            later: list[list[Command]] = [[], [Cancel(number - 1)], [], [], []]
            steps += later
    return steps


class StageHere:
    """A stage that runs in this process, because this starts faster than a child process. It may
    fail from a given message on.
    """

    made: ClassVar[list[StageHere]] = []

    def __init__(self, name: str, label: str, build: BuildStage) -> None:
        self.label = label
        self.heard = 0
        self.ends = 1 << 30
        self.kinds = Counter[str]()
        self.server = StageServer(build)
        self.is_closed = False
        self.answers: list[Any] = []
        StageHere.made.append(self)

    def send(self, message: object) -> None:
        """Compute the reply at once."""
        self.heard += 1
        if self.heard > self.ends:
            raise EngineUnavailable("m", "gone")
        for step in message.steps if isinstance(message, StageCall) else ():
            self.kinds += Counter(
                {"steps": 1, "brought": len(step.brought), "again": len(step.again)}
            )
        self.answers.append(self.server.answer(pickle.loads(pickle.dumps(message))))

    def take(self) -> Any:
        """Return the reply; a stage that has failed has none."""
        if self.heard == self.ends:
            raise EngineUnavailable("m", "gone")
        return self.answers.pop()

    def close(self) -> None:
        """Record that the stage is closed."""
        self.is_closed = True

    @staticmethod
    def ready(stages: Sequence[StageHere], seconds: float | None) -> list[StageHere]:
        """Return the stages that have replied; raise an error for a closed stage, as a closed pipe
        does.
        """
        assert not any(each.is_closed for each in stages)
        return [each for each in stages if each.answers]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[StageHere]:
    """Run the stages in this process."""
    StageHere.made = []
    monkeypatch.setitem(stage_workers.KINDS, "process", StageHere)
    return StageHere


@pytest.mark.parametrize(
    ("family", "kernel", "stages"),
    [("llama", "native", 3), ("gemma2", "torch", 2), ("qwen3", "native", 2)],
)
def test_stages_give_the_replies_of_one_process(
    family: str, kernel: str, stages: int, here: type[StageHere], make_model: Make, drive: Any
) -> None:
    """Layers in several stages give bit-identical replies to one process, even if memory is scarce
    and requests are cancelled.
    """
    folder = make_model(family, eos_token_id=None)
    settings = {"kernel": kernel, "kv_tokens": 200, "max_batch": 8, "stage_steps": 1}
    threads = torch.get_num_threads()
    # one thread, as in a loop's thread, because torch's sums depend on the number of threads
    torch.set_num_threads(1)
    alone, staged = (drive(folder, crowd(), **settings, stages=count) for count in (1, stages))
    torch.set_num_threads(threads)
    assert alone.stats.preempted > 0
    assert len(alone.replies) == 12
    assert staged.replies == alone.replies
    assert staged.stats.preempted == alone.stats.preempted
    assert len(here.made) == stages - 1


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_several_steps_in_flight_change_no_bit(
    steps: int, here: type[StageHere], make_model: Make, drive: Any
) -> None:
    """If several steps are computed at the same time, replies are bit-identical as long as no
    cached prompt is evicted.

    If memory is scarce, all requests still get a reply.
    """
    folder = make_model("llama", eos_token_id=None)
    alone = drive(folder, crowd(), kernel="native", chunk_tokens=1024)
    asked = {
        "kernel": "native",
        "chunk_tokens": 1024,
        "stages": 3,
        "stage_steps": steps,
        "stage_replicas": "1,2",
    }
    staged = drive(folder, crowd(), **asked)
    assert said(staged) == said(alone)
    assert staged.stats.steps > alone.stats.steps * 1.5
    tight = drive(folder, crowd(), **asked, kv_tokens=200, max_batch=8)
    assert tight.stats.preempted > 0
    assert tight.stats.kv_locked == 0
    assert len(tight.replies) >= 12
    texts = dict(said(tight))
    wanted = dict(said(alone))
    assert all(text[0] == wanted.get(key, text)[0] for key, text in texts.items())


def said(driven: Driven) -> list[tuple[int, tuple[object, object]]]:
    """Return the ids and log-probabilities of all replies in the order of their requests."""
    replies = sorted(driven.replies.items())
    return [
        (key, (getattr(reply, "ids", None), getattr(reply, "logprobs", None)))
        for key, reply in replies
    ]


def setup_of(folder: Path, layers: range) -> StageSetup:
    """Make the setup of a stage."""
    options = options_of(**HERE)[0]
    return StageSetup(
        WorkerConfig("m", folder, read_model_config(folder, "m"), (), options), layers
    )


def stage_processes() -> dict[int, bytes]:
    """Return the stage processes of this process's engines, by their positions in the pipeline."""
    lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
    children = sorted(
        int(pid) for path in lists if path.is_file() for pid in path.read_text().split()
    )
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return {
        pid: command
        for pid, command in commands.items()
        if b"atts.accel.zoo.stage_workers" in command
    }


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("replicas", ["1", "2"])
async def test_a_killed_stage_is_an_outage_that_ends(replicas: str, make_model: Make) -> None:
    """If a stage is killed and a replica has its layers, callers notice nothing.

    Without a replica, callers get an error, and the engine works again after it is opened again.
    """
    options = {**HERE, "stages": 2, "stage_replicas": replicas}
    engine = engine_of(make_model("llama", eos_token_id=None), name="m", **options)
    ask = SampleRequest((5, 6, 7), 60, Sampling(0.8), Seed(1))
    async with engine:
        assert "2 stages" in engine.kernel
        wanted = await engine.sample(ask)
        if replicas == "2":
            found = list[Completion]()

            async def kill() -> None:
                await anyio.sleep(0.01)
                os.kill(min(stage_processes()), signal.SIGKILL)

            async def again(seed: int) -> None:
                found.append(await engine.sample(replace(ask, max_tokens=200, rollout=f"{seed}")))

            calls: list[Callable[[], Awaitable[None]]] = [
                kill,
                *(partial(again, seed) for seed in range(8)),
            ]
            await collect(calls)
            assert {done.ids[:60] for done in found} == {wanted.ids}
            # meanwhile atts starts another stage in place of the killed one
            with anyio.fail_after(60):
                while len(stage_processes()) < 2:
                    await engine.sample(ask)

        async def outage() -> None:
            while True:  # the test kills the stage again each time atts replaces it
                for pid in stage_processes():
                    os.kill(pid, signal.SIGKILL)
                assert (await engine.sample(ask)).ids == wanted.ids

        with (
            anyio.fail_after(60),
            pytest.raises(EngineUnavailable, match="layers 1 to 2 ended .* -9"),
        ):
            await outage()
        with pytest.raises(EngineUnavailable):
            await engine.score(ScoreRequest((5,), (6,)))
        await engine.recheck()
        assert await engine.sample(ask) == replace(wanted, cached_tokens=0)
    assert not stage_processes()


@pytest.mark.slow
@pytest.mark.anyio
async def test_stages_pass_the_conformance_suite(make_model: Make) -> None:
    """Engines of several stages pass the conformance suite, also with the loop in another
    process.
    """
    folder = make_model("llama")
    await check_engine(
        lambda: engine_of(folder, **{**HERE, "worker": "process", "kv_tokens": 8192})
    )


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_impossible_stages_are_refused(
    here: type[StageHere], make_model: Make, tmp_path: Path
) -> None:
    """A missing weight of a later stage, more stages than layers, and incompatible options are
    refused.
    """
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(make_model("llama"), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks the weight 'layers\.2\.mlp"):
        await engine_of(folder, **HERE).__aenter__()
    assert len(here.made) == 2
    with pytest.raises(UnsupportedByEngine, match="3 layers cannot be split into 4 stages"):
        await engine_of(make_model("llama"), **{**HERE, "stages": 4}).__aenter__()
    with pytest.raises(UnsupportedByEngine, match="ray:"):
        await engine_of(make_model("llama"), **HERE, stage_worker="ray").__aenter__()
    wrong: list[dict[str, Any]] = [
        {"stage_replicas": said} for said in ("0", "2,2,2", "", "1,x", "65")
    ]
    wrong += [{"stages": 0}, {"speculate": "mirror", "drafter": "d"}, {"stage_steps": 0}]
    for changes in wrong:
        with pytest.raises(OptionError, match="stage"):
            engine_of(folder, **{**HERE, **changes})


@pytest.mark.parametrize(("family", "proposed"), [("llama", 0), ("llama", 3), ("qwen3", 0)])
@pytest.mark.parametrize("seed", range(3))
def test_replicas_of_a_stage_give_the_same_bits(
    family: str, proposed: int, seed: int, here: type[StageHere], make_model: Make, near: Path, drive: Any,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Replies are bit-identical for any choice of replica at each step, even after most replicas
    were killed.
    """
    folder = make_model(family, eos_token_id=None, num_hidden_layers=5)
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "kernel": "native",
        "kv_tokens": 300,
        "max_batch": 8,
        "chunk_tokens": 48,
    }
    settings |= {"drafter": str(near), "k": proposed, "speculate": "draft"} if proposed else {}
    alone = drive(folder, crowd(), **settings)

    def anywhere(instances: list[Instance]) -> int:
        """Choose the cheapest replica, or sometimes a random one."""
        return rng.randrange(len(instances)) if rng.random() < 0.3 else dispatched(instances)

    def either(costs: StageCosts, *seen: Any) -> Instance:
        """Set the cost of recomputing to half or twice the cost of moving, so that both are used on
        every machine.
        """
        costed = measured(costs, *seen)
        return (
            costed
            if costed.move == inf
            else costed._replace(recompute=costed.move * rng.choice((0.5, 2)))
        )

    class Prepared(Script):
        def take(self, *, wait: bool) -> list[Command]:
            for stage, steps in zip(here.made, (1 << 30, 30, 30, 9, 1 << 30), strict=False):
                stage.ends = steps * (seed > 0) or stage.ends
            return super().take(wait=wait)

    measured = StageCosts.instance
    monkeypatch.setattr(StageCosts, "instance", either)
    monkeypatch.setattr(stage_line, "dispatched", anywhere)
    monkeypatch.setattr("tests.local.conftest.Script", Prepared)
    found = drive(folder, crowd(), **settings, stages=3, stage_replicas="3,2", stage_steps=1)
    assert found.replies == alone.replies
    kinds = sum((stage.kinds for stage in here.made), Counter[str]())
    assert min(kinds["brought"], kinds["again"]) > 5
    assert len(here.made) == 5 + 3 * (seed > 0)
    assert all(stage.kinds["steps"] > 5 for stage in here.made[5:])


def test_recomputed_rows_are_equal_to_the_bit(make_model: Make) -> None:
    """Missing rows are recomputed in the same groups as in the original steps, so that they are
    bit-identical.

    The cases are long and short runs of consecutive rows, single rows, and parts of runs.
    """
    setup = setup_of(make_model("llama", eos_token_id=None, num_hidden_layers=5), range(1, 5))
    one, two = (build_stage(setup) for _ in range(2))
    cache = one.cache
    copied = two.cache
    rng = np.random.default_rng(0)
    kept = KvResidency(2, 4098, 64)
    table = np.arange(1, 258, dtype=np.int32)[None]
    fed = 0
    for number in (40, *[1] * 10, 2, 3, 2, 20, *[1] * 20, 3):
        batch = run_of(fed, number)
        rows = rng.standard_normal((number, 64)).astype(np.float32)
        kept.note(batch, rows)
        one.run(batch, table, rows.copy())
        fed += number
    copied[:] = cache
    for share in (1.0, 0.9, 0.5, 0.1):
        missing = (rng.random(fed) < share).nonzero()[0]
        copied[:, :, missing + 1] = 0
        batch, rows = kept._again(np.zeros(3, dtype=np.int64), table[0].astype(np.int64), missing)
        two.run(batch, table, rows)
        assert torch.equal(cache[:, :, : fed + 1], copied[:, :, : fed + 1])


def test_keys_and_values_are_moved_despite_a_failed_step(make_model: Make) -> None:
    """If a worker reports a failed step, the loop does not know what the worker's cache contains.
    Keys and values are nevertheless moved from this worker.
    """
    kept = KvResidency(3, 64, 8)
    costs = StageCosts(setup_of(make_model("llama"), range(1, 3)))
    table = np.arange(1, 25, dtype=np.int32).reshape(2, 12)
    ends = np.array([10, 10])
    kept.held[0] = True
    rows = np.arange(2)
    brought = dict[int, list[int]]()

    def bring(number: int, slots: Any) -> Any:
        kept.held[number] = False
        return slots

    batch = single_rows(np.zeros_like(ends), ends, rows, table)
    for share in kept.divided(batch, table, costs, {0: 9.0, 1: 0.0, 2: 0.0}, bring):
        brought[share.worker] = [slot for slots, _ in share.brought for slot in slots.tolist()]
    assert brought == {1: [*range(1, 11)], 2: [*range(13, 23)]}


def run_of(first: int, number: int) -> StepBatch:
    """Make a step of one sequence with `number` tokens from position `first`. The sequence uses the
    slots from 1 on, and no output is requested.
    """
    at = np.arange(first, first + number)
    none = np.zeros(0, dtype=np.int64)
    batch = single_rows(
        np.zeros_like(at), at, np.zeros_like(at), np.arange(1, 258, dtype=np.int32)[None], none
    )
    row = np.zeros(1, dtype=np.int64)
    starts = np.array([0, number])
    stop = at[-1:] + 1
    batch = replace(batch, table_rows=row, query_starts=starts, context_lens=stop, num_logits=row)
    return replace(batch, num_single=int(number == 1))


@pytest.mark.parametrize(("error", "shrunk"), [(ValueError("odd"), 0), (MemoryError(), 1)])
def test_a_step_that_fails_in_a_stage_is_repeated(
    error: Exception,
    shrunk: int,
    here: type[StageHere],
    make_model: Make,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a step fails in a stage, the engine repeats it as smaller steps and discards its partial
    results.
    """
    folder = make_model("llama", eos_token_id=None)
    through = NativeModel.through
    calls = count()
    wanted = dict(said(drive(folder, crowd(), kernel="native")))

    def once(
        model: NativeModel, batch: StepBatch, table: Any, rows: Any, units: tuple[int, int]
    ) -> None:
        if units[0] and next(calls) == 30:
            raise error
        through(model, batch, table, rows, units)

    monkeypatch.setattr(NativeModel, "through", once)
    found = drive(folder, crowd(), kernel="native", stages=3, stage_replicas="2")
    assert (found.stats.shrunk, found.stats.failed) == (shrunk, 0)
    assert all(text[0] == wanted.get(key, text)[0] for key, text in said(found))
    assert next(calls) > 60


def test_a_tokenizer_can_be_pickled(make_model: Make) -> None:
    """A tokenizer can be pickled, which Ray needs in order to send it to an actor."""
    tokenizer = ModelTokenizer(make_model("llama"), "m")
    again = pickle.loads(pickle.dumps(tokenizer))
    messages = [Message("user", "the step is done")]
    assert again.render(messages) == tokenizer.render(messages)
    assert again.digest == tokenizer.digest


def test_layers_are_divided_by_bytes(make_model: Make) -> None:
    """Each layer is in one stage, and the stages have about the same size in bytes. The first stage
    has fewer layers, because it also has the embedding.
    """
    config = setup_of(make_model("llama"), range(3)).config
    sizes = (8, 320, [4, 4]), (8, 2000, [2, 6]), (9, 90_000, [1, 4, 4]), (3, 10, [1, 1, 1])
    for layers, words, wanted in sizes:
        model = replace(config.model, num_layers=layers, vocabulary=words, ties_embeddings=True)
        told = replace(config, model=model)
        stages = StageOptions(stages=len(wanted))
        found = [each.layers for each in stage_setups(told, stages)]
        assert [len(each) for each in found] == wanted
        assert [at for each in found for at in each] == list(range(layers))
