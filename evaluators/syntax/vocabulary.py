"""Vocabulary of answers: units, number words, separators, and words that mean there is no value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

SEPARATORS = frozenset({"and", "or", "und", "et"})
PERCENT = frozenset({"percent", "pct", "percentage", "percents"})
DEGREES = frozenset({"degree", "degrees", "deg"})
NEGATIONS = frozenset(
    """not no cannot can't never none neither nor without except unless impossible undefined undetermined unknown
    invalid infinitely nonexistent exist exists isn't doesn't don't nan null false true if when for where such that
    is are was were be only both can could may might either since converts becomes equals gives""".split()
)
"""Words after which what precedes them is no longer simply the answer."""

LARGE = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16,
}  # fmt: skip
_WORD = re.compile(r"[a-z]+")


def number_in_words(text: str) -> int | None:
    """The integer a phrase such as "twenty-seven" or "three hundred and five" spells, else None.

    >>> number_in_words("two thousand and twenty-five")
    2025
    """
    words = [word for word in _WORD.findall(text.lower()) if word != "and"]
    if not words or len(words) > 12 or not all(word in _VALUES or word in LARGE for word in words):
        return None
    total = current = 0
    for word in words:
        if word in _VALUES:
            current += _VALUES[word]
        elif word in ("hundred", "dozen"):
            current = max(current, 1) * LARGE[word]
        else:
            total, current = total + max(current, 1) * LARGE[word], 0
    return total + current


_SCALES: tuple[tuple[str, str, str], ...] = (
    ("length", "1", "m meter meters metre metres"),
    ("length", "1/100", "cm centimeter centimeters centimetre centimetres"),
    ("length", "1/1000", "mm millimeter millimeters millimetre millimetres"),
    ("length", "1000", "km kilometer kilometers kilometre kilometres"),
    ("imperial", "1", "in inch inches"),
    ("imperial", "12", "ft foot feet"),
    ("imperial", "36", "yd yard yards"),
    ("imperial", "63360", "mi mile miles"),
    ("time", "1", "s sec secs second seconds"),
    ("time", "60", "min mins minute minutes"),
    ("time", "3600", "h hr hrs hour hours"),
    ("time", "86400", "day days"),
    ("time", "604800", "week weeks"),
    ("year", "1", "year years yr yrs"),
    ("year", "1/12", "month months"),
    ("mass", "1", "g gram grams"),
    ("mass", "1000", "kg kgs kilogram kilograms"),
    ("mass", "1/1000", "mg milligram milligrams"),
    ("pound", "1", "lb lbs pound pounds"),
    ("pound", "1/16", "oz ounce ounces"),
    ("pound", "2000", "ton tons"),
    ("money", "1", "dollar dollars usd buck bucks"),
    ("money", "1/100", "cent cents"),
    ("volume", "1", "l liter liters litre litres"),
    ("volume", "1/1000", "ml milliliter milliliters"),
    ("kitchen", "1", "cup cups"),
    ("kitchen", "2", "pint pints"),
    ("kitchen", "4", "quart quarts"),
    ("kitchen", "16", "gallon gallons"),
    ("morning", "1", "am"),
    ("afternoon", "1", "pm"),
)
_UNITS = {word: (dimension, Fraction(scale)) for dimension, scale, names in _SCALES for word in names.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_AFTER = {"squared": "2", "cubed": "3"}
_RATES = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "fps": "foot per second"}
ATTACHED = frozenset(
    """cm mm km kg ft in yd mi lb lbs oz ml min sec hr hrs mph kph fps am pm th st nd rd mg dm hz kw kwh rpm sq
    cu""".split()
)
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
        elif token in _AFTER:
            yield _AFTER[token]
        else:
            yield from str(_RATES.get(token, token)).split()


PRODUCTS_OF_THREE = frozenset(
    """odd yes two six ten one red all any sum big mon tue wed thu fri sat sun may jan feb mar apr jun jul aug sep oct
    nov dec low old new day man men boy dog cat car bus box top end out the off per for but are was has had can cow
    pig hen egg pen cup hat bat ant bee fox tie win nil max min gcd lcm mod deg not nor and yen won bit set ray arc
    row""".split()
)
"""Three-letter words that are not x*y*z."""


def is_word(letters: str) -> bool:
    """Whether a run of letters in maths is more likely a word than a product of variables."""
    lower = letters.lower()
    if len(letters) <= 2:
        return False
    if any(lower in run for run in ("abcdefghijklmnopqrstuvwxyz",)):
        return letters.isupper()
    if len(letters) == 3:
        return lower in PRODUCTS_OF_THREE or not (letters.islower() or letters.isupper() or letters[1:].isupper())
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
