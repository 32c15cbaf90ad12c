"""Workers that run a step loop, either in a thread of the caller's process or in a separate
process.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import IO, Protocol

from atts.concurrency import import_lock, python_command
from atts.errors import EngineError
from atts.local.messages import (
    GONE,
    Cancel,
    Close,
    Command,
    FailureReply,
    LoopReport,
    ShareCores,
    Submit,
    WorkerConfig,
    WorkerReady,
    close_pipes,
    first_answer,
    write,
)
from atts.local.options import WorkerKind

_CLOSE_SECONDS = 10.0
_LAST_BYTES = 4096
_LAST_CHARACTERS = 300
Deliver = Callable[[LoopReport], None]
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def worker_environment() -> dict[str, str]:
    """Return the environment variables of a worker process, which make waiting threads sleep.

    By default, OpenMP's threads use a core even while they wait. If two engines compute at once,
    the waiting threads of each engine would make the other engine several times slower. Variables
    that the user has set are kept.
    """
    return {**_PASSIVE, **os.environ}


class OpenLoops:
    """The step loops that compute with several threads, and therefore share the cores.

    A loop is busy while it has requests. With native kernels, busy loops also use the cores of idle
    loops. For example, the target uses the cores of a draft that waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # ids of each loop's unfinished requests, keyed by the function that sends commands to the
        # loop
        self._requests: dict[Callable[[Command], None], set[int]] = {}
        self._sent = ShareCores(0, 0)

    def register(self, send: Callable[[Command], None]) -> int:
        """Add a loop and return the number of open loops. Also send the new numbers of open and
        busy loops to the other loops.
        """
        with self._lock:
            self._requests[send] = set()
            self._sent = self._counts()
            for other in self._requests:
                if other != send:
                    other(self._sent)
            return len(self._requests)

    def leave(self, send: Callable[[Command], None]) -> None:
        """Remove a loop, so that the other loops share its cores. A second call has no effect."""
        with self._lock:
            if self._requests.pop(send, None) is not None:
                self._report()

    def begin(self, send: Callable[[Command], None], request_id: int) -> None:
        """Count a request that is about to be sent to a loop. Do nothing if the loop was removed."""
        with self._lock:
            if send in self._requests:
                self._requests[send].add(request_id)
                self._report()

    def end(self, send: Callable[[Command], None], request_ids: Iterable[int]) -> None:
        """Stop counting requests that the loop has answered, or whose callers were cancelled."""
        with self._lock:
            if send in self._requests:
                self._requests[send].difference_update(request_ids)
                self._report()

    def _report(self) -> None:
        """Report the numbers of open and busy loops to every loop, if they have changed."""
        counts = self._counts()
        if counts != self._sent:
            self._sent = counts
            for send in self._requests:
                send(counts)

    def _counts(self) -> ShareCores:
        return ShareCores(len(self._requests), sum(map(bool, self._requests.values())))


OPEN_LOOPS = OpenLoops()


