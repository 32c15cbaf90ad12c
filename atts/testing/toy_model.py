"""A toy language model, whose next-token distributions depend only on the previous ids.

The first part of the file defines the model's language: the words, the tokenizer, the questions and
the grammar.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from importlib import resources
from itertools import accumulate
from typing import Literal

import msgspec
import msgspec.toml
import numpy as np

from atts.core import (
    Beginning,
    Completion,
    Ending,
    Message,
    Problem,
    Recent,
    SampleRequest,
    Sampling,
    ScoreRequest,
    TokenIds,
)
from atts.errors import OptionError, UsageError
from atts.models.tokenizers import StopMatcher
from atts.sampling import Seed, generator, uniforms

Dialect = Literal["plain", "other"]


class Language(msgspec.Struct, frozen=True):
    """The words and the grammar of the toy language."""

    specials: tuple[str, ...]
    fillers: tuple[str, ...]
    openers: dict[str, float]  # phrases that can begin a step, with their relative frequencies
    full_stops: dict[str, float]
    rare_slips: tuple[int, ...]
    words: dict[str, str]  # for each word, its kind in the grammar, such as "dot" for "."
    # the next phase of the grammar, keyed by the current phase and then by the kind of the word
    # that was just read
    phases: dict[str, dict[str, str]]
    # For some phases, the words that can come next, with their relative frequencies. For the other
    # phases, `ToyModel` computes the frequencies.
    phrases: dict[str, dict[str, float]]


LANGUAGE = msgspec.toml.decode(
    resources.files("atts.testing").joinpath("language.toml").read_bytes(), type=Language
)
SPECIALS = LANGUAGE.specials
FILLERS = LANGUAGE.fillers
OPENERS = tuple(LANGUAGE.openers)
# Tokens that join line breaks to other text. Real tokenizers have such tokens too.
MERGES = (
    ".\n",
    ".\n\n",
    *(f"\n{opener}" for opener in OPENERS),
)
TEMPLATE = "{role}{content} ... <|assistant|>"


class ToyTokenizer:
    """A tokenizer with a small vocabulary. It always takes the longest word that matches, and
    encodes other text as single bytes.

    As with real tokenizers, several id sequences decode to the same text. So the ids that a model
    wrote may differ from the ids that `encode` returns for their text.

    The dialect "other" has different ids and no merged tokens. It serves to test pairs of models
    with different tokenizers.

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
        self.end_id = 0  # id of the token that ends a text; it is the first of `SPECIALS`
        text = repr((self.pieces, SPECIALS, TEMPLATE))
        self.digest = blake2b(text.encode(), digest_size=16).hexdigest()
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if piece}
        self._pattern = re.compile(
            "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        )

    def piece_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text; None if there is no such token."""
        return self._ids.get(text.encode())

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text`. Names of special tokens are encoded as ordinary text."""
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
        """Return the text of `ids` without special tokens.

        An incomplete character becomes U+FFFD, the replacement character.

        :raises UsageError: an id is outside the vocabulary.
        """
        if ids and not (0 <= min(ids) and max(ids) < len(self.pieces)):
            raise UsageError(
                f"cannot decode an id outside 0..{len(self.pieces) - 1}; the ids may come from "
                "another tokenizer"
            )
        return b"".join([self.pieces[index] for index in ids]).decode(errors="replace")

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return the ids of a conversation, in which each message begins with the special token of
        its role.

        If the last message is the assistant's, it stays open, so that the model can continue it.
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
MOODS = 8  # `Question.mood` and `Question.hardness` both have this number of levels


@dataclass(frozen=True)
class Question:
    """A question of the toy language: a chain of sums.

    `hardness` sets how often a step is wrong, and `mood` sets how much the phrases in solutions
    vary. Both are levels from 0 to `MOODS` - 1. They depend only on the text, so they are the same
    for all models.
    """

    text: str
    start: int
    operations: tuple[int, ...]

    @cached_property
    def truth(self) -> tuple[int, ...]:
        """Return the correct values: the start value, followed by the value after each step."""
        values = [self.start]
        for operation in self.operations:
            values.append((values[-1] + operation) % 100)
        return tuple(values)

    @cached_property
    def _noise(self) -> bytes:
        return blake2b(self.text.encode(), digest_size=16).digest()

    @cached_property
    def hardness(self) -> int:
        """Return how hard the question is. The level grows with the chain's length, and has a
        random part.
        """
        return min(MOODS - 1, (len(self.operations) + self._noise[0] % 4) // 2)

    @cached_property
    def mood(self) -> int:
        """Return how much the phrases in solutions vary. The level depends partly on the
        hardness.
        """
        return (self.hardness + self._noise[1] % MOODS * 3) // 4

    def misconception(self, step: int) -> int:
        """Return the most common wrong result of a step, minus the correct result."""
        return (1, -1, 10, -10, 2, -2)[self._noise[step % 16] % 6]


def read_question(text: str) -> Question:
    """Return the question of the last toy problem in a text.

    If the text contains no toy problem, return a question whose chain is derived from a hash of the
    text.

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
    """Return `count` different random problems with their correct answers.

    Each problem is a chain of sums. A problem's level, 1 to 5, grows with the length of its chain.

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
    """Return the answer of a solution in the toy language: the content of its last box.

    >>> toy_answer("So it is \\\\boxed{4}. No: \\\\boxed{5}")
    '5'
    """
    boxes = _BOX.findall(text)
    return boxes[-1] if boxes else None


def toy_groups(answers: Sequence[str]) -> list[int]:
    """Return the group index of each toy answer. Answers with the same text are in the same group.

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
    """The state of the grammar after the ids that have been read so far. Words are read one by
    one.
    """

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
        # ids so far of a message of the system or the user; None while a message of the assistant
        # is read
        self.prompt: list[int] | None = None
        self.restart(question)

    def restart(self, question: Question) -> None:
        """Set the state to the beginning of a new answer to a question."""
        self.question = question
        self.prompt = None
        self.phase = "open"
        self.word = -1
        # `step`: number of finished sums; `steps`: number of blank lines read
        self.step = self.steps = 0
        # `value`: result of the latest sum in the text; `left`: first number of the current sum
        self.value = self.left = question.start
        self.sign = 1
        self.operand = 0
        self.answered = False

    def copy(self) -> ReadingState:
        """Return an independent copy of the state."""
        other = ReadingState.__new__(ReadingState)
        for name in ReadingState.__slots__:
            setattr(other, name, getattr(self, name))
        if self.prompt is not None:
            other.prompt = list(self.prompt)
        return other

    def take(self, kind: str, payload: int) -> None:
        """Update the state with one unit of the assistant's text: a word, a number, a punctuation
        mark or a newline.
        """
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
        """Return the correct value after the sums that the text has finished."""
        return self.question.truth[min(self.step, len(self.question.truth) - 1)]

    @property
    def is_last(self) -> bool:
        """Return True if the text has finished all sums of the question."""
        return self.step >= len(self.question.operations)

    @property
    def result(self) -> int:
        """Return the correct result of the sum that the text is writing, computed from the numbers
        in the text.
        """
        return (self.left + self.sign * self.operand) % 100

    @property
    def operation(self) -> int:
        """Return the number that the next sum must add, which may be negative."""
        return self.question.operations[self.step % len(self.question.operations)]


def atoms(piece: bytes) -> tuple[tuple[str, int], ...]:
    """Split a token's text into the units that the grammar reads: words, numbers, punctuation marks
    and single newlines.
    """
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


_FILTERED_KEPT = 8192


class Distribution:
    """A distribution of the next token. A few likely tokens have their own probabilities, and all
    other possible tokens share one small probability.
    """

    __slots__ = (
        "_bounds",
        "_floor_ids",
        "_logprobs",
        "_mass",
        "floor",
        "ids",
        "probabilities",
        "vocabulary",
    )

    def __init__(
        self,
        ids: tuple[int, ...],
        probabilities: tuple[float, ...],
        floor: float,
        floors: int,
        vocabulary: int,
    ) -> None:
        """Create a distribution from the likeliest `ids`, sorted by falling probability.

        Of all other ids, the first `floors` ids have the probability `floor` each, and the others
        have probability 0.
        """
        self.ids = ids
        self.probabilities = probabilities
        self.floor = floor
        self.vocabulary = vocabulary
        self._bounds = list(accumulate(probabilities))
        self._mass = self._bounds[-1] + floors * floor
        self._logprobs = {index: math.log(p) for index, p in zip(ids, probabilities, strict=True)}
        self._floor_ids = floors

    @classmethod
    def of(cls, weights: Mapping[int, float], vocabulary: int, leak: float) -> Distribution:
        """Return a distribution with probabilities proportional to `weights`.

        The fraction `leak` of the total probability is spread evenly over the whole vocabulary.
        """
        total = math.fsum(weights.values())
        floor = leak / vocabulary
        pairs = [
            (index, (1 - leak) * weight / total + floor)
            for index, weight in weights.items()
            if weight > 0
        ]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        ids = tuple(index for index, _ in pairs)
        probabilities = tuple(p for _, p in pairs)
        return cls(ids, probabilities, floor, vocabulary - len(ids), vocabulary)

    def logprob(self, index: int) -> float:
        """Return the log-probability of a token; -inf if the token has probability 0."""
        logprob = self._logprobs.get(index)
        if logprob is not None:
            return logprob
        return math.log(self.floor) if self._floor_rank(index) < self._floor_ids else -math.inf

    @property
    def entropy(self) -> float:
        """Return the entropy of the distribution in nats."""
        of_likely = -math.fsum(p * math.log(p) for p in self.probabilities)
        if self.floor == 0.0:
            return of_likely
        return of_likely - self._floor_ids * self.floor * math.log(self.floor)

    def draw(self, uniform: float) -> int:
        """Return the token that a uniform random number in [0, 1) selects, by inverse transform
        sampling with the likeliest tokens first.
        """
        target = uniform * self._mass
        rank = bisect_right(self._bounds, target)
        if rank < len(self.ids):
            return self.ids[rank]
        if not self._floor_ids:
            # Because of rounding, `target` can equal the last bound, and `rank` is then too large
            # by one.
            return self.ids[-1]
        return self._floor_id(
            min(self._floor_ids - 1, int((target - self._bounds[-1]) / self.floor))
        )

    def under(self, sampling: Sampling) -> Distribution:
        """Return this distribution with a temperature, top-k, top-p and min-p applied."""
        return self if sampling == Sampling() else _filtered(self, sampling)

    def filtered(self, sampling: Sampling) -> Distribution:
        """Compute the result of `under`, which caches it."""
        if sampling.temperature == 0:
            return Distribution(self.ids[:1], (1.0,), 0.0, 0, self.vocabulary)
        power = 1 / sampling.temperature
        # First divide all probabilities by the largest one. At a low temperature, the powers would
        # otherwise underflow to 0.
        top = self.probabilities[0]
        weights = [(p / top) ** power for p in self.probabilities]
        floor = (self.floor / top) ** power
        floors = self._floor_ids
        if sampling.top_k:
            weights, floors = (
                weights[: sampling.top_k],
                max(0, min(floors, sampling.top_k - len(weights))),
            )
        if sampling.top_p < 1:
            weights, floors = _nucleus(weights, floor, floors, sampling.top_p)
        # min-p is relative to the largest weight, which is 1 here.
        weights = [weight for weight in weights if weight >= sampling.min_p]
        if floor < sampling.min_p or floor == 0.0:
            floors = 0
        weights = [weight for weight in weights if weight > 0]
        total = math.fsum(weights) + floors * floor
        probabilities = tuple(weight / total for weight in weights)
        return Distribution(
            self.ids[: len(weights)], probabilities, floor / total, floors, self.vocabulary
        )

    def _floor_rank(self, index: int) -> int:
        return index - sum(1 for other in self._logprobs if other < index)

    def _floor_id(self, rank: int) -> int:
        for likely in sorted(self._logprobs):
            if likely > rank:
                break
            rank += 1
        return rank


# Every sampled token needs a filtered distribution, and computing it is slow, so cache the results.
_filtered = lru_cache(_FILTERED_KEPT)(Distribution.filtered)


def _nucleus(
    weights: list[float], floor: float, floors: int, top_p: float
) -> tuple[list[float], int]:
    """Apply top-p: keep the likeliest tokens, until they have at least `top_p` of the total weight.

    Return the weights of the likely tokens that are kept, and how many of the other tokens are
    kept.
    """
    wanted = top_p * (math.fsum(weights) + floors * floor)
    for count, reached in enumerate(accumulate(weights), start=1):
        if reached >= wanted:
            return weights[:count], 0
    missing = wanted - math.fsum(weights)
    return weights, min(floors, math.ceil(missing / floor)) if floor else 0


_ASSISTANT = SPECIALS.index("<|assistant|>")
# total probability that is spread over all tokens, so that no token is impossible
_LEAK = 1e-4
_QUESTIONS_KEPT = 4096
# largest number of distributions in the cache; 100 problems with 8 rollouts each need about a third
_DISTRIBUTIONS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Skill:
    """The skills of a toy model. Every field except `fluency` and `verbosity` is the probability of
    an event.

    - `right`: a step in a question of medium hardness is correct.
    - `typical`: a wrong step makes the most common error of this step. With a high value, samples
      often have the same errors, which surprise a scorer less.
    - `repair`: after a wrong value, the next step corrects it.
    - `wander`: a step in a question of medium hardness contains no sum.
    - `fluency`: at a high value, the likeliest phrases are even likelier.
    - `verbosity`: the mean number of filler words per phrase.

    Errors of the draft surprise the target more if the target's `right` is high and its `typical` is
    low. Filler words dilute this surprise in the score of a chunk.
    """

    right: float = 0.85
    typical: float = 0.5
    repair: float = 0.05
    wander: float = 0.1
    fluency: float = 0.9
    verbosity: float = 3.0


DRAFT = Skill()
TARGET = Skill(right=0.985, typical=0.5, repair=0.75, wander=0.03, fluency=1.0)


class ToyModel:
    """A toy model, which returns the distribution of the next token after given ids.

    Models with the same skill and tokenizer return the same distributions. A solution is a chain of
    steps such as `So we take: 17 plus 5 is 22.`, each followed by a blank line. The last step is
    `The answer is \\boxed{31}.`

    After a wrong step, the model continues from the wrong value, so the answer is wrong. A later
    step such as `Wait that was 22.` may correct the value. `Skill` sets the probabilities of
    errors, corrections and steps without a sum.
    """

    def __init__(self, skill: Skill, tokenizer: ToyTokenizer) -> None:
        self.skill = skill
        self.tokenizer = tokenizer
        self._atoms = tuple(atoms(piece) for piece in tokenizer.pieces)
        self._known: Recent[tuple[object, ...], Distribution] = Recent(_DISTRIBUTIONS_KEPT)

    def read(self, ids: Sequence[int], state: ReadingState | None = None) -> ReadingState:
        """Return the state after reading `ids`. If `state` is given, reading continues from a copy
        of it.
        """
        # If the ids contain no assistant message, they are plain text to continue. Plain text has no
        # question, so its first id is used as the question.
        state = (
            ReadingState(_question(self.tokenizer, (ids[0],))) if state is None else state.copy()
        )
        for index in ids:
            self.advance(state, index)
        return state

    def advance(self, state: ReadingState, index: int) -> None:
        """Update `state` in place by reading one id."""
        if state.prompt is None:
            for kind, payload in self._atoms[index]:
                state.take(kind, payload)
        elif index >= len(SPECIALS):
            state.prompt.append(index)
        if 0 < index < len(SPECIALS):
            self._turn(state, index)

    def _turn(self, state: ReadingState, index: int) -> None:
        if index == _ASSISTANT:
            state.restart(_question(self.tokenizer, tuple(state.prompt or ())))
        else:  # a system message and the user's message are read as one prompt
            state.prompt = state.prompt or []

    def distribution(self, state: ReadingState) -> Distribution:
        """Return the distribution of the token that follows in this state."""
        key = _key(state)
        return self._known.get(key) or self._store(key, self._words(state))

    def _words(self, state: ReadingState) -> list[tuple[str, float]]:
        """Return the words that may follow in this state, with their weights."""
        match state.phase:
            case "open":
                return self._openings(state)
            case "result":
                return self._results(state)
            case "repair":
                return [
                    (f" {state.truth}", self.skill.right),
                    (f" {state.value}", 1 - self.skill.right),
                ]
            case "value":
                rising = 0.995 if state.operation > 0 else 0.005
                return [(" plus", rising), (" minus", 1 - rising)]
            case "operation":
                return [
                    (f" {abs(state.operation)}", 0.995),
                    (f" {(abs(state.operation) + 1) % 100}", 0.005),
                ]
            case "quote":
                return [(f" {state.value}", 0.995), (f" {(state.value + 10) % 100}", 0.005)]
            case "boxed":
                return [(f"{state.value}", 1.0)]
            case "after" if not state.answered:
                comma = 0.5 - 0.45 * self._firmness(state.question)
                return [(",", comma), *self._choice(LANGUAGE.full_stops, state, 1 - comma)]
            case "claim" | "tail" | "muse":
                idle = self._idle(state)
                rest = 1 - sum(weight for _, weight in idle)
                ends = (
                    [(":", rest)]
                    if state.phase == "claim"
                    else self._choice(LANGUAGE.full_stops, state, rest)
                )
                return [*idle, *ends]
            case "newline" if not state.answered and not state.is_last:
                return [
                    ("\n", 0.6),
                    *(
                        (f"\n{word}", share)
                        for word, share in self._choice(LANGUAGE.openers, state, 0.4)
                    ),
                ]
            case "after" | "dot" if state.answered:
                return [
                    ("<|end|>", 0.8),
                    (".", 0.1 if state.phase == "after" else 0.0),
                    ("\n\n", 0.1),
                ]
            case phase:
                return list(LANGUAGE.phrases[phase].items())

    def _openings(self, state: ReadingState) -> list[tuple[str, float]]:
        if state.answered:
            return [("<|end|>", 0.97), ("Hmm", 0.02), ("The", 0.01)]
        wander = min(0.5, self.skill.wander * _hard(state.question))
        repair = (self.skill.repair if state.value != state.truth else 0.005) * (1 - wander)
        rest = 1 - wander - repair
        going_on = [("The", rest)] if state.is_last else self._choice(LANGUAGE.openers, state, rest)
        return [("Hmm", wander), ("Wait", repair), *going_on]

    def _results(self, state: ReadingState) -> list[tuple[str, float]]:
        right = state.result
        slip = state.question.misconception(state.step)
        wrong = min(0.9, (1 - self.skill.right) * _hard(state.question))
        rare = wrong * (1 - self.skill.typical) / len(LANGUAGE.rare_slips)
        values = [(right, 1 - wrong), ((right + slip) % 100, wrong * self.skill.typical)]
        values += [((right + other) % 100, rare) for other in LANGUAGE.rare_slips]
        return [(f" {value}", weight) for value, weight in values]

    def _firmness(self, question: Question) -> float:
        """Return how strongly the model prefers the likeliest phrases: 0 for the most varied
        phrases, up to `fluency`.
        """
        return self.skill.fluency * (1 - question.mood / (MOODS - 1))

    def _idle(self, state: ReadingState) -> list[tuple[str, float]]:
        """Return the filler words, each with its probability as the next word."""
        firmness = self._firmness(state.question)
        likings = _LIKINGS[state.word]
        weights = [
            (word, math.exp((3 + 20 * firmness) * liking))
            for word, liking in zip(FILLERS, likings, strict=False)
        ]
        going = self.skill.verbosity * math.exp(5 * firmness * (2 * likings[-1] - 1))
        share = going / (1 + going) / sum(weight for _, weight in weights)
        return [(word, weight * share) for word, weight in weights]

    def _choice(
        self, options: Mapping[str, float], state: ReadingState, total: float
    ) -> list[tuple[str, float]]:
        """Return alternative phrases with probabilities that sum to `total`. The higher `_firmness`
        is, the more of the total the likeliest phrase gets.
        """
        power = 1 + 3 * self._firmness(state.question)
        weights = [(word, share**power) for word, share in options.items()]
        scale = total / sum(weight for _, weight in weights)
        return [(word, weight * scale) for word, weight in weights]

    def _store(self, key: tuple[object, ...], words: list[tuple[str, float]]) -> Distribution:
        weights: dict[int, float] = {}
        for word, weight in words:
            index = self.tokenizer.end_id if word == "<|end|>" else self.tokenizer.piece_id(word)
            # the tokenizer with the dialect "other" has no token for some words
            if index is not None:
                weights[index] = weights.get(index, 0.0) + weight
        distribution = self._known[key] = Distribution.of(weights, self.tokenizer.vocabulary, _LEAK)
        return distribution


@lru_cache(_QUESTIONS_KEPT)
def _question(tokenizer: ToyTokenizer, prompt: TokenIds) -> Question:
    return read_question(tokenizer.decode(prompt))


def _likings() -> dict[int, tuple[float, ...]]:
    """Return how well each filler word fits as the word after a given filler word, as numbers from
    0 to 1.

    The dict maps the index of a filler word to one number for each possible next filler word. Its
    last number says how likely any filler word comes next, rather than none. The key -1 is for the
    start of a phrase.
    """
    size = len(FILLERS) + 1
    rows = {
        word: blake2b(f"liking {word}".encode(), digest_size=size).digest()
        for word in range(-1, size - 1)
    }
    return {word: tuple(value / 255 for value in row) for word, row in rows.items()}


_LIKINGS = _likings()


def _hard(question: Question) -> float:
    """Return the factor by which a question's hardness multiplies the rates of wrong steps and of
    steps without a sum. It is about 1 for medium hardness.
    """
    return (question.hardness + 0.5) / (MOODS / 2)


def _key(state: ReadingState) -> tuple[object, ...]:
    """Return the part of a state that determines the distribution of the next words."""
    phase = state.phase
    question = state.question
    if phase == "open":
        return (
            phase,
            state.answered,
            state.is_last,
            state.value != state.truth,
            question.hardness,
            question.mood,
        )
    if phase == "result":
        return phase, state.result, question.misconception(state.step), question.hardness
    if phase == "repair":
        return phase, state.truth, state.value
    if phase in ("value", "operation"):
        trait = state.operation
    else:
        trait = state.value if phase in ("quote", "boxed") else question.mood
    return phase, state.word, trait, state.answered, state.step >= len(question.operations)


@dataclass(frozen=True, slots=True)
class Selector:
    """The accuracy of a toy model that judges steps or chooses between solutions.

    `judge` is the probability of a correct reply if `atts.pipelines` asks for a verdict or a rating
    of the last step.

    The other fields are for prompts with numbered solutions. If the prompt asks to compare
    solutions, the model chooses the first solution with probability `first`, whatever its answer.
    In all other cases, it chooses the correct solution with probability `skill`, or else the wrong
    one. If both solutions are correct, or both are wrong, it chooses at random. A synthesis ends
    with the correct result with probability `skill`, or else with the result of the first solution.
    """

    skill: float = 0.8
    first: float = 0.0
    judge: float = 0.8

    def verdict(self, question: str, is_right: bool, seed: Seed) -> str | None:
        """Return the reply to a prompt that asks about the last step; None for any other prompt."""
        is_rating = question.endswith(_RATES)
        if not is_rating and not (question.endswith(_ANSWERS) and _JUDGES in question):
            return None
        (draw,) = uniforms(replace(seed, purpose=f"judge {seed.purpose}"), 1).tolist()
        says_right = is_right == (draw < self.judge)
        if is_rating:
            return "8" if says_right else "2"
        return "Yes" if says_right else "No"

    def reply(self, text: str, seed: Seed) -> str | None:
        """Return the reply to a prompt with two or more solutions; None for any other prompt."""
        begin = text.find(_SOLUTION.format(1))
        if begin < 0 or _SOLUTION.format(2) not in text:
            return None
        truth = str(read_question(text[:begin]).truth[-1])
        answers = [toy_answer(part) for part in _NUMBERED.split(text[begin:])[1:]]
        is_blind, is_skilled, coin = uniforms(replace(seed, purpose="selector"), 3).tolist()
        is_right = is_skilled < self.skill
        if _COMPARES not in text:
            return f"The answer is \\boxed{{{truth if is_right else answers[0] or 0}}}."
        place = 0
        if is_blind >= self.first:
            correct = [answer == truth for answer in answers[:2]]
            if correct[0] == correct[1]:
                place = int(coin < 0.5)
            else:
                place = correct.index(is_right)
        return f"Correct: {place + 1}"


_SOLUTION = "Solution {}:"
_NUMBERED = re.compile(r"Solution \d+:")
_COMPARES = "Correct: 1"
_JUDGES = "Is the last step correct?"
_ANSWERS = "Answer:"
_RATES = "I think the quality score is:"
# A prompt may end with a question about a step. This number of ids at the end is searched for it,
# because such a question has one token per letter.
_QUESTION_IDS = 160
_QUESTION_REPLY = 8  # Only requests with at most this token limit can be questions about a step.


class Writer:
    """A writer and scorer of texts with a toy model. To save time, it caches the states after
    recent requests.
    """

    def __init__(
        self, model: ToyModel, memory: int = 1024, selector: Selector | None = None
    ) -> None:
        self.model = model
        self._selector = selector or Selector()
        self._states: Recent[TokenIds, ReadingState] = Recent(memory)

    def write(self, request: SampleRequest) -> Completion:
        """Continue a text. The token at each position is sampled with one random number, which the
        request's seed determines.
        """
        model = self.model
        # The prompt ends where the answer begins. It may ask the model to compare or combine
        # solutions.
        if request.ids and request.ids[-1] == _ASSISTANT:
            reply = self._selector.reply(model.tokenizer.decode(request.ids), request.seed)
            if reply is not None:
                return self._spelt(reply, request)
        elif request.max_tokens <= _QUESTION_REPLY:
            state = self._read(request.ids)
            tail = model.tokenizer.decode(request.ids[-_QUESTION_IDS:]).rstrip()
            reply = self._selector.verdict(tail, state.value == state.truth, request.seed)
            if reply is not None:
                return self._spelt(reply, request)
        end = self.model.tokenizer.end_id
        state = self._read(request.ids).copy()
        draws = uniforms(request.seed, request.num_begun + request.max_tokens)[
            request.num_begun :
        ].tolist()
        stops = StopMatcher(request.stop)
        for index in request.ids[len(request.ids) - request.num_begun :]:
            stops.feed(model.tokenizer.pieces[index])
        ids: list[int] = []
        logprobs: list[float] = []
        ended: Ending = "length"
        for uniform in draws:
            distribution = model.distribution(state)
            index = distribution.under(request.sampling).draw(uniform)
            ids.append(index)
            logprobs.append(distribution.logprob(index))
            if index == end:
                ended = "end"
                break
            model.advance(state, index)
            if stops.feed(model.tokenizer.pieces[index]) or index in request.stop_ids:
                ended = "delimiter"
                break
        kept = tuple(ids)
        if ended != "end":
            self._states[request.ids + kept] = state
        return Completion(kept, model.tokenizer.decode(kept), ended, tuple(logprobs))

    def _spelt(self, text: str, request: SampleRequest) -> Completion:
        """Return a fixed reply as a completion, cut off at the request's token limit."""
        tokenizer = self.model.tokenizer
        ids = (*tokenizer.encode(text), tokenizer.end_id)
        kept = ids[: request.max_tokens]
        ended: Ending = "end" if len(kept) == len(ids) else "length"
        return Completion(kept, tokenizer.decode(kept), ended, (0.0,) * len(kept))

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """Return the raw log-probability of every token of the suffix. If the request asks for
        entropies, return negative entropies instead.
        """
        state = self._read(request.prefix).copy()
        logprobs: list[float] = []
        for index in request.suffix:
            distribution = self.model.distribution(state)
            if request.entropies:
                logprobs.append(-distribution.entropy)
            else:
                logprobs.append(distribution.logprob(index))
            self.model.advance(state, index)
        self._states[request.prefix + request.suffix] = state
        return tuple(logprobs)

    def begin(self, request: SampleRequest, suffix: TokenIds) -> Beginning:
        """Return the beginning of the answer to a request, up to and including the first token that
        differs from the suffix.
        """
        whole = self.write(replace(request, max_tokens=min(request.max_tokens, len(suffix) + 1)))
        stood = next(
            (
                i
                for i, (own, other) in enumerate(zip(whole.ids, suffix, strict=False))
                if own != other
            ),
            None,
        )
        count = len(whole.ids) if stood is None else stood + 1
        is_all = count == len(whole.ids) and (
            whole.ended != "length" or count == request.max_tokens
        )
        return Beginning(whole.ids[:count], whole.logprobs[:count], whole.ended if is_all else None)

    def _read(self, ids: TokenIds) -> ReadingState:
        state = self._states.get(ids)
        if state is None:
            state = self._states[ids] = self.model.read(ids)
        return state


class PrefixMemory:
    """A simulated prefix cache that stores the latest ids of each rollout. When it is full, the ids
    that were stored longest ago are evicted.
    """

    def __init__(self, rollouts: int = 4096) -> None:
        self._seen: Recent[str, TokenIds] = Recent(rollouts)

    def cached(self, rollout: str, ids: TokenIds) -> int:
        """Return how many ids at the start of `ids` are cached.

        The last id is never cached, because the model must compute the distribution after it.
        """
        seen = self._seen.get(rollout, ())
        limit = min(len(seen), len(ids) - 1)
        if seen[:limit] == ids[:limit]:
            return limit
        return next(i for i in range(limit) if seen[i] != ids[i])

    def keep(self, rollout: str, ids: TokenIds) -> None:
        """Store a rollout's latest ids; do nothing if the rollout has no name."""
        if rollout:
            self._seen[rollout] = ids
