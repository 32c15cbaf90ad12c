"""The toy language model: next-token distributions that depend on the previous ids alone.

A solution is a chain of steps ended by blank lines, `So we take: 17 plus 5 is 22.`, and a last one,
`The answer is \\boxed{31}.` A model that slips goes on from its wrong value, so a wrong step makes
a wrong answer, unless some later step (`Wait that was 22.`) repairs it. How often a model slips,
notices and rambles is its `Skill`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from atts.core import Recent, TokenIds
from atts.testing.distributions import Distribution
from atts.testing.grammar import ReadingState, atoms
from atts.testing.questions import MOODS, Question, read_question
from atts.testing.tokenizer import FILLERS, LANGUAGE, SPECIALS, ToyTokenizer

_ASSISTANT = SPECIALS.index("<|assistant|>")
_LEAK = 1e-4  # shared by the whole vocabulary, so that nothing is impossible
_QUESTIONS_KEPT = 4096
_DISTRIBUTIONS_KEPT = 4096  # a hundred problems of eight rollouts need a third of them


@dataclass(frozen=True, slots=True)
class Skill:
    """What a toy model is good at; every field is a probability but `fluency` and `verbosity`.

    `right`: a step of middling hardness comes out right. `typical`: a slip is the question's usual
    one, which lets slips repeat across samples and makes them less surprising to a scorer.
    `repair`: a wrong value is noticed at the next step. `wander`: a step says nothing. `fluency`
    sharpens the phrasing; `verbosity` is the mean number of idle words per phrase. The target finds
    a slip of the draft the more surprising the more often it is `right` and the less `typical` the
    slip, and the surprise stands out the more the fewer idle words surround it.
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
    """A skill and a tokenizer: ids in, next-token distributions out; equal models give equal ones."""

    def __init__(self, skill: Skill, tokenizer: ToyTokenizer) -> None:
        self.skill = skill
        self.tokenizer = tokenizer
        self._atoms = tuple(atoms(piece) for piece in tokenizer.pieces)
        self._known: Recent[tuple[object, ...], Distribution] = Recent(_DISTRIBUTIONS_KEPT)

    def read(self, ids: Sequence[int], state: ReadingState | None = None) -> ReadingState:
        """A state after `ids`; going on from `state`, which is left as it was, when one is given."""
        # ids that open no assistant's turn are a text to go on with: its question is made from the
        # first id alone
        state = (
            ReadingState(_question(self.tokenizer, (ids[0],))) if state is None else state.copy()
        )
        for index in ids:
            self.advance(state, index)
        return state

    def advance(self, state: ReadingState, index: int) -> None:
        """Read one id, in place."""
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
        else:  # what the system and the user say is read as one text
            state.prompt = state.prompt or []

    def distribution(self, state: ReadingState) -> Distribution:
        """The distribution of the next id."""
        key = _key(state)
        return self._known.get(key) or self._store(key, self._words(state))

    def _words(self, state: ReadingState) -> list[tuple[str, float]]:
        """What may come next, with weights."""
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
        """How settled the phrasing is, from 0 (anything goes) to `fluency` (nearly always the
        same).
        """
        return self.skill.fluency * (1 - question.mood / (MOODS - 1))

    def _idle(self, state: ReadingState) -> list[tuple[str, float]]:
        """Idle words, each with a liking for some of the others, and for going on at all."""
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
        """One of several ways to say the same, the likeliest the likelier the firmer the phrasing."""
        power = 1 + 3 * self._firmness(state.question)
        weights = [(word, share**power) for word, share in options.items()]
        scale = total / sum(weight for _, weight in weights)
        return [(word, weight * scale) for word, weight in weights]

    def _store(self, key: tuple[object, ...], words: list[tuple[str, float]]) -> Distribution:
        weights: dict[int, float] = {}
        for word, weight in words:
            index = self.tokenizer.end_id if word == "<|end|>" else self.tokenizer.piece_id(word)
            if index is not None:  # the other dialect lacks some tokens
                weights[index] = weights.get(index, 0.0) + weight
        found = self._known[key] = Distribution.of(weights, self.tokenizer.vocabulary, _LEAK)
        return found


@lru_cache(_QUESTIONS_KEPT)
def _question(tokenizer: ToyTokenizer, prompt: TokenIds) -> Question:
    return read_question(tokenizer.decode(prompt))


def _likings() -> dict[int, tuple[float, ...]]:
    """How much each idle word (-1: a phrase's start) likes each to follow, from 0 to 1; last, to go
    on at all.
    """
    size = len(FILLERS) + 1
    rows = {
        word: blake2b(f"liking {word}".encode(), digest_size=size).digest()
        for word in range(-1, size - 1)
    }
    return {word: tuple(value / 255 for value in row) for word, row in rows.items()}


_LIKINGS = _likings()


def _hard(question: Question) -> float:
    """By what a question multiplies the share of slips; 1 in the middle."""
    return (question.hardness + 0.5) / (MOODS / 2)


def _key(state: ReadingState) -> tuple[object, ...]:
    """All that the next words depend on, besides the model's skill."""
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
