"""The toy language's grammar: a parser of solutions, one token at a time."""

from __future__ import annotations

from enum import IntEnum

from atts.testing.questions import Question
from atts.testing.tokenizer import FILLERS, OPENERS


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


class ReadingState:
    """What has been understood of the ids so far; takes one word at a time, and copies cheaply."""

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

    def copy(self) -> ReadingState:
        """An independent copy."""
        other = ReadingState.__new__(ReadingState)
        for name in ReadingState.__slots__:
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
    def is_last(self) -> bool:
        """Whether no sum is left to do."""
        return self.step >= len(self.question.operations)

    @property
    def result(self) -> int:
        """What the sum under way, as it is written, comes to."""
        return (self.left + self.sign * self.operand) % 100

    @property
    def operation(self) -> int:
        """The sum that comes next."""
        return self.question.operations[self.step % len(self.question.operations)]


def atoms(piece: bytes) -> tuple[tuple[str, int], ...]:
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
