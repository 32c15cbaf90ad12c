"""Vocabulary of answers, read from data files: number words, neutral words, phrases of one meaning,
and units.
"""

import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
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
        """The regular expressions of the file, or of a part: alternatives a line each, one in «»
        put in where named.
        """
        forms = {
            name: form
            for name, form in (self._entries[part] if part else self._entries).items()
            if form == str(form)
        }

        def written(name: str) -> str:
            lines = [line for line in forms[name].split("\n") if line]
            return re.sub(r"«(\w+)»", lambda found: written(found[1]), "|".join(lines))

        return {name: re.compile(written(name)) for name in forms}

    def table(self, name: str, kind: type[_Kind]) -> _Kind:
        """An entry as a value of this type."""
        return msgspec.convert(self._entries[name], kind)


_WORDS = Tables("words.toml")
words = _WORDS.words
table = _WORDS.table
FORMS = _WORDS.patterns("forms")


def spelled(meanings: Mapping[str, str]) -> dict[str, str]:
    """What each spelling means, from a table of the spellings of each meaning."""
    return {
        spelling: meaning
        for meaning, spellings in meanings.items()
        for spelling in spellings.split()
    }


# words after which what precedes them is no longer simply the answer
NEGATIONS = words("negations")

LARGE = table("large", dict[str, int])
_BASES = table("bases", dict[str, int])
_SMALL = {word: value for value, word in enumerate(table("small", str).split())}
_VALUES = _SMALL | {word: 20 + 10 * index for index, word in enumerate(table("tens", str).split())}
_NAMED = spelled(table("shares", dict[str, str])).items()
SHARES = {form: int(count) for share, count in _NAMED for form in (share, f"{share}s")}
"""Parts of a whole by name: a third is one in three."""
NEUTRAL = words("neutral")
LABELS = words("labels")
APPROXIMATE = words("rough") | words("alike")
ATTACHED = words("attached")
"""Letters that, right after a number and last in an answer, are its unit and not a product of
variables.
"""
SETS = table("sets", dict[str, str])
MEANINGS = {fixed: re.compile(form) for fixed, form in table("meanings", dict[str, str]).items()}


def number_in_words(text: str) -> Fraction | None:
    """The number a phrase such as "twenty-seven", "minus four" or "two thirds" spells, else None."""
    whole, _, rest = text.rpartition(" and ")
    if whole and (rest.startswith(("a ", "an ")) or " " in rest.strip()):  # one and a half
        one = number_in_words(whole)
        two = number_in_words(rest)
        return one + two if one and two and two < 1 else None
    found = [word for word in re.findall(r"[a-z]+", text.lower()) if word != "and"]
    sign = -1 if found[:1] in (["minus"], ["negative"]) else 1
    found = found[sign < 0 :]
    if found[:1] in (["a"], ["an"]) and {*found[1:2]} & LARGE.keys():
        found[0] = "one"
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
            total = total + max(current, 1) * LARGE[word]
            current = 0
    return Fraction(sign * (total + current), share or 1)


def base(name: str) -> Fraction | None:
    """The base of a numeral by its digits or its name."""
    value = int(name) if name.isdigit() and len(name) < 3 else _BASES.get(name.lower())
    return None if value is None else Fraction(value)


_MONTHS = {
    form: index
    for index, name in enumerate(table("months", str).split(), 1)
    for form in (name, name[:3])
}


def date_in_words(phrase: str) -> str:
    """A date in one fixed form, its year left out where it is not said; empty for what is none."""
    found = FORMS["date"].fullmatch(phrase.strip().lower())
    if (
        found is None
        or not (day := found["d"] or found["d1"] or found["d2"])
        or (found["d1"] and found["d2"])
    ):
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
        return lower in _WORDS_OF_THREE or letters.istitle()
    return True


def squashed(text: str) -> str:
    """A phrase as it is compared: lower case, punctuation and a leading article dropped, operators
    kept.
    """
    pieces = FORMS["piece"].findall(FORMS["hyphen"].sub(" ", text.lower()))
    if len(pieces) > 1 and pieces[0] in ("a", "an", "the") and pieces[1].isalnum():
        pieces = pieces[1:]
    return " ".join(pieces)


_DATA = Tables("units.toml")
_UNITS = _DATA.patterns("forms")
_FILLERS, _NO_COUNTS, TAILS, _LINKS = (
    _DATA.words(name) for name in ("fillers", "no_counts", "tails", "links")
)
_POWERS = _DATA.table("powers", dict[str, int])
_SPELLED_OUT = _DATA.table("spelled_out", dict[str, str])
_UNWEIGHED = _LINKS | _FILLERS
_BESIDE = _UNWEIGHED | _POWERS.keys() | {"u"}
_NEVER_FIRST = _LINKS | {"squared", "cubed"}

Dimension = tuple[tuple[str, int], ...]
Measure = tuple[Dimension, Fraction]


def _combined(parts: list[tuple[Measure, int]]) -> Measure:
    total: dict[str, int] = {}
    scale = Fraction(1)
    for (dimension, factor), power in parts:
        scale *= factor**power
        for name, size in dimension:
            total[name] = total.get(name, 0) + size * power
    return tuple(sorted((name, size) for name, size in total.items() if size)), scale


def _defined(text: str, known: dict[str, Measure]) -> Measure:
    """A definition such as "1/1000 kg m^-1"."""
    words = text.split()
    scale = Fraction(words.pop(0)) if text[0].isdigit() else Fraction(1)
    parts = [each.partition("^") for each in words]
    return _combined(
        [(((), scale), 1), *((known[name], int(power or 1)) for name, _, power in parts)]
    )


