"""A Triton kernel that computes the attention of a step's blocks over the paged cache."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportMissingParameterType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from atts.local.device_steps import Blocks, DeviceStep
from atts.local.model_config import ModelConfig

# Each program of the kernel computes the attention of one block of rows for one key-value head,
# over a part of the context. If a step has few blocks, long contexts are split into parts. The
# results of the parts are then combined with softmax weights. Sizes that vary from step to step are
# read on the device, so that a captured graph works for any lengths. The cache may store the keys
# of several layers next to each other; then the keys of one layer are only a part of a slot.

MOST_ROWS = 16
_WIDTHS = (1, 4, MOST_ROWS)  # numbers of rows per block for which the kernel is compiled
# number of programs that keep a large GPU busy; if a step has fewer, contexts are split to get
# about this number
_PROGRAMS = 264
_MOST_PARTS = 16


# Triton must not specialise the kernel on these arguments. The arrays of a step are slices of one
# array, so their alignment varies. Triton would compile the kernel again during a run for each new
# alignment.
@triton.jit(
    do_not_specialize=[
        "starts",
        "counts",
        "firsts",
        "slots",
        "num_parts",
        "num_rows",
        "table_width",
    ]
)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, keys, values, starts, counts, firsts, slots, out, weights,
    num_parts, num_rows, table_width, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    start = tl.load(starts + block)
    count = tl.load(counts + block)
    first = tl.load(firsts + block)
    lane = tl.arange(0, ROWS)
    place = lane // GROUP
    is_row = (place < count) & (place < WIDTH)
    row = (start + place).to(tl.int64)
    # index of each row and query head in the arrays of queries and outputs
    at = row * HEADS + head * GROUP + lane % GROUP
    dims = tl.arange(0, DIM_UP)
    is_dim = dims < DIM
    query = tl.load(
        queries + at[:, None] * DIM + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, first - WINDOW + 1)
    end = first + count
    share = tl.cdiv(tl.cdiv(end - low, num_parts), COLUMNS) * COLUMNS
    begin = low + part * share
    end = tl.minimum(begin + share, end)
    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, DIM_UP], dtype=tl.float32)
    last = first + place
    for column in range(begin, end, COLUMNS):
        positions = column + tl.arange(0, COLUMNS)
        inside = positions < end
        slot = tl.load(slots + block * table_width + positions, mask=inside, other=0).to(tl.int64)
        where = slot * STRIDE + head * DIM
        key = tl.load(
            keys + where[None, :] + dims[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        sees = inside[None, :] & (positions[None, :] <= last[:, None])
        if WINDOW > 0:
            sees = sees & (positions[None, :] > last[:, None] - WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk = tl.exp(best - base)
        looks = tl.exp(scores - base[:, None])
        total = total * shrunk + tl.sum(looks, 1)
        value = tl.load(
            values + where[:, None] + dims[None, :],
            mask=inside[:, None] & is_dim[None, :],
            other=0.0,
        )
        mixed = mixed * shrunk[:, None] + tl.dot(
            looks.to(value.dtype), value, input_precision="ieee"
        )
        best = higher
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    kept = part.to(tl.int64) * num_rows * HEADS + at
    tl.store(
        out + kept[:, None] * DIM + dims[None, :], mixed, mask=is_row[:, None] & is_dim[None, :]
    )
    weight = tl.where(total > 0, best + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(weights + kept, weight, mask=is_row)


class PagedAttention:
    """Attention over the paged cache in one step, for all layers with the same window."""

    def __init__(self, step: DeviceStep, config: ModelConfig, window: int) -> None:
        (blocks,) = step.classes
        self._blocks = blocks
        self._window = window
        self._config = config

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output for these queries: [rows, heads * head_dim]."""
        rows, heads, dim = query.shape
        parts = self._parts(keys.shape[1])
        out = torch.empty(parts, rows, heads, dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(parts, rows, heads, dtype=torch.float32, device=query.device)
        self._launch(query.contiguous(), keys, values, (out, weights))
        whole = out[0] if parts == 1 else (weights.softmax(0).unsqueeze(-1) * out).sum(0)
        return whole.to(query.dtype).view(rows, heads * dim)

    def _parts(self, kv_heads: int) -> int:
        """Return the number of parts into which to split the context. More parts give the GPU more
        work to do in parallel.
        """
        size = self._blocks.size
        programs = size.blocks * kv_heads
        wanted = min(_MOST_PARTS, _PROGRAMS // max(1, programs), size.length // 128)
        return max(1, wanted)

    def _launch(
        self, query: Tensor, keys: Tensor, values: Tensor, results: tuple[Tensor, Tensor]
    ) -> None:
        config = self._config
        blocks = self._blocks
        width = next(width for width in _WIDTHS if blocks.size.width <= width)
        heads, dim = query.shape[1:]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        is_half = query.dtype != torch.float32
        _attend[(blocks.size.blocks, kv_heads, len(results[0]))](
            query, keys, values, **_arrays(blocks), out=results[0], weights=results[1],
            num_parts=len(results[0]), num_rows=query.shape[0], table_width=blocks.size.length, scale=config.query_scale,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_UP=max(16, triton.next_power_of_2(dim)),
            STRIDE=keys.stride(0), WIDTH=width, ROWS=max(16, triton.next_power_of_2(width * group)),
            COLUMNS=64 if is_half else 32, WINDOW=self._window, num_warps=4, num_stages=2 if is_half else 1,
        )  # fmt: skip


def _arrays(blocks: Blocks) -> dict[str, Tensor]:
    return {
        "starts": blocks.starts,
        "counts": blocks.counts,
        "firsts": blocks.firsts,
        "slots": blocks.slots,
    }
