"""Tests of scores=bfloat16: only the rows of scored texts are rounded before matrix products."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atts.api.engines import build_engine
from atts.concurrency import collect
from atts.core import Completion, SampleRequest, Sampling, ScoreRequest
from atts.errors import OptionError, UnsupportedByEngine
from atts.local import LocalEngine, LocalOptions
from atts.local.cpu.compiling import native_library
from atts.local.model_config import read_model_config
from atts.models import path
from atts.sampling import Seed

HERE = LocalOptions(worker="thread", kv_tokens=2048, threads=1, device="cpu")
TEXTS = [tuple(range(5 + 7 * n, 45 + 9 * n)) for n in range(6)]
needs_pairs = pytest.mark.skipif(
    not native_library("target", read_model_config(path("target"), "target"))[0].atts_has_pairs(),
    reason="this processor has no instructions that multiply bfloat16 numbers",
)


async def log_probs(
    words: str, options: LocalOptions = HERE, *, beside: bool = True
) -> list[float]:
    """Return the log-probabilities of the last tokens of all texts. If `beside` is true, one batch
    scores all texts, otherwise each text is scored alone.
    """

    async def score(engine: LocalEngine, ids: tuple[int, ...]) -> list[float]:
        return list((await engine.score(ScoreRequest(ids[:20], ids[20:]))).logprobs)

    async with build_engine(words, "target", options) as engine:
        assert isinstance(engine, LocalEngine)
        calls = [partial(score, engine, ids) for ids in TEXTS]
        found = await collect(calls) if beside else [await call() for call in calls]
    return [value for values in found for value in values]


@needs_pairs
@pytest.mark.anyio
async def test_scores_are_close_to_torch_with_rounded_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With scores=bfloat16, scores are close to those of torch in float32, and even closer to those
    of torch with inputs rounded to bfloat16.
    """
    exact = await log_probs("embedded:target")
    rounded = await log_probs("embedded:target?scores=bfloat16")

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.bfloat16().float(), weight.bfloat16().float(), bias)

    monkeypatch.setattr("atts.local.model.F", SimpleNamespace(**{**vars(F), "linear": linear}))
    oracle = await log_probs("embedded:target?kernel=torch")
    apart = [
        torch.tensor(one).sub(torch.tensor(other)).abs().mean().item()
        for one, other in ((rounded, oracle), (rounded, exact))
    ]
    # apart[0] would be 1.4 times apart[1] if the two roundings had independent errors
    assert apart[0] < 0.9 * apart[1]
    assert 0 < apart[1] < 0.02


@needs_pairs
@pytest.mark.anyio
async def test_scoring_texts_together_changes_no_score() -> None:
    """Scores do not depend on the batch or the number of threads, because each row is rounded by
    itself.
    """
    words = "embedded:target?scores=bfloat16"
    together = await log_probs(words)
    assert together == await log_probs(words, beside=False)
    assert together == await log_probs(f"{words}&threads=2")


@needs_pairs
@pytest.mark.anyio
async def test_sampled_rows_are_not_rounded() -> None:
    """Sampled tokens and their log-probabilities stay bit-identical even if another text is scored
    in the same steps.
    """
    found = list[object]()
    names = list[str]()
    answers = list[Completion]()
    for words in ("embedded:target", "embedded:target?scores=bfloat16"):
        async with build_engine(words, "target", HERE) as engine:
            asked = [SampleRequest((5, 9, 40 + n), 12, Sampling(0.9), Seed(n)) for n in range(4)]
            scored = [ScoreRequest(ids[:20], ids[20:]) for ids in TEXTS]
            async with anyio.create_task_group() as tasks:
                for one in scored:
                    tasks.start_soon(engine.score, one)
                answers = list(await collect([partial(engine.sample, one) for one in asked]))
            found.append([(answer.ids, answer.logprobs) for answer in answers])
            names.append(engine.spec.dtype)
    assert found[0] == found[1]
    assert names == ["float32", "float32, scores in bfloat16"]


def test_the_option_is_refused_without_rounding_support() -> None:
    """Torch kernels, other data types and models in stages refuse the option scores=bfloat16."""
    scored = LocalOptions(scores="bfloat16")
    for options in (
        replace(scored, kernel="torch"),
        replace(scored, dtype="bfloat16"),
    ):
        with pytest.raises(OptionError, match="scores"):
            options.check()
    with pytest.raises(OptionError, match="scores"):
        build_engine("embedded:target?stages=2&scores=bfloat16", "target")


@pytest.mark.anyio
async def test_a_processor_without_bfloat16_products_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """atts refuses the option on a processor without bfloat16 products, because it must not
    silently use other arithmetic.
    """
    library, trouble = native_library("target", read_model_config(path("target"), "target"))
    lesser = SimpleNamespace(atts_has_pairs=lambda: 0, atts_forward=library.atts_forward)
    monkeypatch.setattr("atts.local.builder.native_library", lambda *_: (lesser, trouble))
    with pytest.raises(UnsupportedByEngine, match="instructions that multiply bfloat16"):
        async with build_engine("embedded:target?scores=bfloat16", "target", HERE):
            pass
