"""Handle of a worker process: asked over pipes, killed when it is late."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from atts.evaluators.verdict import Verdict
from atts.processes import python_command

Backend = Literal["sympy", "math-verify"]
_LOADING_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class SlowLimits:
    """What one question may cost; the clock starts when the work does, not while it waits or libraries load."""

    seconds: float = 0.75
    megabytes: int = 280  # resident memory of a worker
    characters: int = 1_000  # of either answer; longer ones are not asked about


class SymbolicWorker:
    """A process that keeps the libraries loaded, and its child that does the work.

    One thread at a time asks; any other may kill it meanwhile.
    """

    def __init__(self, backend: Backend, limits: SlowLimits) -> None:
        self._limits = limits
        command = python_command(Path(__file__).with_name("worker.py"), str(limits.megabytes), backend)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
        self._pipes = threading.Lock()  # held while they are used: a pipe closed under a reader is an error of its own
        self._child = 0  # the process at work; 0 while none has said that it is ready

    @property
    def pids(self) -> list[int]:
        """The process that holds the libraries and the one at work."""
        return [self._process.pid, *([self._child] if self._child not in (0, self._process.pid) else [])]

    @property
    def is_alive(self) -> bool:
        """Whether the process that holds the libraries runs."""
        return self._process.poll() is None

    def load(self) -> bool:
        """Wait until a child is ready; False when there will be none."""
        with self._pipes:
            while not self._child:
                line, _ = self._line(_LOADING_SECONDS, self._process.pid)
                if not line:
                    return False
                word, _, pid = line.partition(" ")
                self._child = int(pid) if word == "ready" else 0
            return True

    def ask(self, question: dict[str, Any]) -> Verdict:
        """The verdict; "unscored" with the rule "timeout", "memory" or "crash" when the child had to go."""
        with self._pipes:
            return self._asked(json.dumps(question))

    def _asked(self, question: str) -> Verdict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # a broken pipe, or one closed before the turn came
            return Verdict("unscored", "crash", "the worker had ended")
        line, is_late = self._line(self._limits.seconds, self._child)
        if line.startswith("{"):
            verdict = msgspec.json.decode(line, type=Verdict)
            self._child = 0 if verdict.rule == "memory" else self._child
            return verdict
        self._child = int(line.partition(" ")[2]) if line.startswith("ready") else 0
        if is_late:
            return Verdict("unscored", "timeout", f"more than {self._limits.seconds:g} s")
        return Verdict("unscored", "crash", "the worker ended")

    def _line(self, seconds: float, victim: int) -> tuple[str, bool]:
        """The next line from the process, and whether `victim` was killed for being late with it."""
        assert self._process.stdout is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(victim, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            line = "" if self._process.stdout.closed else self._process.stdout.readline()
        finally:
            timer.cancel()
        return line, late.is_set()

    def kill(self) -> None:
        """End both processes and take the pipes back; twice is fine."""
        self._process.kill()
        self._process.wait()
        for pid in [self._child] if self._child else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with self._pipes:  # a reader has met the end by now
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                        pipe.close()
