"""Fixtures of small random models that share blocks, and digests of folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atts.accel import Zoo
from tests.local.conftest import make_model as make_model

Make = Callable[..., Path]
Tune = Callable[..., Path]
Words = Mapping[str, Sequence[str]]
MakeZoo = Callable[[Words, Words], Zoo]


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder."""
    return {
        str(path.relative_to(folder)): blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def base(make_model: Make) -> Path:
    """Make the model that the other models are tuned from, once per session."""
    return make_model("llama")


@pytest.fixture
def tune(base: Path, tmp_path: Path) -> Tune:
    """Copy a model's folder and add noise to the tensors whose names contain one of these words."""

    def make(
        name: str, *words: str, source: Path | None = None, seed: int = 0, **config: Any
    ) -> Path:
        folder = tmp_path / name
        shutil.copytree(source or base, folder)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        torch.manual_seed(seed)
        for key, tensor in tensors.items():
            if any(word in key for word in words):
                tensors[key] = tensor + 0.05 * torch.randn_like(tensor)
        save_file(tensors, path, metadata={"format": "pt"})
        if config:
            said = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(said | config))
        return folder

    return make


@pytest.fixture
def make_zoo(base: Path, tune: Tune, tmp_path: Path) -> MakeZoo:
    """Return a function that makes a zoo of the base, of models whose named tensors are tuned, and
    of adapters.
    """
    from .test_adapters import save_adapter

    def make(tuned: Words, adapted: Words) -> Zoo:
        zoo = Zoo(tmp_path / "zoo")
        zoo.add("base", base)
        for name, words in tuned.items():
            zoo.add(name, tune(name, *words))
        for seed, (name, words) in enumerate(adapted.items(), 1):
            zoo.add(name, save_adapter(tmp_path / name, base, *words, seed=seed))
        return zoo

    return make
