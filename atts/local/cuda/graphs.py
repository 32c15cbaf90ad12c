"""Captured steps: a step that decodes is recorded once for each size of batch, then replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atts.core import Recent
from atts.local.batch import StepBatch
from atts.local.cache import SlotIds
from atts.local.step_layout import (
    ALL_ROWS,
    DeviceStep,
    RowBlocks,
    StepLayout,
    bucketed,
    layout_of,
    packed,
    unpacked,
)

MOST_CAPTURED_ROWS = 256
_MOST_GRAPHS = 64
_MOST_SEEN = 1024  # layouts that came once
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what some work does to tensors that stay, and returns what does it again."""


@dataclass(frozen=True, slots=True)
class _Graph:
    array: Tensor  # what `packed` makes goes in here
    hidden: Tensor  # and this comes out
    replay: Callable[[], None]


class StepGraphs:
    """Graphs of decoding steps by layout: batches of 1, 2, 4, ... rows, contexts of up to 64, 128,
    256, ... tokens.

    A layout is captured when it comes for the second time; then the graph that was not used for the
    longest time makes room. Where capturing fails once, steps are computed one by one.
    """

    def __init__(
        self, compute: Callable[[DeviceStep], Tensor], capture: Capture, cache: Tensor
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._device = cache.device
        self._spare_slot = cache.shape[2] - 1
        self.captured: Recent[StepLayout, _Graph] = Recent(_MOST_GRAPHS)
        self._seen: Recent[StepLayout, bool] = Recent(_MOST_SEEN)
        self.num_replayed = 0
        self.trouble = ""  # why nothing is captured any more

    def run(self, batch: StepBatch, table: SlotIds, blocks: RowBlocks) -> Tensor | None:
        """Replay a graph and return the hidden states of `logit_rows`; None: compute the step."""
        if (
            self.trouble
            or batch.num_single < len(batch.table_rows)
            or len(batch.tokens) > MOST_CAPTURED_ROWS
        ):
            return None
        layout = bucketed(batch, blocks)
        graph = self.captured.get(layout)
        if graph is None and self._seen.get(layout) is None:
            self._seen[layout] = True
            return None
        array = torch.from_numpy(packed(batch, table, [blocks], layout, self._spare_slot))
        if graph is None and (graph := self._captured(layout, array)) is None:
            return None
        self.captured[layout] = graph  # the one that is used stays longest
        graph.array.copy_(array, non_blocking=True)
        graph.replay()
        self.num_replayed += 1
        if layout_of(batch, [blocks]).logits == ALL_ROWS:
            return graph.hidden[: len(batch.tokens)]
        return graph.hidden[torch.from_numpy(batch.logit_rows).to(self._device)]

    def _captured(self, layout: StepLayout, array: Tensor) -> _Graph | None:
        """Capture a graph of this layout; its work is done once on the array that is given, and
        again later.
        """
        try:
            held = array.to(self._device, copy=True)
            hidden = torch.empty_like(self._compute(unpacked(held, layout)))

            def work() -> None:
                hidden.copy_(self._compute(unpacked(held, layout)))

            graph = _Graph(held, hidden, self._capture(work))
        except Exception as error:  # noqa: BLE001  whatever a driver says, the step can be computed without it
            self.trouble = f"steps are not captured ({type(error).__name__}: {error}): they are launched one by one"
            return None
        return graph


def cuda_capture() -> Capture:
    """Make CUDA graphs that share one pool of memory; each is warmed up before it is captured."""
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
