"""Calibration files: JSON with a digest, written in one step, refused when damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from atts.errors import CalibrationInputError, StorageError
from atts.files import replace_file


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state with its digest, whole or not at all.

    :raises StorageError: if the disk refuses.
    """
    body = strict(state)
    text = json.dumps({**body, "digest": _digest(body)}, allow_nan=False)
    try:
        replace_file(path, (text + "\n").encode())
    except OSError as problem:
        advice = "Free space, or name another" if path.parent.is_dir() else "Make its folder first, or name another"
        raise StorageError(path, f"the calibration cannot be written ({problem.strerror})", advice) from None


def read_state(path: Path) -> dict[str, Any]:
    """The state that `write_state` wrote.

    :raises CalibrationInputError: if the file is missing, cut short, altered or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CalibrationInputError(f"calibration file {path}", problem.strerror, "a file that can be read") from None
    except ValueError as problem:
        raise CalibrationInputError(
            f"calibration file {path}", f"not whole ({problem})", "a complete file; this one was cut short or edited"
        ) from None
    if not isinstance(found, dict) or "digest" not in found:
        raise CalibrationInputError(f"calibration file {path}", type(found).__name__, "a state with its digest")
    state = cast(dict[str, Any], found)
    if state.pop("digest") != _digest(state):
        raise CalibrationInputError(f"calibration file {path}", "altered", "content that matches its digest")
    return state


def strict(value: Any) -> Any:
    """The value as strict JSON holds it: infinities as the strings float() reads, NaN refused.

    :raises CalibrationInputError: for NaN.

    >>> strict({"scores": (1.5, math.inf)})
    {'scores': [1.5, 'inf']}
    """
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise CalibrationInputError("a number of the state", value, "a number")
        return str(value)
    return value


def _digest(state: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
