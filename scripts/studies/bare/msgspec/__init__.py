"""Replacement for msgspec on machines without msgspec: it can make structs, but it cannot decode
data.
"""

# This package's parent folder comes last on the path, so that an installed msgspec is used.
# `convert` checks nothing: the study that uses this replacement converts only data files of the
# checkout itself.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


class ValidationError(Exception):
    """Error raised by msgspec for invalid data; this stand-in never raises the error."""


class DecodeError(Exception):
    """Error raised by msgspec for malformed data; this stand-in never raises the error."""


class Meta:
    """A constraint of msgspec, which this stand-in does not check."""

    def __init__(self, **constraints: object) -> None:
        self.constraints = constraints


class Struct:
    """A stand-in for msgspec's struct: a dataclass."""

    __struct_fields__: tuple[str, ...] = ()

    def __init_subclass__(
        cls, *, frozen: bool = False, kw_only: bool = False, **options: object
    ) -> None:
        super().__init_subclass__()
        dataclass(frozen=frozen, kw_only=kw_only)(cls)
        cls.__struct_fields__ = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]


def convert(value: Any, kind: Any) -> Any:
    """Return the value unchanged."""
    return value


def field(*, default_factory: Callable[[], Any]) -> Any:
    """Return a dataclass field whose default is made again for each value."""
    return dataclasses.field(default_factory=default_factory)


def to_builtins(value: Any, *, enc_hook: Callable[[Any], Any] | None = None) -> Any:
    """Return the fields of a dataclass as plain values; nested values stay unchanged."""
    return dataclasses.asdict(value)


class json:
    """A stand-in for msgspec's JSON decoder, which always raises an error."""

    @staticmethod
    def decode(data: bytes, **options: object) -> Any:
        """Refuse to decode, because this stand-in cannot check data.

        :raises ModuleNotFoundError: always.
        """
        raise ModuleNotFoundError(
            "this file can only be read where msgspec is installed", name="msgspec"
        )
