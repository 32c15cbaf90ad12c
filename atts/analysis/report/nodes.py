"""Reads the nodes of a run's task graph from its journal, all sessions on one clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atts.errors import JournalError
from atts.journal import JOURNAL, CallSpan, Entry, RunClock, SessionClosed, SessionOpened, read_entries


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

    def tick(self, at: float) -> None:
        """The moment of a line of this session."""
        self._clock.seconds = self._clock.before + at

    def node(self, at: float, line: Mapping[str, Any]) -> CallSpan:
        """The node of a line's fields, `at` its moment in the session."""
        ended: float = line["ended"]
        if self._zero is None:
            self._zero = ended - at
        shift = self._clock.before - self._zero
        return CallSpan(
            line["node"], line["stage"], line["engine"], line["problem"], line["sample"], line["turn"],
            line["ready"] + shift, line["queued"] + shift, line["started"] + shift, ended + shift,
            line.get("after", ()), line.get("attempt", 0), line.get("status", "done"), line.get("tokens", 0),
        )  # fmt: skip


def is_live(line: Mapping[str, Any]) -> bool:
    """Whether the node did its work in this session; a recalled one stands for work that is there already."""
    return bool(line.get("source", "live") == "live")


def read_nodes(directory: Path) -> list[CallSpan]:
    """Every node that did work in a run, alive or over, once.

    :raises JournalError: there is no run, or it cannot be read.
    """
    path = directory / JOURNAL
    if not path.exists():
        raise JournalError(directory, "there is no run here", "Give the directory of `atts eval --out DIRECTORY`")
    clock, found = NodeClock(), list[CallSpan]()

    def take(at: float, line: Mapping[str, Any]) -> None:
        clock.tick(at)
        if is_live(line):
            found.append(clock.node(at, line))

    for entry in read_entries(path, kinds=(SessionOpened, SessionClosed, CallSpan), plain={CallSpan: take}):
        clock.hear(entry)
    return found
