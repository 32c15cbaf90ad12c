"""Models that are stored as blocks: the manifest that names each block's file by its content, read
and checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from atts.errors import ZooError
from atts.models.folders import weight_files

MANIFEST = "blocks.json"
MARK = "zoo.json"
ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
MODELS = "models"
BLOCKS = "blocks"
SCHEMA = 1
"""Of zoos: a higher number was written by a newer atts."""
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\x00]+\.safetensors$")]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A part of a model: where it stands, what its content is called, and how its tensors are
    named.
    """

    place: str  # embedding, layers.3.attention, layers.3.mlp, head, adapter, rest
    digest: Digest  # digest of its file, and the file's name
    bytes: int
    tensors: dict[str, str]  # names in the model's files, each with its name in the block's file


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A weight file as it was added: what precedes its tensors, and the digest of the whole."""

    name: FileName
    header: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Loss:
    """Change in a model's output with other blocks in some places, measured on its own solutions of
    some problems.
    """

    model: str
    weights: str  # its digest, as its engine's spec names it
    stands: dict[str, str]  # for each place, the origin of its block: MODEL/PLACE
    problems: str  # problems that the measurement used
    count: int  # problems
    tokens: int  # that the model wrote to them, greedily
    nats: float  # mean divergence at these, from the model's distribution to that of the changed chain
    flips: float  # the share of them at which another token is the likeliest
    accuracy: tuple[float, float]  # the model's, and the changed chain's
    change: tuple[float, float]  # the difference's interval at 95 %

    def __str__(self) -> str:
        """Describe the loss in one line."""
        before, after = self.accuracy
        return (
            f"{self.nats:.4g} nats a token, {100 * self.flips:.2f} % of {self.tokens:,} greedy tokens "
            f"flip; accuracy "
            f"{before:.3f} to {after:.3f}, {after - before:+.3f} [{self.change[0]:+.3f}, "
            f"{self.change[1]:+.3f}] "
            f"(n = {self.count}, {self.problems})"
        )


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A zoo's record of one model; its configuration and tokenizer lie next to the record, as they
    were added.
    """

    name: str
    source: str  # the folder that was added
    base: str  # model that an adapter was added to
    # its weight files lie next to it as they were added: no other model shares a block of it
    is_whole: bool
    bytes: int  # size of its folder as it was added
    marks: tuple[str, str]  # the digests of its weights that an engine's spec names
    files: tuple[StoredFile, ...]
    blocks: tuple[StoredBlock, ...]
    loss: Loss | None = None  # loss of a chain that replaces another model's

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of the blocks."""
        return frozenset(block.digest for block in self.blocks)


class TensorFile(NamedTuple):
    """A safetensors file, and the names in it of a model's tensors; None where they are the model's
    own.
    """

    path: Path
    names: Mapping[str, str] | None


def tensor_files(folder: Path, name: str) -> list[TensorFile]:
    """List the files that hold the weights of the model in `folder`: its own files, or the blocks
    of a zoo.

    :raises ModelLoadError: files are missing, or damaged as far as their names say what is in them.
    """
    stored = read_stored(folder) if (folder / MANIFEST).is_file() else None
    if stored is None or stored.is_whole:
        return [TensorFile(path, None) for path in weight_files(folder, name)]
    found = dict[str, dict[str, str]]()
    for block in stored.blocks:
        if block.place != ADAPTER:
            found.setdefault(block.digest, {}).update(block.tensors)
    return [
        TensorFile(block_path(folder.parent.parent, digest), names)
        for digest, names in found.items()
    ]


def share_blocks(one: Path, other: Path, *, as_deep: bool = False) -> bool:
    """Return whether these folders hold models of one zoo that have a block in common, and equally
    many layers if `as_deep` is set.

    :raises ZooError: a manifest cannot be read.
    """
    if one.resolve().parent != other.resolve().parent or not all(
        (path / MANIFEST).is_file() for path in (one, other)
    ):
        return False
    models = read_stored(one), read_stored(other)
    depths = {sum(block.place.endswith(".mlp") for block in model.blocks) for model in models}
    return bool(models[0].digests & models[1].digests) and (len(depths) == 1 or not as_deep)


def unit_digests(folder: Path, num_layers: int) -> list[str]:
    """Name the blocks of a stored model, in the order of a token's way: 2 * layers + 2
    of them.

    :raises ZooError: the manifest cannot be read.
    """
    found = {block.place: block.digest for block in read_stored(folder).blocks}
    halves = [f"layers.{at}.{half}" for at in range(num_layers) for half in ("attention", "mlp")]
    return [found[place] for place in ("embedding", *halves, "head")]


def adapter_file(folder: Path) -> TensorFile | None:
    """Return the file with the adapter of the model in `folder`; its settings are in the folder
    `adapter` next to the manifest.

    :raises ZooError: the manifest cannot be read.
    """
    stored = read_stored(folder) if (folder / MANIFEST).is_file() else None
    found = [block for block in stored.blocks if block.place == ADAPTER] if stored else []
    return (
        TensorFile(block_path(folder.parent.parent, found[0].digest), found[0].tensors)
        if found
        else None
    )


def check_stored(folder: Path) -> StoredModel | None:
    """Read the manifest of the model in `folder`, its weights compared with their digests; None
    where it has none.

    :raises ZooError: a file is missing, or is not what was stored.
    """
    if not (folder / MANIFEST).is_file():
        return None
    stored = read_stored(folder)
    zoo = folder.parent.parent
    blocks = {block.digest: block.place for block in reversed(stored.blocks)}
    parts = [
        (block_path(zoo, digest), digest, f"block {digest} ({place})")
        for digest, place in sorted(blocks.items())
    ]
    if stored.is_whole:
        parts = [
            (folder / file.name, file.digest, f"its file {file.name}") for file in stored.files
        ]
    advice = f"Models without it are not affected; remove {stored.name!r} and add it again from its folder"
    for path, digest, what in parts:
        try:
            found = file_digest(path)
        except OSError as error:
            problem = f"{what} of {stored.name!r} cannot be read ({error.strerror})"
            raise ZooError(zoo, problem, advice) from error
        if found != digest:
            raise ZooError(
                zoo, f"{what} of {stored.name!r} is damaged: its content is {found[:16]}", advice
            )
    return stored


def read_stored(folder: Path) -> StoredModel:
    """Read the manifest of the model in `folder`.

    :raises ZooError: it is damaged, or its zoo was written by a newer version.
    """
    path = folder / MANIFEST
    zoo = folder.parent.parent
    check_schema(zoo)
    advice = f"Remove {folder.name!r} and add it again; other models are not affected"
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredModel)
    except OSError as error:
        raise ZooError(zoo, f"{path} cannot be read ({error.strerror})", advice) from error
    except msgspec.DecodeError as error:
        raise ZooError(zoo, f"{path} is damaged ({error})", advice) from error


class _Mark(msgspec.Struct):
    schema: int


def check_schema(zoo: Path) -> None:
    """See that a folder is a zoo this version can read.

    :raises ZooError: it is not.
    """
    advice = "Name a folder that `atts zoo add` made"
    try:
        schema = msgspec.json.decode((zoo / MARK).read_bytes(), type=_Mark).schema
    except OSError as error:
        raise ZooError(zoo, f"it is not a zoo ({MARK}: {error.strerror})", advice) from error
    except msgspec.DecodeError as error:
        raise ZooError(
            zoo, f"{MARK} is damaged ({error})", f'It should hold {{"schema": {SCHEMA}}}'
        ) from error
    if schema > SCHEMA:
        problem = f"it was written by a newer atts (schema {schema}, this one knows {SCHEMA})"
        raise ZooError(zoo, problem, "Upgrade atts")


def block_path(zoo: Path, digest: str) -> Path:
    """Return the path at which a zoo keeps the block of this content."""
    return zoo / BLOCKS / f"{digest}.safetensors"


def file_digest(path: Path) -> str:
    """Return the name of a file's content.

    :raises OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return content_digest(b"")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as whole:
            return content_digest(whole)


def content_digest(*parts: bytes | memoryview | mmap) -> str:
    """Return the name of a content."""
    mark = blake2b(digest_size=20)
    for part in parts:
        mark.update(part)
    return mark.hexdigest()
