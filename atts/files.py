"""Files written whole or not at all, operating-system errors as messages, and strict JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from io import BufferedReader
from pathlib import Path
from secrets import token_hex
from typing import Any

from atts.errors import StorageError

ADVICE: dict[int, str] = {
    errno.ENOSPC: "Free some space and run the same command again: nothing written so far is lost",
    errno.EDQUOT: "Your quota is used up: free some space and run the same command again",
    errno.EROFS: "The file system is read-only: choose another run directory",
    errno.EACCES: "You may not write here: choose another run directory",
    errno.EPERM: "You may not write here: choose another run directory",
    errno.ENOTDIR: "A file is in the way: choose another run directory",
    errno.ESTALE: "What was recorded since is lost: leave a run alone while it is written, and run "
    "it again",
    errno.ELOOP: "It is a link, and links are not followed here: remove it, or choose another run "
    "directory",
    errno.EEXIST: "A file is in the way: choose another run directory",
}


def refused(path: Path, error: BaseException) -> StorageError:
    """The operating system's refusal in words a user can act on."""
    if isinstance(error, MemoryError):
        return StorageError(
            path, "there is no memory left", "Free some and run the same command again"
        )
    if not isinstance(error, OSError):
        return StorageError(
            path, f"a line was not written to its end ({type(error).__name__})", "Run it again"
        )
    return StorageError(path, error.strerror or str(error), ADVICE.get(error.errno or 0, ""))


@contextmanager
def storage(path: Path) -> Generator[None, None, None]:
    """Any refusal of the disk, or of memory, inside the block becomes a StorageError about `path`.

    :raises StorageError: in place of an OSError, a MemoryError, or what Python says of names that
        no file can have.
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        raise refused(path, error) from error
    except ValueError as error:
        if "null byte" not in str(error) and not isinstance(error, UnicodeEncodeError):
            raise
        raise StorageError(
            path, "no file can have this name", "Leave out what is no character"
        ) from error


def is_same_file(handle: int, path: Path) -> bool:
    """Whether the open file is still what its path names, no link followed."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def write_atomic(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, durable: bool = True
) -> None:
    """Replace the file whole: a reader, or a crash at any moment, sees the old content or the new,
    never a mixture.

    Who may read it is as for any file one makes (the umask), or as it was before. What is not
    `durable` may be the old content again after a power failure, and costs no wait for the disk.

    :raises StorageError: the disk refuses; the old file is untouched.
    """
    with storage(path):
        replace_file(path, data, durable=durable)


def replace_file(
    path: Path,
    data: bytes | Iterable[bytes | memoryview],
    *,
    durable: bool = True,
    mode: int = 0o666,
) -> None:
    """The same for callers with words of their own; a new file is made with `mode`, less the umask.

    :raises OSError: the disk refuses; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{token_hex(6)}")
    handle = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
    )
    try:
        with os.fdopen(handle, "wb") as file:
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def write_out(path: Path, data: bytes) -> None:
    """Write a file that a user named: through links to what they lead to, never over what is no
    ordinary file.

    :raises StorageError: it is a device, a pipe, a socket or a directory, or the disk refuses.
    """
    with storage(path):
        replace_named(path, data)


def replace_named(path: Path, data: bytes) -> None:
    """The same for callers with words of their own.

    :raises OSError: likewise.
    """
    with suppress(FileNotFoundError):
        check_ordinary(path.stat().st_mode, path)
    replace_file(Path(os.path.realpath(path)), data)


def read_ordinary(path: Path) -> bytes:
    """What is in a file; a pipe is not waited for, nor a device read without end.

    :raises OSError: it is no ordinary file, or cannot be read.
    """
    with open_ordinary(path) as file:
        return file.read()


def open_ordinary(path: Path) -> BufferedReader:
    """A file, open for reading, as `read_ordinary` takes it.

    :raises OSError: it is no ordinary file, or cannot be opened.
    """
    file = os.fdopen(
        os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb"
    )
    try:
        check_ordinary(os.fstat(file.fileno()).st_mode, path)
    except BaseException:
        file.close()
        raise
    return file


def check_ordinary(mode: int, path: Path) -> None:
    """Whether this is the mode of an ordinary file.

    :raises OSError: it is that of a directory, a device, a pipe or a socket.
    """
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system has a way to."""
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def jsonable(value: Any) -> Any:
    """The value as JSON would give it back; what is not finite becomes null, infinities words.

    >>> jsonable({"rate": float("nan"), "cost": float("inf"), "turns": (1, 2)})
    {'rate': None, 'cost': 'inf', 'turns': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): jsonable(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(text: str) -> Any:
    """The value of a JSON text; Infinity is read as Python writes it.

    :raises ValueError: it is none, is nested too deeply, or holds NaN or half a character.
    """
    try:
        found = json.loads(text, parse_constant=_constant)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _constant(word: str) -> float:
    if word == "NaN":
        raise ValueError("it holds NaN")
    return float(word)
