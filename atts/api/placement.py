"""Placement of a pair on GPUs: how many cards it takes, and which share of each card's memory a
server gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atts.api.pairs import ModelSize, Pair, ports
from atts.core import Role
from atts.errors import OptionError

CARDS: Mapping[str, float] = MappingProxyType(
    {"rtx4090": 24, "rtx5090": 32, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180}
)
"""Gigabytes of memory."""
USUAL_CARDS = ("rtx4090", "h100", "h200")
"""What is shown where no card is named."""
COUNTS = (1, 2, 4, 8)
_USABLE = 0.92  # of a card: the rest is the driver's, and what other programs hold
_OVERHEAD = 2.0  # gigabytes of a server besides weights and cache: context, graphs, activations
_ROLLOUTS = 4  # how many should fit whole into the cache of a draft that shares its card


@dataclass(frozen=True, slots=True)
class Share:
    """What one server gets."""

    cards: tuple[int, ...]
    utilization: float
    is_quantized: bool
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Both servers of a pair on so many cards of one kind."""

    card: str
    count: int
    context: int  # tokens that each server is started with
    draft: Share
    target: Share

    @property
    def rollouts(self) -> int:
        """How many whole rollouts fit into both caches at once."""
        return min(self.draft.cache_tokens, self.target.cache_tokens) // self.context

    def commands(self, pair: Pair) -> Iterator[str]:
        """The servers' own commands, the target's first."""
        shares: dict[Role, Share] = {"target": self.target, "draft": self.draft}
        for role, share in shares.items():
            visible = ",".join(map(str, share.cards))
            parts = [
                f"CUDA_VISIBLE_DEVICES={visible} vllm serve {pair.model(role)} --port "
                f"{ports(role, 1)[0]}"
            ]
            parts += [
                "--generation-config vllm --enable-prefix-caching --enable-prompt-tokens-details"
            ]
            parts += ["--enable-scale-out"]
            parts += [f"--tensor-parallel-size {len(share.cards)}"] if len(share.cards) > 1 else []
            parts += ["--quantization fp8"] if share.is_quantized else []
            parts += [
                f"--max-model-len {self.context} --gpu-memory-utilization {share.utilization:.2f}"
            ]
            yield " ".join(parts)

    def __str__(self) -> str:
        """The cards, how the target's weights are held, how much is shared."""
        form = ", target in fp8" if self.target.is_quantized else ""
        shares = f"draft {self.draft.utilization:.2f}, target {self.target.utilization:.2f}"
        return f"{self.count} x {self.card} ({CARDS[self.card]:g} GB){form}: {shares} of a card's memory"


def place(
    pair: Pair, card: str, max_tokens: int, counts: tuple[int, ...] = COUNTS
) -> Placement | None:
    """The fewest cards of a kind that hold both models and a rollout's cache, the target
    unquantised where it can be.

    None where not even eight do, and for the embedded pair, which needs no card.

    :raises OptionError: an unknown card.

    >>> from atts.api.pairs import find_pair
    >>> str(place(find_pair("r1-1.5b/r1-7b"), "h100", 16_000))
    "1 x h100 (80 GB): draft 0.10, target 0.82 of a card's memory"
    """
    if card not in CARDS:
        raise OptionError("card", f"unknown card {card!r}", list(CARDS), card)
    draft = pair.size("draft")
    target = pair.size("target")
    context = min(_rounded(max_tokens), draft.context, target.context)
    for count in counts if target.layers else ():
        for is_quantized in (False, True):
            if is_quantized and target.packed:
                continue
            if found := _placed(draft, target, CARDS[card], count, context, is_quantized):
                return Placement(card, count, context, *found)
    return None


def _placed(
    draft: ModelSize, target: ModelSize, memory: float, count: int, context: int, is_quantized: bool
) -> tuple[Share, Share] | None:
    """Side by side on cards of their own where the target leaves one over; else the draft beside it
    on the last.
    """
    usable = memory * _USABLE
    weights = target.weights * (0.52 if is_quantized else 1.0)
    for own in (count - 1, count) if count > 1 else (count,):
        split = 1 << (own.bit_length() - 1)  # tensor parallel sizes are powers of two
        beside = split == count
        reserved = _least(draft, draft.weights, context, 1) if beside else 0.0
        room = usable - reserved - weights / split - _OVERHEAD
        cache = int(room * split * 1e9 / target.cache_bytes)
        if cache < context or (not beside and draft.weights + _OVERHEAD > usable):
            continue
        if not beside:
            mine = Share(
                (split,),
                _USABLE,
                False,
                int((usable - draft.weights - _OVERHEAD) * 1e9 / draft.cache_bytes),
            )
            return mine, Share(tuple(range(split)), _USABLE, is_quantized, cache)
        share = math.ceil(100 * reserved / memory) / 100
        tokens = int((share * memory - draft.weights - _OVERHEAD) * 1e9 / draft.cache_bytes)
        if tokens < context:
            continue
        rest = math.floor(100 * (_USABLE - share)) / 100
        return Share((count - 1,), share, False, tokens), Share(
            tuple(range(split)), rest, is_quantized, cache
        )
    return None


def _least(model: ModelSize, weights: float, context: int, split: int) -> float:
    """Gigabytes of one card that a server wants: weights, overhead, and a cache for some whole
    rollouts.
    """
    return weights / split + _OVERHEAD + _ROLLOUTS * context * model.cache_bytes / split / 1e9


def _rounded(max_tokens: int) -> int:
    """The rollout and its problem, rounded up to whole thousands."""
    return 1024 * math.ceil((max_tokens + 2048) / 1024)
