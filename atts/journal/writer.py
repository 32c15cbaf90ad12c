"""The writer of a run directory, which loses nothing that a killed process had recorded."""

from __future__ import annotations

import errno
import math
import os
import platform
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

import anyio
import anyio.lowlevel
import anyio.to_thread

from atts import concurrency
from atts.core import CallSpan
from atts.errors import JournalCorrupt, JournalLocked, OptionError, StorageError
from atts.files import check_ordinary, is_same_file, refused, storage, sync_directory
from atts.journal.events import SCHEMA, Entry, Event, Observed, SessionClosed, SessionOpened
from atts.journal.lines import LineReader, LineWriter
from atts.journal.manifest import Manifest, load_manifest, save_manifest

Opener = Callable[[Path], FileIO]
"""Opens a file for appending. Its `write` may take fewer bytes than it is given, as the files of
tests do whose disk fills up.
"""


def open_append(path: Path) -> FileIO:
    """Open an unbuffered file for appending, and create it if it is missing."""
    return path.open("ab", buffering=0)


def write_all(file: FileIO, data: bytes) -> None:
    """Append all bytes, even if the file takes few at a time.

    :raises OSError: the disk refuses; a part of `data` may have been written.
    """
    view = memoryview(data)
    while view:
        taken = file.write(bytes(view))
        if not taken:
            raise OSError(errno.EIO, "the file takes no more bytes")
        view = view[taken:]


@contextmanager
def locked(path: Path, directory: Path, *, wait: bool = False) -> Generator[None, None, None]:
    """Hold a lock file, with this process's id in it, until the block or the process ends.

    With `wait`, wait for another process to release the file instead of raising.

    :raises JournalLocked: another process holds it.
    :raises StorageError: the file cannot be made, or is a link.
    """
    with held(path, directory, wait=wait) as handle:
        with storage(path):
            os.ftruncate(handle, 0)
            if sys.platform != "win32":
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield


def is_held(path: Path) -> bool:
    """Return True if a living process of this machine holds the lock file.

    The file is locked for a moment only if its process is dead, so that no starting writer fails.
    """
    with suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDWR | _NO_LINKS)
        try:
            if sys.platform != "win32":
                # Raises if no such process lives.
                os.kill(int(os.pread(handle, 32, 0)), 0)
            return not _try_lock(handle)
        except PermissionError:
            # The process lives, and is another user's.
            return not _try_lock(handle)
        finally:
            os.close(handle)
    return False


@contextmanager
def held(path: Path, directory: Path, *, wait: bool = False) -> Generator[int, None, None]:
    """Lock a file for this process alone, and leave its content untouched.

    A missing file is made. The journal is held like its lock file, which may be deleted.

    :raises JournalLocked: another process holds it, or it was replaced meanwhile.
    :raises StorageError: the file cannot be made, or is a link, a pipe or a device.
    """
    with storage(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o644)
    _lock_handles.add(handle)
    try:
        with storage(path):
            # reading a pipe would wait for a writer that never comes
            check_ordinary(os.fstat(handle).st_mode, path)
            is_ours = _try_lock(handle, wait=wait) and is_same_file(handle, path)
        if not is_ours:
            raise JournalLocked(
                directory,
                f"another process ({_holder(handle, path)}) is writing this run",
                "Wait for it to end, stop it, or choose another run directory",
            )
        yield handle
    finally:
        # A forked child that leaves the block has closed its copy already.
        if handle in _lock_handles:
            _lock_handles.remove(handle)
            os.close(handle)


_lock_handles = set[int]()


def _drop_inherited_locks() -> None:
    """Close a forked child's copies of the locked files.

    A lock of the kernel lasts until its last copy is closed, so a child that outlives its parent
    would keep the run locked. Closing a copy leaves the parent's lock alone.
    """
    for handle in _lock_handles:
        os.close(handle)
    _lock_handles.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_locks)

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def _holder(handle: int, path: Path) -> str:
    """Describe the lock holder, if the lock file names one."""
    if sys.platform == "win32":
        return "on this machine"
    text = os.pread(handle, 32, 0).decode(errors="replace").strip()
    return f"process {text}" if text.isdecimal() else f"it holds {path.name}"


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int, *, wait: bool = False) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(handle: int, *, wait: bool = False) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True


