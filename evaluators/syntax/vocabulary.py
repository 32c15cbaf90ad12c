"""The vocabulary of answers, read from data files: number words, synonyms and units."""

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
    """The tables of one TOML file."""

    def __init__(self, name: str | Path) -> None:
        """Read the data file `name`. A relative path starts at the folder of this module."""
        path = Path(__file__).parent / name
        self._entries = tomllib.loads(path.read_text(encoding="utf-8"))

    def words(self, name: str) -> frozenset[str]:
        """Return the words of the list `name` in the file."""
        return frozenset(self._entries[name].split())

    def patterns(self, part: str = "") -> dict[str, re.Pattern[str]]:
        """Compile the regular expressions of the file, or of one of its sections.

        The lines of an expression are alternatives. «name» stands for the expression of this name.
        """
        entries = self._entries[part] if part else self._entries
        forms = {name: form for name, form in entries.items() if isinstance(form, str)}

        def written(name: str) -> str:
            lines = [line for line in forms[name].split("\n") if line]
            return re.sub(r"«(\w+)»", lambda match: written(match[1]), "|".join(lines))

        return {name: re.compile(written(name)) for name in forms}

    def table(self, name: str, kind: type[_Kind]) -> _Kind:
        """Return the entry `name` of the file, converted to the type `kind`."""
        return msgspec.convert(self._entries[name], kind)


_WORDS = Tables("words.toml")
words = _WORDS.words
table = _WORDS.table
FORMS = _WORDS.patterns("forms")


def spelled(meanings: Mapping[str, str]) -> dict[str, str]:
    """Return a dictionary from each spelling to its meaning. `meanings` maps each meaning to its
    spellings, separated by spaces.
    """
    return {
        spelling: meaning
        for meaning, spellings in meanings.items()
        for spelling in spellings.split()
    }


# Words after an answer that change its meaning.
NEGATIONS = words("negations")

LARGE = table("large", dict[str, int])
_BASES = table("bases", dict[str, int])
_SMALL = {word: value for value, word in enumerate(table("small", str).split())}
_VALUES = _SMALL | {word: 20 + 10 * index for index, word in enumerate(table("tens", str).split())}
_NAMED = spelled(table("shares", dict[str, str])).items()
SHARES = {form: int(count) for share, count in _NAMED for form in (share, f"{share}s")}
"""The denominator of each fraction with a name of its own, such as 3 for "third" and "thirds"."""
NEUTRAL = words("neutral")
LABELS = words("labels")
APPROXIMATE = words("rough") | words("alike")
ATTACHED = words("attached")
"""Letters, such as "cm", that are a unit after a number at the end of the answer."""
SETS = table("sets", dict[str, str])
MEANINGS = {fixed: re.compile(form) for fixed, form in table("meanings", dict[str, str]).items()}


def number_in_words(text: str) -> Fraction | None:
    """Return the number that a phrase spells, such as "twenty-seven", "minus four" or "two thirds"."""
    whole, _, rest = text.rpartition(" and ")
    # "and" may join a whole number and a fraction, as in "one and a half".
    if whole and (rest.startswith(("a ", "an ")) or " " in rest.strip()):
        one = number_in_words(whole)
        two = number_in_words(rest)
        return one + two if one and two and two < 1 else None
    spelled_out = [word for word in re.findall(r"[a-z]+", text.lower()) if word != "and"]
    sign = 1
    if spelled_out[:1] in (["minus"], ["negative"]):
        sign = -1
        spelled_out = spelled_out[1:]
    if spelled_out[:1] in (["a"], ["an"]) and {*spelled_out[1:2]} & LARGE.keys():
        spelled_out[0] = "one"
    share = SHARES.get(spelled_out[-1], 0) if spelled_out else 0
    if share:
        counted = spelled_out[:-1]
        spelled_out = ["one"] if counted in ([], ["a"], ["an"]) else counted
    if not spelled_out or len(spelled_out) > 12:
        return None
    total = 0
    current = 0
    for word in spelled_out:
        if word in _VALUES:
            current += _VALUES[word]
        elif word in ("hundred", "dozen"):
            current = max(current, 1) * LARGE[word]
        elif word in LARGE:
            total += max(current, 1) * LARGE[word]
            current = 0
        else:
            return None
    return Fraction(sign * (total + current), share or 1)


def base(name: str) -> Fraction | None:
    """Return the base that a number or a word such as "two" names; None if it names none."""
    value = int(name) if name.isdigit() and len(name) < 3 else _BASES.get(name.lower())
    return None if value is None else Fraction(value)


_MONTHS = {
    form: index
    for index, name in enumerate(table("months", str).split(), 1)
    for form in (name, name[:3])
}


def date_in_words(phrase: str) -> str:
    """Return a date in a uniform format, with the year if it is given; "" if the phrase is not a
    date.
    """
    match = FORMS["date"].fullmatch(phrase.strip().lower())
    if match is None:
        return ""
    day = match["d"] or match["d1"] or match["d2"]
    if not day or (match["d1"] and match["d2"]):
        return ""
    month = int(match["m"]) if match["m"] else _MONTHS[match["name"]]
    return f"date {match['y'] or match['y1'] or ''} {month} {int(day)}"


