"""Devices that models are computed on: that of an engine, and that of its drafter."""

from __future__ import annotations

import torch

from atts.errors import ModelLoadError
from atts.local.messages import WorkerConfig


def device_of(config: WorkerConfig, own: str = "") -> torch.device:
    """Where a model is computed: as its engine's options say, or on a device of its own.

    :raises ModelLoadError: it is not there.
    """
    wanted = own or config.options.device
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted.startswith("cuda") and int(wanted[5:] or 0) >= count:
        problem = f"there is no usable CUDA device{f' {wanted}' if own else ''}"
        words = f"?{'drafter_' * bool(own)}device=cpu"
        advice = f"Write {words} behind the engine's name, or take a torch build with CUDA"
        raise ModelLoadError(config.name, problem, advice)
    return torch.device(wanted if wanted != "auto" else "cuda" if count else "cpu")


def drafter_device(config: WorkerConfig) -> torch.device:
    """Where its draft model is computed.

    :raises ModelLoadError: it is not there.
    """
    return device_of(config, config.options.drafter_device)


def is_out_of_memory(error: Exception) -> bool:
    """Whether numpy, torch or a GPU's allocator refused; torch on a CPU and CUDA's libraries say so
    in words only.
    """
    words = "allocate memory", "out of memory", "ALLOC_FAILED"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )
