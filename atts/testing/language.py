"""The toy language: its words, its tokenizer, its questions and its grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from importlib import resources
from typing import Literal

import msgspec
import msgspec.toml
import numpy as np

from atts.core import Message, Problem, TokenIds
from atts.errors import OptionError, UsageError
from atts.sampling import Seed, generator

Dialect = Literal["plain", "other"]


class Language(msgspec.Struct, frozen=True):
    """The words of the toy language, and its grammar."""

    specials: tuple[str, ...]
    fillers: tuple[str, ...]
    openers: dict[str, float]  # phrases, and how often each begins a step
    full_stops: dict[str, float]
    rare_slips: tuple[int, ...]
    words: dict[str, str]  # words, and the meaning of each in the grammar
    phases: dict[str, dict[str, str]]  # next phase, by phase and kind of word
    phrases: dict[str, dict[str, float]]  # phrases that may be said without thought, by phase


LANGUAGE = msgspec.toml.decode(
    resources.files("atts.testing").joinpath("language.toml").read_bytes(), type=Language
)
SPECIALS = LANGUAGE.specials
FILLERS = LANGUAGE.fillers
OPENERS = tuple(LANGUAGE.openers)
# a blank line may begin or end inside a token
MERGES = (
    ".\n",
    ".\n\n",
    *(f"\n{opener}" for opener in OPENERS),
)
TEMPLATE = "{role}{content} ... <|assistant|>"


class ToyTokenizer:
    """A tokenizer by greedy longest match over a small vocabulary, with single bytes for the rest.

    The same text can be spelt by several id sequences, as in real tokenizers: what a model wrote
    need not be what `encode` makes of it. The "other" dialect numbers its tokens differently and
    lacks the merges, for pairs of models that share no tokenizer.

    >>> tokenizer = ToyTokenizer()
    >>> tokenizer.decode(tokenizer.encode("So 4 plus 4 is 8.\\n\\nça va"))
    'So 4 plus 4 is 8.\\n\\nça va'
    """

    def __init__(self, dialect: Dialect = "plain") -> None:
        if dialect not in ("plain", "other"):
            raise OptionError("dialect", f"{dialect!r} is unknown", ("plain", "other"))
        numbers = tuple(str(number) for number in range(100))
        words = (
            *OPENERS,
            *FILLERS,
            *LANGUAGE.words,
            *(MERGES if dialect == "plain" else ()),
            *numbers,
            *(f" {n}" for n in numbers),
        )
        plain = [word.encode() for word in words]
        single = [bytes([byte]) for byte in range(256) if bytes([byte]) not in set(plain)]
        pieces = [*plain, *single] if dialect == "plain" else [*single, *plain[::-1]]
        self.dialect = dialect
        self.pieces: tuple[bytes, ...] = (*(b"" for _ in SPECIALS), *pieces)
        self.vocabulary = len(self.pieces)
        self.end_id = 0  # the token with which a model ends its text; the specials come first
        text = repr((self.pieces, SPECIALS, TEMPLATE))
        self.digest = blake2b(text.encode(), digest_size=16).hexdigest()
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if piece}
        self._pattern = re.compile(
            "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        )

    def piece_id(self, text: str) -> int | None:
        """Return the id of the token that is exactly this text, if there is one."""
        return self._ids.get(text.encode())

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text`; specials that are spelt out in it are just text."""
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(text):
            ids.extend(self._spell(text[position : match.start()]))
            ids.append(self._ids[match.group().encode()])
            position = match.end()
        ids.extend(self._spell(text[position:]))
        return tuple(ids)

    def _spell(self, text: str) -> TokenIds:
        return tuple(self._ids[bytes([byte])] for byte in text.encode()) if text else ()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with special tokens left out.

        A character that was cut in the middle reads U+FFFD.

        :raises UsageError: an id outside the vocabulary.
        """
        if ids and not (0 <= min(ids) and max(ids) < len(self.pieces)):
            raise UsageError(
                f"cannot decode an id outside 0..{len(self.pieces) - 1}: ids of another tokenizer?"
            )
        return b"".join([self.pieces[index] for index in ids]).decode(errors="replace")

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the ids of a conversation, each message opened by its role's token.

        A last assistant message is left open to be continued.
        """
        ids: list[int] = []
        for message in messages:
            ids.append(SPECIALS.index(f"<|{message.role}|>"))
            ids.extend(self.encode(message.content))
        if not messages or messages[-1].role != "assistant":
            ids.append(SPECIALS.index("<|assistant|>"))
        return tuple(ids)


_STATEMENT = re.compile(r"Start at (\d{1,2})\.((?: [+-]\d{1,2},?)+)")
_OPERATION = re.compile(r"[+-]\d{1,2}")
_BOX = re.compile(r"\\boxed\{(\d+)\}")
MOODS = 8  # how finely the traits of a question are distinguished


