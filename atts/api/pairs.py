"""The pairs of models in `pairs.toml`, and the placement of a pair's models on GPUs."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from atts.api.keys import flat
from atts.core import Role
from atts.errors import OptionError
from atts.journal import Json

if TYPE_CHECKING:
    from atts.local import EngineShare

PAIR = "pair "
"""The origin of a value that a pair sets is this prefix, followed by the pair's name."""
Place = Literal["vllm", "sglang", "local"]
_FIRST_PORT: Mapping[Role, int] = MappingProxyType({"target": 8000, "draft": 8001})
_NEXT_PORT: Mapping[Role, int] = MappingProxyType({"target": 100, "draft": 1})


@dataclass(frozen=True, slots=True)
class PairChoice:
    """The pair to run, and where its models run."""

    pair: Annotated[
        str | None,
        "name of a pair: a draft and a target with prompts and token limits; `atts pairs` lists "
        "pairs",
    ] = None
    backend: Annotated[
        Place,
        "where the pair's models run: on vLLM or SGLang servers on this machine (target :8000, "
        "draft :8001), or local (in this process)",
    ] = "vllm"
    draft_servers: Annotated[
        int, "number of draft servers of the pair, on ports 8001, 8002, ..."
    ] = 1
    target_servers: Annotated[
        int, "number of target servers of the pair, on ports 8000, 8100, ..."
    ] = 1

    def __post_init__(self) -> None:
        for name in ("draft_servers", "target_servers"):
            if not 1 <= getattr(self, name) <= 90:
                raise OptionError(
                    name, f"{getattr(self, name)} is not a valid number of servers; give 1 to 90"
                )


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """The published results of a pair on one benchmark: a row of the main table of the ATTS paper.

    `accuracy` is the share of problems with a correct answer in any of 16 samples, as graded by a
    model.
    """

    accuracy: float
    marginal: float
    conditional: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes that determine a model's GPU memory, and the length of its context."""

    weights: float  # size of all weights, in gigabytes
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    # True if the weights are published with 4 bits each, so that --quantization cannot reduce them
    # further
    packed: bool = False
    experts: bool = False  # True for a mixture of experts, which only servers can run

    @property
    def cache_bytes(self) -> int:
        """Return the size of one token in a 16-bit KV cache, in bytes."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and a target that work together; `settings` are the values of configuration keys for
    this pair.
    """

    name: str
    draft: str
    target: str
    note: str
    settings: Mapping[str, Json]
    # for each benchmark: the prompt settings for its problems
    prompts: Mapping[str, Mapping[str, Json]] = field(default_factory=dict[str, Mapping[str, Json]])
    published: Mapping[str, PublishedRow] = field(default_factory=dict[str, PublishedRow])

    def model(self, role: Role) -> str:
        """Return the hub name of the model with this role."""
        return self.draft if role == "draft" else self.target

    def words(self, role: Role, at: Place = "vllm", servers: int = 1) -> str:
        """Return the address of this role's engine: servers at their default ports, or a local
        model.

        >>> find_pair("r1-1.5b/r1-7b").words("draft", servers=2)[:72]
        'vllm:http://127.0.0.1:8001/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B,htt'
        """
        model = self.model(role)
        if model == "embedded" or at == "local":
            return model if model == "embedded" else f"hf:{model}?dtype=bfloat16"
        return f"{at}:" + ",".join(
            f"http://127.0.0.1:{port}/{model}" for port in ports(role, servers)
        )

    def size(self, role: Role) -> ModelSize:
        """Return the size of the model with this role."""
        return model_sizes()[self.model(role)]


def ports(role: Role, servers: int) -> list[int]:
    """Return the ports of a role's servers, which are consecutive for drafts and 100 apart for
    targets.

    >>> ports("draft", 3), ports("target", 2)
    ([8001, 8002, 8003], [8000, 8100])
    """
    return [_FIRST_PORT[role] + _NEXT_PORT[role] * number for number in range(servers)]


def find_pair(name: str) -> Pair:
    """Return the pair with this name.

    :raises OptionError: no pair has this name.
    """
    if name not in known_pairs():
        raise OptionError(
            "pair", f"unknown pair {name!r}; `atts pairs` lists them", [*known_pairs()], name
        )
    return known_pairs()[name]


@cache
def known_pairs() -> Mapping[str, Pair]:
    """Return all known pairs, keyed by the pair's name."""
    file = _file()
    return MappingProxyType(
        {name: _pair(name, row, file["kinds"][row["kind"]]) for name, row in file["pairs"].items()}
    )


@cache
def model_sizes() -> Mapping[str, ModelSize]:
    """Return the sizes of the models of all pairs, keyed by the model's hub name."""
    return MappingProxyType({name: ModelSize(**row) for name, row in _file()["models"].items()})


def _pair(name: str, row: Mapping[str, Any], kind: Mapping[str, Any]) -> Pair:
    published = {
        benchmark: PublishedRow(**numbers)
        for benchmark, numbers in row.get("published", {}).items()
    }
    settings = dict(flat({key: value for key, value in kind.items() if key != "benchmarks"}))
    return Pair(
        name,
        row["draft"],
        row["target"],
        row["note"],
        settings,
        kind.get("benchmarks", {}),
        published=published,
    )


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("pairs.toml").read_text(encoding="utf-8"))


