"""The devices that compute models, and the sizes of the key-value caches that fit into their
memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atts.errors import ModelLoadError, OutOfMemory
from atts.local.loader import free_memory
from atts.local.messages import WorkerConfig
from atts.local.options import WORKSPACE, EngineSize, cards_for, share_cards
from atts.models.folders import checkpoint_dtype

_CPU_CACHE_BYTES = 2 << 30
# If the size of the run is unknown, the cache gets this share of the GPU memory that is free after
# loading.
_GPU_CACHE_SHARE = 0.8
# The cache has two extra slots: slot 0, which stays zero, and the last slot, to which padding rows
# write.
SPARE_SLOTS = 2


def device_of(config: WorkerConfig, named: str = "", option: str = "device") -> torch.device:
    """Return the device for a model: `named` if it is given, else the device in the engine's
    options.

    :raises ModelLoadError: the device does not exist.
    """
    wanted = named or config.options.device
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted.startswith("cuda") and int(wanted[5:] or 0) >= count:
        problem = f"there is no usable CUDA device{f' {wanted}' if named else ''}"
        advice = f"Add ?{option}=cpu to the engine's address, or install a torch build with CUDA"
        raise ModelLoadError(config.name, problem, advice)
    if wanted == "auto":
        wanted = "cuda" if count else "cpu"
        if config.room is not None and config.room.card < count and count > 1:
            wanted = f"cuda:{config.room.card}"
    return torch.device(wanted)


def on_device(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration with a definite data type. The type "auto" is replaced by one that
    suits the device and the checkpoint.

    :raises ModelLoadError: the device does not exist.
    """
    if config.options.dtype != "auto":
        return config
    is_gpu = device_of(config).type == "cuda"
    dtype = checkpoint_dtype(config.folder, config.name) if is_gpu else "float32"
    return replace(config, options=replace(config.options, dtype=dtype))


def dtype_of(config: WorkerConfig) -> torch.dtype:
    """Return the torch data type in which a model is computed; see `on_device`."""
    found: torch.dtype = getattr(torch, on_device(config).options.dtype)
    return found


def check_room(config: WorkerConfig, device: torch.device) -> None:
    """Check, before anything is loaded, that a GPU has enough free memory for the weights. Also
    check that caches for one rollout fit, if its length is known and `kv_tokens` is not set.

    :raises OutOfMemory: the GPU has too little room; the message advises options that fit.
    """
    if device.type != "cuda":
        return
    free = free_room(device)
    room = config.room
    least = config.model.context_length if room is None else room.tokens
    own = EngineSize.of(config.model, on_device(config).options.dtype, least)
    if own.weights + WORKSPACE > free:
        total = total_room(device)
        problem = (
            f"the weights need {own.weights / 1e9:.1f} GB, but {device} has only {free / 1e9:.1f} "
            "GB free"
        )
        raise OutOfMemory(config.name, problem, _server_advice(config, own.weights, total))
    if room is None or config.options.kv_tokens is not None:
        return
    other = _other_on(config, device)
    sizes = [own] if other is None else [own, other]
    if share_cards(sizes, [free], room.most_tokens) is None:
        problem = (
            f"with the weights loaded, {device} does not have enough memory for a rollout of "
            f"{room.tokens:,} tokens"
        )
        if other is not None:
            problem = (
                f"{device} does not have enough memory for both models of the pair: the weights "
                f"need {own.weights / 1e9:.1f} GB and {other.weights / 1e9:.1f} GB, but only "
                f"{free / 1e9:.1f} GB is free"
            )
        advice = "Lower --max-tokens, use a smaller pair, or add a second GPU"
        raise OutOfMemory(config.name, problem, f"{advice}. {_server_words(config, 1)}")


def _server_advice(config: WorkerConfig, weights: int, card: int) -> str:
    cards = cards_for(weights, card)
    return f"A model that does not fit on one GPU needs a server. {_server_words(config, cards)}"


