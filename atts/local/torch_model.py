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
from atts.local.loader import LayerWeights, Rope, Weights
from atts.local.model_config import ModelConfig, rope_rows

_SCORED_LOGITS = 1 << 25
"""Most logits made at once for scoring: a bound on memory where vocabularies are large."""


class TorchModel:
    """Runs steps with torch; `cache` is [layers, 2, slots, kv_heads, head_dim] and slot 0 is never written."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: Tensor) -> None:
        self._config, self._cache, self._device = config, cache, cache.device
        self._weights = replace(weights, layers=tuple(_interleaved(layer, config) for layer in weights.layers))
        rows = rope_rows(config, cache.shape[2])
        self._rotations = {kind: _rotations(rope, rows).to(self._device) for kind, rope in weights.ropes.items()}

    @property
    def device_name(self) -> str:
        """Where it computes."""
        return str(self._device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """The final, normed hidden states of the batch's `logit_rows`: [logits, hidden_size]."""
        config, device, positions = self._config, self._device, self._ints(batch.positions)
        slots, logit_rows = self._ints(batch.slots), self._ints(batch.logit_rows)
        attentions = {window: _BatchAttention(batch, table, config, window, device) for window in set(config.windows)}
        rotations = {kind: turns[positions].unsqueeze(1) for kind, turns in self._rotations.items()}
        x = self._weights.embedding[self._ints(batch.tokens)]
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)
        for index, layer in enumerate(self._weights.layers):
            attention, turns = attentions[config.windows[index]], rotations[config.ropes[index]]
            qkv = F.linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias)
            query, key, value = self._split(qkv, layer, turns)
            keys, values = self._cache[index, 0], self._cache[index, 1]
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)
            attended = attention(query, keys, values)
            if index == config.num_layers - 1:  # only these tokens go on from here
                x, attended = x[logit_rows], attended[logit_rows]
            x = x + self._norm(F.linear(attended, layer.out, layer.out_bias), layer.out_norm)
            gate_up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            gated = F.gelu(gate, approximate="tanh") if config.rules.is_gemma else F.silu(gate)
            x = x + self._norm(F.linear(gated * up, layer.down, layer.down_bias), layer.down_norm)
        return self._norm(x, self._weights.norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Root-mean-square norm; nothing where there are no weights for it."""
        return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, self._config.norm_eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Their logits: [logits, vocabulary] float32."""
        logits, cap = F.linear(hidden, self._weights.head).float(), self._config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

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
        config, dim = self._config, self._config.head_dim
        sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        query, key, value = torch.split(qkv, sizes, 1)
        if config.rules.head_norms == "all heads":
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        query, key, value = (part.reshape(len(qkv), -1, dim) for part in (query, key, value))
        if config.rules.head_norms == "each head":
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        return apply_rope(query, rotations), apply_rope(key, rotations), value


def _rotations(rope: Rope, rows: int) -> Tensor:
    """The rotary embedding as complex numbers, [rows, head_dim / 2]."""
    angles = rope.angles(rows)
    return torch.polar(rope.scales.expand_as(angles).contiguous(), angles)


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
        query_norm=None if layer.query_norm is None else layer.query_norm.view(-1, 2 * half)[:, order].flatten(),
        key_norm=None if layer.key_norm is None else layer.key_norm.view(-1, 2 * half)[:, order].flatten(),
    )


class _BatchAttention:
    """Attention of one batch: which slots each query may read is worked out once for all layers of a window."""

    def __init__(
        self, batch: StepBatch, table: SlotIds, config: ModelConfig, window: int, device: torch.device
    ) -> None:
        self._num_single, self._scale, self._cap = batch.num_single, config.query_scale, config.attention_cap
        starts = batch.query_starts[batch.num_single :].tolist()
        self._spans = list(zip(starts[:-1], starts[1:], strict=True))
        groups, places = _groups(batch)
        index, mask = _padded(batch, table, window, (groups, places))
        self._width = 1 + int(places.max(initial=0))  # most rows that one sequence has side by side
        self._groups, self._places = torch.from_numpy(groups).to(device), torch.from_numpy(places).to(device)
        self._index = torch.from_numpy(index).to(device)
        self._mask = None if mask is None else torch.from_numpy(mask).to(device)[:, None]
        self._slots: list[Tensor] = []
        self._masks: list[Tensor | None] = []
        rows, lengths = batch.table_rows[batch.num_single :], batch.context_lens[batch.num_single :].tolist()
        for (start, stop), row, length in zip(self._spans, rows, lengths, strict=True):
            first = max(0, length - (stop - start) - window + 1) if window else 0
            self._slots.append(torch.from_numpy(table[row, first:length].astype(np.int64)).to(device))
            self._masks.append(_causal_mask(stop - start, length - first, window, device))

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads * head_dim] of [tokens, heads, head_dim] queries over [slots, kv_heads, head_dim]."""
        outs: list[Tensor] = []
        if self._num_single:
            size = (*self._index.shape, *keys.shape[1:])
            flat = self._index.flatten()
            k = keys.index_select(0, flat).view(size).transpose(1, 2)
            v = values.index_select(0, flat).view(size).transpose(1, 2)
            if self._width == 1:
                q = query[: self._num_single].unsqueeze(2)  # [batch, heads, 1, head_dim]
                outs.append(self._attend(q, k, v, self._mask).flatten(1))
            else:
                q = query.new_zeros(len(self._index), self._width, *query.shape[1:])
                q[self._groups, self._places] = query[: self._num_single]
                attended = self._attend(q.transpose(1, 2), k, v, self._mask)  # [groups, heads, width, head_dim]
                outs.append(attended.transpose(1, 2)[self._groups, self._places].flatten(1))
        for (start, stop), slots, mask in zip(self._spans, self._slots, self._masks, strict=True):
            k = keys.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            v = values.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            q = query[start:stop].transpose(0, 1).unsqueeze(0)
            outs.append(self._attend(q, k, v, mask).squeeze(0).transpose(0, 1).flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """All of [batch, heads, tokens, head_dim], keys and values of fewer heads; scores softly capped where asked."""
        group, scale = query.shape[1] // keys.shape[1], self._scale
        if not self._cap:
            return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=group > 1)
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = self._cap * torch.tanh(query @ keys.mT * (scale / self._cap))
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.float().softmax(-1).to(values.dtype) @ values


def _groups(batch: StepBatch) -> tuple[Ints, Ints]:
    """Single-token rows of one sequence side by side: which sequence each belongs to, and its place among them."""
    rows = batch.table_rows[: batch.num_single]
    is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
    groups = is_first.cumsum() - 1
    return groups, np.arange(len(rows)) - is_first.nonzero()[0][groups]


def _padded(
    batch: StepBatch, table: SlotIds, window: int, at: tuple[Ints, Ints]
) -> tuple[Ints, np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None]:
    """Slots of the single-token sequences side by side, and which of them each of their places sees.

    Beyond a sequence's end stands slot 0, which holds zeros; places beyond its last see that one alone.
    """
    count, (groups, places) = batch.num_single, at
    if not count:
        return table[:0, :0].astype(np.int64), None
    size = groups[-1] + 1, places.max() + 1
    lengths = np.ones(size, dtype=np.int64)
    lengths[groups, places] = batch.context_lens[:count]
    longest = int(lengths.max())
    rows = batch.table_rows[:count][places == 0]
    index = table[rows, :longest].astype(np.int64)
    inside = np.arange(longest) < lengths[..., None]
    if window:
        inside &= np.arange(longest) >= lengths[..., None] - window
    if inside.all():
        return index, None
    return np.where(inside.any(1), index, 0), inside


def _causal_mask(queries: int, length: int, window: int, device: torch.device) -> Tensor | None:
    """Which keys the last `queries` of `length` positions see, none of them more than a window back."""
    if queries == 1:
        return None
    mask = torch.ones(queries, length, dtype=torch.bool, device=device).tril_(length - queries)
    return mask.triu_(length - queries - window + 1) if window else mask
