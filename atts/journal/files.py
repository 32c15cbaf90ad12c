"""Append-only files, and lock files that are released when their process ends."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from atts.errors import JournalLocked
from atts.files import is_same_file, storage

Opener = Callable[[Path], FileIO]
"""Opens a file for appending, whose `write` may take fewer bytes than it is given; tests hand in
one that fills up.
"""


def open_append(path: Path) -> FileIO:
    """An unbuffered file that is created when missing and only ever appended to."""
    return path.open("ab", buffering=0)


def write_all(file: FileIO, data: bytes) -> None:
    """Append every byte, however few the file takes at a time.

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
    """Hold the lock file, our process id in it; the system frees it when the process dies, however
    it dies.

    With `wait`, until it is free: no other process is then told of.

    :raises JournalLocked: another process holds it.
    :raises StorageError: the file cannot be made, or is a link.
    """
    with held(path, directory, wait=wait) as handle:
        with storage(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0) if sys.platform != "win32" else None
        yield


def is_held(path: Path) -> bool:
    """Whether a living process of this machine holds the lock file; looking does not get in a
    starting writer's way.
    """
    with suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDWR | _NO_LINKS)
        try:
            os.kill(int(os.pread(handle, 32, 0)), 0) if sys.platform != "win32" else None
            return not _try_lock(handle)
        except PermissionError:  # it lives, and is another user's
            return not _try_lock(handle)
        finally:
            os.close(handle)
    return False


@contextmanager
def held(path: Path, directory: Path, *, wait: bool = False) -> Generator[int, None, None]:
    """Hold a file, made if missing, for this process alone, its content untouched: the journal too,
    should its lock go.

    :raises JournalLocked: another process holds it, or it was replaced meanwhile.
    :raises StorageError: the file cannot be made, or is a link.
    """
    with storage(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o644)
    try:
        with storage(path):
            is_ours = _try_lock(handle, wait=wait) and is_same_file(handle, path)
        if not is_ours:
            raise JournalLocked(
                directory,
                f"another process ({_holder(handle, path)}) is writing this run",
                "Wait for it to end, stop it, or choose another run directory",
            )
        yield handle
    finally:
        os.close(handle)


_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def _holder(handle: int, path: Path) -> str:
    """Whose process it is, where the lock file says."""
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
