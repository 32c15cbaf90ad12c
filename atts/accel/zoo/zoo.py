"""The directory of a zoo, which stays valid even if adding, removing or exporting a model is
interrupted.

The first part of the module checks model folders that are added, and completes them from a base
model. The last part compares blocks of the same shape, and replaces blocks of a model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from mmap import ACCESS_READ, mmap
from pathlib import Path
from secrets import token_hex
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from atts.concurrency import import_lock
from atts.core import TokenIds
from atts.errors import ModelLoadError, OptionError, ZooError
from atts.files import open_ordinary, storage, sync_directory, write_atomic
from atts.journal import locked
from atts.local.model_config import Family, check_model, read_model_config
from atts.models.folders import WEIGHT_FILES, read_object, weight_files, weights_marks
from atts.models.stored_blocks import (
    ADAPTER,
    ADAPTER_CONFIG,
    BLOCKS,
    MANIFEST,
    MARK,
    MODELS,
    SCHEMA,
    Loss,
    StoredBlock,
    StoredFile,
    StoredModel,
    block_path,
    check_schema,
    check_stored,
    content_digest,
    file_digest,
    read_stored,
)

if TYPE_CHECKING:
    from torch import Tensor


# number of bytes at the start of a safetensors file that give the length of its header
_LENGTH = 8
_ALIGNMENT = 8
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weight file: its data type and shape, which come from the file's header, and
    its bytes.
    """

    kind: str
    shape: Sequence[int]
    data: memoryview


class WeightFile:
    """A memory-mapped safetensors file: its header as text, and its tensors by name."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Read a file's header and map the file into memory.

        The caller must have checked that the file is valid.
        """
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
        """Return the entry for this file in a model's manifest."""
        return StoredFile(self.name, self.header, content_digest(self._whole))


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model, such as one layer's attention, and the contents of the block's file."""

    stored: StoredBlock
    parts: Sequence[bytes | memoryview]


def split(files: Sequence[WeightFile], family: Family) -> list[Block]:
    """Divide the weights in a model's files into blocks, in the order in which the blocks are
    computed for a token.
    """
    places = dict[str, dict[str, tuple[str, StoredTensor]]]()
    for file in files:
        for name, tensor in file.tensors.items():
            place, inner = _place(name, family)
            # If two tensor names differ only in the prefix "model.", the second tensor goes into
            # the block "rest" under its full name.
            if inner in places.get(place, ()):
                place = "rest"
                inner = name
            places.setdefault(place, {})[inner] = name, tensor
    return [_block(place, places[place]) for place in sorted(places, key=_order)]


def completed(
    own: Sequence[WeightFile], base: Mapping[str, StoredTensor], num_layers: int
) -> Block:
    """Return all weights of a model as one block. Weights that are not in `own` come from the base
    model.

    Layers of the base from number `num_layers` on are left out.
    """
    weights = dict[str, tuple[str, StoredTensor]]()
    for tensors in (base, *(file.tensors for file in own)):
        for name, tensor in tensors.items():
            layer = _LAYER.fullmatch(name)
            if tensors is not base or layer is None or int(layer[1]) < num_layers:
                weights[name.removeprefix("model.")] = name, tensor
    return _block("weights", {name: (name, tensor) for name, tensor in weights.values()})


def whole_block(place: str, file: WeightFile) -> Block:
    """Make one block that contains all tensors of a file."""
    return _block(place, {name: (name, tensor) for name, tensor in file.tensors.items()})


def joined(file: StoredFile, tensors: Mapping[str, StoredTensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a weight file, made from its header and its tensors. They are the same as
    in the file that was added.
    """
    header = file.header.encode()
    yield len(header).to_bytes(_LENGTH, "little") + header
    for name, _, _, _ in sorted(_entries(file.header), key=lambda entry: entry[2]):
        yield tensors[name].data


def _entries(header: str) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    for name, said in json.loads(header).items():
        if name != "__metadata__":
            yield name, said, *said["data_offsets"]


def _place(name: str, family: Family) -> tuple[str, str]:
    """Return two names for a tensor: the place of the block that contains it, such as
    `layers.3.attention`, and its name in this block.

    The name in the block does not contain the layer, so it is the same in every layer.
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
    """Make a block of tensors.

    Blocks with the same tensors have the same file, because nothing else is written into the file.
    """
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
    """Return the number of bits of a data type such as BF16 or F8_E4M3."""
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
"""Name patterns of files with weights, in any format. The code calls all other files of a model its
side files.
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_INDEX = ".safetensors.index.json"
"""End of the names of index files. An index file lists, for each tensor, the weight file that
contains it.
"""


