"""Configuration keys, read from the dataclasses whose fields they set, with their help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
    str: "text",
}
"""What errors call the types of values."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration: "samples", or "sampling.temperature" inside a table."""

    name: str
    kind: Any  # the annotation, without None
    default: Json
    optional: bool  # whether "none" is a value
    help: str = ""

    @property
    def variable(self) -> str:
        """Return the environment variable that sets this key."""
        return PREFIX + self.name.upper().replace(".", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values that a key with few values may have."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    def read(self, value: object, label: str) -> Json:
        """Return a value as the configuration stores it; a text is parsed as the key's type.

        :raises OptionError: it is none of this key's; `label` says who gave it.
        """
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if self.optional:
                return None
            if value is None:
                raise OptionError(label, f"needs {KINDS.get(self.kind, 'a value')}")
        if self.choices and value not in self.choices:
            raise OptionError(label, f"{value!r} is not one of its values", self.choices, value)
        try:
            converted: Json = _converted(value, self.kind)
        except msgspec.DecodeError:
            converted = math.nan
        if converted != converted:
            raise OptionError(label, f"{value!r} is not {KINDS.get(self.kind, 'a list of texts')}")
        return converted


def keys_of(
    kind: type, default: object, prefix: str = "", help: Mapping[str, str] | str = ""
) -> Iterator[Key]:
    """Yield a key for every field that a text can set; fields of inner dataclasses are dotted.

    `default` holds the default values. `help` has precedence over the help in a field's annotation;
    the annotation of an outer field may hold such a mapping.

    `help` wins over what the fields themselves say, as a mapping in an outer field's annotation
    does.
    """
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        words = help.get(field.name, "") if isinstance(help, Mapping) else ""
        if get_origin(hint) is Annotated:
            hint, words = hint.__origin__, words or hint.__metadata__[0]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        inner = next((part for part in parts if _is_sayable(part) or is_dataclass(part)), None)
        name = prefix + field.name
        value = getattr(default, field.name, None)
        if isinstance(inner, type) and is_dataclass(inner):
            yield from keys_of(inner, value, name + ".", words)
        elif inner is not None:
            yield Key(name, inner, value, NoneType in parts or default is None, words)


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested tables with its dotted name."""
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
        *outer, last = name.split(".")
        table = tables
        if value is not None:
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
    """Convert a value to this type.

    :raises msgspec.DecodeError: it is none.
    """
    if kind in (int, float):
        # .1 is no number to JSON alone
        if isinstance(value, str) and value.strip().startswith("."):
            value = f"0{value.strip()}"
        kind = (
            Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] if kind is int else kind
        )
        return msgspec.convert(
            value.strip().replace("_", "") if isinstance(value, str) else value, kind, strict=False
        )
    if isinstance(value, str) and kind is bool:
        value = _TRUTHS.get(value.lower(), value)
    elif isinstance(value, str) and get_origin(kind) is tuple:
        if value.lstrip().startswith("["):
            return msgspec.json.decode(value, type=kind)
        value = [value]
    return msgspec.convert(value, kind)
