"""Names of the parts of a zoo's models: parts that compute the same have the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from atts.local.loader import Rope, Weights
from atts.local.lora import LowRank
from atts.local.model_config import ModelConfig
from atts.stored_blocks import content_digest, unit_digests


def rope_names(shape: ModelConfig, ropes: Mapping[str, Rope]) -> list[str]:
    """What each layer's rotation and window are called."""
    return [
        f"{content_name(None, ropes[kind].frequencies, ropes[kind].scales)} {window}"
        for kind, window in zip(shape.ropes, shape.windows, strict=True)
    ]


def half_names(folder: Path, shape: ModelConfig, ropes: Mapping[str, Rope]) -> list[str]:
    """What the halves of a stored model's layers are called: equal where they compute the same.

    :raises ZooError: the manifest cannot be read.
    """
    names = rope_names(shape, ropes)
    return [f"{digest} {names[at // 2]}" for at, digest in enumerate(unit_digests(folder, shape.num_layers)[1:-1])]


def key_names(
    shape: ModelConfig, weights: Weights, ropes: Sequence[str], deltas: Sequence[LowRank | None]
) -> tuple[str, ...]:
    """Of each layer what makes its keys and values: rotation, norms, its rows of the first product, an adapter's."""
    asked, found = shape.num_heads * shape.head_dim, list[str]()  # rows of queries, before those of keys and values
    for rope, layer, low in zip(ropes, weights.layers, deltas[::4], strict=True):
        own = [None if part is None else part[asked:] for part in (layer.qkv, layer.qkv_bias)]
        added = low and replace(low, up=low.up[asked:])
        found.append(f"{rope} {content_name(added, layer.norm, layer.key_norm, *own)}")
    return tuple(found)


def content_name(low: LowRank | None, *tensors: Tensor | None) -> str:
    """Equal for equal numbers; an adapter that adds nothing is none."""
    added = (low.down, low.up) if low and low.up.any() else ()
    parts = [part.contiguous().numpy().data.cast("B") if part is not None else b"-" for part in (*added, *tensors)]
    return content_digest(*parts)
