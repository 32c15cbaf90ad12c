"""Vocabulary of answers, read from data files: number words, neutral words, and phrases that have one meaning."""

import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from string import ascii_lowercase
from typing import TypeVar

import msgspec

_Kind = TypeVar("_Kind")


class Tables:
    """One data file."""

    def __init__(self, name: str | Path) -> None:
        """Read a file beside this module, or at a path of its own."""
        self._entries = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))

    def words(self, name: str) -> frozenset[str]:
        """A list of words as a set."""
        return frozenset(self._entries[name].split())

    def patterns(self, part: str = "") -> dict[str, re.Pattern[str]]:
        """The regular expressions of the file, or of a part: alternatives a line each, one in «» put in where named."""
        forms = {
            name: form for name, form in (self._entries[part] if part else self._entries).items() if form == str(form)
        }

        def written(name: str) -> str:
            lines = [line for line in forms[name].split("\n") if line]
            return re.sub(r"«(\w+)»", lambda found: written(found[1]), "|".join(lines))

        return {name: re.compile(written(name)) for name in forms}

    def table(self, name: str, kind: type[_Kind]) -> _Kind:
        """An entry as a value of this type."""
        return msgspec.convert(self._entries[name], kind)


_WORDS = Tables("words.toml")
words, table = _WORDS.words, _WORDS.table


def spelled(meanings: Mapping[str, str]) -> dict[str, str]:
    """What each spelling means, from a table of the spellings of each meaning.

    >>> spelled({"<=": "le leq"})
    {'le': '<=', 'leq': '<='}
    """
    return {spelling: meaning for meaning, spellings in meanings.items() for spelling in spellings.split()}


NEGATIONS = words("negations")
"""Words after which what precedes them is no longer simply the answer."""

LARGE, _BASES = table("large", dict[str, int]), table("bases", dict[str, int])
_SMALL = {word: value for value, word in enumerate(table("small", str).split())}
_VALUES = _SMALL | {word: 20 + 10 * index for index, word in enumerate(table("tens", str).split())}
_NAMED = spelled(table("shares", dict[str, str])).items()
SHARES = {form: int(count) for share, count in _NAMED for form in (share, f"{share}s")}
"""Parts of a whole by name: a third is one in three."""
NEUTRAL, LABELS, APPROXIMATE = words("neutral"), words("labels"), words("rough") | words("alike")
ATTACHED = words("attached")
"""Letters that, right after a number and last in an answer, are its unit and not a product of variables."""
SETS = table("sets", dict[str, str])
MEANINGS = {fixed: re.compile(form) for fixed, form in table("meanings", dict[str, str]).items()}


def number_in_words(text: str) -> Fraction | None:
    """The number a phrase such as "twenty-seven", "minus four" or "two thirds" spells, else None.

    >>> number_in_words("two thousand and twenty-five")
    Fraction(2025, 1)
    """
    whole, _, rest = text.rpartition(" and ")
    if whole and (rest.startswith(("a ", "an ")) or " " in rest.strip()):  # one and a half
        one, two = number_in_words(whole), number_in_words(rest)
        return one + two if one and two and two < 1 else None
    found = [word for word in re.findall(r"[a-z]+", text.lower()) if word != "and"]
    sign = -1 if found[:1] in (["minus"], ["negative"]) else 1
    found = found[sign < 0 :]
    if share := SHARES.get(found[-1], 0) if found else 0:
        found = found[:-1] if found[:-1] not in ([], ["a"], ["an"]) else ["one"]
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
    return Fraction(sign * (total + current), share or 1)


def base(name: str) -> Fraction | None:
    """The base of a numeral by its digits or its name."""
    value = int(name) if name.isdigit() and len(name) < 3 else _BASES.get(name.lower())
    return None if value is None else Fraction(value)


def meaning(phrase: str) -> str:
    """What a phrase such as "there are no solutions" says in one fixed form, or the phrase itself."""
    return next((fixed for fixed, form in MEANINGS.items() if form.fullmatch(phrase)), phrase)


_MONTHS = {form: index for index, name in enumerate(table("months", str).split(), 1) for form in (name, name[:3])}
_DATE = re.compile(
    rf"(?:(?P<y>\d{{4}})-(?P<m>\d\d)-(?P<d>\d\d))|(?:(?P<d1>\d\d?)(?:st|nd|rd|th)?\s+(?:of\s+)?)?"
    rf"(?P<name>{'|'.join(_MONTHS)})\b\.?(?:\s+(?P<d2>\d\d?)(?:st|nd|rd|th)?(?!\d))?(?:,?\s+(?P<y1>\d{{4}}))?"
)


def date_in_words(phrase: str) -> str:
    """A date in one fixed form, its year left out where it is not said; empty for what is none.

    >>> date_in_words("March 5, 2024") == date_in_words("5th of march 2024") == date_in_words("2024-03-05")
    True
    """
    found = _DATE.fullmatch(phrase.strip().lower())
    if found is None or not (day := found["d"] or found["d1"] or found["d2"]) or (found["d1"] and found["d2"]):
        return ""
    month = int(found["m"]) if found["m"] else _MONTHS[found["name"]]
    return f"date {found['y'] or found['y1'] or ''} {month} {int(day)}"


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


_PIECE = re.compile(r"[^\W_]+|(?<=\d)['\"]+|[-+*/^=<>!?%|\\]")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")


def squashed(text: str) -> str:
    """A phrase as it is compared: lower case, punctuation and a leading article dropped, operators kept.

    >>> squashed("An  Ellipse.")
    'ellipse'
    """
    pieces = _PIECE.findall(_HYPHEN.sub(" ", text.lower()))
    if len(pieces) > 1 and pieces[0] in ("a", "an", "the") and pieces[1].isalnum():
        pieces = pieces[1:]
    return " ".join(pieces)
