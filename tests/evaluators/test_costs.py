"""Costs are counted from what models are, not guessed."""

import json
import math
from typing import Any

import numpy as np
import pytest

from atts.core import Usage
from atts.errors import OptionError
from atts.evaluators.metrics.costs import ModelShape, cost, latency

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_8B, 8_030_261_248), (QWEN_05B, 494_032_768), (QWEN3_30B, 30_532_122_624)],
    ids=["Llama-3.1-8B", "Qwen2.5-0.5B", "Qwen3-30B-A3B"],
)
def test_parameters_are_those_published(config: dict[str, Any], parameters: int) -> None:
    """To the last weight: dense, biased and tied, and a mixture of experts."""
    assert ModelShape.from_config(config).parameters == parameters


def test_a_mixture_multiplies_with_its_active_experts_only() -> None:
    """About 3 of 30 billion weights."""
    assert ModelShape.from_config(QWEN3_30B).active_parameters == pytest.approx(3.04e9, rel=0.01)


@pytest.mark.slow
def test_parameters_and_arithmetic_are_a_real_models() -> None:
    """Against torch's own counter on a small Llama: weights exactly, a forward pass within its attention's rounding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    counter = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False)
    sizes = {**LLAMA_8B, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 300}
    config = transformers.LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2})
    config._attn_implementation = "eager"  # its matrix products are counted one by one
    model = transformers.LlamaForCausalLM(config)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    tokens = 48
    with torch.no_grad(), counter:
        model(torch.arange(tokens)[None] % 300)
    # eager attention computes the masked half too: tokens^2 instead of tokens * (tokens + 1) / 2 seen
    masked = 4.0 * shape.layers * shape.heads * shape.head_dim * (tokens * tokens - tokens * (tokens + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(
        sum(map(shape.decode_flops, range(1, tokens + 1))) + masked, rel=1e-3
    )


@pytest.mark.parametrize("broken", [{}, {**LLAMA_8B, "hidden_size": None}, {**LLAMA_8B, "vocab_size": "many"}])
def test_a_config_without_its_sizes_is_an_error(broken: dict[str, Any]) -> None:
    """Named; not zero FLOPs."""
    with pytest.raises(OptionError, match="not a size"):
        ModelShape.from_config(broken)


def test_costs_add_up_by_model_and_kind() -> None:
    """Every token once, with the model that computed it."""
    usage = Usage(100, 40, 300, 50, 70, 10, 9)
    found = cost(usage, draft=2.0, target=10.0, problems=4, correct=2, wall_seconds=7.0)
    assert (found.draft_flops, found.target_flops, found.flops) == (300.0, 4100.0, 4400.0)
    assert found.sampled_tokens == 140
    assert found.target_share == pytest.approx(40 / 140)
    assert found.tokens_per_correct == 70
    assert found.tokens_per_second == 20
    for part in (
        "draft 100 tokens",
        "target 40 tokens",
        "300 scored",
        "wasted 10",
        "9 calls",
        "4.4e+03 FLOPs",
        "7.0 s",
    ):
        assert part in str(found)


def test_what_is_not_known_is_not_zero() -> None:
    """No shape, no arithmetic; no answers, no price of one; JSON stays strict."""
    found = cost(Usage(draft_tokens=5), draft=ModelShape.from_config(QWEN_05B), context=100)
    assert found.draft_flops
    assert (found.target_flops, found.flops, found.tokens_per_second) == (None, None, None)
    assert math.isinf(found.tokens_per_correct)
    assert math.isnan(cost(Usage()).target_share)
    record = json.loads(json.dumps(cost(Usage()).as_json(), allow_nan=False))
    assert (record["flops"], record["tokens_per_correct"], record["target_share"]) == (None, None, None)


def test_context_costs_attention() -> None:
    """A token that sees more costs more, by 4 per layer, head dimension and token seen."""
    shape = ModelShape.from_config(LLAMA_8B)
    assert shape.decode_flops(1000) - shape.decode_flops(0) == 4 * 32 * 4096 * 1000
    assert shape.decode_flops(0) == 2 * shape.active_parameters


def test_quantiles_and_their_intervals() -> None:
    """Linear quantiles; the median's interval are the order statistics of a binomial."""
    found = latency(list(range(1, 101)))
    median = found.quantiles[0.5]
    assert (median.value, median.low, median.high) == (50.5, 40, 61)
    assert (found.mean, found.longest, found.count) == (50.5, 100, 100)
    assert math.isinf(found.quantiles[0.99].high)
    assert "p50 50.5 s [40, 61]" in str(found)


def test_quantile_intervals_cover_for_any_law() -> None:
    """At least nominal, also for heavy tails: 95 % of 90 % quantiles of 80 durations."""
    rng = np.random.default_rng(0)
    truth = 0.1 ** (-1 / 1.5)  # of a Pareto law with index 1.5
    hits = 0
    for _ in range(400):
        e = latency(((1 - rng.random(80)) ** (-1 / 1.5)).tolist()).quantiles[0.9]
        hits += e.low <= truth <= e.high
    assert 0.94 <= hits / 400 <= 1


def test_durations_that_cannot_be_are_errors() -> None:
    """Negative, NaN, infinite; none at all is undefined."""
    for bad in ([-1.0], [math.nan], [math.inf]):
        with pytest.raises(OptionError):
            latency(bad)
    with pytest.raises(OptionError):
        latency([1.0], quantiles=[1.0])
    assert math.isnan(latency([]).quantiles[0.5].value)
