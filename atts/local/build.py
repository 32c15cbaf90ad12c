"""Puts a step loop together inside the thread or process that will run it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from atts.errors import ModelLoadError, OutOfMemory, UnsupportedByEngine
from atts.local.batch import Model
from atts.local.compiling import native_library
from atts.local.loader import Weights, load_weights
from atts.local.loop import Reading, StepLoop
from atts.local.messages import Blueprint, Opened, Report
from atts.local.model import TorchModel
from atts.local.native import NativeModel
from atts.local.prefix import PrefixTree
from atts.local.scheduler import Limits, Scheduler
from atts.local.shape import Shape

_CPU_CACHE_BYTES = 2 << 30
_GPU_CACHE_SHARE = 0.8  # of what the weights leave free
_LOGITS_BYTES = 64 << 20  # most kept in remembered logits
_MOST_LOGITS = 4096
_SMALL_MODEL = 10_000_000
"""Weights below which a second thread costs more in waiting than it computes, unless the machine is idle."""


MakeModel = Callable[[Blueprint, Weights, Tensor], Model]


def build_loop(
    plan: Blueprint, tell: Callable[[Report], None], make_model: MakeModel | None = None
) -> tuple[StepLoop, Opened]:
    """Load the weights, allocate the cache, connect the parts; `make_model` stands in for the choice of a kernel.

    :raises ModelLoadError: the weights cannot be used.
    :raises OutOfMemory: weights or cache do not fit, even after shrinking the cache.
    """
    device, dtype = _device(plan), getattr(torch, plan.dtype)
    weights = load_weights(plan.folder, plan.shape, dtype, device, plan.name)
    cache = allocate_cache(plan, dtype, device)
    model = (make_model or _model)(plan, weights, cache)
    kv_tokens = cache.shape[2] - 1
    limits = Limits(kv_tokens, plan.max_batch, plan.chunk_tokens, plan.shape.context_length)
    tree = PrefixTree(max(1, min(_MOST_LOGITS, _LOGITS_BYTES // (4 * plan.shape.vocabulary))))
    reading = Reading(plan.shape.vocabulary, plan.pieces, frozenset(plan.shape.end_ids))
    return StepLoop(model, Scheduler(limits, tree), reading, tell), Opened(kv_tokens, model.device_name)


def _device(plan: Blueprint) -> torch.device:
    has_cuda = plan.device != "cpu" and torch.cuda.is_available()
    if plan.device == "cuda" and not has_cuda:
        advice = "Use device='cpu', or a torch build with CUDA"
        raise ModelLoadError(plan.name, "there is no usable CUDA device", advice)
    return torch.device("cuda" if has_cuda else "cpu")


def _model(plan: Blueprint, weights: Weights, cache: Tensor) -> Model:
    """Native kernels where they can be had and are allowed, else torch."""
    is_fit = cache.device.type == "cpu" and cache.dtype == torch.float32
    if plan.kernel == "native" and not is_fit:
        raise UnsupportedByEngine(plan.name, "the native kernels compute float32 on a CPU", "Use kernel='torch'")
    if plan.kernel != "torch" and is_fit:
        try:
            library = native_library(plan.name, plan.shape)
        except UnsupportedByEngine:
            if plan.kernel == "native":
                raise
        else:
            return NativeModel(library, plan.shape, weights, cache, _threads(plan))
    return TorchModel(plan.shape, weights, cache)


def _threads(plan: Blueprint) -> int:
    if plan.threads is not None:
        return plan.threads
    return 1 if plan.shape.matrix_weights < _SMALL_MODEL else torch.get_num_threads()


def set_threads(plan: Blueprint) -> None:
    """Fix how many threads a step uses; called in the loop's own thread, for OpenMP counts per calling thread."""
    torch.set_num_threads(_threads(plan))


def allocate_cache(plan: Blueprint, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The key-value cache, [layers, 2, slots + 1, kv_heads, head_dim] of zeros; halved until it fits.

    :raises OutOfMemory: not even one whole context fits.
    """
    shape = plan.shape
    tokens = plan.kv_tokens or _default_tokens(shape, dtype, device)
    least = min(tokens, shape.context_length)
    while True:
        size = (shape.layers, 2, tokens + 1, shape.kv_heads, shape.head_dim)
        try:
            return _zeros(size, dtype, device)
        except (torch.OutOfMemoryError, MemoryError):
            if tokens <= least:
                advice = "Lower kv_tokens, use bfloat16, or a smaller model"
                raise OutOfMemory(plan.name, f"a cache of {tokens} tokens does not fit", advice) from None
            tokens = max(least, tokens // 2)


def _default_tokens(shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    per_token = shape.kv_floats * dtype.itemsize
    budget = _CPU_CACHE_BYTES
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _GPU_CACHE_SHARE)
    return max(shape.context_length, budget // per_token)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which cost nothing until they are written; torch would write them all
    words = np.zeros(size, dtype=np.float32 if dtype == torch.float32 else np.int16)
    return torch.from_numpy(words).view(dtype)
