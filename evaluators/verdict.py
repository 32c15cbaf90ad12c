"""Verdicts on answers, the limits of a comparison, and the errors that end a comparison."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from atts.core import Grading
from atts.errors import OptionError

STRICT = Grading()
Status = Literal["equal", "different", "unscored"]

RULES = {
    "same text": "the answers have the same spelling, except for spacing and wrappers",
    "text": "both answers are words, which were compared as strings",
    "choice": "the letters of two choices were compared",
    "structure": "the answers have equal parts in the same order",
    "exact": "exact rational or algebraic numbers were compared",
    "value": "the values of both answers were computed and compared, at several points if there are "
    "variables",
    "sizes": "values were computed only for positive variables, because the variables of a formula "
    "usually stand for positive quantities",
    "constants": "the answers differ only in the names, shift or form of arbitrary constants",
    "rounding": "a decimal number, which may be rounded, was compared with an exact value",
    "tolerance": "the difference between the numbers was compared with the allowed tolerance",
    "algebra": "sympy compared the expressions",
    "tests": "the program was run on the tests",
    "judged": "a model compared the answers, because no rule decided",
    "percent": "percentages were compared",
    "degrees": "angles were compared",
    "unit": "quantities were compared together with their units, or with the names of the counted "
    "objects",
    "base": "numerals in a stated base were compared",
    "ratio": "ratios were compared as proportions",
    "infinity": "at least one of the two values is infinite",
    "undefined": "one of the two answers has no defined value",
    "name": "the names of the values, such as x in x = 5, were compared",
    "set": "lists or sets were compared, regardless of order",
    "tuple": "tuples were compared, entry by entry",
    "matrix": "matrices were compared, entry by entry",
    "interval": "intervals were compared",
    "relation": "equations or inequalities were compared",
    "equation": "an equation was compared with a value",
    "congruence": "residue classes (integers modulo n) were compared",
    "cases": "piecewise values were compared together with their conditions",
    "logic": "one answer says `and` where the other answer says `or`",
    "prose": "words before or after a value negate, restrict or replace it",
    "malformed": "one of the two answers cannot be read, because an argument or a bracket is "
    "missing",
    "no answer": "there is no answer",
    "cut": "the text ends in the middle of its answer",
    "no reference": "there is no reference",
    "undecided": "no rule decides whether the answers are equal",
    "limits": "the comparison would exceed a limit on size or computation",
    "time": "the comparison took too long",
}
"""For each rule of a verdict, an explanation for users."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an answer, with the name of the rule that decided. `detail` explains the
    verdict to users.
    """

    status: Status
    rule: str
    detail: str = ""

    @property
    def is_equal(self) -> bool:
        """Return True if the answer is accepted as equal to the reference."""
        return self.status == "equal"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work of a comparison. A comparison that would exceed a limit is undecided."""

    raw_characters: int = 250_000  # largest number of characters of an answer before cleaning
    characters: int = 20_000  # largest number of characters of an answer after cleaning
    tokens: int = 12_000
    depth: int = 40  # largest depth of nested brackets and operators
    items: int = 4_000  # largest number of items of a list, set, tuple or matrix
    bits: int = 100_000  # largest size of an exact integer, in bits
    # largest number of terms of a sum or product sign, such as the sum over k from 1 to 100
    terms: int = 400
    steps: int = 20_000  # largest number of operations in one numeric evaluation of an expression
    # Largest number of operations in all evaluations for one pair of answers. An operation on long
    # numbers counts several times.
    work: int = 200_000
    # Time limit, in seconds. It is a safety net: the other limits should stop every comparison
    # earlier, because a verdict must not depend on the speed of the machine.
    seconds: int = 60


LIMITS = Limits()


def changed(grading: Grading, given: Mapping[str, Any]) -> Grading:
    """Return the grading policy with changed fields. A field that is given as None stays unchanged.

    Raises OptionError if a field cannot have the given value.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        policy = msgspec.convert({**asdict(grading), **fields}, Grading)
    except msgspec.ValidationError as error:
        raise OptionError("grading", str(error), [*asdict(grading)]) from None
    for name in ("relative", "absolute"):
        tolerance = getattr(policy, name)
        if not 0 <= tolerance < math.inf:
            raise OptionError(name, f"{tolerance} is out of range; give a number of at least 0")
    return policy


class Undecided(Exception):
    """The rules cannot decide the comparison; the message says why."""


class Malformed(Undecided):
    """The text cannot be an answer: a bracket, an argument or an operand is missing."""


class Prose(Undecided):
    """Words in the answer negate, restrict or replace its value."""


class UnknownWords(Prose):
    """Words next to the value are unknown, so they may change the value."""


class TooLarge(Undecided):
    """The comparison would exceed one of the `Limits`."""


class OutOfTime(Exception):
    """The comparison reached the time limit, although the other limits should have stopped it
    earlier.
    """


class Undefined(Exception):
    """The expression has no value (division by zero, logarithm of zero)."""


class Outside(Undefined):
    """None of the conditions of a piecewise expression is true."""
