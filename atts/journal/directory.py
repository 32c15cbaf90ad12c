"""Functions that open a run directory for writing under a lock, or read a directory that may be
damaged or unfinished.

The runs of a sweep also share engine replies in a file, so that the same call is made only once.
"""

from __future__ import annotations

import json
import os
import platform
import struct
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import anyio

from atts import concurrency
from atts.core import CallSpan, Outcome
from atts.errors import JournalCorrupt, JournalError, JournalLocked, UsageError
from atts.files import (
    check_ordinary,
    is_same_file,
    open_ordinary,
    storage,
    sync_directory,
    write_atomic,
)
from atts.journal.events import SCHEMA, Decided, Entry, Event, SessionClosed, SessionOpened
from atts.journal.lines import Journal, JournalOptions, LineReader, read_entries
from atts.journal.manifest import Manifest, load_manifest, save_manifest
from atts.journal.state import FACTS, RunClock, RunState, read_outcomes

JOURNAL = "journal.jsonl"
MANIFEST = "manifest.json"
LOCK = "lock"
MERGED = "merged"
"""Name of the setting that lists the runs from which a merged run was made."""


@contextmanager
def locked(path: Path, directory: Path, *, wait: bool = False) -> Generator[None, None, None]:
    """Lock a file until the block or the process ends, and write this process's id into it.

    If another process has the lock, raise an error. If `wait` is true, wait for the lock instead.

    :raises JournalLocked: another process has locked the file.
    :raises StorageError: the file cannot be created, or is a link.
    """
    with held(path, directory, wait=wait) as handle:
        with storage(path):
            os.ftruncate(handle, 0)
            if sys.platform != "win32":
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield


def is_held(path: Path) -> bool:
    """Return True if a running process of this machine has locked the lock file.

    The file names the process that locked it. If that process has ended, return False without
    trying to lock the file, because even a brief lock could disturb a new writer. Otherwise, try to
    lock the file for a moment.
    """
    with suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDWR | _NO_LINKS)
        try:
            if sys.platform != "win32":
                # Signal 0 does not affect the process. os.kill raises ProcessLookupError if no
                # process has this id.
                os.kill(int(os.pread(handle, 32, 0)), 0)
            return not _try_lock(handle)
        except PermissionError:
            # The process exists, but belongs to another user.
            return not _try_lock(handle)
        finally:
            os.close(handle)
    return False


@contextmanager
def held(path: Path, directory: Path, *, wait: bool = False) -> Generator[int, None, None]:
    """Lock a file so that no other process can lock it, without changing its content. Create the
    file if it is missing.

    A run locks its journal in addition to its lock file, because a user may delete the lock file.

    :raises JournalLocked: another process has locked the file, or the file was replaced meanwhile.
    :raises StorageError: the file cannot be created, or is a link, a pipe or a device.
    """
    with storage(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o644)
    _lock_handles.add(handle)
    try:
        with storage(path):
            # If the path is a pipe, reading it could wait forever.
            check_ordinary(os.fstat(handle).st_mode, path)
            is_ours = _try_lock(handle, wait=wait) and is_same_file(handle, path)
        if not is_ours:
            raise JournalLocked(
                directory,
                f"another process ({_holder(handle, path)}) is writing to this run",
                "Wait for this process to end, stop it, or choose another run directory",
            )
        yield handle
    finally:
        # A forked child may also leave this block. It closed its copy of the handle after the fork,
        # and must not close it again.
        if handle in _lock_handles:
            _lock_handles.remove(handle)
            os.close(handle)


_lock_handles = set[int]()


def _drop_inherited_locks() -> None:
    """Close the handles of locked files in a forked child, which inherits them from its parent.

    The system keeps a lock until the last copy of its handle is closed. So a child that outlives
    its parent would keep the run locked. Closing the child's copy does not release the parent's
    lock.
    """
    for handle in _lock_handles:
        os.close(handle)
    _lock_handles.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_locks)

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def _holder(handle: int, path: Path) -> str:
    """Describe the process that has the lock, by its process id if the lock file contains one."""
    if sys.platform == "win32":
        return "on this machine"
    text = os.pread(handle, 32, 0).decode(errors="replace").strip()
    return f"process {text}" if text.isdecimal() else f"with a lock on {path.name}"


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


