"""Models whose ranges of layers are in processes of their own: the same bits, and an outage that is told."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
import torch

from atts.core import Message, SampleRequest, Sampling, ScoreRequest
from atts.errors import EngineUnavailable, ModelLoadError, OptionError, UnsupportedByEngine
from atts.local import LocalEngine, LocalOptions
from atts.local.allocator import SlotIds
from atts.local.batch import Floats, StepBatch, single_rows
from atts.local.messages import Cancel, Command, Submit, WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.stages import HeldLayers, StageSetup, StageStep, stage_setups
from atts.seeds import Seed
from atts.testing import check_engine
from atts.tokenizing import ModelTokenizer

from .speculating import ids_of

Make = Callable[..., Path]
HERE = LocalOptions(device="cpu", worker="thread", kv_tokens=4096, stages=3)
LAWS = Sampling(0.0), Sampling(0.9), Sampling(1.0, top_p=0.9)


def crowd() -> list[list[Command]]:
    """Prompts in common and of their own, to be continued and scored, more than fit; some are given up."""
    steps: list[list[Command]] = [[]]
    for number in range(1, 17):
        ids = ids_of(number % 3, 40) + ids_of(number, 8)
        ask = SampleRequest(ids, 20 + 2 * number, LAWS[number % 3], Seed(3, sample=number))
        steps[-1].append(Submit(number, ScoreRequest(ids[:9], ids[9:]) if number % 5 == 0 else ask))
        if number % 4 == 0:
            later: list[list[Command]] = [[], [Cancel(number - 1)], [], [], []]
            steps += later
    return steps


@pytest.mark.parametrize(
    ("family", "kernel", "stages"),
    [pytest.param("llama", "native", 3, marks=pytest.mark.slow), ("gemma2", "torch", 2), ("qwen3", "native", 2)],
)
def test_stages_say_what_one_process_says(family: str, kernel: str, stages: int, make_model: Make, drive: Any) -> None:
    """Bit for bit, where there is too little room for all, and some leave on the way."""
    folder = make_model(family, eos_token_id=None)
    settings = {"kernel": kernel, "kv_tokens": 200, "max_batch": 8}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a loop's thread does: torch sums by the number of threads
    alone, staged = (drive(folder, crowd(), **settings, stages=count) for count in (1, stages))
    torch.set_num_threads(threads)
    assert alone.stats.preempted > 0
    assert len(alone.replies) == 12
    assert staged.replies == alone.replies
    assert staged.stats.preempted == alone.stats.preempted


def setup_of(folder: Path, layers: range, stages: int = 3) -> StageSetup:
    """What a stage is told."""
    options = replace(HERE, stages=stages)
    return StageSetup(WorkerConfig("m", folder, read_model_config(folder, "m"), (), options), layers)


def stage_processes() -> dict[int, bytes]:
    """The stages of this process's engines, by their places in the pipeline."""
    lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
    children = sorted(int(pid) for path in lists if path.is_file() for pid in path.read_text().split())
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return {pid: command for pid, command in commands.items() if b"atts.local.stage_child" in command}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_stage_is_an_outage_that_ends(make_model: Make) -> None:
    """Whoever waits is told which layers are gone; opened anew it says the same; nothing is left behind."""
    engine = LocalEngine(make_model("llama", eos_token_id=None), name="m", options=HERE)
    ask = SampleRequest((5, 6, 7), 60, Sampling(0.8), Seed(1))
    async with engine:
        assert engine.kernel.endswith("3 stages")
        wanted = await engine.sample(ask)
        os.kill(min(stage_processes()), signal.SIGKILL)
        with anyio.fail_after(60), pytest.raises(EngineUnavailable, match="layers 1 to 1 ended .* -9"):
            await engine.sample(ask)
        with pytest.raises(EngineUnavailable):
            await engine.score(ScoreRequest((5,), (6,)))
        await engine.recheck()
        assert await engine.sample(ask) == replace(wanted, cached_tokens=0)
    assert not stage_processes()


