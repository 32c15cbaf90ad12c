"""The forward pass in C kernels, for float32 on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.local.batch import Ints, StepBatch
from atts.local.cache import SlotIds
from atts.local.cpu.weights import INT, POINTER, NativeWeights, Packing, members
from atts.local.loader import Weights
from atts.local.logit_sampling import (
    SampledTokens,
    SamplingBatch,
    filtered_rows,
    sample,
    spread_rows,
)
from atts.local.model_config import ModelConfig
from atts.local.seams import LayerHook

_Floats = NDArray[np.float32]
Allocate = Callable[[int, int], _Floats]
_ARRAYS = tuple(
    field.name
    for field in fields(StepBatch)
    if field.name not in ("num_single", "num_scored", "chains", "units")
)


def _address(array: NDArray[Any]) -> int:
    """Return the same as `array.ctypes.data` in half the time, because a small step calls it a
    dozen times.
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
    """A range of a step's rows, and of its logit rows, to which one adapter adds its terms."""

    _fields_ = [*members("first_row last_row first_logit last_logit", INT), ("deltas", POINTER)]


class Adapted(NamedTuple):
    """The segments of a step that have an adapter, and the largest rank of these adapters."""

    segments: ctypes.Array[Segment]
    rank: int


_UNADAPTED = Adapted((Segment * 0)(), 0)


class _Step(ctypes.Structure):
    keeps: object  # owner of the memory that the pointers refer to

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
    """Sequences that draw several tokens each, from distributions without truncation. Sequences
    that draw the most tokens come first.
    """

    # tokens that were not fed yet; the first draw follows the last token of each sequence
    first: StepBatch
    # one row per sequence, which feeds the token drawn last; its position is increased in place
    following: StepBatch
    counts: NDArray[np.int64]  # [turns] number of sequences that draw in each turn
    temperatures: Tensor  # [sequences] float64
    uniforms: NDArray[np.float64]  # [turns, sequences]
    # [vocabulary] mask of tokens after which no further turn follows
    ends: NDArray[np.uint8] | None = None


class NativeModel:
    """A model that runs its steps with the C kernels, in float32 on a CPU. It has the cache layout
    of the torch model.

    Weights whose values are bfloat16 numbers are kept in that type: half the memory is read, and
    nothing is lost.
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
        """Create the model. `allocate` makes the buffers of a step, and may raise MemoryError. For
        `group`, see `is_grouped`.

        With `rounds_scores`, rows that are scored are rounded to bfloat16 before products; the
        processor must support this.

        Models that share a `packing` store equal parts once. Parts are the embedding, the halves of
        each layer and the head; `keys` name their contents.
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
        # whether the attentions of a group read the same input, which is not exact
        self.is_grouped = False
        self._scratch_floats = int(
            library.atts_scratch_floats(config.head_dim, config.context_length)
        )
        self._row_block = int(library.atts_row_block())
        self._scratch = np.empty(threads * self._scratch_floats, dtype=np.float32)
        self._sample_scratch = np.empty(config.vocabulary // 4 + 1, dtype=np.float32)
        self._next_items = np.zeros(len(cache), dtype=np.int32)
        self._capacity = 0
        # batch and slot table whose addresses the step contains
        self._filled: tuple[StepBatch | None, SlotIds | None] = (
            None,
            None,
        )
        self._buffers: dict[str, _Floats] = {}
        # logits of a block of scored rows
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
        """Return the model's shape."""
        return self._config

    @property
    def device_name(self) -> str:
        """Describe the kernels that compute."""
        halves = ", bf16 weights" * self._weights.is_bf16
        halves += ", scores in bf16" * self._rounds_scores
        return f"native, {self._threads} thread{'s' if self._threads > 1 else ''}{halves}"

    def use_threads(self, threads: int) -> None:
        """Compute with `threads` threads from now on; the results stay the same to the bit."""
        self._threads = threads
        self._scratch = np.empty(threads * self._scratch_floats, dtype=np.float32)
        self._step.threads = threads
        self._step.scratch = self._scratch.ctypes.data

    def forward(self, batch: StepBatch, table: SlotIds, tap: LayerHook | None = None) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`: [logits,
        hidden_size].
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
        """Prepare a step that `run` computes in parts.

        `rows` holds the states of all tokens and the states of the `logit_rows`; the last layer
        ends with the latter alone. Both arrays are changed in place. Rows in the segments of
        `adapted` get the terms of their adapters.
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
        """Compute parts of a prepared step: each takes rows through some units of a model. `parts`
        is [parts, 11], with the fields of `Part` in `model.h`.

        The units of a model are its embedding (unit 0), two halves of each layer, and its last
        norm.
        """
        self._library.atts_forward_parts(ctypes.byref(step), _address(parts), len(parts))

    @property
    def address(self) -> int:
        """Return the address of the structure that the kernels read."""
        return ctypes.addressof(self._model)

    def _tapped(self, batch: StepBatch, table: SlotIds, hidden: _Floats, tap: LayerHook) -> Tensor:
        x = _floats(len(batch.tokens), hidden.shape[1])
        middle = 1 + 2 * tap.layers  # the embedding is unit 0, and each layer has two
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
        """Take all rows of a step, and its `logit_rows`, through some units."""
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
        """Draw tokens, [turns, sequences]. Each drawn token is fed to draw the next one.

        If `logits` is given, [turns, sequences, vocabulary], it receives the logits of each draw.
        If `logprobs` is given, [turns, sequences], it receives the log-probability of each token
        under the raw distribution.
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
        """Return the logits of these hidden states: [logits, vocabulary] float32."""
        rows = len(hidden)
        logits = torch.empty(rows, self._config.vocabulary)
        model = ctypes.byref(self._model)
        self._library.atts_logits(model, hidden.data_ptr(), rows, logits.data_ptr(), self._threads)
        return logits

    def score(
        self, hidden: Tensor, tokens: list[int], kept_rows: list[int]
    ) -> tuple[list[float], Tensor]:
        """Score one token per row, one block of rows at a time; return also the logits of some
        rows.
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
        """Draw one token per row. Rows that filter tokens are left to torch, and a row's result
        does not depend on the other rows.
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
        """Draw one token per row from a distribution without truncation."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        drawing = self._drawing(logits, temperatures, numbers, tokens)
        drawing.logprobs = logprobs.data_ptr()
        self._library.atts_sample(ctypes.byref(drawing))
        return SampledTokens(tokens, logprobs)

    def _drawing(
        self, logits: Tensor, temperatures: Tensor, uniforms: NDArray[np.float64], tokens: Tensor
    ) -> _Sampling:
        """Describe draws for the kernels, which write the tokens to `tokens`."""
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
        """Score each row's token under the raw distribution."""
        rows, vocabulary = logits.shape
        targets = np.array(tokens, dtype=np.int64)
        logprobs = np.empty(rows, dtype=np.float32)
        self._library.atts_logprobs(
            logits.data_ptr(), rows, vocabulary, _address(targets), _address(logprobs)
        )
        values: list[float] = logprobs.tolist()
        return values

    def _grow_buffers(self, tokens: int) -> None:
        """Make buffers for a step with this number of tokens. Buffers grow and never shrink."""
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
        self._buffers = {}
        self._capacity = 0  # the old buffers are freed before the new ones are allocated
        self._buffers = {
            name: self._allocate(rows.get(name, capacity), width) for name, width in widths.items()
        }
        for name, buffer in self._buffers.items():
            setattr(self._step, name, buffer.ctypes.data)
        self._capacity = capacity


def unknown_parts(config: ModelConfig) -> str:
    """Describe the parts of such a model that the kernels do not support; return an empty text if
    they support all.
    """
    parts = {
        "soft limits of scores and logits": config.attention_cap or config.logit_cap,
        "gelu gates": config.rules.is_gemma,
        "norms after a block": config.rules.norms[1],
        "norms over all heads": config.rules.head_norms == "all heads",
    }
    return ", ".join(part for part, is_there in parts.items() if is_there)