class Mailbox:
    """A queue of commands to another thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.put: Callable[[Command], None] = self._queue.put

    def take(self, *, wait: bool) -> list[Command]:
        """Return all commands that have arrived. If `wait` is true, first wait for at least one
        command.
        """
        commands = [self._queue.get()] if wait else []
        try:
            while True:
                commands.append(self._queue.get_nowait())
        except queue.Empty:
            return commands


class ThreadWorker:
    """A worker that runs the loop in a thread of this process."""

    in_loop = None

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._thread: threading.Thread | None = None
        # True if the loop computes with several threads, and therefore shares the cores with other
        # loops
        self._is_sharing = False

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Start the thread that loads the model, runs the loop, and calls `deliver` with its
        reports. Return when the model is loaded.

        OpenMP keeps helper threads for each thread that ever computed in parallel. If the caller's
        thread computed too, there would be more helpers than cores. The helpers would then sleep
        between the parts of a step, and two threads would be slower than one. So only the new
        thread computes, and it also loads the model.

        :raises EngineError: the model could not be loaded.
        """
        with import_lock:
            # imported here and not at the top, because this imports torch
            from atts.local.builder import build_loop, set_threads

        ready = Future[WorkerReady]()
        config = join_loops(config, self._share)
        if config.is_parallel:
            self._is_sharing = True
            deliver = partial(_hand_on, deliver, self._share)

        def run() -> None:
            try:
                set_threads(config)
                build = build_loop if config.builder is None else config.builder.build
                loop, loaded = build(config, deliver)
            except BaseException as error:  # noqa: BLE001  raised where the engine is opened
                ready.set_exception(error)
                return
            ready.set_result(loaded)
            try:
                loop.run(self._mailbox)
            except Exception as error:  # noqa: BLE001  reported to the callers, not to this thread
                loop.fail_all(broken(error))

        self._thread = threading.Thread(target=run, name=f"atts-{config.name}", daemon=True)
        self._thread.start()
        return ready.result()

    def send(self, command: Command) -> None:
        """Send a command to the loop without waiting."""
        if self._is_sharing:
            _count_request(command, self._share)
        self._mailbox.put(command)

    def _share(self, command: Command) -> None:
        self._mailbox.put(command)

    def close(self) -> None:
        """End the loop, and wait until it has ended. A second call has no effect."""
        OPEN_LOOPS.leave(self._share)
        if self._thread is not None:
            self._mailbox.put(Close())
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None


class ProcessWorker:
    """A worker that runs the loop in a child process. It shares no interpreter lock with the
    caller, so two engines really compute in parallel.

    The child is an ordinary process with pipes, because `multiprocessing` would need a `__main__`
    guard in the user's script.
    """

    in_loop = None

    def __init__(self) -> None:
        """Start the child process, which imports torch while the caller reads the tokenizer and the
        configuration.
        """
        self._outbox = Mailbox()
        # True if the loop computes with several threads, and therefore shares the cores with other
        # loops
        self._is_sharing = False
        self._threads: list[threading.Thread] = []
        command = python_command("atts.local.child", str(os.getpid()))
        pipe = subprocess.PIPE
        # The child has its own process group, so that Ctrl-C reaches only the caller. The caller
        # may want to finish the calls in flight.
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            process_group=0,
            env=worker_environment(),
        )
        self._process: subprocess.Popen[bytes] | None = process
        self._last_words = _LastWords(process)

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Send the child its configuration, and wait until the model is loaded. Later, another
        thread calls `deliver` with each report of the loop.

        :raises EngineError: the model could not be loaded.
        """
        process = self._process
        assert process is not None, "a worker may be opened only once, and not after it was closed"
        config = join_loops(config, self._share)
        if config.is_parallel:
            self._is_sharing = True
            deliver = partial(_hand_on, deliver, self._share)
        try:
            answer = first_answer(process, config, config.name)
        except GONE as error:
            _kill(process)
            self._end(process)
            problem = (
                "the engine's process died while loading the model, with "
                f"{_farewell(process.returncode, self._last_words)}"
            )
            raise EngineError(config.name, problem) from error
        assert isinstance(answer, WorkerReady), (
            "a configured process must answer that it is ready or has failed"
        )
        self._start(
            threading.Thread(
                target=_write_commands, args=(self._outbox, process.stdin), daemon=True
            )
        )
        reader = _read_reports, (process, deliver, self._last_words)
        self._start(threading.Thread(target=reader[0], args=reader[1], daemon=True))
        return answer

    def send(self, command: Command) -> None:
        """Send a command to the loop without waiting."""
        if self._is_sharing:
            _count_request(command, self._share)
        self._outbox.put(command)

    def close(self) -> None:
        """End the loop, and wait until it has ended. A second call has no effect."""
        OPEN_LOOPS.leave(self._share)
        process = self._process
        self._process = None
        if process is None:
            return
        if self._threads:
            self._outbox.put(Close())
        else:  # the process has not loaded a model yet, so it can be killed
            _kill(process)
        self._end(process)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _share(self, command: Command) -> None:
        self._outbox.put(command)

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
        self._last_words.wait()
        if not self._threads:
            close_pipes(process)


class LoopWorker(Protocol):
    """The interface of a worker, which runs a step loop in the background."""

    @property
    def in_loop(self) -> int | None:
        """Return the number of requests in the loop, including those of other engines; None if the
        loop serves only one engine.
        """
        ...

    def open(self, config: WorkerConfig, deliver: Deliver) -> WorkerReady:
        """Load the model. Later, another thread calls `deliver` with each report of the loop.

        :raises EngineError: the model could not be loaded.
        """
        ...

    def send(self, command: Command) -> None:
        """Send a command to the loop without waiting."""
        ...

    def close(self) -> None:
        """End the loop, and wait until it has ended. A second call has no effect."""
        ...


def new_worker(kind: WorkerKind) -> LoopWorker:
    """Return a new worker of this kind, which can run one loop.

    :raises OSError: the system cannot start a process.
    """
    return ThreadWorker() if kind == "thread" else ProcessWorker()


def join_loops(config: WorkerConfig, send: Callable[[Command], None]) -> WorkerConfig:
    """Register a loop that is about to open, if it shares the cores with others. Return its
    configuration with the number of loops that share the cores.
    """
    if not config.is_parallel:
        return config
    return replace(config, sharers=OPEN_LOOPS.register(send))


def _count_request(command: Command, send: Callable[[Command], None]) -> None:
    """Update a loop's count of requests for a command that is about to be sent to it."""
    match command:
        case Submit(request_id):
            OPEN_LOOPS.begin(send, request_id)
        case Cancel(request_id):
            OPEN_LOOPS.end(send, [request_id])
        case _:
            pass