@pytest.mark.slow
@pytest.mark.anyio
async def test_stages_keep_every_promise(make_model: Make) -> None:
    """The conformance suite, the loop in a process as well."""
    folder = make_model("llama")
    await check_engine(lambda: LocalEngine(folder, options=replace(HERE, worker="process", kv_tokens=8192)))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_cannot_be_loaded_or_divided_is_told(make_model: Make, tmp_path: Path) -> None:
    """A weight that a later stage lacks, more stages than layers, what stages cannot be combined with."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(make_model("llama"), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks the weight 'layers\.2\.mlp"):
        await LocalEngine(folder, options=HERE).__aenter__()
    assert not stage_processes()
    with pytest.raises(UnsupportedByEngine, match="3 layers make no 4 stages"):
        await LocalEngine(make_model("llama"), options=replace(HERE, stages=4)).__aenter__()
    with pytest.raises(UnsupportedByEngine, match="ray:"):
        await LocalEngine(make_model("llama"), options=replace(HERE, stage_worker="ray")).__aenter__()
    for options in (replace(HERE, pad="1M"), replace(HERE, stages=0), replace(HERE, speculate="mirror", drafter="d")):
        with pytest.raises(OptionError, match="stages"):
            LocalEngine(folder, options=options)


class Layers:
    """Stands in for a model: adds one, or breaks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def through(self, batch: StepBatch, table: SlotIds, rows: tuple[Floats, Floats], units: tuple[int, int]) -> None:
        """Rows of which all are asked for."""
        if self.error is not None:
            raise self.error
        rows[1][:] = rows[0] + 1


def test_what_breaks_in_one_stage_passes_through_the_others(make_model: Make) -> None:
    """They hear of new slots all the same; a lack of memory stays one."""
    table, rows = np.array([[7, 8, 9]], dtype=np.int32), np.zeros((1, 64), dtype=np.float32)
    batch = single_rows(np.array([5]), np.array([0]), np.array([0]), table)
    setups = [setup_of(make_model("llama"), range(at, at + 1)) for at in (1, 2)]
    for error, kind in ((None, np.ndarray), (ValueError("odd"), RuntimeError), (MemoryError(), MemoryError)):
        one, two = (HeldLayers(setup, cast(Any, Layers(error if at == 0 else None))) for at, setup in enumerate(setups))
        done = two.step(one.step(StageStep(batch, table.shape, (np.array([0]), np.array([0]), table[0, :1]), rows)))
        assert isinstance(done.rows, kind)
        assert two._table.tolist() == [[7, 0, 0]]
    assert isinstance(done.rows, MemoryError)
    assert "layers 1 to 1" in str(done.rows)


def test_a_tokenizer_goes_into_another_process(make_model: Make) -> None:
    """As an actor sends it to the process that asks."""
    tokenizer = ModelTokenizer(make_model("llama"), "m")
    again = pickle.loads(pickle.dumps(tokenizer))
    messages = [Message("user", "the step is done")]
    assert again.render(messages) == tokenizer.render(messages)
    assert again.digest == tokenizer.digest


def test_layers_are_divided_by_bytes(make_model: Make) -> None:
    """The first stage has the words as well, and so fewer layers; every layer is in one stage."""
    config = setup_of(make_model("llama"), range(3)).config
    sizes = (8, 320, [4, 4]), (8, 2000, [2, 6]), (9, 90_000, [1, 4, 4]), (3, 10, [1, 1, 1])
    for layers, words, wanted in sizes:
        model = replace(config.model, num_layers=layers, vocabulary=words, ties_embeddings=True)
        told = replace(config, model=model, options=replace(HERE, stages=len(wanted)))
        found = [each.layers for each in stage_setups(told)]
        assert [len(each) for each in found] == wanted
        assert [at for each in found for at in each] == list(range(layers))
