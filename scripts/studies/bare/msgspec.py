"""What importing the engine needs of msgspec, for machines that lack it: types can be declared,
nothing can be decoded.

The folder of this file comes last on the path, so that an installed msgspec is used. `convert`
checks nothing: on the way of the study that uses this, only data files of the checkout itself pass
through it.
"""

from __future__ import annotations

from typing import Any


class ValidationError(Exception):
    """Never raised here."""


class DecodeError(Exception):
    """Never raised here."""


class Meta:
    """A constraint, which is not checked."""

    def __init__(self, **constraints: object) -> None:
        self.constraints = constraints


class Struct:
    """A declaration of fields."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__()


def convert(value: Any, kind: Any) -> Any:
    """The value as it is."""
    return value


class json:
    """Decoding, refused."""

    @staticmethod
    def decode(data: bytes, **options: object) -> Any:
        """:raises ModuleNotFoundError: always; nothing is taken for what was not checked."""
        raise ModuleNotFoundError(
            "this file can only be read where msgspec is installed", name="msgspec"
        )
