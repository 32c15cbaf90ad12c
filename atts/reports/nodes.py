"""Reads the nodes of a run's task graph from its journal, all sessions on one clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atts.errors import JournalError
from atts.graph import Node
from atts.journal import JOURNAL, Entry, NodeFinished, RunClock, SessionClosed, SessionOpened, read_entries


class NodeClock:
    """Puts nodes on the run's clock, sessions end to end: the journal notes a node the moment it ends."""

    def __init__(self) -> None:
        self._clock = RunClock()
        self._zero: float | None = None  # of this session's node clock, by the run's clock

    @property
    def seconds(self) -> float:
        """What the run took so far."""
        return self._clock.seconds

    def hear(self, entry: Entry) -> None:
        """Any entry, in order."""
        if isinstance(entry.event, SessionOpened):
            self._zero = None
        self._clock.hear(entry)

    def node(self, event: NodeFinished, at: float) -> Node:
        """The node of an entry that was heard, `at` its moment in the session."""
        if self._zero is None:
            self._zero = event.ended - at
        shift = self._clock.before - self._zero
        return Node(
            event.node, event.stage, event.engine, event.problem, event.sample, event.turn, event.attempt,
            event.status, event.ready + shift, event.queued + shift, event.started + shift, event.ended + shift,
            event.after, event.tokens,
        )  # fmt: skip


def read_nodes(directory: Path) -> Iterator[Node]:
    """Every node that did work in a run, alive or over; recalled ones stand for work that is there already.

    :raises JournalError: there is no run, or it cannot be read.
    """
    path = directory / JOURNAL
    if not path.exists():
        raise JournalError(directory, "there is no run here", "Give the directory of `atts eval --out DIRECTORY`")
    clock = NodeClock()
    for entry in read_entries(path, kinds=(SessionOpened, SessionClosed, NodeFinished)):
        clock.hear(entry)
        if isinstance(entry.event, NodeFinished) and entry.event.source == "live":
            yield clock.node(entry.event, entry.at)
