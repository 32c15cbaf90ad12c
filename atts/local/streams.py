"""Streaming heads on a drafter: from one pass several tokens, of which the next pass keeps those it
draws itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atts.local.loader import Weights, read_trained, unusable_heads
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
    def read(
        cls, folder: Path, config: ModelConfig, weights: Weights, name: str
    ) -> StreamHeads | None:
        """Those that were trained for the model in this folder; None where there are none.

        :raises ModelLoadError: their file is damaged, or of another model.
        """
        file = folder / STREAM_FILE
        if not file.is_file():
            return None
        _, parts = read_trained(file, weights, name)
        width = config.hidden_size
        found = list[StreamHead]()
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
            found.append(StreamHead(down, up))
        return cls(weights.embedding, found)

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States that the output matrix reads what follows `tokens` [rows, 1 or more] from, shaped
        as `hidden`.
        """
        (down, up) = self.streams[tokens.shape[1] - 1]
        width = self.embedding.shape[1]
        known = F.rms_norm(self.embedding[tokens], (width,)).flatten(1)
        added = F.linear(F.silu(F.linear(torch.cat([hidden, known], 1), down)), up)
        return hidden + added
