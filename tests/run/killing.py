"""Evaluations on two local engines in their own processes, which tests kill.

Run with a directory as argument, this file is a command that makes one evaluation. Without an
argument, it is a server that forks one evaluation for each directory that it reads. The engines of
an evaluation are forks of it, so the modules are imported only once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio

from atts.core import Problem
from atts.errors import ATTSError
from atts.local import LocalEngine, LocalOptions, child, worker
from atts.models import path
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import RunOptions, RunSpec, evaluate
from atts.testing import toy_answer, toy_groups

PROBLEMS = [
    Problem(f"p{number}", f"What is {number} + {3 * number}?", str(4 * number))
    for number in range(2, 10)
]


def main(directory: Path) -> int:
    """Evaluate, continuing an existing run in the directory, and return the exit code."""
    options = LocalOptions(device="cpu", threads=1, kv_tokens=8192)
    plan = RunSpec(
        LocalEngine(path("draft"), name="draft", options=options),
        LocalEngine(path("target"), name="target", options=options),
        Policy(samples=4, turns=6, chunking=Chunking(12, 12, ()), early_stop="none"),
        ThresholdGate(1.3),
        Answers(toy_answer, toy_groups),
        concurrency=4,
    )
    try:
        return anyio.run(
            evaluate, PROBLEMS, plan, RunOptions(directory, signals="ignore")
        ).exit_code
    except ATTSError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


class Forked(subprocess.Popen[bytes]):
    """A worker process that is a fork of its parent, with the usual pipes and program but without
    new imports.
    """

    def _execute_child(self, *arguments: Any) -> None:
        stdin, _, _, stdout, _, stderr = arguments[10:16]
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.setpgid(0, 0)
            for number, handle in enumerate((stdin, stdout, stderr)):
                os.dup2(handle, number)
            os.closerange(3, 4096)
            sys.stdin = os.fdopen(0)
            sys.argv = ["child", str(parent)]
            code = 1
            try:
                code = child.main()
            finally:
                os._exit(code)
        self._child_created = True
        for handle in (stdin, stdout, stderr):
            os.close(handle)


def serve() -> None:
    """Fork an evaluation for each directory read, in its own session; reply with its process id,
    and later with how it ended.
    """
    import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]  what engines load when they open

    import atts.local.builder  # noqa: F401  # pyright: ignore[reportUnusedImport]

    workers: Any = worker
    workers.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    for line in sys.stdin:
        run = os.fork()
        if not run:
            os.setsid()
            os._exit(main(Path(line.rstrip("\n"))))
        for said in (run, None):
            answer = said or os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(main(Path(sys.argv[1])))
    serve()
