"""The reader of run directories, whole or damaged, finished or not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atts.core import CallSpan, Outcome
from atts.errors import JournalCorrupt, JournalError, UsageError
from atts.files import storage, sync_directory, write_atomic
from atts.journal.directory import JOURNAL, LOCK, MANIFEST, held
from atts.journal.events import Decided, Entry, Event
from atts.journal.lines import LineReader, read_entries
from atts.journal.manifest import Manifest, load_manifest
from atts.journal.state import FACTS, RunClock, RunState, read_outcomes

MERGED = "merged"
"""Name of the setting that lists the runs of which a merged run was made."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run directory that holds a run; each method reads the journal as it is at that moment.

        run = open_run(directory)
        run.manifest, run.setting("method")  # what was run
        run.state().finished                 # {id: FinishedProblem}: status, answer, verdict, votes, usage
        run.outcomes()                       # the same problems whole, turn by turn, one after the other
        run.decisions()                      # every decision of the gate, in order
        run.nodes()                          # every call that did work, all sessions on one clock
        run.entries(kinds)                   # every event, or every event of some kinds

    A reader that wants several of these in one pass applies the entries to a `RunState` itself; its
    `apply` returns the Outcome of the problem that an entry completes.

    :raises JournalCorrupt: by every method that reads: a line before the last is damaged.
    :raises JournalVersion: likewise: another version wrote it.
    :raises StorageError: likewise: the file cannot be read.
    """

    directory: Path
    manifest: Manifest

    def setting(self, name: str) -> Any:
        """Return a value of the configuration, None if the run has no setting of that name."""
        setting = self.manifest.configuration.get(name)
        return None if setting is None else setting.value

    def given(self, name: str) -> Any:
        """Return a value of the settings as they were given, None if there is none of that name."""
        setting = self.manifest.settings.get(name)
        return None if setting is None else setting.value

    @property
    def policy(self) -> dict[str, Any]:
        """Return the run's policy as JSON data, empty if the run has none."""
        return self.setting("policy") or {}

    @property
    def part_starts(self) -> tuple[int, ...]:
        """Return the first session of each merged run but the first; empty if nothing was merged."""
        counts = [int(part["sessions"]) for part in self.setting(MERGED) or ()]
        return tuple(1 + sum(counts[:number]) for number in range(1, len(counts)))

    def entries(self, kinds: Collection[type[Event]] | None = None) -> Iterator[Entry]:
        """Yield every event in order, or those of some kinds and the openings of sessions."""
        return read_entries(self.directory / JOURNAL, kinds=kinds)

    def state(self, kinds: Collection[type[Event]] | None = None) -> RunState:
        """Return the state after all entries: finished problems in brief, sessions, seconds."""
        state = RunState()
        for entry in self.entries(kinds):
            state.apply(entry)
        return state

    def outcomes(self) -> Iterator[Outcome]:
        """Yield every finished problem whole, each once, the incomplete ones last."""
        return read_outcomes(self.entries(FACTS))

    def decisions(self) -> Iterator[Decided]:
        """Yield every decision in order, without the previews that only asked for a score."""
        for entry in self.entries((Decided,)):
            event = entry.event
            if isinstance(event, Decided) and event.decision.action != "verify":
                yield event

    def nodes(self) -> Iterator[CallSpan]:
        """Yield every node of the task graph that did work, on the run's clock."""
        clock = RunClock()
        for entry in self.entries((CallSpan,)):
            clock.advance(entry)
            if isinstance(entry.event, CallSpan) and entry.event.source == "live":
                yield clock.aligned(entry.event, entry.at)


def check_exists(path: Path) -> None:
    """Refuse a path that names nothing, where a run or a file is expected.

    :raises JournalError: there is nothing at this path.
    """
    if not path.exists():
        raise JournalError(
            path,
            "there is no run or file here",
            "Give the directory of `atts eval --out`, or a file",
        )


def run_if_begun(directory: Path) -> RecordedRun | None:
    """Return the run in this directory, None if no run was begun there.

    :raises JournalError: the run cannot be read.
    """
    try:
        return open_run(directory)
    except JournalError:
        if (directory / JOURNAL).exists():
            raise
        return None


def open_run(
    directory: Path, advice: str = "Give the directory of `atts eval --out DIRECTORY`"
) -> RecordedRun:
    """Return the run that a directory holds.

    :raises JournalError: there is no run here.
    :raises JournalCorrupt: its manifest is damaged.
    :raises JournalVersion: another version wrote it.
    :raises StorageError: it cannot be read.
    """
    manifest = load_manifest(directory / MANIFEST)
    if manifest is None or not (directory / JOURNAL).exists():
        raise JournalError(directory, "there is no run here", advice)
    return RecordedRun(directory, manifest)


@dataclass(frozen=True, slots=True)
class JournalCheck:
    """The contents of a journal up to its end, or up to the first line that is damaged."""

    directory: str
    lines: int  # whole lines
    length: int  # length of the whole lines, in bytes
    lost: int  # bytes after the whole lines
    sessions: int
    complete: int  # problems
    open: int  # problems that were begun and are not complete
    damage: str = ""  # description of the first damaged line; a torn last line is not damage

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def check_journal(directory: Path) -> JournalCheck:
    """Read a whole run, running or ended, and return what is whole.

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
    """Copy the whole lines of a run into a new directory, where its command can continue.

    :raises UsageError: `out` is not empty.
    :raises JournalLocked: the run is being written.
    :raises JournalError: there is no run, its manifest is damaged, or nothing of its journal is
        whole.
    """
    checked = check_journal(directory)
    with storage(out):
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out}: it is not empty; choose a new directory for what is saved")
    if not checked.lines:
        raise JournalCorrupt(
            directory, "not one line of its journal is whole", "Run it again in another directory"
        )
    with held(directory / LOCK, directory), storage(directory):
        with (directory / JOURNAL).open("rb") as file:
            whole = file.read(checked.length)
        manifest = (directory / MANIFEST).read_bytes()
    write_atomic(out / JOURNAL, whole)
    write_atomic(out / MANIFEST, manifest)
    with storage(out):
        sync_directory(out)
    return checked