def check_name(name: str, taken: Collection[str] = ()) -> None:
    """Check that a new model may have this name.

    :raises OptionError: the name is not allowed, or another model has this name.
    """
    if not _NAME.fullmatch(name):
        raise OptionError(
            "NAME",
            f"{name!r} is not a valid model name; use only letters, digits, '.', '_' and '-'",
        )
    if name in taken:
        raise OptionError(
            "NAME",
            f"the zoo already has a model named {name!r}; choose another name, or remove that "
            "model with `atts zoo remove`",
        )


def checked(folder: Path, name: str) -> Family:
    """Check that a folder contains a complete model, and return its model family.

    :raises ModelLoadError: the folder contains no model that a local engine can run.
    """
    config, _ = check_model(folder, name)
    with import_lock:
        # imported only here, because `atts.local.loader` imports torch
        from atts.local.loader import check_weights
    check_weights(folder, config, name)
    return config.rules


def complete(folder: Path, base: Path, whole: Path, name: str) -> None:
    """Write a complete model to the new folder `whole`.

    Weights and other files that `folder` does not have are copied from `base`, a model of the zoo.
    If `folder` has no weights, all weights come from `base`: embedding, first layers and head. The
    folder's configuration gives the number of layers.

    :raises OptionError: the base is a model with an adapter.
    :raises ModelLoadError: the folder's weights are damaged.
    :raises ZooError: the base's weights are damaged.
    """
    stored = check_stored(base)
    assert stored is not None, "a model of a zoo must have a manifest"
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
                name, f"the weights in {folder} are damaged ({error})", "Download the weights again"
            ) from error
        block = completed(own, theirs, layers if isinstance(layers, int) else len(theirs))
        write_atomic(whole / "model.safetensors", block.parts)


def tensors_of(folder: Path, model: StoredModel, stack: ExitStack) -> dict[str, StoredTensor]:
    """Return all tensors of a zoo's model, keyed by name as in the model's files. Tensors of an
    adapter are included.
    """
    tensors = dict[str, StoredTensor]()
    for file in model.files if model.is_whole else ():
        tensors |= WeightFile(folder / file.name, stack).tensors
    for block in () if model.is_whole else model.blocks:
        theirs = WeightFile(block_path(folder.parent.parent, block.digest), stack).tensors
        tensors |= {outer: theirs[inner] for outer, inner in block.tensors.items()}
    return tensors


def unadapted(model: StoredModel, option: str) -> StoredModel:
    """Check that a model has no adapter, and return its manifest.

    :raises OptionError: the model has an adapter.
    """
    if model.base:
        raise OptionError(
            option, f"{model.name!r} is an adapter; give a base model, such as {model.base!r}"
        )
    return model


def side_files(folder: Path) -> list[Path]:
    """List the files of a model's folder, without its weights and the manifest."""
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
    """Return the total size of these files in bytes."""
    return sum(path.stat().st_size for path in files)


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files to a folder.

    When the function returns, all copies are on the disk.
    """
    for path in files:
        with open_ordinary(path) as file:
            write_atomic(folder / path.name, iter(lambda: file.read(1 << 20), b""))


@dataclass(frozen=True, slots=True)
class SharedPart:
    """Blocks that all models in `models` have, and no other model of the zoo has.

    `below` has the blocks that only some of these models share.
    """

    models: tuple[str, ...]
    # places of the shared blocks in the first of these models, such as layers.3.attention
    places: tuple[str, ...]
    bytes: int  # total size of the blocks in bytes; each block is stored once
    below: tuple[SharedPart, ...]


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One model of a zoo.

    `parts` maps each block's place, such as `layers.0.mlp`, to the number of models that have the
    same block.
    """

    name: str
    base: str
    bytes: int  # size in bytes of the model's files at the time when the model was added
    parts: Mapping[str, int]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class ZooContents:
    """The contents of a zoo at one moment."""

    zoo: str
    models: tuple[ModelLine, ...]
    tree: tuple[SharedPart, ...]
    blocks: int  # number of different blocks in the zoo
    stored: int  # size of the zoo's files in bytes
    # Total size in bytes of all models in separate folders. For an adapter, this includes its base
    # model.
    apart: int

    @property
    def saved(self) -> float:
        """Return the fraction of storage that the zoo saves compared with one folder per model.

        The result is negative if the zoo's manifests are larger than what shared blocks save.
        """
        return 1 - self.stored / self.apart if self.apart else 0.0


