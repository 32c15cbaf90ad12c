"""Saved state: how parts of a calibrator become JSON, add up, and are kept in a file with a digest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from atts.errors import CalibrationInputError, StorageError
from atts.files import from_json, read_ordinary, replace_named

K = TypeVar("K")
V = TypeVar("V")


class Persisted:
    """What has a state: the attributes that `saved` names, in the file without their leading
    underscore.

    Numbers and collections of scores add up in a merge, lists are taken over. So what is merged
    into a fresh part is restored.
    """

    __slots__ = ()
    saved: ClassVar[tuple[str, ...]] = ()

    def state(self) -> Any:
        """Everything that decides the next answer, as JSON."""
        return {name.lstrip("_"): _as_json(getattr(self, name)) for name in self.saved}

    def merge(self, state: Any) -> None:
        """Add what another part of the same kind has seen."""
        for name in self.saved:
            setattr(self, name, _merged(getattr(self, name), state[name.lstrip("_")]))


class DefaultTable(dict[K, V], Persisted):
    """A dictionary that makes the value of a key it lacks, and reads its keys back from JSON with
    `key`.
    """

    def __init__(self, key: Callable[[Any], K], make: Callable[[], V]) -> None:
        super().__init__()
        self._key = key
        self._make = make

    def __missing__(self, key: K) -> V:
        made = self[key] = self._make()
        return made

    def state(self) -> Any:
        """Value by key."""
        return {str(key): _as_json(value) for key, value in self.items()}

    def merge(self, state: Any) -> None:
        """Value by value."""
        for name, value in state.items():
            key = self._key(name)
            self[key] = _merged(self[key], value)


class GroupTable(DefaultTable[tuple[str, int], tuple[V, ...]]):
    """A table by (question, turn), several values each: rows of both and the values in the file."""

    def forget(self, question: str) -> None:
        """Drop every turn of a question."""
        for key in [key for key in self if key[0] == question]:
            del self[key]

    def __init__(self, make: Callable[[], tuple[V, ...]]) -> None:
        super().__init__(lambda key: (str(key[0]), int(key[1])), make)

    def state(self) -> Any:
        """Rows."""
        return [[*key, *map(_as_json, values)] for key, values in self.items()]

    def merge(self, state: Any) -> None:
        """Row by row."""
        for question, turn, *values in state:
            key = self._key((question, turn))
            self[key] = _merged(self[key], values)


def _as_json(value: Any) -> Any:
    if isinstance(value, Persisted):
        return value.state()
    return value if isinstance(value, int | float) else list(value)


def _merged(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Persisted):
        mine.merge(theirs)
    elif isinstance(mine, int | float):
        return mine + type(mine)(theirs)
    elif isinstance(mine, tuple):
        return tuple(_merged(one, other) for one, other in zip(mine, theirs, strict=True))
    elif isinstance(mine, list):
        return [float(value) for value in theirs]
    else:
        for score in theirs:
            mine.add(float(score))
    return mine


def state_text(state: Mapping[str, Any]) -> str:
    """A state with its digest, as its file holds it."""
    body = strict(state)
    return json.dumps({**body, "digest": _digest(body)}, allow_nan=False) + "\n"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state with its digest, whole or not at all.

    :raises StorageError: if the disk refuses.
    """
    try:
        replace_named(path, state_text(state).encode())
    except (OSError, MemoryError) as problem:
        advice = (
            "Free space, or name another"
            if path.parent.is_dir()
            else "Make its folder first, or name another"
        )
        raise StorageError(
            path, f"the calibration cannot be written ({_reason(problem)})", advice
        ) from None


def _reason(problem: OSError | MemoryError) -> str:
    return "there is no memory left" if isinstance(problem, MemoryError) else str(problem.strerror)


def read_state(path: Path) -> dict[str, Any]:
    """The state that `write_state` wrote.

    :raises CalibrationInputError: if the file is missing, cut short, altered or something else.
    """
    try:
        found = from_json(read_ordinary(path).decode("utf-8"))
    except OSError as problem:
        raise CalibrationInputError(
            f"calibration file {path}", problem.strerror, "a file that can be read"
        ) from None
    except ValueError as problem:
        raise CalibrationInputError(
            f"calibration file {path}",
            f"not whole ({problem})",
            "a complete file; this one was cut short or edited",
        ) from None
    if not isinstance(found, dict) or "digest" not in found:
        raise CalibrationInputError(
            f"calibration file {path}", type(found).__name__, "a state with its digest"
        )
    state = cast(dict[str, Any], found)
    if state.pop("digest") != _digest(state):
        raise CalibrationInputError(
            f"calibration file {path}", "altered", "content that matches its digest"
        )
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


def same(one: Any, other: Any) -> bool:
    """Whether two values are one as strict JSON, where 1 is 1.0 and nothing else is a number.

    >>> same({"turn": 1}, {"turn": 1.0}), same([1], [True])
    (True, False)
    """
    return json.dumps(_as_floats(strict(one)), sort_keys=True) == json.dumps(
        _as_floats(strict(other)), sort_keys=True
    )


def _as_floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_floats(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_floats(part) for part in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _digest(state: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
