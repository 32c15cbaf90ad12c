"""Streaming heads on a drafter: from one pass several tokens, of which the next pass keeps those it draws itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atts.errors import ModelLoadError
from atts.local.loader import Weights
from atts.local.model_config import ModelConfig

STREAM_FILE = "heads/streams.safetensors"
"""Inside a drafter's folder: what `scripts/train heads` makes of it."""


class StreamHead(NamedTuple):
    """One head: what it adds to a state, so that the output matrix reads a later token from it."""

    down: Tensor  # [width, hidden_size * (1 + tokens between)]
    up: Tensor  # [hidden_size, width]


@dataclass(frozen=True, slots=True)
class StreamHeads:
    """Of a state h and the tokens drawn after it, what follows these: head j knows j + 1 tokens."""

    embedding: Tensor
    streams: Sequence[StreamHead]

    @classmethod
    def read(cls, folder: Path, config: ModelConfig, weights: Weights, name: str) -> StreamHeads | None:
        """Those that were trained for the model in this folder; None where there are none.

        :raises ModelLoadError: their file is damaged, or of another model.
        """
        file, found = folder / STREAM_FILE, list[StreamHead]()
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as handle:
                for at in range(len(handle.keys()) // 2):
                    parts = (handle.get_tensor(f"{part}.{at}").to(weights.norm) for part in ("down", "up"))
                    found.append(StreamHead(*parts))
        except (SafetensorError, OSError) as error:
            problem = f"{file} cannot be read ({type(error).__name__}: {error})"
            raise ModelLoadError(name, problem, "Remove it, or train it anew with scripts/train heads") from error
        width = config.hidden_size
        for at, (down, up) in enumerate(found):
            if down.shape != (up.shape[1], width * (2 + at)) or len(up) != width:
                problem = f"{file} was made for another model"
                raise ModelLoadError(name, problem, "Remove it, or train it anew with scripts/train heads")
        return cls(weights.embedding, found)

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States that the output matrix reads what follows `tokens` [rows, 1 or more] from, shaped as `hidden`.

        What a padded model has behind its own states stays as it is.
        """
        (down, up), width = self.streams[tokens.shape[1] - 1], self.embedding.shape[1]
        known = F.rms_norm(self.embedding[tokens], (width,)).flatten(1)
        added = F.linear(F.silu(F.linear(torch.cat([hidden[:, :width], known], 1), down)), up)
        return hidden + F.pad(added, (0, hidden.shape[1] - width))
