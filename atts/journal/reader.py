"""The reader of run directories, finished or not.

    run = open_run(directory)            # JournalError: there is none, or it is damaged, or of another version
    run.manifest, run.setting("method")  # what was run
    run.state().finished                 # {id: FinishedProblem}: status, answer, verdict, samples, votes, usage
    run.outcomes()                       # the same problems whole, turn by turn, one after the other
    run.decisions()                      # every decision of the gate, in order
    run.nodes()                          # every call that did work, all sessions on one clock
    run.entries(kinds)                   # every event, or every event of some kinds

A reader that wants several of these in one pass folds the entries itself:

    state = RunState()
    for entry in run.entries():
        outcome = state.apply(entry)     # the Outcome of the problem this entry completes, else None
    state.finished, state.seconds, state.sessions, state.killed, state.ended

`state.clock.aligned(node, entry.at)` puts a node on the run's clock, and `read_outcomes(entries)`
makes outcomes of entries that are at hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atts.core import CallSpan, Outcome
from atts.errors import JournalError
from atts.journal.events import Decided, Entry, Event
from atts.journal.lines import read_entries
from atts.journal.manifest import Manifest, load_manifest
from atts.journal.state import FACTS, RunClock, RunState, read_outcomes
from atts.journal.writer import JOURNAL, MANIFEST

MERGED = "merged"
"""The configuration's name for the runs that were put together, in a run that was made of others.
"""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run directory that holds a run; each method reads the journal as it stands then.

    :raises JournalCorrupt: by every method that reads: a line before the last is damaged.
    :raises JournalVersion: likewise: another version wrote it.
    :raises StorageError: likewise: the file cannot be read.
    """

    directory: Path
    manifest: Manifest

    def setting(self, name: str) -> Any:
        """A value of the configuration; None where the run has none of that name."""
        held = self.manifest.configuration.get(name)
        return held.value if held is not None else None

    @property
    def policy(self) -> dict[str, Any]:
        """The policy that was run, as JSON data; empty where the run has none."""
        return self.setting("policy") or {}

    @property
    def part_starts(self) -> tuple[int, ...]:
        """The session with which each merged run but the first begins; empty for a run that was not
        merged.
        """
        counts = [int(part["sessions"]) for part in self.setting(MERGED) or ()]
        return tuple(1 + sum(counts[:number]) for number in range(1, len(counts)))

    def entries(self, kinds: Collection[type[Event]] | None = None) -> Iterator[Entry]:
        """Every event in order, or those of some kinds and the openings of sessions; see
        `read_entries`.
        """
        return read_entries(self.directory / JOURNAL, kinds=kinds)

    def state(self, kinds: Collection[type[Event]] | None = None) -> RunState:
        """The run as all its entries leave it: every finished problem in brief, the sessions, the
        seconds.
        """
        state = RunState()
        for entry in self.entries(kinds):
            state.apply(entry)
        return state

    def outcomes(self) -> Iterator[Outcome]:
        """Every finished problem whole, each once, the failed ones last; memory holds those and the
        unfinished.
        """
        return read_outcomes(self.entries(FACTS))

    def decisions(self) -> Iterator[Decided]:
        """Every decision in the order in which they were taken, previews that only asked for a
        score left out.
        """
        for entry in self.entries((Decided,)):
            event = entry.event
            if isinstance(event, Decided) and event.decision.action != "verify":
                yield event

    def nodes(self) -> Iterator[CallSpan]:
        """Every node of the task graph that did work, once, on the run's clock."""
        clock = RunClock()
        for entry in self.entries((CallSpan,)):
            clock.advance(entry)
            if isinstance(entry.event, CallSpan) and entry.event.source == "live":
                yield clock.aligned(entry.event, entry.at)


def check_exists(path: Path) -> None:
    """Where a run or a file is asked for: a path that names nothing is told as a missing run is.

    :raises JournalError: there is nothing.
    """
    if not path.exists():
        raise JournalError(
            path,
            "there is no run or file here",
            "Give the directory of `atts eval --out`, or a file",
        )


def run_if_begun(directory: Path) -> RecordedRun | None:
    """The run in this directory; None where none was begun.

    :raises JournalError: it cannot be read.
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
    """The run that a directory holds.

    :raises JournalError: there is no run here.
    :raises JournalCorrupt: its manifest is not one.
    :raises JournalVersion: another version wrote it.
    :raises StorageError: it cannot be read.
    """
    manifest = load_manifest(directory / MANIFEST)
    if manifest is None or not (directory / JOURNAL).exists():
        raise JournalError(directory, "there is no run here", advice)
    return RecordedRun(directory, manifest)
