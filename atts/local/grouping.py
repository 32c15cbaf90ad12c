"""Attention of neighbouring layers computed as one layer with as many times the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from atts.local.loader import LayerWeights, Weights
from atts.local.model_config import ModelConfig


class AttentionGroup(NamedTuple):
    """Layers whose attentions may be computed at once, with views of their keys and values, which
    lie next to each other in the cache.
    """

    layers: range
    keys: Tensor  # [slots, kv heads of all these layers, head_dim]
    values: Tensor

    def one(self, index: int) -> AttentionGroup:
        """Return a group of one layer."""
        heads = self.keys.shape[1] // len(self.layers)
        own = slice((index - self.layers.start) * heads, (index - self.layers.start + 1) * heads)
        return AttentionGroup(range(index, index + 1), self.keys[:, own], self.values[:, own])


def layer_groups(config: ModelConfig, size: int) -> list[range]:
    """Group up to `size` neighbouring layers with the same window and rotation. The first and the
    last layer form groups of their own.
    """
    last = config.num_layers - 1
    ranges = list[range]()
    for at in range(config.num_layers):
        kinds = [
            (config.windows[each], config.ropes[each])
            for each in (ranges[-1].start if ranges else 0, at)
        ]
        if at > 1 and at < last and len(ranges[-1]) < size and kinds[0] == kinds[1]:
            ranges[-1] = range(ranges[-1].start, at + 1)
        else:
            ranges.append(range(at, at + 1))
    return ranges


def attention_groups(config: ModelConfig, cache: Tensor, size: int) -> list[AttentionGroup]:
    """Return the groups of up to `size` layers, each with its part of the cache."""
    ranges = layer_groups(config, size)
    side_by_side = [
        cache[own.start : own.stop].view(2, cache.shape[2], -1, config.head_dim) for own in ranges
    ]
    return [AttentionGroup(own, *both) for own, both in zip(ranges, side_by_side, strict=True)]


def with_groups(config: ModelConfig, weights: Weights, size: int) -> Weights:
    """Return a copy of the weights with joined attentions for groups of up to `size` layers."""
    groups = [
        joined(weights.layers[layers.start : layers.stop], config)
        for layers in layer_groups(config, size)
    ]
    return replace(weights, groups=tuple(groups))


def joined(layers: Sequence[LayerWeights], config: ModelConfig) -> LayerWeights:
    """Join the attentions of all layers to that of the first. The norms of their inputs are
    multiplied into the matrix.
    """
    first = layers[0]
    sizes = [heads * config.head_dim for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    if len(layers) == 1:
        return first

    def by_kind(parts: Sequence[Tensor]) -> Tensor:
        """Join the rows of all queries, then of all keys, then of all values."""
        return torch.cat(
            [
                torch.cat(kind)
                for kind in zip(*[torch.split(part, sizes) for part in parts], strict=True)
            ]
        )

    def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
        return (
            None if parts[0] is None else torch.stack([part for part in parts if part is not None])
        )

    norms = stacked([each.norm for each in layers])
    scales = [torch.ones_like(first.qkv[0])] * len(layers) if norms is None else list(norms)
    biases = [each.qkv_bias for each in layers if each.qkv_bias is not None]
    return replace(
        first,
        norm=None if norms is None else torch.ones_like(norms[0]),
        qkv=by_kind([each.qkv * scale for each, scale in zip(layers, scales, strict=True)]),
        qkv_bias=by_kind(biases) if biases else None,
        query_norm=stacked([each.query_norm for each in layers]),
        key_norm=stacked([each.key_norm for each in layers]),
    )
