"""The options of a local engine, and the share of a GPU's memory that each engine of a pair gets.

Both are checked and computed before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from atts.errors import OptionError
from atts.local.model_config import ModelConfig

Dtype = Literal["auto", "float32", "bfloat16"]
Scores = Literal["float32", "bfloat16"]
Kernel = Literal["auto", "torch", "native"]
Graphs = Literal["auto", "off"]
WorkerKind = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a local engine; the defaults suit small models on a CPU."""

    # auto: a GPU if there is one; if there are two, each model of a pair has its own
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # auto: bfloat16 on a GPU if the checkpoint is bfloat16, else float32
    dtype: Dtype = "auto"
    # a process computes in parallel with other engines and a busy caller; a thread starts at once
    worker: WorkerKind = "process"
    # format to which scored rows are rounded before products; the processor must support it
    scores: Scores = "float32"
    kernel: Kernel = "auto"  # native if it can be built and fits the model, else torch
    # decoding steps on a GPU are captured and replayed, instead of launching their operations one
    # by one
    graphs: Graphs = "auto"
    # size of the cache in tokens; None: what 2 GiB hold on a CPU, or what the run's rollouts can
    # fill on a GPU
    kv_tokens: int | None = None
    max_batch: int = 256  # sequences in one step
    chunk_tokens: int = 512  # most given tokens fed in one step; decoding tokens do not count
    # number of threads of a step; None: the cores that other engines leave
    threads: int | None = None

    def check(self) -> None:
        """Check that every option is known and possible.

        :raises OptionError: an option is unknown or impossible.
        """
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            known = ["auto", "cpu", "cuda", "cuda:0", "cuda:1"]
            raise OptionError(self.device, "no such device", known)
        check_choices(
            self,
            dtype=Dtype,
            worker=WorkerKind,
            scores=Scores,
            kernel=Kernel,
            graphs=Graphs,
        )
        check_positive(self, "kv_tokens", "max_batch", "chunk_tokens", "threads")
        is_native = self.dtype != "bfloat16" and self.kernel != "torch"
        if self.scores != "float32" and not is_native:
            raise OptionError(
                "scores",
                "bfloat16 scores need a model in float32 on the native kernels of one process",
            )


def check_choices(options: object, **kinds: object) -> None:
    """Check that each of these options is one of the values of its type.

    :raises OptionError: an option has another value.
    """
    for option, kind in kinds.items():
        choice = getattr(options, option)
        if choice not in get_args(kind):
            raise OptionError(str(choice), f"no such {option}", get_args(kind))


def check_positive(options: object, *names: str) -> None:
    """Check that these options are positive if they are given.

    :raises OptionError: an option is not positive.
    """
    for option in names:
        value = getattr(options, option)
        if value is not None and value < 1:
            raise OptionError(option, f"is {value}, expected at least 1")


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
    """Return the least power of two of cards that have room for these weights in 90 % of their memory."""
    count = 1
    while weights / count > 0.9 * card:
        count *= 2
    return count