CARDS: Mapping[str, float] = MappingProxyType(
    {"rtx4090": 24, "rtx5090": 32, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180}
)
"""For each kind of GPU card: its memory in gigabytes."""
USUAL_CARDS = ("rtx4090", "h100", "h200")
"""The kinds of card that are shown if the user names no kind."""
COUNTS = (1, 2, 4, 8)
# A server may use this fraction of a card's memory. The driver and other programs need the other
# part.
_USABLE = 0.92
# Gigabytes of GPU memory that a server needs in addition to weights and KV cache: CUDA context,
# CUDA graphs and activations.
_OVERHEAD = 2.0
_FP8 = 0.52  # FP8 weights have this fraction of the size of 16-bit weights
# A draft that shares a card with the target gets a KV cache for this many rollouts of full length.
_ROLLOUTS = 4


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The cards of one server, and the fraction of their memory that the server gets."""

    cards: tuple[int, ...]
    utilization: float
    is_quantized: bool
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """The placement of a pair's servers on cards of one kind."""

    card: str
    count: int
    context: int  # number of tokens that the context of each server can hold
    # `draft` or `target` is None if the method does not use this model
    draft: GpuShare | None
    target: GpuShare | None

    @property
    def shares(self) -> dict[Role, GpuShare]:
        """Return the memory share of each model that is used, beginning with the target."""
        shares = dict[Role, GpuShare]()
        if self.target is not None:
            shares["target"] = self.target
        if self.draft is not None:
            shares["draft"] = self.draft
        return shares

    @property
    def is_quantized(self) -> bool:
        """Return whether a server stores its model in FP8."""
        return any(share.is_quantized for share in self.shares.values())

    @property
    def rollouts(self) -> int:
        """Return how many rollouts of full length fit into the caches of all models at the same
        time.
        """
        return min(share.cache_tokens for share in self.shares.values()) // self.context

    def commands(self, pair: Pair, version: str = "") -> Iterator[str]:
        """Yield the commands that start the vLLM servers, beginning with the target's server.

        The flags are those of the given vLLM version, or of the newest known version.

        :raises OptionError: the text is not a version, or atts cannot use this version.
        """
        from atts.servers import read_version, start_flags

        flags = start_flags(read_version(version)) if version else start_flags()
        for role, share in self.shares.items():
            visible = ",".join(map(str, share.cards))
            port = ports(role, 1)[0]
            parts = [
                f"CUDA_VISIBLE_DEVICES={visible} vllm serve {pair.model(role)} --port {port}",
                *flags,
            ]
            if len(share.cards) > 1:
                parts.append(f"--tensor-parallel-size {len(share.cards)}")
            if share.is_quantized:
                parts.append("--quantization fp8")
            parts.append(f"--max-model-len {self.context}")
            parts.append(f"--gpu-memory-utilization {share.utilization:.2f}")
            yield " ".join(parts)

    def __str__(self) -> str:
        """Describe the cards, the precision of the target's weights and the memory share of each
        model.
        """
        form = ", target in fp8" if self.is_quantized else ""
        shares = ", ".join(
            f"{role} {share.utilization:.2f}" for role, share in reversed(self.shares.items())
        )
        return f"{self.count} x {self.card} ({CARDS[self.card]:g} GB){form}: {shares} of a card's memory"


def gpu_placement(
    pair: Pair,
    card: str,
    max_tokens: int,
    counts: tuple[int, ...] = COUNTS,
    roles: tuple[Role, ...] = ("draft", "target"),
) -> GpuPlacement | None:
    """Place the models of these roles, with the cache of at least one rollout, on as few cards of a
    kind as possible.

    The target is quantised only if its 16-bit weights do not fit. The result is None if the models
    do not fit on eight cards, or if they need no card, like the embedded pair.

    :raises OptionError: an unknown card.

    >>> from atts.api.pairs import find_pair
    >>> str(gpu_placement(find_pair("r1-1.5b/r1-7b"), "h100", 16_000))
    "1 x h100 (80 GB): draft 0.10, target 0.82 of a card's memory"
    """
    if card not in CARDS:
        raise OptionError("card", f"unknown card {card!r}", list(CARDS), card)
    sizes = [pair.size(role) for role in roles]
    context = min(run_tokens(max_tokens), *(size.context for size in sizes))
    largest = sizes[-1]
    for count in counts if largest.layers else ():
        for is_quantized in (False, True):
            if is_quantized and (largest.packed or roles == ("draft",)):
                continue
            if len(roles) == 1:
                share = _alone(largest, CARDS[card], count, context, is_quantized)
                if share is not None:
                    by_role = {roles[0]: share}
                    return GpuPlacement(
                        card, count, context, by_role.get("draft"), by_role.get("target")
                    )
                continue
            shares = _placed(sizes[0], largest, CARDS[card], count, context, is_quantized)
            if shares is not None:
                return GpuPlacement(card, count, context, *shares)
    return None


