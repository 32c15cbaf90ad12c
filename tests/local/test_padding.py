"""Padded models: the words of the model alone, to the bit, and the whole work of the larger one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from atts.api import dry_run
from atts.api.engines import build_engine
from atts.cli.evaluations import dry_run_lines
from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.errors import OptionError, OutOfMemory
from atts.local import LocalEngine, LocalOptions
from atts.local.batch import StepBatch, single_rows
from atts.local.compiling import native_library
from atts.local.loader import LayerWeights, Weights
from atts.local.model_config import ModelConfig, read_model_config
from atts.local.native_model import NativeModel
from atts.local.padding import PaddedModel, padding_weights
from atts.local.padding_shape import padding_shape
from atts.local.torch_model import TorchModel
from atts.models import path
from atts.sampling import Seed
from tests.local.speculating import Make, counts, requests, run, same

CPU = torch.device("cpu")
SIZE = 20_000_000
MATRICES = ("qkv", "out", "gate_up", "down")


def stack_config(size: int = SIZE, vocabulary: int = 0) -> ModelConfig:
    """The shape beside the embedded target."""
    return padding_shape(read_model_config(path("target"), "target"), size, vocabulary)


def one_token(table: Any) -> StepBatch:
    zero = np.zeros(1, dtype=np.int64)
    return single_rows(zero + 5, zero, zero, table)


@pytest.mark.anyio
@pytest.mark.parametrize("kernel", ["native", "torch"])
async def test_a_padded_model_writes_and_scores_the_same_to_the_bit(kernel: Any) -> None:
    """Ids, log-probabilities and scores, in another's company or not."""
    answers = list[Any]()
    here = LocalOptions(worker="thread", kernel=kernel, kv_tokens=512, threads=1, device="cpu")
    for words in ("embedded:target", "embedded:target?pad=20M"):
        async with build_engine(words, "target", here) as engine:
            asked = [SampleRequest((5, 9, 40 + n), 6, Sampling(0.9), Seed(n)) for n in range(2)]
            written = [await engine.sample(each) for each in asked]
            scored = [await engine.score(ScoreRequest((7, 8), each.ids)) for each in written]
            answers.append(
                (
                    [(each.ids, each.logprobs) for each in written],
                    [each.logprobs for each in scored],
                )
            )
            assert isinstance(engine, LocalEngine)
            names = engine.spec.model, engine.kernel
            assert ("padded to 20M" in names[0], "padded" in names[1]) == (
                "pad=" in words,
                "pad=" in words,
            )
            assert engine.spec.flops_per_token == pytest.approx(
                2 * SIZE if "pad=" in words else 2 * 4.26e6, rel=0.02
            )
    assert answers[0] == answers[1]


def test_speculation_and_preemption_change_nothing_either(make_model: Make, near: Path) -> None:
    """A padded target with a padded drafter, in a cache that holds them all and in one that does
    not.
    """
    folder = make_model("llama")
    orders = requests(4)
    tiny = replace(read_model_config(folder, "tiny"))
    stack = padding_shape(tiny, 3_000_000)
    for changes in ({}, {"kv_tokens": 120}):
        plain = run(folder, [orders], None, 3, near, **changes)
        padded = run(folder, [orders], None, 3, near, padding=stack, **changes)
        assert counts(padded).accepted > 0
        assert same(plain, padded)


@pytest.mark.parametrize("vocabulary", [0, 20_000])
def test_the_parameters_of_the_built_layers_are_those_asked_for(vocabulary: int) -> None:
    """Weights are counted where they lie: each has memory of its own, whatever it holds."""
    config = stack_config(2 * SIZE, vocabulary)
    cache = torch.zeros(6, 2, 3, 4, 64)
    weights = padding_weights(config, torch.float32, CPU)
    in_torch = list(matrices(TorchModel(config, weights, cache)))
    packed = packed_matrices(native(config, weights, cache))
    own = read_model_config(path("target"), "target").matrix_weights
    for held, size in ((in_torch, 4), (packed, 2)):  # float32, and bfloat16 packed
        assert len({each.data_ptr() for each in held}) == len(held) == 4 * config.num_layers + 1
        assert own + sum(each.untyped_storage().nbytes() for each in held) / size == pytest.approx(
            2 * SIZE, rel=0.01
        )
    assert weights.head.shape == (vocabulary or 512, 512)


