"""Tests that each architecture agrees at 600 tokens with transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from atts.core import SampleRequest, Sampling, ScoreRequest
from atts.local import LocalEngine, LocalOptions

from .conftest import Naive

Make = Callable[..., Path]
LENGTH = 600
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.5 + 0.5 * index for index in range(8)],
    "original_max_position_embeddings": 256,
}
PARTLY = {
    **LONG,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.1] * 6,
    "long_factor": [2.0] * 6,
}
GEMMA = {"query_pre_attn_scalar": 24, "pad_token_id": None, "tie_word_embeddings": True}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with a window": ("mistral", {"sliding_window": 96}),
    "Qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    ),
    "Gemma 2": (
        "gemma2",
        {
            **GEMMA,
            "sliding_window": 64,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "Gemma 2 uncapped": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "Gemma 3": ("gemma3_text", {**GEMMA, "sliding_window": 50, "layer_types": WINDOWS}),
    "Gemma 3 scaled": (
        "gemma3_text",
        {
            **GEMMA,
            "sliding_window": 50,
            "layer_types": WINDOWS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Phi-3": ("phi3", {"pad_token_id": None, "sliding_window": 120}),
    "Phi-3 long": ("phi3", {"pad_token_id": None, "rope_parameters": LONG}),
    "Phi-3 long, begun": (
        "phi3",
        {"pad_token_id": None, "rope_parameters": LONG | {"original_max_position_embeddings": 900}},
    ),
    "Phi-4 mini": (
        "phi3",
        {"pad_token_id": None, "rope_parameters": PARTLY, "tie_word_embeddings": True},
    ),
    "Phi-4": (
        "phi3",
        {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 25e4}},
    ),
    "OLMo-2": ("olmo2", {"pad_token_id": None}),
    "SmolLM3": (
        "smollm3",
        {"pad_token_id": None, "no_rope_layers": [1, 0, 1], "attention_bias": True},
    ),
    "SmolLM3 with windows": (
        "smollm3",
        {
            "pad_token_id": None,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 77,
        },
    ),
}
ON_TORCH = {"gemma2", "gemma3_text", "olmo2"}


ALWAYS = (
    "Mistral with a window",
    "Gemma 2",
    "Gemma 3",
    "Phi-4 mini",
    "OLMo-2",
    "SmolLM3 with windows",
)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        pytest.param(
            case, kernel, marks=[] if case in ALWAYS and kernel == "auto" else [pytest.mark.slow]
        )
        for case in CASES
        for kernel in ("torch", "auto")
    ],
)
def test_logits_of_each_architecture_equal_transformers(
    case: str, kernel: Literal["torch", "auto"], make_model: Make, naive: Callable[..., Naive]
) -> None:
    """The logits equal those of transformers whether the model reads a text at once, in chunks,
    after a cached prefix, or token by token.
    """
    family, changes = CASES[case]
    folder = make_model(
        family, **{"max_position_embeddings": 1024, "initializer_range": 0.15, **changes}
    )
    ids = tuple((index * index + 7 * index) % 300 + 3 for index in range(LENGTH))
    wanted = naive(folder).scores(ids[:5], ids[5:])

    async def scored(chunk: int) -> tuple[float, ...]:
        options = LocalOptions(
            worker="thread", kernel=kernel, kv_tokens=4096, chunk_tokens=chunk, threads=1
        )
        async with LocalEngine(folder, options=options) as engine:
            assert ("native" in engine.kernel) == (kernel == "auto" and family not in ON_TORCH)
            if chunk > LENGTH:
                whole = await engine.score(ScoreRequest(ids[:5], ids[5:]))
                greedy = Sampling(temperature=0.0)
                drawn = await engine.sample(SampleRequest(ids, 12, greedy))
                assert naive(folder).agrees(ids, drawn.ids, gap=1e-3)
                return whole.logprobs
            first = await engine.score(ScoreRequest(ids[:5], ids[5:400]))
            rest = await engine.score(ScoreRequest(ids[:400], ids[400:]))
            assert rest.cached_tokens >= 399 or "long" in case
            return first.logprobs + rest.logprobs

    at_once = anyio.run(scored, 1024)
    in_parts = anyio.run(scored, 100)
    assert max(abs(ours - theirs) for ours, theirs in zip(at_once, wanted, strict=True)) < 1e-4
    # the frequencies of a "long" rope depend on the request's length, so scores of a text in two
    # requests differ from scores in one
    if "long" not in case:
        assert max(abs(ours - theirs) for ours, theirs in zip(in_parts, wanted, strict=True)) < 1e-4
