"""Verdicts on answers, the limits of a comparison, and the errors that end one."""

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
    "same text": "both have the same spelling, except for spacing and wrappers",
    "text": "words were compared as words",
    "choice": "the letters of two choices were compared",
    "structure": "both have equal parts in the same order",
    "exact": "exact rational or algebraic numbers were compared",
    "value": "values were computed and compared, at several points where there are variables",
    "sizes": "values were computed for positive variables, because the sizes in a formula are positive",
    "constants": "constants have different letters, a different shift, or are written out",
    "rounding": "a decimal was compared with the exact value that it may stand for",
    "tolerance": "the numbers are as near as the policy allows, or are not",
    "algebra": "sympy compared the expressions",
    "tests": "the program was run on the tests",
    "judged": "a model compared the answers, because the rules left them open",
    "percent": "percentages were compared",
    "degrees": "angles were compared",
    "unit": "quantities with units, or what they count, were compared",
    "base": "numerals of a base were compared",
    "ratio": "ratios were compared as proportions",
    "infinity": "an infinite value was compared",
    "undefined": "one side has no value",
    "name": "the names of the values were compared",
    "set": "lists or sets were compared, in any order",
    "tuple": "tuples were compared, entry by entry",
    "matrix": "matrices were compared, entry by entry",
    "interval": "intervals were compared",
    "relation": "equations or inequalities were compared",
    "equation": "an equation was compared with a value",
    "congruence": "classes of a modulus were compared",
    "cases": "cases were compared with their conditions",
    "logic": "one side says `and` where the other says `or`",
    "prose": "words deny, condition or replace the value",
    "malformed": "one side cannot be read: an argument or a bracket is missing",
    "no answer": "there is no answer",
    "cut": "the text ends inside its answer",
    "no reference": "there is no reference",
    "undecided": "no rule settles the pair",
    "limits": "the pair exceeds a cap on size or work",
    "time": "the comparison took too long",
}
"""The meaning of each rule of a verdict, as a text for people."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Equal, different or unscored, with the rule that decided; `detail` is for people."""

    status: Status
    rule: str
    detail: str = ""

    @property
    def is_equal(self) -> bool:
        """Return whether the answer counts as the reference."""
        return self.status == "equal"


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on a comparison; a comparison that would exceed a cap is left undecided."""

    raw_characters: int = 250_000  # characters that are read in order to drop spacing and wrappers
    characters: int = 20_000  # characters that are parsed after that
    tokens: int = 12_000
    depth: int = 40  # depth of values within values
    items: int = 4_000  # items of a list, set, tuple or matrix
    bits: int = 100_000  # bits of any exact integer
    terms: int = 400  # terms of a written-out sum or product
    steps: int = 20_000  # steps of one numeric evaluation
    # the work of all evaluations of one pair; a step counts more if it has more digits
    work: int = 200_000
    seconds: int = 60  # a last defence in case a cap is missing; no verdict depends on it


LIMITS = Limits()


def changed(grading: Grading, given: Mapping[str, Any]) -> Grading:
    """Return the policy with the given fields changed; a field that is None stays as it is.

    Raises OptionError for a value that a field cannot have.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        policy = msgspec.convert({**asdict(grading), **fields}, Grading)
    except msgspec.ValidationError as error:
        raise OptionError("grading", str(error), [*asdict(grading)]) from None
    for name in ("relative", "absolute"):
        tolerance = getattr(policy, name)
        if not 0 <= tolerance < math.inf:
            raise OptionError(name, f"{tolerance} is not a tolerance; give a number of at least 0")
    return policy


class Undecided(Exception):
    """The rules cannot decide the comparison; the message says why."""


class Malformed(Undecided):
    """The text cannot be an answer: brackets unbalanced, an argument missing, an operator left
    hanging.
    """


class Prose(Undecided):
    """Words deny, condition or replace the value."""


class UnknownWords(Prose):
    """Words next to the value are unknown, so they may change it."""


class TooLarge(Undecided):
    """A cap of `Limits` would be exceeded."""


class OutOfTime(Exception):
    """A comparison took longer than any cap should allow."""


class Undefined(Exception):
    """The expression has no value (division by zero, logarithm of zero)."""


class Outside(Undefined):
    """No case of a piecewise expression applies."""
