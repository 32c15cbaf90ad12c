"""The process of one stage, as the step loop sees it."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from atts.errors import EngineUnavailable
from atts.local.messages import GONE, close_pipes, write
from atts.processes import python_command

_END_SECONDS = 1.0
"""For a process that says nothing any more to end."""


class StageProcess:
    """A process for ranges of layers."""

    def __init__(self, name: str, label: str) -> None:
        """Start it, for an engine; `label` says what it holds.

        :raises EngineUnavailable: the system starts none.
        """
        self._name, self._label, pipe = name, label, subprocess.PIPE
        command = python_command("atts.local.stage_child", str(os.getpid()))
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0)
        except OSError as error:
            raise EngineUnavailable(self._name, f"its stages' processes cannot be started ({error})") from error

    def fileno(self) -> int:
        """What can be read when it has answered."""
        assert self._process.stdout is not None, "asked for a pipe"
        return self._process.stdout.fileno()

    def send(self, message: object) -> None:
        """Pass a message on.

        :raises EngineUnavailable: the process is gone.
        """
        assert self._process.stdin is not None, "asked for a pipe"
        try:
            write(self._process.stdin, message)
        except GONE as error:
            raise self._lost() from error

    def take(self) -> Any:
        """Wait for the answer.

        :raises EngineUnavailable: the process is gone.
        """
        assert self._process.stdout is not None, "asked for a pipe"
        try:
            return pickle.load(self._process.stdout)
        except GONE as error:
            raise self._lost() from error

    def _lost(self) -> EngineUnavailable:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        advice = "A negative code is a signal; -9 is often the system running out of memory"
        return EngineUnavailable(self._name, f"{self._label} ended with exit code {self._process.returncode}", advice)

    def close(self) -> None:
        """End it; twice is fine."""
        self._process.kill()
        self._process.wait()
        close_pipes(self._process)


def ready(processes: Sequence[StageProcess], seconds: float | None) -> Sequence[StageProcess]:
    """Which of them have answered or are gone; waits for one so many seconds, None: for as long as it takes."""
    poll = select.poll()
    for process in processes:
        poll.register(process.fileno(), select.POLLIN | select.POLLHUP)
    found = {number for number, _ in poll.poll(None if seconds is None else 1000 * seconds)}
    return [process for process in processes if process.fileno() in found]
