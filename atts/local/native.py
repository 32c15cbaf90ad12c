"""The same forward in C, for float32 on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.decode import Drawn, Laws, sample
from atts.local.batch import Slots, StepBatch
from atts.local.loader import LayerWeights, Weights
from atts.local.shape import Shape

_Floats = NDArray[np.float32]
Allocate = Callable[[int, int], _Floats]
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_ARRAYS = tuple(field.name for field in fields(StepBatch) if field.name != "num_single")


def _address(array: NDArray[Any]) -> int:
    """What `array.ctypes.data` says, in half the time: a small step asks for a dozen."""
    return torch.from_numpy(array).data_ptr()


def _floats(rows: int, columns: int) -> _Floats:
    return np.empty((rows, columns), dtype=np.float32)


def _columns(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_columns("norm qkv_bias query_norm key_norm out_bias mlp_norm gate_up_bias down_bias", _POINTER),
        *_columns("qkv out gate_up down", _POINTER),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_columns("layers width heads kv_heads head_dim inner vocabulary halves", _INT),
        ("eps", ctypes.c_float),
        *_columns("embedding norm cosines sines head layer cache", _POINTER),
        ("slots", _INT),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_columns("num_tokens num_sequences num_wanted table_width threads", _INT),
        *_columns("tokens positions slots rows starts lengths tails wanted table", _POINTER),
        *_columns("x h qkv mixed both hidden scratch", _POINTER),
        ("scratch_floats", _INT),
        ("counters", _POINTER),
    ]


class _Scoring(ctypes.Structure):
    _fields_ = [("model", _POINTER), *_columns("rows num_ends", _INT)] + _columns(
        "hidden tokens ends logprobs kept logits", _POINTER
    )


class NativeModel:
    """Runs steps with the C kernels; same cache layout as the torch model, float32 on the CPU only.

    Weights that are bfloat16 numbers anyway are kept as such: half the memory to read, not a bit lost.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: Shape,
        weights: Weights,
        cache: Tensor,
        threads: int,
        *,
        allocate: Allocate = _floats,
    ) -> None:
        """`allocate` makes the buffers of a step, and may raise MemoryError."""
        self._library, self._shape, self._threads, self._allocate = library, shape, threads, allocate
        self._kept: list[object] = [cache]  # what the C side points into
        self._halves = all(_is_bfloat16(matrix) for matrix in _matrices(weights))
        self._model = self._describe(weights, cache)
        self._scratch_floats = int(library.atts_scratch_floats(shape.head_dim, shape.context_length))
        self._row_block = int(library.atts_row_block())
        self._scratch = np.empty(threads * self._scratch_floats, dtype=np.float32)
        self._draw_scratch = np.empty(shape.vocabulary // 4 + 1, dtype=np.float32)
        self._counters = np.zeros(shape.layers, dtype=np.int32)
        self._room = 0
        self._buffers: dict[str, _Floats] = {}
        self._logits = np.empty((0, shape.vocabulary), dtype=np.float32)  # of a block of scored rows
        self._step = _Step(
            threads=threads,
            scratch=self._scratch.ctypes.data,
            scratch_floats=self._scratch_floats,
            counters=self._counters.ctypes.data,
        )

    @property
    def device_name(self) -> str:
        """What computes."""
        return f"native, {self._threads} thread{'s' if self._threads > 1 else ''}{', bf16 weights' * self._halves}"

    def forward(self, batch: StepBatch, table: Slots) -> Tensor:
        """The final, normed hidden states of the wanted tokens: [wanted, width]."""
        hidden = np.empty((len(batch.wanted), self._shape.width), dtype=np.float32)
        self._make_room(len(batch.tokens))
        self._counters[:] = 0
        step = self._step
        step.num_tokens, step.num_sequences = len(batch.tokens), len(batch.rows)
        step.num_wanted, step.table_width = len(batch.wanted), table.shape[1]
        step.table, step.hidden = _address(table), _address(hidden)
        for name in _ARRAYS:
            setattr(step, name, _address(getattr(batch, name)))
        self._library.atts_forward(ctypes.byref(self._model), ctypes.byref(step))
        return torch.from_numpy(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """Their logits: [wanted, vocabulary] float32."""
        rows = len(hidden)
        logits = torch.empty(rows, self._shape.vocabulary)
        model = ctypes.byref(self._model)
        self._library.atts_head(model, hidden.data_ptr(), rows, logits.data_ptr(), self._threads)
        return logits

    def score(self, hidden: Tensor, tokens: list[int], ends: list[int]) -> tuple[list[float], Tensor]:
        """One log-probability a row, and the logits of some: a block of rows at a time, still in the caches."""
        vocabulary = self._shape.vocabulary
        block = min(len(tokens), self._row_block)
        if len(self._logits) < block:
            self._logits = self._allocate(block, vocabulary)
        wanted, places = np.array(tokens, dtype=np.int64), np.array(ends, dtype=np.int64)
        logprobs, kept = np.empty(len(tokens), dtype=np.float32), torch.empty(len(ends), vocabulary)
        scoring = _Scoring(
            ctypes.addressof(self._model),
            len(tokens),
            len(ends),
            hidden.data_ptr(),
            _address(wanted),
            _address(places),
            _address(logprobs),
            kept.data_ptr(),
            _address(self._logits),
        )
        self._library.atts_score(ctypes.byref(scoring), self._threads)
        values: list[float] = logprobs.tolist()
        return values, kept

    def draw(self, logits: Tensor, laws: Laws, uniforms: list[float]) -> Drawn:
        """One token a row; laws that filter tokens are left to torch."""
        if laws.top_k is not None or laws.top_p is not None or laws.min_p is not None:
            return sample(logits, laws, torch.tensor(uniforms, dtype=torch.float64))
        rows, vocabulary = logits.shape
        numbers = np.array(uniforms, dtype=np.float64)
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self._library.atts_draw(
            logits.data_ptr(),
            rows,
            vocabulary,
            laws.temperature.data_ptr(),
            _address(numbers),
            tokens.data_ptr(),
            logprobs.data_ptr(),
            _address(self._draw_scratch),
        )
        return Drawn(tokens, logprobs)

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Each row's token under the raw law."""
        rows, vocabulary = logits.shape
        wanted, logprobs = np.array(tokens, dtype=np.int64), np.empty(rows, dtype=np.float32)
        self._library.atts_logprobs(logits.data_ptr(), rows, vocabulary, _address(wanted), _address(logprobs))
        values: list[float] = logprobs.tolist()
        return values

    def _make_room(self, tokens: int) -> None:
        """Buffers for a step of this many tokens; grown, never shrunk."""
        if tokens <= self._room:
            return
        shape = self._shape
        across = shape.heads * shape.head_dim
        widths = {
            "x": shape.width,
            "h": shape.width,
            "qkv": across + 2 * shape.kv_heads * shape.head_dim,
            "mixed": across,
            "both": 2 * shape.inner,
        }
        room = max(tokens, self._room + self._room // 4)
        rows = {"h": min(room, self._row_block), "both": min(room, self._row_block)}
        self._buffers, self._room = {}, 0  # the old ones first go, then the new ones come
        self._buffers = {name: self._allocate(rows.get(name, room), width) for name, width in widths.items()}
        for name, buffer in self._buffers.items():
            setattr(self._step, name, buffer.ctypes.data)
        self._room = room

    def _describe(self, weights: Weights, cache: Tensor) -> _Model:
        shape = self._shape
        angles = torch.outer(torch.arange(shape.context_length, dtype=torch.float32), weights.frequencies)
        layers = (_Layer * shape.layers)(*[self._layer(layer) for layer in weights.layers])
        self._kept.append(layers)
        return _Model(
            layers=shape.layers,
            width=shape.width,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            inner=shape.inner,
            vocabulary=shape.vocabulary,
            halves=int(self._halves),
            eps=shape.eps,
            embedding=self._keep(weights.embedding),
            norm=self._keep(weights.norm),
            cosines=self._keep(angles.cos() * weights.rope_scale),
            sines=self._keep(angles.sin() * weights.rope_scale),
            head=self._pack(weights.head),
            layer=ctypes.addressof(layers),
            cache=cache.data_ptr(),
            slots=cache.shape[2],
        )

    def _layer(self, layer: LayerWeights) -> _Layer:
        packed = ("qkv", "out", "gate_up", "down")
        plain = [field.name for field in fields(layer) if field.name not in packed]
        return _Layer(
            **{name: self._pack(getattr(layer, name)) for name in packed},
            **{name: self._keep(getattr(layer, name)) for name in plain},
        )

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _pack(self, matrix: Tensor) -> int:
        rows, columns = matrix.shape
        matrix = matrix.contiguous()
        packed = torch.empty(self._library.atts_packed_bytes(rows, columns, int(self._halves)), dtype=torch.uint8)
        self._library.atts_pack(matrix.data_ptr(), rows, columns, int(self._halves), packed.data_ptr())
        self._kept.append(packed)
        return packed.data_ptr()


def _matrices(weights: Weights) -> list[Tensor]:
    return [weights.head, *(m for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down))]


def _is_bfloat16(tensor: Tensor) -> bool:
    """Whether every number is one bfloat16 can hold."""
    return bool((tensor.contiguous().view(torch.int32) & 0xFFFF == 0).all())
