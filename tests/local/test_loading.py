"""Tests of loading: memory stays bounded, and bfloat16 weights are recognised."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import anyio
import pytest
import torch
from torch import Tensor

from atts.core import SampleRequest, Sampling, TokenIds
from atts.local import LocalEngine, LocalOptions, loader
from atts.local.cpu.model import is_bfloat16
from atts.models import path
from atts.sampling import Seed


def texts(kernel: Literal["torch", "native"]) -> TokenIds:
    """Load the largest bundled model, and return the text that it writes."""

    async def main() -> TokenIds:
        options = LocalOptions(kernel=kernel, worker="thread", threads=1, kv_tokens=256)
        async with LocalEngine(path("deep"), options=options) as engine:
            request = SampleRequest((1, 4, 9), 12, Sampling(0.0), Seed(0))
            return (await engine.sample(request)).ids

    return anyio.run(main)


def test_layers_are_packed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model loads, at most two layers are unpacked: the layer being read and the layer
    before it.

    Reading all layers before packing the first would take four times the model's size.
    """
    read_layer: Any = loader._layer  # pyright: ignore[reportPrivateUsage]
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def counted(*arguments: Any) -> Any:
        nonlocal most
        layer = read_layer(*arguments)
        alive.append(weakref.ref(layer.gate_up))
        most = max(most, sum(each() is not None for each in alive))
        return layer

    on_torch = texts("torch")
    monkeypatch.setattr(loader, "_layer", counted)
    assert texts("native") == on_torch
    assert len(alive) == 8
    assert most <= 2


def test_a_matrix_is_bfloat16_only_if_every_number_is() -> None:
    """A matrix counts as bfloat16 only if bfloat16 can represent every number in it.

    A single other number in the last row is noticed. The memory layout of the matrix does not
    matter.
    """
    matrix = torch.randn(5000, 7).bfloat16().float()
    assert is_bfloat16(matrix)
    assert is_bfloat16(matrix.T)
    matrix[4999, 6] = 1.0000001
    assert not is_bfloat16(matrix)
    assert not is_bfloat16(matrix.T)
