"""Runs a step loop beside the caller, in a thread or a process of its own, behind one small interface."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

from atts.errors import EngineError, ModelLoadError, OutOfMemory
from atts.local.messages import Blueprint, Close, Failed, Opened, Order, Report

_CLOSE_SECONDS = 10.0
Tell = Callable[[Report], None]


class Worker(Protocol):
    """A step loop at work; reports come from a thread of its own."""

    def open(self, plan: Blueprint, tell: Tell) -> Opened:
        """Start, and wait until the model is loaded.

        :raises EngineError: it could not be.
        """
        ...

    def send(self, order: Order) -> None:
        """Pass an order on; returns at once."""
        ...

    def close(self) -> None:
        """End the loop and wait for its end; closing twice is fine."""
        ...


class Mailbox:
    """Orders on their way to a loop in another thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def put(self, order: Order) -> None:
        """Add an order; never blocks."""
        self._queue.put(order)

    def take(self, *, wait: bool) -> list[Order]:
        """All orders so far; with `wait`, at least one."""
        orders = [self._queue.get()] if wait else []
        try:
            while True:
                orders.append(self._queue.get_nowait())
        except queue.Empty:
            return orders


class ThreadWorker:
    """The loop in a thread of this process."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._thread: threading.Thread | None = None

    def open(self, plan: Blueprint, tell: Tell) -> Opened:
        """Load the model here, then start the thread."""
        from atts.local.build import build_loop, set_threads  # torch is for whoever computes

        loop, opened = build_loop(plan, tell)

        def run() -> None:
            try:
                set_threads(plan)
                loop.run(self._mailbox)
            except Exception as error:  # noqa: BLE001  the callers, not this thread, must hear of it
                loop.fail_all(broken(error))

        self._thread = threading.Thread(target=run, name=f"atts-{plan.name}", daemon=True)
        self._thread.start()
        return opened

    def send(self, order: Order) -> None:
        """Pass an order on; returns at once."""
        self._mailbox.put(order)

    def close(self) -> None:
        """End the loop and wait for its end."""
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
        self._outbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "atts.local.child"]
        # A group of its own: Ctrl-C is for the caller, who may want the calls in flight to finish.
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )

    def open(self, plan: Blueprint, tell: Tell) -> Opened:
        """Send the child the blueprint and wait for its answer."""
        process = self._process
        assert process is not None, "opened once, before it is closed"
        assert process.stdin is not None, "asked for a pipe"
        assert process.stdout is not None, "asked for a pipe"
        try:
            write(process.stdin, plan)
            answer = pickle.load(process.stdout)
        except (EOFError, OSError) as error:
            self._end(process)
            raise EngineError(plan.name, f"its process died while loading (exit code {process.returncode})") from error
        if isinstance(answer, Failed):
            kind = {"load": ModelLoadError, "memory": OutOfMemory}.get(answer.kind, EngineError)
            raise kind(plan.name, answer.problem, answer.advice)
        assert isinstance(answer, Opened), "a child answers the blueprint with Opened or Failed"
        self._start(threading.Thread(target=_write_orders, args=(self._outbox, process.stdin), daemon=True))
        self._start(threading.Thread(target=_read_reports, args=(process, tell), daemon=True))
        return answer

    def send(self, order: Order) -> None:
        """Pass an order on; returns at once."""
        self._outbox.put(order)

    def close(self) -> None:
        """End the loop and wait for its end."""
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


def broken(error: BaseException) -> Failed:
    """The last word of a loop that hit an error of ours."""
    return Failed(0, "broken", f"its step loop broke ({type(error).__name__}: {error})", "Please report this")


def write(stream: IO[bytes], value: object) -> None:
    """One pickled value, flushed."""
    stream.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()


def _write_orders(outbox: queue.SimpleQueue[Order], stream: IO[bytes]) -> None:
    """Pass orders on, many in one write when they come fast, until the last."""
    is_open = True
    while is_open:
        orders = [outbox.get()]
        while not outbox.empty():
            orders.append(outbox.get())
        is_open = not any(isinstance(order, Close) for order in orders)
        try:
            write(stream, orders)
        except OSError:
            break  # the child is gone; the reader of its reports says so
    with suppress(OSError):  # closing flushes, and there may be nobody to flush to
        stream.close()


def _read_reports(process: subprocess.Popen[bytes], tell: Tell) -> None:
    assert process.stdout is not None, "asked for a pipe"
    with process.stdout as stream:
        try:
            while True:
                tell(pickle.load(stream))
        except (EOFError, pickle.UnpicklingError):
            code = process.wait()
    advice = "A negative code is a signal; -9 is often the system running out of memory" if code else ""
    problem = "it is closed" if code == 0 else f"its process ended with exit code {code}"
    tell(Report((Failed(0, "closed", problem, advice),), None))


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
