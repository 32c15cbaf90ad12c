"""Frozen values to JSON and back, exactly: typed by their dataclasses, compact where it counts.

* A field equal to its default is left out.
* Number tuples longer than eight are packed in base64: `u4:` unsigned 32-bit, `f4:` 32-bit floats where those lose
  nothing, `f8:` 64-bit floats otherwise; little endian. Floats that JSON has no word for are written as text.
* Long texts are written once, under their content's hash (`Texts`), and referred to as `@hash` afterwards; an
  ordinary text that begins with `@` gets a second one.
"""

from __future__ import annotations

import base64
import sys
import types
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from hashlib import blake2b
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LONG_TEXT = 96
"""Texts at least this long are stored by content."""
_PACKED_FROM = 9
_CACHE_CHARACTERS = 16 << 20


class Texts:
    """The long texts seen lately, by hash; writer and reader keep theirs in step by doing the same in the same order.

    What the writer still holds, a reader of all it wrote holds too, so a reference never dangles, and neither holds
    more than `limit` characters. A text forgotten and met again is written again.
    """

    def __init__(self, limit: int = _CACHE_CHARACTERS) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()
        self._limit = limit
        self._size = 0
        self.fresh: list[tuple[str, str]] = []  # to be written before the line that refers to them

    def refer(self, text: str) -> str:
        """The hash to write instead of a long text; a text not known yet joins `fresh`."""
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=15).digest()
        name = base64.urlsafe_b64encode(digest).decode()
        if name not in self._known:
            self.fresh.append((name, text))
        self.learn(name, text)
        return name

    def learn(self, name: str, text: str) -> None:
        """Take a text in, forgetting the ones unused for longest."""
        if name in self._known:
            self._known.move_to_end(name)
            return
        self._known[name] = text
        self._size += len(text)
        while self._size > self._limit and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._size -= len(forgotten)

    def find(self, name: str) -> str:
        """The text of a reference.

        :raises ValueError: the reference dangles.
        """
        if name not in self._known:
            raise ValueError(f"it refers to a text @{name} that is not there")
        self._known.move_to_end(name)
        return self._known[name]


Encoder = Callable[[Any, Texts], Any]
Decoder = Callable[[Any, Texts], Any]


def encoder(hint: Any) -> Encoder:
    """The function that turns a value of this type into plain JSON data."""
    compiled: Encoder = _compile(hint, _ENCODERS, encoder, _dataclass_encoder)
    return compiled


def decoder(hint: Any) -> Decoder:
    """The inverse; it raises ValueError for data that is not of the type."""
    compiled: Decoder = _compile(hint, _DECODERS, decoder, _dataclass_decoder)
    return compiled


