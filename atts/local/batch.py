"""One step's worth of work, as the scheduler hands it to a model: flat tokens of many sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atts.decode import Drawn, Laws

Ints = NDArray[np.int64]
Slots = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of this step, sequence after sequence; those that feed a single token come first.

    Every token's keys and values are written to its slot before any token of the same layer attends, so a sequence may
    read slots another one fills in the same step.
    """

    tokens: Ints  # [tokens]
    positions: Ints  # [tokens]
    slots: Ints  # [tokens] where each token's keys and values go
    rows: Ints  # [sequences] row of the slot table
    starts: Ints  # [sequences + 1] first token of each sequence
    lengths: Ints  # [sequences] positions known after this step
    tails: Ints  # [sequences] how many of each one's tokens are wanted: always its last ones
    num_single: int  # sequences at the front that feed exactly one token
    wanted: Ints  # [wanted] tokens whose hidden state the caller asks for


class Model(Protocol):
    """A decoder that writes its cache through a table of slots."""

    @property
    def device_name(self) -> str:
        """Where it computes."""
        ...

    def forward(self, batch: StepBatch, table: Slots) -> Tensor:
        """The final, normed hidden states of the wanted tokens: [wanted, width]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Their logits: [wanted, vocabulary] float32."""
        ...

    def draw(self, logits: Tensor, laws: Laws, uniforms: list[float]) -> Drawn:
        """One token a row, as `atts.decode.sample` draws it."""
        ...

    def logprobs(self, logits: Tensor, tokens: list[int]) -> list[float]:
        """Each row's token under the raw law, as `atts.decode.raw_logprobs` has it."""
        ...

    def score(self, hidden: Tensor, tokens: list[int], ends: list[int]) -> tuple[list[float], Tensor]:
        """The same from hidden states, never all logits at once; and the logits of the rows `ends`, which rise."""
        ...
