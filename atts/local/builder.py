"""The builder of a step loop for plain decoding, and functions that all builders of loops use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from atts.errors import UnsupportedByEngine
from atts.local.batch import TokenTable
from atts.local.cache import PrefixTree
from atts.local.cpu.bursts import MultiStep
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import NativeModel, unknown_parts
from atts.local.cuda.model import cuda_model
from atts.local.devices import (
    SPARE_SLOTS,
    allocate_cache,
    check_room,
    device_of,
    dtype_of,
    on_device,
)
from atts.local.loader import Weights, load_weights
from atts.local.loop import StepLoop
from atts.local.messages import LoopReport, ShareCores, WorkerConfig, WorkerReady
from atts.local.model import TorchModel
from atts.local.model_config import rope_rows
from atts.local.scheduler import Scheduler, SchedulerConfig
from atts.local.seams import HookedModel, Model

# torch's default number of threads. It is read at import, because `set_threads` may lower torch's
# setting later.
_MOST_THREADS = torch.get_num_threads()
# limit, in bytes, on the size of all logits that the prefix tree remembers
_LOGITS_BYTES = 64 << 20
_MOST_LOGITS = 4096

Send = Callable[[LoopReport], None]
MakeModel = Callable[[WorkerConfig, Weights, Tensor], HookedModel]


def build_loop(
    config: WorkerConfig, send: Send, make_model: MakeModel | None = None
) -> tuple[StepLoop, WorkerReady]:
    """Load the weights, allocate the cache and build the loop. If `make_model` is given, it builds
    the model in place of `choose_model`.

    :raises ModelLoadError: the weights cannot be used.
    :raises OutOfMemory: weights or cache do not fit, even after shrinking the cache.
    """
    config = on_device(config)
    device = device_of(config)
    check_room(config, device)
    weights = whole_weights(config, make_model)
    cache = allocate_cache(config, dtype_of(config), device)
    model, trouble = whole_model(config, weights, cache, make_model)
    slots = cache.shape[2] - SPARE_SLOTS
    scheduler = Scheduler(scheduler_config(config, slots), prefix_tree(config))
    table = token_table(config)
    bursts = MultiStep.of(model, scheduler, table)
    loop = StepLoop(model, scheduler, table, send, bursts=bursts)
    loop.share_cores = partial(share_cores, config, model)
    ready = WorkerReady(slots, model.device_name, trouble, dtype=config.options.dtype)
    return loop, ready


def whole_weights(config: WorkerConfig, make_model: MakeModel | None) -> Weights:
    """Load all weights of a model. If native kernels may be used, each layer is read from disk only
    when it is packed for them.
    """
    return load_weights(
        config.folder,
        config.model,
        dtype_of(config),
        device_of(config),
        config.name,
        on_demand=make_model is None and packs_weights(config),
    )


def whole_model(
    config: WorkerConfig, weights: Weights, cache: Tensor, make_model: MakeModel | None
) -> tuple[HookedModel, str]:
    """Build the model with `make_model` if it is given, else with the best available kernel. Return
    also a note to the user about the kernel, which may be an empty string.
    """
    if make_model is not None:
        return make_model(config, weights, cache), ""
    return choose_model(config, weights, cache)


def scheduler_config(config: WorkerConfig, slots: int) -> SchedulerConfig:
    """Return the scheduler's limits for a cache with this many slots."""
    model = config.model
    return SchedulerConfig(
        slots,
        config.options.max_batch,
        config.options.chunk_tokens,
        model.context_length,
        model.long_after,
        rope_rows(model, slots + SPARE_SLOTS),
    )


def prefix_tree(config: WorkerConfig) -> PrefixTree:
    """Return an empty prefix tree with a limit on the memory for stored logits."""
    most = _LOGITS_BYTES // (4 * config.model.vocabulary)
    return PrefixTree(max(1, min(_MOST_LOGITS, most)))


def token_table(config: WorkerConfig) -> TokenTable:
    """Return the bytes of each token and the ids of the end tokens, as a step loop needs them."""
    return TokenTable(config.pieces, frozenset(config.model.end_ids))


def choose_model(
    config: WorkerConfig, weights: Weights, cache: Tensor, group: int = 1
) -> tuple[NativeModel | TorchModel, str]:
    """Build the model with native kernels if they are available and allowed, else with torch.
    Also return a note to the user about the kernel, which may be an empty string.
    """
    is_fit = cache.device.type == "cpu" and cache.dtype == torch.float32
    rounds = config.options.scores == "bfloat16"
    is_needed = rounds or config.options.kernel == "native"
    if is_needed and not is_fit:
        raise UnsupportedByEngine(
            config.name,
            "the native kernels support only float32 on a CPU",
            "Add ?kernel=torch to the engine's address",
        )
    trouble = ""
    if config.options.kernel != "torch" and is_fit:
        try:
            if unknown := unknown_parts(config.model):
                raise UnsupportedByEngine(
                    config.name, f"the native kernels do not support {unknown}", "Use kernel=torch"
                )
            library, trouble = native_library(config.name, config.model)
            if rounds and not library.atts_has_pairs():
                problem = "this processor has no instructions that multiply bfloat16 numbers"
                raise UnsupportedByEngine(config.name, problem, "Leave out scores=bfloat16")
        except UnsupportedByEngine as error:
            if is_needed:
                raise
            trouble = f"{error.problem}: atts uses torch operations, which are several times slower"
        else:
            threads = threads_of(config)
            model = NativeModel(
                library, config.model, weights, cache, threads, group=group, rounds_scores=rounds
            )
            return model, trouble
    weights = replace(weights, layers=tuple(weights.layers))
    if cache.device.type == "cuda":
        with torch.cuda.device(cache.get_device()):
            return cuda_model(
                config.model, weights, cache, graphs=config.options.graphs, group=group
            )
    return TorchModel(config.model, weights, cache, group=group), trouble


def packs_weights(config: WorkerConfig) -> bool:
    """Return whether native kernels may be used. They need the weights of every layer in packed
    form.
    """
    is_fit = device_of(config).type == "cpu" and dtype_of(config) == torch.float32
    return is_fit and config.options.kernel != "torch"


def threads_of(config: WorkerConfig) -> int:
    """Return how many threads this process uses to compute a step."""
    return config.threads(_MOST_THREADS)


def set_threads(config: WorkerConfig) -> None:
    """Set torch's thread count. Call this function in the loop's own thread, because OpenMP stores
    a separate count for each calling thread.
    """
    torch.set_num_threads(threads_of(config))


def share_cores(config: WorkerConfig, model: Model, shared: ShareCores) -> None:
    """Compute the loop's thread count again when a loop that shares the cores opens, closes, or
    becomes busy or idle.

    With native kernels, busy loops also use the cores of idle loops. With torch, the thread count
    changes the last bits of results, so all open loops get the same share, busy or idle.
    """
    set_threads(replace(config, sharers=shared.open_loops))
    loops = shared.busy_loops if model.is_thread_independent else shared.open_loops
    model.use_threads(threads_of(replace(config, sharers=max(1, loops))))