def _compile(
    hint: Any, table: Mapping[Any, Any], recurse: Callable[[Any], Any], of_dataclass: Callable[[Any], Any]
) -> Any:
    if is_dataclass(hint):
        return of_dataclass(hint)
    if hint in table:
        return table[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return table[Literal](frozenset(arguments))
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return table[Union](recurse(inner))
    if origin is tuple and arguments[1:] == (...,):
        return table[tuple](recurse(arguments[0]))
    assert origin is not None, f"no way to write {hint}"
    assert issubclass(origin, Mapping), f"no way to write {hint}"
    return table[Mapping](recurse(arguments[1]))


def _dataclass_encoder(kind: Any) -> Encoder:
    hints = get_type_hints(kind)
    plan = [(field.name, encoder(hints[field.name]), _default(field)) for field in fields(kind)]

    def encode(value: Any, texts: Texts) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, write, default in plan:
            part = getattr(value, name)
            if part is not default and part != default:
                data[name] = write(part, texts)
        return data

    return encode


def _dataclass_decoder(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    plan = {field.name: decoder(hints[field.name]) for field in fields(kind)}
    needed = [field.name for field in fields(kind) if _default(field) is MISSING]

    def decode(data: Any, texts: Texts) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"{kind.__name__} is not an object")
        if unknown := data.keys() - plan.keys():
            raise ValueError(f"{kind.__name__} has an unknown field {min(unknown)!r}")
        if missing := [name for name in needed if name not in data]:
            raise ValueError(f"{kind.__name__} lacks {missing[0]!r}")
        parts = {name: plan[name](part, texts) for name, part in data.items()}
        if "draft_ids" in parts and parts["draft_ids"] == parts.get("target_ids"):
            parts["target_ids"] = parts["draft_ids"]  # a shared tokenizer: one tuple, as when it was written
        return kind(**parts)

    return decode


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _write_text(value: str, texts: Texts) -> str:
    if len(value) >= LONG_TEXT:
        return "@" + texts.refer(value)
    return "@" + value if value.startswith("@") else value


def _read_text(data: Any, texts: Texts) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{data!r} is not a text")
    if not data.startswith("@"):
        return data
    return data[1:] if data.startswith("@@") or data == "@" else texts.find(data[1:])


def _write_float(value: float, texts: Texts) -> float | str:
    return value if isfinite(value) else str(value)


def _read_float(data: Any, texts: Texts) -> float:
    if isinstance(data, str) and data in ("inf", "-inf", "nan"):
        return float(data)
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise ValueError(f"{data!r} is not a number")
    return data if isinstance(data, float) else float(data)


def _read_int(data: Any, texts: Texts) -> int:
    if isinstance(data, bool) or not isinstance(data, int):
        raise ValueError(f"{data!r} is not a whole number")
    return data


def _write_plain(value: Any, texts: Texts) -> Any:
    return value


def _pack(prefix: str, values: array[Any], texts: Texts) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return _write_text(prefix + base64.b64encode(values.tobytes()).decode(), texts)


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


_PACKINGS: dict[str, Literal["I", "f", "d"]] = {"u4:": "I", "f4:": "f", "f8:": "d"}


def _unpack(data: str, texts: Texts, allowed: tuple[str, ...]) -> tuple[Any, ...]:
    text = _read_text(data, texts)
    if text[:3] not in allowed:
        raise ValueError(f"{text[:16]!r} is not a packed tuple")
    values: array[Any] = array(_PACKINGS[text[:3]])
    values.frombytes(base64.b64decode(text[3:], validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def _tuple_encoder(write: Encoder) -> Encoder:
    if write is _ENCODERS[int]:
        return _write_ints
    if write is _ENCODERS[float]:
        return _write_floats
    return lambda value, texts: [write(part, texts) for part in value]


def _tuple_decoder(read: Decoder) -> Decoder:
    packings = {_DECODERS[int]: ("u4:",), _DECODERS[float]: ("f4:", "f8:")}.get(read, ())

    def decode(data: Any, texts: Texts) -> tuple[Any, ...]:
        if packings and isinstance(data, str):
            return _unpack(data, texts, packings)
        if not isinstance(data, list):
            raise ValueError(f"{data!r} is not a list")
        return tuple(read(part, texts) for part in data)

    return decode


def _mapping_decoder(read: Decoder) -> Decoder:
    def decode(data: Any, texts: Texts) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise ValueError(f"{data!r} is not an object")
        return {name: read(part, texts) for name, part in data.items()}

    return decode


def _literal_decoder(allowed: frozenset[Any]) -> Decoder:
    def decode(data: Any, texts: Texts) -> Any:
        if isinstance(data, list | dict) or data not in allowed:
            raise ValueError(f"{data!r} is not one of {', '.join(sorted(map(str, allowed)))}")
        return data

    return decode


_ENCODERS: dict[Any, Any] = {
    str: _write_text,
    int: _write_plain,
    float: _write_float,
    Literal: lambda allowed: _write_plain,
    Union: lambda write: lambda value, texts: None if value is None else write(value, texts),
    tuple: _tuple_encoder,
    Mapping: lambda write: lambda value, texts: {name: write(part, texts) for name, part in value.items()},
}
_DECODERS: dict[Any, Any] = {
    str: _read_text,
    int: _read_int,
    float: _read_float,
    Literal: _literal_decoder,
    Union: lambda read: lambda data, texts: None if data is None else read(data, texts),
    tuple: _tuple_decoder,
    Mapping: _mapping_decoder,
}
