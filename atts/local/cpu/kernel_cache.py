"""The cache of compiled kernels: this user's own files, each named by its digest."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from atts.errors import UnsupportedByEngine
from atts.files import replace_file

Build = Callable[[Path], None]
"""Makes the library at a path in a folder of its own.

:raises UnsupportedByEngine: it cannot be built.
:raises OSError: the disk refuses.
"""
_BUILDING = "atts-build-"
_STALE_SECONDS = 600.0
"""Builds take seconds: what is as old as this was left by a process that was killed."""


def cached_library(key: str, build: Build) -> tuple[ctypes.CDLL, str]:
    """Return the library of this key, cached or built now, and what was wrong with the cache.

    :raises UnsupportedByEngine: it can neither be loaded nor built.
    :raises OSError: no disk takes it.
    """
    folder, trouble = _cache_folder()
    for path in sorted(folder.glob(f"{_prefix(key)}*.so")) if folder else ():
        problem = _damage(path, key)
        if not problem:
            with suppress(OSError):
                return ctypes.CDLL(str(path)), trouble
            problem = "cannot be loaded"
        trouble = f"{path} {problem}: the kernels were built anew"
        with suppress(OSError):
            path.unlink()
    return _build(key, build, folder, trouble)


def _build(key: str, build: Build, folder: Path | None, trouble: str) -> tuple[ctypes.CDLL, str]:
    """Build in a folder that is gone afterwards: the system's for such things, else in the cache."""
    error: OSError | UnsupportedByEngine | None = None
    for place in (None, folder) if folder else (None,):
        try:
            with tempfile.TemporaryDirectory(
                prefix=_BUILDING, dir=place, ignore_cleanup_errors=True
            ) as made:
                library = Path(made) / "kernels.so"
                build(library)
                kept, refusal = _keep(library, key, folder)
                return ctypes.CDLL(str(kept)), trouble or refusal
        except (OSError, UnsupportedByEngine) as refused:
            error = refused
    assert error is not None, "there is a place to build in"
    raise error


def _keep(library: Path, key: str, folder: Path | None) -> tuple[Path, str]:
    """Return where to load the library from, and why the cache did not take it, if so.

    Two processes that build at once keep two files, or the same one twice.
    """
    if folder is None:
        return library, ""
    data = library.read_bytes()
    path = folder / f"{_prefix(key)}{_digest(data)}.so"
    try:
        for old in (*_stale(folder), *_stale(Path(tempfile.gettempdir()))):
            shutil.rmtree(old, ignore_errors=True)
        replace_file(path, data, durable=False, mode=0o600)
    except OSError as error:
        return (
            library,
            f"{path} cannot be written ({error.strerror}): every process builds the kernels anew",
        )
    return path, ""


def _cache_folder() -> tuple[Path | None, str]:
    """Return the cache's folder, None where there is none that may be used, and why."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (root if root.is_absolute() else Path.home() / ".cache") / "atts"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        problem = _distrust(folder.resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home
        folder = root / "atts"
        problem = f"cannot be used ({getattr(error, 'strerror', None) or error})"
    return (
        (None, f"the kernel cache {folder} {problem}: every process builds anew")
        if problem
        else (folder, "")
    )


def _distrust(path: Path) -> str:
    """Describe why something is not this user's alone to write; nothing when it is."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return "is no plain file"
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return f"belongs to another user ({found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (chmod go-w {path})"
    return ""


def _damage(path: Path, key: str) -> str:
    """Describe why a file is not what was built; nothing when it is."""
    try:
        if problem := _distrust(path):
            return problem
        is_whole = _digest(path.read_bytes()) == path.stem.removeprefix(_prefix(key))
    except (
        OSError
    ) as error:  # as where another process that found it damaged was quicker to remove it
        return f"cannot be read ({error.strerror})"
    return "" if is_whole else "is damaged"


def _stale(folder: Path) -> Iterator[Path]:
    """Find folders in which a process of this user was killed while it built."""
    for path in folder.glob(f"{_BUILDING}*"):
        with suppress(OSError):
            if not _distrust(path) and path.lstat().st_mtime < time.time() - _STALE_SECONDS:
                yield path


def _prefix(key: str) -> str:
    return f"kernels-{key}-"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
