"""What one number is made of a chunk's log-probabilities: every choice declares its domain and direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from atts.core import Chunk
from atts.errors import OptionError

ScoreKind = Literal["mean", "min", "last", "byte"]
SCORE_KINDS: tuple[ScoreKind, ...] = ("mean", "min", "last", "byte")


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How to turn log-probabilities into a perplexity-like number in [1, inf]; higher is worse.

    mean: the chunk's perplexity. min: of its least likely token. last: of its last `tokens` tokens.
    byte: per byte of text, comparable across tokenizers.
    """

    kind: ScoreKind = "mean"
    tokens: int = 8  # for "last"

    def __post_init__(self) -> None:
        if self.kind not in SCORE_KINDS:
            raise OptionError("score", f"unknown kind {self.kind!r}", SCORE_KINDS, self.kind)
        if self.tokens < 1:
            raise OptionError("score tokens", f"{self.tokens} is below 1")

    def __call__(self, logprobs: Sequence[float], text: str) -> float:
        """The number; nan when a log-probability is, so that no gate can take it for a score."""
        assert logprobs, "an engine must refuse to score nothing"
        if self.kind == "min":
            nll = -min(logprobs) if not any(map(math.isnan, logprobs)) else math.nan
        elif self.kind == "last":
            tail = logprobs[-self.tokens :]
            nll = -math.fsum(tail) / len(tail)
        elif self.kind == "byte":
            nll = -math.fsum(logprobs) / max(1, len(text.encode()))
        else:
            nll = -math.fsum(logprobs) / len(logprobs)
        if math.isnan(nll):
            return math.nan
        return math.exp(nll) if nll < 700 else math.inf


def evidence(rule: Callable[[Sequence[float], str], float], chunk: Chunk) -> float:
    """The author's own log-probabilities made one number by the same rule, its logarithm; 0 for an empty chunk.

    Not a number where they are not known: a text without them is no sign of sureness.
    """
    if not chunk.logprobs:
        return math.nan if chunk.tokens else 0.0
    own = rule(chunk.logprobs, chunk.text)
    return -math.log(own) if own < math.inf else -math.inf
