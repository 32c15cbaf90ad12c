"""Steps on a device: each step is sent as one array, and decoding steps are replayed from captured
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.core import Recent
from atts.local.batch import Ints, StepBatch
from atts.local.cache import SlotIds

# A device receives one packed array per step, and a `StepLayout` with the sizes of its parts. Steps
# with the same layout can share a captured CUDA graph. `bucketed` rounds the sizes up, so that few
# layouts occur; the added padding rows write to a slot that is never read. The device has its own
# copy of the slot table, and looks up there which slots a sequence reads.

ALL_ROWS = -1
_LEAST_LENGTH = 64


class BlockClass(NamedTuple):
    """A class of blocks whose attention is computed together: the number of blocks, and the width
    and length to which the blocks are padded.
    """

    blocks: int
    width: int  # largest number of rows in a block
    length: int  # largest number of positions to which a block attends
    # True if every block has one row, and all rows attend to the same number of positions
    is_even: bool = False


class StepLayout(NamedTuple):
    """The sizes of a step's arrays: its rows, its logit rows and its classes of blocks."""

    rows: int
    # number of rows whose hidden states are returned; ALL_ROWS if all rows are returned in order
    logits: int
    classes: tuple[BlockClass, ...]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks of a step. A block is a range of adjacent rows that belong to one sequence and
    have consecutive positions.
    """

    starts: Ints  # [blocks] index of each block's first row among the rows of the step
    counts: Ints
    firsts: Ints  # [blocks] position of each block's first row in the sequence's text
    table_rows: Ints

    @classmethod
    def of(cls, batch: StepBatch, most: int | None = None) -> RowBlocks:
        """Divide a batch into blocks. If `most` is given, no block has more than `most` rows."""
        single = batch.num_single
        lengths = batch.context_lens
        rows = batch.table_rows
        follows = (np.diff(rows[:single]) == 0) & (np.diff(lengths[:single]) == 1)
        starts = np.append(True, ~follows)[:single].nonzero()[0]
        counts = np.diff(np.append(starts, single))
        own = np.concatenate([starts, np.arange(single, len(rows))])
        sizes = np.concatenate([counts, np.diff(batch.query_starts)[single:]])
        firsts = lengths[own] - np.concatenate(
            [np.ones(len(starts), dtype=np.int64), sizes[len(starts) :]]
        )
        blocks = cls(batch.query_starts[own], sizes, firsts, rows[own])
        return blocks if most is None or sizes.max(initial=0) <= most else blocks._cut(most)

    def _cut(self, most: int) -> RowBlocks:
        pieces = -(-self.counts // most)
        which = np.arange(len(pieces)).repeat(pieces)
        passed = (np.arange(len(which)) - (pieces.cumsum() - pieces)[which]) * most
        return RowBlocks(
            self.starts[which] + passed,
            np.minimum(self.counts[which] - passed, most),
            self.firsts[which] + passed,
            self.table_rows[which],
        )

    @property
    def lengths(self) -> Ints:
        """Return for each block the number of positions that its last row attends to."""
        return self.firsts + self.counts

    def pick(self, chosen: NDArray[np.bool_]) -> RowBlocks:
        """Return only the blocks where the mask `chosen` is True."""
        return RowBlocks(
            *(part[chosen] for part in (self.starts, self.counts, self.firsts, self.table_rows))
        )

    def size(self) -> BlockClass:
        """Return a `BlockClass` with the number of blocks and their largest width and length."""
        width = int(self.counts.max(initial=0))
        lengths = self.lengths
        is_even = width == 1 and bool((lengths == lengths[0]).all())
        return BlockClass(len(self.starts), width, int(lengths.max(initial=0)), is_even)

    def classes(self) -> list[RowBlocks]:
        """Divide the blocks into classes of similar size, so that little padding is computed.
        Blocks of one row form a class, and blocks of two to eight rows form another. Larger blocks
        are grouped by width and length.
        """
        widths = np.ceil(np.log2(self.counts))
        lengths = np.ceil(np.log2(self.lengths))
        kinds = np.where(
            self.counts == 1, 0, np.maximum(3, widths) * 64 + lengths * (self.counts > 8)
        )
        return [self.pick(kinds == kind) for kind in np.unique(kinds)]


def layout_of(batch: StepBatch, classes: list[RowBlocks]) -> StepLayout:
    """Return the exact sizes of a step's arrays, without padding."""
    rows = len(batch.tokens)
    logits = (
        ALL_ROWS if np.array_equal(batch.logit_rows, np.arange(rows)) else len(batch.logit_rows)
    )
    return StepLayout(rows, logits, tuple([each.size() for each in classes]))


