"""Values as strict JSON holds them: dataclasses as objects, NaN as null, infinities as words."""

from __future__ import annotations

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