@asynccontextmanager
async def open_journal(
    directory: Path,
    manifest: Manifest,
    options: JournalOptions | None = None,
    on_entry: Callable[[Entry], None] | None = None,
) -> AsyncGenerator[Journal, None]:
    """Open and lock a run directory, so that new events are appended to its journal.

    A missing directory is created, and `manifest` is written to it. If the directory already
    contains a run, that run's manifest must match `manifest`. Every recorded entry is then passed
    to `on_entry` in order, and an incomplete last line of the journal is removed.

    :raises JournalLocked: another process writes the run.
    :raises FingerprintError: the directory contains a run with other settings.
    :raises JournalCorrupt: the manifest, or a line before the last, is damaged.
    :raises JournalVersion: another version of atts wrote the journal.
    :raises StorageError: the system cannot write the files.
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
    """Check that a run directory can be used, before any engine is opened.

    :raises JournalLocked, JournalCorrupt, JournalVersion, StorageError: in the same cases as
        `open_journal`.
    """
    _make(directory)
    with locked(directory / LOCK, directory), ExitStack() as stack:
        # Another process may still write the journal although the lock file was deleted. So lock
        # the journal too.
        if os.path.lexists(directory / JOURNAL):
            stack.enter_context(held(directory / JOURNAL, directory))
        load_manifest(directory / MANIFEST)


def _make(directory: Path) -> None:
    with storage(directory):
        directory.mkdir(parents=True, exist_ok=True)


def _take_up(
    directory: Path, manifest: Manifest, on_entry: Callable[[Entry], None] | None
) -> LineReader:
    """Check the stored manifest, pass every recorded entry to `on_entry`, and remove an incomplete
    last line of the journal.
    """
    past = LineReader(directory / JOURNAL)
    stored = load_manifest(directory / MANIFEST)
    if stored is None:
        if past.path.exists() and past.path.stat().st_size:
            raise JournalCorrupt(
                directory,
                f"the directory has a {JOURNAL} but no {MANIFEST}",
                "Restore the manifest, or choose another directory",
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


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run in a directory; each method reads the journal again, so its result is current.

        run = open_run(directory)
        run.manifest  # the models, the settings and the dataset
        run.setting("method")  # the value of one setting
        run.state().finished  # problem id -> FinishedProblem: status, answer, verdict, usage
        run.outcomes()  # the finished problems with all their turns
        run.decisions()  # every decision of the gate, in order
        run.nodes()  # every call that did work, with times on one clock
        run.entries(kinds)  # every event, or every event of some kinds

    To get several of these results with one reading of the journal, apply the entries to a
    `RunState`. `RunState.apply` returns the outcome of the problem that an entry completes.

    :raises JournalCorrupt: a method reads the journal, and a line before the last is damaged.
    :raises JournalVersion: a method reads the journal, and another version of atts wrote it.
    :raises StorageError: a method reads the journal, and the file cannot be read.
    """

    directory: Path
    manifest: Manifest

    def setting(self, name: str) -> Any:
        """Return the value of a setting in the configuration; None if the run has no setting of
        this name.
        """
        setting = self.manifest.configuration.get(name)
        return None if setting is None else setting.value

    def given(self, name: str) -> Any:
        """Return the value of a setting as the user wrote it; None if the setting does not
        exist.
        """
        setting = self.manifest.settings.get(name)
        return None if setting is None else setting.value

    @property
    def policy(self) -> dict[str, Any]:
        """Return the run's policy as JSON data; empty if the manifest contains none."""
        return self.setting("policy") or {}

    @property
    def part_starts(self) -> tuple[int, ...]:
        """Return the session numbers at which the second and later parts of a merged run begin. The
        result is empty if the run was not merged.
        """
        counts = [int(part["sessions"]) for part in self.setting(MERGED) or ()]
        return tuple(1 + sum(counts[:number]) for number in range(1, len(counts)))

    def entries(self, kinds: Collection[type[Event]] | None = None) -> Iterator[Entry]:
        """Yield all events in order. If `kinds` is given, yield only events of these kinds and the
        events that open a session.
        """
        return read_entries(self.directory / JOURNAL, kinds=kinds)

    def state(self, kinds: Collection[type[Event]] | None = None) -> RunState:
        """Return the run's state: summaries of its finished problems, its number of sessions, and
        its seconds of work.
        """
        state = RunState()
        for entry in self.entries(kinds):
            state.apply(entry)
        return state

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcome of every finished problem once; incomplete outcomes come last."""
        return read_outcomes(self.entries(FACTS))

    def decisions(self) -> Iterator[Decided]:
        """Yield every decision of the gate in order. Previews that only requested a score are left
        out.
        """
        for entry in self.entries((Decided,)):
            event = entry.event
            if isinstance(event, Decided) and event.decision.action != "verify":
                yield event

    def nodes(self) -> Iterator[CallSpan]:
        """Yield every engine call that was not answered from the journal, as a node of the task
        graph. Times are in seconds on the run's clock.
        """
        clock = RunClock()
        for entry in self.entries((CallSpan,)):
            clock.advance(entry)
            if isinstance(entry.event, CallSpan) and entry.event.source == "live":
                yield clock.aligned(entry.event, entry.at)


def check_exists(path: Path) -> None:
    """Check that there is a run or a file at a path.

    :raises JournalError: if the path does not exist.
    """
    if not path.exists():
        raise JournalError(
            path,
            "there is no run or file at this path",
            "Give the directory that `atts eval --out` wrote, or a file",
        )


def run_if_begun(directory: Path) -> RecordedRun | None:
    """Return the run in a directory; None if no run was started there.

    :raises JournalError: the run cannot be read.
    """
    try:
        return open_run(directory)
    except JournalError:
        if (directory / JOURNAL).exists():
            raise
        return None


def is_run_over(directory: Path) -> bool:
    """Return whether all problems of the run in a directory have ended; False if no run was started
    there.

    :raises JournalError: the run cannot be read.
    """
    # Something else than a file, such as a pipe, could make a reader wait forever.
    if not all((directory / name).is_file() for name in (MANIFEST, JOURNAL)):
        return False
    run = open_run(directory)
    state = run.state()
    return state.ended is not None and state.done == run.manifest.problems


def open_run(
    directory: Path, advice: str = "Give the directory that `atts eval --out DIRECTORY` wrote"
) -> RecordedRun:
    """Return the run in a directory.

    :raises JournalError: the directory contains no run.
    :raises JournalCorrupt: the manifest is damaged.
    :raises JournalVersion: another version of atts wrote the run.
    :raises StorageError: the files cannot be read.
    """
    manifest = load_manifest(directory / MANIFEST)
    if manifest is None or not (directory / JOURNAL).exists():
        raise JournalError(directory, "there is no run here", advice)
    return RecordedRun(directory, manifest)


@dataclass(frozen=True, slots=True)
class JournalCheck:
    """A summary of a journal up to its first damaged line, or up to its end if no line is damaged."""

    directory: str
    lines: int  # number of undamaged lines
    length: int  # length of the undamaged lines, in bytes
    lost: int  # number of bytes after the last undamaged line
    sessions: int
    complete: int  # number of problems that are finished without failed rollouts
    open: int  # number of problems that were started but are not finished, or have failed rollouts
    # description of the first damaged line; "" if the only damage is an incomplete last line
    damage: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""
        return asdict(self)


def check_journal(directory: Path) -> JournalCheck:
    """Read a run, and return a summary of its journal up to the first damaged line.

    :raises JournalError: there is no run, or its manifest is damaged.
    :raises StorageError: the journal cannot be read.
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
    """Copy the undamaged lines of a run to a new directory, in which the run can be continued.

    :raises UsageError: `out` is not empty.
    :raises JournalLocked: a process writes the run.
    :raises JournalError: there is no run, its manifest is damaged, or all lines of its journal are
        damaged.
    """
    checked = check_journal(directory)
    with storage(out):
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(
                f"{out}: the directory is not empty; choose a new directory for the undamaged part of the journal"
            )
    if not checked.lines:
        raise JournalCorrupt(
            directory,
            "the journal has no line that can be saved",
            "Run the command again in another directory",
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


REPLIES = "replies.bin"
"""Name of the file of engine replies that several runs share. It lies in the parent folder of the
runs.
"""
# The fields before each reply in the file: key of the request, number of the run, seconds of the
# call, length of the reply, and a checksum. The checksum covers these fields and the reply.
_HEAD = struct.Struct("<20sIdII")
_CHECKSUM = 4


class SharedReply(NamedTuple):
    """The position and length of a reply in the file, with the run that requested it and the
    seconds that the engine took.
    """

    at: int
    length: int
    run: int
    seconds: float


class SharedReplies:
    """Engine replies that several runs share. The replies are in a file; only their index is in
    memory. Only one process may add replies.

    Each run's journal is complete without the file, which only avoids repeated engine calls. So a
    damaged record, and all records after it, are simply ignored.
    """

    def __init__(self, path: Path) -> None:
        """Read the index of the stored replies; a missing file counts as empty.

        :raises StorageError: the file cannot be read.
        """
        self._path = path
        self._file: FileIO | None = None
        self._index: dict[bytes, SharedReply] = {}
        self._end = 0
        with storage(path):
            if path.exists():
                self._read()

    def find(self, key: bytes) -> SharedReply | None:
        """Return the position of the reply with this key; None if there is no such reply."""
        return self._index.get(key)

    def read(self, reply: SharedReply) -> bytes:
        """Return a stored reply as bytes.

        :raises StorageError: the file cannot be read.
        """
        with storage(self._path):
            file = self._opened()
            file.seek(reply.at)
            return file.read(reply.length) or b""

    def add(self, key: bytes, run: int, seconds: float, reply: bytes) -> None:
        """Store a reply, unless a reply with this key is already stored.

        :raises StorageError: writing to the disk fails.
        """
        if key in self._index:
            return
        record = _HEAD.pack(key, run, seconds, len(reply), 0)[:-_CHECKSUM]
        crc = zlib.crc32(reply, zlib.crc32(record))
        data = record + crc.to_bytes(_CHECKSUM, "little") + reply
        with storage(self._path):
            file = self._opened()
            file.seek(self._end)
            written = file.write(data)
        # If the disk took only a part of the record, the next record overwrites this part.
        if written == len(data):
            self._index[key] = SharedReply(self._end + _HEAD.size, len(reply), run, seconds)
            self._end += written

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.close()

    def _opened(self) -> FileIO:
        if self._file is None:
            self._path.touch()
            self._file = self._path.open("r+b", buffering=0)
            self._file.truncate(self._end)
        return self._file

    def _read(self) -> None:
        """Index the records of the file, up to the first damaged record."""
        with open_ordinary(self._path) as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                key, run, seconds, length, checksum = _HEAD.unpack(head)
                reply = file.read(length)
                if (
                    len(reply) != length
                    or zlib.crc32(reply, zlib.crc32(head[:-_CHECKSUM])) != checksum
                ):
                    return
                self._index[key] = SharedReply(self._end + _HEAD.size, length, run, seconds)
                self._end += _HEAD.size + length


def reply_key(engine: Mapping[str, Any], key: str, logprobs: str = "raw") -> bytes:
    """Return the key under which the file of shared replies stores the reply to a request. `engine`
    is the engine's description in the manifest, and `key` is the request's key.

    The result also depends on `logprobs`, because the reply to a request that does not need
    log-probabilities may lack them.
    """
    who = json.dumps(engine, sort_keys=True, default=sorted)
    return blake2b(f"{who} {key} {logprobs}".encode(), digest_size=20).digest()


def run_number(name: str) -> int:
    """Return the number that identifies a run in the file of shared replies."""
    return zlib.crc32(name.encode())
