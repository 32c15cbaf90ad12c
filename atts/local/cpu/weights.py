"""A model's weights as the C kernels read them: packed into panels or pinned, once for each content."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atts.local.grouping import AttentionGroup, attention_groups, joined
from atts.local.loader import LayerWeights, LowRank, Rope, Weights
from atts.local.model_config import ModelConfig, rope_rows


class PanelKind(IntEnum):
    """Layout of a packed matrix, as in model.h."""

    FULL = 0
    HALF = 1  # bfloat16, read as float32; for weights that lose nothing in bfloat16
    PAIRS = 2  # bfloat16, multiplied in pairs without conversion


class _Delta(ctypes.Structure):
    _fields_ = [("down", ctypes.c_void_p), ("up", ctypes.c_void_p), ("rank", ctypes.c_int64)]


class PackedAdapter(NamedTuple):
    """The terms that an adapter adds to each layer's four matrices, as the kernels read them."""

    address: int
    rank: int  # largest rank of the adapter's matrices


class Packing:
    """The memory that the kernels read. Models that share a packing pack or pin contents with equal
    keys once.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[object] = []
        self._known: dict[Hashable, int | None] = {}
        self.num_bytes = 0

    def keep(self, value: object) -> None:
        """Keep an object alive because C code has pointers into it."""
        self._kept.append(value)

    def pin(self, tensor: Tensor | None, key: Hashable = None) -> int | None:
        """Keep a tensor and return its address, or None without a tensor."""
        if key is not None and key in self._known:
            return self._known[key]
        address = None if tensor is None else self._add(tensor.contiguous())
        if key is not None:
            self._known[key] = address
        return address

    def pack(self, matrix: Tensor, kind: PanelKind, key: Hashable = None) -> int:
        """Pack a matrix into panels and return its address."""
        if (known := self._known.get(key) if key is not None else None) is not None:
            return known
        rows, columns = matrix.shape
        matrix = matrix.contiguous()
        packed = torch.empty(
            self._library.atts_packed_bytes(rows, columns, int(kind)), dtype=torch.uint8
        )
        self._library.atts_pack(matrix.data_ptr(), rows, columns, int(kind), packed.data_ptr())
        address = self._add(packed)
        if key is not None:
            self._known[key] = address
        return address

    def adapter(self, deltas: Sequence[LowRank | None]) -> PackedAdapter:
        """Pack the terms that an adapter adds to the matrices of all layers."""
        found = [
            _Delta(
                self.pack(low.down, PanelKind.FULL),
                self.pack(low.up, PanelKind.FULL),
                len(low.down),
            )
            if low
            else _Delta()
            for low in deltas
        ]
        array = (_Delta * len(found))(*found)
        self.keep(array)
        return PackedAdapter(ctypes.addressof(array), max(delta.rank for delta in found))

    def _add(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor.data_ptr()


_CHECKED_ROWS = 4096


def is_bfloat16(tensor: Tensor) -> bool:
    """Return whether bfloat16 can represent every number of the tensor."""
    # Some rows at a time, because the head of a large vocabulary is the largest tensor of a small
    # model. numpy combines the bits of all numbers ten times as fast as torch compares them one by
    # one.
    return not any(
        np.bitwise_or.reduce(rows.contiguous().numpy().view(np.uint32).reshape(-1)) & 0xFFFF
        for rows in torch.split(tensor, _CHECKED_ROWS)
    )


POINTER = ctypes.c_void_p
INT = ctypes.c_int64


def members(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Return the fields of a C structure, all of one type."""
    return [(name, kind) for name in names.split()]


_SIZES = "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size vocabulary"
_PLAIN = "norm qkv_bias query_norm key_norm out_bias mlp_norm gate_up_bias down_bias"
_PACKED = "qkv out gate_up down"
_HALVES = (
    ("qkv out", "norm qkv_bias query_norm key_norm out_bias"),
    ("gate_up down", "mlp_norm gate_up_bias down_bias"),
)


class _Layer(ctypes.Structure):
    _fields_ = [
        *members(_PLAIN, POINTER),
        *members(_PACKED, POINTER),
        *members("qkv_pairs out_pairs gate_up_pairs down_pairs", POINTER),
        *members("cosines sines keys values", POINTER),
        *members("stride window num_heads num_kv_heads across place attention_bf16 mlp_bf16", INT),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *members(f"{_SIZES} is_bf16", INT),
        *members("eps query_scale", ctypes.c_float),
        *members("embedding norm head head_pairs layers", POINTER),
    ]


