"""Strict JSON: Python values as JSON holds them (NaN as null, infinities as strings), and texts
read strictly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def jsonable(value: Any) -> Any:
    """The value as JSON would give it back; what is not finite becomes null, infinities words.

    >>> jsonable({"rate": float("nan"), "cost": float("inf"), "turns": (1, 2)})
    {'rate': None, 'cost': 'inf', 'turns': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): jsonable(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(text: str) -> Any:
    """The value of a JSON text; Infinity is read as Python writes it.

    :raises ValueError: it is none, is nested too deeply, or holds NaN or half a character.
    """
    try:
        found = json.loads(text, parse_constant=_constant)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _constant(word: str) -> float:
    if word == "NaN":
        raise ValueError("it holds NaN")
    return float(word)
