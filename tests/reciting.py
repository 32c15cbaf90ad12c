"""A model that knows the answers of a benchmark, and writes them token by token with a fixed
accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from atts.core import (
    Completion,
    Ending,
    Problem,
    Role,
    SampleRequest,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import EngineSpec, EngineStats, check_sample, check_score
from atts.models import path
from atts.models.folders import find_tokenizer
from atts.models.tokenizers import ModelTokenizer, StopMatcher
from atts.sampling import uniforms

ASSISTANT = 2
END = 4  # token ids of the embedded models' tokenizer
SKILL: Mapping[Role, float] = {
    "draft": 0.985,
    "target": 0.9995,
}  # probability of the correct next token
TEXT = "Let us look at what is given.\n\nFrom this the value follows step by step.\n\nSo we have \\boxed{{{}}}."


class RecitingEngine:
    """An engine that writes one fixed solution for each problem, with each token correct with a
    fixed probability.

    The distribution of a token depends only on its position, not on whether earlier tokens were
    correct. Scores follow the same distribution.
    """

    def __init__(self, role: Role, problems: tuple[Problem, ...]) -> None:
        folder = find_tokenizer(str(path("draft")), role)
        self.tokenizer = ModelTokenizer(folder, role)
        self._texts = {it.text: self.tokenizer.encode(TEXT.format(it.answer)) for it in problems}
        self._right = SKILL[role]
        size = self.tokenizer.vocabulary
        self.spec = EngineSpec(
            role, f"reciting {role}", self.tokenizer.digest, 4096, (END,), size, "reciting 1.0"
        )

    def stats(self) -> EngineStats:
        """Return empty counters, because this engine counts nothing."""
        return EngineStats()

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample token by token from the distribution at each position."""
        check_sample(request, self.spec)
        await anyio.lowlevel.checkpoint()
        script, place = self._place(request.ids)
        stops = StopMatcher(request.stop)
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Ending = "length"
        for uniform in uniforms(request.seed, request.max_tokens).tolist():
            law = self._law(script, place + len(ids))
            token = _draw(law, request.sampling.temperature, uniform)
            ids.append(token)
            logprobs.append(math.log(law[token]))
            if token == END:
                ended = "end"
                break
            if stops.feed(self.tokenizer.pieces[token]) or token in request.stop_ids:
                ended = "delimiter"
                break
        return Completion(tuple(ids), self.tokenizer.decode(ids), ended, tuple(logprobs))

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the log-probability of each token at its position."""
        check_score(request, self.spec)
        await anyio.lowlevel.checkpoint()
        script, place = self._place(request.prefix)
        return Scores(
            tuple(
                math.log(self._law(script, place + i)[token])
                for i, token in enumerate(request.suffix)
            )
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        return None

    def _place(self, ids: TokenIds) -> tuple[TokenIds, int]:
        """Return the solution of the problem in this prompt, and the number of tokens written so
        far.
        """
        start = len(ids) - ids[::-1].index(ASSISTANT) if ASSISTANT in ids else 0
        asked = self.tokenizer.decode(ids[:start])
        known = next((text for problem, text in self._texts.items() if problem in asked), None)
        return known or self.tokenizer.encode("I do not know that one. " * 20), len(ids) - start

    def _law(self, script: TokenIds, place: int) -> NDArray[np.float64]:
        size = self.spec.vocabulary
        law = np.full(size, (1 - self._right) / (size - 1))
        law[script[place] if place < len(script) else END] = self._right
        return law


def _draw(law: NDArray[np.float64], temperature: float, uniform: float) -> int:
    if temperature == 0:
        return int(law.argmax())
    shaped = law ** (1 / temperature)
    return min(int(np.searchsorted(np.cumsum(shaped) / shaped.sum(), uniform)), law.size - 1)
