"""Model folders cut into blocks: embedding, attention, feed-forward block, head."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from atts.local.model_config import Family
from atts.models.stored_blocks import StoredBlock, StoredFile, content_digest

_LENGTH = 8  # bytes that say how long a header is
_ALIGNMENT = 8
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are, and how its header describes them."""

    kind: str
    shape: Sequence[int]
    data: memoryview


class WeightFile:
    """A safetensors file, mapped: its header as text, and its tensors by name."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """The caller has seen that the file is whole."""
        file = stack.enter_context(path.open("rb"))
        self._whole = stack.enter_context(mmap(file.fileno(), 0, access=ACCESS_READ))
        view = stack.enter_context(memoryview(self._whole))
        start = _LENGTH + int.from_bytes(self._whole[:_LENGTH], "little")
        self.name, self.header = path.name, self._whole[_LENGTH:start].decode()
        self.tensors = {
            name: StoredTensor(
                said["dtype"], said["shape"], stack.enter_context(view[start + begin : start + end])
            )
            for name, said, begin, end in _entries(self.header)
        }

    def stored(self) -> StoredFile:
        """Return how it is written in a manifest."""
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
    found = dict[str, tuple[str, StoredTensor]]()
    for tensors in (base, *(file.tensors for file in own)):
        for name, tensor in tensors.items():
            layer = _LAYER.fullmatch(name)
            if tensors is not base or layer is None or int(layer[1]) < num_layers:
                found[name.removeprefix("model.")] = name, tensor
    return _block("weights", {name: (name, tensor) for name, tensor in found.values()})


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
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else 8
