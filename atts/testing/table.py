"""An engine whose whole law is a small table, so that the law of a pipeline's output can be computed exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import anyio.lowlevel

from atts.core import Completion, Ending, Message, Role, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import EngineSpec, EngineStats, check_sample, check_score
from atts.errors import OptionError
from atts.seeds import uniforms

Table = Mapping[str, Sequence[float]]
"""Last token to the probabilities of the next: a Markov chain of order one. The last column ends the text."""


RAW = Sampling()


class LetterTokenizer:
    """One token per character; the last id is the end and reads as nothing."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.digest = f"letters-{letters}"

    def encode(self, text: str) -> TokenIds:
        """Ids of the letters; a character outside the alphabet is an error of the test."""
        return tuple(self.letters.index(letter) for letter in text)

    def decode(self, ids: Sequence[int]) -> str:
        """Letters of the ids, the end left out."""
        return "".join(self.letters[index] for index in ids if index < len(self.letters))

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """The first letter, whatever was said: every text starts in the same state."""
        return (0,)


class TableEngine:
    """A Markov chain over letters as an engine.

    >>> engine = TableEngine({"a": [0.5, 0.3, 0.2], "b": [0.9, 0.0, 0.1]})
    >>> round(engine.probability("ab"), 3)  # after the prompt "a": a, then b, then anything
    0.15
    """

    def __init__(self, table: Table, role: Role = "draft", context_length: int = 256) -> None:
        letters = "".join(table)
        for row in table.values():
            if len(row) != len(letters) + 1 or not math.isclose(sum(row), 1.0):
                raise OptionError("table", f"row {list(row)} is not a law over {letters!r} and the end")
        self.table = {letter: tuple(row) for letter, row in table.items()}
        self._tokenizer = LetterTokenizer(letters)
        self._counts = [0, 0, 0]
        self._spec = EngineSpec(
            name=role,
            model=f"table-{role}",
            tokenizer=self._tokenizer.digest,
            context_length=context_length,
            end_ids=(len(letters),),
            vocabulary=len(letters) + 1,
            engine="table",
        )

    @property
    def spec(self) -> EngineSpec:
        """Known from the start."""
        return self._spec

    @property
    def tokenizer(self) -> LetterTokenizer:
        """One token per letter."""
        return self._tokenizer

    def probability(self, text: str, sampling: Sampling = RAW, start: str = "") -> float:
        """The exact probability that a text after `start` (default: the prompt) begins with `text`; "." is the end."""
        last, product = start or self._tokenizer.letters[0], 1.0
        for letter in text:
            index = len(self._tokenizer.letters) if letter == "." else self._tokenizer.letters.index(letter)
            product *= self.law(last, sampling)[index]
            last = letter
        return product

    def law(self, last: str, sampling: Sampling = RAW) -> tuple[float, ...]:
        """The next token's law after this letter; temperature only."""
        powered = [p ** (1 / sampling.temperature) for p in self.table[last]]
        return tuple(p / sum(powered) for p in powered)

    async def sample(self, request: SampleRequest) -> Completion:
        """Walk the chain; see `atts.engine.Engine`."""
        check_sample(request, self._spec)
        await anyio.lowlevel.checkpoint()
        draws = uniforms(request.seed, request.max_tokens)
        last, ids, logprobs = self._tokenizer.letters[request.ids[-1]], list[int](), list[float]()
        ended: Ending = "length"
        for draw in draws:
            index = _pick(self.law(last, request.sampling), float(draw))
            ids.append(index)
            logprobs.append(math.log(self.table[last][index]))
            if index in self._spec.end_ids:
                ended = "end"
                break
            last = self._tokenizer.letters[index]
            if any(self._tokenizer.decode(ids).endswith(stop) for stop in request.stop):
                ended = "delimiter"
                break
        self._counts[0] += 1
        self._counts[1] += len(ids)
        return Completion(tuple(ids), self._tokenizer.decode(ids), ended, tuple(logprobs))

    async def score(self, request: ScoreRequest) -> Scores:
        """Look the suffix up; see `atts.engine.Engine`."""
        check_score(request, self._spec)
        await anyio.lowlevel.checkpoint()
        self._counts[0] += 1
        self._counts[2] += len(request.suffix)
        places = zip((request.prefix[-1], *request.suffix[:-1]), request.suffix, strict=True)
        letters = self._tokenizer.letters
        chances = [self.table[letters[last]][index] for last, index in places]
        return Scores(tuple(math.log(p) if p > 0 else -math.inf for p in chances))

    def stats(self) -> EngineStats:
        """Counters so far."""
        return EngineStats(requests=self._counts[0], sampled_tokens=self._counts[1], scored_tokens=self._counts[2])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return None


def _pick(law: Sequence[float], draw: float) -> int:
    total = 0.0
    for index, p in enumerate(law):
        total += p
        if draw < total:
            return index
    return max(index for index, p in enumerate(law) if p > 0)