def _catalogue() -> tuple[dict[str, Measure], dict[str, Measure]]:
    """Units by symbol, as written, and by name, in lower case and in the singular."""
    symbols: dict[str, Measure] = {
        name: (((name, 1),), Fraction(1)) for name in _DATA.words("bases")
    }
    names: dict[str, Measure] = {
        noun: (((f"#{noun}", 1),), Fraction(1)) for noun in _DATA.words("nouns")
    }
    names |= dict.fromkeys(_DATA.words("counters"), ((), Fraction(1)))
    prefixes = _DATA.table("prefixes", dict[str, tuple[str, str]])
    for symbol, (definition, spellings) in _DATA.table(
        "scaled", dict[str, tuple[str, str]]
    ).items():
        dimension, scale = symbols[symbol] = _defined(definition, symbols)
        names |= dict.fromkeys(spellings.split(), symbols[symbol])
        for prefix, (factor, name) in prefixes.items():
            larger = dimension, scale * Fraction(factor)
            symbols.setdefault(prefix + symbol, larger)
            names |= {name + spelling: larger for spelling in spellings.split()}
    symbols = {
        symbol: found for symbol, found in symbols.items() if symbol not in _DATA.words("products")
    }
    for spelling, definition in spelled(_DATA.table("fixed", dict[str, str])).items():
        symbols[spelling] = names[spelling] = _defined(definition, symbols)
    return symbols, names


SYMBOLS, _NAMES = _catalogue()
_IRREGULAR = _DATA.table("irregular", dict[str, str])


@lru_cache(maxsize=2048)
def entry(word: str) -> Measure | None:
    """What one word measures: a unit, nothing at all for what counts anything, or itself for a
    known noun.
    """
    if word in SYMBOLS:
        return SYMBOLS[word]
    lower = word.lower()
    singulars = (
        re.sub(f"(?<=..){ending}$", instead, lower)
        for ending, instead in (("ies", "y"), ("es", ""), ("s", ""))
    )
    for each in (lower, _IRREGULAR.get(lower, lower), *singulars):
        if each in _NAMES:
            return _NAMES[each]
    if _UNITS["plural"].fullmatch(word) and lower not in _NO_COUNTS:
        return ((f"#{lower.removesuffix('s')}", 1),), Fraction(1)
    return SYMBOLS.get(lower) if len(word) > 1 else None


@lru_cache(maxsize=2048)
def measure(unit: str) -> Measure | None:
    """Dimension and scale of a unit phrase such as "square feet" or "cm^2", None when a word is
    unknown.
    """
    parts: list[tuple[Measure, int]] = []
    sign = 1
    power = 1
    tokens: list[str] = re.findall(r"[A-Za-z]+(?:-[a-z]+)?|\^-?\d+|/", unit)
    for word in " ".join(
        _SPELLED_OUT.get(token, token) for token in tokens
    ).split():  # mph and the like spelled out
        if word in ("per", "/"):
            sign = -1
        elif word[0] == "^":
            if not parts:
                return None
            last, size = parts.pop()
            parts.append((last, size * int(word[1:])))
        elif word in _POWERS:
            power = _POWERS[word]
        elif word not in _UNWEIGHED:
            found = entry(word)
            if found is None:
                return None
            parts.append((found, sign * power))
            power = 1
    dimension, scale = _combined(parts)
    return (
        dimension
        if is_generic(dimension)
        else tuple(each for each in dimension if each[0] != "unit")
    ), scale


def is_generic(dimension: Dimension) -> bool:
    """Whether an amount is of squares or cubes of an unnamed length, as in "5 square units"."""
    return dimension in ((("unit", 2),), (("unit", 3),))


_GREEK = {"\\mu": "u", "\\Omega": "ohm"}


def unit_at(text: str, start: int) -> tuple[str, int] | None:
    """The longest unit phrase of known words that starts here, macros and braces passed over, and
    where it ends.
    """
    position = start
    depth = 0
    said = list[str]()
    held = False
    found: tuple[str, int] | None = None
    while True:
        step = _UNITS["step"].match(text, position)
        if step is None:
            return found
        position = step.end()
        if step["skip"]:
            depth += (step["skip"] == "{") - (step["skip"] == "}")
            if depth < 0:
                return found
        elif step["word"]:
            word = _GREEK.get(step["word"], step["word"])
            if said and (said[-1] == "u" or (word == "ohm" and said[-1] in "kMmG")):
                word = said.pop() + word
            is_beside = word in _BESIDE or (
                word in "kMmG" and _UNITS["ohm"].match(text, position) is not None
            )
            is_unit = word.lower() not in ("am", "pm") and (
                word in _SPELLED_OUT or entry(word) is not None
            )
            is_preposition = word == "in" and (held or _UNITS["letter"].match(text, position))
            if is_preposition or not (is_beside or is_unit) or (not said and word in _NEVER_FIRST):
                return found
            said.append(word)
            if is_beside:
                continue
            held = True
        elif not said or (step["power"] and not held):
            return found
        elif step["power"]:
            said.append("^" + step["power"].replace(" ", ""))
        else:
            said += ["/"] if step["divide"] else []
            held = False
            continue
        if (
            depth == 0
            and held
            and (said[-1][0] == "^" or entry(said[-1]) or said[-1] in _SPELLED_OUT)
        ):
            found = " ".join(said), position