class NativeWeights:
    """A model's weights as the kernels read them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: Tensor,
        packing: Packing,
        keys: Sequence[str],
        group: int,
    ) -> None:
        """Pack the weights. `keys` name the contents of the embedding, each layer's halves and the
        head. Parts with equal contents are packed once.
        """
        self._config = config
        self._packing = packing
        self._keys = keys or [""] * (2 * config.num_layers + 2)
        self._groups = attention_groups(config, cache, group)
        self.most_attentions = max((len(own.layers) for own in self._groups), default=1)
        self.is_bf16 = True  # true until a weight is found that is not
        packing.keep(cache)
        self.exact, self.grouped = self._describe(weights, rope_rows(config, cache.shape[2]))

    def _describe(self, weights: Weights, rows: int) -> tuple[_Model, _Model]:
        """Describe the model for the kernels, once as it is and once with grouped attention.
        Grouped attention computes all attentions of a group at its first layer.
        """
        config = self._config
        packing = self._packing
        keys = self._keys
        tables = {kind: self._table(rope, rows) for kind, rope in weights.ropes.items()}
        exact = list[_Layer]()
        grouped = list[_Layer]()
        for group in self._groups:
            # each layer is read once and freed before the next group is read
            layers = weights.layers[group.layers.start : group.layers.stop]
            exact += [
                self._layer(group.one(at), layer, tables[config.ropes[at]])
                for at, layer in zip(group.layers, layers, strict=True)
            ]
            grouped += self._attending_at_once(group, layers, exact[group.layers.start :])
        is_bf16 = is_bfloat16(weights.head)
        self.is_bf16 &= is_bf16
        head = keys[0] if weights.head is weights.embedding else keys[-1]
        arrays = [(_Layer * config.num_layers)(*own) for own in (exact, grouped)]
        packing.keep(arrays)
        self._layers = arrays[0]
        model = _Model(
            **{name: getattr(config, name) for name in _SIZES.split()},
            is_bf16=int(is_bf16),
            eps=config.norm_eps,
            query_scale=config.query_scale,
            embedding=packing.pin(weights.embedding, _key(keys[0], "embedding")),
            norm=packing.pin(weights.norm, _key(keys[-1], "norm")),
            head=packing.pack(weights.head, PanelKind(is_bf16), _key(head, "head")),
            layers=ctypes.addressof(arrays[0]),
        )
        other = _Model.from_buffer_copy(model)
        other.layers = ctypes.addressof(arrays[1])
        return model, other

    def add_pairs(self, weights: Weights) -> None:
        """Pack the matrices a second time, for rows that are rounded to bfloat16."""
        for own, layer in zip(self._layers, weights.layers, strict=True):
            for name in _PACKED.split():
                setattr(
                    own, f"{name}_pairs", self._packing.pack(getattr(layer, name), PanelKind.PAIRS)
                )
        self.exact.head_pairs = self._packing.pack(weights.head, PanelKind.PAIRS)

    def _layer(
        self, group: AttentionGroup, layer: LayerWeights, table: tuple[int | None, int | None]
    ) -> _Layer:
        at = group.layers.start
        own = _Layer(cosines=table[0], sines=table[1], window=self._config.windows[at])
        for half in (0, 1):
            self._fill_half(own, half, layer, self._keys[1 + 2 * at + half])
        self._place(own, group)
        return own

    def _attending_at_once(
        self, group: AttentionGroup, weights: Sequence[LayerWeights], layers: Sequence[_Layer]
    ) -> list[_Layer]:
        """Return the layers of a group; the first one computes the attention of all their heads."""
        if len(layers) == 1:
            return list(layers)
        own = self._config.num_heads * self._config.head_dim
        together = joined(weights, self._config)
        merged = [_Layer.from_buffer_copy(layer) for layer in layers]
        if layers[
            0
        ].attention_bf16:  # half the memory to read, and what a group computes is not exact anyway
            together = replace(together, qkv=together.qkv.bfloat16().float())
        self._fill_half(merged[0], 0, together, "")
        self._place(merged[0], group)
        for at, layer in enumerate(merged):
            layer.across = len(merged) * own
            layer.place = at * own
            if at:
                layer.num_heads = layer.num_kv_heads = 0
        return merged

    def _fill_half(self, own: _Layer, half: int, layer: LayerWeights, key: str) -> None:
        """Fill in the weights of one half of a layer: its attention or its feed-forward block."""
        packing = self._packing
        packed, plain = _HALVES[half]
        matrices = {name: getattr(layer, name) for name in packed.split()}
        is_bf16 = all(map(is_bfloat16, matrices.values()))
        self.is_bf16 &= is_bf16
        for name, each in matrices.items():
            setattr(own, name, packing.pack(each, PanelKind(is_bf16), _key(key, name)))
        for name in plain.split():
            setattr(own, name, packing.pin(getattr(layer, name), _key(key, name)))
        setattr(own, ("attention_bf16", "mlp_bf16")[half], int(is_bf16))

    def _place(self, own: _Layer, group: AttentionGroup) -> None:
        """Set the number of heads that attend in a layer, and where their keys and values are."""
        config = self._config
        count = len(group.layers)
        own.keys = group.keys.data_ptr()
        own.values = group.values.data_ptr()
        own.stride = group.keys.stride(0)
        own.num_heads = count * config.num_heads
        own.num_kv_heads = count * config.num_kv_heads
        own.across = own.num_heads * config.head_dim

    def _table(self, rope: Rope, rows: int) -> tuple[int | None, int | None]:
        angles = rope.angles(rows)
        key = f"{rows} {rope.frequencies.tolist()} {rope.scales.tolist()}"
        cosines = self._packing.pin(angles.cos() * rope.scales, (key, "cosines"))
        return cosines, self._packing.pin(angles.sin() * rope.scales, (key, "sines"))


def _key(content: str, name: str) -> tuple[str, str] | None:
    """Return the key of a part of a block, or None if the block has no name."""
    return (content, name) if content else None
