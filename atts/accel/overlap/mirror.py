"""Mirror-SD: the target's early exit guesses tokens for the drafter, and streaming heads draft
several tokens per pass.
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
from atts.errors import counted
from atts.local.batch import StepBatch
from atts.local.cache import SlotIds
from atts.local.loader import Weights, read_trained, unusable_heads
from atts.local.logit_sampling import batch_sampling, probabilities
from atts.local.model_config import ModelConfig
from atts.local.seams import HookedModel, LayerHook

EXIT_FILE = "heads/exit.safetensors"
"""Path, inside the target's folder, of the weights of the trained early exit. `scripts/train heads`
writes this file.
"""
# At each position, the early exit reports this number of likeliest tokens. The drafter needs eight,
# but one of the nine may be the proposed token.
_TOLD = 9
ExitGuesses = Mapping[int, Many[tuple[Many[int], Many[float]]]]
"""Guesses of the early exit, keyed by the sequence's number: for each position, the likeliest
tokens and their probabilities.
"""


class ExitListener(NamedTuple):
    """A request for the early exit's guesses in one step: a callback that receives the guesses, and
    the slot-table rows of the sequences for which the exit guesses.
    """

    # for each row of the slot table: the number of its sequence, and the sequence's sampling
    # options
    rows: Mapping[int, tuple[int, Sampling]]
    receive: Callable[[ExitGuesses | Exception], None]


class Exits(Protocol):
    """A target, or its stand-in, that reports the guesses of an early exit."""

    def listen(self, listener: ExitListener | None) -> None:
        """Make the next step send the early exit's guesses to the callback of `listener`.

        Later steps send nothing. None removes the listener.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExitAdapter:
    """A trained correction of the hidden states after the first `layers` layers.

    From corrected states, the model's output matrix can predict tokens.
    """

    layers: int
    norm: Tensor  # [hidden_size] weights of the norm before the output matrix
    down: Tensor  # [rank, hidden_size] first factor of the low-rank correction
    up: Tensor  # [hidden_size, rank] second factor of the low-rank correction

    @classmethod
    def untrained(cls, config: ModelConfig, weights: Weights) -> ExitAdapter:
        """Return an early exit after half of the layers, without a trained correction. It applies
        only the model's last norm.
        """
        none = weights.norm.new_zeros(config.hidden_size, 1)
        return cls(max(1, config.num_layers // 2), weights.norm, none.T, none)

    @classmethod
    def read(cls, folder: Path, config: ModelConfig, weights: Weights, name: str) -> ExitAdapter:
        """Read the exit that was trained for the model in this folder.

        If the folder has no exit, return an untrained exit.

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
        """Return corrected and normed hidden states: [rows, hidden_size].

        The output matrix predicts tokens from them.
        """
        narrow = F.silu(F.linear(F.rms_norm(x, (x.shape[-1],), None, eps), self.down))
        return F.rms_norm(x + F.linear(narrow, self.up), (x.shape[-1],), self.norm, eps)


class ExitModel:
    """A target with an early exit: a layer after which tokens are guessed, before the step ends.

    The target's results are the same as without the exit.
    """

    def __init__(self, model: HookedModel, adapter: ExitAdapter, eps: float) -> None:
        self._model = model
        self._adapter = adapter
        self._eps = eps
        self._listener: ExitListener | None = None
        # Only `forward` differs from the wrapped model. These methods are the wrapped model's own.
        self.is_thread_independent = model.is_thread_independent
        self.use_threads = model.use_threads
        self.compute_logits = model.compute_logits
        self.sample = model.sample
        self.logprobs = model.logprobs
        self.score = model.score

    def listen(self, listener: ExitListener | None) -> None:
        """Make the next step send the early exit's guesses to `listener`, which is then removed.

        The exit guesses the token after each sequence's newest token, and after each proposed
        token.
        """
        self._listener = listener

    @property
    def device_name(self) -> str:
        """Return the name of the device, and the number of layers before the early exit."""
        return f"{self._model.device_name}, exit after {counted(self._adapter.layers, 'layer')}"

    def forward(self, batch: StepBatch, table: SlotIds) -> Tensor:
        """Return the final, normed hidden states of the batch's `logit_rows`.

        If there is a listener, report the guesses of the early exit to it during this computation.
        """
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
"""Path, inside the draft model's folder, of the weights of the trained streaming heads.
`scripts/train heads` writes this file.
"""


class StreamHead(NamedTuple):
    """One streaming head: it changes a hidden state so that the output matrix predicts a later
    token.
    """

    # [width, hidden_size * (1 + number of tokens that the head receives)] first matrix of the head
    down: Tensor
    up: Tensor  # [hidden_size, width] second matrix of the head


@dataclass(frozen=True, slots=True)
class StreamHeads:
    """Streaming heads, which predict several tokens after a hidden state h.

    The first head receives h and the first token after it, and predicts the second token. The next
    head receives h and the first two tokens, and predicts the third token, and so on.
    """

    embedding: Tensor
    streams: Many[StreamHead]

    @classmethod
    def read(
        cls, folder: Path, config: ModelConfig, weights: Weights, name: str
    ) -> StreamHeads | None:
        """Read the streaming heads that were trained for the model in this folder; return None if
        the folder has none.

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
        """Return hidden states from which the output matrix predicts the token after `tokens`.
        `tokens` has shape [rows, 1 or more], and the result has the shape of `hidden`.
        """
        down, up = self.streams[tokens.shape[1] - 1]
        width = self.embedding.shape[1]
        known = F.rms_norm(self.embedding[tokens], (width,)).flatten(1)
        added = F.linear(F.silu(F.linear(torch.cat([hidden, known], 1), down)), up)
        return hidden + added
