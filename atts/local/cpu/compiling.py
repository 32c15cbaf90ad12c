"""Compile the C kernels at their first use, and keep the library in a cache; atts also works
without compiled kernels.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch

from atts.errors import UnsupportedByEngine
from atts.files import replace_file
from atts.local.model_config import ModelConfig

Build = Callable[[Path], None]
"""A function that builds a library and writes it to the given path, in an empty folder.

:raises UnsupportedByEngine: the library cannot be built.
:raises OSError: writing to the disk fails.
"""
_BUILDING = "atts-build-"
_STALE_SECONDS = 600.0
"""Age in seconds after which a build folder is deleted. A build takes only seconds, so an older
folder was left behind by a process that was killed.
"""


def cached_library(key: str, build: Build) -> tuple[ctypes.CDLL, str]:
    """Load the library with this key from the cache, or build it. Also return a description of any
    problem with the cache, or an empty string.

    :raises UnsupportedByEngine: the library can neither be loaded nor built.
    :raises OSError: the library cannot be written to any disk.
    """
    folder, trouble = _cache_folder()
    for path in sorted(folder.glob(f"{_prefix(key)}*.so")) if folder else ():
        problem = _damage(path, key)
        if not problem:
            with suppress(OSError):
                return ctypes.CDLL(str(path)), trouble
            problem = "cannot be loaded"
        trouble = f"{path} {problem}, so atts built the kernels again"
        with suppress(OSError):
            path.unlink()
    return _build(key, build, folder, trouble)


def _build(key: str, build: Build, folder: Path | None, trouble: str) -> tuple[ctypes.CDLL, str]:
    """Build the library in a temporary folder that is deleted afterwards, store it in the cache,
    and load it. If the system's temporary folder does not work, try again in the cache folder.
    """
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
    assert error is not None, "every folder for the kernels failed, so an error must be known"
    raise error


def _keep(library: Path, key: str, folder: Path | None) -> tuple[Path, str]:
    """Store a built library in the cache. Return the path from which to load it, and an error
    message if writing failed.

    Two processes may store the same library at the same time. Build folders that killed processes
    left behind are deleted.
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
            f"{path} cannot be written ({error.strerror}), so every process builds the kernels "
            "again",
        )
    return path, ""


def _cache_folder() -> tuple[Path | None, str]:
    """Return the cache folder and an empty string; if the folder cannot be used, return None and
    the reason.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (root if root.is_absolute() else Path("~/.cache")) / "atts"
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        problem = _distrust(folder.resolve())
    # `expanduser` raises RuntimeError if there is no home directory
    except (OSError, RuntimeError) as error:
        problem = f"cannot be used ({getattr(error, 'strerror', None) or error})"
    return (
        (None, f"the kernel cache {folder} {problem}, so every process builds the kernels again")
        if problem
        else (folder, "")
    )


def _distrust(path: Path) -> str:
    """Describe why a path cannot be trusted, for example because other users can write to it.
    Return an empty string if it can be trusted.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "is not a plain file"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"belongs to another user ({status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (chmod go-w {path})"
    return ""


def _damage(path: Path, key: str) -> str:
    """Describe why a cached library cannot be used; return an empty string if it can."""
    try:
        if problem := _distrust(path):
            return problem
        is_whole = _digest(path.read_bytes()) == path.stem.removeprefix(_prefix(key))
    # Reading fails if, for example, another process found the damage first and removed the file.
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if is_whole else "is damaged"


def _stale(folder: Path) -> Iterator[Path]:
    """Yield this user's build folders that killed processes left behind."""
    for path in folder.glob(f"{_BUILDING}*"):
        with suppress(OSError):
            if not _distrust(path) and path.lstat().st_mtime < time.time() - _STALE_SECONDS:
                yield path


def _prefix(key: str) -> str:
    return f"kernels-{key}-"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


Tuning = Literal["native", "avx2", "generic"]
"""The instructions that the compiler may use. native: all instructions of this processor. avx2:
AVX2, but nothing newer. generic: instructions that every processor of this architecture has.
"""
_SOURCES = Path(__file__).with_name("kernels")
_FLAGS = ("-O3", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC")
_INSTEAD = "Add ?kernel=torch to the engine's address"
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
# C types of each kernel function: first the type of its result, then the types of its arguments
_SIGNATURES: dict[str, tuple[type[ctypes.c_int64] | type[ctypes.c_void_p] | None, ...]] = {
    "atts_row_block": (_INT,),
    "atts_has_pairs": (_INT,),
    "atts_packed_bytes": (_INT, _INT, _INT, _INT),
    "atts_scratch_floats": (_INT, _INT, _INT),
    "atts_supports": (_INT, _INT),
    "atts_pack": (None, _POINTER, _INT, _INT, _INT, _POINTER),
    "atts_forward": (None, _POINTER, _POINTER),
    "atts_forward_parts": (None, _POINTER, _POINTER, _INT),
    "atts_logits": (None, _POINTER, _POINTER, _INT, _POINTER, _INT),
    "atts_score": (None, _POINTER, _INT),
    "atts_sample": (None, _POINTER),
    "atts_draw_ahead": (_INT, *[_POINTER] * 5, _INT, _POINTER, _INT),
    "atts_logprobs": (None, _POINTER, _INT, _INT, _POINTER, _POINTER),
}


def tunings() -> tuple[Tuning, ...]:
    """List the tunings (sets of instructions) that this processor can run, fastest first. Engines
    use the first tuning, and tests use all of them.
    """
    has_avx2 = {"avx2", "fma"} <= set(_processor().split())
    return ("native", "avx2", "generic") if has_avx2 else ("native", "generic")


def native_library(
    engine: str, config: ModelConfig, tuning: Tuning = "native"
) -> tuple[ctypes.CDLL, str]:
    """Load the compiled kernels from the cache, or compile them. Also return a description of any
    problem with the cache, or an empty string.

    :raises UnsupportedByEngine: there is no compiler, the build fails, or the kernels do not
        support the head size or the tuning.
    """
    if tuning not in tunings():
        known = ", ".join(tunings())
        raise UnsupportedByEngine(
            engine, f"this processor cannot run kernels tuned for {tuning}", f"It supports {known}"
        )
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        advice = "Install gcc, or add ?kernel=torch to the engine's address"
        raise UnsupportedByEngine(
            engine, "no C compiler was found to build the native kernels", advice
        )
    try:
        library, trouble = cached_library(
            _cache_key(compiler, tuning), partial(_compile, engine, compiler, tuning)
        )
    except OSError as error:
        problem = f"the native kernels cannot be stored or loaded ({error})"
        raise UnsupportedByEngine(engine, problem, _INSTEAD) from error
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if not library.atts_supports(config.head_dim):
        raise UnsupportedByEngine(
            engine,
            f"the native kernels do not support head dimension {config.head_dim}",
            "Use torch",
        )
    return library, trouble


def _compile(engine: str, compiler: str, tuning: Tuning, library: Path) -> None:
    """Compile the kernels into the file `library`. The compiler's temporary files go to the same
    folder.
    """
    problem = ""
    sources = [str(source) for source in sorted(_SOURCES.glob("*.c"))]
    environment = {**os.environ, "TMPDIR": str(library.parent)}
    for extra in _flag_sets(tuning):
        command = [compiler, *_FLAGS, *extra[0], "-o", str(library), *sources, *extra[1], "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, errors="replace", env=environment
        )
        if done.returncode == 0:
            return
        problem = (
            done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else f"exit code {done.returncode}"
        )
    raise UnsupportedByEngine(
        engine, f"the native kernels could not be built ({problem})", _INSTEAD
    )


def _flag_sets(tuning: Tuning) -> Sequence[tuple[Sequence[str], Sequence[str]]]:
    """Return pairs of compiler flags and linker flags, in the order in which to try them. Later
    pairs have fewer flags.
    """
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    tuned = {"native": (native,), "avx2": ("-mavx2", "-mfma"), "generic": ()}[tuning]
    # Link the OpenMP library that torch contains. Another OpenMP library in the process would start
    # a second set of threads that wait for work.
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    threads = [((*tuned, "-fopenmp"), ("-nostdlib", str(bundled[0]), "-lc"))] if bundled else []
    return [*threads, ((*tuned, "-fopenmp"), ()), (tuned, ()), ((), ())]


def _cache_key(compiler: str, tuning: Tuning) -> str:
    """Return the cache key of a build: a hash of its sources, flags, compiler and processor."""
    sources = [source.read_text(encoding="utf-8") for source in sorted(_SOURCES.iterdir())]
    text = repr(
        (sources, _FLAGS, _flag_sets(tuning), compiler, os.stat(compiler).st_mtime, _processor())
    )
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _processor() -> str:
    """Return a string that lists the processor's instruction sets. If the system does not report
    them, return the processor's name.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )
