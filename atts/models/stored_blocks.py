"""Functions that read and check the manifest of a model stored as blocks: files that are named
after their content's digest.
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
"""The version of the zoo format. A zoo with a higher number was written by a newer version of atts.
"""
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\x00]+\.safetensors$")]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored part of a model: its position in the model, its digest, and the names of its
    tensors.
    """

    # name of the part of the model: embedding, head, adapter, rest, or a part of a layer such as
    # layers.3.attention or layers.3.mlp
    place: str
    digest: Digest  # digest of the file that stores the block; the file is named after it
    bytes: int
    # for each tensor: its name in the model's own files, and its name in the block's file
    tensors: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A weight file of a model, as it was before the model was added to a zoo: its header, which
    comes before the tensors, and the digest of the complete file.
    """

    name: FileName
    header: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Loss:
    """A measurement of how much a model's output changes when other blocks replace some of its own.

    The change is measured on solutions that the original model wrote.
    """

    model: str
    weights: str  # digest of the original model's weights, as in an engine's spec
    # for each replaced block's position, the block that is used instead, written as MODEL/POSITION
    stands: dict[str, str]
    problems: str  # name of the set of problems on which the models were compared
    count: int  # number of problems in this set
    # number of tokens that the original model wrote on these problems, with greedy decoding
    tokens: int
    # mean Kullback-Leibler divergence per token, in nats, from the original to the changed model
    nats: float
    # share (0 to 1) of these tokens for which the changed model has another most likely token
    flips: float
    # accuracies of the original model and of the changed model, 0 to 1
    accuracy: tuple[float, float]
    # 95 % confidence interval of the difference in accuracy (changed minus original)
    change: tuple[float, float]

    def __str__(self) -> str:
        """Return a description of the loss in one line."""
        before, after = self.accuracy
        return (
            f"{self.nats:.4g} nats per token; the most likely token changes at "
            f"{100 * self.flips:.2f} % of {self.tokens:,} positions; accuracy goes from "
            f"{before:.3f} to {after:.3f}, difference {after - before:+.3f} "
            f"[{self.change[0]:+.3f}, {self.change[1]:+.3f}] (n = {self.count}, {self.problems})"
        )


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A zoo's record of one model. The model's configuration and tokenizer are stored next to the
    record, unchanged.
    """

    name: str
    source: str  # folder from which the model was added to the zoo
    base: str  # name of the base model, if this model is an adapter; else empty
    # True if the zoo stores the model's complete weight files, because it shares no block with
    # other models
    is_whole: bool
    bytes: int  # size in bytes of the model's folder when the model was added to the zoo
    marks: tuple[str, str]  # short and long digest of the model's weights, as in an engine's spec
    files: tuple[StoredFile, ...]
    blocks: tuple[StoredBlock, ...]
    # measured change of the output, if this model was made by replacing blocks of another model
    loss: Loss | None = None

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of the model's blocks."""
        return frozenset(block.digest for block in self.blocks)


class TensorFile(NamedTuple):
    """A safetensors file that contains tensors of a model.

    `names` maps the model's name of each tensor to its name in the file; None means that the names
    are the same.
    """

    path: Path
    names: Mapping[str, str] | None


def tensor_files(folder: Path, name: str) -> list[TensorFile]:
    """List the safetensors files with the weights of the model in `folder`. They are the model's
    own files, or the files of its blocks in a zoo.

    :raises ModelLoadError: a file is missing, or its list of tensors is damaged.
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
    """Return whether the models in two folders belong to one zoo and have at least one block in
    common.

    If `as_deep` is true, the models must also have the same number of layers.

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
    """Return the digests of a stored model's blocks in the order of computation: the embedding, two
    blocks per layer, and the head.

    :raises ZooError: the manifest cannot be read.
    """
    found = {block.place: block.digest for block in read_stored(folder).blocks}
    halves = [f"layers.{at}.{half}" for at in range(num_layers) for half in ("attention", "mlp")]
    return [found[place] for place in ("embedding", *halves, "head")]


def adapter_file(folder: Path) -> TensorFile | None:
    """Return the file with the adapter of the model in `folder`, or None if it has none. The
    adapter's settings are in the folder `adapter` next to the manifest.

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
    """Compare the weights of the model in `folder` with the digests in its manifest, and return the
    manifest.

    If there is no manifest, check nothing and return None.

    :raises ZooError: a file is missing, or its content has changed since it was stored.
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
    advice = (
        f"Models without this block are not affected; remove {stored.name!r}, and add the "
        "model again from its folder"
    )
    for path, digest, what in parts:
        try:
            found = file_digest(path)
        except OSError as error:
            problem = f"{what} of {stored.name!r} cannot be read ({error.strerror})"
            raise ZooError(zoo, problem, advice) from error
        if found != digest:
            raise ZooError(
                zoo,
                f"{what} of {stored.name!r} is damaged: the digest of its content is now "
                f"{found[:16]}",
                advice,
            )
    return stored


def read_stored(folder: Path) -> StoredModel:
    """Read the manifest of the model in `folder`.

    :raises ZooError: the manifest is damaged, or a newer version of atts wrote it.
    """
    path = folder / MANIFEST
    zoo = folder.parent.parent
    check_schema(zoo)
    advice = f"Remove {folder.name!r}, and add the model again; other models are not affected"
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredModel)
    except OSError as error:
        raise ZooError(zoo, f"{path} cannot be read ({error.strerror})", advice) from error
    except msgspec.DecodeError as error:
        raise ZooError(zoo, f"{path} is damaged ({error})", advice) from error


class _Mark(msgspec.Struct):
    schema: int


def check_schema(zoo: Path) -> None:
    """Check that a folder is a zoo that this version can read.

    :raises ZooError: the folder is not a zoo, or a newer version of atts wrote it.
    """
    advice = "Give a folder that `atts zoo add` created"
    try:
        schema = msgspec.json.decode((zoo / MARK).read_bytes(), type=_Mark).schema
    except OSError as error:
        raise ZooError(
            zoo, f"the directory is not a zoo ({MARK}: {error.strerror})", advice
        ) from error
    except msgspec.DecodeError as error:
        raise ZooError(
            zoo, f"{MARK} is damaged ({error})", f'The file must contain {{"schema": {SCHEMA}}}'
        ) from error
    if schema > SCHEMA:
        problem = (
            f"a newer version of atts wrote the zoo (schema {schema}; this version knows {SCHEMA})"
        )
        raise ZooError(zoo, problem, "Upgrade atts")


def block_path(zoo: Path, digest: str) -> Path:
    """Return the path of the file in which a zoo stores the block with this digest."""
    return zoo / BLOCKS / f"{digest}.safetensors"


def file_digest(path: Path) -> str:
    """Return the digest of a file's content.

    :raises OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return content_digest(b"")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as whole:
            return content_digest(whole)


def content_digest(*parts: bytes | memoryview | mmap) -> str:
    """Return the digest of these bytes, which are joined in the given order. A block's file is
    named after the digest of its content.
    """
    mark = blake2b(digest_size=20)
    for part in parts:
        mark.update(part)
    return mark.hexdigest()
