"""A toy language of reasoning with real log-probabilities: every law is an honest function of the ids before it.

A solution is a chain of steps ended by blank lines, `So we take: 17 plus 5 is 22.`, and a last one, `The answer is
\\boxed{31}.` A model that slips goes on from its wrong value, so a wrong step makes a wrong answer, unless some later
step (`Wait that was 22.`) repairs it. How often a model slips, notices and rambles is its `Skill`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

from atts.core import TokenIds
from atts.testing.laws import Law, blend
from atts.testing.questions import MOODS, Question, read_question
from atts.testing.tokenizer import FILLERS, OPENERS, SPECIALS, ToyTokenizer

_ASSISTANT = SPECIALS.index("<|assistant|>")
_LEAK = 1e-4  # shared by the whole vocabulary, so that nothing is impossible
_QUESTIONS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Skill:
    """What a toy model is good at; every field is a probability but `fluency` and `verbosity`.

    `right`: a step of middling hardness comes out right. `typical`: a slip is the question's usual one, which lets
    slips repeat across samples and makes them less surprising to a scorer. `repair`: a wrong value is noticed at the
    next step. `wander`: a step says nothing. `fluency` sharpens the phrasing; `verbosity` is the mean number of idle
    words per phrase. The target finds a slip of the draft the more surprising the more often it is `right` and the less
    `typical` the slip, and the surprise stands out the more the fewer idle words surround it.
    """

    right: float = 0.85
    typical: float = 0.5
    repair: float = 0.05
    wander: float = 0.1
    fluency: float = 0.9
    verbosity: float = 3.0


DRAFT = Skill()
TARGET = Skill(right=0.985, typical=0.5, repair=0.75, wander=0.03, fluency=1.0)


class Phase(IntEnum):
    """Where in a step the text stands."""

    OPEN = 0  # at the start of a step
    CLAIM = 1  # idle words before the colon
    VALUE = 2  # before plus or minus
    OPERATION = 3  # before the operand
    OPERAND = 4  # before "is"
    RESULT = 5  # before the result
    AFTER = 6  # after a result
    TAIL = 7  # idle words after a comma
    DOT = 8
    NEWLINE = 9  # after a single one
    MUSE = 10
    WAIT = 11
    THAT = 12
    REPAIR = 13  # before the repaired value
    THE = 14
    ANSWER = 15
    BOX = 16
    BOXED = 17  # before the answer
    CLOSE = 18  # before the brace
    LOST = 19  # anything that is none of these
    QUOTE = 20  # before the value a step starts from


_WORDS = {
    "Hmm": "hmm", "Wait": "wait", "The": "the", " that": "that", " was": "was", " answer": "answer", " plus": "plus",
    " minus": "minus", " is": "is", " gives": "is", " \\boxed{": "box", "}": "close", ",": "comma", ".": "dot",
    ":": "colon", **dict.fromkeys(OPENERS, "opener"),
}  # fmt: skip
_NEXT: dict[tuple[Phase, str], Phase] = {
    (Phase.OPEN, "opener"): Phase.CLAIM,
    (Phase.OPEN, "hmm"): Phase.MUSE,
    (Phase.OPEN, "wait"): Phase.WAIT,
    (Phase.OPEN, "the"): Phase.THE,
    (Phase.CLAIM, "filler"): Phase.CLAIM,
    (Phase.CLAIM, "colon"): Phase.QUOTE,
    (Phase.QUOTE, "number"): Phase.VALUE,
    (Phase.VALUE, "plus"): Phase.OPERATION,
    (Phase.VALUE, "minus"): Phase.OPERATION,
    (Phase.OPERATION, "number"): Phase.OPERAND,
    (Phase.OPERAND, "is"): Phase.RESULT,
    (Phase.RESULT, "number"): Phase.AFTER,
    (Phase.AFTER, "comma"): Phase.TAIL,
    (Phase.AFTER, "dot"): Phase.DOT,
    (Phase.TAIL, "filler"): Phase.TAIL,
    (Phase.TAIL, "dot"): Phase.DOT,
    (Phase.MUSE, "filler"): Phase.MUSE,
    (Phase.MUSE, "dot"): Phase.DOT,
    (Phase.WAIT, "that"): Phase.THAT,
    (Phase.THAT, "was"): Phase.REPAIR,
    (Phase.REPAIR, "number"): Phase.AFTER,
    (Phase.THE, "answer"): Phase.ANSWER,
    (Phase.ANSWER, "is"): Phase.BOX,
    (Phase.BOX, "box"): Phase.BOXED,
    (Phase.BOXED, "number"): Phase.CLOSE,
    (Phase.CLOSE, "close"): Phase.AFTER,
    (Phase.LOST, "dot"): Phase.DOT,
}


class Reader:
    """What a model has understood of the ids so far; reads one id at a time, and copies cheaply."""

    __slots__ = ("answered", "left", "operand", "phase", "prompt", "question", "sign", "step", "steps", "value", "word")

    def __init__(self, question: Question) -> None:
        self.question = question
        self.prompt: list[int] | None = None  # ids of a message that is not the assistant's, while inside one
        self.restart(question)

    def restart(self, question: Question) -> None:
        """A new answer begins."""
        self.question, self.prompt = question, None
        self.phase, self.word = Phase.OPEN, -1
        self.step = self.steps = 0  # sums done; blank lines passed
        self.value = self.left = question.start  # as last claimed; as quoted in the step under way
        self.sign, self.operand = 1, 0
        self.answered = False

    def copy(self) -> Reader:
        """An independent reader at the same place."""
        other = Reader.__new__(Reader)
        for name in Reader.__slots__:
            setattr(other, name, getattr(self, name))
        if self.prompt is not None:
            other.prompt = list(self.prompt)
        return other

    def take(self, kind: str, payload: int) -> None:
        """One word, number, mark or newline of the assistant's text."""
        phase = self.phase
        if kind == "newline":
            self._break_line(phase)
            return
        self.phase = following = _NEXT.get((phase, kind), Phase.LOST)
        self.word = payload if kind == "filler" else -1
        if kind == "number" and following != Phase.LOST:
            self._note(phase, payload)
        elif phase == Phase.VALUE:
            self.sign = -1 if kind == "minus" else 1
        elif phase == Phase.CLOSE and kind == "close":
            self.answered = True

    def _break_line(self, phase: Phase) -> None:
        if phase == Phase.NEWLINE:
            self.steps += 1
        self.phase = Phase.OPEN if phase in (Phase.NEWLINE, Phase.OPEN) else Phase.NEWLINE
        self.word = -1

    def _note(self, phase: Phase, number: int) -> None:
        match phase:
            case Phase.QUOTE:
                self.left = number
            case Phase.OPERATION:
                self.operand = number
            case Phase.RESULT:
                self.value = number
                self.step += 1
            case Phase.REPAIR:
                self.value = number
            case _:
                pass

    @property
    def truth(self) -> int:
        """The right value at this point of the chain."""
        return self.question.truth[min(self.step, len(self.question.truth) - 1)]

    @property
    def operation(self) -> int:
        """The sum that comes next."""
        return self.question.operations[self.step % len(self.question.operations)]


