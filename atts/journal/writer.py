"""The writer of a run directory: events are queued at once and in order, and written as whole lines.

`record` never waits: it turns the event into its line and queues that. A single background task writes the queue;
`saved` waits until it has. A queue that is full is written on the spot, so memory stays bounded whether or not
anything waits.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import anyio
import anyio.to_thread

from atts import tasks
from atts.errors import JournalCorrupt, OptionError, StorageError
from atts.files import refused, storage, sync_directory
from atts.journal.events import SCHEMA, Entry, Event, SessionClosed, SessionOpened
from atts.journal.files import AppendFile, Opener, locked, open_append, write_all
from atts.journal.lines import JournalEnd, LineWriter, read_entries
from atts.journal.manifest import Manifest, load_manifest, save_manifest

Durability = Literal["always", "interval", "close"]
"""When lines reach the disk itself, which matters when the machine loses power; a killed process loses nothing written.

"always": before `saved` returns; "interval": at most a second later; "close": at the end.
"""

JOURNAL, MANIFEST, LOCK = "journal.jsonl", "manifest.json", "lock"


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """How a journal is written; `clock` is the running loop's by default.

    Under virtual time choose the durability "close": seconds pass by the thousand there, and syncs take real time.

    :raises OptionError: an unknown durability.
    """

    durability: Durability = "interval"
    sync_seconds: float = 1.0
    queue_bytes: int = 1 << 20
    opener: Opener = open_append
    clock: Callable[[], float] | None = None
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.durability not in get_args(Durability):
            raise OptionError("durability", f"unknown value {self.durability!r}", get_args(Durability))


class Journal:
    """A run directory open for writing; made by `open_journal`."""

    def __init__(self, path: Path, tail: JournalEnd, options: JournalOptions) -> None:
        self.path = path
        self.session = tail.session + 1
        self._options = options
        self._lines = LineWriter(tail.number)
        self._clock = options.clock or tasks.clock()
        self._epoch = self._clock()
        with storage(path):
            self._file: AppendFile = options.opener(path)
            sync_directory(path.parent)
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._taken = 0  # events recorded so far
        self._written = 0  # of those, written; with "always", on the disk itself
        self._synced_at = self._epoch
        self._failure: StorageError | None = None
        self._state: Literal["open", "closed"] = "open"
        self._is_dirty = False  # lines were written that no sync has covered yet
        self._work = anyio.Event()
        self._progress = anyio.Event()
        self._pumped = anyio.Event()

    def record(self, event: Event) -> None:
        """Queue an event; everything recorded before it is written before it.

        :raises StorageError: the disk refused an earlier line; what was written before that is safe.
        """
        assert self._state == "open", "recorded into a closed journal"
        self._check()
        line = self._lines.lines(event, self._clock() - self._epoch, self._options.wall())
        self._queue.append(line)
        self._queued_bytes += len(line)
        self._taken += 1
        if self._queued_bytes >= self._options.queue_bytes:
            self._write_queue()
            self._check()
        elif len(self._queue) == 1:
            self._work.set()

    async def saved(self) -> None:
        """Wait until everything recorded so far has been handed to the system (with "always", to the disk).

        :raises StorageError: the disk refuses.
        """
        until = self._taken
        while self._written < until and self._failure is None:
            await self._progress.wait()
        self._check()

    async def pump(self) -> None:
        """The writer task: write what is queued whenever something is, until `close`; no cancellation cuts it short."""
        try:
            with anyio.CancelScope(shield=True):
                while self._failure is None and (self._state == "open" or self._queue or self._is_dirty):
                    await self._wait_for_work()
                    self._write_queue()
                    if self._wants_sync():
                        await self._sync()
                    self._report()
        finally:
            self._pumped.set()
            self._report()

    async def close(self, event: SessionClosed) -> None:
        """Write what is left and a last line, make all of it durable; closing twice is fine.

        :raises StorageError: the disk refuses, now or earlier.
        """
        if self._state != "open":
            return
        try:
            self.record(event)
        finally:
            self._state = "closed"
            self._work.set()
            await self._pumped.wait()
            with storage(self.path):
                self._file.close()
        self._check()

    async def _wait_for_work(self) -> None:
        soon = self._synced_at + self._options.sync_seconds - self._clock()
        wait = max(0.0, soon) if self._options.durability == "interval" and self._is_dirty else math.inf
        with anyio.move_on_after(wait):
            await self._work.wait()
            self._work = anyio.Event()

    def _write_queue(self) -> None:
        """Write in place. The event loop stands still meanwhile, but only for a copy into the system's cache."""
        data, count = b"".join(self._queue), self._taken
        self._queue.clear()
        self._queued_bytes = 0
        if not data or self._failure is not None:
            return
        try:
            write_all(self._file, data)
        except OSError as error:
            self._fail(error)
            return
        self._is_dirty = True
        if self._options.durability != "always":
            self._written = count

    async def _sync(self) -> None:
        covered, self._is_dirty = self._taken, False
        self._synced_at = self._clock()
        try:
            await anyio.to_thread.run_sync(os.fsync, self._file.fileno())
        except OSError as error:
            self._fail(error)
            return
        self._written = max(self._written, covered)

    def _wants_sync(self) -> bool:
        if self._failure is not None or not self._is_dirty:
            return False
        if self._state != "open" or self._options.durability == "always":
            return True
        overdue = self._clock() - self._synced_at >= self._options.sync_seconds
        return self._options.durability == "interval" and overdue

    def _fail(self, error: OSError) -> None:
        self._failure = refused(self.path, error)
        self._failure.__cause__ = error
        self._report()

    def _report(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


@asynccontextmanager
async def open_journal(
    directory: Path,
    manifest: Manifest,
    options: JournalOptions | None = None,
    on_entry: Callable[[Entry], None] | None = None,
) -> AsyncGenerator[Journal, None]:
    """A run directory, locked for this process, ready to go on where it was left.

    A new directory is made and gets the manifest. In an existing one the manifest must match; every entry is handed to
    `on_entry` in order, a torn last line is cut off, and nothing else is touched.

    :raises JournalLocked: another process writes it.
    :raises FingerprintError: it holds a run with other settings.
    :raises JournalCorrupt: its manifest, or a line before the last, is damaged.
    :raises JournalVersion: a newer version wrote it.
    :raises StorageError: the disk refuses.
    """
    _make(directory)
    with locked(directory / LOCK, directory):
        tail = _take_up(directory, manifest, on_entry)
        journal = Journal(directory / JOURNAL, tail, options or JournalOptions())
        version = manifest.versions.get("atts", "")
        journal.record(SessionOpened(SCHEMA, journal.session, version, os.getpid(), platform.node()))
        async with tasks.background(journal.pump):
            closing = SessionClosed("finished")
            try:
                yield journal
            except BaseException as error:
                status: Literal["failed", "interrupted"] = "failed" if isinstance(error, Exception) else "interrupted"
                closing = SessionClosed(status, f"{type(error).__name__}: {error}")
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await journal.close(closing)


def check_directory(directory: Path) -> None:
    """Find out early, before engines are opened, that a run directory cannot be used at all.

    :raises JournalLocked, JournalCorrupt, JournalVersion, StorageError: as `open_journal` would.
    """
    _make(directory)
    with locked(directory / LOCK, directory):
        load_manifest(directory / MANIFEST)


def _make(directory: Path) -> None:
    with storage(directory):
        directory.mkdir(parents=True, exist_ok=True)


def _take_up(directory: Path, manifest: Manifest, on_entry: Callable[[Entry], None] | None) -> JournalEnd:
    """Check the manifest, read what is there, cut off a torn line."""
    path = directory / JOURNAL
    stored = load_manifest(directory / MANIFEST)
    if stored is None:
        if path.exists() and path.stat().st_size:
            raise JournalCorrupt(directory, f"there is a {JOURNAL} but no {MANIFEST}", "Restore it, or choose another")
        save_manifest(directory / MANIFEST, manifest)
        return JournalEnd()
    manifest.check(stored, directory)
    tails = [JournalEnd()]
    if path.exists():
        for entry in read_entries(path, tails.append):
            if on_entry is not None:
                on_entry(entry)
        with storage(path):
            if path.stat().st_size > tails[-1].length:
                os.truncate(path, tails[-1].length)
    return tails[-1]
