"""The forward pass in torch for any device and number type; the results of all other kernels are
compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atts.local.batch import Floats, StepBatch
from atts.local.cache import SlotIds
from atts.local.device_steps import (
    Blocks,
    Capture,
    DeviceStep,
    RowBlocks,
    SlotTableCopy,
    StepGraphs,
    layout_of,
    packed,
    unpacked,
)
from atts.local.loader import (
    AttentionGroup,
    LayerWeights,
    Rope,
    Weights,
    attention_groups,
    paired_order,
    with_groups,
)
from atts.local.logit_sampling import SampledTokens, SamplingBatch, raw_logprobs, sample
from atts.local.model_config import ModelConfig, rope_rows
from atts.local.seams import LayerHook

# Each step is sent to the device as one array. Steps that only decode can be captured as CUDA
# graphs (`StepGraphs`). The caller chooses how attention is computed (`MakeAttend`): on some GPUs
# with a kernel, and elsewhere with `GatheredAttention`, which copies the slots to read into one
# tensor.

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that computes the attention of all rows of a step. It takes queries [rows, heads,
head_dim], and keys and values [slots, kv_heads, head_dim]. It returns [rows, heads * head_dim].
"""
MakeAttend = Callable[[DeviceStep, ModelConfig, int], Attend]
"""A function that prepares one step's attention for all layers with the same window. The last
argument is the window in tokens; 0 means the whole context.
"""


class _Class(NamedTuple):
    rows: Tensor  # [blocks, width] indices of the query rows of each block
    slots: Tensor  # [blocks * length] cache slots to gather, block after block
    # [blocks, 1, width, length] attention mask, True where a query may read a slot; None if every
    # query may read all slots of its block
    mask: Tensor | None


class GatheredAttention:
    """Attention in torch that first gathers keys and values from the slots to read. The slots that
    each query may read are computed once for all layers with the same window.

    Positions beyond a sequence's end read slot 0, which contains zeros. Padding rows read the first
    position.
    """

    def __init__(self, step: DeviceStep, config: ModelConfig, window: int) -> None:
        self._config = config
        self._places = step.places
        self._classes = [_seen(blocks, len(step.tokens), window) for blocks in step.classes]
        only = step.classes[0].size if len(step.classes) == 1 else None
        self._is_plain = only is not None and only.width == 1 and only.blocks == len(step.tokens)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output for these queries: [rows, heads * head_dim]."""
        outs = [self._attend(each, query, keys, values) for each in self._classes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._is_plain else out.index_select(0, self._places)

    def _attend(self, own: _Class, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output for a class of blocks: [blocks * width, heads * head_dim]."""
        size = (own.rows.shape[0], -1, *keys.shape[1:])
        k = keys.index_select(0, own.slots).view(size).transpose(1, 2)
        v = values.index_select(0, own.slots).view(size).transpose(1, 2)
        q = query.unsqueeze(1) if self._is_plain else query[own.rows]
        attended = _attention(self._config, q.transpose(1, 2), k, v, own.mask)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def _seen(blocks: Blocks, num_rows: int, window: int) -> _Class:
    size = blocks.size
    device = blocks.slots.device
    places = torch.arange(size.width, device=device)
    columns = torch.arange(size.length, device=device)
    rows = (blocks.starts[:, None] + places).clamp(max=num_rows - 1)
    if size.is_even and (not window or size.length <= window):
        return _Class(rows, blocks.slots.flatten(), None)
    inside = columns < (blocks.firsts + blocks.counts)[:, None]
    # last position to which each row may attend
    last = (blocks.firsts[:, None] + places)[..., None]
    mask = columns <= last
    if window:
        mask &= columns > last - window
        inside &= columns > (blocks.firsts - window)[:, None]
    return _Class(rows, torch.where(inside, blocks.slots, 0).flatten(), mask[:, None])


def _attention(
    config: ModelConfig, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the attention output, [batch, heads, rows, head_dim]. Keys and values may have fewer
    heads than queries.
    """
    group = query.shape[1] // keys.shape[1]
    scale = config.query_scale
    cap = config.attention_cap
    if not cap:
        return F.scaled_dot_product_attention(
            query, keys, values, mask, scale=scale, enable_gqa=group > 1
        )
    keys = keys.repeat_interleave(group, 1)
    values = values.repeat_interleave(group, 1)
    scores = cap * torch.tanh(query @ keys.mT * (scale / cap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.float().softmax(-1).to(values.dtype) @ values


_SCORED_LOGITS = 1 << 25
"""Largest number of logits that are computed at once during scoring, to limit the memory."""


class TorchModel:
    """A model that runs its steps with torch. Its KV cache `cache` is [layers, 2, slots, kv_heads,
    head_dim].

    Slot 0 is never written. Padding rows write to the last slot, which is never read.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: Tensor,
        *,
        attention: MakeAttend = GatheredAttention,
        most_rows: int | None = None,
        capture: Capture | None = None,
        group: int = 1,
    ) -> None:
        """Create the model. `most_rows` is the largest number of rows per block that `attention`
        supports. `capture` captures CUDA graphs of steps.

        `group` is the largest number of layers whose attention may be computed together; see
        `is_grouped`. The weights may already contain the joined attention of such groups.
        """
        self._config = config
        self._cache = cache
        self._device = cache.device
        self._attention = attention
        self._most_rows = most_rows
        # whether all layers of a group compute attention from the input of the group's first layer,
        # which is faster but not exact
        self.is_grouped = False
        if not weights.is_paired:
            layers = tuple(_interleaved(layer, config) for layer in weights.layers)
            weights = replace(weights, layers=layers, is_paired=True)
        groups = attention_groups(config, cache, group)
        if group > 1 and not weights.groups:
            weights = with_groups(config, weights, group)
        self._weights = weights
        self._exact = [(own.one(at), weights.layers[at]) for own in groups for at in own.layers]
        self._grouped = self._exact
        if weights.groups:
            self._grouped = list(zip(groups, weights.groups, strict=True))
        rows = rope_rows(config, cache.shape[2])
        self._rotations = {
            kind: _rotations(rope, rows).to(self._device) for kind, rope in weights.ropes.items()
        }
        self._slots = SlotTableCopy(self._device)
        self.graphs = None if capture is None else StepGraphs(self._compute, capture, cache)

    @property
    def device_name(self) -> str:
        """Describe the device, and the methods that make steps faster on it."""
        parts = [
            str(self._device),
            "paged attention" * (self._most_rows is not None),
            "graphs" * bool(self.graphs),
        ]
        return ", ".join(filter(None, parts))

    @torch.inference_mode()
    def forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None = None) -> Tensor:
        """Run a step and return the final, normed hidden states of the batch's `logit_rows`:
        [logits, hidden_size].
        """
        # For a tensor on a CPU, `get_device` returns -1, and `torch.cuda.device` ignores negative
        # numbers.
        with torch.cuda.device(self._cache.get_device()):
            return self._forward(batch, table, tap)

    def _forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None) -> Tensor:
        blocks = RowBlocks.of(batch, self._most_rows)
        slots = self._slots.update(table, blocks.table_rows, int(blocks.lengths.max(initial=0)))
        if (
            self.graphs is not None
            and tap is None
            and (hidden := self.graphs.run(batch, slots, blocks, self.is_grouped)) is not None
        ):
            return hidden
        return self._compute(self._sent(batch, slots, blocks), self.is_grouped, tap)

    @torch.inference_mode()
    def through(
        self, batch: StepBatch, table: SlotIds, rows: tuple[Floats, Floats], units: tuple[int, int]
    ) -> None:
        """Run all layers for these rows, and also the embedding or the last norm if `units`
        contains them. Write the resulting hidden states to `rows[1]`.
        """
        blocks = RowBlocks.of(batch, self._most_rows)
        slots = self._slots.update(table, blocks.table_rows, int(blocks.lengths.max(initial=0)))
        step = self._sent(batch, slots, blocks)
        given = (
            torch.from_numpy(rows[0]).to(self._cache, copy=True)
            if units[0]
            else self._embedded(step)
        )
        x = self._behind_layers(given, step, is_grouped=False)
        ends = units[1] > 1 + 2 * self._config.num_layers
        rows[1][:] = (self._norm(x, self._weights.norm) if ends else x).float().numpy(force=True)

    def _sent(self, batch: StepBatch, slots: Tensor, blocks: RowBlocks) -> DeviceStep:
        """Send a step's arrays to the device, which already has the slot table."""
        classes = blocks.classes() if self._most_rows is None else [blocks]
        layout = layout_of(batch, classes)
        array = torch.from_numpy(packed(batch, classes, layout, self._cache.shape[2] - 1))
        return unpacked(array.to(self._device, non_blocking=True), layout, slots)

    def _compute(self, step: DeviceStep, is_grouped: bool, tap: LayerHook | None = None) -> Tensor:
        """Compute a step on the device. The operations depend only on the step's arrays and sizes,
        so a CUDA graph can repeat them.
        """
        x = self._behind_layers(self._embedded(step), step, is_grouped, tap)
        return self._norm(x, self._weights.norm)

    def _embedded(self, step: DeviceStep) -> Tensor:
        x = self._weights.embedding[step.tokens]
        scale = self._config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def _behind_layers(
        self, x: Tensor, step: DeviceStep, is_grouped: bool, tap: LayerHook | None = None
    ) -> Tensor:
        """Run all layers and return the hidden states of the rows that need logits."""
        config = self._config
        attends = {window: self._attention(step, config, window) for window in set(config.windows)}
        rotations = {
            kind: turns[step.positions].unsqueeze(1) for kind, turns in self._rotations.items()
        }
        for group, weights in self._grouped if is_grouped else self._exact:
            mixed = self._mixed(x, step, (group, weights), attends, rotations)
            for index, attended in zip(
                group.layers, mixed.chunk(len(group.layers), 1), strict=True
            ):
                # After the attention of the last layer, no row depends on other rows. So the rest
                # is computed only for rows whose logits are needed.
                if index == config.num_layers - 1 and step.logit_rows is not None:
                    x = x[step.logit_rows]
                    attended = attended[step.logit_rows]
                x = self._fed_forward(x, attended, self._weights.layers[index])
            if tap is not None and tap.layers == group.layers.stop:
                tap.receive(x if step.logit_rows is None else x[step.logit_rows])
        return x

    def _mixed(
        self,
        x: Tensor,
        step: DeviceStep,
        own: _Attention,
        attends: Mapping[int, Attend],
        turns: Mapping[str, Tensor],
    ) -> Tensor:
        """Write the keys and values of a layer, or of a group of layers, to the cache. Then return
        the attention output.
        """
        config = self._config
        ((layers, keys, values), layer) = own
        qkv = F.linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias)
        query, key, value = self._split(qkv, layer, turns[config.ropes[layers.start]], len(layers))
        keys.index_copy_(0, step.slots, key)
        values.index_copy_(0, step.slots, value)
        return attends[config.windows[layers.start]](query, keys, values)

    def _fed_forward(self, x: Tensor, attended: Tensor, layer: LayerWeights) -> Tensor:
        """Return a layer's output: multiply the attention output by the output matrix, add the
        layer's input `x`, then apply the feed-forward block.
        """
        x = x + self._norm(F.linear(attended, layer.out, layer.out_bias), layer.out_norm)
        gate_up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        gated = F.gelu(gate, approximate="tanh") if self._config.rules.is_gemma else F.silu(gate)
        return x + self._norm(F.linear(gated * up, layer.down, layer.down_bias), layer.down_norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Apply RMSNorm, or return the rows unchanged if `weight` is None.

        A `weight` with two dimensions belongs to several joined layers: each of its rows applies to
        the heads of one layer.
        """
        if weight is None or weight.dim() == 1:
            return (
                x
                if weight is None
                else F.rms_norm(x, (x.shape[-1],), weight, self._config.norm_eps)
            )
        rows = x.reshape(len(x), len(weight), -1, *x.shape[2:])
        weight = weight[:, None] if rows.dim() == 4 else weight
        return (F.rms_norm(rows, rows.shape[-1:], None, self._config.norm_eps) * weight).flatten(
            1, 2
        )

    @property
    def is_thread_independent(self) -> bool:
        """Return False, because the thread count changes the order in which torch adds numbers."""
        return False

    def use_threads(self, threads: int) -> None:
        """Do nothing: torch keeps a thread count for each calling thread, and `set_threads` sets
        the count of the loop's thread.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits for these hidden states: [rows, vocabulary] float32."""
        logits = F.linear(hidden, self._weights.head).float()
        cap = self._config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Sample one token per row with the given uniform random numbers."""
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        return sample(logits, sampling, numbers.to(logits.device, non_blocking=True))

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Return the log-probability of each row's token at temperature 1 without filters."""
        values: list[float] = self._logprobs(logits, tokens).tolist()
        return values

    @torch.inference_mode()
    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Return the log-probability of one token per row, and the logits of `kept_rows`."""
        kept = torch.empty(len(kept_rows), self._config.vocabulary, device=self._device)
        size = max(1, _SCORED_LOGITS // self._config.vocabulary)
        parts = list[Tensor]()
        for at in range(0, len(tokens), size):
            logits = self.compute_logits(hidden[at : at + size])
            parts.append(self._logprobs(logits, tokens[at : at + size]))
            for index, row in enumerate(kept_rows):
                if at <= row < at + size:
                    kept[index] = logits[row - at]
        values: list[float] = torch.cat(parts).tolist() if parts else []
        return values, kept

    def _logprobs(self, logits: Tensor, tokens: list[int]) -> Tensor:
        return raw_logprobs(logits, torch.tensor(tokens, device=logits.device))

    def _split(
        self, qkv: Tensor, layer: LayerWeights, rotations: Tensor, layers: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split joined rows into query, key and value, each [tokens, heads, head_dim]. Apply the
        norms of the heads, and rotate query and key.
        """
        config = self._config
        dim = self._config.head_dim
        sizes = [
            layers * heads * dim
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ]
        query, key, value = torch.split(qkv, sizes, 1)
        if config.rules.head_norms == "all heads":
            query = self._norm(query, layer.query_norm)
            key = self._norm(key, layer.key_norm)
        query, key, value = (part.reshape(len(qkv), -1, dim) for part in (query, key, value))
        if config.rules.head_norms == "each head":
            query = self._norm(query, layer.query_norm)
            key = self._norm(key, layer.key_norm)
        return apply_rope(query, rotations), apply_rope(key, rotations), value


_Attention = tuple[AttentionGroup, LayerWeights]


def _rotations(rope: Rope, rows: int) -> Tensor:
    """Return the rotations at the first `rows` positions as complex numbers, [variants * rows,
    head_dim / 2]; see `Rope.angles`.
    """
    angles = rope.angles(rows)
    return torch.polar(rope.scales.expand_as(angles).contiguous(), angles)


def apply_rope(rows: Tensor, rotations: Tensor) -> Tensor:
    """Apply a rotary embedding: treat each pair of adjacent features as a complex number, and
    multiply it by its rotation.
    """
    pairs = torch.view_as_complex(rows.float().reshape(*rows.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(rows.dtype)


def _interleaved(layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    """Return the layer with the features of query and key reordered, so that features that are
    rotated together become adjacent. In the order of transformers, they lie half a head apart.
    """
    half = config.head_dim // 2
    rows, order = (part.to(layer.qkv.device) for part in paired_order(config))
    return replace(
        layer,
        qkv=layer.qkv[rows],
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias[rows],
        query_norm=None
        if layer.query_norm is None
        else layer.query_norm.view(-1, 2 * half)[:, order].flatten(),
        key_norm=None
        if layer.key_norm is None
        else layer.key_norm.view(-1, 2 * half)[:, order].flatten(),
    )