def _server_words(config: WorkerConfig, cards: int) -> str:
    model = config.source or str(config.folder)
    split = f" --tensor-parallel-size {cards}" if cards > 1 else ""
    command = f"vllm serve {model}{split} --port 8000"
    return (
        f"Run `{command}`, then use vllm:http://127.0.0.1:8000/{model} (docs/servers.md); "
        "`atts pairs PAIR --card CARD` prints the commands for a known pair"
    )


def _other_on(config: WorkerConfig, device: torch.device) -> EngineSize | None:
    """Return the size of the other engine of a draft-target pair if it will be loaded onto this
    device; else None.
    """
    room = config.room
    if room is None or room.other is None:
        return None
    other_card = room.other_card if torch.cuda.device_count() > room.other_card else 0
    return room.other if other_card == (device.index or 0) else None


def free_room(device: torch.device) -> int:
    """Return the free memory of a device in bytes. If the system does not report it, return a
    number that is larger than any memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return 1 << 60 if free is None else free


def total_room(device: torch.device) -> int:
    """Return the total memory of a GPU in bytes, used and free."""
    return int(torch.cuda.mem_get_info(device)[1])


def allocate_cache(
    config: WorkerConfig, dtype: torch.dtype, device: torch.device, least: int | None = None
) -> Tensor:
    """Allocate a KV cache filled with zeros, [layers, 2, slots + 2, kv_heads, head_dim].

    The number of slots is the engine's option `kv_tokens` if it is set, else the result of
    `default_tokens`. If memory does not suffice, the number is halved again and again, down to
    `least`.

    :raises OutOfMemory: there is no room for a single context, or for a single rollout if its
        length is known.
    """
    model = config.model
    tokens = config.options.kv_tokens or default_tokens(config, dtype, device)
    if least is None:
        needed = model.context_length if config.room is None else config.room.tokens
        least = min(tokens, needed)
    while True:
        size = (
            config.model.num_layers,
            2,
            tokens + SPARE_SLOTS,
            model.num_kv_heads,
            model.head_dim,
        )
        try:
            return _zeros(size, dtype, device)
        except (torch.OutOfMemoryError, MemoryError):
            if tokens <= least:
                advice = "Lower kv_tokens, or use bfloat16 or a smaller model"
                raise OutOfMemory(
                    config.name, f"a cache of {tokens} tokens does not fit into memory", advice
                ) from None
            tokens = max(least, tokens // 2)


def default_tokens(config: WorkerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the default size of a cache in tokens. The weights must be loaded already.

    On a GPU, the cache has room for all tokens of the rollouts in flight, if their number is known
    and memory suffices. Memory that the other engine of the pair needs stays free.

    :raises OutOfMemory: there is no room for a single rollout.
    """
    per_token = config.kv_floats_per_token * dtype.itemsize
    if device.type != "cuda":
        return max(config.model.context_length, _CPU_CACHE_BYTES // per_token)
    free = free_room(device)
    if config.room is None:
        return max(config.model.context_length, int(free * _GPU_CACHE_SHARE) // per_token)
    sizes = [EngineSize(0, per_token, config.room.tokens)]
    other = _other_on(config, device)
    if other is not None:
        sizes.append(other)
    shares = share_cards(sizes, [free], config.room.most_tokens)
    if shares is None:
        problem = (
            f"a cache for one rollout of {config.room.tokens:,} tokens does not fit on {device}"
        )
        raise OutOfMemory(config.name, problem, "Lower --max-tokens, or use a smaller model")
    return shares[0].tokens


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # NumPy gets zeroed pages from the operating system, which take no memory until they are
    # written. torch would write every page at once.
    words = np.zeros(size, dtype=np.float32 if dtype == torch.float32 else np.int16)
    return torch.from_numpy(words).view(dtype)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out. Torch on a CPU and CUDA's libraries raise
    a RuntimeError for this, so its message is searched.
    """
    words = "allocate memory", "out of memory", "ALLOC_FAILED"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )
