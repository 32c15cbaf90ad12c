"""A run directory open for writing: locked, checked against its manifest, continued at its end."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio

from atts import concurrency
from atts.errors import JournalCorrupt, JournalLocked
from atts.files import check_ordinary, is_same_file, storage
from atts.journal.events import SCHEMA, Entry, SessionClosed, SessionOpened
from atts.journal.lines import Journal, JournalOptions, LineReader
from atts.journal.manifest import Manifest, load_manifest, save_manifest

JOURNAL = "journal.jsonl"
MANIFEST = "manifest.json"
LOCK = "lock"


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
