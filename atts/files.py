"""Functions that write files atomically, turn operating-system errors into messages, and convert
values to JSON.
"""

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

import msgspec

from atts.errors import StorageError

ADVICE: dict[int, str] = {
    errno.ENOSPC: "Free some space and run the same command again: nothing written so far is lost",
    errno.EDQUOT: "Your disk quota is used up: free some space and run the same command again",
    errno.EROFS: "The file system is read-only: choose another run directory",
    errno.EACCES: "You do not have permission to write to this directory: choose another run "
    "directory",
    errno.EPERM: "You do not have permission to write to this directory: choose another run directory",
    errno.ENOTDIR: "A file already exists where a directory is needed: choose another run "
    "directory",
    errno.ESTALE: "Records written after the change are lost: run the command again, and do not "
    "change a run directory while a run is writing to it",
    errno.ELOOP: "The path is a symbolic link, which atts does not follow: remove the link, or "
    "choose another run directory",
    errno.EEXIST: "A file already exists where a directory is needed: choose another run directory",
}


def refused(path: Path, error: BaseException) -> StorageError:
    """Return the StorageError for a failed write, with the operating system's reason and advice for
    the user.
    """
    if isinstance(error, MemoryError):
        return StorageError(
            path, "there is no memory left", "Free some memory and run the same command again"
        )
    if not isinstance(error, OSError):
        return StorageError(
            path,
            f"the end of a line could not be written ({type(error).__name__})",
            "Run the same command again",
        )
    return StorageError(path, error.strerror or str(error), ADVICE.get(error.errno or 0, ""))


@contextmanager
def storage(path: Path) -> Generator[None, None, None]:
    """Convert every disk error and memory error in the block to a StorageError about `path`.

    :raises StorageError: instead of an OSError, a MemoryError, or Python's error for a name that no
        file can have.
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        raise refused(path, error) from error
    except ValueError as error:
        if "null byte" not in str(error) and not isinstance(error, UnicodeEncodeError):
            raise
        raise StorageError(
            path,
            "the path is not a valid file name",
            "Choose a name without null bytes or invalid characters",
        ) from error


def is_same_file(handle: int, path: Path) -> bool:
    """Return True if the path still leads to the file that is open as `handle`. A symbolic link to
    the file is not accepted.
    """
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def write_atomic(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, durable: bool = True
) -> None:
    """Replace a file atomically: readers see either the old content or the new content, even after
    a crash.

    An existing file keeps its permissions. A new file gets the permissions that the umask allows.
    If `durable` is false, the call does not wait for the disk, so the old content may return after
    a power failure.

    :raises StorageError: the disk refuses; the old file is unchanged.
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
    """Replace a file like `write_atomic`, but raise OSError, so that the caller can word the error
    message. A new file gets the permissions `mode`, except those that the umask forbids.

    :raises OSError: the disk refuses; the old file is unchanged.
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
    """Write a file whose path the user gave. If the path is a symbolic link, the file that it
    points to is replaced.

    :raises StorageError: the path names a device, pipe, socket or directory, or the disk refuses.
    """
    with storage(path):
        replace_named(path, data)


def replace_named(path: Path, data: bytes) -> None:
    """Write a file like `write_out`, but raise OSError, so that the caller can word the error
    message.

    :raises OSError: the path names something other than an ordinary file, or the disk refuses.
    """
    with suppress(FileNotFoundError):
        check_ordinary(path.stat().st_mode, path)
    replace_file(Path(os.path.realpath(path)), data)


def read_ordinary(path: Path) -> bytes:
    """Return the content of an ordinary file. Pipes and devices are refused, because reading them
    could block forever.

    :raises OSError: the path is not an ordinary file, or cannot be read.
    """
    with open_ordinary(path) as file:
        return file.read()


def open_ordinary(path: Path) -> BufferedReader:
    """Open an ordinary file for reading.

    :raises OSError: the path is not an ordinary file, or cannot be opened.
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
    """Check that `mode`, the mode of an open file, is the mode of an ordinary file.

    :raises OSError: if it is the mode of a directory, device, pipe or socket.
    """
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "the path is a directory, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(
            errno.EINVAL, "the path is a device, a pipe or a socket, not a file", str(path)
        )


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk, if the operating system supports this."""
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def jsonable(value: Any) -> Any:
    """Convert a value to types that JSON has; NaN becomes None, and infinities become strings.

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
    """Parse a JSON string that may also contain `Infinity`, which Python writes for infinite
    numbers.

    :raises ValueError: the text is not JSON, is nested too deeply, or holds NaN or a lone surrogate.
    """
    try:
        value = json.loads(text, parse_constant=_constant)
        if "\\u" in text:
            # JSON may contain half of a surrogate pair, such as "\ud800". `json.loads` accepts it,
            # but `encode` raises an error.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return value


def _constant(word: str) -> float:
    if word == "NaN":
        raise ValueError("the value contains NaN")
    return float(word)


def plain_fields(record: object) -> dict[str, Any]:
    """Return the fields of a dataclass as plain JSON types, including the fields of nested
    dataclasses.

    This function is ten times as fast as `asdict`. Its speed matters, because atts makes a manifest
    for every request to its server.

    :raises TypeError: if JSON has no type for one of the values.
    """
    values: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_plain_value)
    return values


def _plain_value(value: object) -> object:
    """Convert a value of a subclass of a JSON type, such as a NumPy string, to the JSON type
    itself.

    :raises TypeError: if JSON has no type for the value.
    """
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r} cannot be written as JSON")