@dataclass(frozen=True)
class Question:
    """A chain of sums as a model reads it, with traits that make some questions harder.

    `mood` is how loosely its solutions are phrased, `hardness` how often steps go wrong; both are
    levels below `MOODS`, a function of the text alone, and the same for every model.
    """

    text: str
    start: int
    operations: tuple[int, ...]

    @cached_property
    def truth(self) -> tuple[int, ...]:
        """Return the right value before the first step and after each one."""
        values = [self.start]
        for operation in self.operations:
            values.append((values[-1] + operation) % 100)
        return tuple(values)

    @cached_property
    def _noise(self) -> bytes:
        return blake2b(self.text.encode(), digest_size=16).digest()

    @cached_property
    def hardness(self) -> int:
        """Return the level of hardness: long chains are harder, and some for no visible reason."""
        return min(MOODS - 1, (len(self.operations) + self._noise[0] % 4) // 2)

    @cached_property
    def mood(self) -> int:
        """Return the mood of a solution: how loosely it is phrased, which depends loosely on its
        hardness.
        """
        return (self.hardness + self._noise[1] % MOODS * 3) // 4

    def misconception(self, step: int) -> int:
        """Return by how much people usually get this step wrong."""
        return (1, -1, 10, -10, 2, -2)[self._noise[step % 16] % 6]


def read_question(text: str) -> Question:
    """Return the last toy problem stated in `text`.

    Any other text is a question too, with a chain made from its hash.

    >>> read_question("Please solve: Start at 4. +3, -2. What is the result?").truth
    (4, 7, 5)
    """
    last = None
    for match in _STATEMENT.finditer(text):
        last = match
    if last is not None:
        operations = tuple(int(operation) for operation in _OPERATION.findall(last.group(2)))
        return Question(last.group(), int(last.group(1)), operations)
    noise = blake2b(text.encode(), digest_size=8).digest()
    return Question(
        text, noise[0] % 100, tuple(1 + value % 9 for value in noise[1 : 3 + noise[7] % 4])
    )


def toy_problems(count: int, seed: int = 0) -> tuple[Problem, ...]:
    """Return seeded chain-of-sums problems with their right answers, all different.

    Levels 1 to 5 go by the length of the chain.

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
    """Return the answer of a solution in the toy language: the number in its last box.

    >>> toy_answer("So it is \\\\boxed{4}. No: \\\\boxed{5}")
    '5'
    """
    boxes = _BOX.findall(text)
    return boxes[-1] if boxes else None


def toy_groups(answers: Sequence[str]) -> list[int]:
    """Return a group number for each toy answer, equal where their texts are.

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


_KINDS = LANGUAGE.words | dict.fromkeys(OPENERS, "opener")
_NEXT = LANGUAGE.phases


class ReadingState:
    """The meaning of the ids so far; it takes one word at a time, and copies cheaply."""

    __slots__ = (
        "answered",
        "left",
        "operand",
        "phase",
        "prompt",
        "question",
        "sign",
        "step",
        "steps",
        "value",
        "word",
    )

    def __init__(self, question: Question) -> None:
        self.question = question
        # ids of a message that is not the assistant's, while inside one
        self.prompt: list[int] | None = None
        self.restart(question)

    def restart(self, question: Question) -> None:
        """Begin a new answer."""
        self.question = question
        self.prompt = None
        self.phase = "open"
        self.word = -1
        self.step = self.steps = 0  # sums done; blank lines passed
        # value as last claimed, and as quoted in the step under way
        self.value = self.left = question.start
        self.sign = 1
        self.operand = 0
        self.answered = False

    def copy(self) -> ReadingState:
        """Return an independent copy."""
        other = ReadingState.__new__(ReadingState)
        for name in ReadingState.__slots__:
            setattr(other, name, getattr(self, name))
        if self.prompt is not None:
            other.prompt = list(self.prompt)
        return other

    def take(self, kind: str, payload: int) -> None:
        """Read one word, number, mark or newline of the assistant's text."""
        phase = self.phase
        if kind == "newline":
            self._break_line(phase)
            return
        self.phase = following = _NEXT[phase].get(kind, "lost")
        self.word = payload if kind == "filler" else -1
        if kind == "number" and following != "lost":
            self._note(phase, payload)
        elif phase == "value":
            self.sign = -1 if kind == "minus" else 1
        elif phase == "close" and kind == "close":
            self.answered = True

    def _break_line(self, phase: str) -> None:
        if phase == "newline":
            self.steps += 1
        self.phase = "open" if phase in ("newline", "open") else "newline"
        self.word = -1

    def _note(self, phase: str, number: int) -> None:
        match phase:
            case "quote":
                self.left = number
            case "operation":
                self.operand = number
            case "result":
                self.value = number
                self.step += 1
            case "repair":
                self.value = number
            case _:
                pass

    @property
    def truth(self) -> int:
        """Return the correct value at this point of the chain."""
        return self.question.truth[min(self.step, len(self.question.truth) - 1)]

    @property
    def is_last(self) -> bool:
        """Return whether all sums are done."""
        return self.step >= len(self.question.operations)

    @property
    def result(self) -> int:
        """Return the result of the sum under way, as it is written."""
        return (self.left + self.sign * self.operand) % 100

    @property
    def operation(self) -> int:
        """Return the sum that comes next."""
        return self.question.operations[self.step % len(self.question.operations)]


def atoms(piece: bytes) -> tuple[tuple[str, int], ...]:
    """Return the meaning of a token's text, newlines apart from the rest."""
    head = piece.lstrip(b"\n")
    core = head.rstrip(b"\n")
    newline = (("newline", 0),)
    middle = (_atom(core.decode(errors="replace")),) if core else ()
    return newline * (len(piece) - len(head)) + middle + newline * (len(head) - len(core))


def _atom(text: str) -> tuple[str, int]:
    if text in FILLERS:
        return "filler", FILLERS.index(text)
    if text.strip().isascii() and text.strip().isdigit():
        return "number", int(text)
    return _KINDS.get(text, "other"), 0
