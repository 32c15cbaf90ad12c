"""The torch model on a GPU; it uses the paged attention kernel if the kernel passes a comparison
with gathered attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atts.local.batch import StepBatch
from atts.local.device_steps import ALL_ROWS, Capture, RowBlocks, StepLayout, packed, unpacked
from atts.local.loader import Weights, layer_groups
from atts.local.model import GatheredAttention, MakeAttend, TorchModel
from atts.local.model_config import ModelConfig
from atts.local.options import Graphs

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


def cuda_model(
    config: ModelConfig,
    weights: Weights,
    cache: Tensor,
    *,
    graphs: Graphs = "auto",
    group: int = 1,
) -> tuple[TorchModel, str]:
    """Build the torch model with the fastest methods that this GPU and its software support. Return
    also a note to the user if the paged attention kernel cannot be used, else an empty string.

    :param group: largest number of layers whose attention may be computed together; see
        `TorchModel.is_grouped`.
    """
    capture = cuda_capture() if graphs == "auto" else None
    try:
        attention, most_rows = paged_attention(config, cache, group)
    except Exception as error:  # noqa: BLE001  no Triton, no compiler, another version: torch can do without
        trouble = (
            f"the paged attention kernel is not used ({type(error).__name__}: {str(error)[:200]}): "
            "atts reads the cache with torch operations instead"
        )
        return TorchModel(config, weights, cache, capture=capture, group=group), trouble
    model = TorchModel(
        config,
        weights,
        cache,
        attention=attention,
        most_rows=most_rows,
        capture=capture,
        group=group,
    )
    return model, ""


def paged_attention(config: ModelConfig, cache: Tensor, group: int = 1) -> tuple[MakeAttend, int]:
    """Return the attention kernel and the largest number of rows per block that it supports. First
    compare its output with torch's attention, for single layers and for groups of up to `group`
    layers.

    :raises Exception: the kernel cannot be used; the type of error depends on the installed software.
    """
    from atts.local.cuda.paged_kernel import MOST_ROWS, PagedAttention

    if config.attention_cap:
        raise ValueError("the kernel does not support soft caps on attention scores")
    forms = {(1, 1)}
    for layers in layer_groups(config, group):
        # The test below also compiles the kernel for every shape of group, so that no later step
        # waits for the compiler.
        forms |= {(len(layers), len(layers)), (1, len(layers))}
    for window in sorted({0, *config.windows}):
        for form in sorted(forms):
            off = disagreement(config, PagedAttention, cache, window, form)
            if not off <= _TOLERANCE[cache.dtype]:
                raise ValueError(f"the kernel's result differs from torch's result by {off:.2g}")
    return PagedAttention, MOST_ROWS


def disagreement(
    config: ModelConfig,
    attention: MakeAttend,
    cache: Tensor,
    window: int,
    form: tuple[int, int] = (1, 1),
) -> float:
    """Return the largest difference between an attention kernel's output and float32 attention in
    torch, on random data. Return NaN if any difference is NaN.

    :param form: the number of layers that attend together, and the number of layers whose keys and
        values lie next to each other in the cache.
    """
    random = torch.Generator().manual_seed(0)
    attending, side_by_side = form
    heads = attending * config.num_heads
    shape = side_by_side * config.num_kv_heads, config.head_dim
    # The test uses the last layers of the group, so that a kernel that wrongly reads the first
    # layers fails.
    own = slice((side_by_side - attending) * config.num_kv_heads, None)
    slots = 1 + torch.randperm(2049, generator=random).to(torch.int32).view(3, -1).numpy()
    keys, values = (
        torch.randn(2050, *shape, generator=random).to(cache.device, cache.dtype)[:, own]
        for _ in "kv"
    )
    worst = 0.0
    for counts in ((1, 1, 1), (4, 1, 3), (16, 9, 1)):
        batch = _spans(counts, firsts=(0, 130, 600))
        layout = StepLayout(sum(counts), ALL_ROWS, (RowBlocks.of(batch).size(),))
        array = packed(batch, [RowBlocks.of(batch)], layout, spare_slot=2049)
        table = torch.from_numpy(slots).to(cache.device)
        step = unpacked(torch.from_numpy(array).to(cache.device), layout, table)
        query = torch.randn(sum(counts), heads, config.head_dim, generator=random).to(keys)
        ours = attention(step, config, window)(query, keys, values).float()
        exact = GatheredAttention(step, config, window)(query.float(), keys.float(), values.float())
        off = (ours - exact).abs().max().item()
        worst = off if not off <= worst else worst
    return worst


def _spans(counts: tuple[int, ...], firsts: tuple[int, ...]) -> StepBatch:
    """Return a test batch in which sequence i feeds `counts[i]` tokens, beginning at position
    `firsts[i]`.
    """
    sizes = np.array(counts, dtype=np.int64)
    rows = np.zeros(sum(counts), dtype=np.int64)
    return StepBatch(
        tokens=rows,
        positions=rows,
        slots=rows,
        table_rows=np.arange(len(sizes)),
        query_starts=np.concatenate([rows[:1], sizes.cumsum()]),
        context_lens=np.array(firsts) + sizes,
        num_logits=sizes,
        num_single=0,
        logit_rows=np.arange(len(rows)),
    )


def cuda_capture() -> Capture:
    """Return a function that captures CUDA graphs, all in one memory pool. Before it captures the
    work of a graph, the function runs this work once.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()
        torch.cuda.current_stream().wait_stream(beside)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture
