"""Pure functions that sample tokens from logits and compute log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atts.core import Sampling


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling settings of a batch, one entry per row. A filter (top-k, top-p or min-p) that no
    row uses is None, so it costs no time.
    """

    temperature: Tensor  # shape [batch], in float64; 0 means greedy
    # shape [batch], in int64; equal to the vocabulary's size for a row without top-k
    top_k: Tensor | None = None
    top_p: Tensor | None = None  # shape [batch], in float64
    min_p: Tensor | None = None  # shape [batch], in float64
    is_greedy: bool = False  # whether every row is greedy
    # whether any row is greedy; stored here, because reading it from the device would take time
    has_greedy: bool = False
    most_kept: int = 0  # the largest top-k of the rows; 0 if no row uses top-k


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, with its log-probability at temperature 1 without filters. The
    log-probability is NaN if the row's logits contain NaN.
    """

    tokens: Tensor  # shape [batch], in int64
    logprobs: Tensor  # shape [batch], in float32

    def lists(self) -> tuple[list[int], list[float]]:
        """Return the tokens and the log-probabilities as lists, with a single copy from the device
        for both.
        """
        if self.tokens.is_cpu:
            return self.tokens.tolist(), self.logprobs.tolist()
        tokens, logprobs = torch.stack([self.tokens.double(), self.logprobs.double()]).tolist()
        return [int(token) for token in tokens], logprobs


def batch_sampling(
    settings: Sequence[Sampling], vocabulary: int, device: torch.device | None = None
) -> SamplingBatch:
    """Return these sampling settings as tensors, with one row for each entry of `settings`."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        made = torch.tensor(values, dtype=dtype)
        # With `non_blocking`, this function does not wait until the copy to the device has
        # finished.
        return made if device is None else made.to(device, non_blocking=True)

    temperatures = [row.temperature for row in settings]
    limits = [float(row.top_k if 0 < row.top_k < vocabulary else vocabulary) for row in settings]
    kept = [int(limit) for limit in limits if limit < vocabulary]
    return SamplingBatch(
        temperature=column(temperatures, torch.float64),
        top_k=column(limits, torch.int64) if min(limits, default=vocabulary) < vocabulary else None,
        top_p=column([row.top_p for row in settings], torch.float64)
        if any(r.top_p < 1 for r in settings)
        else None,
        min_p=column([row.min_p for row in settings], torch.float64)
        if any(r.min_p > 0 for r in settings)
        else None,
        is_greedy=not any(temperatures),
        has_greedy=not all(temperatures),
        most_kept=max(kept, default=0),
    )


def first_rows(sampling: SamplingBatch, count: int) -> SamplingBatch:
    """Return the settings of the first `count` rows."""
    if count == len(sampling.temperature):
        return sampling
    top_k, top_p, min_p = (
        None if column is None else column[:count]
        for column in (sampling.top_k, sampling.top_p, sampling.min_p)
    )
    return replace(
        sampling, temperature=sampling.temperature[:count], top_k=top_k, top_p=top_p, min_p=min_p
    )


def spread_rows(sampling: SamplingBatch, rows: Tensor) -> SamplingBatch:
    """Return the settings of the rows with these indices; an index may occur several times."""

    def picked(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[rows.to(column.device)]

    temperature = sampling.temperature[rows.to(sampling.temperature.device)]
    top_k = picked(sampling.top_k)
    top_p = picked(sampling.top_p)
    min_p = picked(sampling.min_p)
    return replace(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def filtered_rows(sampling: SamplingBatch, vocabulary: int) -> Tensor | None:
    """Return a mask of the rows that use top-k, top-p or min-p; None if the batch has no such
    filter.
    """
    masks = [
        *([sampling.top_k < vocabulary] if sampling.top_k is not None else []),
        *([sampling.top_p < 1] if sampling.top_p is not None else []),
        *([sampling.min_p > 0] if sampling.min_p is not None else []),
    ]
    return torch.stack(masks).any(0) if masks else None


def raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each row's token at temperature 1 without filters; NaN if the
    row's logits contain NaN.

    >>> raw_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """
    logits = logits.float()
    picked = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(-1)


def negative_entropies(logits: Tensor) -> Tensor:
    """Return the negative entropy, in nats, of each row's distribution at temperature 1 without
    filters. It is NaN if the row's logits contain NaN.

    >>> round(negative_entropies(torch.zeros(1, 4)).exp().item(), 6)
    0.25
    """
    logprobs = logits.double().log_softmax(-1)
    # A token of probability 0 adds 0 to the entropy. The product alone would be NaN, because the
    # log-probability is minus infinity.
    masses = logprobs.exp()
    return torch.where(masses == 0, 0.0, masses * logprobs).sum(-1).float()


def probabilities(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return the probability of sampling each token, after temperature, top-k, top-p and min-p.

    The result is [batch, vocabulary] in float64, and its rows sum to 1. Top-k also keeps all tokens
    that are as likely as the k-th best token. In a greedy row (temperature 0), the most likely
    token has probability 1; in a tie, this is the first of the tied tokens.
    """
    greedy = sampling.temperature <= 0
    scale = torch.where(greedy, 1.0, sampling.temperature)
    scaled = logits.double() / scale.unsqueeze(-1)
    if sampling.top_k is not None:
        is_dropped = _beyond_top_k(scaled, sampling.top_k, sampling.most_kept)
        scaled = scaled.masked_fill(is_dropped, -torch.inf)
        logits = logits.masked_fill(is_dropped, -torch.inf)
    if sampling.top_p is not None:
        scaled = _nucleus(scaled, logits, sampling.top_p)
    probs = scaled.softmax(-1)
    if sampling.min_p is not None:
        probs = probs.masked_fill(
            probs < sampling.min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True), 0.0
        )
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.has_greedy:
        best = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(greedy.unsqueeze(-1), best, probs)
    return probs


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Choose in each row the first token at which the cumulative probability exceeds the row's
    uniform random number.

    >>> inverse_cdf(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.5])).item()
    2
    """
    total = probs.cumsum(-1, dtype=torch.float64)
    wanted = uniforms.to(total).unsqueeze(-1) * total[..., -1:]
    # With `right=True`, the search skips tokens of probability 0. If a rounding error places the
    # result past the last possible token, `minimum` returns the last possible token.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(total, wanted, right=True), last).squeeze(-1)


def sample(logits: Tensor, sampling: SamplingBatch, uniforms: Tensor) -> SampledTokens:
    """Sample one token per row with the row's uniform random number. Greedy rows ignore this
    number.
    """
    tokens = (
        logits.argmax(-1)
        if sampling.is_greedy
        else inverse_cdf(probabilities(logits, sampling), uniforms)
    )
    return SampledTokens(tokens, raw_logprobs(logits, tokens))


def _beyond_top_k(scaled: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Return a mask of the tokens that top-k drops: those that are less likely than the row's
    `top_k` best tokens. `most` is the largest top-k of all rows.

    Only the `most` best tokens of a row are sorted, not the whole vocabulary.
    """
    vocabulary = scaled.shape[-1]
    best = scaled.topk(most or vocabulary, dim=-1).values
    place = (top_k - 1).clamp(max=best.shape[-1] - 1).unsqueeze(-1)
    is_limited = (top_k < vocabulary).unsqueeze(-1)
    return is_limited & (scaled < best.gather(-1, place))


def _nucleus(scaled: Tensor, logits: Tensor, top_p: Tensor) -> Tensor:
    """Drop all tokens outside the nucleus: the smallest set of the most likely tokens whose
    probabilities sum to at least `top_p`.

    Temperature does not change the order within a row, so the unscaled logits are sorted. Sorting
    logits in float32 moves half as many bytes as sorting the scaled values in float64. It gives the
    same order, including ties.
    """
    order = logits.sort(stable=True, dim=-1, descending=True).indices
    values = scaled.gather(-1, order)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    dropped = before >= top_p.unsqueeze(-1)
    dropped[..., 0] = False
    return scaled.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), -torch.inf)
