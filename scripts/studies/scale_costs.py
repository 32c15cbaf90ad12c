"""What a step of an engine costs, as a formula with four coefficients: fitted here, or published
for GPU engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step: `step` + `sequence` x batch + `cached` x KV tokens read + `prefilled` x
    tokens fed.

    `request` is what the step that takes a request in costs more (admission, cache, another batch);
    `call` what a request costs its host beside steps (hand-over, event loop, pipeline). `share` is
    by how much a step is stretched while the other engine is at work on the same processors; 1:
    they do not share any.
    """

    step: float
    sequence: float
    cached: float
    prefilled: float
    request: float = 0.0
    call: float = 0.0
    share: float = 1.0
    origin: str = ""

    def seconds(self, batch: int, cached: float, fed: float = 0.0) -> float:
        """One step that decodes `batch` sequences with `cached` tokens between them and feeds `fed`
        tokens.
        """
        return self.step + self.sequence * batch + self.cached * cached + self.prefilled * fed

    def steps(self, count: int, batch: int, cached: float) -> float:
        """`count` decoding steps in a row: every sequence grows by one token a step."""
        grown = cached * count + batch * count * (count - 1) / 2
        return count * (self.step + self.sequence * batch) + self.cached * grown

    def steps_within(self, seconds: float, batch: int, cached: float) -> int:
        """How many such steps have ended after that long."""
        linear = self.step + self.sequence * batch + self.cached * cached - self.cached * batch / 2
        square = self.cached * batch / 2
        if square <= 0:
            return int(seconds / linear + 1e-9)
        return int(
            (-linear + math.sqrt(linear * linear + 4 * square * seconds)) / (2 * square) + 1e-9
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one installation: costs, and how many KV tokens each has room for."""

    name: str
    draft: Cost
    target: Cost
    draft_kv: int
    target_kv: int


_MS = 1e-3
_OVERHEAD = 1.207 * _MS
"""Per step beside the model, of the same simulator the 8B row comes from."""

TARGET_70B = Cost(
    18.35 * _MS,
    0.0243 * _MS,
    6.24e-5 * _MS,
    0.0640 * _MS,
    origin="Llama 70B, 4 x H100, fitted in the TurboSpec fork",
)
DRAFT_8B = Cost(
    5.886 * _MS + _OVERHEAD,
    0.02101 * _MS,
    3.93e-5 * _MS,
    0.02101 * _MS,
    origin="Llama 8B, H100, SpecDecode-Bench",
)
DRAFT_1B = Cost(
    5.886 * _MS * 1.54 / 8.03 + _OVERHEAD,
    0.02101 * _MS * 1.54 / 8.03,
    3.93e-5 * _MS * 14336 / 65536,
    0.02101 * _MS * 1.54 / 8.03,
    origin="ours: the 8B row scaled by weights (1.54/8.03) and by KV bytes a token, step overhead "
    "kept",
)
# bytes left after weights / bytes a token (80 layers, 8 KV heads)
_ROOM_70B = int((4 * 80e9 * 0.9 - 141e9) / 327_680)
_ROOM_8B = int((80e9 * 0.9 - 16.1e9) / 131_072)
_ROOM_1B = int((80e9 * 0.9 - 3.1e9) / 28_672)

PAIRS: Mapping[str, Pair] = {
    "1.5B/70B": Pair("1.5B/70B", DRAFT_1B, TARGET_70B, _ROOM_1B, _ROOM_70B),
    "8B/70B": Pair("8B/70B", DRAFT_8B, TARGET_70B, _ROOM_8B, _ROOM_70B),
}
"""Each with one H100 for the draft and four for the target."""
