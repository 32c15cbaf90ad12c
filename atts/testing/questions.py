"""The toy language's problems: chains of sums whose right answer is known at every step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from atts.core import Problem
from atts.sampling import Seed, generator

_STATEMENT = re.compile(r"Start at (\d{1,2})\.((?: [+-]\d{1,2},?)+)")
_OPERATION = re.compile(r"[+-]\d{1,2}")
_BOX = re.compile(r"\\boxed\{(\d+)\}")
MOODS = 8  # how finely the traits of a question are told apart


@dataclass(frozen=True)
class Question:
    """A chain of sums as a model reads it, with the traits that make some questions harder than
    others.

    `mood` is how loosely its solutions are phrased, `hardness` how often steps go wrong; both are
    levels below `MOODS`, a function of the text alone, and the same for every model.
    """

    text: str
    start: int
    operations: tuple[int, ...]

    @cached_property
    def truth(self) -> tuple[int, ...]:
        """The right value before the first step and after each one."""
        values = [self.start]
        for operation in self.operations:
            values.append((values[-1] + operation) % 100)
        return tuple(values)

    @cached_property
    def _noise(self) -> bytes:
        return blake2b(self.text.encode(), digest_size=16).digest()

    @cached_property
    def hardness(self) -> int:
        """Longer chains are harder, and some are hard for no visible reason."""
        return min(MOODS - 1, (len(self.operations) + self._noise[0] % 4) // 2)

    @cached_property
    def mood(self) -> int:
        """Goes with hardness, loosely."""
        return (self.hardness + self._noise[1] % MOODS * 3) // 4

    def misconception(self, step: int) -> int:
        """By how much people usually get this step wrong."""
        return (1, -1, 10, -10, 2, -2)[self._noise[step % 16] % 6]


def read_question(text: str) -> Question:
    """The last toy problem stated in `text`; any other text is a question of its own, with a chain
    made from its hash.

    >>> read_question("Please solve: Start at 4. +3, -2. What is the result?").truth
    (4, 7, 5)
    """
    found = None
    for match in _STATEMENT.finditer(text):
        found = match
    if found is not None:
        operations = tuple(int(operation) for operation in _OPERATION.findall(found.group(2)))
        return Question(found.group(), int(found.group(1)), operations)
    noise = blake2b(text.encode(), digest_size=8).digest()
    return Question(
        text, noise[0] % 100, tuple(1 + value % 9 for value in noise[1 : 3 + noise[7] % 4])
    )


def toy_problems(count: int, seed: int = 0) -> tuple[Problem, ...]:
    """Seeded chain-of-sums problems with their right answers, all different; levels 1 to 5 by the
    length of the chain.

    >>> toy_problems(1)[0].answer.isdigit()
    True
    """
    draws = generator(Seed(run=seed, purpose="toy problems"))
    statements: dict[str, Problem] = {}
    while len(statements) < count:
        level = int(draws.integers(1, 6))
        text, answer = _statement(draws, length=level * 2 + int(draws.integers(0, 2)))
        name = f"toy-{seed}-{len(statements)}"
        statements.setdefault(
            text, Problem(name, text, answer, level=level, subject="sums", source="atts.testing")
        )
    return tuple(statements.values())


def toy_answer(text: str) -> str | None:
    """What a solution in the toy language says: the number in its last box.

    >>> toy_answer("So it is \\\\boxed{4}. No: \\\\boxed{5}")
    '5'
    """
    found = _BOX.findall(text)
    return found[-1] if found else None


def toy_groups(answers: Sequence[str]) -> list[int]:
    """A group for each toy answer: equal where their texts are.

    >>> toy_groups(["5", "7", "5"])
    [0, 1, 0]
    """
    seen: dict[str, int] = {}
    return [seen.setdefault(answer, len(seen)) for answer in answers]


def _statement(draws: np.random.Generator, *, length: int) -> tuple[str, str]:
    start = value = int(draws.integers(0, 100))
    operations: list[str] = []
    for _ in range(length):
        amount = int(draws.integers(1, 20))
        rising = value + amount < 100 and (value - amount < 0 or draws.random() < 0.5)
        value += amount if rising else -amount
        operations.append(f"{'+' if rising else '-'}{amount}")
    return f"Start at {start}. {', '.join(operations)}. What is the result?", str(value)
