"""Similarity of blocks of one shape, and models with some of their blocks replaced."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from atts.concurrency import import_lock
from atts.core import TokenIds
from atts.local.model_config import read_model_config
from atts.models.stored_blocks import (
    BLOCKS,
    MANIFEST,
    MARK,
    MODELS,
    SCHEMA,
    StoredModel,
    block_path,
    content_digest,
)

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("embedding", "attention", "mlp", "head")


@dataclass(frozen=True, slots=True)
class BlockSimilarity:
    """A block of a model, and another of its shape that is not equal to it."""

    place: str
    digest: str  # digest of the other block
    other: str  # origin of the other block: MODEL/PLACE
    distance: float  # between their parameters, in lengths of the model's own
    cosine: float


def likenesses(
    zoo: Path, model: StoredModel, models: Sequence[StoredModel], limits: tuple[int, float]
) -> list[BlockSimilarity]:
    """Find for each block of a model the nearest of its shape by parameters.

    The model's own blocks are in memory at once, as float32, and of the others one after the other.
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
    """Read how a block's tensors are called and shaped, and its numbers in a row."""
    with import_lock:
        import torch
        from safetensors.torch import load_file
    tensors = sorted(load_file(block_path(zoo, digest)).items())
    shape = str([(name, tensor.dtype, tensor.shape) for name, tensor in tensors])
    return shape, torch.cat([tensor.float().flatten() for _, tensor in tensors])


def _nearness(mine: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the distance in lengths of the first, and the cosine."""
    length = float(mine.norm())
    other = float(theirs.norm())
    cosine = float(mine @ theirs) / (length * other) if length and other else 0.0
    return float((mine - theirs).norm()) / length if length else float("inf"), cosine


def changed(model: StoredModel, digests: Mapping[str, str]) -> StoredModel:
    """Change a cut model's manifest to other blocks at some places; its marks say so."""
    blocks = tuple(
        replace(block, digest=digests.get(block.place, block.digest)) for block in model.blocks
    )
    mark = content_digest(*(block.digest.encode() for block in blocks))
    return replace(model, marks=(mark[:8], mark[:32]), blocks=blocks)


@contextmanager
def substituted(
    zoo: Path, model: StoredModel, digests: Mapping[str, str]
) -> Generator[Path, None, None]:
    """Make a folder of a cut model with other blocks of its zoo at some places, gone afterwards."""
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
    """Divergence of one model's distributions from another's, over all positions of some texts."""

    tokens: int  # places
    nats: float  # mean Kullback-Leibler divergence
    flips: float  # the share of places where another token is the likeliest


def divergence(one: Path, other: Path, texts: Sequence[tuple[TokenIds, int]]) -> Divergence:
    """Measure the divergence from the model in `one` to that in `other` over texts, in float32.

    :raises ModelLoadError: the weights of one cannot be used.
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
    """Return the logarithms of what is likely after each token: [tokens, vocabulary]."""
    import numpy as np

    from atts.local.batch import single_rows

    at = np.arange(len(ids))
    rows = single_rows(np.array(ids), at, np.zeros_like(at), (at[None] + 1).astype(np.int32))
    return (
        model.compute_logits(model.forward(rows, (at[None] + 1).astype(np.int32)))
        .double()
        .log_softmax(-1)
    )
