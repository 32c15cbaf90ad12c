"""Mirror-SD: what a target's early exit tells its drafter, and the drafter's streaming heads."""

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
"""Inside a model's folder: what `scripts/train heads` makes of it."""
_TOLD = 9  # likeliest tokens of a place: eight besides one that may be proposed there
ExitGuesses = Mapping[int, Many[tuple[Many[int], Many[float]]]]
"""By sequence: of its places in order, likely tokens and their probabilities."""


class ExitListener(NamedTuple):
    """A listener, and the rows of decoding sequences that it receives in a step."""

    # keyed by row of the slot table: the sequence, and how its tokens are drawn
    rows: Mapping[int, tuple[int, Sampling]]
    receive: Callable[[ExitGuesses | Exception], None]


class Exits(Protocol):
    """An exit that may be listened to."""

    def listen(self, listener: ExitListener | None) -> None:
        """Tell once, of the next step."""
        ...


@dataclass(frozen=True, slots=True)
class ExitAdapter:
    """A matrix added to rows after `layers` layers, so that the model's own output matrix can read
    them.
    """

    layers: int
    norm: Tensor  # [hidden_size] the scale of the last norm
    down: Tensor  # [rank, hidden_size]
    up: Tensor  # [hidden_size, rank]

    @classmethod
    def untrained(cls, config: ModelConfig, weights: Weights) -> ExitAdapter:
        """Return the model's own norm half-way down its layers, and nothing added."""
        none = weights.norm.new_zeros(config.hidden_size, 1)
        return cls(max(1, config.num_layers // 2), weights.norm, none.T, none)

    @classmethod
    def read(cls, folder: Path, config: ModelConfig, weights: Weights, name: str) -> ExitAdapter:
        """Read what was trained for the model in this folder; an untrained one where there is none.

        :raises ModelLoadError: its file is damaged, or of another model.
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
            raise unusable_heads(name, file, "was made for another model")
        return cls(layers, norm, down, up)

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """Return rows as the output matrix takes them: [rows, hidden_size]."""
        narrow = F.silu(F.linear(F.rms_norm(x, (x.shape[-1],), None, eps), self.down))
        return F.rms_norm(x + F.linear(narrow, self.up), (x.shape[-1],), self.norm, eps)


class ExitModel:
    """A target of which the next step can be heard on its way; every number is what it would be
    unheard.
    """

    def __init__(self, model: HookedModel, adapter: ExitAdapter, eps: float) -> None:
        self._model = model
        self._adapter = adapter
        self._eps = eps
        self._listener: ExitListener | None = None
        # all but the forward is the model's own
        self.use_threads = model.use_threads
        self.compute_logits = model.compute_logits
        self.sample = model.sample
        self.logprobs = model.logprobs
        self.score = model.score

    def listen(self, listener: ExitListener | None) -> None:
        """Tell once, of the next step: of a sequence's newest token and what is proposed to follow
        it.
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
"""Inside a drafter's folder: what `scripts/train heads` makes of it."""


class StreamHead(NamedTuple):
    """One head: what it adds to a state, so that the output matrix reads a later token from it."""

    down: Tensor  # [width, hidden_size * (1 + tokens between)]
    up: Tensor  # [hidden_size, width]


@dataclass(frozen=True, slots=True)
class StreamHeads:
    """Heads that predict what follows a state h and the tokens drawn after it; head j sees j + 1
    tokens.
    """

    embedding: Tensor
    streams: Many[StreamHead]

    @classmethod
    def read(
        cls, folder: Path, config: ModelConfig, weights: Weights, name: str
    ) -> StreamHeads | None:
        """Read the heads that were trained for the model in this folder; None where there are none.

        :raises ModelLoadError: their file is damaged, or of another model.
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
                raise unusable_heads(name, file, "was made for another model")
            heads.append(StreamHead(down, up))
        return cls(weights.embedding, heads)

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the states from which the output matrix predicts what follows `tokens` [rows, 1 or
        more]; they are shaped as `hidden`.
        """
        down, up = self.streams[tokens.shape[1] - 1]
        width = self.embedding.shape[1]
        known = F.rms_norm(self.embedding[tokens], (width,)).flatten(1)
        added = F.linear(F.silu(F.linear(torch.cat([hidden, known], 1), down)), up)
        return hidden + added