def bucketed(batch: StepBatch, blocks: RowBlocks) -> StepLayout:
    """Return the sizes of a decoding step, rounded up so that similar steps can share a CUDA graph.
    Widths of blocks become powers of four (1, 4, 16), and all other sizes become powers of two.

    Widths are rounded more coarsely, because the number of proposed tokens changes from step to
    step. The coarse rounding costs little: wider blocks add work only to attention.
    """
    size = blocks.size()
    length = max(_LEAST_LENGTH, _power(size.length))
    width = _power(size.width)
    # the width is 2, 8, 32, ..., so the next power of four is twice as large
    if width.bit_length() % 2 == 0:
        width *= 2
    rounded = BlockClass(_power(size.blocks), width, length)
    return StepLayout(_power(len(batch.tokens)), ALL_ROWS, (rounded,))


class SlotTableCopy:
    """A copy of the slot table in the device's memory. Each step sends only the entries that
    changed since the previous step.

    Sending the whole table would be slower: for 64 long rollouts it takes megabytes, but a decoding
    step changes only one entry per rollout.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # host copy of the device's table; used to find the entries that changed
        self._sent: SlotIds = np.zeros((0, 0), dtype=np.int32)
        self.on_device = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.num_sent = 0  # number of table entries sent to the device so far

    def update(self, table: SlotIds, rows: Ints, length: int) -> Tensor:
        """Send the changed entries in the first `length` columns of these rows to the device.
        Return the device's table, which is a new tensor if the table has grown.
        """
        width = max(_LEAST_LENGTH, _power(table.shape[1]))
        if self._sent.shape[0] < table.shape[0] or self._sent.shape[1] < width:
            self._sent = np.zeros((table.shape[0], width), dtype=np.int32)
            self.on_device = torch.zeros(self._sent.shape, dtype=torch.int32, device=self._device)
        # Rows between the wanted rows are compared too, because a view of adjacent rows is faster
        # than a selection of rows.
        first = int(rows.min(initial=table.shape[0]))
        last = int(rows.max(initial=-1)) + 1
        length = min(length, table.shape[1])
        wanted = table[first:last, :length]
        sent = self._sent[first:last, :length]
        changed = np.flatnonzero(wanted != sent)
        if len(changed):
            changed_rows, columns = np.divmod(changed, length)
            values = wanted[changed_rows, columns]
            sent[changed_rows, columns] = values
            flat = (changed_rows + first) * self._sent.shape[1] + columns
            both = torch.from_numpy(np.stack([flat, values.astype(np.int64)]))
            changes = both.to(self._device, non_blocking=True)
            self.on_device.view(-1).index_copy_(0, changes[0], changes[1].int())
            self.num_sent += len(values)
        return self.on_device


def packed(
    batch: StepBatch, classes: list[RowBlocks], layout: StepLayout, spare_slot: int
) -> NDArray[np.int32]:
    """Join a step's arrays end to end in one array, padded to the sizes in `layout`. Padding rows
    feed token 0 and write to `spare_slot`, which is never read.
    """
    rows = layout.rows
    places = _places(len(batch.tokens), classes, layout)
    parts: list[Ints] = [_filled(batch.tokens, rows), _filled(batch.positions, rows)]
    parts += [_filled(batch.slots, rows, spare_slot), _filled(places, rows)]
    if layout.logits != ALL_ROWS:
        parts.append(batch.logit_rows)
    for own, size in zip(classes, layout.classes, strict=True):
        facts = own.starts, own.counts, own.firsts, own.table_rows
        parts += [_filled(part, size.blocks) for part in facts]
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def _places(count: int, classes: list[RowBlocks], layout: StepLayout) -> Ints:
    """Return the index of each row after padding. Each block is padded to the width of its class,
    and the padded blocks follow one another.
    """
    places = np.zeros(count, dtype=np.int64)
    before = 0
    for own, size in zip(classes, layout.classes, strict=True):
        inside = np.arange(int(own.counts.sum())) - (own.counts.cumsum() - own.counts).repeat(
            own.counts
        )
        home = before + (np.arange(len(own.counts)) * size.width).repeat(own.counts) + inside
        places[own.starts.repeat(own.counts) + inside] = home
        before += size.blocks * size.width
    return places


def _filled(values: Ints, size: int, value: int = 0) -> Ints:
    if len(values) == size:
        return values
    filled = np.full(size, value, dtype=np.int64)
    filled[: len(values)] = values
    return filled


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


class Blocks(NamedTuple):
    """The arrays of one class of blocks, on the device."""

    size: BlockClass
    # shape [blocks], in int32; `counts` and `firsts` have the same shape and type
    starts: Tensor
    counts: Tensor
    firsts: Tensor
    slots: Tensor  # shape [blocks, length]; the cache slots that each block reads


class DeviceStep(NamedTuple):
    """A step's arrays on the device."""

    tokens: Tensor  # shape [rows], in int32; all arrays of this class except `slots` are in int32
    positions: Tensor
    slots: Tensor  # shape [rows], in int64
    places: Tensor  # index of each row after padding, in the joined blocks of all classes
    # index of each row whose hidden state is returned; None if all rows are returned
    logit_rows: Tensor | None
    classes: tuple[Blocks, ...]