def _hand_on(deliver: Deliver, send: Callable[[Command], None], report: LoopReport) -> None:
    """Stop counting the requests that a loop has answered, then deliver its report."""
    answered = [reply.request_id for reply in report.replies]
    if 0 in answered:  # a reply with id 0 says that the loop has ended
        OPEN_LOOPS.leave(send)
    elif answered:
        OPEN_LOOPS.end(send, answered)
    deliver(report)


def broken(error: BaseException) -> FailureReply:
    """Return the failure to report when an unexpected error ends a step loop."""
    if isinstance(error, EngineError):
        return FailureReply.of(error)
    return FailureReply(
        0,
        "broken",
        f"the step loop ended with an error ({type(error).__name__}: {error})",
        "Please report this",
    )


def _write_commands(outbox: Mailbox, stream: IO[bytes]) -> None:
    """Write commands to a stream, including the command that closes the loop, then close the
    stream. Commands that are queued together are sent in one write.
    """
    is_open = True
    while is_open:
        commands = outbox.take(wait=True)
        is_open = not any(isinstance(command, Close) for command in commands)
        try:
            write(stream, commands)
        except OSError:
            break  # the child has ended; the thread that reads its reports handles this
    # Closing the stream first writes the rest of its buffer, which fails if the child has ended.
    with suppress(OSError):
        stream.close()


class _LastWords:
    """A reader that keeps the last bytes of a process's standard error."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Wait until the process has ended, and return the last line of its standard error."""
        self._thread.join(_CLOSE_SECONDS)
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[-_LAST_CHARACTERS:] if lines else ""

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while said := os.read(stream.fileno(), _LAST_BYTES):
                self._kept = (self._kept + said)[-_LAST_BYTES:]


def _farewell(code: int, last_words: _LastWords) -> str:
    said = last_words.wait()
    return f"exit code {code}" + (f"; last output: {said}" if said else "")


def _read_reports(
    process: subprocess.Popen[bytes], deliver: Deliver, last_words: _LastWords
) -> None:
    assert process.stdout is not None, "the process must have a pipe for its output"
    with process.stdout as stream:
        try:
            while True:
                deliver(pickle.load(stream))
        except (EOFError, pickle.UnpicklingError):
            code = process.wait()
    advice = (
        "A negative exit code means that a signal ended the process; -9 often means that memory "
        "ran out"
        if code
        else ""
    )
    problem = (
        "the engine is closed"
        if code == 0
        else f"the engine's process ended with {_farewell(code, last_words)}"
    )
    deliver(LoopReport((FailureReply(0, "closed", problem, advice),), None))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process and its process group, which may include a compiler that it started.
    Call this function before waiting for the child.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
