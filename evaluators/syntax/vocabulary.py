"""Vocabulary of answers: units, number words, separators, and words that mean there is no value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from string import ascii_lowercase

from atts.evaluators.syntax.words import spelled, table, words

SEPARATORS, PERCENT, DEGREES = words("separators"), words("percent"), words("degrees")
NEGATIONS = words("negations")
"""Words after which what precedes them is no longer simply the answer."""

LARGE, BASES = table("large", dict[str, int]), table("bases", dict[str, int])
_SMALL = {word: value for value, word in enumerate(table("small", str).split())}
_VALUES = _SMALL | {word: 20 + 10 * index for index, word in enumerate(table("tens", str).split())}


def number_in_words(text: str) -> int | None:
    """The integer a phrase such as "twenty-seven" or "three hundred and five" spells, else None.

    >>> number_in_words("two thousand and twenty-five")
    2025
    """
    found = [word for word in re.findall(r"[a-z]+", text.lower()) if word != "and"]
    if not found or len(found) > 12 or not all(word in _VALUES or word in LARGE for word in found):
        return None
    total = current = 0
    for word in found:
        if word in _VALUES:
            current += _VALUES[word]
        elif word in ("hundred", "dozen"):
            current = max(current, 1) * LARGE[word]
        else:
            total, current = total + max(current, 1) * LARGE[word], 0
    return total + current


_UNITS = {
    word: (dimension, Fraction(scale))
    for dimension, scales in table("units", dict[str, dict[str, str]]).items()
    for word, scale in spelled(scales).items()
}
_POWERS = table("powers", dict[str, int])
_SPELLED_OUT = table("spelled_out", dict[str, str])
ATTACHED = words("attached")
"""Letters that, right after a number and last in an answer, are its unit and not a product of variables."""

Dimension = tuple[tuple[str, int], ...]


def measure(unit: str) -> tuple[Dimension, Fraction] | None:
    """Dimension and scale of a unit phrase such as "square feet" or "cm^2", None when a word is unknown.

    >>> measure("hours") == measure("hour")
    True
    """
    total: dict[str, int] = {}
    scale = Fraction(1)
    sign, power, last = 1, 1, ""
    for word in _unit_words(unit):
        if word in ("per", "/", "an", "a", "each"):
            sign = -1 if word in ("per", "/") else sign
        elif word in _UNITS:
            dimension, factor = _UNITS[word]
            total[dimension] = total.get(dimension, 0) + sign * power
            scale *= factor ** (sign * power)
            power, last = 1, word
        elif word.isdigit() and last and len(word) < 3:
            extra = sign * (int(word) - 1)
            total[_UNITS[last][0]] += extra
            scale *= _UNITS[last][1] ** extra
        elif word in _POWERS:
            power = _POWERS[word]
        else:
            return None
    return (tuple(sorted((name, size) for name, size in total.items() if size)), scale) if last else None


def _unit_words(unit: str) -> Iterator[str]:
    """The words of a unit phrase; exponents as digits, rates such as mph spelled out."""
    for token in re.findall(r"[a-z]+|\^\s*\{?\s*-?\d+|/", unit.lower()):
        if token.startswith("^"):
            yield re.sub(r"\D", "", token)
        else:
            yield from str(_SPELLED_OUT.get(token, token)).split()


_WORDS_OF_THREE = words("words_of_three")


def is_word(letters: str) -> bool:
    """Whether a run of letters in maths is more likely a word than a product of variables."""
    lower = letters.lower()
    if len(letters) <= 2:
        return False
    if lower in ascii_lowercase:
        return letters.isupper()
    if len(letters) == 3:
        return lower in _WORDS_OF_THREE or not (letters.islower() or letters.isupper() or letters[1:].isupper())
    return True


_PIECE = re.compile(r"[^\W_]+|[-+*/^=<>!%|\\]")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")


def squashed(text: str) -> str:
    """A phrase as it is compared: lower case, punctuation and a leading article dropped, operators kept.

    >>> squashed("An  Ellipse.")
    'ellipse'
    """
    pieces = _PIECE.findall(_HYPHEN.sub(" ", text.lower()))
    if len(pieces) > 1 and pieces[0] in ("a", "an", "the"):
        pieces = pieces[1:]
    return " ".join(pieces)