class ToyModel:
    """A skill and a tokenizer: ids in, laws out. Equal models give equal laws, whatever they were asked before."""

    def __init__(self, skill: Skill, tokenizer: ToyTokenizer) -> None:
        self.skill = skill
        self.tokenizer = tokenizer
        self._atoms = tuple(_atoms(piece) for piece in tokenizer.pieces)
        self._laws: dict[tuple[int, ...], Law] = {}
        self._questions: OrderedDict[TokenIds, Question] = OrderedDict()
        self._numbers = tuple(tokenizer.piece_id(f" {number}") for number in range(100))
        self._writers: dict[Phase, Callable[[Reader], Law]] = {
            Phase.OPEN: self._open,
            Phase.RESULT: self._result,
            Phase.REPAIR: self._repair,
        }

    def read(self, ids: Sequence[int], reader: Reader | None = None) -> Reader:
        """A reader after `ids`; going on from `reader`, which is left as it was, when one is given."""
        # ids that open no assistant's turn are a text to go on with: its question is made from the first id alone
        reader = Reader(self._question((ids[0],))) if reader is None else reader.copy()
        for index in ids:
            self.advance(reader, index)
        return reader

    def advance(self, reader: Reader, index: int) -> None:
        """Read one id, in place."""
        if reader.prompt is None:
            for kind, payload in self._atoms[index]:
                reader.take(kind, payload)
        elif index >= len(SPECIALS):
            reader.prompt.append(index)
        if 0 < index < len(SPECIALS):
            self._turn(reader, index)

    def _turn(self, reader: Reader, index: int) -> None:
        if index == _ASSISTANT:
            reader.restart(self._question(tuple(reader.prompt or ())))
        else:  # what the system and the user say is read as one text
            reader.prompt = reader.prompt or []

    def _question(self, prompt: TokenIds) -> Question:
        found = self._questions.get(prompt)
        if found is None:
            found = self._questions[prompt] = read_question(self.tokenizer.decode(prompt))
            if len(self._questions) > _QUESTIONS_KEPT:
                self._questions.popitem(last=False)
        return found

    def law(self, reader: Reader) -> Law:
        """The law of the next id."""
        return self._writers.get(reader.phase, self._phrase)(reader)

    def _open(self, reader: Reader) -> Law:
        last = reader.step >= len(reader.question.operations)
        wrong = reader.value != reader.truth
        key = (Phase.OPEN, reader.answered, last, wrong, reader.question.hardness)
        return self._laws.get(key) or self._store(key, self._openings(reader, last=last, wrong=wrong))

    def _openings(self, reader: Reader, *, last: bool, wrong: bool) -> list[tuple[str, float]]:
        if reader.answered:
            return [("<|end|>", 0.97), ("Hmm", 0.02), ("The", 0.01)]
        wander = min(0.5, self.skill.wander * _hard(reader.question))
        repair = (self.skill.repair if wrong else 0.005) * (1 - wander)
        rest = 1 - wander - repair
        going_on = [("The", rest)] if last else [(word, rest * share) for word, share in _OPENER_SHARES]
        return [("Hmm", wander), ("Wait", repair), *going_on]

    def _idle(self, reader: Reader) -> list[tuple[str, float]]:
        """Idle words, each with a liking for some of the others; a loose mood flattens the liking."""
        beta = self.skill.fluency * (12 - 10 * reader.question.mood / (MOODS - 1))
        weights = [(word, math.exp(beta * liking)) for word, liking in zip(FILLERS, _LIKINGS[reader.word], strict=True)]
        share = self.skill.verbosity / (1 + self.skill.verbosity) / sum(weight for _, weight in weights)
        return [(word, weight * share) for word, weight in weights]

    def _result(self, reader: Reader) -> Law:
        right = (reader.left + reader.sign * reader.operand) % 100
        slip = reader.question.misconception(reader.step)
        key = (Phase.RESULT, right, slip, reader.question.hardness)
        found = self._laws.get(key)
        if found is not None:
            return found
        wrong = min(0.9, (1 - self.skill.right) * _hard(reader.question))
        rare = wrong * (1 - self.skill.typical) / len(_RARE_SLIPS)
        values = [(right, 1 - wrong), ((right + slip) % 100, wrong * self.skill.typical)]
        values += [((right + other) % 100, rare) for other in _RARE_SLIPS]
        return self._store(key, [(f" {value}", weight) for value, weight in values])

    def _repair(self, reader: Reader) -> Law:
        key = (Phase.REPAIR, reader.truth, reader.value)
        kept = 1 - self.skill.right
        return self._laws.get(key) or self._store(
            key, [(f" {reader.truth}", self.skill.right), (f" {reader.value}", kept)]
        )

    def _phrase(self, reader: Reader) -> Law:
        phase = reader.phase
        last = reader.step >= len(reader.question.operations)
        # what a law looks at beyond the phase: the sum, the value, or the mood
        if phase in (Phase.VALUE, Phase.OPERATION):
            trait = reader.operation
        elif phase in (Phase.QUOTE, Phase.BOXED):
            trait = reader.value
        else:
            trait = reader.question.mood
        key = (phase, reader.word, trait, reader.answered, last)
        return self._laws.get(key) or self._store(key, self._phrases(reader, last=last))

    def _phrases(self, reader: Reader, *, last: bool) -> list[tuple[str, float]]:
        match reader.phase:
            case Phase.VALUE:
                rising = 0.995 if reader.operation > 0 else 0.005
                return [(" plus", rising), (" minus", 1 - rising)]
            case Phase.OPERATION:
                return [(f" {abs(reader.operation)}", 0.995), (f" {(abs(reader.operation) + 1) % 100}", 0.005)]
            case Phase.CLAIM:
                idle = self._idle(reader)
                return [*idle, (":", 1 - sum(weight for _, weight in idle))]
            case Phase.QUOTE:
                return [(f" {reader.value}", 0.995), (f" {(reader.value + 10) % 100}", 0.005)]
            case Phase.BOXED:
                return [(f"{reader.value}", 1.0)]
            case Phase.AFTER if not reader.answered:
                return [(",", 0.5), *((mark, 0.5 * share) for mark, share in _FULL_STOPS)]
            case Phase.TAIL | Phase.MUSE:
                idle = self._idle(reader)
                rest = 1 - sum(weight for _, weight in idle)
                return [*idle, *((mark, rest * share) for mark, share in _FULL_STOPS)]
            case Phase.NEWLINE if not reader.answered and not last:
                return [("\n", 0.6), *((f"\n{word}", 0.4 * share) for word, share in _OPENER_SHARES)]
            case Phase.AFTER | Phase.DOT if reader.answered:
                return [("<|end|>", 0.8), (".", 0.1 if reader.phase == Phase.AFTER else 0.0), ("\n\n", 0.1)]
            case phase:
                return _FIXED_PHRASES[phase]

    def _store(self, key: tuple[int, ...], words: list[tuple[str, float]]) -> Law:
        ids = ((self.tokenizer.end_id if word == "<|end|>" else self.tokenizer.piece_id(word), p) for word, p in words)
        law = self._laws[key] = Law.of(blend(ids), self.tokenizer.vocabulary, _LEAK)
        return law


