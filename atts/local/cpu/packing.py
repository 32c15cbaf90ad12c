"""Weights as the C kernels read them: packed into panels or pinned, once for each content that has
a key.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from atts.local.lora import LowRank


class PanelKind(IntEnum):
    """How a packed matrix is kept, as in model.h."""

    FULL = 0
    HALF = 1  # bfloat16, read as float32: for weights that lose nothing by it
    PAIRS = 2  # bfloat16, multiplied as it is, two by two


class _Delta(ctypes.Structure):
    _fields_ = [("down", ctypes.c_void_p), ("up", ctypes.c_void_p), ("rank", ctypes.c_int64)]


class PackedAdapter(NamedTuple):
    """What an adapter adds to each layer's matrices, four a layer, as the kernels read it."""

    address: int
    rank: int  # the largest


class Packing:
    """Keeps what the kernels point into; models that share it share what they pack or pin under
    equal keys.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[object] = []
        self._known: dict[Hashable, int | None] = {}
        self.num_bytes = 0

    def keep(self, value: object) -> None:
        """Keep what C points into."""
        self._kept.append(value)

    def pin(self, tensor: Tensor | None, key: Hashable = None) -> int | None:
        """The address of a tensor, 0 where there is none."""
        if key is not None and key in self._known:
            return self._known[key]
        address = None if tensor is None else self._add(tensor.contiguous())
        if key is not None:
            self._known[key] = address
        return address

    def pack(self, matrix: Tensor, kind: PanelKind, key: Hashable = None) -> int:
        """The address of a matrix in panels."""
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
        """What an adapter adds to the matrices of all layers."""
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


def is_bfloat16(tensor: Tensor) -> bool:
    """Whether every number is one bfloat16 can hold."""
    return bool((tensor.contiguous().view(torch.int32) & 0xFFFF == 0).all())
