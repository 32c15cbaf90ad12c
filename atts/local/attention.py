"""Attention of a step's blocks over the paged cache, in torch operations: slots gathered, one call
for each class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atts.local.model_config import ModelConfig
from atts.local.step_layout import Blocks, DeviceStep

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[rows, heads * head_dim] of [rows, heads, head_dim] queries over [slots, kv_heads, head_dim] keys
and values.
"""
MakeAttend = Callable[[DeviceStep, ModelConfig, int], Attend]
"""Attention of one step for the layers of one window; 0: the whole context."""


class _Class(NamedTuple):
    rows: Tensor  # [blocks, width] of the queries
    slots: Tensor  # [blocks * length]
    mask: Tensor | None  # [blocks, 1, width, length]


class GatheredAttention:
    """Which slots each query may read is worked out once for all layers of a window.

    Beyond a sequence's end stands slot 0, which holds zeros; rows that are none see the first
    position.
    """

    def __init__(self, step: DeviceStep, config: ModelConfig, window: int) -> None:
        self._config = config
        self._places = step.places
        self._classes = [_seen(blocks, len(step.tokens), window) for blocks in step.classes]
        only = step.classes[0].size if len(step.classes) == 1 else None
        self._is_plain = only is not None and only.width == 1 and only.blocks == len(step.tokens)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads * head_dim]."""
        outs = [self._attend(each, query, keys, values) for each in self._classes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._is_plain else out.index_select(0, self._places)

    def _attend(self, own: _Class, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of one class, [blocks * width, heads * head_dim]."""
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
    last = (blocks.firsts[:, None] + places)[..., None]  # position that a row sees last
    mask = columns <= last
    if window:
        mask &= columns > last - window
        inside &= columns > (blocks.firsts - window)[:, None]
    return _Class(rows, torch.where(inside, blocks.slots, 0).flatten(), mask[:, None])


def _attention(
    config: ModelConfig, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """All of [batch, heads, rows, head_dim], keys and values of fewer heads; scores softly capped
    where asked.
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