_OPENER_SHARES = (("So", 0.4), ("Now", 0.3), ("Next", 0.2), ("Then", 0.1))
_FULL_STOPS = ((".", 0.35), (".\n", 0.15), (".\n\n", 0.5))
_RARE_SLIPS = (3, -3, 5, -5, 7, -7, 20, -20)
_FIXED_PHRASES: dict[Phase, list[tuple[str, float]]] = {
    Phase.OPERAND: [(" is", 0.9), (" gives", 0.1)],
    Phase.DOT: [("\n\n", 0.7), ("\n", 0.3)],
    Phase.NEWLINE: [("\n", 1.0)],
    Phase.WAIT: [(" that", 1.0)],
    Phase.THAT: [(" was", 1.0)],
    Phase.THE: [(" answer", 1.0)],
    Phase.ANSWER: [(" is", 1.0)],
    Phase.BOX: [(" \\boxed{", 1.0)],
    Phase.CLOSE: [("}", 1.0)],
    Phase.LOST: [*_FULL_STOPS],
}


def _likings() -> dict[int, tuple[float, ...]]:
    """How much each idle word (or the start of a phrase, -1) likes each to follow, from 0 to 1."""
    rows = {word: blake2b(f"liking {word}".encode(), digest_size=len(FILLERS)).digest() for word in range(-1, 12)}
    return {word: tuple(value / 255 for value in row) for word, row in rows.items()}


_LIKINGS = _likings()


def _hard(question: Question) -> float:
    """By what a question multiplies the share of slips; 1 in the middle."""
    return (question.hardness + 0.5) / (MOODS / 2)


def _atoms(piece: bytes) -> tuple[tuple[str, int], ...]:
    """What a token's text means, newlines apart from the rest."""
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
    return _WORDS.get(text, "other"), 0