_WORDS_OF_THREE = words("words_of_three")


def is_word(letters: str) -> bool:
    """Return True if letters in a formula are more likely a word than a product of variables."""
    lower = letters.lower()
    if len(letters) <= 2:
        return False
    if lower in ascii_lowercase:
        return letters.isupper()
    if len(letters) == 3:
        return lower in _WORDS_OF_THREE or letters.istitle()
    return True


def squashed(text: str) -> str:
    """Return a phrase in lower case, without punctuation and without an article at its start."""
    pieces = FORMS["piece"].findall(FORMS["hyphen"].sub(" ", text.lower()))
    if len(pieces) > 1 and pieces[0] in ("a", "an", "the") and pieces[1].isalnum():
        pieces = pieces[1:]
    return " ".join(pieces)


_DATA = Tables("units.toml")
_UNITS = _DATA.patterns("forms")
_FILLERS = _DATA.words("fillers")
_NO_COUNTS = _DATA.words("no_counts")
TAILS = _DATA.words("tails")
_LINKS = _DATA.words("links")
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
    """Return the dimension and the scale (the size in base units) of a unit that is defined by
    other units, as in "1/1000 kg m^-1".
    """
    words = text.split()
    scale = Fraction(words.pop(0)) if text[0].isdigit() else Fraction(1)
    parts = [each.partition("^") for each in words]
    return _combined(
        [(((), scale), 1), *((known[name], int(power or 1)) for name, _, power in parts)]
    )


def _catalogue() -> tuple[dict[str, Measure], dict[str, Measure]]:
    """Return two dictionaries of units: one by symbol, and one by singular name in lower case."""
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
        symbol: unit for symbol, unit in symbols.items() if symbol not in _DATA.words("products")
    }
    for spelling, definition in spelled(_DATA.table("fixed", dict[str, str])).items():
        symbols[spelling] = names[spelling] = _defined(definition, symbols)
    return symbols, names


SYMBOLS, _NAMES = _catalogue()
_IRREGULAR = _DATA.table("irregular", dict[str, str])


@lru_cache(maxsize=2048)
def entry(word: str) -> Measure | None:
    """Return the dimension and the scale (the size in base units) of a unit that is one word; None
    if it is unknown.

    An unknown plural noun is a unit of its own dimension. A counter such as "items" has no
    dimension.
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
    """Return the dimension and the scale (the size in base units) of a unit such as "square feet";
    None if it is unknown.
    """
    parts: list[tuple[Measure, int]] = []
    sign = 1
    power = 1
    tokens: list[str] = re.findall(r"[A-Za-z]+(?:-[a-z]+)?|\^-?\d+|/", unit)
    # Replace abbreviations by the full units, such as "mph" by "mile per hour".
    spelled_out = " ".join(_SPELLED_OUT.get(token, token) for token in tokens)
    for word in spelled_out.split():
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
            unit_of_word = entry(word)
            if unit_of_word is None:
                return None
            parts.append((unit_of_word, sign * power))
            power = 1
    dimension, scale = _combined(parts)
    if not is_generic(dimension):
        dimension = tuple(each for each in dimension if each[0] != "unit")
    return dimension, scale


def is_generic(dimension: Dimension) -> bool:
    """Return True if a unit is the square or cube of an unnamed length, as in "5 square units"."""
    return dimension in ((("unit", 2),), (("unit", 3),))


_GREEK = {"\\mu": "u", "\\Omega": "ohm"}


def unit_at(text: str, start: int) -> tuple[str, int] | None:
    """Return the longest unit phrase that begins at this position, and the position after it.

    Macros and braces in the phrase are skipped.
    """
    position = start
    depth = 0
    phrase = list[str]()
    has_unit = False  # True if the current factor of the phrase already contains a unit
    longest: tuple[str, int] | None = None
    while True:
        step = _UNITS["step"].match(text, position)
        if step is None:
            return longest
        position = step.end()
        if step["skip"]:
            depth += (step["skip"] == "{") - (step["skip"] == "}")
            if depth < 0:
                return longest
        elif step["word"]:
            word = _GREEK.get(step["word"], step["word"])
            if phrase and (phrase[-1] == "u" or (word == "ohm" and phrase[-1] in "kMmG")):
                word = phrase.pop() + word
            is_beside = word in _BESIDE
            if word in "kMmG" and _UNITS["ohm"].match(text, position):
                is_beside = True
            is_unit = word in _SPELLED_OUT or entry(word) is not None
            if word.lower() in ("am", "pm"):
                is_unit = False
            is_preposition = word == "in" and (has_unit or _UNITS["letter"].match(text, position))
            if is_preposition or not (is_beside or is_unit):
                return longest
            if not phrase and word in _NEVER_FIRST:
                return longest
            phrase.append(word)
            if is_beside:
                continue
            has_unit = True
        elif not phrase or (step["power"] and not has_unit):
            return longest
        elif step["power"]:
            phrase.append("^" + step["power"].replace(" ", ""))
        else:
            if step["divide"]:
                phrase.append("/")
            has_unit = False
            continue
        if depth == 0 and has_unit:
            last = phrase[-1]
            if last[0] == "^" or entry(last) or last in _SPELLED_OUT:
                longest = " ".join(phrase), position
