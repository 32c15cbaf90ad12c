"""Turns the numbers of a report into strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def strict(value: Any) -> Any:
    """The value as JSON would give it back: what is not finite becomes null, infinities words.

    >>> strict({"rate": float("nan"), "cost": float("inf"), "turns": (1, 2)})
    {'rate': None, 'cost': 'inf', 'turns': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: strict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): strict(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def dumps(value: Any) -> str:
    """The value as one line of JSON."""
    return json.dumps(strict(value), allow_nan=False, ensure_ascii=False)
