"""Frozen values to JSON, exactly: typed by their dataclasses, compact where it counts; `decoding` is the way back.

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
_CACHE_NUMBERS = 1 << 20


class Texts:
    """The long texts seen lately, by hash; writer and reader keep theirs in step by doing the same in the same order.

    What the writer still holds, a reader of all it wrote holds too, so a reference never dangles, and neither holds
    more than `limit` characters. A text forgotten and met again is written again.
    """

    def __init__(self, limit: int = _CACHE_CHARACTERS) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()
        self._limit = limit
        self._size = 0
        self._tuples: dict[str, tuple[Any, ...]] = {}
        self._numbers = 0
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

    def unpacked(self, text: str, unpack: Callable[[str], tuple[Any, ...]]) -> tuple[Any, ...]:
        """The tuple a packed text stands for; one that was met lately is the same object, and is not unpacked again."""
        found = self._tuples.get(text)
        if found is None:
            if self._numbers > _CACHE_NUMBERS:
                self._tuples.clear()
                self._numbers = 0
            found = self._tuples[text] = unpack(text)
            self._numbers += len(found)
        return found


Encoder = Callable[[Any, Texts], Any]


def encoder(hint: Any) -> Encoder:
    """The function that turns a value of this type into plain JSON data."""
    if is_dataclass(hint):
        return _dataclass_encoder(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _ENCODERS:
        return _ENCODERS[hint]
    if origin is Literal:
        return _write_plain
    if origin in (Union, types.UnionType):
        return _optional_encoder(encoder(some(arguments)))
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_encoder(encoder(arguments[0]))
    assert origin is not None, f"no way to write {hint}"
    assert issubclass(origin, Mapping), f"no way to write {hint}"
    return _mapping_encoder(encoder(arguments[1]))


def some(arguments: tuple[Any, ...]) -> Any:
    """The type of which None is the only alternative."""
    (inner,) = (argument for argument in arguments if argument is not type(None))
    return inner


def _dataclass_encoder(kind: Any) -> Encoder:
    hints = get_type_hints(kind)
    plan = [(field.name, encoder(hints[field.name]), default(field)) for field in fields(kind)]

    def encode(value: Any, texts: Texts) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, write, usual in plan:
            part = getattr(value, name)
            if part is not usual and part != usual:
                data[name] = write(part, texts)
        return data

    return encode


def default(field: Any) -> Any:
    """What a field that is left out stands for; MISSING where it may not be."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _write_text(value: str, texts: Texts) -> str:
    if len(value) >= LONG_TEXT:
        return "@" + texts.refer(value)
    return "@" + value if value.startswith("@") else value


def _write_float(value: float, texts: Texts) -> float | str:
    return value if isfinite(value) else str(value)


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


def _tuple_encoder(write: Encoder) -> Encoder:
    if write is _ENCODERS[int]:
        return _write_ints
    if write is _ENCODERS[float]:
        return _write_floats
    return lambda value, texts: [write(part, texts) for part in value]


def _mapping_encoder(write: Encoder) -> Encoder:
    return lambda value, texts: {name: write(part, texts) for name, part in value.items()}


def _optional_encoder(write: Encoder) -> Encoder:
    return lambda value, texts: None if value is None else write(value, texts)


_ENCODERS: dict[Any, Encoder] = {str: _write_text, int: _write_plain, bool: _write_plain, float: _write_float}
