"""The options of a local engine, and the memory of a GPU that each engine of a pair gets.

Options are checked, and memory is divided, before any model is loaded.
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

    # auto: use a GPU if there is one; with two or more GPUs, each model of a pair has its own GPU
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # auto: bfloat16 if the model runs on a GPU and its checkpoint is in bfloat16, or else float32
    dtype: Dtype = "auto"
    # process: runs in a child process, in parallel with the caller and other engines; thread:
    # starts faster
    worker: WorkerKind = "process"
    # number type of the rows that enter matrix products while scoring; bfloat16 needs a processor
    # with bfloat16 products
    scores: Scores = "float32"
    # auto: the native C kernels, if they can be built and support the model, or else torch
    kernel: Kernel = "auto"
    # auto: decoding steps on a GPU are captured as CUDA graphs and replayed, which saves the
    # launches of single kernels
    graphs: Graphs = "auto"
    # Size of the KV cache in tokens. None: on a CPU, the cache has about 2 GiB; on a GPU, it has
    # room for the tokens of the rollouts in flight.
    kv_tokens: int | None = None
    max_batch: int = 256  # largest number of sequences in a step
    # largest number of tokens of prompts and of texts to score that a step feeds; decoding
    # sequences are not counted
    chunk_tokens: int = 512
    # number of threads that compute a step; None: the engine's share of the cores, or one thread
    # for a small model
    threads: int | None = None

    def check(self) -> None:
        """Check that every option has a known and possible value.

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
                "bfloat16 scores work only with a float32 model that runs in one process with "
                "the native kernels",
            )


def check_choices(options: object, **kinds: object) -> None:
    """Check that each of the given options has one of the values of its `Literal` type.

    :raises OptionError: an option has another value.
    """
    for option, kind in kinds.items():
        choice = getattr(options, option)
        if choice not in get_args(kind):
            raise OptionError(str(choice), f"no such {option}", get_args(kind))


def check_positive(options: object, *names: str) -> None:
    """Check that each of the named options is None or at least 1.

    :raises OptionError: an option is not positive.
    """
    for option in names:
        value = getattr(options, option)
        if value is not None and value < 1:
            raise OptionError(option, f"{value} is too small; give a value of at least 1")


WORKSPACE = 1_500_000_000
"""Bytes of memory that an engine needs in addition to weights and cache: for CUDA's context,
captured graphs and activations.
"""
ITEM_SIZES = {"float32": 4, "bfloat16": 2}
"""Size of one number in bytes, keyed by the name of its data type."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The memory that an engine needs: bytes for its weights, bytes per token in its cache, and the
    smallest cache size in tokens.
    """

    weights: int
    token: int  # number of bytes that the cache stores per token
    # number of tokens of one complete rollout, including its prompt; the cache needs room for at
    # least one rollout
    least: int

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, least: int) -> EngineSize:
        """Return the memory needs of a model with this data type. Its cache must have room for at
        least `least` tokens.
        """
        item = ITEM_SIZES[dtype]
        count = model.matrix_weights
        if not model.ties_embeddings:
            count += model.vocabulary * model.hidden_size
        return cls(count * item, model.kv_floats_per_token * item, least)


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The GPU that an engine uses, and the bytes of memory that the engine takes there."""

    card: int
    weights: int
    cache: int
    tokens: int  # number of tokens for which the cache has room


@dataclass(frozen=True, slots=True)
class Room:
    """The needs of a run: cache for its rollouts in flight, and memory for the other engine of the
    draft-target pair.
    """

    rollouts: int  # number of rollouts in flight at once
    tokens: int  # largest number of tokens of one rollout, including its prompt
    # index of the GPU to use if there are several GPUs and the options do not name one
    card: int = 0
    other_card: int = 0
    # memory that the pair's other engine needs, if it is loaded later and may use the same device
    other: EngineSize | None = None

    @property
    def most_tokens(self) -> int:
        """Return the number of cached tokens if every rollout in flight has its largest length."""
        return self.rollouts * self.tokens

    @property
    def alone(self) -> Room:
        """Return a copy that reserves no memory for the other engine."""
        return replace(self, other=None)


def share_cards(
    sizes: Sequence[EngineSize], cards: Sequence[float], most_tokens: int
) -> tuple[EngineShare, ...] | None:
    """Divide the memory of GPUs between engines: one engine, or a draft and its target. `cards`
    lists the free bytes of each GPU.

    With two GPUs, the target gets the first one and the draft the second one. With a single GPU, or
    if one of the models does not fit on its own GPU, both models share the first GPU. Both caches
    then get the same number of tokens, because both models read the same texts. Return None if
    there is no room for a single rollout.

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
    """Return how many GPUs are needed to store `weights` bytes, rounded up to a power of two. Each
    GPU has `card` bytes, and weights may fill 90 % of them.
    """
    count = 1
    while weights / count > 0.9 * card:
        count *= 2
    return count
