"""Tests of trained relatives of a model: they are saved as peft and transformers do, and read by a
zoo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atts.accel import Zoo
from atts.local.loader import read_adapter
from atts.local.model_config import check_model
from atts.models import path
from atts.models.stored_blocks import ADAPTER, adapter_file

blocks = pytest.importorskip("scripts.studies.blocks", reason="needs a checkout")


def test_relatives_learn_and_share_what_is_not_their_own(tmp_path: Path) -> None:
    """Each trained relative is better than its base at what it was trained on, and the zoo stores
    the base's blocks once.
    """
    torch.set_num_threads(1)
    zoo = Zoo(tmp_path / "zoo")
    zoo.add("base", path("target"))
    table = blocks.relatives(path("target"), tmp_path, zoo, 4)
    assert [row[0] for row in table.rows] == ["adapter-1", "adapter-2", "tuned"]
    assert all(row[4] < row[3] for row in table.rows)
    contents = zoo.show()
    assert contents.stored < contents.apart / 2


def test_a_saved_adapter_computes_what_was_trained(tmp_path: Path) -> None:
    """The weights that the zoo computes from the base and the saved adapter equal those of the
    trained model.
    """
    model = blocks.opened(path("target"))
    own = blocks.adapted(model)
    with torch.no_grad():
        for number, weight in enumerate(own.values()):
            weight.copy_(torch.full_like(weight, 0.01 * (number + 1)))
    blocks.save_adapter(model, tmp_path / "adapter")
    zoo = Zoo(tmp_path / "zoo")
    zoo.add("base", path("target"))
    zoo.add("adapter", tmp_path / "adapter", "base")
    folder = zoo.folder("adapter")
    config, _ = check_model(folder, "adapter")
    file = adapter_file(folder)
    assert file is not None
    read = read_adapter(file, folder / ADAPTER, config, "adapter")
    base = blocks.opened(path("target"))
    for name, low_rank in read.items():
        trained = model.get_submodule(f"model.{name}").weight
        merged = low_rank.added_to(base.get_submodule(f"model.{name}").weight)
        assert torch.allclose(merged, trained, atol=1e-6)
    assert len(read) == len(own) / 2
