"""The toy language's grammar: a parser of solutions, one token at a time."""

from __future__ import annotations

from atts.testing.questions import Question
from atts.testing.tokenizer import FILLERS, LANGUAGE, OPENERS

_KINDS = LANGUAGE.words | dict.fromkeys(OPENERS, "opener")
_NEXT = LANGUAGE.phases


class ReadingState:
    """What has been understood of the ids so far; takes one word at a time, and copies cheaply."""

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
        """A new answer begins."""
        self.question = question
        self.prompt = None
        self.phase = "open"
        self.word = -1
        self.step = self.steps = 0  # sums done; blank lines passed
        self.value = self.left = question.start  # as last claimed; as quoted in the step under way
        self.sign = 1
        self.operand = 0
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
    return _KINDS.get(text, "other"), 0
