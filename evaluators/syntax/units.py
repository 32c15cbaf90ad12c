"""Units of answers: what a phrase after a value measures or counts, as powers of base units and a scale."""

import re
from fractions import Fraction
from functools import lru_cache

from atts.evaluators.syntax.vocabulary import Tables, spelled

_DATA = Tables("units.toml")
_COUNTERS, _FILLERS, _NOUNS, _NO_COUNTS, TAILS, _LINKS = (
    _DATA.words(name) for name in ("counters", "fillers", "nouns", "no_counts", "tails", "links")
)
_POWERS = _DATA.table("powers", dict[str, int])
_SPELLED_OUT = _DATA.table("spelled_out", dict[str, str])
_UNWEIGHED = _LINKS | _FILLERS
_BESIDE, _NEVER_FIRST = _UNWEIGHED | _POWERS.keys() | {"u"}, _LINKS | {"squared", "cubed"}

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
    return _combined([(((), scale), 1), *((known[name], int(power or 1)) for name, _, power in parts)])


def _catalogue() -> tuple[dict[str, Measure], dict[str, Measure]]:
    """Units by symbol, as written, and by name, in lower case and in the singular."""
    symbols: dict[str, Measure] = {name: (((name, 1),), Fraction(1)) for name in _DATA.words("bases")}
    names: dict[str, Measure] = {}
    prefixes = _DATA.table("prefixes", dict[str, tuple[str, str]])
    for symbol, (definition, spellings) in _DATA.table("scaled", dict[str, tuple[str, str]]).items():
        dimension, scale = symbols[symbol] = _defined(definition, symbols)
        names |= dict.fromkeys(spellings.split(), symbols[symbol])
        for prefix, (factor, name) in prefixes.items():
            larger = dimension, scale * Fraction(factor)
            symbols.setdefault(prefix + symbol, larger)
            names |= {name + spelling: larger for spelling in spellings.split()}
    for spelling, definition in spelled(_DATA.table("fixed", dict[str, str])).items():
        symbols[spelling] = names[spelling] = _defined(definition, symbols)
    return symbols, names


_SYMBOLS, _NAMES = _catalogue()
_IRREGULAR = _DATA.table("irregular", dict[str, str])
_PLURAL = re.compile(r"[A-Za-z][a-z]{2,}(?<![sui])(?<!th)s")


@lru_cache(maxsize=2048)
def entry(word: str) -> Measure | None:
    """What one word measures: a unit, nothing at all for what counts anything, or itself for a known noun."""
    if word in _SYMBOLS:
        return _SYMBOLS[word]
    lower = word.lower()
    singulars = (
        re.sub(f"(?<=..){ending}$", instead, lower) for ending, instead in (("ies", "y"), ("es", ""), ("s", ""))
    )
    for each in (lower, _IRREGULAR.get(lower, lower), *singulars):
        if each in _NAMES:
            return _NAMES[each]
        if each in _COUNTERS:
            return (), Fraction(1)
        if each in _NOUNS:
            return ((f"#{each}", 1),), Fraction(1)
    if _PLURAL.fullmatch(word) and lower not in _NO_COUNTS:
        return ((f"#{lower.removesuffix('s')}", 1),), Fraction(1)
    return _SYMBOLS.get(lower) if len(word) > 1 else None


@lru_cache(maxsize=2048)
def measure(unit: str) -> Measure | None:
    """Dimension and scale of a unit phrase such as "square feet" or "cm^2", None when a word is unknown.

    >>> measure("km / h") == measure("kilometers per hour")
    True
    """
    parts: list[tuple[Measure, int]] = []
    sign, power = 1, 1
    tokens: list[str] = re.findall(r"[A-Za-z]+(?:-[a-z]+)?|\^-?\d+|/", unit)
    for word in " ".join(_SPELLED_OUT.get(token, token) for token in tokens).split():  # mph and the like spelled out
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
    return (dimension if is_generic(dimension) else tuple(each for each in dimension if each[0] != "unit")), scale


def is_generic(dimension: Dimension) -> bool:
    """Whether an amount is of squares or cubes of an unnamed length, as in "5 square units"."""
    return dimension in ((("unit", 2),), (("unit", 3),))


_STEP = re.compile(
    r"(?P<skip>[\s~{}]|\\[,;:! ]|\\(?:text|mathrm|textrm|mbox|operatorname|textbf|mathbf|textit|mathit|rm|bf|cdot)\b)"
    r"|(?P<word>[A-Za-z]+(?:-[a-z]+)?|\\(?:mu|Omega)\b)"
    r"|\^\s*\{?\s*(?P<power>-?\s*\d)(?!\d)\s*\}?|(?P<divide>/)|(?P<dot>\*)"
)
_LETTER, _OHM = re.compile(r"\s*[A-Za-z]"), re.compile(r"[\s}]*\\Omega")
_GREEK = {"\\mu": "u", "\\Omega": "ohm"}


def unit_at(text: str, start: int) -> tuple[str, int] | None:
    """The longest unit phrase of known words that starts here, macros and braces passed over, and where it ends."""
    position, depth, said, held = start, 0, list[str](), False
    found: tuple[str, int] | None = None
    while True:
        step = _STEP.match(text, position)
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
            is_beside = word in _BESIDE or (word in "kMmG" and _OHM.match(text, position) is not None)
            is_unit = word.lower() not in ("am", "pm") and (word in _SPELLED_OUT or entry(word) is not None)
            is_preposition = word == "in" and (held or _LETTER.match(text, position))
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
        if depth == 0 and held and (said[-1][0] == "^" or entry(said[-1]) or said[-1] in _SPELLED_OUT):
            found = " ".join(said), position


def is_symbol(word: str) -> bool:
    """Whether a word is the symbol of a unit, which letters in a formula can also be."""
    return word in _SYMBOLS and len(word) < 4
