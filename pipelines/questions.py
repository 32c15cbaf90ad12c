"""Scores that the target gives in words: a rating from 0 to 9, or a verdict of one word.

Both cost single tokens after a text that the target has mostly read, so a model that only shows its
likeliest next tokens can give them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atts.engine import Tokenizer

RATING = "\n\nI think the quality score is: "
"""Stands before the digit of a rating, as SpecReason has it."""

VERDICT = "\n\nIs the last step correct? Answer {first} or {second}.\nAnswer: "
"""Stands before the word of a verdict. It is asked in both orders: models prefer one position."""

YES = "Yes"
NO = "No"


@dataclass(frozen=True, slots=True)
class Question:
    """A text that ends where the target would answer, and the words whose chances are compared."""

    text: str
    words: tuple[str, ...]

    def texts(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the ids of the question, and of each word."""
        return tokenizer.encode(self.text), [tokenizer.encode(word) for word in self.words]


RATING_QUESTIONS = (Question(RATING, tuple(str(digit) for digit in range(10))),)
VERDICT_QUESTIONS = tuple(
    Question(VERDICT.format(first=first, second=second), (YES, NO))
    for first, second in ((YES, NO), (NO, YES))
)


def rating_score(answers: Sequence[Sequence[float]]) -> float:
    """Return 10 less the mean digit under the target's distribution: 1 is the best, 10 the worst.

    >>> round(rating_score([[-9.0] * 9 + [0.0]]), 2)
    1.01
    """
    shares = _shares(answers[0])
    mean = math.fsum(digit * share for digit, share in enumerate(shares))
    return 10 - mean


def verdict_score(answers: Sequence[Sequence[float]]) -> float:
    """Return one over the target's chance of "Yes" against "No", both orders weighing alike.

    >>> verdict_score([[-1.0, -1.0], [-2.0, -2.0]])
    2.0
    """
    chances = [_shares(answer)[0] for answer in answers]
    mean = math.fsum(chances) / len(chances)
    if math.isnan(mean):
        return math.nan
    return 1 / mean if mean > 0 else math.inf


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Return the words' chances among each other; NaN where the target gives none of them any."""
    top = max(logprobs)
    if not math.isfinite(top):
        return [math.nan] * len(logprobs)
    masses = [math.exp(value - top) for value in logprobs]
    total = math.fsum(masses)
    return [mass / total for mass in masses]
