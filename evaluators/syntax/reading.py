"""Readings of an answer text: the trees it may be parsed as, cached for the next comparison."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from atts.evaluators.answers.boxes import boxes, last_group
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.cleaning import FORMS, cleaned, joined_thousands
from atts.evaluators.syntax.grammar import Parser
from atts.evaluators.syntax.lexer import tokens
from atts.evaluators.syntax.tree import Node, number
from atts.evaluators.syntax.units import unit_at
from atts.evaluators.verdict import Limits, Malformed, TooLarge, Undecided, UnknownWords

_CHOICE, _MACRO = FORMS["choice"], FORMS["macro"]
_RATIONAL = re.compile(r"-?\d+(?:[./]\d+)?")


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer cleaned and parsed; no trees means it could not be read, and `problem` says why."""

    text: str
    trees: tuple[Node, ...]
    problem: Undecided | None = None
    choice: str = ""  # the letter, when the answer is one choice, perhaps with its text
    is_letter: bool = False  # nothing but the letter

    @property
    def squashed(self) -> str:
        """The answer as a phrase: lower case, letters and digits."""
        return vocabulary.squashed(_MACRO.sub(" ", self.text))


def read(text: str, limits: Limits) -> Reading:
    """The answer as trees; long texts are not kept."""
    return _read(text, limits) if len(text) <= 400 else _read.__wrapped__(text, limits)


@lru_cache(maxsize=4096)
def _read(text: str, limits: Limits) -> Reading:
    if FORMS["number"].fullmatch(text):
        return Reading(text, (number(Fraction(text), text),))
    plain = text
    try:
        plain = cleaned(unboxed(text), limits)
        choice = _CHOICE.match(_MACRO.sub("", plain).replace("{", "").replace("}", ""))
        letter = choice[1] if choice else ""
        only = bool(letter) and not re.search(r"[^A-J\s(){}\[\].:]", _MACRO.sub("", plain))
        return Reading(plain, tuple(_trees(plain, limits)), None, letter, only)
    except Undecided as problem:
        choice = _CHOICE.match(_MACRO.sub("", plain)) if len(plain) < 400 else None
        return Reading(plain, (), problem, choice[1] if choice else "")
    except RecursionError:  # little of the stack was left to us
        return Reading(plain, (), TooLarge("too deep for the stack at hand"))


def _trees(plain: str, limits: Limits) -> list[Node]:
    """The readings of a cleaned text: thousands joined, and, where that changes it, as written."""
    said = _in_words(plain, limits) if len(plain) < 240 else None
    if said is not None:
        return [said]
    joined = joined_thousands(plain)
    found: list[Node] = []
    problem: Undecided | None = None
    counted = FORMS["counted"].sub(_as_binomial, joined)
    spellings = [joined] if joined == plain or FORMS["zeros"].search(plain) else [joined, plain]
    for spelling in spellings if counted == joined else [counted, *spellings]:
        try:
            found.extend(Parser(each, limits).answer() for each in tokens(spelling, limits))
        except Undecided as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise problem
    return found


def _as_binomial(found: re.Match[str]) -> str:
    """C(6,2) and _6C_2 as they are written elsewhere; permutations of so many as a quotient of factorials."""
    n, kind, k = found.groups()[:3] if found[2] else (found[5], found[4], found[6])
    return rf"\binom{{{n}}}{{{k}}}" if kind == "C" else rf"(({n})!/({n}-{k})!)"


def _in_words(plain: str, limits: Limits) -> Node | None:
    """An answer in words that has a meaning of its own: a number, a set, a date, a quotient with its remainder."""
    if FORMS["date"].fullmatch(plain):
        raise UnknownWords("a date whose day and month are not told apart")
    phrase = FORMS["braces"].sub(" ", _MACRO.sub(" ", plain))
    if divided := FORMS["division"].fullmatch(phrase) or FORMS["remainder"].fullmatch(plain):
        return Node("tuple", tuple(_trees(part, limits)[0] for part in divided.groups() if part), "R")
    if date := vocabulary.date_in_words(phrase):
        return Node("word", text=date)
    if left_out := FORMS["except"].fullmatch(phrase):
        return _trees(rf"\mathbb{{R}}\setminus\{{{','.join(_RATIONAL.findall(left_out[1]))}\}}", limits)[0]
    if "\\" in phrase or not FORMS["word"].search(phrase):
        return None
    fixed = vocabulary.meaning(vocabulary.squashed(phrase))
    if fixed in vocabulary.SETS:
        return _trees(vocabulary.SETS[fixed], limits)[0]
    if fixed in vocabulary.MEANINGS:
        return Node("word", text=fixed)
    value = vocabulary.number_in_words(phrase) if phrase.strip(" -")[:1].isalpha() else None
    if value is not None and not FORMS["numeric"].search(phrase):
        return number(value, str(value))
    first, _, unit = phrase.strip().partition(" ")
    value = vocabulary.number_in_words(first)
    counted = unit_at(unit, 0) if value is not None and unit else None
    if value is None or counted is None or counted[1] < len(unit.rstrip()):
        return None
    return Node("quantity", (number(value, str(value)),), counted[0])


def unboxed(text: str) -> str:
    """The contents of the boxes in an answer, several joined by commas; the text itself when it has none.

    Raises Malformed when its box was cut off.
    """
    if "box" not in text:
        return text
    text = text.replace("\\beginboxed", "\\boxed")
    found, open_at = boxes(text)
    contents = last_group(found, text)
    if not contents and open_at is not None:
        raise Malformed("a box that was cut off")
    return ", ".join(contents) if contents else FORMS["empty_box"].sub("", text)
