"""JSON forms of frozen dataclasses: msgspec reads and checks them; texts and number tuples are
stored compactly.

* A field equal to its default is left out.
* Number tuples longer than eight are packed in base64: `u4:` unsigned 32-bit, `f4:` 32-bit floats where those lose
  nothing, `f8:` 64-bit floats otherwise; little endian. Floats that JSON has no word for are written as text.
* Long texts are written once, under their content's hash (`Texts`), and referred to as `@hash` afterwards; an
  ordinary text that begins with `@` gets a second one.
"""

from __future__ import annotations

import base64
import sys
from array import array
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache
from math import isfinite
from types import GenericAlias
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct, defstruct
from msgspec.structs import astuple

from atts.journal.texts import Texts

LONG_TEXT = 96
"""Texts at least this long are stored by content."""
TAG_FIELD = "kind"
_PACKED_FROM = 9
_PACKINGS: dict[str, Literal["I", "f", "d"]] = {"u4:": "I", "f4:": "f", "f8:": "d"}

Step = Callable[[Any, Texts], Any]


class Form(NamedTuple):
    """How values of one type stand in JSON."""

    stored: Any  # the type that msgspec reads
    write: Step  # the value, to what json writes
    read: Step  # what msgspec read, to the value; ValueError: it cannot be


def _same(value: Any, texts: Texts) -> Any:
    return value


@cache
def form(hint: Any) -> Form:
    """The form of a type: a dataclass, or the type of a field of one."""
    if is_dataclass(hint):
        return dataclass_form(hint)
    if hint in _FORMS:
        return _FORMS[hint]
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return Form(hint, _same, _same)
    if type(None) in arguments:
        (inner,) = (form(part) for part in arguments if part is not type(None))
        # None is written by what holds it
        return Form(inner.stored | None, inner.write, _unless_none(inner.read))
    assert origin is not None, f"no form for {hint}"
    if issubclass(origin, Mapping):
        inner = form(arguments[1])
        return Form(
            GenericAlias(dict, (str, inner.stored)),
            _of_mapping(inner.write),
            _of_mapping(inner.read),
        )
    assert origin is tuple, f"no form for {hint}"
    inner = form(arguments[0])
    return Form(
        GenericAlias(tuple, (inner.stored, ...)),
        _of_tuple(inner.write, list),
        _of_tuple(inner.read, tuple),
    )


def dataclass_form(kind: Any, base: type[Struct] | None = None, tag: str | None = None) -> Form:
    """The form of a dataclass: a struct of the same fields in their own forms.

    With a `base` the struct has its fields as well, and with a `tag` that tag; neither is part of
    the value.
    """
    hints = get_type_hints(kind)
    parts = [(field.name, form(hints[field.name]), _default(field)) for field in fields(kind)]
    stored = defstruct(
        kind.__name__,
        [
            (name, part.stored, NODEFAULT if usual is MISSING else usual)
            for name, part, usual in parts
        ],
        bases=(base,) if base else None,
        tag_field=tag and TAG_FIELD,
        tag=tag,
        kw_only=True,
        forbid_unknown_fields=True,
        gc=False,
    )
    skipped = len(base.__struct_fields__) if base else 0
    return Form(stored, _dataclass_writer(parts), _dataclass_reader(kind, parts, skipped))


