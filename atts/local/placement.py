"""The share of a GPU's memory that each engine of a pair gets, computed before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atts.local.model_config import ModelConfig

WORKSPACE = 1_500_000_000
"""Bytes that an engine needs besides weights and cache, for CUDA's context, captured graphs and
activations.
"""
ITEM_SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by the name of its type."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The memory that an engine needs, in bytes, and the tokens that its cache must hold."""

    weights: int
    token: int  # bytes of cache per token
    # number of tokens of one whole rollout with its problem, the least that the cache must hold
    least: int

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
    """The card on which an engine is placed, and the bytes of memory that it takes there."""

    card: int
    weights: int
    cache: int
    tokens: int  # number of tokens that the cache holds


@dataclass(frozen=True, slots=True)
class Room:
    """The needs of a run from an engine's cache, and the memory to leave for the other engine of
    the pair.
    """

    rollouts: int  # number of rollouts in flight at once
    tokens: int  # tokens of one rollout with its problem
    card: int = 0  # device index, if there are several and the options leave it open
    other_card: int = 0
    other: EngineSize | None = None  # the engine that is loaded later, if it may share the device

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens that all rollouts in flight can fill."""
        return self.rollouts * self.tokens

    @property
    def alone(self) -> Room:
        """Return the same needs without another engine."""
        return replace(self, other=None)


def share_cards(
    sizes: Sequence[EngineSize], cards: Sequence[float], most_tokens: int
) -> tuple[EngineShare, ...] | None:
    """Place one engine, or a draft and its target, on cards with these numbers of free bytes.

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
    """Return the least number of cards, a power of two, that hold these weights with a tenth of the
    memory left over.
    """
    count = 1
    while weights / count > 0.9 * card:
        count *= 2
    return count
