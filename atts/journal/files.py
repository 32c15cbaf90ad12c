"""Files that survive a crash: an append-only one, ones replaced whole, and a lock that dies with its process."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from atts.errors import JournalLocked, StorageError

ADVICE: dict[int, str] = {
    errno.ENOSPC: "Free some space and run the same command again: nothing written so far is lost",
    errno.EDQUOT: "Your quota is used up: free some space and run the same command again",
    errno.EROFS: "The file system is read-only: choose another run directory",
    errno.EACCES: "You may not write here: choose another run directory",
    errno.EPERM: "You may not write here: choose another run directory",
    errno.ENOTDIR: "A file is in the way: choose another run directory",
    errno.EEXIST: "A file is in the way: choose another run directory",
}


class AppendFile(Protocol):
    """An open file that only grows; like a raw file, `write` may take fewer bytes than it is given."""

    def write(self, data: bytes, /) -> int | None:
        """Append; how many bytes were taken."""
        ...

    def fileno(self) -> int:
        """What `os.fsync` needs."""
        ...

    def close(self) -> None:
        """Give the file back; closing twice is fine."""
        ...


Opener = Callable[[Path], AppendFile]
"""Opens a file for appending; tests hand in one whose disk fills up."""


def open_append(path: Path) -> AppendFile:
    """An unbuffered file that is created when missing and only ever appended to."""
    return path.open("ab", buffering=0)


def refused(path: Path, error: OSError) -> StorageError:
    """The operating system's refusal in words a user can act on."""
    return StorageError(path, error.strerror or str(error), ADVICE.get(error.errno or 0, ""))


@contextmanager
def storage(path: Path) -> Generator[None, None, None]:
    """Any refusal of the disk inside the block becomes a StorageError about `path`.

    :raises StorageError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise refused(path, error) from error


def write_all(file: AppendFile, data: bytes) -> None:
    """Append every byte, however few the file takes at a time.

    :raises OSError: the disk refuses; a part of `data` may have been written.
    """
    view = memoryview(data)
    while view:
        taken = file.write(bytes(view))
        if not taken:
            raise OSError(errno.EIO, "the file takes no more bytes")
        view = view[taken:]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file whole: a reader, or a crash at any moment, sees the old content or the new, never a mixture.

    Who may read it is as for any file one makes (the umask), or as it was before.

    :raises StorageError: the disk refuses; the old file is untouched.
    """
    with storage(path):
        temporary = path.with_name(f".{path.name}.{token_hex(6)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                with suppress(FileNotFoundError):
                    os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system has a way to."""
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, directory: Path) -> Generator[None, None, None]:
    """Hold the lock file, our process id in it; the system frees it when the process dies, however it dies.

    :raises JournalLocked: another process holds it.
    :raises StorageError: the file cannot be made.
    """
    with storage(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(handle):
            raise JournalLocked(
                directory,
                f"another process ({_holder(handle)}) is writing this run",
                "Wait for it to end, stop it, or choose another run directory",
            )
        with storage(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0) if sys.platform != "win32" else None
        yield
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    if sys.platform == "win32":
        return "on this machine"
    text = os.pread(handle, 32, 0).decode(errors="replace").strip()
    return f"process {text}" if text else "just started"


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
