"""The names a configuration knows, read off the values they end up in, so that no second list can go stale."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from atts.errors import OptionError
from atts.journal import Json

T = TypeVar("T")
PREFIX = "ATTS_"
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Key:
    """One name of the configuration: "samples", or "sampling.temperature" inside a table."""

    name: str
    kind: Any  # the annotation, without None
    default: Json
    optional: Literal["no", "yes"]  # whether "none" is a value
    help: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper().replace(".", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may be, where these are few."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    def read(self, value: object, label: str) -> Json:
        """The value as the configuration holds it; words, as from the environment, are read as what they say.

        :raises OptionError: it is none of this key's; `label` says who gave it.
        """
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if self.optional == "yes":
                return None
            if value is None:
                raise OptionError(label, f"needs {_PLAIN.get(self.kind, 'a value')}")
        if self.choices:
            if value not in self.choices:
                raise OptionError(label, f"{value!r} is not one of its values", self.choices, value)
            return str(value)
        found = _read_list(value) if get_origin(self.kind) is tuple else _read_plain(self.kind, value)
        if found is None:
            raise OptionError(label, f"{value!r} is not {_PLAIN.get(self.kind, 'a list of texts')}")
        return found


def keys_of(kind: type, default: object, words: Mapping[str, str], prefix: str = "") -> Iterator[Key]:
    """A key for every field that a text can say, those of inner values dotted; `default` holds the defaults."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        inner, optional = _without_none(hints[field.name])
        name, value = prefix + field.name, getattr(default, field.name, None)
        if isinstance(inner, type) and is_dataclass(inner):
            yield from keys_of(inner, value, words, name + ".")
        elif (
            inner in _PLAIN
            or get_origin(inner) is Literal
            or (get_origin(inner), get_args(inner)[:1])
            == (
                tuple,
                (str,),
            )
        ):
            yield Key(name, inner, value, "yes" if optional or default is None else "no", words.get(name, ""))


def filled(base: T, values: Mapping[str, Json], prefix: str = "") -> T:
    """The value with each field as its key says; an inner value that was None is made once a key of it is set.

    :raises OptionError: the fields do not go together.
    """
    hints = get_type_hints(type(base))
    changes = dict[str, Any]()
    for field in fields(base):  # type: ignore[arg-type]  # callers hand in dataclasses
        name = prefix + field.name
        inner, _ = _without_none(hints[field.name])
        if isinstance(inner, type) and is_dataclass(inner):
            changes[field.name] = _inner(inner, getattr(base, field.name), values, name + ".")
        elif name in values:
            changes[field.name] = values[name]
    return replace(base, **changes)  # type: ignore[type-var]  # as above


def leaves(value: object, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Every field of a dataclass by its key's name, inner values opened."""
    for field in fields(value):  # type: ignore[arg-type]  # as above
        held = getattr(value, field.name)
        if is_dataclass(held):
            yield from leaves(held, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, held


def _inner(kind: type, now: object, values: Mapping[str, Json], prefix: str) -> object:
    given = {name: value for name, value in values.items() if name.startswith(prefix) and value is not None}
    if now is None and not given:
        return None
    return filled(kind() if now is None else now, given, prefix)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    parts = [part for part in get_args(hint) if part is not NoneType]
    return (parts[0] if len(parts) == 1 else hint), len(parts) < len(get_args(hint))


def _read_plain(kind: type, value: object) -> int | float | str | bool | None:
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is bool:
        return _TRUTHS.get(value.lower()) if isinstance(value, str) else value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value) if kind is float else int(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) or (kind is int and isinstance(value, float) and number != value) else number


def _read_list(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return None
    return tuple(cast("list[str]", parts))
