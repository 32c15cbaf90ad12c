"""Relatives of the embedded target: adapters that are shipped, and what the trainer calls a relative's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atts.blocks import Zoo
from atts.models import path
from scripts.studies.train_family import ADAPTED, MEMBERS, TRUNK, relative, retold

FAMILY = path("target").parent / "family"


def test_shipped_adapters_are_models_of_a_zoo(tmp_path: Path) -> None:
    """Each adds one small block to the target's, and is of the layers that it says."""
    zoo = Zoo(tmp_path / "zoo")
    base = zoo.add("base", path("target"))
    for folder in sorted(FAMILY.iterdir()):
        added = zoo.add(folder.name, folder, "base")
        assert len(added.digests - base.digests) == 1
        layers = {int(name.split(".")[4]) for name in load_file(folder / "adapter_model.safetensors")}
        assert layers == set(ADAPTED)
    assert sum(file.stat().st_size for file in FAMILY.rglob("*") if file.is_file()) < 3e6


@pytest.mark.parametrize("name", MEMBERS)
def test_a_relative_begins_as_the_target(name: str) -> None:
    """Before it has learned anything; what it may learn is its own alone."""
    model, target = relative(name), load_file(path("target") / "model.safetensors")
    own = {key for key, weight in model.named_parameters() if weight.requires_grad}
    assert own
    assert not any(key.startswith("model.layers.0.") for key in own)
    plain = {key: weight for key, weight in model.state_dict().items() if key in target}
    assert all(torch.equal(weight, target[key].float()) for key, weight in plain.items())
    if name == "draft":
        assert len(model.model.layers) == TRUNK


def test_another_wording_says_the_same() -> None:
    """Numbers stay; whole words are exchanged."""
    assert retold("Ana buys 3 more. Then Ana gives away 2.") == "Ana picks 3 extra. Then Ana hands out 2."
