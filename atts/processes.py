"""Child processes of this package: Python that imports what its parent does, and nothing from the
current directory.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PARENT_SECONDS = 0.25
"""How often a child looks whether its parent is still there."""
_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG; sent when the thread that started the child ends, so it must be a
harmless one.
"""
_START = """\
import json, runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
program, path, folder = json.loads(sys.argv.pop(1))
sys.path[:] = path + [own for own in sys.path if own not in path]
spec = spec_from_file_location("atts", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["atts"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["atts"])
if program.endswith(".py"):
    runpy.run_path(program, run_name="__main__")
else:
    runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


def python_command(program: str | Path, *arguments: str) -> list[str]:
    """The command line that runs a module or a file in an isolated Python, with the `atts` of this
    process.

    Environment variables that Python itself reads do not reach it; what they added to this
    process's path does.
    """
    start = json.dumps([str(program), import_path(), str(Path(__file__).parent)])
    return [sys.executable, "-I", "-c", _START, start, *arguments]


def import_path() -> list[str]:
    """`sys.path` without the current directory, unless `PYTHONPATH` names it in full."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # it was deleted
        here = ""
    return [p for p in sys.path if os.path.isabs(p) and (p in named or os.path.realpath(p) != here)]


def usable_cores() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with(parent: int) -> None:
    """Kill this process, and what it started, as soon as process `parent` is gone; to be called in
    its child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            _DEATH_SIGNAL, signal.SIGCONT
        )  # a child that is stopped would not look
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