def _alone(
    model: ModelSize, memory: float, count: int, context: int, is_quantized: bool
) -> GpuShare | None:
    """Place one model on `count` cards. Return None if the weights or the cache do not fit."""
    weights = model.weights * (_FP8 if is_quantized else 1.0)
    room = memory * _USABLE - weights / count - _OVERHEAD
    tokens = int(room * count * 1e9 / model.cache_bytes)
    if tokens < context:
        return None
    return GpuShare(tuple(range(count)), _USABLE, is_quantized, tokens)


def _placed(
    draft: ModelSize, target: ModelSize, memory: float, count: int, context: int, is_quantized: bool
) -> tuple[GpuShare, GpuShare] | None:
    """Place both models. The draft gets a separate card if the target leaves one free; otherwise it
    shares the last card with the target.
    """
    # Sizes in this function are in gigabytes, but `cache` and `tokens` are numbers of tokens. Each
    # KV cache must hold at least one full context.
    usable = memory * _USABLE
    weights = target.weights * (_FP8 if is_quantized else 1.0)
    # First try to leave one card free for the draft. On separate cards, both servers have more
    # memory for their KV caches.
    for of_target in (count - 1, count) if count > 1 else (count,):
        # Tensor parallelism needs a power of two as the number of cards.
        split = 1 << (of_target.bit_length() - 1)
        is_shared = split == count
        reserved = _least(draft, draft.weights, context, 1) if is_shared else 0.0
        room = usable - reserved - weights / split - _OVERHEAD
        cache = int(room * split * 1e9 / target.cache_bytes)
        if cache < context:
            continue
        target_cards = tuple(range(split))
        if not is_shared:
            free = usable - draft.weights - _OVERHEAD
            if free < 0:
                continue
            tokens = int(free * 1e9 / draft.cache_bytes)
            draft_share = GpuShare((split,), _USABLE, False, tokens)
            return draft_share, GpuShare(target_cards, _USABLE, is_quantized, cache)
        share = math.ceil(100 * reserved / memory) / 100
        tokens = int((share * memory - draft.weights - _OVERHEAD) * 1e9 / draft.cache_bytes)
        if tokens < context:
            continue
        rest = math.floor(100 * (_USABLE - share)) / 100
        draft_share = GpuShare((count - 1,), share, False, tokens)
        return draft_share, GpuShare(target_cards, rest, is_quantized, cache)
    return None


def _least(model: ModelSize, weights: float, context: int, split: int) -> float:
    """Return the memory that a server needs on each card, in gigabytes, with a cache for a few
    rollouts.
    """
    return weights / split + _OVERHEAD + _ROLLOUTS * context * model.cache_bytes / split / 1e9


def run_tokens(max_tokens: int) -> int:
    """Return the largest number of tokens that a rollout and its problem may have together, rounded
    up to a multiple of 1024.
    """
    return 1024 * math.ceil((max_tokens + 2048) / 1024)


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """The GPUs of one kind on which this process places a pair's models, with the memory of each
    model.
    """

    card: str
    count: int
    context: int  # number of tokens of one rollout of full length, including its problem
    shares: Mapping[Role, EngineShare]

    @property
    def rollouts(self) -> int:
        """Return how many rollouts of full length fit into the caches of all models at the same
        time.
        """
        return min(share.tokens for share in self.shares.values()) // self.context

    def __str__(self) -> str:
        """Describe the cards, and the memory for the weights and cache of each model."""
        parts = list[str]()
        for role, share in self.shares.items():
            weights = f"{share.weights / 1e9:.1f} GB of weights"
            parts.append(f"{role} {weights} and {share.cache / 1e9:.1f} GB of cache")
        on = f"{self.count} x {self.card} ({CARDS[self.card]:g} GB)"
        return f"{on}, bfloat16 in this process: {', '.join(parts)}"


def local_placement(
    pair: Pair,
    card: str,
    max_tokens: int,
    rollouts: int = 64,
    counts: tuple[int, ...] = (1, 2),
    roles: tuple[Role, ...] = ("draft", "target"),
) -> LocalPlacement | None:
    """Place the models of these roles on one or two cards of this process, by the same rules as
    when engines open.

    The result is None if the models do not fit on two cards, or if they need no card. It is also
    None if this process cannot load a model, because the model is a mixture of experts or its
    weights are packed in 4 bits.

    :raises OptionError: an unknown card.
    """
    from atts.local import EngineSize, share_cards

    if card not in CARDS:
        raise OptionError("card", f"unknown card {card!r}", list(CARDS), card)
    models = [pair.size(role) for role in roles]
    if not models[-1].layers or any(model.packed or model.experts for model in models):
        return None
    context = min(run_tokens(max_tokens), *(model.context for model in models))
    sizes = [EngineSize(int(model.weights * 1e9), model.cache_bytes, context) for model in models]
    free = CARDS[card] * _USABLE * 1e9
    for count in counts:
        shares = share_cards(sizes, [free] * count, rollouts * context)
        if shares is not None:
            used = 1 + max(share.card for share in shares)
            return LocalPlacement(card, used, context, dict(zip(roles, shares, strict=True)))
    return None
