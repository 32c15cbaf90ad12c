"""Verdicts of comparisons, the limits that bound them, and the errors that end them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from atts.core import Grading
from atts.errors import OptionError

STRICT = Grading()
Status = Literal["equal", "different", "unscored"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Equal, different or unscored, with the rule that decided; `detail` is for people."""

    status: Status
    rule: str
    detail: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the answer counts as the reference."""
        return self.status == "equal"


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of the fast path; what would pass one is left undecided, never attempted."""

    raw_characters: int = 250_000  # looked at, to drop spacing and wrappers
    characters: int = 20_000  # of what is left, to be parsed
    tokens: int = 12_000
    depth: int = 40  # of values in values
    items: int = 4_000  # of a list, set, tuple or matrix
    bits: int = 100_000  # of any exact integer
    terms: int = 400  # of a written-out sum or product
    steps: int = 20_000  # of one numeric evaluation
    milliseconds: int = 400  # of probing one pair


LIMITS = Limits()


def changed(grading: Grading, given: Mapping[str, Any]) -> Grading:
    """The policy with these fields as given, None as it is; raises OptionError for a value that is
    none.
    """
    try:
        told = {name: value for name, value in given.items() if value is not None}
        found = msgspec.convert({**asdict(grading), **told}, Grading)
    except msgspec.ValidationError as error:
        raise OptionError("grading", str(error), [*asdict(grading)]) from None
    for name in ("relative", "absolute"):
        if not 0 <= getattr(found, name) < math.inf:
            raise OptionError(
                name, f"{getattr(found, name)} is no tolerance: it is a number from 0 on"
            )
    return found


class Undecided(Exception):
    """The fast path cannot say; the message says why."""


class Malformed(Undecided):
    """The text cannot be an answer: brackets unbalanced, an argument missing, an operator left
    hanging.
    """


class Prose(Undecided):
    """Words deny, condition or replace the value."""


class UnknownWords(Prose):
    """Words beside the value that are not known to leave it as it is."""


class TooLarge(Undecided):
    """A cap of `Limits` would be passed."""


class Undefined(Exception):
    """The expression has no value (division by zero, logarithm of zero)."""


class Outside(Undefined):
    """No case of a piecewise expression applies."""
