"""Devices that models are computed on, and the key-value caches that fit into their memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atts.errors import ModelLoadError, OutOfMemory
from atts.local.loader import free_memory
from atts.local.messages import WorkerConfig

_CPU_CACHE_BYTES = 2 << 30
_GPU_CACHE_SHARE = 0.8  # of what the weights leave free
# the first, which stays zero, and the last, which rows that only fill a step up are written to
SPARE_SLOTS = 2


def device_of(config: WorkerConfig, named: str = "", option: str = "device") -> torch.device:
    """Return where a model is computed: as its engine's options say, or where `option` names.

    :raises ModelLoadError: it is not there.
    """
    wanted = named or config.options.device
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted.startswith("cuda") and int(wanted[5:] or 0) >= count:
        problem = f"there is no usable CUDA device{f' {wanted}' if named else ''}"
        advice = f"Write ?{option}=cpu behind the engine's name, or take a torch build with CUDA"
        raise ModelLoadError(config.name, problem, advice)
    if wanted == "auto":
        wanted = "cuda" if count else "cpu"
    return torch.device(wanted)


def free_room(device: torch.device) -> int:
    """Return bytes of memory that are free there; all there can be where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return 1 << 60 if free is None else free


def allocate_cache(
    config: WorkerConfig, dtype: torch.dtype, device: torch.device, least: int | None = None
) -> Tensor:
    """Allocate the cache, [layers, 2, slots + 2, kv_heads, head_dim] of zeros; halve it until it
    fits.

    :raises OutOfMemory: not even one whole context fits.
    """
    model = config.model
    tokens = config.options.kv_tokens or default_tokens(config, dtype, device)
    least = least or min(tokens, model.context_length)
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
                advice = "Lower kv_tokens, use bfloat16, or a smaller model"
                raise OutOfMemory(
                    config.name, f"a cache of {tokens} tokens does not fit", advice
                ) from None
            tokens = max(least, tokens // 2)


def default_tokens(config: WorkerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many tokens a cache holds where no number is given."""
    budget = _CPU_CACHE_BYTES
    if device.type == "cuda":
        budget = int(free_room(device) * _GPU_CACHE_SHARE)
    return max(config.model.context_length, budget // (config.kv_floats_per_token * dtype.itemsize))


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which cost nothing until they are written; torch would
    # write them all
    words = np.zeros(size, dtype=np.float32 if dtype == torch.float32 else np.int16)
    return torch.from_numpy(words).view(dtype)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether numpy, torch or a GPU's allocator refused; torch on a CPU and CUDA's libraries
    say so in words only.
    """
    words = "allocate memory", "out of memory", "ALLOC_FAILED"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )
