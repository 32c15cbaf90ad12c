"""The share of a GPU's memory that each engine of a pair gets, computed before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atts.local.model_config import ModelConfig

WORKSPACE = 1_500_000_000
"""Bytes of an engine besides weights and cache: CUDA's context, captured graphs, activations."""
ITEM_SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by the name of its type."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The memory that an engine needs, in bytes, and the tokens that its cache must hold."""

    weights: int
    token: int  # bytes of cache per token
    least: int  # tokens: one whole rollout with its problem

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, least: int) -> EngineSize:
        """Return the size of a model whose numbers are of this type."""
        item = ITEM_SIZES[dtype]
        count = model.matrix_weights
        if not model.ties_embeddings:
            count += model.vocabulary * model.hidden_size
        return cls(count * item, model.kv_floats_per_token * item, least)


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The card that an engine is on, and the memory it takes there, in bytes."""

    card: int
    weights: int
    cache: int
    tokens: int  # that the cache holds


@dataclass(frozen=True, slots=True)
class Room:
    """Demand of a run on an engine's cache, and the memory to leave for the other engine of the
    pair.
    """

    rollouts: int  # in flight at once
    tokens: int  # tokens of one rollout with its problem
    card: int = 0  # device index, if there are several and the options leave it open
    other_card: int = 0
    other: EngineSize | None = None  # loaded later, where it shares the device

    @property
    def most_tokens(self) -> int:
        """Return the tokens that all rollouts in flight can fill."""
        return self.rollouts * self.tokens

    @property
    def alone(self) -> Room:
        """Return the room of an engine that leaves nothing to another."""
        return replace(self, other=None)


def share_cards(
    sizes: Sequence[EngineSize], cards: Sequence[float], most_tokens: int
) -> tuple[EngineShare, ...] | None:
    """Place one engine, or a draft and its target, on cards with so many free bytes.

    With two cards the target gets the first and the draft the second. On one card both caches hold
    the same number of tokens, because both models read the same texts. None means that not even
    one rollout fits.

    >>> draft, target = EngineSize(3_600_000_000, 28_672, 18_432), EngineSize(15_200_000_000, 57_344, 18_432)
    >>> [share.tokens for share in share_cards([draft, target], [73.6e9], 64 * 18_432) or ()]
    [602213, 602213]
    """
    if len(sizes) == 2 and len(cards) > 1:
        draft = _on_card(sizes[:1], cards[1], 1, most_tokens)
        target = _on_card(sizes[1:], cards[0], 0, most_tokens)
        if draft and target:
            return draft + target
    return _on_card(sizes, cards[0], 0, most_tokens)


def _on_card(
    sizes: Sequence[EngineSize], free: float, card: int, most_tokens: int
) -> tuple[EngineShare, ...] | None:
    room = free - sum(size.weights + WORKSPACE for size in sizes)
    tokens = min(int(room // sum(size.token for size in sizes)), most_tokens)
    if tokens < max(size.least for size in sizes):
        return None
    return tuple(EngineShare(card, size.weights, tokens * size.token, tokens) for size in sizes)


def cards_for(weights: int, card: float) -> int:
    """Return the fewest cards, a power of two, that hold these weights with a tenth left over."""
    count = 1
    while weights / count > 0.9 * card:
        count *= 2
    return count
