"""From logits to tokens: the pure functions every engine of ours draws and scores with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atts.core import Sampling


@dataclass(frozen=True, slots=True)
class Laws:
    """The sampling settings of a batch, one entry a row; a filter no row uses is None and costs nothing."""

    temperature: Tensor  # [batch] float64; 0 is greedy
    top_k: Tensor | None = None  # [batch] int64; the vocabulary's size where a row has no limit
    top_p: Tensor | None = None  # [batch] float64
    min_p: Tensor | None = None  # [batch] float64
    is_greedy: bool = False  # every row is


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row, its log-probability under the raw law, and whether that row's logits held a NaN."""

    tokens: Tensor  # [batch] int64
    logprobs: Tensor  # [batch] float32


def batch_laws(settings: Sequence[Sampling], vocabulary: int, device: torch.device | None = None) -> Laws:
    """One `Laws` for rows that may each have their own settings."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    temperatures = [law.temperature for law in settings]
    is_greedy = not any(temperatures)
    limits = [float(law.top_k if 0 < law.top_k < vocabulary else vocabulary) for law in settings]
    return Laws(
        temperature=column(temperatures, torch.float64),
        top_k=column(limits, torch.int64) if min(limits, default=vocabulary) < vocabulary else None,
        top_p=column([law.top_p for law in settings], torch.float64) if any(s.top_p < 1 for s in settings) else None,
        min_p=column([law.min_p for law in settings], torch.float64) if any(s.min_p > 0 for s in settings) else None,
        is_greedy=is_greedy,
    )


def raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each row's token at temperature 1, nothing dropped; NaN where a row holds a NaN.

    >>> raw_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """
    logits = logits.float()
    picked = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(-1)


def probabilities(logits: Tensor, laws: Laws) -> Tensor:
    """The law tokens are drawn from: temperature, then top-k, then top-p of what is left, then min-p.

    [batch, vocabulary] float64, rows sum to 1; a token tied with the last one kept by top-k is kept too. A greedy row
    (temperature 0) has all its mass on the first of its best tokens.
    """
    greedy = laws.temperature <= 0
    scale = torch.where(greedy, 1.0, laws.temperature)
    scaled = logits.double() / scale.unsqueeze(-1)
    if laws.top_k is not None:
        ordered = scaled.sort(-1, descending=True).values
        scaled = scaled.masked_fill(scaled < ordered.gather(-1, laws.top_k.unsqueeze(-1) - 1), -torch.inf)
    if laws.top_p is not None:
        scaled = _nucleus(scaled, laws.top_p)
    law = scaled.softmax(-1)
    if laws.min_p is not None:
        law = law.masked_fill(law < laws.min_p.unsqueeze(-1) * law.amax(-1, keepdim=True), 0.0)
        law = law / law.sum(-1, keepdim=True)
    if laws.is_greedy or bool(greedy.any()):
        best = torch.zeros_like(law).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        law = torch.where(greedy.unsqueeze(-1), best, law)
    return law


def inverse_cdf(law: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's cumulated law passes its uniform: a monotone, schedule-free draw.

    >>> inverse_cdf(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.5])).item()
    2
    """
    total = law.cumsum(-1, dtype=torch.float64)
    wanted = uniforms.to(total).unsqueeze(-1) * total[..., -1:]
    # side "right" steps over tokens of no mass; the clamp guards the rounding of a uniform just below 1
    last = law.shape[-1] - 1 - (law > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(total, wanted, right=True), last).squeeze(-1)


def sample(logits: Tensor, laws: Laws, uniforms: Tensor) -> Drawn:
    """Draw one token a row with the given uniforms; greedy rows ignore theirs."""
    tokens = logits.argmax(-1) if laws.is_greedy else inverse_cdf(probabilities(logits, laws), uniforms)
    return Drawn(tokens, raw_logprobs(logits, tokens))


def _nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Drop what lies beyond the smallest set of best tokens whose mass reaches `top_p`."""
    values, order = scaled.sort(stable=True, dim=-1, descending=True)
    law = values.softmax(-1)
    before = law.cumsum(-1) - law
    dropped = before >= top_p.unsqueeze(-1)
    dropped[..., 0] = False
    return scaled.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), -torch.inf)
