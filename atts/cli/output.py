"""How results are printed: one JSON object per line, or a table for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from atts.jsonable import jsonable

if TYPE_CHECKING:
    from atts.evaluators import Estimate

T = TypeVar("T")


def json_line(value: Any) -> str:
    """The value as strict JSON; dataclasses are objects, what is not finite is null or its word."""
    return json.dumps(jsonable(value), allow_nan=False)


def print_json(value: Any) -> None:
    """Print the value as one line of strict JSON, at once."""
    print(json_line(value), flush=True)


def print_result(result: T, as_json: bool, table: Callable[[T], Iterable[str]]) -> None:
    """Print what a command found: as one JSON object, or as the lines that `table` makes of it."""
    print(json_line(result) if as_json else "\n".join(table(result)))


def interval(found: Estimate, missing: str = "-") -> str:
    """An estimate with its interval; `missing` where there was nothing to count."""
    return missing if math.isnan(found.value) else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