def test_the_operations_are_those_of_the_size() -> None:
    """Counted while one token goes through."""
    from torch.utils.flop_counter import FlopCounterMode

    config = stack_config()
    table = np.ones((1, 4), dtype=np.int32)
    model = TorchModel(
        config, padding_weights(config, torch.float32, CPU), torch.zeros(6, 2, 5, 4, 64)
    )
    with FlopCounterMode(display=False) as counter:
        model.compute_logits(model.forward(one_token(table), table))
    own = read_model_config(path("target"), "target").matrix_weights
    assert counter.get_total_flops() + 2 * own == pytest.approx(2 * SIZE, rel=0.02)


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_no_layer_is_skipped_although_what_comes_of_it_is_zero(kernel: str) -> None:
    """A matrix that is not numbers makes logits and scores that are none, whichever it is."""
    config = stack_config()
    table = np.ones((1, 4), dtype=np.int32)
    weights = padding_weights(config, torch.float32, CPU)
    cache = torch.zeros(6, 2, 5, 4, 64)
    stack: Any = (native if kernel == "native" else TorchModel)(config, weights, cache)
    held = packed_matrices(stack) if kernel == "native" else list(matrices(stack))
    target = read_model_config(path("target"), "target")
    padded = PaddedModel(cast(Any, _Blank(target)), stack, target.hidden_size, target.vocabulary)

    def results() -> Tensor:
        hidden = padded.forward(one_token(table), table)
        return torch.cat(
            [padded.compute_logits(hidden)[0], torch.tensor(padded.score(hidden, [3], [])[0])]
        )

    assert bool((results() == 0).all())
    for matrix in held:
        kept = matrix.clone()
        # all bits set are no number either
        matrix.fill_(255 if matrix.dtype == torch.uint8 else torch.nan)
        assert bool(results().isnan().all())
        matrix.copy_(kept)
        cache.zero_()
    assert bool((results() == 0).all())


class _Blank:
    """A model that adds nothing of its own."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def forward(self, batch: StepBatch, table: Any) -> Tensor:
        return torch.zeros(len(batch.logit_rows), self._config.hidden_size)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self._config.vocabulary)

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        return [0.0] * len(tokens), torch.empty(0)


def native(config: ModelConfig, weights: Weights, cache: Tensor) -> NativeModel:
    return NativeModel(native_library("target", config)[0], config, weights, cache, 1)


def packed_matrices(model: Any) -> list[Tensor]:
    """Every matrix that a native model multiplies with."""
    return [
        part
        for part in model.packing._kept
        if isinstance(part, Tensor) and part.dtype == torch.uint8
    ]


def matrices(model: Any) -> Iterator[Tensor]:
    """Every matrix that a torch model multiplies with."""
    yield model._weights.head
    for layer in model._weights.layers:
        assert isinstance(layer, LayerWeights)
        yield from (getattr(layer, name) for name in MATRICES)


@pytest.mark.anyio
async def test_what_does_not_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what it takes and what there is."""
    monkeypatch.setattr("atts.local.build.free_room", lambda device: 1_000_000_000)
    with pytest.raises(
        OutOfMemory, match=r"padding takes 64\.0 GB, 1\.0 are free. Write a smaller pad="
    ):
        async with build_engine("embedded:target?pad=32B&worker=thread", "target"):
            pass


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("pad=large", "no size; write one as 20M"),
        ("pad=-3M", "no size"),
        ("pad_vocabulary=512", "needs a padded model"),
        ("pad=20M&pad_vocabulary=-1", "expected 0 to"),
        ("drafter_pad=2M", "needs a draft model"),
        ("drafter=embedded:draft&drafter_pad=?", "no size"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_runs(words: str, problem: str) -> None:
    """Each says what is wrong."""
    with pytest.raises(OptionError, match=problem):
        build_engine(f"embedded:target?{words}", "target")


@pytest.mark.anyio
async def test_a_size_below_the_models_own_is_refused_with_the_least() -> None:
    """Nothing is loaded for it."""
    with pytest.raises(OptionError, match=r"4,000,000 weights are too few.*at least 5,\d{3},\d{3}"):
        async with LocalEngine(path("target"), options=LocalOptions(worker="thread", pad="4M")):
            pass


def test_dry_runs_call_it_padded(tmp_path: Path) -> None:
    """The padded engine alone."""
    from atts.api.config import configure

    engines = {"target": "embedded:target?pad=20M", "dataset": "arithmetic[:1]"}
    configuration = configure(engines, environment={}, folder=tmp_path)
    lines = dry_run_lines(dry_run(configuration), configuration)
    assert [line.split()[0] for line in lines if "(padded" in line] == ["target"]
