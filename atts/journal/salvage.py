"""Examination of a run directory line by line, and the salvage of what is whole of one that is
damaged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atts.errors import JournalCorrupt, UsageError
from atts.files import storage, sync_directory, write_atomic
from atts.journal.files import held
from atts.journal.lines import LineReader
from atts.journal.reader import open_run
from atts.journal.state import RunState
from atts.journal.writer import JOURNAL, LOCK, MANIFEST


@dataclass(frozen=True, slots=True)
class JournalCheck:
    """What a journal holds up to its end, or up to the first line that is damaged."""

    directory: str
    lines: int  # whole ones
    length: int  # of them, in bytes
    lost: int  # bytes after them
    sessions: int
    complete: int  # problems
    open: int  # problems that were begun and are not complete
    damage: str = ""  # of the first line that is damaged; a torn last line is none

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def check_journal(directory: Path) -> JournalCheck:
    """Read all of a run, alive or over, and say what is whole.

    :raises JournalError: there is no run, or its manifest is damaged.
    :raises StorageError: it cannot be read.
    """
    run = open_run(directory)
    state = RunState()
    damage = ""
    reader = LineReader(run.directory / JOURNAL)
    try:
        for entry in reader.entries():
            state.apply(entry)
    except JournalCorrupt as error:
        damage = str(error)
    with storage(reader.path):
        size = reader.path.stat().st_size
    complete = state.done
    begun = len(state.finished.keys() | state.open.keys())
    lost = size - reader.length
    return JournalCheck(
        str(directory),
        reader.number,
        reader.length,
        lost=lost,
        sessions=state.sessions,
        complete=complete,
        open=begun - complete,
        damage=damage,
    )


def salvage(directory: Path, out: Path) -> JournalCheck:
    """Copy what is whole of a run into a new directory, where its command goes on; the damaged one
    stays as it is.

    :raises UsageError: `out` is not empty.
    :raises JournalLocked: the run is being written.
    :raises JournalError: there is no run, its manifest is damaged, or nothing of its journal is
        whole.
    """
    found = check_journal(directory)
    with storage(out):
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out}: it is not empty; choose a new directory for what is saved")
    if not found.lines:
        raise JournalCorrupt(
            directory, "not one line of its journal is whole", "Run it anew in another directory"
        )
    with held(directory / LOCK, directory), storage(directory):
        with (directory / JOURNAL).open("rb") as file:
            whole = file.read(found.length)
        manifest = (directory / MANIFEST).read_bytes()
    write_atomic(out / JOURNAL, whole)
    write_atomic(out / MANIFEST, manifest)
    with storage(out):
        sync_directory(out)
    return found
