"""Tests of related models of the embedded target: the shipped ones, and the start of training
one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atts.accel import Zoo
from atts.models import path
from scripts.studies.train import ADAPTED, MEMBERS, TRUNK, relative, retold

FAMILY = path("target").parent / "family"


OWN = {
    "draft": {f"layers.{TRUNK - 1}.mlp", "head"},
    "operations": {"adapter"},
    "tuned": {"layers.5.mlp"},
    "wordings": {"adapter"},
}


def test_shipped_relatives_add_few_blocks_to_a_zoo(tmp_path: Path) -> None:
    """Each shipped relative adds few blocks to those of the target, and adapters change only the
    layers that their configuration names.
    """
    zoo = Zoo(tmp_path / "zoo")
    base = zoo.add("base", path("target"))
    assert [folder.name for folder in sorted(FAMILY.iterdir())] == sorted(OWN)
    for name, places in OWN.items():
        added = zoo.add(name, FAMILY / name, "base")
        assert {block.place for block in added.blocks if block.digest not in base.digests} == places
        if places == {"adapter"}:
            layers = {
                int(key.split(".")[4])
                for key in load_file(FAMILY / name / "adapter_model.safetensors")
            }
            assert layers == set(ADAPTED)
    assert sum(file.stat().st_size for file in FAMILY.rglob("*") if file.is_file()) < 3e6


@pytest.mark.parametrize("name", MEMBERS)
def test_a_relative_begins_as_the_target(name: str) -> None:
    """Before training, a related model gives the target's scores, and training can change only the
    tensors that the two models do not share.
    """
    model = relative(name)
    target = load_file(path("target") / "model.safetensors")
    own = {key for key, weight in model.named_parameters() if weight.requires_grad}
    assert own
    assert not any(key.startswith("model.layers.0.") for key in own)
    plain = {key: weight for key, weight in model.state_dict().items() if key in target}
    assert all(torch.equal(weight, target[key].float()) for key, weight in plain.items())
    if name == "draft":
        assert len(model.model.layers) == TRUNK


def test_rewording_keeps_numbers() -> None:
    """A reworded problem has the same numbers, and only whole words are replaced."""
    assert (
        retold("Ana buys 3 more. Then Ana gives away 2.")
        == "Ana picks 3 extra. Then Ana hands out 2."
    )