def _default(field: Any) -> Any:
    """What a field that is left out stands for; MISSING where it may not be."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _dataclass_writer(parts: list[tuple[str, Form, Any]]) -> Step:
    steps = [(name, part.write, usual) for name, part, usual in parts]

    def write(value: Any, texts: Texts) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, step, usual in steps:
            found = getattr(value, name)
            if found is usual or found == usual:
                continue
            kind = type(found)  # most parts are short texts and numbers: they stand for themselves
            is_short = kind is str and len(found) < LONG_TEXT and found[:1] != "@"
            is_plain = (
                step is _same or is_short or found is None or (kind is float and isfinite(found))
            )
            data[name] = found if is_plain else step(found, texts)
        return data

    return write


def _dataclass_reader(kind: Any, parts: list[tuple[str, Form, Any]], skipped: int) -> Step:
    reads = [
        (place, part.read) for place, (_, part, _) in enumerate(parts) if part.read is not _same
    ]
    names = [name for name, _, _ in parts]
    pair = (names.index("draft_ids"), names.index("target_ids")) if "draft_ids" in names else None

    def read(found: Any, texts: Texts) -> Any:
        if type(found) is kind:  # the default of a field that was left out
            return found
        values = list(astuple(found)[skipped:])
        for place, step in reads:
            values[place] = step(values[place], texts)
        # a shared tokenizer: one tuple, as when it was written
        if pair and values[pair[0]] == values[pair[1]]:
            values[pair[1]] = values[pair[0]]
        return kind(*values)

    return read


def _unless_none(step: Step) -> Step:
    return (
        step
        if step is _same
        else lambda value, texts: None if value is None else step(value, texts)
    )


def _of_mapping(step: Step) -> Step:
    def each(value: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
        return {
            n: v if type(v) is float and isfinite(v) else step(v, texts) for n, v in value.items()
        }

    return step if step is _same else each


def _of_tuple(step: Step, make: Callable[[list[Any]], Any]) -> Step:
    return (
        step if step is _same else lambda value, texts: make([step(part, texts) for part in value])
    )


def _write_text(value: str, texts: Texts) -> str:
    if len(value) >= LONG_TEXT:
        return "@" + texts.refer(value)
    return "@" + value if value.startswith("@") else value


def _read_text(stored: str, texts: Texts) -> str:
    if stored[:1] != "@":
        return stored
    return stored[1:] if stored.startswith("@@") or stored == "@" else texts.find(stored[1:])


def _write_float(value: float, texts: Texts) -> float | str:
    return value if isfinite(value) else str(value)


def _read_float(stored: float | str, texts: Texts) -> float:
    return float(stored) if type(stored) is str else stored  # type: ignore[return-value]


def _read_bool(stored: bool | str, texts: Texts) -> bool:
    return stored == "yes" if isinstance(stored, str) else stored


def _write_ints(value: tuple[int, ...], texts: Texts) -> Any:
    if len(value) < _PACKED_FROM or min(value) < 0 or max(value) >> 32:
        return value
    return _pack("u4:", array("I", value), texts)


def _write_floats(value: tuple[float, ...], texts: Texts) -> Any:
    if len(value) < _PACKED_FROM:
        return [_write_float(part, texts) for part in value]
    wide = array("d", value)
    try:
        narrow = array("f", wide)
    except OverflowError:  # beyond the largest 32-bit float
        return _pack("f8:", wide, texts)
    return _pack("f4:", narrow, texts) if array("d", narrow) == wide else _pack("f8:", wide, texts)


def _pack(prefix: str, values: array[Any], texts: Texts) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    text = prefix + base64.b64encode(values.tobytes()).decode()
    return "@" + texts.refer(text) if len(text) >= LONG_TEXT else text


def _reads_packed(prefixes: tuple[str, ...], read: Step) -> Step:
    def read_packed(stored: Any, texts: Texts) -> tuple[Any, ...]:
        if type(stored) is not str:
            return stored if read is _same else tuple([read(part, texts) for part in stored])
        text = _read_text(stored, texts)
        if text[:3] not in prefixes:
            raise ValueError(f"{text[:16]!r} is not a packed tuple")
        return _unpack(text)

    return read_packed


@lru_cache(maxsize=256)
def _unpack(text: str) -> tuple[Any, ...]:
    """The numbers; a text that was met lately gives the same tuple again."""
    values: array[Any] = array(_PACKINGS[text[:3]])
    values.frombytes(a2b_base64(text[3:], strict_mode=True))
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


_Float = float | Literal["inf", "-inf", "nan"]
_FORMS: Mapping[Any, Form] = {
    str: Form(str, _write_text, _read_text),
    int: Form(int, _same, _same),
    bool: Form(bool | Literal["yes", "no"], _same, _read_bool),  # words were written under schema 1
    float: Form(_Float, _write_float, _read_float),
    tuple[int, ...]: Form(tuple[int, ...] | str, _write_ints, _reads_packed(("u4:",), _same)),
    tuple[float, ...]: Form(
        tuple[_Float, ...] | str, _write_floats, _reads_packed(("f4:", "f8:"), _read_float)
    ),
}
