"""The forward pass in C kernels, for float32 on a CPU.

The first part of the file prepares the weights: it packs matrices into panels, and keeps other
weights at fixed addresses. Weights with the same key are prepared only once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.local.batch import Ints, StepBatch
from atts.local.cache import SlotIds
from atts.local.loader import (
    AttentionGroup,
    LayerWeights,
    LowRank,
    Rope,
    Weights,
    attention_groups,
    joined,
)
from atts.local.logit_sampling import (
    SampledTokens,
    SamplingBatch,
    filtered_rows,
    sample,
    spread_rows,
)
from atts.local.model_config import ModelConfig, rope_rows
from atts.local.seams import LayerHook


class PanelKind(IntEnum):
    """The storage format of a packed matrix. The values are those of the constants in model.h."""

    FULL = 0
    # stored as bfloat16, converted to float32 when read; only for weights that bfloat16 represents
    # exactly
    HALF = 1
    # stored as bfloat16; the processor multiplies pairs of bfloat16 numbers without conversion to
    # float32
    PAIRS = 2


class _Delta(ctypes.Structure):
    _fields_ = [("down", ctypes.c_void_p), ("up", ctypes.c_void_p), ("rank", ctypes.c_int64)]


class PackedAdapter(NamedTuple):
    """An adapter in the form that the kernels read: the low-rank additions to the four matrices of
    each layer.
    """

    address: int
    rank: int  # largest rank among the adapter's matrices


class Packing:
    """Memory with weights in the form that the kernels read. Models that share a `Packing` store
    weights with the same key only once.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[object] = []
        self._known: dict[Hashable, int | None] = {}
        self.num_bytes = 0

    def keep(self, value: object) -> None:
        """Keep an object alive, because C code has pointers into its memory."""
        self._kept.append(value)

    def pin(self, tensor: Tensor | None, key: Hashable = None) -> int | None:
        """Keep a tensor alive and return the address of its data; return None for None. For a key
        that was pinned before, return the earlier address.
        """
        if key is not None and key in self._known:
            return self._known[key]
        address = None if tensor is None else self._add(tensor.contiguous())
        if key is not None:
            self._known[key] = address
        return address

    def pack(self, matrix: Tensor, kind: PanelKind, key: Hashable = None) -> int:
        """Copy a matrix into the kernels' panel layout, and return the address of the copy. For a
        key that was packed before, return the earlier address.
        """
        if (known := self._known.get(key) if key is not None else None) is not None:
            return known
        rows, columns = matrix.shape
        matrix = matrix.contiguous()
        packed = torch.empty(
            self._library.atts_packed_bytes(rows, columns, int(kind)), dtype=torch.uint8
        )
        self._library.atts_pack(matrix.data_ptr(), rows, columns, int(kind), packed.data_ptr())
        address = self._add(packed)
        if key is not None:
            self._known[key] = address
        return address

    def adapter(self, deltas: Sequence[LowRank | None]) -> PackedAdapter:
        """Pack an adapter's additions to the matrices of all layers."""
        found = [
            _Delta(
                self.pack(low.down, PanelKind.FULL),
                self.pack(low.up, PanelKind.FULL),
                len(low.down),
            )
            if low
            else _Delta()
            for low in deltas
        ]
        array = (_Delta * len(found))(*found)
        self.keep(array)
        return PackedAdapter(ctypes.addressof(array), max(delta.rank for delta in found))

    def _add(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor.data_ptr()


_CHECKED_ROWS = 4096


def is_bfloat16(tensor: Tensor) -> bool:
    """Return whether bfloat16 can represent every value of the tensor exactly."""
    # bfloat16 represents a float32 number exactly if the number's last 16 bits are 0. In numpy,
    # combining the bits of all numbers takes a tenth of the time that torch takes to compare the
    # numbers. Blocks of rows save memory.
    return not any(
        np.bitwise_or.reduce(rows.contiguous().numpy().view(np.uint32).reshape(-1)) & 0xFFFF
        for rows in torch.split(tensor, _CHECKED_ROWS)
    )


POINTER = ctypes.c_void_p
INT = ctypes.c_int64


def members(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Return the field list of a C structure: the names in `names`, all with the same type."""
    return [(name, kind) for name in names.split()]


_SIZES = "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size vocabulary"
_PLAIN = "norm qkv_bias query_norm key_norm out_bias mlp_norm gate_up_bias down_bias"
_PACKED = "qkv out gate_up down"
_HALVES = (
    ("qkv out", "norm qkv_bias query_norm key_norm out_bias"),
    ("gate_up down", "mlp_norm gate_up_bias down_bias"),
)


class _Layer(ctypes.Structure):
    _fields_ = [
        *members(_PLAIN, POINTER),
        *members(_PACKED, POINTER),
        *members("qkv_pairs out_pairs gate_up_pairs down_pairs", POINTER),
        *members("cosines sines keys values", POINTER),
        *members("stride window num_heads num_kv_heads across place attention_bf16 mlp_bf16", INT),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *members(f"{_SIZES} is_bf16", INT),
        *members("eps query_scale", ctypes.c_float),
        *members("embedding norm head head_pairs layers", POINTER),
    ]


class NativeWeights:
    """The weights of a model, packed into the form that the kernels read."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: Tensor,
        packing: Packing,
        keys: Sequence[str],
        group: int,
    ) -> None:
        """Pack the weights. `keys` has one key for the embedding, one for each half of each layer,
        and one for the head. Parts with the same key are packed only once, and share their memory.
        """
        self._config = config
        self._packing = packing
        self._keys = keys or [""] * (2 * config.num_layers + 2)
        self._groups = attention_groups(config, cache, group)
        self.most_attentions = max((len(own.layers) for own in self._groups), default=1)
        self.is_bf16 = True  # becomes False when a weight is found that bfloat16 cannot represent
        packing.keep(cache)
        self.exact, self.grouped = self._describe(weights, rope_rows(config, cache.shape[2]))

    def _describe(self, weights: Weights, rows: int) -> tuple[_Model, _Model]:
        """Return two descriptions of the model for the kernels: with normal attention and with
        grouped attention. Grouped attention computes the attention of all layers in a group at the
        group's first layer.
        """
        config = self._config
        packing = self._packing
        keys = self._keys
        tables = {kind: self._table(rope, rows) for kind, rope in weights.ropes.items()}
        exact = list[_Layer]()
        grouped = list[_Layer]()
        for group in self._groups:
            # Indexing may read the layers from disk, so each layer is accessed only once. At most
            # two groups of unpacked layers are in memory at a time.
            layers = weights.layers[group.layers.start : group.layers.stop]
            exact += [
                self._layer(group.one(at), layer, tables[config.ropes[at]])
                for at, layer in zip(group.layers, layers, strict=True)
            ]
            grouped += self._attending_at_once(group, layers, exact[group.layers.start :])
        is_bf16 = is_bfloat16(weights.head)
        self.is_bf16 &= is_bf16
        head = keys[0] if weights.head is weights.embedding else keys[-1]
        arrays = [(_Layer * config.num_layers)(*own) for own in (exact, grouped)]
        packing.keep(arrays)
        self._layers = arrays[0]
        model = _Model(
            **{name: getattr(config, name) for name in _SIZES.split()},
            is_bf16=int(is_bf16),
            eps=config.norm_eps,
            query_scale=config.query_scale,
            embedding=packing.pin(weights.embedding, _key(keys[0], "embedding")),
            norm=packing.pin(weights.norm, _key(keys[-1], "norm")),
            head=packing.pack(weights.head, PanelKind(is_bf16), _key(head, "head")),
            layers=ctypes.addressof(arrays[0]),
        )
        other = _Model.from_buffer_copy(model)
        other.layers = ctypes.addressof(arrays[1])
        return model, other

    def add_pairs(self, weights: Weights) -> None:
        """Pack all matrices a second time as bfloat16, to multiply rows that are rounded to
        bfloat16.
        """
        for own, layer in zip(self._layers, weights.layers, strict=True):
            for name in _PACKED.split():
                setattr(
                    own, f"{name}_pairs", self._packing.pack(getattr(layer, name), PanelKind.PAIRS)
                )
        self.exact.head_pairs = self._packing.pack(weights.head, PanelKind.PAIRS)

    def _layer(
        self, group: AttentionGroup, layer: LayerWeights, table: tuple[int | None, int | None]
    ) -> _Layer:
        at = group.layers.start
        own = _Layer(cosines=table[0], sines=table[1], window=self._config.windows[at])
        for half in (0, 1):
            self._fill_half(own, half, layer, self._keys[1 + 2 * at + half])
        self._place(own, group)
        return own

    def _attending_at_once(
        self, group: AttentionGroup, weights: Sequence[LayerWeights], layers: Sequence[_Layer]
    ) -> list[_Layer]:
        """Return copies of a group's layers in which the first layer computes the attention of the
        whole group.
        """
        if len(layers) == 1:
            return list(layers)
        own = self._config.num_heads * self._config.head_dim
        together = joined(weights, self._config)
        merged = [_Layer.from_buffer_copy(layer) for layer in layers]
        # Rounding the joined weights to bfloat16 halves the memory to read. Grouped attention is
        # not exact in float32 either, so the rounding is acceptable.
        if layers[0].attention_bf16:
            together = replace(together, qkv=together.qkv.bfloat16().float())
        self._fill_half(merged[0], 0, together, "")
        self._place(merged[0], group)
        for at, layer in enumerate(merged):
            layer.across = len(merged) * own
            layer.place = at * own
            if at:
                layer.num_heads = layer.num_kv_heads = 0
        return merged

    def _fill_half(self, own: _Layer, half: int, layer: LayerWeights, key: str) -> None:
        """Fill in the weights of one half of a layer: attention (half 0) or the feed-forward block
        (half 1).
        """
        packing = self._packing
        packed, plain = _HALVES[half]
        matrices = {name: getattr(layer, name) for name in packed.split()}
        is_bf16 = all(map(is_bfloat16, matrices.values()))
        self.is_bf16 &= is_bf16
        for name, each in matrices.items():
            setattr(own, name, packing.pack(each, PanelKind(is_bf16), _key(key, name)))
        for name in plain.split():
            setattr(own, name, packing.pin(getattr(layer, name), _key(key, name)))
        setattr(own, ("attention_bf16", "mlp_bf16")[half], int(is_bf16))

    def _place(self, own: _Layer, group: AttentionGroup) -> None:
        """Set how many heads a layer computes, and the memory addresses of the group's keys and
        values.
        """
        config = self._config
        count = len(group.layers)
        own.keys = group.keys.data_ptr()
        own.values = group.values.data_ptr()
        own.stride = group.keys.stride(0)
        own.num_heads = count * config.num_heads
        own.num_kv_heads = count * config.num_kv_heads
        own.across = own.num_heads * config.head_dim

    def _table(self, rope: Rope, rows: int) -> tuple[int | None, int | None]:
        angles = rope.angles(rows)
        key = f"{rows} {rope.frequencies.tolist()} {rope.scales.tolist()}"
        cosines = self._packing.pin(angles.cos() * rope.scales, (key, "cosines"))
        return cosines, self._packing.pin(angles.sin() * rope.scales, (key, "sines"))


def _key(content: str, name: str) -> tuple[str, str] | None:
    """Return the `Packing` key of one tensor in a part of a model; None if the part has no key."""
    return (content, name) if content else None


_Floats = NDArray[np.float32]
Allocate = Callable[[int, int], _Floats]
_ARRAYS = tuple(
    field.name
    for field in fields(StepBatch)
    if field.name not in ("num_single", "num_scored", "chains", "units")
)


def _address(array: NDArray[Any]) -> int:
    """Return the memory address of an array's data. This takes half the time of
    `array.ctypes.data`, which matters because a small step needs a dozen addresses.
    """
    return torch.from_numpy(array).data_ptr()


def _fill(step: _Step, batch: StepBatch, table: SlotIds, hidden: _Floats) -> None:
    step.last_row = len(batch.tokens)
    step.last_sequence = len(batch.table_rows)
    step.last_logit = len(batch.logit_rows)
    step.table_width = table.shape[-1]
    rounded = batch.num_scored if step.pairs else (0, 0)
    step.rounded_row = step.last_row - rounded[0]
    step.rounded_logit = step.last_logit - rounded[1]
    step.table = _address(table)
    step.hidden = _address(hidden)
    for name in _ARRAYS:
        setattr(step, name, _address(getattr(batch, name)))


def _floats(rows: int, columns: int) -> _Floats:
    return np.empty((rows, columns), dtype=np.float32)


class Segment(ctypes.Structure):
    """A range of a step's rows, and a range of its logit rows, that use the same adapter."""

    _fields_ = [*members("first_row last_row first_logit last_logit", INT), ("deltas", POINTER)]


class Adapted(NamedTuple):
    """The segments of a step that use an adapter, and the largest rank of their adapters."""

    segments: ctypes.Array[Segment]
    rank: int


_UNADAPTED = Adapted((Segment * 0)(), 0)


class _Step(ctypes.Structure):
    keeps: object  # object that keeps alive the memory to which the pointers below refer

    _fields_ = [
        *members(
            "table_width threads first_row last_row first_sequence last_sequence first_logit "
            "last_logit",
            INT,
        ),
        *members(
            "tokens positions slots table_rows query_starts context_lens num_logits logit_rows "
            "table",
            POINTER,
        ),
        *members("x normed qkv attended gate_up hidden scratch", POINTER),
        ("scratch_floats", INT),
        ("next_items", POINTER),
        *members("first_unit last_unit num_segments", INT),
        *members("segments low", POINTER),
        *members("rounded_row rounded_logit", INT),
        ("pairs", POINTER),
    ]


class _Scoring(ctypes.Structure):
    _fields_ = [
        ("model", POINTER),
        *members("num_rows num_kept", INT),
        *members("hidden tokens kept_rows logprobs kept_logits logits pairs", POINTER),
    ]


class _Sampling(ctypes.Structure):
    _fields_ = [
        *members("num_rows vocabulary", INT),
        *members("logits temperatures uniforms tokens logprobs scratch ends", POINTER),
    ]


class AheadBatch(NamedTuple):
    """A batch in which several tokens are sampled for each sequence, without top-k, top-p or min-p.
    Sequences with more tokens to sample come first.
    """

    # batch of the first turn: the tokens of each sequence that the model has not read yet. The
    # first new token is sampled after the last of these.
    first: StepBatch
    # batch of each later turn: one row per sequence, which feeds the token that was just drawn; the
    # kernel increases the positions by 1 after each turn
    following: StepBatch
    counts: NDArray[np.int64]  # [turns] number of sequences that draw a token in each turn
    temperatures: Tensor  # shape [sequences], in float64
    uniforms: NDArray[np.float64]  # shape [turns, sequences]
    # [vocabulary] mask of tokens that may end a text; after a turn in which a sequence draws such a
    # token, the kernel stops
    ends: NDArray[np.uint8] | None = None


class NativeModel:
    """A model that runs its steps with the C kernels, in float32 on a CPU. Its cache has the same
    layout as that of the torch model.

    Weights that bfloat16 represents exactly are stored as bfloat16. This halves the memory that is
    read, and changes no value.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: Weights,
        cache: Tensor,
        threads: int,
        *,
        allocate: Allocate = _floats,
        packing: Packing | None = None,
        keys: Sequence[str] = (),
        group: int = 1,
        rounds_scores: bool = False,
    ) -> None:
        """Create the model. `allocate` makes the buffers of a step, and may raise MemoryError.
        `group` is the largest number of layers whose attention may be computed together; see
        `is_grouped`.

        With `rounds_scores`, rows of scoring requests are rounded to bfloat16 before they are
        multiplied by matrices; the processor must have bfloat16 instructions.

        Models that share a `packing` store parts with the same key only once. The parts are the
        embedding, the two halves of each layer and the head. `keys` has a key for each part.
        """
        self._library = library
        self._config = config
        self._threads = threads
        self._allocate = allocate
        self.packing = packing or Packing(library)
        self._weights = NativeWeights(config, weights, cache, self.packing, keys, group)
        if rounds_scores:
            self._weights.add_pairs(weights)
        self._rounds_scores = rounds_scores
        self._model = self._weights.exact
        self._grouped = self._weights.grouped
        # whether all layers of a group compute attention from the input of the group's first layer,
        # which is faster but not exact
        self.is_grouped = False
        self._scratch_floats = int(
            library.atts_scratch_floats(config.head_dim, config.context_length)
        )
        self._row_block = int(library.atts_row_block())
        self._scratch = np.empty(threads * self._scratch_floats, dtype=np.float32)
        self._sample_scratch = np.empty(config.vocabulary // 4 + 1, dtype=np.float32)
        self._next_items = np.zeros(len(cache), dtype=np.int32)
        self._capacity = 0
        # batch and slot table to whose arrays `_step` already points, so that they need not be
        # filled in again
        self._filled: tuple[StepBatch | None, SlotIds | None] = (None, None)
        self._buffers: dict[str, _Floats] = {}
        # buffer for the logits of the rows that are scored together
        self._logits = np.empty((0, config.vocabulary), dtype=np.float32)
        self._step = _Step(
            threads=threads,
            scratch=self._scratch.ctypes.data,
            scratch_floats=self._scratch_floats,
            next_items=self._next_items.ctypes.data,
            last_unit=2 * config.num_layers + 2,
        )

    @property
    def config(self) -> ModelConfig:
        """Return the model's configuration."""
        return self._config

    @property
    def device_name(self) -> str:
        """Describe the kernels and the number of threads."""
        halves = ", bf16 weights" * self._weights.is_bf16
        halves += ", scores in bf16" * self._rounds_scores
        return f"native, {self._threads} thread{'s' if self._threads > 1 else ''}{halves}"

    @property
    def is_thread_independent(self) -> bool:
        """Return True, because one thread computes each sum, always in the same order."""
        return True

    def use_threads(self, threads: int) -> None:
        """Use `threads` threads from now on; this does not change any bit of the results."""
        if threads == self._threads:
            return
        self._threads = threads
        self._scratch = np.empty(threads * self._scratch_floats, dtype=np.float32)
        self._step.threads = threads
        self._step.scratch = self._scratch.ctypes.data

    def forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None = None) -> Tensor:
        """Run a step and return the final, normed hidden states of the batch's `logit_rows`,
        [logits, hidden_size].
        """
        hidden = np.empty((len(batch.logit_rows), self._config.hidden_size), dtype=np.float32)
        if tap is not None:
            return self._tapped(batch, table, hidden, tap)
        self._grow_buffers(len(batch.tokens))
        if batch is self._filled[0] and table is self._filled[1]:
            self._step.hidden = _address(hidden)
        else:
            _fill(self._step, batch, table, hidden)
            self._filled = batch, table
        model = self._grouped if self.is_grouped else self._model
        self._library.atts_forward(ctypes.byref(model), ctypes.byref(self._step))
        return torch.from_numpy(hidden)

    def prepare(
        self,
        batch: StepBatch,
        table: SlotIds,
        rows: tuple[_Floats, _Floats],
        adapted: Adapted = _UNADAPTED,
    ) -> _Step:
        """Prepare a step; `run` then computes it part by part.

        `rows` are two arrays: the hidden states of all tokens, and those of the batch's
        `logit_rows`. `run` changes both arrays in place, and completes the last layer only for the
        `logit_rows`. Rows in the segments of `adapted` also get the additions of their adapters.
        """
        self._grow_buffers(len(batch.tokens))
        step = _Step.from_buffer_copy(self._step)
        x, hidden = rows
        _fill(step, batch, table, hidden)
        low = _floats(self._row_block, adapted.rank)
        step.x = _address(x)
        step.low = _address(low)
        step.num_segments = len(adapted.segments)
        step.segments = ctypes.addressof(adapted.segments)
        step.keeps = batch, table, rows, adapted, low
        return step

    def run(self, step: _Step, parts: Ints) -> None:
        """Compute parts of a prepared step. A part is a range of the step's rows together with a
        range of a model's units; the rows are passed through these units. `parts` is [parts, 11],
        with the fields of `Part` in `model.h`.

        The units of a model are its embedding (unit 0), two halves of each layer, and its last
        norm.
        """
        self._library.atts_forward_parts(ctypes.byref(step), _address(parts), len(parts))

    @property
    def address(self) -> int:
        """Return the address of the C structure that describes the model to the kernels."""
        return ctypes.addressof(self._model)

    def _tapped(self, batch: StepBatch, table: SlotIds, hidden: _Floats, tap: LayerHook) -> Tensor:
        x = _floats(len(batch.tokens), hidden.shape[1])
        # `through` counts in units: the embedding is unit 0, and each layer has two units.
        middle = 1 + 2 * tap.layers
        last = self._step.last_unit
        self.through(batch, table, (x, hidden), (0, middle))
        tap.receive(torch.from_numpy(x[batch.logit_rows]))
        self.through(batch, table, (x, hidden), (middle, last))
        return torch.from_numpy(hidden)

    def through(
        self,
        batch: StepBatch,
        table: SlotIds,
        rows: tuple[_Floats, _Floats],
        units: tuple[int, int],
        adapted: Adapted = _UNADAPTED,
    ) -> None:
        """Compute the model's units from `units[0]` up to, but not including, `units[1]`, for all
        rows of a step. The arrays in `rows` change in place.
        """
        step = self.prepare(batch, table, rows, adapted)
        x, hidden = rows
        all_ = 0, len(x), 0, len(batch.table_rows), 0, len(hidden)
        self.run(step, np.array([(self.address, *units, 0, 0, *all_)]))

    def draw_ahead(
        self,
        ahead: AheadBatch,
        table: SlotIds,
        logits: Tensor | None = None,
        logprobs: _Floats | None = None,
    ) -> NDArray[np.int64]:
        """Sample several tokens for each sequence. Each token is fed to the model before the next
        one is sampled. Return the tokens, [turns, sequences].

        If `logits` is given, [turns, sequences, vocabulary], the logits for each token are written
        to it. If `logprobs` is given, [turns, sequences], the tokens' log-probabilities at
        temperature 1 without filters are written to it.
        """
        count = len(ahead.temperatures)
        vocabulary = self._config.vocabulary
        apart = 0 if logits is None else count * vocabulary
        hidden = np.empty((count, self._config.hidden_size), dtype=np.float32)
        logits = torch.empty(count, vocabulary) if logits is None else logits
        self._grow_buffers(len(ahead.first.tokens))
        self._filled = None, None
        _fill(self._step, ahead.first, table, hidden)
        following = _Step.from_buffer_copy(self._step)
        _fill(following, ahead.following, table, hidden)
        tokens = np.empty_like(ahead.uniforms, dtype=np.int64)
        sampling = self._drawing(
            logits, ahead.temperatures, ahead.uniforms, torch.from_numpy(tokens)
        )
        sampling.logprobs = None if logprobs is None else _address(logprobs)
        sampling.ends = None if ahead.ends is None else _address(ahead.ends)
        parts = [
            ctypes.byref(part)
            for part in (self._model, self._grouped, self._step, following, sampling)
        ]
        turns: int = self._library.atts_draw_ahead(
            *parts, len(tokens), _address(ahead.counts), apart
        )
        return tokens[:turns]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits for these hidden states, [rows, vocabulary] float32."""
        rows = len(hidden)
        logits = torch.empty(rows, self._config.vocabulary)
        model = ctypes.byref(self._model)
        self._library.atts_logits(model, hidden.data_ptr(), rows, logits.data_ptr(), self._threads)
        return logits

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Return the log-probability of one token per row, and the logits of `kept_rows`. The rows
        are computed in blocks, to save memory.
        """
        vocabulary = self._config.vocabulary
        block = min(len(tokens), self._row_block)
        if len(self._logits) < block:
            self._logits = self._allocate(block, vocabulary)
        targets = np.array(tokens, dtype=np.int64)
        rows = np.array(kept_rows, dtype=np.int64)
        logprobs = np.empty(len(tokens), dtype=np.float32)
        kept = torch.empty(len(kept_rows), vocabulary)
        scoring = _Scoring(
            model=ctypes.addressof(self._model),
            num_rows=len(tokens),
            num_kept=len(kept_rows),
            hidden=hidden.data_ptr(),
            tokens=_address(targets),
            kept_rows=_address(rows),
            logprobs=_address(logprobs),
            kept_logits=kept.data_ptr(),
            logits=_address(self._logits),
            pairs=self._step.pairs,
        )
        self._library.atts_score(ctypes.byref(scoring), self._threads)
        values: list[float] = logprobs.tolist()
        return values, kept

    def sample(
        self, logits: Tensor, sampling: SamplingBatch, uniforms: list[float]
    ) -> SampledTokens:
        """Sample one token per row: with torch for rows that use top-k, top-p or min-p, and with
        the kernels for other rows. A row's token does not depend on the other rows.
        """
        numbers = np.array(uniforms, dtype=np.float64)
        filtered = filtered_rows(sampling, logits.shape[-1])
        if filtered is None:
            return self._sample(logits, sampling.temperature, numbers)
        theirs = filtered.nonzero().squeeze(-1)
        ours = (~filtered).nonzero().squeeze(-1)
        drawn = sample(
            logits[theirs], spread_rows(sampling, theirs), torch.from_numpy(numbers)[theirs]
        )
        if not len(ours):
            return drawn
        rest = self._sample(logits[ours], sampling.temperature[ours], numbers[ours.numpy()])
        order = torch.cat([theirs, ours]).argsort()
        return SampledTokens(
            torch.cat([drawn.tokens, rest.tokens])[order],
            torch.cat([drawn.logprobs, rest.logprobs])[order],
        )

    def _sample(
        self, logits: Tensor, temperatures: Tensor, numbers: NDArray[np.float64]
    ) -> SampledTokens:
        """Sample one token per row with the kernels, without top-k, top-p or min-p."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        drawing = self._drawing(logits, temperatures, numbers, tokens)
        drawing.logprobs = logprobs.data_ptr()
        self._library.atts_sample(ctypes.byref(drawing))
        return SampledTokens(tokens, logprobs)

    def _drawing(
        self, logits: Tensor, temperatures: Tensor, uniforms: NDArray[np.float64], tokens: Tensor
    ) -> _Sampling:
        """Return the C structure with the arguments of a sampling call. The kernels write the
        sampled tokens to `tokens`.
        """
        return _Sampling(
            num_rows=len(temperatures),
            vocabulary=logits.shape[-1],
            logits=logits.data_ptr(),
            temperatures=temperatures.data_ptr(),
            uniforms=_address(uniforms),
            tokens=tokens.data_ptr(),
            scratch=_address(self._sample_scratch),
        )

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Return the log-probability of each row's token at temperature 1 without filters."""
        rows, vocabulary = logits.shape
        targets = np.array(tokens, dtype=np.int64)
        logprobs = np.empty(rows, dtype=np.float32)
        self._library.atts_logprobs(
            logits.data_ptr(), rows, vocabulary, _address(targets), _address(logprobs)
        )
        values: list[float] = logprobs.tolist()
        return values

    def _grow_buffers(self, tokens: int) -> None:
        """Make the buffers large enough for a step with this many tokens. Buffers never shrink."""
        if tokens <= self._capacity:
            return
        config = self._config
        most = self._weights.most_attentions
        across = most * config.num_heads * config.head_dim
        widths = {
            "x": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": across + 2 * most * config.num_kv_heads * config.head_dim,
            "attended": across,
            "gate_up": 2 * config.intermediate_size,
        }
        capacity = max(tokens, self._capacity + self._capacity // 4)
        if self._rounds_scores:
            widths["pairs"] = max(config.hidden_size, across, config.intermediate_size) // 2
        block = min(capacity, self._row_block)
        rows = {"normed": block, "gate_up": block, "pairs": block}
        # Free the old buffers before the new ones are allocated, to limit the peak of memory.
        self._buffers = {}
        self._capacity = 0
        self._buffers = {
            name: self._allocate(rows.get(name, capacity), width) for name, width in widths.items()
        }
        for name, buffer in self._buffers.items():
            setattr(self._step, name, buffer.ctypes.data)
        self._capacity = capacity


def unknown_parts(config: ModelConfig) -> str:
    """List the features of a model that the kernels do not support, separated by commas. Return an
    empty string if all are supported.
    """
    parts = {
        "soft caps on attention scores or logits": config.attention_cap or config.logit_cap,
        "gelu gates": config.rules.is_gemma,
        "norms after a block": config.rules.norms[1],
        "norms over all heads": config.rules.head_norms == "all heads",
    }
    return ", ".join(part for part, is_there in parts.items() if is_there)
