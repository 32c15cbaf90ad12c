"""Model folders that are added to a zoo: seen to be models, and completed from a base."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path

from atts.accel.zoo.splitting import StoredTensor, WeightFile, completed
from atts.errors import ModelLoadError, OptionError
from atts.files import open_ordinary, storage, write_atomic
from atts.local.checking import check_model, check_weights
from atts.local.model_config import Family
from atts.models.folders import WEIGHT_FILES, read_object, weight_files
from atts.models.stored_blocks import MANIFEST, StoredModel, block_path, check_stored

_OTHER_WEIGHTS = (
    *WEIGHT_FILES,
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.pkl",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.msgpack",
)
"""Weights in forms that no local engine reads: they stay where they are."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_INDEX = ".safetensors.index.json"
"""What says in which of several files a weight is."""


def check_name(name: str, taken: Collection[str] = ()) -> None:
    """See that a model can be called so.

    :raises OptionError: it cannot, or another is.
    """
    if not _NAME.fullmatch(name):
        raise OptionError(
            "NAME", f"{name!r} can be no model's name; use letters, digits, '.', '_' and '-'"
        )
    if name in taken:
        raise OptionError(
            "NAME", f"{name!r} is taken; take another, or remove that model first (atts zoo remove)"
        )


def checked(folder: Path, name: str) -> Family:
    """Describe how the model in a folder is built, all of which is there.

    :raises ModelLoadError: the folder holds no model that a local engine computes.
    """
    config, _ = check_model(folder, name)
    check_weights(folder, config, name)
    return config.rules


def complete(folder: Path, base: Path, whole: Path, name: str) -> None:
    """Write a model to a new folder: weights and other files that `folder` lacks are those of a
    zoo's model, `base`.

    A folder without weights makes the base's first layers before its head, as many as its
    configuration says.

    :raises OptionError: the base is an adapter's model.
    :raises ModelLoadError: the folder's weights are damaged.
    :raises ZooError: the base's are.
    """
    stored = check_stored(base)
    assert stored is not None, "a model of a zoo has a manifest"
    unadapted(stored, "--base")
    layers = read_object(folder / "config.json", name).get("num_hidden_layers")
    whole.mkdir()
    side = [*side_files(base), *side_files(folder)]
    copy_files([path for path in side if not path.name.endswith(_INDEX)], whole)
    with ExitStack() as stack:
        theirs = tensors_of(base, stored, stack)
        try:
            has_weights = any(
                path.match(kind) for path in folder.iterdir() for kind in _OTHER_WEIGHTS
            )
            own = (
                [WeightFile(path, stack) for path in weight_files(folder, name)]
                if has_weights
                else []
            )
        except (ValueError, LookupError, TypeError) as error:
            raise ModelLoadError(
                name, f"the weights in {folder} are damaged ({error})", "Download it again"
            ) from error
        block = completed(own, theirs, layers if isinstance(layers, int) else len(theirs))
        write_atomic(whole / "model.safetensors", block.parts)


def tensors_of(folder: Path, model: StoredModel, stack: ExitStack) -> dict[str, StoredTensor]:
    """Return every tensor of a zoo's model by its name in the model's files, an adapter's included."""
    found = dict[str, StoredTensor]()
    for file in model.files if model.is_whole else ():
        found |= WeightFile(folder / file.name, stack).tensors
    for block in () if model.is_whole else model.blocks:
        theirs = WeightFile(block_path(folder.parent.parent, block.digest), stack).tensors
        found |= {outer: theirs[inner] for outer, inner in block.tensors.items()}
    return found


def unadapted(model: StoredModel, option: str) -> StoredModel:
    """Return the model, where it has no adapter.

    :raises OptionError: it has one.
    """
    if model.base:
        raise OptionError(
            option, f"{model.name!r} is an adapter's model itself; name its base, {model.base!r}"
        )
    return model


def side_files(folder: Path) -> list[Path]:
    """List what lies in a model's folder besides its weights."""
    with storage(folder):
        plain = [
            path
            for path in sorted(folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        ]
    return [
        path
        for path in plain
        if not any(path.match(kind) for kind in _OTHER_WEIGHTS) and path.name != MANIFEST
    ]


def bytes_of(files: Iterable[Path]) -> int:
    """Return how large files are together."""
    return sum(path.stat().st_size for path in files)


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Make copies that are on the disk when this returns."""
    for path in files:
        with open_ordinary(path) as file:
            write_atomic(folder / path.name, iter(lambda: file.read(1 << 20), b""))
