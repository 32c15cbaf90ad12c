"""The compiler of the C kernels: built on first use, cached, never required."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch

from atts.errors import UnsupportedByEngine
from atts.local.cpu.kernel_cache import cached_library
from atts.local.model_config import ModelConfig

Tuning = Literal["native", "avx2", "generic"]
"""Whose instructions the compiler may use: all of this processor's, AVX2's, those every one of its
kind has.
"""
_SOURCES = Path(__file__).with_name("kernels")
_FLAGS = ("-O3", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC")
_INSTEAD = "Write ?kernel=torch behind the engine's name"
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
# result, then arguments
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
    """List tunings whose code this processor can run; engines use the first, tests all of them."""
    has_avx2 = {"avx2", "fma"} <= set(_processor().split())
    return ("native", "avx2", "generic") if has_avx2 else ("native", "generic")


def native_library(
    engine: str, config: ModelConfig, tuning: Tuning = "native"
) -> tuple[ctypes.CDLL, str]:
    """Return the compiled kernels, cached or built now, and what was wrong with the cache, if so.

    :raises UnsupportedByEngine: no compiler, a failed build, a head size the kernels do not know,
        or a foreign tuning.
    """
    if tuning not in tunings():
        known = ", ".join(tunings())
        raise UnsupportedByEngine(
            engine, f"this processor cannot run kernels tuned for {tuning}", f"It can: {known}"
        )
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        advice = "Install gcc, or write ?kernel=torch behind the engine's name"
        raise UnsupportedByEngine(engine, "no C compiler for the native kernels", advice)
    try:
        library, trouble = cached_library(
            _cache_key(compiler, tuning), partial(_build, engine, compiler, tuning)
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
            engine, f"the native kernels do not know head dimension {config.head_dim}", "Use torch"
        )
    return library, trouble


def _build(engine: str, compiler: str, tuning: Tuning, library: Path) -> None:
    """Compile into a folder of the library's own, the compiler's temporary files included."""
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
    raise UnsupportedByEngine(engine, f"the native kernels do not build ({problem})", _INSTEAD)


def _flag_sets(tuning: Tuning) -> Sequence[tuple[Sequence[str], Sequence[str]]]:
    """List compiler and linker flags to try: all that is asked for first, then less."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    tuned = {"native": (native,), "avx2": ("-mavx2", "-mfma"), "generic": ()}[tuning]
    # torch brings its own OpenMP; a second one in the process would make a second set of waiting
    # threads
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    threads = [((*tuned, "-fopenmp"), ("-nostdlib", str(bundled[0]), "-lc"))] if bundled else []
    return [*threads, ((*tuned, "-fopenmp"), ()), (tuned, ()), ((), ())]


def _cache_key(compiler: str, tuning: Tuning) -> str:
    """Name a build: the source, the flags, the compiler and the processor it was tuned for."""
    sources = [source.read_text(encoding="utf-8") for source in sorted(_SOURCES.iterdir())]
    text = repr(
        (sources, _FLAGS, _flag_sets(tuning), compiler, os.stat(compiler).st_mtime, _processor())
    )
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _processor() -> str:
    """Return the instruction sets of the processor, where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )
