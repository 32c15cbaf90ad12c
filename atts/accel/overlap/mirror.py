"""Mirror-SD: guesses from the target's early exit for its drafter, and the drafter's streaming
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from atts.core import Sampling
from atts.local.batch import StepBatch
from atts.local.cache import SlotIds
from atts.local.loader import Weights, read_trained, unusable_heads
from atts.local.logit_sampling import batch_sampling, probabilities
from atts.local.model_config import ModelConfig
from atts.local.seams import HookedModel, LayerHook

EXIT_FILE = "heads/exit.safetensors"
"""File in a model's folder that `scripts/train heads` writes."""
# likeliest tokens of a position: eight, and one more in case the proposed token is among them
_TOLD = 9
ExitGuesses = Mapping[int, Many[tuple[Many[int], Many[float]]]]
"""For each sequence and each of its positions in order: likely tokens and their probabilities."""


class ExitListener(NamedTuple):
    """A listener for exit guesses, and the sequences whose guesses it receives in a step."""

    # keyed by row of the slot table: the sequence and its sampling options
    rows: Mapping[int, tuple[int, Sampling]]
    receive: Callable[[ExitGuesses | Exception], None]


class Exits(Protocol):
    """A source of exit guesses."""

    def listen(self, listener: ExitListener | None) -> None:
        """Report the next step's exit guesses to the listener, once."""
        ...


@dataclass(frozen=True, slots=True)
class ExitAdapter:
    """A low-rank matrix that is added to the rows after `layers` layers, so that the model's output
    matrix can read them.
    """

    layers: int
    norm: Tensor  # [hidden_size] the scale of the last norm
    down: Tensor  # [rank, hidden_size]
    up: Tensor  # [hidden_size, rank]

    @classmethod
    def untrained(cls, config: ModelConfig, weights: Weights) -> ExitAdapter:
        """Return an untrained exit half-way down the layers: the model's own norm, and no added
        matrix.
        """
        none = weights.norm.new_zeros(config.hidden_size, 1)
        return cls(max(1, config.num_layers // 2), weights.norm, none.T, none)

    @classmethod
    def read(cls, folder: Path, config: ModelConfig, weights: Weights, name: str) -> ExitAdapter:
        """Read the exit trained for the model in this folder; return an untrained exit if there is
        none.

        :raises ModelLoadError: the exit's file is damaged or belongs to another model.
        """
        file = folder / EXIT_FILE
        if not file.is_file():
            return cls.untrained(config, weights)
        told, parts = read_trained(file, weights, name)
        try:
            layers = int(told["layers"])
            norm = parts["norm"]
            down = parts["down"]
            up = parts["up"]
        except (KeyError, ValueError) as error:
            raise unusable_heads(
                name, file, f"cannot be read ({type(error).__name__}: {error})"
            ) from error
        rank = len(down)
        width = config.hidden_size
        shapes = [tuple(part.shape) for part in (norm, down, up)]
        if shapes != [(width,), (rank, width), (width, rank)] or not 0 < layers < config.num_layers:
            raise unusable_heads(name, file, "has shapes that do not fit this model")
        return cls(layers, norm, down, up)

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """Return rows in the form that the output matrix takes: [rows, hidden_size]."""
        narrow = F.silu(F.linear(F.rms_norm(x, (x.shape[-1],), None, eps), self.down))
        return F.rms_norm(x + F.linear(narrow, self.up), (x.shape[-1],), self.norm, eps)


class ExitModel:
    """A target that reports the guesses of its exit half-way through a step. Its results are the
    same as without the exit.
    """

    def __init__(self, model: HookedModel, adapter: ExitAdapter, eps: float) -> None:
        self._model = model
        self._adapter = adapter
        self._eps = eps
        self._listener: ExitListener | None = None
        # all methods except forward are the model's own
        self.is_thread_independent = model.is_thread_independent
        self.use_threads = model.use_threads
        self.compute_logits = model.compute_logits
        self.sample = model.sample
        self.logprobs = model.logprobs
        self.score = model.score

    def listen(self, listener: ExitListener | None) -> None:
        """Report guesses of the next step once: for each sequence's newest token and the tokens
        proposed after it.
        """
        self._listener = listener

    @property
    def device_name(self) -> str:
        """Name the device and the exit layer."""
        return f"{self._model.device_name}, exit after {self._adapter.layers} layers"

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`."""
        listener = self._listener
        self._listener = None
        if listener is None:
            return self._model.forward(batch, table)
        return self._model.forward(
            batch, table, LayerHook(self._adapter.layers, lambda x: self._tell(listener, batch, x))
        )

    def _tell(self, listener: ExitListener, batch: StepBatch, x: Tensor) -> None:
        try:
            told: ExitGuesses | Exception = self._heard(listener, batch, x)
        except Exception as error:  # noqa: BLE001  the listener reports it; the step continues
            told = error
        listener.receive(told)

    @torch.inference_mode()
    def _heard(self, listener: ExitListener, batch: StepBatch, x: Tensor) -> ExitGuesses:
        rows = np.repeat(batch.table_rows, np.diff(batch.query_starts))[batch.logit_rows].tolist()
        heard_rows = [
            (at, *listener.rows[row]) for at, row in enumerate(rows) if row in listener.rows
        ]
        guesses: dict[int, list[tuple[list[int], list[float]]]] = {
            key: [] for _, key, _ in heard_rows
        }
        if heard_rows:
            adapted = self._adapter(x[[at for at, _, _ in heard_rows]], self._eps)
            logits = self._model.compute_logits(adapted.contiguous())
            settings = batch_sampling(
                [sampling for _, _, sampling in heard_rows], logits.shape[-1], logits.device
            )
            best = probabilities(logits, settings).topk(min(_TOLD, logits.shape[-1]), -1)
            for (_, key, _), ids, chances in zip(
                heard_rows, best.indices.tolist(), best.values.tolist(), strict=True
            ):
                guesses[key].append((ids, chances))
        return guesses


STREAM_FILE = "heads/streams.safetensors"
"""File in a drafter's folder that `scripts/train heads` writes."""


class StreamHead(NamedTuple):
    """One head: it changes a hidden state so that the output matrix predicts a later token from it."""

    down: Tensor  # [width, hidden_size * (1 + tokens between)]
    up: Tensor  # [hidden_size, width]


@dataclass(frozen=True, slots=True)
class StreamHeads:
    """Heads that predict the tokens after a hidden state h. Head j receives the j + 1 tokens drawn
    after h.
    """

    embedding: Tensor
    streams: Many[StreamHead]

    @classmethod
    def read(
        cls, folder: Path, config: ModelConfig, weights: Weights, name: str
    ) -> StreamHeads | None:
        """Read the heads that were trained for the model in this folder; None if there are none.

        :raises ModelLoadError: the heads' file is damaged or belongs to another model.
        """
        file = folder / STREAM_FILE
        if not file.is_file():
            return None
        _, parts = read_trained(file, weights, name)
        width = config.hidden_size
        heads = list[StreamHead]()
        for at in range(len(parts) // 2):
            down = parts.get(f"down.{at}")
            up = parts.get(f"up.{at}")
            if (
                down is None
                or up is None
                or down.shape != (up.shape[1], width * (2 + at))
                or len(up) != width
            ):
                raise unusable_heads(name, file, "has shapes that do not fit this model")
            heads.append(StreamHead(down, up))
        return cls(weights.embedding, heads)

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the states from which the output matrix predicts the token after `tokens` [rows, 1
        or more]; they are shaped as `hidden`.
        """
        down, up = self.streams[tokens.shape[1] - 1]
        width = self.embedding.shape[1]
        known = F.rms_norm(self.embedding[tokens], (width,)).flatten(1)
        added = F.linear(F.silu(F.linear(torch.cat([hidden, known], 1), down)), up)
        return hidden + added