Durability = Literal["always", "interval", "close"]
"""When lines reach the disk itself, which matters if the machine loses power.

"always": before `saved` returns; "interval": at most a second later; "close": at the end.
"""

JOURNAL = "journal.jsonl"
MANIFEST = "manifest.json"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """Options of the writer; `clock` is the running loop's by default.

    Under virtual time choose the durability "close": seconds pass by the thousand there, and syncs
    take real time.

    :raises OptionError: an unknown durability.
    """

    durability: Durability = "interval"
    sync_seconds: float = 1.0
    opener: Opener = open_append
    clock: Callable[[], float] | None = None
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.durability not in get_args(Durability):
            raise OptionError(
                "durability", f"unknown value {self.durability!r}", get_args(Durability)
            )


class Journal:
    """A run directory open for writing; made by `open_journal`.

    Events are appended at once, as whole lines, and synced in the background. An event is in the file
    when `record` returns, so a killed process loses nothing; a machine that loses power may lose what
    the durability allows.
    """

    def __init__(self, past: LineReader, options: JournalOptions) -> None:
        self.path = path = past.path
        self.session = past.session + 1
        self._options = options
        self.durability = options.durability
        self._lines = LineWriter(past.number, past.crc, past.records)
        self._clock = options.clock or concurrency.clock()
        self._epoch = self._synced_at = self._clock()
        with storage(path), ExitStack() as undo:
            self._file = options.opener(path)
            undo.callback(self._file.close)
            sync_directory(path.parent)
            self._size = path.stat().st_size
            undo.pop_all()
        self._recorded = 0  # events in the file
        self._synced = 0  # of those, on the disk itself
        self._failure: StorageError | None = None
        self._process = os.getpid()
        self._state: Literal["open", "closed"] = "open"
        self._sync_due = anyio.Event()
        self._sync_done = anyio.Event()
        self._syncs_ended = anyio.Event()

    def record(self, event: Event, second: CallSpan | Observed | None = None) -> None:
        """Append an event, and a `second` one that shares its line.

        The second event is a call's span, or what was done with a decision. The event loop is
        blocked only for a copy into the system's cache.

        :raises StorageError: the disk refuses, now or earlier; what was written before that is
            safe.
        :raises JournalLocked: this is a forked child of the process that opened the journal.
        """
        assert self._state == "open", "recorded into a closed journal"
        if os.getpid() != self._process:
            raise JournalLocked(
                self.path.parent,
                f"process {self._process} opened it, and this is a forked child of that process",
                "Open the run in one process, and fork before that",
            )
        if self._failure is not None:
            raise self._failure
        now = self._clock()
        options = self._options
        try:
            line = self._lines.line(event, now - self._epoch, options.wall(), second)
            taken = self._file.write(line)
            if taken != len(line):
                write_all(self._file, line[taken or 0 :])
            self._size += len(line)
        except BaseException as error:
            # No line may follow one that is not whole, or that was counted and never written.
            self._fail(error)
            if not isinstance(error, OSError | MemoryError):
                raise
            self._check()
        self._recorded += 1
        is_overdue = (
            options.durability == "interval" and now - self._synced_at >= options.sync_seconds
        )
        if is_overdue or options.durability == "always":
            self._sync_due.set()

    async def saved(self) -> None:
        """Yield to other tasks; with "always", wait until everything recorded is on the disk.

        :raises StorageError: the disk refuses.
        """
        until = self._recorded
        await anyio.lowlevel.checkpoint()
        while self.durability == "always" and self._synced < until and self._failure is None:
            await self._sync_done.wait()
        if self._failure is not None:
            raise self._failure

    async def keep_synced(self) -> None:
        """Sync the file whenever that is due, until `close`; cancellation does not interrupt it."""
        wait = self._options.sync_seconds if self._options.durability == "interval" else math.inf
        try:
            with anyio.CancelScope(shield=True):
                while self._failure is None and (
                    self._state == "open" or self._synced < self._recorded
                ):
                    with anyio.move_on_after(wait):
                        await self._sync_due.wait()
                    if self._synced < self._recorded:
                        await self._sync()
        finally:
            self._syncs_ended.set()

    async def close(self, event: SessionClosed) -> None:
        """Write a last line and make everything durable; closing twice is fine.

        :raises StorageError: the disk refuses, now or earlier.
        """
        if self._state != "open":
            return
        try:
            self.record(event)
        finally:
            self._state = "closed"
            self._sync_due.set()
            await self._syncs_ended.wait()
            with storage(self.path):
                self._file.close()
        self._check()

    async def _sync(self) -> None:
        covered = self._recorded
        self._synced_at = self._clock()
        self._sync_due = anyio.Event()
        try:
            size = self._size
            handle = self._file.fileno()
            await anyio.to_thread.run_sync(os.fsync, handle)
            self._look(handle, size)
            self._synced = covered
        except (OSError, MemoryError) as error:
            self._fail(error)
        self._sync_done.set()
        self._sync_done = anyio.Event()

    def _look(self, handle: int, size: int) -> None:
        """Check that the file still has its name and holds what was written to it.

        :raises OSError: it was deleted, moved, replaced or cut.
        """
        if not is_same_file(handle, self.path):
            raise OSError(
                errno.ESTALE, "it was deleted, moved or replaced while the run was writing it"
            )
        if os.fstat(handle).st_size < size:
            raise OSError(errno.ESTALE, "it was cut while the run was writing it")

    def _fail(self, error: BaseException) -> None:
        self._failure = refused(self.path, error)
        self._failure.__cause__ = error

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
    """Open a run directory for writing, locked for this process, where its last session ended.

    A new directory is made and gets the manifest. In an existing one the manifest must match: every
    entry is passed to `on_entry` in order, a torn last line is cut off, and nothing else is changed.

    :raises JournalLocked: another process writes it.
    :raises FingerprintError: it holds a run with other settings.
    :raises JournalCorrupt: its manifest, or a line before the last, is damaged.
    :raises JournalVersion: another version wrote it.
    :raises StorageError: the disk refuses.
    """
    _make(directory)
    with locked(directory / LOCK, directory), held(directory / JOURNAL, directory):
        journal = Journal(_take_up(directory, manifest, on_entry), options or JournalOptions())
        version = manifest.versions.get("atts", "")
        async with concurrency.background(journal.keep_synced):
            closing = SessionClosed("finished")
            try:
                journal.record(
                    SessionOpened(SCHEMA, journal.session, version, os.getpid(), platform.node())
                )
                yield journal
            except BaseException as error:
                why = f"{type(error).__name__}: {error}"
                is_failure = isinstance(error, Exception)
                closing = SessionClosed("failed" if is_failure else "interrupted", why)
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await journal.close(closing)


def check_directory(directory: Path) -> None:
    """Refuse a run directory that cannot be used, before engines are opened.

    :raises JournalLocked, JournalCorrupt, JournalVersion, StorageError: as `open_journal` would.
    """
    _make(directory)
    with locked(directory / LOCK, directory), ExitStack() as stack:
        # its lock file may have been deleted under the process that writes it
        if os.path.lexists(directory / JOURNAL):
            stack.enter_context(held(directory / JOURNAL, directory))
        load_manifest(directory / MANIFEST)


def _make(directory: Path) -> None:
    with storage(directory):
        directory.mkdir(parents=True, exist_ok=True)


def _take_up(
    directory: Path, manifest: Manifest, on_entry: Callable[[Entry], None] | None
) -> LineReader:
    """Check the manifest, read all entries, and cut off a torn last line."""
    past = LineReader(directory / JOURNAL)
    stored = load_manifest(directory / MANIFEST)
    if stored is None:
        if past.path.exists() and past.path.stat().st_size:
            raise JournalCorrupt(
                directory,
                f"there is a {JOURNAL} but no {MANIFEST}",
                "Restore it, or choose another",
            )
        save_manifest(directory / MANIFEST, manifest)
        return past
    manifest.check(stored, directory)
    if past.path.exists():
        for entry in past.entries():
            if on_entry is not None:
                on_entry(entry)
        with storage(past.path):
            if past.path.stat().st_size > past.length:
                os.truncate(past.path, past.length)
    return past
