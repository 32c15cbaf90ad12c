"""The forward pass in torch: batched, over cached keys and values, on any device and dtype; the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atts.decode import SampledTokens, SamplingBatch, raw_logprobs, sample
from atts.local.allocator import SlotIds
from atts.local.batch import Ints, StepBatch
from atts.local.loader import LayerWeights, Weights
from atts.local.model_config import ModelConfig

_SCORED_LOGITS = 1 << 25
"""Most logits made at once for scoring: a bound on memory where vocabularies are large."""


class TorchModel:
    """Runs steps with torch; `cache` is [layers, 2, slots, kv_heads, head_dim] and slot 0 is never written."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: Tensor) -> None:
        self._config, self._cache, self._device = config, cache, cache.device
        self._weights = replace(weights, layers=tuple(_interleaved(layer, config) for layer in weights.layers))
        self._rotations = _rotations(config, weights).to(self._device)

    @property
    def device_name(self) -> str:
        """Where it computes."""
        return str(self._device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`: [logits, hidden_size]."""
        size, eps = (self._config.hidden_size,), self._config.norm_eps
        attention = _BatchAttention(batch, table, self._device)
        slots = self._ints(batch.slots)
        rotations = self._rotations[self._ints(batch.positions)].unsqueeze(1)  # [tokens, 1, head_dim / 2]
        logit_rows = self._ints(batch.logit_rows)
        x = self._weights.embedding[self._ints(batch.tokens)]
        for index, layer in enumerate(self._weights.layers):
            qkv = F.linear(F.rms_norm(x, size, layer.norm, eps), layer.qkv, layer.qkv_bias)
            query, key, value = self._split(qkv, layer, rotations)
            keys, values = self._cache[index, 0], self._cache[index, 1]
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)
            attended = attention(query, keys, values)
            if index == self._config.num_layers - 1:  # only these tokens go on from here
                x, attended = x[logit_rows], attended[logit_rows]
            x = x + F.linear(attended, layer.out, layer.out_bias)
            gate_up = F.linear(F.rms_norm(x, size, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return F.rms_norm(x, size, self._weights.norm, eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Their logits: [logits, vocabulary] float32."""
        return F.linear(hidden, self._weights.head).float()

    @torch.inference_mode()
    def sample(self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]) -> SampledTokens:
        """One token a row."""
        return sample(logits, sampling, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Each row's token under the raw distribution."""
        values: list[float] = raw_logprobs(logits, torch.tensor(tokens, device=logits.device)).tolist()
        return values

    @torch.inference_mode()
    def score(self, hidden: Tensor, tokens: list[int], kept_rows: list[int]) -> tuple[list[float], Tensor]:
        """One log-probability a row, and the logits of some."""
        values: list[float] = []
        kept = torch.empty(len(kept_rows), self._config.vocabulary, device=self._device)
        size = max(1, _SCORED_LOGITS // self._config.vocabulary)
        for at in range(0, len(tokens), size):
            logits = self.compute_logits(hidden[at : at + size])
            values += self.logprobs(logits, tokens[at : at + size])
            for index, row in enumerate(kept_rows):
                if at <= row < at + size:
                    kept[index] = logits[row - at]
        return values, kept

    def _ints(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _split(self, qkv: Tensor, layer: LayerWeights, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each token, [tokens, heads, head_dim]; queries and keys rotated to their position."""
        config = self._config
        rows = qkv.view(len(qkv), -1, config.head_dim)
        query, key, value = torch.split(rows, [config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        if layer.query_norm is not None:
            query = F.rms_norm(query, (config.head_dim,), layer.query_norm, config.norm_eps)
            key = F.rms_norm(key, (config.head_dim,), layer.key_norm, config.norm_eps)
        return apply_rope(query, rotations), apply_rope(key, rotations), value


def _rotations(config: ModelConfig, weights: Weights) -> Tensor:
    """The rotary embedding as unit complex numbers, [context, head_dim / 2]."""
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), weights.rope_frequencies)
    return torch.polar(torch.full_like(angles, weights.rope_scale), angles)


def apply_rope(rows: Tensor, rotations: Tensor) -> Tensor:
    """The rotary embedding: neighbouring pairs as complex numbers, multiplied, one operation instead of six."""
    pairs = torch.view_as_complex(rows.float().reshape(*rows.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(rows.dtype)


def _interleaved(layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    """Reorder query and key features so that the two halves transformers rotates together become neighbours."""
    half = config.head_dim // 2
    order = torch.arange(config.head_dim).view(2, half).t().flatten()
    rotated = (torch.arange(config.num_heads + config.num_kv_heads)[:, None] * config.head_dim + order).flatten()
    kept = torch.arange(len(rotated), len(layer.qkv))
    rows = torch.cat([rotated, kept]).to(layer.qkv.device)
    order = order.to(layer.qkv.device)
    return replace(
        layer,
        qkv=layer.qkv[rows],
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias[rows],
        query_norm=None if layer.query_norm is None else layer.query_norm[order],
        key_norm=None if layer.key_norm is None else layer.key_norm[order],
    )


class _BatchAttention:
    """Attention of one batch: which slots each query may read is worked out once for all layers."""

    def __init__(self, batch: StepBatch, table: SlotIds, device: torch.device) -> None:
        self._num_single = batch.num_single
        starts = batch.query_starts[batch.num_single :].tolist()
        self._spans = list(zip(starts[:-1], starts[1:], strict=True))
        index, mask = _padded(batch, table)
        self._index = torch.from_numpy(index).to(device)
        self._mask = None if mask is None else torch.from_numpy(mask).to(device)[:, None, None, :]
        first = batch.num_single
        self._slots = [
            torch.from_numpy(table[row, :length].astype(np.int64)).to(device)
            for row, length in zip(batch.table_rows[first:], batch.context_lens[first:], strict=True)
        ]
        lengths = batch.context_lens[first:].tolist()
        spans = zip(self._spans, lengths, strict=True)
        self._masks = [_causal_mask(stop - start, length, device) for (start, stop), length in spans]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads * head_dim] of [tokens, heads, head_dim] queries over [slots, kv_heads, head_dim]."""
        is_grouped = query.shape[1] != keys.shape[1]
        outs: list[Tensor] = []
        if self._num_single:
            size = (*self._index.shape, *keys.shape[1:])
            flat = self._index.flatten()
            k = keys.index_select(0, flat).view(size).transpose(1, 2)
            v = values.index_select(0, flat).view(size).transpose(1, 2)
            q = query[: self._num_single].unsqueeze(2)  # [batch, heads, 1, head_dim]
            outs.append(F.scaled_dot_product_attention(q, k, v, self._mask, enable_gqa=is_grouped).flatten(1))
        for (start, stop), slots, mask in zip(self._spans, self._slots, self._masks, strict=True):
            k = keys.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            v = values.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            q = query[start:stop].transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=is_grouped)
            outs.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _padded(batch: StepBatch, table: SlotIds) -> tuple[Ints, np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None]:
    """Slots of the single-token sequences side by side; beyond a sequence's end stands slot 0, which holds zeros."""
    count = batch.num_single
    lengths = batch.context_lens[:count]
    longest = int(lengths.max()) if count else 0
    index = table[batch.table_rows[:count], :longest].astype(np.int64)
    inside = np.arange(longest) < lengths[:, None]
    if inside.all():
        return index, None
    return np.where(inside, index, 0), inside


def _causal_mask(queries: int, length: int, device: torch.device) -> Tensor | None:
    if queries == 1:
        return None
    return torch.ones(queries, length, dtype=torch.bool, device=device).tril_(length - queries)
