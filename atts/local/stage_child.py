"""The main program of a stage's process: it loads the layers that it is told, then answers steps."""

from __future__ import annotations

import gc
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from atts.errors import EngineError, EngineUnavailable
from atts.local.messages import GONE, FailureReply, write
from atts.local.stages import HeldLayers, StageSetup
from atts.processes import end_with, python_command

_END_SECONDS = 1.0
"""For a process that says nothing any more to end."""


class StageProcess:
    """The other end: a process for one stage."""

    def __init__(self, setup: StageSetup) -> None:
        """Start it.

        :raises EngineUnavailable: the system starts none.
        """
        self._setup, self._name, pipe = setup, setup.config.name, subprocess.PIPE
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
        return EngineUnavailable(self._name, f"{self._setup} ended with exit code {self._process.returncode}", advice)

    def close(self) -> None:
        """End it; twice is fine."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # what is left to write is for a process that is gone
                    stream.close()


def ready(processes: Sequence[StageProcess], seconds: float | None) -> Sequence[StageProcess]:
    """Which of them have answered or are gone; waits for one so many seconds, None: for as long as it takes."""
    poll = select.poll()
    for process in processes:
        poll.register(process.fileno(), select.POLLIN | select.POLLHUP)
    found = {number for number, _ in poll.poll(None if seconds is None else 1000 * seconds)}
    return [process for process in processes if process.fileno() in found]


def main() -> None:
    """Load what the first message names, then answer steps until there are no more."""
    end_with(int(sys.argv[1]))
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the answers
    with suppress(*GONE):  # cut off: who asks is gone
        from atts.local.build import build_stage  # imports torch

        setup = pickle.load(orders)
        try:
            stage = HeldLayers(setup, *build_stage(setup))
        except EngineError as error:
            write(answers, FailureReply.of(error))
            return
        write(answers, None)
        gc.freeze()  # what is loaded stays, and need not be looked through for garbage
        while True:
            write(answers, stage.answer(pickle.load(orders)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
