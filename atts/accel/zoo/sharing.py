"""Blocks that a zoo's models share, as a tree, and the bytes stored beside those of separate
models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from atts.models.stored_blocks import StoredBlock, StoredModel


@dataclass(frozen=True, slots=True)
class SharedPart:
    """Blocks that exactly these models have; below stand those that fewer of them have."""

    models: tuple[str, ...]
    places: tuple[str, ...]  # in the first of these models
    bytes: int  # stored, once
    below: tuple[SharedPart, ...]


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One model of a zoo; `parts` says of each of its blocks how many models have it."""

    name: str
    base: str
    bytes: int  # as it was added
    parts: Mapping[str, int]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class ZooContents:
    """A zoo at one moment."""

    zoo: str
    models: tuple[ModelLine, ...]
    tree: tuple[SharedPart, ...]
    blocks: int  # unique ones
    stored: int  # bytes of the zoo
    apart: int  # bytes of the folders that were added, of an adapter with its base's beside it

    @property
    def saved(self) -> float:
        """The share of bytes that is not stored; below 0 where manifests outweigh what is shared."""
        return 1 - self.stored / self.apart if self.apart else 0.0


def contents(zoo: str, models: Sequence[StoredModel], stored: int) -> ZooContents:
    """What a zoo holds; `stored` are the bytes on its disk."""
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
    """Each part below the smallest one whose models are more than its own."""
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
    """Places in short: runs of layers as from and to.

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