def unpacked(array: Tensor, layout: StepLayout, table: Tensor) -> DeviceStep:
    """Split an array made by `packed` into a step's arrays. For each block, also look up the slots
    that it reads in the device's slot table.
    """
    rows = layout.rows
    logits = max(0, layout.logits)
    sizes = [rows, rows, rows, rows, logits]
    for size in layout.classes:
        sizes += [size.blocks] * 4
    ends = list(accumulate(sizes))
    tokens, positions, slots, places, logit_rows, *rest = (
        array[end - size : end] for size, end in zip(sizes, ends, strict=True)
    )
    classes: list[Blocks] = []
    for at, size in enumerate(layout.classes):
        starts, counts, firsts, table_rows = rest[4 * at : 4 * at + 4]
        seen = table[:, : size.length].index_select(0, table_rows)
        classes.append(Blocks(size, starts, counts, firsts, seen))
    kept = logit_rows if layout.logits != ALL_ROWS else None
    return DeviceStep(tokens, positions, slots.long(), places, kept, tuple(classes))


MOST_CAPTURED_ROWS = 256
_MOST_GRAPHS = 64
# number of layouts to remember; a layout is captured if it occurs again while it is remembered
_MOST_SEEN = 1024
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that records the GPU work of another function. It returns a function that repeats the
recorded work on the same tensors.
"""


class GraphKey(NamedTuple):
    """The key of a captured graph. Steps with the same key run the same operations."""

    layout: StepLayout
    # whether all layers of a group compute attention from the input of the group's first layer
    is_grouped: bool


@dataclass(frozen=True, slots=True)
class _Graph:
    # input of the graph; each step's packed array is copied into it before the graph is replayed
    array: Tensor
    hidden: Tensor  # output of the graph: the hidden states
    replay: Callable[[], None]


class StepGraphs:
    """CUDA graphs of decoding steps, one for each rounded layout. Steps with grouped attention have
    separate graphs.

    A graph is captured when its layout occurs for the second time. If there are too many graphs,
    the least recently used graph is dropped. After a failed capture, all steps are computed without
    graphs.
    """

    def __init__(
        self, compute: Callable[[DeviceStep, bool], Tensor], capture: Capture, cache: Tensor
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._device = cache.device
        self._spare_slot = cache.shape[2] - 1
        self.captured: Recent[GraphKey, _Graph] = Recent(_MOST_GRAPHS)
        self._seen: Recent[GraphKey, bool] = Recent(_MOST_SEEN)
        # the slot table on the device, which all captured graphs read
        self._table: Tensor | None = None
        self.num_replayed = 0
        self.trouble = ""  # reason why graphs are not captured any more; empty while captures work

    def run(
        self, batch: StepBatch, table: Tensor, blocks: RowBlocks, is_grouped: bool = False
    ) -> Tensor | None:
        """Replay a captured graph and return the hidden states of the batch's `logit_rows`. Return
        None if this step has no graph; the caller must then compute the step itself.

        `table` is the slot table on the device. A captured graph always reads the same memory
        address, so all graphs are dropped if `table` is another tensor than before.
        """
        if (
            self.trouble
            or batch.num_single < len(batch.table_rows)
            or len(batch.tokens) > MOST_CAPTURED_ROWS
        ):
            return None
        if table is not self._table:
            self.captured.clear()
            self._table = table
        layout = bucketed(batch, blocks)
        key = GraphKey(layout, is_grouped)
        graph = self.captured.get(key)
        if graph is None and self._seen.get(key) is None:
            self._seen[key] = True
            return None
        array = torch.from_numpy(packed(batch, [blocks], layout, self._spare_slot))
        if graph is None and (graph := self._captured(key, array, table)) is None:
            return None
        self.captured[key] = graph  # makes this graph the most recently used one
        graph.array.copy_(array, non_blocking=True)
        graph.replay()
        self.num_replayed += 1
        if layout_of(batch, [blocks]).logits == ALL_ROWS:
            return graph.hidden[: len(batch.tokens)]
        return graph.hidden[torch.from_numpy(batch.logit_rows).to(self._device)]

    def _captured(self, key: GraphKey, array: Tensor, table: Tensor) -> _Graph | None:
        """Capture a graph for steps of this layout; return None if the capture fails. Before the
        capture, compute the step once, with the input `array`.
        """
        try:
            inputs = array.to(self._device, copy=True)
            first = self._compute(unpacked(inputs, key.layout, table), key.is_grouped)
            hidden = torch.empty_like(first)

            def work() -> None:
                step = unpacked(inputs, key.layout, table)
                hidden.copy_(self._compute(step, key.is_grouped))

            graph = _Graph(inputs, hidden, self._capture(work))
        except Exception as error:  # noqa: BLE001  the step can be computed without a graph after any error
            self.trouble = (
                f"steps cannot be captured as CUDA graphs ({type(error).__name__}: {error}), so "
                "each kernel is launched separately"
            )
            return None
        return graph