def contents(zoo: str, models: Sequence[StoredModel], stored: int) -> ZooContents:
    """Describe the contents of a zoo.

    `stored` is the size of the zoo's files in bytes.
    """
    owners = dict[str, tuple[str, ...]]()
    parts = dict[tuple[str, ...], list[StoredBlock]]()
    for model in models:
        for digest in model.digests:
            owners[digest] = (*owners.get(digest, ()), model.name)
    for model in models:
        for block in model.blocks:
            if owners[block.digest][0] == model.name:
                parts.setdefault(owners[block.digest], []).append(block)
    groups = list[SharedPart]()
    lines = list[ModelLine]()
    for names, found in parts.items():
        size = sum({block.digest: block.bytes for block in found}.values())
        groups.append(SharedPart(names, tuple([block.place for block in found]), size, ()))
    for model in models:
        counts = {block.place: len(owners[block.digest]) for block in model.blocks}
        lines.append(ModelLine(model.name, model.base, model.bytes, counts, model.is_whole))
    return ZooContents(
        zoo, tuple(lines), _tree(groups), len(owners), stored, sum(model.bytes for model in models)
    )


def _tree(groups: Sequence[SharedPart]) -> tuple[SharedPart, ...]:
    """Arrange the parts of a zoo in a tree. A part consists of the blocks that a set of models
    shares.

    A part's parent is the smallest part that belongs to all its models and to others.
    """
    ordered = sorted(groups, key=lambda part: (-len(part.models), part.models))
    below = dict[tuple[str, ...], list[SharedPart]]()
    for part in reversed(ordered):
        wider = [other for other in ordered if set(other.models) > set(part.models)]
        parent = min(wider, key=lambda other: len(other.models)).models if wider else ()
        children = tuple(reversed(below.get(part.models, [])))
        below.setdefault(parent, []).append(
            SharedPart(part.models, part.places, part.bytes, children)
        )
    return tuple(reversed(below.get((), [])))


def written_places(places: Sequence[str]) -> str:
    """Return the places of blocks as a short string, in which consecutive layers become a range.

    >>> written_places(["embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"])
    'embedding, layers 0-1'
    >>> written_places(["layers.0.mlp", "layers.2.attention", "layers.2.mlp", "head"])
    'layer 0 mlp, layer 2, head'
    """
    found = list[str]()
    layers = dict[int, list[str]]()
    for place in places:
        if place.startswith("layers."):
            _, at, half = place.split(".")
            layers.setdefault(int(at), []).append(half)
    runs = groupby(
        enumerate(layers.items()),
        lambda one: (one[1][0] - one[0], -1 if len(one[1][1]) > 1 else one[0]),
    )
    for _, run in runs:
        (_, (first, halves)), *more = run
        only = f" {halves[0]}" if len(halves) < 2 else ""
        found.append(f"layers {first}-{more[-1][1][0]}" if more else f"layer {first}{only}")
    after = [place for place in places if place != "embedding" and not place.startswith("layers.")]
    return ", ".join([*(["embedding"] if "embedding" in places else []), *found, *after])


_LOCK = "lock"
_ADAPTER_FILE = "adapter_model.safetensors"
_COMPLETED = ".completed"
"""Name of the zoo's temporary folder in which an incomplete model gets the missing files of its
base.
"""


