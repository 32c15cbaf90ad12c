"""The saved state of a calibrator: JSON that can be merged, in a file with a digest."""

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
    """A part of a calibrator. Its state consists of the attributes whose names are in `saved`.

    The file contains these names without their leading underscore. A merge adds up numbers, joins
    collections of scores, and copies lists. So merging a state into a new, empty part restores it.
    """

    __slots__ = ()
    saved: ClassVar[tuple[str, ...]] = ()

    def state(self) -> Any:
        """Return everything that later decisions depend on, as JSON."""
        return {name.lstrip("_"): _as_json(getattr(self, name)) for name in self.saved}

    def merge(self, state: Any) -> None:
        """Merge the state of another part of the same class into this part."""
        for name in self.saved:
            setattr(self, name, _merged(getattr(self, name), state[name.lstrip("_")]))


class DefaultTable(dict[K, V], Persisted):
    """A dictionary that creates missing values; `key` converts keys from their form in the JSON
    file.
    """

    def __init__(self, key: Callable[[Any], K], make: Callable[[], V]) -> None:
        super().__init__()
        self._key = key
        self._make = make

    def __missing__(self, key: K) -> V:
        made = self[key] = self._make()
        return made

    def state(self) -> Any:
        """Return the table as JSON, with a value for each key."""
        return {str(key): _as_json(value) for key, value in self.items()}

    def merge(self, state: Any) -> None:
        """Merge another table into this one, key by key."""
        for name, value in state.items():
            key = self._key(name)
            self[key] = _merged(self[key], value)


class GroupTable(DefaultTable[tuple[str, int], tuple[V, ...]]):
    """A table with several values for each (question, turn), which form one row in the file."""

    def __init__(self, make: Callable[[], tuple[V, ...]]) -> None:
        super().__init__(lambda key: (str(key[0]), int(key[1])), make)

    def forget(self, question: str) -> None:
        """Drop every turn of a question."""
        for key in [key for key in self if key[0] == question]:
            del self[key]

    def state(self) -> Any:
        """Return one row per key, with the key and its values."""
        return [[*key, *map(_as_json, values)] for key, values in self.items()]

    def merge(self, state: Any) -> None:
        """Merge the rows of another table into this one, key by key."""
        for question, turn, *values in state:
            key = self._key((question, turn))
            self[key] = _merged(self[key], values)


def _as_json(value: Any) -> Any:
    if isinstance(value, Persisted):
        return value.state()
    if isinstance(value, int | float):
        return value
    return list(value)


def _merged(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Persisted):
        mine.merge(theirs)
        return mine
    if isinstance(mine, int | float):
        return mine + type(mine)(theirs)
    if isinstance(mine, tuple):
        return tuple(_merged(one, other) for one, other in zip(mine, theirs, strict=True))
    if isinstance(mine, list):
        return [float(value) for value in theirs]
    for score in theirs:
        mine.add(float(score))
    return mine


def state_text(state: Mapping[str, Any]) -> str:
    """Return the content of the file for a state: the state as JSON, with its digest."""
    body = strict(state)
    return json.dumps({**body, "digest": _digest(body)}, allow_nan=False) + "\n"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state with its digest, atomically.

    :raises StorageError: if the file cannot be written.
    """
    try:
        replace_named(path, state_text(state).encode())
    except (OSError, MemoryError) as problem:
        reason = "there is no memory left"
        if isinstance(problem, OSError):
            reason = str(problem.strerror)
        advice = "Free some space, or name another file"
        if not path.parent.is_dir():
            advice = "Create the folder of the file, or name another file"
        raise StorageError(path, f"the calibration cannot be written ({reason})", advice) from None


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that `write_state` wrote.

    :raises CalibrationInputError: if the file is missing, cut short, changed or not a state.
    """
    try:
        content = from_json(read_ordinary(path).decode("utf-8"))
    except OSError as problem:
        raise CalibrationInputError(
            f"calibration file {path}", problem.strerror, "a file that can be read"
        ) from None
    except ValueError as problem:
        raise CalibrationInputError(
            f"calibration file {path}",
            f"cut short or edited ({problem})",
            "a complete and unedited file",
        ) from None
    if not isinstance(content, dict) or "digest" not in content:
        raise CalibrationInputError(
            f"calibration file {path}", type(content).__name__, "a saved calibration with a digest"
        )
    state = cast(dict[str, Any], content)
    if state.pop("digest") != _digest(state):
        raise CalibrationInputError(
            f"calibration file {path}", "altered", "contents that match the digest in the file"
        )
    return state


def strict(value: Any) -> Any:
    """Convert a value for JSON, with infinities as strings that float() can read.

    :raises CalibrationInputError: if the value contains NaN.

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
    """Return True if two values are equal as JSON. Here 1 equals 1.0, but True does not equal 1.

    >>> same({"turn": 1}, {"turn": 1.0}), same([1], [True])
    (True, False)
    """
    # In Python, True equals 1, and a tuple never equals a list. So compare the values as JSON text.
    first = json.dumps(_as_floats(strict(one)), sort_keys=True)
    second = json.dumps(_as_floats(strict(other)), sort_keys=True)
    return first == second


def _as_floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_floats(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_floats(part) for part in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _digest(state: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
