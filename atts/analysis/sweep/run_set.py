"""The file that makes a directory of runs a set: what varies, what does not, and where each run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from atts.errors import JournalCorrupt, JournalError
from atts.files import read_ordinary, storage, write_atomic
from atts.journal import Json

SWEEP = "sweep.json"
Value = str | int | float | bool | None
"""What a setting that varies can be."""
PointKind = Literal["point", "reference"]
"""A run of the grid, or a baseline that all of them are compared with."""


@dataclass(frozen=True, slots=True)
class RunSetPoint:
    """One run of the set: `values` are what it sets otherwise than the others, `folder` where it is
    in the set's.
    """

    name: str
    kind: PointKind
    values: Mapping[str, Value]
    folder: str


@dataclass(frozen=True, slots=True)
class RunSet:
    """A set of runs: `over` names what varies with its values, `settings` what all of them share."""

    over: Mapping[str, tuple[Value, ...]]
    settings: Mapping[str, Json]
    points: tuple[RunSetPoint, ...]
    schema: Literal[1] = 1


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """What the file must hold, and of which kind."""

    over: dict[str, list[Value]]
    settings: dict[str, msgspec.Raw]
    points: list[RunSetPoint]
    schema: Literal[1]


def load_run_set(directory: Path) -> RunSet:
    """The set that a directory holds.

    :raises JournalError: there is none, or it cannot be read.
    :raises JournalCorrupt: the file is not one.
    """
    path = directory / SWEEP
    with storage(path):
        if not path.exists():
            raise JournalError(
                directory, "there is no sweep here", "Give the directory of `atts sweep --out`"
            )
        text = read_ordinary(path)
    try:
        found = msgspec.json.decode(text, type=_Stored)
        settings = {name: msgspec.json.decode(raw) for name, raw in found.settings.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalCorrupt(
            path, f"it is not a set of runs ({error})", "The runs in it are whole; restore a copy"
        ) from error
    outside = [point.folder for point in found.points if Path(point.folder).name != point.folder]
    if outside:
        raise JournalCorrupt(
            path, f"the run {outside[0]!r} would not be in this directory", "Restore a copy"
        )
    return RunSet(
        {name: tuple(values) for name, values in found.over.items()}, settings, tuple(found.points)
    )


def save_run_set(directory: Path, held: RunSet) -> None:
    """Write it whole or not at all.

    :raises StorageError: the disk refuses.
    """
    text = msgspec.json.format(msgspec.json.encode(asdict(held)), indent=2)
    write_atomic(directory / SWEEP, text + b"\n")
