"""JSON back to the frozen values it was made of, each shape of data checked once.

Most lines of a journal look alike: the same fields with the same kinds of JSON in them. Whether such a *shape* fits its
dataclass, and which fields still need work, is found out once per shape; after that a line costs a dictionary look-up
and the work itself. What does not fit is an error every time, because only shapes that fit are remembered.
"""

from __future__ import annotations

import sys
import types
from array import array
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from atts.journal.codec import Texts, default, some

Read = Callable[[Any, Texts], Any]
Fit = Callable[[Any], Read | None]
"""How data of this JSON type is read; None: it is the value already.

:raises ValueError: no value of this kind is written so.
"""
_PACKINGS: dict[str, Literal["I", "f", "d"]] = {"u4:": "I", "f4:": "f", "f8:": "d"}
_IDS = ("draft_ids", "target_ids")


def decoder(hint: Any) -> Read:
    """The function that turns plain JSON data into the value of this type it was made of.

    It takes the data over and may change it. It raises ValueError for data that is not of the type.
    """
    return _reading(_fit(hint))


def fields_decoder(kind: type) -> Read:
    """The same for a dataclass of which only the fields are wanted: checked, read, left in their dictionary."""
    return _reading(_only(dict, _dataclass_reader(kind, lambda data: data), "an object"))


def _reading(fit: Fit) -> Read:

    def decode(data: Any, texts: Texts) -> Any:
        read = fit(type(data))
        return data if read is None else read(data, texts)

    return decode


def _fit(hint: Any) -> Fit:
    if is_dataclass(hint):
        kind: Any = hint
        return _only(dict, _dataclass_reader(kind, lambda data: kind(**data)), "an object")
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal(frozenset(arguments))
    if origin in (Union, types.UnionType):
        inner = _fit(some(arguments))
        return lambda kind: None if kind is NoneType else inner(kind)
    if origin is tuple and arguments[1:] == (...,):
        return _tuple(arguments[0])
    assert origin is not None, f"no way to read {hint}"
    assert issubclass(origin, Mapping), f"no way to read {hint}"
    return _only(dict, _mapping_reader(_fit(arguments[1])), "an object")


def _dataclass_reader(kind: Any, make: Callable[[dict[str, Any]], Any]) -> Read:
    """Field by field, with a plan made when a shape is first met; `make` has the last word."""
    hints = get_type_hints(kind)
    fits = {field.name: _fit(hints[field.name]) for field in fields(kind)}
    needed = [field.name for field in fields(kind) if default(field) is MISSING]
    plans: dict[tuple[Any, ...], list[tuple[str, Read]]] = {}
    shares = fits.keys() >= set(_IDS)

    def plan(data: dict[str, Any]) -> list[tuple[str, Read]]:
        if unknown := data.keys() - fits.keys():
            raise ValueError(f"{kind.__name__} has an unknown field {min(unknown)!r}")
        if missing := [name for name in needed if name not in data]:
            raise ValueError(f"{kind.__name__} lacks {missing[0]!r}")
        reads = [(name, fits[name](type(part))) for name, part in data.items()]
        return [(name, read) for name, read in reads if read is not None]

    def decode(data: dict[str, Any], texts: Texts) -> Any:
        shape = (*data, *map(type, data.values()))
        reads = plans.get(shape)  # asked once: a tuple's hash is counted anew each time
        if reads is None:
            reads = plans[shape] = plan(data)
        for name, read in reads:
            data[name] = read(data[name], texts)
        if shares and data[_IDS[0]] == data.get(_IDS[1]):
            data[_IDS[1]] = data[_IDS[0]]  # a shared tokenizer: one tuple, as when it was written
        return make(data)

    return decode


def _only(wanted: type, read: Read | None, words: str) -> Fit:
    def fit(kind: Any) -> Read | None:
        if kind is not wanted:
            raise ValueError(f"data of the kind {kind.__name__} where {words} should be")
        return read

    return fit


def _fit_float(kind: Any) -> Read | None:
    if kind is float:
        return None
    if kind is int:
        return _widen
    return _only(str, _read_word, "a number")(kind)


def _widen(data: int, texts: Texts) -> float:
    return float(data)


def _read_word(data: str, texts: Texts) -> float:
    if data not in ("inf", "-inf", "nan"):
        raise ValueError(f"{data!r} is not a number")
    return float(data)


def _read_text(data: str, texts: Texts) -> str:
    if data[:1] != "@":
        return data
    return data[1:] if data.startswith("@@") or data == "@" else texts.find(data[1:])


def _literal(allowed: frozenset[Any]) -> Fit:
    def read(data: Any, texts: Texts) -> Any:
        if data not in allowed:
            raise ValueError(f"{data!r} is not one of {', '.join(sorted(map(str, allowed)))}")
        return data

    def fit(kind: Any) -> Read:
        if kind in (list, dict):
            raise ValueError(f"data of the kind {kind.__name__} where one of {sorted(map(str, allowed))} should be")
        return read

    return fit


def _tuple(hint: Any) -> Fit:
    """A list, or for numbers a packed text."""
    inner = _fit(hint)
    packings = {int: ("u4:",), float: ("f4:", "f8:")}.get(hint)

    def read(data: list[Any], texts: Texts) -> tuple[Any, ...]:
        kinds = {*map(type, data)}
        if len(kinds) > 1:
            return tuple([_each(inner, part, texts) for part in data])
        each = inner(kinds.pop()) if kinds else None
        return tuple(data) if each is None else tuple([each(part, texts) for part in data])

    def read_packed(data: str, texts: Texts) -> tuple[Any, ...]:
        text = _read_text(data, texts)
        if packings is None or text[:3] not in packings:
            raise ValueError(f"{text[:16]!r} is not a packed tuple")
        return texts.unpacked(text, _unpack)

    def fit(kind: Any) -> Read:
        if kind is str and packings is not None:
            return read_packed
        _only(list, None, "a list")(kind)
        return read

    return fit


def _unpack(text: str) -> tuple[Any, ...]:
    values: array[Any] = array(_PACKINGS[text[:3]])
    values.frombytes(a2b_base64(text[3:], strict_mode=True))
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def _mapping_reader(inner: Fit) -> Read:
    def read(data: dict[str, Any], texts: Texts) -> dict[str, Any]:
        if all(inner(kind) is None for kind in {*map(type, data.values())}):
            return data
        return {name: _each(inner, part, texts) for name, part in data.items()}

    return read


def _each(fit: Fit, data: Any, texts: Texts) -> Any:
    read = fit(type(data))
    return data if read is None else read(data, texts)


def _fit_bool(kind: Any) -> Read | None:
    return None if kind is bool else _only(str, _read_yes_or_no, "true or false")(kind)


def _read_yes_or_no(data: str, texts: Texts) -> bool:
    if data not in ("yes", "no"):  # as schema 1 wrote them
        raise ValueError(f"{data!r} is neither true nor false")
    return data == "yes"


_PLAIN: dict[Any, Fit] = {
    str: _only(str, _read_text, "a text"),
    int: _only(int, None, "a whole number"),
    bool: _fit_bool,
    float: _fit_float,
}
