"""Padded models: a model beside a stack of layers shaped as a larger one's, whose output matrix is
zero.

Words and log-probabilities stay the model's own to the bit; arithmetic, memory traffic and cache
are a model's of the size asked for, for nothing of the stack is skipped. Its weights are random
numbers made in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, overload

import torch
from torch import Tensor

from atts.local.allocator import SlotIds
from atts.local.batch import ModelAround, StepBatch, Tap, TappedModel
from atts.local.loader import LayerWeights, Rope, Weights
from atts.local.model_config import ModelConfig

_POOL = (1 << 20) + 7  # random numbers that matrices are filled from, over and over


def padding_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Seeded numbers for every matrix but the head, which is zero; layers are made when they are
    asked for.
    """
    generator = torch.Generator(device).manual_seed(config.matrix_weights)
    pool = torch.randn(_POOL, generator=generator, device=device).bfloat16().to(dtype)
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turns = (10000.0**-exponent).expand(1 if config.long_after is None else 2, -1)
    return Weights(
        embedding=_filled(pool, config.vocabulary, config.hidden_size, 0)
        * math.sqrt(config.hidden_size),
        layers=_Layers(config, pool),
        norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
        head=torch.zeros(config.vocabulary, config.hidden_size, dtype=dtype, device=device),
        ropes={"": Rope(turns, torch.ones(config.head_dim // 2))},
    )


def _filled(pool: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """A matrix of its own from the pool, of about 1 / sqrt(columns), each number one that bfloat16
    can hold.
    """
    numbers = pool.roll(start) * 2.0 ** -round(math.log2(columns) / 2)
    matrix = pool.new_empty(rows * columns)
    for part in torch.split(matrix, len(pool)):
        part.copy_(numbers[: len(part)])
    return matrix.view(rows, columns)


class _Layers(Sequence[LayerWeights]):
    """Layers of random numbers, no two alike, each made anew when it is asked for."""

    def __init__(self, config: ModelConfig, pool: Tensor) -> None:
        self._config = config
        self._pool = pool

    def __len__(self) -> int:
        return self._config.num_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        config = self._config
        first = 1 + 4 * index
        across = config.num_heads * config.head_dim
        width = config.hidden_size
        inner = config.intermediate_size
        norm = self._pool.new_ones(width)
        sizes = [(across + 2 * config.num_kv_heads * config.head_dim, width), (width, across)]
        sizes += [(2 * inner, width), (width, inner)]
        qkv, out, gate_up, down = (
            _filled(self._pool, *size, first + at) for at, size in enumerate(sizes)
        )
        parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(LayerWeights))
        parts |= {
            "norm": norm,
            "qkv": qkv,
            "out": out,
            "mlp_norm": norm,
            "gate_up": gate_up,
            "down": down,
        }
        return LayerWeights(**parts)


class PaddedModel(ModelAround):
    """Runs each step of a model and of the stack beside it; both have caches of the same slots."""

    def __init__(
        self, model: TappedModel, stack: TappedModel, width: int, vocabulary: int, middle: int = 0
    ) -> None:
        """`width` is the model's hidden size: what follows is the stack's, `middle` of its layers
        are half.
        """
        super().__init__(model)
        self._stack = stack
        self._width = width
        self._vocabulary = vocabulary
        self._middle = middle

    @property
    def device_name(self) -> str:
        """Where it computes."""
        return f"{self._model.device_name}, padded"

    def forward(self, batch: StepBatch, table: SlotIds, tap: Tap | None = None) -> Tensor:
        """The final hidden states of both, side by side; who hears of the model's does so half-way
        down the stack.
        """
        if tap is None:
            own = self._model.forward(batch, table)
            other = self._stack.forward(batch, table)
        else:
            heard = list[Tensor]()
            inner = Tap(
                self._middle, lambda _: heard.append(self._model.forward(batch, table, tap))
            )
            other = self._stack.forward(batch, table, inner)
            own = heard[0]
        return torch.cat([own, other], dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The model's, and the stack's added, which are zero."""
        own, other = self._parted(hidden)
        return (
            self._model.compute_logits(own)
            + self._stack.compute_logits(other)[:, : self._vocabulary]
        )

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """The model's; the stack's are computed as well, and nothing of them is added."""
        own, other = self._parted(hidden)
        values, kept = self._model.score(own, tokens, kept_rows)
        nothing, _ = self._stack.score(other, tokens, [])
        return [value + 0.0 * none for value, none in zip(values, nothing, strict=True)], kept

    def _parted(self, hidden: Tensor) -> Iterator[Tensor]:
        return (
            part.contiguous()
            for part in torch.split(hidden, [self._width, hidden.shape[1] - self._width], 1)
        )
