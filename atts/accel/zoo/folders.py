"""Model folders that are added to a zoo: seen to be models, and completed from a base."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from atts.concurrency import import_lock
from atts.errors import ModelLoadError, OptionError
from atts.files import open_ordinary, storage, write_atomic
from atts.local.model_config import Family, check_model
from atts.models.folders import WEIGHT_FILES, read_object, weight_files
from atts.models.stored_blocks import (
    MANIFEST,
    StoredBlock,
    StoredFile,
    StoredModel,
    block_path,
    check_stored,
    content_digest,
)

_LENGTH = 8  # bytes that say how long a header is
_ALIGNMENT = 8
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor's bytes, and their description in the file's header."""

    kind: str
    shape: Sequence[int]
    data: memoryview


class WeightFile:
    """A safetensors file, mapped: its header as text, and its tensors by name."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Read the header of a file that the caller has checked."""
        file = stack.enter_context(path.open("rb"))
        self._whole = stack.enter_context(mmap(file.fileno(), 0, access=ACCESS_READ))
        view = stack.enter_context(memoryview(self._whole))
        start = _LENGTH + int.from_bytes(self._whole[:_LENGTH], "little")
        self.name = path.name
        self.header = self._whole[_LENGTH:start].decode()
        self.tensors = {
            name: StoredTensor(
                said["dtype"], said["shape"], stack.enter_context(view[start + begin : start + end])
            )
            for name, said, begin, end in _entries(self.header)
        }

    def stored(self) -> StoredFile:
        """Return the file's entry in a manifest."""
        return StoredFile(self.name, self.header, content_digest(self._whole))


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model, and what is to be in its file."""

    stored: StoredBlock
    parts: Sequence[bytes | memoryview]


def split(files: Sequence[WeightFile], family: Family) -> list[Block]:
    """Return the blocks of a model, in the order in which a token passes them."""
    places = dict[str, dict[str, tuple[str, StoredTensor]]]()
    for file in files:
        for name, tensor in file.tensors.items():
            place, inner = _place(name, family)
            # named twice, with and without the prefix of the full model
            if inner in places.get(place, ()):
                place = "rest"
                inner = name
            places.setdefault(place, {})[inner] = name, tensor
    return [_block(place, places[place]) for place in sorted(places, key=_order)]


def completed(
    own: Sequence[WeightFile], base: Mapping[str, StoredTensor], num_layers: int
) -> Block:
    """Complete the part of a model's weights in `own` by its base's."""
    weights = dict[str, tuple[str, StoredTensor]]()
    for tensors in (base, *(file.tensors for file in own)):
        for name, tensor in tensors.items():
            layer = _LAYER.fullmatch(name)
            if tensors is not base or layer is None or int(layer[1]) < num_layers:
                weights[name.removeprefix("model.")] = name, tensor
    return _block("weights", {name: (name, tensor) for name, tensor in weights.values()})


def whole_block(place: str, file: WeightFile) -> Block:
    """Return all tensors of a file as one block."""
    return _block(place, {name: (name, tensor) for name, tensor in file.tensors.items()})


def joined(file: StoredFile, tensors: Mapping[str, StoredTensor]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a weight file as it was added, from its header and its tensors."""
    header = file.header.encode()
    yield len(header).to_bytes(_LENGTH, "little") + header
    for name, _, _, _ in sorted(_entries(file.header), key=lambda entry: entry[2]):
        yield tensors[name].data


def _entries(header: str) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    for name, said in json.loads(header).items():
        if name != "__metadata__":
            yield name, said, *said["data_offsets"]


def _place(name: str, family: Family) -> tuple[str, str]:
    """Return the block that a tensor belongs to, and its name there, the same in whatever layer the
    block stands.
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        bare = name.removeprefix("model.")
        known = {"embed_tokens": "embedding", "norm": "head", "lm_head": "head"}
        return known.get(bare.partition(".")[0], "rest"), bare
    layer, inner = found.groups()
    part = inner.partition(".")[0]
    (before, after, *_) = family.norms
    return f"layers.{layer}.{'attention' if part in ('self_attn', before, after) else 'mlp'}", inner


def _order(place: str) -> tuple[int, int, str]:
    stage = {"embedding": 0, "head": 2, "adapter": 3, "rest": 4}.get(place, 1)
    return stage, int(place.split(".")[1]) if stage == 1 else 0, place


def _block(place: str, tensors: dict[str, tuple[str, StoredTensor]]) -> Block:
    """Make a block whose file depends on nothing but its tensors."""
    header = dict[str, Any]()
    end = 0
    order = sorted(tensors, key=lambda inner: (-_width(tensors[inner][1].kind), inner))
    for inner in order:
        tensor = tensors[inner][1]
        begin = end
        end = end + len(tensor.data)
        header[inner] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts: list[bytes | memoryview] = [
        len(text).to_bytes(_LENGTH, "little") + text,
        *(tensors[inner][1].data for inner in order),
    ]
    names = {name: inner for inner, (name, _) in sorted(tensors.items())}
    return Block(StoredBlock(place, content_digest(*parts), sum(map(len, parts)), names), parts)


def _width(kind: str) -> int:
    """Return the bits of a type such as BF16 or F8_E4M3."""
    number = re.search(r"\d+", kind)
    return int(number[0]) if number else 8


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
            "NAME", f"{name!r} cannot be a model's name; use letters, digits, '.', '_' and '-'"
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
    with import_lock:
        from atts.local.loader import check_weights  # imports torch
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
    tensors = dict[str, StoredTensor]()
    for file in model.files if model.is_whole else ():
        tensors |= WeightFile(folder / file.name, stack).tensors
    for block in () if model.is_whole else model.blocks:
        theirs = WeightFile(block_path(folder.parent.parent, block.digest), stack).tensors
        tensors |= {outer: theirs[inner] for outer, inner in block.tensors.items()}
    return tensors


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
    """Return the total size of the files."""
    return sum(path.stat().st_size for path in files)


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Make copies that are on the disk when this returns."""
    for path in files:
        with open_ordinary(path) as file:
            write_atomic(folder / path.name, iter(lambda: file.read(1 << 20), b""))
