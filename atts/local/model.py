"""The reference forward: batched, over cached keys and values, in torch operations any device and dtype can run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atts.decode import Drawn, Laws, raw_logprobs, sample
from atts.local.batch import Ints, Slots, StepBatch
from atts.local.loader import LayerWeights, Weights
from atts.local.shape import Shape

_SCORED_LOGITS = 1 << 25
"""Most logits made at once for scoring: a bound on memory where vocabularies are large."""


class TorchModel:
    """Runs steps with torch; `cache` is [layers, 2, slots, kv_heads, head_dim] and slot 0 is never written."""

    def __init__(self, shape: Shape, weights: Weights, cache: Tensor) -> None:
        self._shape, self._cache = shape, cache
        self._device, self._dtype = cache.device, cache.dtype
        self._weights = replace(weights, layers=tuple(_paired(layer, shape) for layer in weights.layers))
        self._turns = _rotations(shape, weights).to(self._device)

    @property
    def device_name(self) -> str:
        """Where it computes."""
        return str(self._device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, table: Slots) -> Tensor:
        """The final, normed hidden states of the wanted tokens: [wanted, width]."""
        shape, eps = self._shape, self._shape.eps
        plan = _AttentionPlan(batch, table, self._device)
        slots = self._ints(batch.slots)
        turns = self._turns[self._ints(batch.positions)].unsqueeze(1)  # [tokens, 1, head_dim / 2]
        wanted = self._ints(batch.wanted)
        x = self._weights.embedding[self._ints(batch.tokens)]
        for index, layer in enumerate(self._weights.layers):
            qkv = F.linear(F.rms_norm(x, (shape.width,), layer.norm, eps), layer.qkv, layer.qkv_bias)
            query, key, value = self._split(qkv, layer, turns)
            keys, values = self._cache[index, 0], self._cache[index, 1]
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)
            mixed = plan.attend(query, keys, values)
            if index == shape.layers - 1:  # only the wanted tokens go on from here
                x, mixed = x[wanted], mixed[wanted]
            x = x + F.linear(mixed, layer.out, layer.out_bias)
            both = F.linear(F.rms_norm(x, (shape.width,), layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            gate, up = both.chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return F.rms_norm(x, (shape.width,), self._weights.norm, eps)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Their logits: [wanted, vocabulary] float32."""
        return F.linear(hidden, self._weights.head).float()

    @torch.inference_mode()
    def draw(self, logits: Tensor, laws: Laws, uniforms: list[float]) -> Drawn:
        """One token a row."""
        return sample(logits, laws, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Each row's token under the raw law."""
        values: list[float] = raw_logprobs(logits, torch.tensor(tokens, device=logits.device)).tolist()
        return values

    @torch.inference_mode()
    def score(self, hidden: Tensor, tokens: list[int], ends: list[int]) -> tuple[list[float], Tensor]:
        """One log-probability a row, and the logits of some."""
        values: list[float] = []
        kept = torch.empty(len(ends), self._shape.vocabulary, device=self._device)
        size = max(1, _SCORED_LOGITS // self._shape.vocabulary)
        for at in range(0, len(tokens), size):
            logits = self.head(hidden[at : at + size])
            values += self.logprobs(logits, tokens[at : at + size])
            for index, row in enumerate(ends):
                if at <= row < at + size:
                    kept[index] = logits[row - at]
        return values, kept

    def _ints(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _split(self, qkv: Tensor, layer: LayerWeights, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each token, [tokens, heads, head_dim]; queries and keys turned to their position."""
        shape = self._shape
        rows = qkv.view(len(qkv), -1, shape.head_dim)
        query, key, value = torch.split(rows, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if layer.query_norm is not None:
            query = F.rms_norm(query, (shape.head_dim,), layer.query_norm, shape.eps)
            key = F.rms_norm(key, (shape.head_dim,), layer.key_norm, shape.eps)
        return _turned(query, turns), _turned(key, turns), value


def _rotations(shape: Shape, weights: Weights) -> Tensor:
    """The rotary embedding as unit complex numbers, [context, head_dim / 2]."""
    angles = torch.outer(torch.arange(shape.context_length, dtype=torch.float32), weights.frequencies)
    return torch.polar(torch.full_like(angles, weights.rope_scale), angles)


def _turned(rows: Tensor, turns: Tensor) -> Tensor:
    """Neighbouring pairs as complex numbers, multiplied: one operation instead of six."""
    pairs = torch.view_as_complex(rows.float().reshape(*rows.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(rows.dtype)


def _paired(layer: LayerWeights, shape: Shape) -> LayerWeights:
    """Reorder query and key features so that the two halves transformers rotates together become neighbours."""
    half = shape.head_dim // 2
    order = torch.arange(shape.head_dim).view(2, half).t().flatten()
    turned = (torch.arange(shape.heads + shape.kv_heads)[:, None] * shape.head_dim + order).flatten()
    kept = torch.arange(len(turned), len(layer.qkv))
    rows = torch.cat([turned, kept]).to(layer.qkv.device)
    order = order.to(layer.qkv.device)
    return replace(
        layer,
        qkv=layer.qkv[rows],
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias[rows],
        query_norm=None if layer.query_norm is None else layer.query_norm[order],
        key_norm=None if layer.key_norm is None else layer.key_norm[order],
    )


class _AttentionPlan:
    """Which slots each query may read, worked out once a step for all layers."""

    def __init__(self, batch: StepBatch, table: Slots, device: torch.device) -> None:
        self._num_single = batch.num_single
        self._spans = _spans(batch)
        index, mask = _padded(batch, table)
        self._index = torch.from_numpy(index).to(device)
        self._mask = None if mask is None else torch.from_numpy(mask).to(device)[:, None, None, :]
        first = batch.num_single
        self._slots = [
            torch.from_numpy(table[row, :length].astype(np.int64)).to(device)
            for row, length in zip(batch.rows[first:], batch.lengths[first:], strict=True)
        ]
        lengths = batch.lengths[first:].tolist()
        self._masks = [_causal(stop - start, n, device) for (start, stop), n in zip(self._spans, lengths, strict=True)]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads * head_dim] of [tokens, heads, head_dim] queries over [slots, kv_heads, head_dim]."""
        is_grouped = query.shape[1] != keys.shape[1]
        parts: list[Tensor] = []
        if self._num_single:
            size = (*self._index.shape, *keys.shape[1:])
            flat = self._index.flatten()
            near = keys.index_select(0, flat).view(size).transpose(1, 2)
            told = values.index_select(0, flat).view(size).transpose(1, 2)
            front = query[: self._num_single].unsqueeze(2)  # [batch, heads, 1, head_dim]
            mixed = F.scaled_dot_product_attention(front, near, told, self._mask, enable_gqa=is_grouped)
            parts.append(mixed.flatten(1))
        for (start, stop), slots, mask in zip(self._spans, self._slots, self._masks, strict=True):
            near = keys.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            told = values.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            asked = query[start:stop].transpose(0, 1).unsqueeze(0)
            mixed = F.scaled_dot_product_attention(asked, near, told, mask, enable_gqa=is_grouped)
            parts.append(mixed.squeeze(0).transpose(0, 1).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spans(batch: StepBatch) -> list[tuple[int, int]]:
    starts = batch.starts[batch.num_single :].tolist()
    return list(zip(starts[:-1], starts[1:], strict=True))


def _padded(batch: StepBatch, table: Slots) -> tuple[Ints, np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None]:
    """Slots of the single-token sequences side by side; beyond a sequence's end stands slot 0, which holds zeros."""
    count = batch.num_single
    lengths = batch.lengths[:count]
    longest = int(lengths.max()) if count else 0
    index = table[batch.rows[:count], :longest].astype(np.int64)
    inside = np.arange(longest) < lengths[:, None]
    if inside.all():
        return index, None
    return np.where(inside, index, 0), inside


def _causal(queries: int, length: int, device: torch.device) -> Tensor | None:
    if queries == 1:
        return None
    return torch.ones(queries, length, dtype=torch.bool, device=device).tril_(length - queries)
