"""Tests of memory while a model loads."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import anyio
import pytest
from torch import Tensor

from atts.core import SampleRequest, Sampling, TokenIds
from atts.local import LocalEngine, LocalOptions, loader
from atts.models import path
from atts.sampling import Seed


def texts(kernel: Literal["torch", "native"]) -> TokenIds:
    """Load the largest bundled model, and return what it writes."""

    async def main() -> TokenIds:
        options = LocalOptions(kernel=kernel, worker="thread", threads=1, kv_tokens=256)
        async with LocalEngine(path("deep"), options=options) as engine:
            request = SampleRequest((1, 4, 9), 12, Sampling(0.0), Seed(0))
            return (await engine.sample(request)).ids

    return anyio.run(main)


def test_layers_are_packed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two layers are unpacked at any time: the one being read, and the one before it.

    A model whose layers were all read before the first is packed would take four times its size.
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
