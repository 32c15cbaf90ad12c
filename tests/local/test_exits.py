"""Tests of the target's early exit: reading it changes no step, and a trained adapter is loaded or
refused.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from atts.accel.overlap.mirror import EXIT_FILE, ExitAdapter, ExitListener, ExitModel
from atts.core import Sampling, ScoreRequest
from atts.errors import ModelLoadError, UnsupportedByEngine
from atts.local.batch import PrefillChunk, StepBatch, StepPlan, new_sequence, step_batch
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import NativeModel
from atts.local.loader import Weights, load_weights
from atts.local.model import TorchModel
from atts.local.model_config import ModelConfig, read_model_config
from atts.local.seams import HookedModel, LayerHook
from tests.local.speculating import Make, counts, ids_of, requests, run, same, texts

CPU = torch.device("cpu")
DEEP = {"num_hidden_layers": 4}


def loaded(folder: Path, layers: int) -> tuple[ModelConfig, Weights]:
    """Load only the first layers of a model."""
    config = read_model_config(folder, "tiny")
    weights = load_weights(folder, config, torch.float32, CPU, "tiny")
    fewer: dict[str, Any] = {name: getattr(config, name)[:layers] for name in ("ropes", "windows")}
    return replace(config, num_layers=layers, **fewer), replace(
        weights, layers=weights.layers[:layers]
    )


def built(config: ModelConfig, weights: Weights, kernel: str) -> HookedModel:
    """Build a model of these layers, with its own cache."""
    cache = torch.zeros(config.num_layers, 2, 64, config.num_kv_heads, config.head_dim)
    if kernel == "torch":
        return TorchModel(config, weights, cache)
    return NativeModel(native_library("tiny", config)[0], config, weights, cache, 1)


def a_step(table: np.ndarray[Any, Any]) -> StepBatch:
    """Make a step of two prompts that requests the output at the last position of each."""
    chunks = list[PrefillChunk]()
    for row, tokens in enumerate((9, 14)):
        sequence = new_sequence(row, requests(1)[0].request, 0.0)
        sequence.ids = list(ids_of(row, tokens))
        sequence.row = row
        chunks.append(PrefillChunk(sequence, 0, tokens, tokens - 1))
    return step_batch(StepPlan([], chunks, [], []), table)


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_reading_the_exit_changes_no_bit_of_a_step(kernel: str, make_model: Make) -> None:
    """Reading the states at the early exit does not change a step's result.

    These states equal those of a model that consists of the layers up to the exit, before its last
    norm.
    """
    folder = make_model("llama", **DEEP)
    heard = list[Tensor]()
    table = np.arange(1, 41, dtype=np.int32).reshape(2, 20)
    config, weights = loaded(folder, 4)

    plain = built(config, weights, kernel).forward(a_step(table), table)
    whole = built(config, weights, kernel).forward(a_step(table), table, LayerHook(2, heard.append))
    assert torch.equal(plain, whole)
    assert [len(rows) for rows in heard] == [2]
    cut = built(*loaded(folder, 2), kernel).forward(a_step(table), table)
    normed = torch.nn.functional.rms_norm(
        heard[0], heard[0].shape[1:], weights.norm, config.norm_eps
    )
    assert torch.allclose(normed, cut, atol=1e-5)


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_an_exit_guesses_at_the_requested_rows(kernel: str, make_model: Make) -> None:
    """At each requested row, the early exit returns the most likely tokens of a model that ends at
    the exit's layer.

    Neighbouring rows of two sequences are requested, so that results of a wrong row would be
    noticed.
    """
    folder = make_model("llama", **DEEP)
    table = np.arange(1, 41, dtype=np.int32).reshape(2, 20)
    chunks = list[PrefillChunk]()
    for row, tokens in enumerate((9, 14)):
        ids = ids_of(row, tokens)
        sequence = new_sequence(row, ScoreRequest(ids[:-3], ids[-3:]), 0.0)
        sequence.ids = list(ids)
        sequence.row = row
        chunks.append(PrefillChunk(sequence, 0, tokens, tokens - 4))
    batch = step_batch(StepPlan([], chunks, [], []), table)
    config, weights = loaded(folder, 4)
    adapter = ExitAdapter.untrained(config, weights)
    model = ExitModel(built(config, weights, kernel), adapter, config.norm_eps)
    heard = list[Any]()
    model.listen(ExitListener({0: (70, Sampling(1.0)), 1: (71, Sampling(1.0))}, heard.append))
    model.forward(batch, table)

    short = built(*loaded(folder, adapter.layers), kernel)
    logits = short.compute_logits(short.forward(batch, table))
    best = logits.double().softmax(-1).topk(3, -1)
    (told,) = heard
    assert {key: len(places) for key, places in told.items()} == {70: 4, 71: 4}
    places = [*told[70], *told[71]]
    for (ids, chances), expected, likely in zip(places, best.indices, best.values, strict=True):
        assert list(ids)[:3] == expected.tolist()
        assert list(chances)[:3] == pytest.approx(likely.tolist(), abs=1e-4)
    firsts = [list(ids)[0] for ids, _ in places]
    assert len(set(firsts)) > 2, (
        "neighbouring rows must differ, or the test could not distinguish them"
    )


def trained(folder: Path, to: Path, **changes: Any) -> Path:
    """Copy a model, and add an exit adapter with some changed parts to the copy."""
    shutil.copytree(folder, to)
    width = read_model_config(folder, "tiny").hidden_size
    parts = {
        "norm": torch.ones(width),
        "down": torch.randn(3, width),
        "up": 0.1 * torch.randn(width, 3),
    }
    (to / EXIT_FILE).parent.mkdir()
    layers = changes.pop("layers", "1")
    save_file({**parts, **changes}, to / EXIT_FILE, metadata={"layers": layers})
    return to


def test_a_trained_exit_changes_no_token(make_model: Make, near: Path, tmp_path: Path) -> None:
    """Neither an untrained nor a trained early exit changes a token.

    A trained exit is at the layer for which its adapter was trained, an untrained one in the middle
    of the layers.
    """
    folder = make_model("llama", **DEEP)
    config, weights = loaded(folder, 4)
    assert ExitAdapter.read(folder, config, weights, "tiny").layers == 2
    other = trained(folder, tmp_path / "trained")
    adapter = ExitAdapter.read(other, config, weights, "tiny")
    x = torch.randn(5, config.hidden_size)
    assert adapter.layers == 1
    assert not torch.allclose(
        adapter(x, 1e-6), ExitAdapter.untrained(config, weights)(x, 1e-6), atol=0.01
    )
    plain = run(folder, [requests(3)])
    done = run(other, [requests(3)], None, 4, near, speculate="mirror")
    assert same(plain, done)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": "4"}, "has shapes that do not fit this model"),
        ({"layers": "half"}, "cannot be read"),
        ({"norm": torch.ones(7)}, "has shapes that do not fit this model"),
        ({"up": torch.ones(3, 3)}, "has shapes that do not fit this model"),
    ],
)
def test_an_exit_adapter_of_another_model_is_refused(
    changes: dict[str, Any], said: str, make_model: Make, near: Path, tmp_path: Path
) -> None:
    """The error about an exit adapter of another model names the adapter's file and a remedy."""
    folder = trained(make_model("llama", **DEEP), tmp_path / "other", **changes)
    with pytest.raises(ModelLoadError, match=said) as raised:
        run(folder, [requests(1)], None, 4, near, speculate="mirror")
    assert EXIT_FILE in str(raised.value)
    assert "scripts/train heads" in str(raised.value)
    (folder / EXIT_FILE).write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        run(folder, [requests(1)], None, 4, near, speculate="mirror")


def test_a_target_of_one_layer_has_no_exit(make_model: Make, near: Path) -> None:
    """atts refuses an early exit for a target of one layer before it writes anything."""
    with pytest.raises(UnsupportedByEngine, match="the target has only one layer"):
        run(
            make_model("llama", num_hidden_layers=1),
            [requests(1)],
            None,
            4,
            near,
            speculate="mirror",
        )


def test_torch_writes_the_same_with_an_exit(make_model: Make, near: Path) -> None:
    """With an early exit, torch writes the same greedy tokens as without speculation, and some
    guesses are made.
    """
    folder = make_model("llama")
    orders = requests(3, 24, [Sampling(0.0)])
    plain = run(folder, [orders], kernel="torch")
    done = run(folder, [orders], None, 4, near, speculate="mirror", kernel="torch")
    assert texts(plain) == texts(done)
    assert counts(done).overlap is not None
