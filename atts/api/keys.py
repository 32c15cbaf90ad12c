"""The configuration keys and their help texts, which are derived from the fields of dataclasses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from atts.errors import OptionError
from atts.journal import Json

PREFIX = "ATTS_"
_TRUTHS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
KINDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
}
"""The name of each type of value in error messages."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration: "samples", or "sampling.temperature" inside a table."""

    name: str
    kind: Any  # type of the values, from the field's annotation without `None`
    default: Json
    optional: bool  # whether the user may set the key to "none"
    help: str = ""

    @property
    def variable(self) -> str:
        """Return the environment variable that sets this key."""
        return PREFIX + self.name.upper().replace(".", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the possible values of a key if its values are a fixed list, or else an empty
        tuple.
        """
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    def read(self, value: object, label: str) -> Json:
        """Convert a value to the form in which the configuration stores it; a string is parsed as
        the key's type.

        :raises OptionError: if the value is not valid for this key; `label` names the value's
            origin in the message.
        """
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if self.optional:
                return None
            if value is None:
                raise OptionError(label, f"needs {KINDS.get(self.kind, 'a value')}")
        if self.choices and value not in self.choices:
            raise OptionError(
                label, f"{value!r} is not one of the possible values", self.choices, value
            )
        converted: Json = math.nan
        with suppress(msgspec.DecodeError):
            converted = _converted(value, self.kind)
        # Only NaN differs from itself. The value is NaN if the conversion failed, or if the user
        # gave NaN, which no key allows.
        if converted != converted:
            raise OptionError(
                label, f"{value!r} is not {KINDS.get(self.kind, 'a list of strings')}"
            )
        return converted


def keys_of(
    kind: type, default: object, prefix: str = "", help: Mapping[str, str] | str = ""
) -> Iterator[Key]:
    """Yield a key for every field that can be set by a string; keys of inner dataclasses have
    dotted names.

    `default` is an object with the default values. The strings in `help` replace the help texts in
    the annotations of fields. The annotation of an outer field may contain such a mapping for its
    inner dataclass.
    """
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        words = help.get(field.name, "") if isinstance(help, Mapping) else ""
        if get_origin(hint) is Annotated:
            words = words or hint.__metadata__[0]
            hint = hint.__origin__
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        inner = next((part for part in parts if _is_sayable(part) or is_dataclass(part)), None)
        name = prefix + field.name
        value = getattr(default, field.name, None)
        if isinstance(inner, type) and is_dataclass(inner):
            yield from keys_of(inner, value, name + ".", words)
        elif inner is not None:
            is_optional = NoneType in parts or default is None
            yield Key(name, inner, value, is_optional, words)


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry in nested tables."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nested(values: Mapping[str, Json]) -> dict[str, Any]:
    """Return nested tables from dotted names; None and empty tables are left out.

    >>> nested({"samples": 8, "sampling.top_p": 0.9, "target_sampling.top_p": None})
    {'samples': 8, 'sampling': {'top_p': 0.9}}
    """
    tables = dict[str, Any]()
    for name, value in values.items():
        if value is None:
            continue
        *outer, last = name.split(".")
        table = tables
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def _is_sayable(kind: Any) -> bool:
    return (
        kind in KINDS
        or get_origin(kind) is Literal
        or (get_origin(kind) is tuple and get_args(kind)[0] is str)
    )


def _converted(value: Any, kind: Any) -> Any:
    """Convert a value to the given type.

    :raises msgspec.DecodeError: if the value does not have this type.
    """
    if kind in (int, float):
        if isinstance(value, str):
            value = value.strip()
            # The text is parsed as JSON, which does not allow a number such as ".5" without a digit
            # before the point.
            if value.startswith("."):
                value = f"0{value}"
            value = value.replace("_", "")
        # Allow only 64-bit integers, because TOML files and random generators accept no larger
        # ones.
        if kind is int:
            kind = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
        return msgspec.convert(value, kind, strict=False)
    if isinstance(value, str) and kind is bool:
        value = _TRUTHS.get(value.lower(), value)
    elif isinstance(value, str) and get_origin(kind) is tuple:
        if value.lstrip().startswith("["):
            return msgspec.json.decode(value, type=kind)
        value = [value]
    return msgspec.convert(value, kind)
