"""Says what a run cost: tokens by model and kind, arithmetic, time and its quantiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from scipy import stats

from atts.core import Usage
from atts.errors import OptionError
from atts.evaluators.metrics.intervals import Estimate, check_level, undefined_estimate


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that its arithmetic depends on; `experts_per_token` 0 means a dense model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False  # input and output embeddings are one matrix
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0  # of experts that every token visits

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the contents of a Llama, Qwen or Mixtral style `config.json`; raises OptionError for a missing size."""
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        family = str(config.get("model_type", ""))
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        wide = "moe_intermediate_size" if experts and config.get("moe_intermediate_size") else "intermediate_size"
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=_size(config, wide),
            vocabulary=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", family.startswith("qwen2"))),
            qk_norm=family.startswith("qwen3"),
            experts=experts,
            experts_per_token=_size(config, "num_experts_per_tok") if experts else 0,
            shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0),
        )

    @property
    def parameters(self) -> int:
        """All weights."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        mlp = max(1, self.experts) * self._expert() + self._routing()
        return embeddings + self.hidden + self.layers * (self._attention() + self._vectors() + mlp)

    @property
    def active_parameters(self) -> int:
        """Weights of the matrices that one token is multiplied with, the output head among them."""
        mlp = max(1, self.experts_per_token) * self._expert() + self._routing()
        return self.layers * (self._attention() + mlp) + self.vocabulary * self.hidden

    def decode_flops(self, context: float) -> float:
        """Of one token that sees `context` tokens: 2 per weight, 4 per head dimension, layer and token seen."""
        return 2.0 * self.active_parameters + 4.0 * self.layers * self.heads * self.head_dim * context

    def _attention(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def _expert(self) -> int:
        return 3 * self.hidden * self.intermediate

    def _routing(self) -> int:
        shared = 3 * self.hidden * self.shared_intermediate + (self.hidden if self.shared_intermediate else 0)
        return (self.hidden * self.experts if self.experts else 0) + shared

    def _vectors(self) -> int:
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return 2 * self.hidden + bias + (2 * self.head_dim if self.qk_norm else 0)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run, or one problem, cost; arithmetic is None where a model's shape is not known."""

    usage: Usage
    problems: int
    correct: float  # problems answered right, for costs per right answer
    draft_flops: float | None
    target_flops: float | None
    wall_seconds: float | None

    @property
    def sampled_tokens(self) -> int:
        """Tokens written by either model."""
        return self.usage.draft_tokens + self.usage.target_tokens

    @property
    def target_share(self) -> float:
        """The target's share of the tokens written; NaN where none were."""
        return self.usage.target_tokens / self.sampled_tokens if self.sampled_tokens else math.nan

    @property
    def flops(self) -> float | None:
        """Of both models."""
        return None if self.draft_flops is None or self.target_flops is None else self.draft_flops + self.target_flops

    @property
    def tokens_per_correct(self) -> float:
        """Tokens written per right answer; infinite without one."""
        return self.sampled_tokens / self.correct if self.correct else math.inf

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens written per second of wall time."""
        return self.sampled_tokens / self.wall_seconds if self.wall_seconds else None

    def __str__(self) -> str:
        usage = self.usage
        words = [
            f"draft {usage.draft_tokens:,} tokens (+ {usage.draft_prefill_tokens:,} prompt)",
            f"target {usage.target_tokens:,} tokens (+ {usage.target_prefill_tokens:,} prompt)",
            f"{usage.scored_tokens:,} scored",
            f"wasted {usage.wasted_tokens:,}",
            f"{usage.calls:,} calls",
        ]
        if self.flops is not None:
            words.append(f"{self.flops:.3g} FLOPs")
        if self.wall_seconds is not None:
            words.append(f"{self.wall_seconds:,.1f} s")
        return "; ".join(words)

    def as_json(self) -> dict[str, object]:
        """Fields and derived numbers; what is not finite becomes None."""
        numbers: dict[str, object] = {
            **asdict(self.usage),
            "problems": self.problems,
            "correct": self.correct,
            "draft_flops": self.draft_flops,
            "target_flops": self.target_flops,
            "flops": self.flops,
            "wall_seconds": self.wall_seconds,
            "target_share": self.target_share,
            "tokens_per_correct": self.tokens_per_correct,
            "tokens_per_second": self.tokens_per_second,
        }
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Durations in seconds: the mean and quantiles, each quantile with its own interval."""

    count: int
    mean: float
    quantiles: Mapping[float, Estimate]
    longest: float

    def __str__(self) -> str:
        parts = [f"p{q * 100:g} {e.value:.3g} s [{e.low:.3g}, {e.high:.3g}]" for q, e in self.quantiles.items()]
        return f"{self.count:,} durations: mean {self.mean:.3g} s, {', '.join(parts)}, longest {self.longest:.3g} s"


def cost(
    usage: Usage,
    *,
    draft: ModelShape | float | None = None,
    target: ModelShape | float | None = None,
    context: float = 0.0,
    problems: int = 1,
    correct: float = 0.0,
    wall_seconds: float | None = None,
) -> Cost:
    """Tokens and arithmetic of a run; a model is its shape, or its FLOPs per token when that is all one knows.

    `context` is the mean number of tokens that a token sees. Sampled, scored and prompt tokens each count once, and
    tokens found in a cache not at all.
    """
    return Cost(
        usage,
        problems,
        correct,
        _flops(draft, usage.draft_tokens + usage.draft_prefill_tokens, context),
        _flops(target, usage.target_tokens + usage.scored_tokens + usage.target_prefill_tokens, context),
        wall_seconds,
    )


def latency(
    seconds: Sequence[float], quantiles: Sequence[float] = (0.5, 0.9, 0.99), *, level: float = 0.95
) -> LatencySummary:
    """Quantiles by linear interpolation; their intervals by order statistics, right for any law of independent draws.

    An end that too few durations reach is infinite (or 0). Raises OptionError for a negative duration.
    """
    check_level(level)
    array = np.sort(np.asarray(seconds, dtype=np.float64))
    if array.size and not (np.isfinite(array).all() and array[0] >= 0):
        raise OptionError("seconds", "a duration is negative or not finite")
    if any(not 0 < q < 1 for q in quantiles):
        raise OptionError("quantiles", f"{list(quantiles)} are not all between 0 and 1")
    mean, longest = (float(array.mean()), float(array[-1])) if array.size else (math.nan, math.nan)
    found = {q: _quantile(array, q, level) for q in quantiles}
    return LatencySummary(array.size, mean, found, longest)


def _quantile(ordered: np.ndarray[Any, np.dtype[np.float64]], q: float, level: float) -> Estimate:
    n = ordered.size
    if n == 0:
        return undefined_estimate(0, 0, level, "no durations")
    below = int(stats.binom.ppf((1 - level) / 2, n, q))  # P(fewer than this many are under the quantile) is small
    above = int(stats.binom.ppf((1 + level) / 2, n, q)) + 1
    low = float(ordered[below - 1]) if below >= 1 else 0.0
    high = float(ordered[above - 1]) if above <= n else math.inf
    return Estimate(
        float(np.quantile(ordered, q)), low, high, n_problems=n, n_samples=n, method="order statistics", level=level
    )


def _flops(model: ModelShape | float | None, tokens: int, context: float) -> float | None:
    if model is None:
        return None
    return tokens * (model.decode_flops(context) if isinstance(model, ModelShape) else float(model))


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise OptionError("config", f"{name} is {value!r}, not a size", cast(Sequence[str], [*config]))
    return value
