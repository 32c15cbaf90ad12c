"""Readings of an answer text: the trees it may be parsed as, cached for the next comparison."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from atts.evaluators.answers.boxes import boxes, last_group
from atts.evaluators.syntax import vocabulary
from atts.evaluators.syntax.cleaning import cleaned, joined_thousands
from atts.evaluators.syntax.grammar import Parser
from atts.evaluators.syntax.lexer import tokens
from atts.evaluators.syntax.tree import EMPTY_SET, INFINITY, REALS, Node, number, symbol
from atts.evaluators.syntax.units import unit_at
from atts.evaluators.verdict import Limits, Malformed, TooLarge, Undecided, UnknownWords

_CHOICE = re.compile(r"[({\[\s]*([A-J])[}\s]*(?:\)[)}\]]*\s*[.:]?\s*[^\s^_!]?|[.:]\s*\S|[}\]]*$)")
_MACRO = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|textit|mbox|rm|bf|boxed)(?![a-zA-Z])\s*")


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
    return _kept(text, limits) if len(text) <= 400 else _read(text, limits)


@lru_cache(maxsize=4096)
def _kept(text: str, limits: Limits) -> Reading:
    return _read(text, limits)


_PLAIN_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?", re.ASCII)


def _read(text: str, limits: Limits) -> Reading:
    if _PLAIN_NUMBER.fullmatch(text):  # most answers: what the parser would find, without it
        return Reading(text, (number(Fraction(text), text),))
    plain = text
    try:
        plain = _ANNOUNCED.sub("", cleaned(_ANNOUNCED.sub("", unboxed(text), count=1), limits), count=1)
        plain = _LEADING.sub("", plain)
        choice = _CHOICE.match(_MACRO.sub("", plain).replace("{", "").replace("}", ""))
        letter = choice[1] if choice else ""
        only = bool(letter) and not re.search(r"[^A-J\s(){}\[\].:]", _MACRO.sub("", plain))
        return Reading(plain, tuple(_trees(plain, limits)), None, letter, only)
    except Undecided as problem:
        choice = _CHOICE.match(_MACRO.sub("", plain)) if len(plain) < 400 else None
        return Reading(plain, (), problem, choice[1] if choice else "")
    except RecursionError:  # little of the stack was left to us
        return Reading(plain, (), TooLarge("too deep for the stack at hand"))


_ZEROS = re.compile(r",0\d|;")  # no list is written 5,000, and one with semicolons needs no commas


def _trees(plain: str, limits: Limits) -> list[Node]:
    """The readings of a cleaned text: thousands joined, and, where that changes it, as written."""
    said = _in_words(plain) if len(plain) < 120 else None
    if said is not None:
        return [said]
    if _NUMERIC_DATE.fullmatch(plain):
        raise UnknownWords("a date whose day and month are not told apart")
    if divided := _REMAINDER.fullmatch(plain):
        return [Node("tuple", tuple(_trees(part, limits)[0] for part in divided.groups()), "R")]
    joined = joined_thousands(plain)
    found: list[Node] = []
    problem: Undecided | None = None
    counted = _COUNTED.sub(_as_binomial, joined)
    spellings = [joined] if joined == plain or _ZEROS.search(plain) else [joined, plain]
    for spelling in spellings if counted == joined else [counted, *spellings]:
        try:
            found.extend(Parser(each, limits).answer() for each in tokens(spelling, limits))
        except Undecided as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise problem
    return found


_COUNTED = re.compile(
    r"(?:\{\s*\}|\^)?_\s*\{?(\d{1,4})\}?\s*\{?([CP])\}?_\s*\{?(\d{1,4})\}?|(?<![A-Za-z])([CP])\((\d{1,4}), ?(\d{1,4})\)"
)


def _as_binomial(found: re.Match[str]) -> str:
    """C(6,2) and _6C_2 as they are written elsewhere; permutations of so many as a quotient of factorials."""
    n, kind, k = found.groups()[:3] if found[2] else (found[5], found[4], found[6])
    return rf"\binom{{{n}}}{{{k}}}" if kind == "C" else rf"(({n})!/({n}-{k})!)"


def _in_words(plain: str) -> Node | None:
    """An answer in words that has a meaning of its own: a number, a set, a quotient with its remainder."""
    phrase = _BRACES.sub(" ", _MACRO.sub(" ", plain))
    division = _DIVISION.fullmatch(phrase)
    if division:
        numbers = [number(int(part)) for part in division.groups() if part]
        return Node("tuple", tuple(numbers), "R")
    if date := vocabulary.date_in_words(phrase):
        return Node("word", text=date)
    if left_out := _EXCEPT.fullmatch(phrase):
        points = (number(Fraction(part)) for part in re.findall(r"-?\d+(?:[./]\d+)?", left_out[1]))
        return Node("setminus", (REALS, Node("set", tuple(points))))
    if "\\" in phrase or not _WORD.search(phrase):
        return None
    fixed = vocabulary.meaning(vocabulary.squashed(phrase))
    if fixed in _FIXED:
        return _FIXED[fixed]
    if fixed in vocabulary.MEANINGS:
        return Node("word", text=fixed)
    value = vocabulary.number_in_words(phrase) if phrase.strip(" -")[:1].isalpha() else None
    if value is not None and _NUMERIC.search(phrase) is None:
        return number(value, str(value))
    first, _, rest = phrase.strip().partition(" ")
    value = vocabulary.number_in_words(first)
    counted = unit_at(rest, 0) if value is not None and rest else None
    if value is None or counted is None or counted[1] < len(rest.rstrip()):
        return None
    return Node("quantity", (number(value, str(value)),), counted[0])


_BRACES, _WORD, _NUMERIC = re.compile(r"[{}~]"), re.compile(r"[A-Za-z]{3}|\d\s*[Rr]\b|\bR\s?\d"), re.compile(r"\d|\\")
_DIVISION = re.compile(
    r"\s*(?:quotient\s*(?:=|:|is|of)?\s*)?(\d+)\s*,?\s*(?:and\s+)?(?:with\s+)?(?:an?\s+)?"
    r"(?:[Rr]|rem|remainder)\b\.?\s*(?:=|:|is|of)?\s*(\d+)\s*|\s*(\d+)\s*R(\d+)\s*"
)


_REMAINDER = re.compile(  # of polynomials
    r"(?:quotient\s*(?:=|:|is|of)?\s*)?((?:(?![A-Za-z]{2}|\\).){1,80}?)\s*,?\s*(?:and\s+)?(?:with\s+)?(?:an?\s+)?"
    r"remainder\s*(?:=|:|is|of)?\s*((?:(?![A-Za-z]{2}|\\).){1,80})"
)
_EXCEPT = re.compile(
    r"\s*(?:(?:all|any|every)\s+)?(?:reals?|real\s+numbers?)\s+(?:x\s+)?(?:except|excluding|other\s+than|but|apart\s+from)"
    r"(?:\s+for)?\s+((?:x\s*=\s*)?-?\d+(?:[./]\d+)?(?:\s*(?:,|and|or)\s*-?\d+(?:[./]\d+)?)*)\s*",
    re.IGNORECASE,
)


def _from_zero(brackets: str) -> Node:
    return Node("tuple", (number(0), INFINITY), brackets)


_FIXED = {
    "no solution": EMPTY_SET,
    "all reals": REALS,
    "positive reals": _from_zero("()"),
    "nonnegative reals": _from_zero("[)"),
    "all integers": symbol("mathbb:Z"),
}


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
    return ", ".join(contents) if contents else _EMPTY_BOX.sub("", text)


_ANNOUNCED = re.compile(
    r"\A\s*(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+|our\s+|my\s+)?(?:final\s+|correct\s+)?"
    r"(?:answer|result|solution|choice)s?\s*(?:is|are|:|=)+\s*:?\s*(?=\S)",
    re.IGNORECASE,
)


_NUMERIC_DATE = re.compile(r"\d\d?/\d\d?/\d{4}")
_LEADING = re.compile(
    r"\A\s*(?:=|\\approx(?![a-z])|equals?\b|(?:so|thus|therefore|hence|finally),|(?:it|they)\s+(?:is|are)\b)\s*(?=\S)",
    re.IGNORECASE,
)
_EMPTY_BOX = re.compile(r"\\?(?:boxed|fbox)\s*\{\s*\}")
