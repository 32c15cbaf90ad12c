"""Stand in for msgspec on machines that lack it: structs can be made, nothing can be decoded."""

# The folder above comes last on the path, so that an installed msgspec is used. `convert` checks
# nothing: in the study that uses this, only data files of the checkout itself pass through it.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


class ValidationError(Exception):
    """An error of decoding, never raised here."""


class DecodeError(Exception):
    """An error of decoding, never raised here."""


class Meta:
    """A constraint, which is not checked."""

    def __init__(self, **constraints: object) -> None:
        self.constraints = constraints


class Struct:
    """A value with fields; as here, a dataclass."""

    __struct_fields__: tuple[str, ...] = ()

    def __init_subclass__(
        cls, *, frozen: bool = False, kw_only: bool = False, **options: object
    ) -> None:
        super().__init_subclass__()
        dataclass(frozen=frozen, kw_only=kw_only)(cls)
        cls.__struct_fields__ = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]


def convert(value: Any, kind: Any) -> Any:
    """Return the value as it is."""
    return value


def field(*, default_factory: Callable[[], Any]) -> Any:
    """Return a field that makes its default for each value."""
    return dataclasses.field(default_factory=default_factory)


def to_builtins(value: Any, *, enc_hook: Callable[[Any], Any] | None = None) -> Any:
    """Return the fields of a dataclass as plain values; what is in them stays as it is."""
    return dataclasses.asdict(value)


class json:
    """A decoder that refuses."""

    @staticmethod
    def decode(data: bytes, **options: object) -> Any:
        """Refuse: nothing is taken for what was not checked.

        :raises ModuleNotFoundError: always.
        """
        raise ModuleNotFoundError(
            "this file can only be read where msgspec is installed", name="msgspec"
        )
