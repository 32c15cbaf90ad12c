"""The workers that run a step loop beside the caller, in a thread or in a process of its own."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from atts.errors import EngineError
from atts.local.messages import Close, Command, FailureReply, LoopReport, WorkerConfig, WorkerReady

_CLOSE_SECONDS = 10.0
Deliver = Callable[[LoopReport], None]


class Mailbox:
    """A queue of commands to another thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """Add a command; never blocks."""
        self._queue.put(command)

    def take(self, *, wait: bool) -> list[Command]:
        """All commands so far; with `wait`, at least one."""
        commands = [self._queue.get()] if wait else []
        try:
            while True:
                commands.append(self._queue.get_nowait())
        except queue.Empty:
            return commands


class ThreadWorker:
    """The loop in a thread of this process."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._thread: threading.Thread | None = None

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Load the model here, then start the thread, from which reports come.

        :raises EngineError: it could not be loaded.
        """
        from atts.local.build import build_loop, set_threads  # imports torch

        loop, ready = build_loop(config, deliver)

        def run() -> None:
            try:
                set_threads(config)
                loop.run(self._mailbox)
            except Exception as error:  # noqa: BLE001  told to the callers, not to this thread
                loop.fail_all(broken(error))

        self._thread = threading.Thread(target=run, name=f"atts-{config.name}", daemon=True)
        self._thread.start()
        return ready

    def send(self, command: Command) -> None:
        """Pass a command on; returns at once."""
        self._mailbox.put(command)

    def close(self) -> None:
        """End the loop and wait for its end; closing twice is fine."""
        if self._thread is not None:
            self._mailbox.put(Close())
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None


class ProcessWorker:
    """The loop in a process of its own: no lock shared with the caller, so two engines truly overlap.

    A plain child with pipes rather than `multiprocessing`: a user's script needs no `__main__` guard.
    """

    def __init__(self) -> None:
        """Start the child: it imports torch while the caller still reads tokenizer and configuration."""
        self._outbox = Mailbox()
        self._threads: list[threading.Thread] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "atts.local.child"]
        # A group of its own: Ctrl-C is for the caller, who may want the calls in flight to finish.
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Send the child its configuration and wait until the model is loaded; reports come from a thread of its own.

        :raises EngineError: it could not be loaded.
        """
        process = self._process
        assert process is not None, "opened once, before it is closed"
        assert process.stdin is not None, "asked for a pipe"
        assert process.stdout is not None, "asked for a pipe"
        try:
            write(process.stdin, config)
            answer = pickle.load(process.stdout)
        except (EOFError, OSError) as error:
            self._end(process)
            problem = f"its process died while loading (exit code {process.returncode})"
            raise EngineError(config.name, problem) from error
        if isinstance(answer, FailureReply):
            raise answer.error(config.name)
        assert isinstance(answer, WorkerReady), "a child that has its configuration is ready or has failed"
        self._start(threading.Thread(target=_write_commands, args=(self._outbox, process.stdin), daemon=True))
        self._start(threading.Thread(target=_read_reports, args=(process, deliver), daemon=True))
        return answer

    def send(self, command: Command) -> None:
        """Pass a command on; returns at once."""
        self._outbox.put(command)

    def close(self) -> None:
        """End the loop and wait for its end; closing twice is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._threads:
            self._outbox.put(Close())
        else:  # nothing was loaded, nothing is lost
            process.kill()
        self._end(process)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not self._threads:
            _close_pipes(process)


LoopWorker = ThreadWorker | ProcessWorker


def broken(error: BaseException) -> FailureReply:
    """The last word of a loop that hit an error of ours."""
    return FailureReply(0, "broken", f"its step loop broke ({type(error).__name__}: {error})", "Please report this")


def write(stream: IO[bytes], value: object) -> None:
    """One pickled value, flushed."""
    stream.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()


def _write_commands(outbox: Mailbox, stream: IO[bytes]) -> None:
    """Pass commands on, many in one write when they come fast, until the last."""
    is_open = True
    while is_open:
        commands = outbox.take(wait=True)
        is_open = not any(isinstance(command, Close) for command in commands)
        try:
            write(stream, commands)
        except OSError:
            break  # the child is gone; the reader of its reports says so
    with suppress(OSError):  # closing flushes, and the other end may be gone
        stream.close()


def _read_reports(process: subprocess.Popen[bytes], deliver: Deliver) -> None:
    assert process.stdout is not None, "asked for a pipe"
    with process.stdout as stream:
        try:
            while True:
                deliver(pickle.load(stream))
        except (EOFError, pickle.UnpicklingError):
            code = process.wait()
    advice = "A negative code is a signal; -9 is often the system running out of memory" if code else ""
    problem = "it is closed" if code == 0 else f"its process ended with exit code {code}"
    deliver(LoopReport((FailureReply(0, "closed", problem, advice),), None))


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