class Zoo:
    """A directory of models that share weights. `models/NAME/` has a model's manifest and small
    files. It also has the model's weights if the model shares no block. `blocks/` has all other
    weights.

    A model is added or removed at the moment when its folder is renamed. If a process is killed
    before or after that moment, files may be left that no model uses. The next change of the zoo
    deletes them. A lock ensures
    that only one process at a time changes the zoo.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        """Return the names of the zoo's models in alphabetical order.

        :raises ZooError: the directory is not a zoo, or is a zoo of a newer version.
        """
        check_schema(self.directory)
        with storage(self.directory):
            return sorted(
                path.name for path in self._models.iterdir() if not path.name.startswith(".")
            )

    def folder(self, name: str) -> Path:
        """Return the folder of a model in the zoo, which a local engine can open.

        :raises ZooError: the zoo has no model with this name.
        """
        known = self.names()
        if name not in known:
            raise ZooError(
                self.directory,
                f"the zoo has no model {name!r}",
                f"Models in the zoo: {', '.join(known) or 'none'}",
            )
        return self._models / name

    def model(self, name: str) -> StoredModel:
        """Return a model's manifest.

        :raises ZooError: the zoo has no model with this name, or the model's manifest is damaged.
        """
        return read_stored(self.folder(name))

    def show(self) -> ZooContents:
        """Describe the models, the blocks that they share, and all sizes.

        Models with a damaged manifest are left out.

        :raises ZooError: the directory is not a zoo, or is a zoo of a newer version.
        """
        return contents(str(self.directory), self._known(), self._size())

    def damage(self) -> list[str]:
        """Compare every block with its digest, and return an error message for each damaged model.

        :raises ZooError: the directory is not a zoo, or is a zoo of a newer version.
        """
        found = list[str]()
        for name in self.names():
            try:
                if check_stored(self._models / name) is None:
                    read_stored(self._models / name)
            except ZooError as error:
                found.append(str(error))
        return found

    def add(self, name: str, folder: Path, base: str = "") -> StoredModel:
        """Add a model to the zoo under a name. Blocks that the zoo already has are not stored
        again.

        The folder may contain a PEFT adapter. The new model is then `base` with the adapter as one
        more block. If no base is given, the base is the zoo's model that was added from the folder
        that the adapter names.

        If `base` is given, a folder with a configuration may lack tokenizer files or weights, for
        example of layers that were not tuned. They are copied from `base`.

        :raises OptionError: the name is not allowed, or another model has this name.
        :raises ModelLoadError: the folder contains no model that a local engine can run.
        :raises ZooError: the directory is not a zoo, or is a zoo of a newer version.
        :raises StorageError: the disk cannot be written; nothing has changed.
        """
        check_name(name)
        if not folder.is_dir():
            raise OptionError(
                "FOLDER",
                f"{folder} is not a folder; give a folder that contains a model's configuration "
                "and weights",
            )
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            return self._add_adapter(name, folder, base)
        # `_adding` turns a new directory into a zoo, so check the model's folder first.
        family = None if base else checked(folder, name)
        with self._adding(name), ExitStack() as stack:
            whole = self.directory / _COMPLETED if base else folder
            if base:
                stack.callback(shutil.rmtree, whole, ignore_errors=True)
                with storage(whole):
                    complete(folder, self.folder(base), whole, name)
            with storage(whole):
                files = weight_files(whole, name)
                side = side_files(whole)
                mapped = [WeightFile(path, stack) for path in files]
                blocks = split(mapped, family or checked(whole, name))
                size = bytes_of([*side, *files])
                marks = weights_marks(files)
            source = str(folder.resolve())
            stored = tuple([file.stored() for file in mapped])
            cut = tuple([block.stored for block in blocks])
            model = StoredModel(name, source, "", False, size, marks, files=stored, blocks=cut)
            sharers = [other for other in self._known() if model.digests & other.digests]
            for other in sharers:
                self._separate(other)
            if sharers:
                self._write_blocks(blocks)
                return self._put(model, side)
            return self._put(replace(model, is_whole=True), [*side, *files])

    def _add_adapter(self, name: str, folder: Path, base: str) -> StoredModel:
        """Add an adapter as a model.

        The model has the blocks of its base, and one more block for the adapter.
        """
        with self._adding(name), ExitStack() as stack:
            base_model = self._base_of(folder, base, name)
            home = self._models / base_model.name
            file = folder / _ADAPTER_FILE
            config, _ = check_model(home, name)
            with import_lock:
                # imported only here, because `atts.local.loader` imports torch
                from atts.local.loader import check_adapter
            check_adapter(folder, file, config, name)
            with storage(folder):
                mapped = WeightFile(file, stack)
                side = side_files(folder)
                block = whole_block(ADAPTER, mapped)
                own = weights_marks([file, folder / ADAPTER_CONFIG])
            self._separate(base_model)
            self._write_blocks([block])
            source = str(folder.resolve())
            size = base_model.bytes + bytes_of([*side, file])
            marks = (f"{base_model.marks[0]}+{own[0]}", f"{base_model.marks[1]}+{own[1]}")
            blocks = (*base_model.blocks, block.stored)
            stored = (mapped.stored(),)
            model = StoredModel(
                name, source, base_model.name, False, size, marks, files=stored, blocks=blocks
            )
            return self._put(model, side_files(home), side)

    def _base_of(self, folder: Path, base: str, name: str) -> StoredModel:
        """Return the base model of an adapter: the model `base`, or else the model that the
        adapter's configuration names.
        """
        if base:
            return unadapted(self.model(base), "--base")
        said = str(read_object(folder / ADAPTER_CONFIG, name).get("base_model_name_or_path") or "")
        known = [model for model in self._known() if not model.base]
        places = (
            {said, str((folder / said).resolve()), str(Path(said).expanduser().resolve())}
            if said
            else set[str]()
        )
        for model in known:
            if model.source in places or model.name == said:
                return model
        names = ", ".join(model.name for model in known) or "none, so add the base model first"
        problem = (
            f"{folder} is an adapter, and its base model ({said or 'not named'}) was not found in "
            "the zoo"
        )
        raise OptionError(
            "--base", f"{problem}; give the adapter's base model (in the zoo: {names})"
        )

    def remove(self, name: str) -> int:
        """Remove a model, and delete all blocks that no other model uses.

        Return the number of freed bytes.

        :raises ZooError: the zoo has no model with this name.
        :raises StorageError: the disk cannot be written.
        """
        with self._changing():
            folder = self.folder(name)
            before = self._size()
            with storage(folder):
                folder.rename(self._models / f".removed-{token_hex(6)}")
                sync_directory(self._models)
            self._collect()
            return before - self._size()

    def export(self, name: str, out: Path) -> None:
        """Write the files of a model to a new folder, exactly as they were added.

        Every weight file is compared with its digest.

        :raises ZooError: the zoo has no model with this name, or one of the model's blocks is
            damaged.
        :raises OptionError: `out` exists already.
        :raises StorageError: the disk cannot be written; no partial files are left.
        """
        if out.exists():
            raise OptionError("OUT", f"{out} already exists; give a new folder")
        folder = self.folder(name)
        model = check_stored(folder)
        assert model is not None, "a model of a zoo must have a manifest"
        with _made(out) as temporary, ExitStack() as stack:
            home = folder / ADAPTER if model.base else folder
            self._refuse_links_out(home)
            copy_files(
                [path for path in home.iterdir() if path.is_file() and path.name != MANIFEST],
                temporary,
            )
            tensors = {} if model.is_whole else tensors_of(folder, model, stack)
            for file in () if model.is_whole else model.files:
                path = temporary / file.name
                write_atomic(path, joined(file, tensors))
                if file_digest(path) != file.digest:
                    raise ZooError(
                        self.directory,
                        f"{file.name} of {name!r} is no longer the same as the file that was added",
                    )

    def _refuse_links_out(self, folder: Path) -> None:
        """Raise an error if a model's folder has a link to a file outside the zoo, because the
        contents of this file were never added.

        :raises ZooError: the folder has a link that leads out of the zoo.
        """
        root = self.directory.resolve()
        for path in folder.iterdir():
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ZooError(
                    self.directory,
                    f"{path.relative_to(self.directory)} is a symbolic link to a file outside the "
                    "zoo",
                    "Remove the link, and add the model again",
                )

    def likenesses(self, name: str, most: int = 1, apart: float = 1.0) -> list[BlockSimilarity]:
        """Find, for each block of a model, other blocks with similar parameters.

        For each place, at most `most` other blocks of the same shape are returned, the nearest
        first. The distance between a block and the model's own block is the norm of their
        difference. It is at most `apart` times the norm of the own block.

        :raises OptionError: the model is an adapter.
        :raises ZooError: the zoo has no model with this name, or the model's manifest is damaged.
        """
        unadapted(self.model(name), "NAME")
        with self._changing():
            for model in self._known():
                self._separate(model)
        return likenesses(self.directory, self.model(name), self._known(), (most, apart))

    def keep(
        self, name: str, model: StoredModel, digests: Mapping[str, str], loss: Loss
    ) -> StoredModel:
        """Add a variant of a model to the zoo. In the variant, other blocks replace some of the
        model's own.

        `digests` maps the places of replaced blocks to the digests of the new ones. `loss` says how
        much the variant's predictions and accuracy differ from the model's, as measured.

        :raises OptionError: the name is not allowed, or another model has this name.
        :raises StorageError: the disk cannot be written; nothing has changed.
        """
        with self._adding(name), ExitStack() as stack:
            made = replace(changed(model, digests), name=name, loss=loss)
            with storage(self.directory):
                tensors = tensors_of(self.folder(model.name), made, stack)
                digest = {file.name: content_digest(*joined(file, tensors)) for file in made.files}
            made = replace(
                made, files=tuple(replace(file, digest=digest[file.name]) for file in made.files)
            )
            return self._put(made, side_files(self.folder(model.name)))

    def within(self, name: str, bound: float) -> StoredModel:
        """Return the variant of a model with the largest divergence from the model that is at most
        `bound` nats per token.

        :raises OptionError: no variant has such a small divergence.
        :raises ZooError: the zoo has no model with this name, or the model's manifest is damaged.
        """
        own = name, self.model(name).marks[1]
        kept = {
            one.loss.nats: one
            for one in self._known()
            if one.loss and (one.loss.model, one.loss.weights) == own
        }
        if fits := [nats for nats in kept if nats <= bound]:
            return kept[max(fits)]
        known = (
            ", ".join(f"{one.name} diverges by {nats:.3g}" for nats, one in kept.items())
            or "the zoo has no lossy replacement for this model"
        )
        advice = (
            f"To make one, run `atts zoo compare {name} --zoo {self.directory} --lossy {bound:g} "
            "--keep NAME`"
        )
        raise OptionError(
            "lossy",
            f"no lossy replacement for {name!r} has a divergence of at most {bound:g} nats per "
            f"token ({known}). {advice}",
        )

    def _known(self) -> list[StoredModel]:
        """Return the models of the zoo whose manifests can be read."""
        return [model for model in map(self._read, self.names()) if model is not None]

    @property
    def _models(self) -> Path:
        return self.directory / MODELS

    @contextmanager
    def _adding(self, name: str) -> Generator[None, None, None]:
        """Hold the zoo's lock while a model is added, and check that no model has its name yet."""
        with self._changing(create=True):
            check_name(name, self.names())
            yield

    @contextmanager
    def _changing(self, *, create: bool = False) -> Generator[None, None, None]:
        """Hold the zoo's lock while the zoo is changed.

        Before the change, delete the files that interrupted changes have left.
        """
        if create and not (self.directory / MARK).exists():
            self._create()
        check_schema(self.directory)
        with locked(self.directory / _LOCK, self.directory, wait=True):
            shutil.rmtree(self.directory / _COMPLETED, ignore_errors=True)
            self._collect()
            yield

    def _create(self) -> None:
        with storage(self.directory):
            others = (
                [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
            )
            if any(
                name not in (MODELS, BLOCKS, _LOCK, MARK) and not name.startswith(f".{MARK}.")
                for name in others
            ):
                raise ZooError(
                    self.directory,
                    "the directory is not a zoo and contains other files",
                    "Give a new folder",
                )
            for part in (MODELS, BLOCKS):
                (self.directory / part).mkdir(parents=True, exist_ok=True)
            write_atomic(self.directory / MARK, msgspec.json.encode({"schema": SCHEMA}))

    def _read(self, name: str) -> StoredModel | None:
        """Return a model's manifest, or None if the manifest is damaged."""
        try:
            return read_stored(self._models / name)
        except ZooError:
            return None

    def _separate(self, model: StoredModel) -> None:
        """Store a model's weights as blocks if they are still stored as files.

        The blocks are written first, and the model's files are deleted last. Therefore, nothing is
        lost if the process is interrupted.
        """
        if not model.is_whole:
            return
        folder = self._models / model.name
        check_stored(folder)
        config, _ = check_model(folder, model.name)
        with ExitStack() as stack:
            with storage(folder):
                mapped = [WeightFile(folder / file.name, stack) for file in model.files]
            self._write_blocks(split(mapped, config.rules))
        write_atomic(folder / MANIFEST, msgspec.json.encode(replace(model, is_whole=False)))
        self._collect()

    def _write_blocks(self, blocks: Iterable[Block]) -> None:
        """Write these blocks to the zoo.

        A block that the zoo already has is written again only if it is damaged.
        """
        for block in blocks:
            path = block_path(self.directory, block.stored.digest)
            digest = block.stored.digest
            with storage(path):
                is_there = path.is_file() and file_digest(path) == digest
            if not is_there:
                write_atomic(path, block.parts)

    def _put(
        self, model: StoredModel, files: Sequence[Path], adapter: Sequence[Path] = ()
    ) -> StoredModel:
        """Write a model's folder under a temporary name, then rename it.

        The files of an adapter are in a subfolder.
        """
        with _made(self._models / model.name) as temporary:
            copy_files(files, temporary)
            if adapter:
                (temporary / ADAPTER).mkdir()
                copy_files(adapter, temporary / ADAPTER)
            if model.is_whole and any(
                file_digest(temporary / file.name) != file.digest for file in model.files
            ):
                raise ZooError(
                    self.directory,
                    f"the files of {model.source} changed while atts read them",
                    "Add the model again",
                )
            write_atomic(temporary / MANIFEST, msgspec.json.encode(model))
        return model

    def _collect(self) -> None:
        """Delete files that no model uses, such as those left by removed models or interrupted
        changes.

        If the manifest of any model cannot be read, all blocks are kept, because that model may use
        them.
        """
        models = [(name, self._read(name)) for name in self.names()]
        with storage(self.directory):
            for path in self._models.glob(".*"):
                shutil.rmtree(path)
            for name, model in models:
                if model is not None and not model.is_whole:
                    for file in model.files:
                        (self._models / name / file.name).unlink(missing_ok=True)
            if all(model is not None for _, model in models):
                named = {
                    digest for _, model in models if model is not None for digest in model.digests
                }
                for path in (self.directory / BLOCKS).iterdir():
                    if path.stem not in named:
                        path.unlink()

    def _size(self) -> int:
        with storage(self.directory):
            return bytes_of(path for path in self.directory.rglob("*") if path.is_file())


@contextmanager
def _made(folder: Path) -> Generator[Path, None, None]:
    """Yield a temporary folder for the caller to fill. Then rename the folder to `folder`, or
    delete it if there was an error.
    """
    temporary = folder.with_name(f".{folder.name}.{token_hex(6)}")
    with storage(folder):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(folder)
            sync_directory(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


_KINDS = ("embedding", "attention", "mlp", "head")


@dataclass(frozen=True, slots=True)
class BlockSimilarity:
    """Measures of how similar a model's block at `place` is to another block of the same shape."""

    place: str
    digest: str  # digest of the similar block
    other: str  # model and place of the similar block, as MODEL/PLACE
    # norm of the difference between the parameters of both blocks, divided by the norm of the
    # model's block
    distance: float
    cosine: float


def likenesses(
    zoo: Path, model: StoredModel, models: Sequence[StoredModel], limits: tuple[int, float]
) -> list[BlockSimilarity]:
    """Find, for each block of a model, other blocks with similar parameters.

    All blocks of the model are in memory at once, as float32. Other blocks are read one at a time.
    `limits` has the largest number of results per place, and the largest distance relative to the
    norm of the model's block.
    """
    own_blocks = {
        block.digest: _read(zoo, block.digest)
        for block in model.blocks
        if _kind(block.place) in _KINDS
    }
    others = {
        block.digest: (known.name, block.place)
        for known in (*models, model)
        for block in known.blocks
    }
    similarities = list[BlockSimilarity]()
    for digest, (name, place) in others.items():
        alike = [
            mine
            for mine in model.blocks
            if mine.digest != digest and _kind(mine.place) == _kind(place)
        ]
        shape, theirs = _read(zoo, digest) if alike and _kind(place) in _KINDS else ("", None)
        for mine in alike:
            if theirs is not None and own_blocks[mine.digest][0] == shape:
                both = _nearness(own_blocks[mine.digest][1], theirs)
                similarities.append(BlockSimilarity(mine.place, digest, f"{name}/{place}", *both))
    most, apart = limits
    near = sorted(
        (one for one in similarities if one.distance <= apart), key=lambda one: one.distance
    )
    return [
        one
        for at, one in enumerate(near)
        if sum(one.place == other.place for other in near[:at]) < most
    ]


def _kind(place: str) -> str:
    return place.rpartition(".")[2]


def _read(zoo: Path, digest: str) -> tuple[str, Tensor]:
    """Read the file of a block.

    Return the names, types and shapes of its tensors as a string, and all its parameters as one
    array.
    """
    with import_lock:
        import torch
        from safetensors.torch import load_file
    tensors = sorted(load_file(block_path(zoo, digest)).items())
    shape = str([(name, tensor.dtype, tensor.shape) for name, tensor in tensors])
    return shape, torch.cat([tensor.float().flatten() for _, tensor in tensors])


def _nearness(mine: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Compare two arrays of the same size. Return their distance and the cosine of the angle
    between them.

    The distance is the norm of their difference, divided by the norm of the first array.
    """
    length = float(mine.norm())
    other = float(theirs.norm())
    cosine = float(mine @ theirs) / (length * other) if length and other else 0.0
    return float((mine - theirs).norm()) / length if length else float("inf"), cosine


def changed(model: StoredModel, digests: Mapping[str, str]) -> StoredModel:
    """Return a model's manifest with other blocks at some places.

    The manifest also gets a new identity, because the weights have changed.
    """
    blocks = tuple(
        replace(block, digest=digests.get(block.place, block.digest)) for block in model.blocks
    )
    mark = content_digest(*(block.digest.encode() for block in blocks))
    return replace(model, marks=(mark[:8], mark[:32]), blocks=blocks)


@contextmanager
def substituted(
    zoo: Path, model: StoredModel, digests: Mapping[str, str]
) -> Generator[Path, None, None]:
    """Yield a temporary folder with a copy of a model. In the copy, other blocks of the zoo replace
    some of the model's own.

    The model must be stored as blocks.
    """
    with TemporaryDirectory() as scratch:
        home = Path(scratch) / MODELS / model.name
        copytree(zoo / MODELS / model.name, home)
        (home / MANIFEST).write_bytes(msgspec.json.encode(changed(model, digests)))
        (Path(scratch) / BLOCKS).symlink_to((zoo / BLOCKS).resolve())
        (Path(scratch) / MARK).write_bytes(msgspec.json.encode({"schema": SCHEMA}))
        yield home


if TYPE_CHECKING:
    from torch import Tensor

    from atts.local.model import TorchModel


class Divergence(NamedTuple):
    """A measurement of how much two models' predictions of the next token differ, at some positions
    of some texts.
    """

    tokens: int  # number of text positions at which the predictions were compared
    nats: float  # mean Kullback-Leibler divergence of the two predictions, in nats
    # share (0 to 1) of positions at which the likeliest tokens of the two models differ
    flips: float


def divergence(one: Path, other: Path, texts: Sequence[tuple[TokenIds, int]]) -> Divergence:
    """Measure the divergence from the model in folder `one` to the model in folder `other`, in
    float32.

    Each text is a pair: its token ids, and the length of the prompt at its start. Predictions are
    compared only for the tokens after the prompt.

    :raises ModelLoadError: the weights of one of the models cannot be used.
    """
    longest = max(len(ids) for ids, _ in texts)
    tokens = 0
    nats = 0.0
    flips = 0
    models = [_model(folder, longest) for folder in (one, other)]
    for ids, given in texts:
        mine, theirs = (_laws(model, ids)[given - 1 : -1] for model in models)
        tokens += len(mine)
        nats += float((mine.exp() * (mine - theirs)).sum())
        flips += int((mine.argmax(-1) != theirs.argmax(-1)).sum())
    return Divergence(tokens, nats / max(1, tokens), flips / max(1, tokens))


def _model(folder: Path, longest: int) -> TorchModel:
    with import_lock:
        import torch

        from atts.local.loader import load_weights
        from atts.local.model import TorchModel
    config = read_model_config(folder, folder.name)
    cpu = torch.device("cpu")
    cache = torch.zeros(config.num_layers, 2, longest + 2, config.num_kv_heads, config.head_dim)
    return TorchModel(config, load_weights(folder, config, torch.float32, cpu, folder.name), cache)


def _laws(model: TorchModel, ids: TokenIds) -> Tensor:
    """Return the log-probability of every token at each position: [positions, vocabulary]."""
    import numpy as np

    from atts.local.batch import single_rows

    at = np.arange(len(ids))
    rows = single_rows(np.array(ids), at, np.zeros_like(at), (at[None] + 1).astype(np.int32))
    return (
        model.compute_logits(model.forward(rows, (at[None] + 1).astype(np.int32)))
        .double()
        .log_softmax(-1)
    )
