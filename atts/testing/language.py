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
from hashlib import blake2b

from atts.core import TokenIds
from atts.testing.grammar import Phase, Reader, atoms
from atts.testing.laws import Law, blend
from atts.testing.questions import MOODS, Question, read_question
from atts.testing.tokenizer import FILLERS, SPECIALS, ToyTokenizer

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


class ToyModel:
    """A skill and a tokenizer: ids in, laws out. Equal models give equal laws, whatever they were asked before."""

    def __init__(self, skill: Skill, tokenizer: ToyTokenizer) -> None:
        self.skill = skill
        self.tokenizer = tokenizer
        self._atoms = tuple(atoms(piece) for piece in tokenizer.pieces)
        self._laws: dict[tuple[int, ...], Law] = {}
        self._questions: OrderedDict[TokenIds, Question] = OrderedDict()
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
        key = (Phase.OPEN, reader.answered, last, wrong, reader.question.hardness, reader.question.mood)
        return self._laws.get(key) or self._store(key, self._openings(reader, last=last, wrong=wrong))

    def _openings(self, reader: Reader, *, last: bool, wrong: bool) -> list[tuple[str, float]]:
        if reader.answered:
            return [("<|end|>", 0.97), ("Hmm", 0.02), ("The", 0.01)]
        wander = min(0.5, self.skill.wander * _hard(reader.question))
        repair = (self.skill.repair if wrong else 0.005) * (1 - wander)
        rest = 1 - wander - repair
        going_on = [("The", rest)] if last else self._choice(_OPENERS, reader, rest)
        return [("Hmm", wander), ("Wait", repair), *going_on]

    def _firmness(self, question: Question) -> float:
        """How settled the phrasing is, from 0 (anything goes) to `fluency` (nearly always the same)."""
        return self.skill.fluency * (1 - question.mood / (MOODS - 1))

    def _idle(self, reader: Reader) -> list[tuple[str, float]]:
        """Idle words, each with a liking for some of the others, and for going on at all."""
        firmness, likings = self._firmness(reader.question), _LIKINGS[reader.word]
        weights = [
            (word, math.exp((3 + 20 * firmness) * liking)) for word, liking in zip(FILLERS, likings, strict=False)
        ]
        going = self.skill.verbosity * math.exp(5 * firmness * (2 * likings[-1] - 1))
        share = going / (1 + going) / sum(weight for _, weight in weights)
        return [(word, weight * share) for word, weight in weights]

    def _choice(self, options: tuple[tuple[str, float], ...], reader: Reader, total: float) -> list[tuple[str, float]]:
        """One of several ways to say the same, the likeliest the likelier the firmer the phrasing."""
        power = 1 + 3 * self._firmness(reader.question)
        weights = [(word, share**power) for word, share in options]
        scale = total / sum(weight for _, weight in weights)
        return [(word, weight * scale) for word, weight in weights]

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
                comma = 0.5 - 0.45 * self._firmness(reader.question)
                return [(",", comma), *self._choice(_FULL_STOPS, reader, 1 - comma)]
            case Phase.TAIL | Phase.MUSE:
                idle = self._idle(reader)
                rest = 1 - sum(weight for _, weight in idle)
                return [*idle, *self._choice(_FULL_STOPS, reader, rest)]
            case Phase.NEWLINE if not reader.answered and not last:
                return [("\n", 0.6), *((f"\n{word}", share) for word, share in self._choice(_OPENERS, reader, 0.4))]
            case Phase.AFTER | Phase.DOT if reader.answered:
                return [("<|end|>", 0.8), (".", 0.1 if reader.phase == Phase.AFTER else 0.0), ("\n\n", 0.1)]
            case phase:
                return _FIXED_PHRASES[phase]

    def _store(self, key: tuple[int, ...], words: list[tuple[str, float]]) -> Law:
        ids = ((self.tokenizer.end_id if word == "<|end|>" else self.tokenizer.piece_id(word), p) for word, p in words)
        law = self._laws[key] = Law.of(blend(ids), self.tokenizer.vocabulary, _LEAK)
        if len(self._laws) > _REMEMBERED:  # the oldest is made again when it is asked for: laws depend on nothing else
            del self._laws[next(iter(self._laws))]
        return law


_REMEMBERED = 4096
"""Laws a model keeps at hand; a hundred problems of eight rollouts need a third of them."""
_OPENERS = (("So", 0.4), ("Now", 0.3), ("Next", 0.2), ("Then", 0.1))
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
    """How much each idle word (-1: a phrase's start) likes each to follow, from 0 to 1; last, to go on at all."""
    size = len(FILLERS) + 1
    rows = {word: blake2b(f"liking {word}".encode(), digest_size=size).digest() for word in range(-1, size - 1)}
    return {word: tuple(value / 255 for value in row) for word, row in rows.items()}


_LIKINGS = _likings()


def _hard(question: Question) -> float:
    """By what a question multiplies the share of slips; 1 in the middle."""
    return (question.hardness + 0.5) / (MOODS / 2)
