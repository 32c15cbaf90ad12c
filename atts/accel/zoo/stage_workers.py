"""Workers that have loaded ranges of layers: processes, actors of a Ray cluster, or this process.

A worker process runs this file as its main program. The message classes are in `stages`, so that
the engine's process and its workers import the same classes.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from atts.accel.zoo.stages import BuildStage, News, StageServer
from atts.concurrency import end_with, python_command
from atts.errors import EngineUnavailable, UnsupportedByEngine
from atts.local.batch import StepBatch
from atts.local.cache import SlotIds
from atts.local.messages import GONE
from atts.local.worker import worker_environment

_END_SECONDS = 1.0
"""Largest number of seconds to wait for a process's exit code after its pipe was closed."""


class Worker(Protocol):
    """A worker that handles one message at a time. Call `take` for its answer before you send the
    next message.
    """

    def send(self, message: object) -> None:
        """Send a message.

        :raises EngineUnavailable: the worker has ended.
        """
        ...

    def take(self) -> Any:
        """Wait for the answer to the message, and return it.

        :raises EngineUnavailable: the worker has ended.
        """
        ...

    def close(self) -> None:
        """End the worker. A second call does nothing."""
        ...


class WorkerHere:
    """A worker that runs in the caller's process."""

    def __init__(self, build: BuildStage) -> None:
        self._server = StageServer(build)
        self._answers = list[object]()

    def send(self, message: object) -> None:
        """Handle the message at once, and keep the answer for `take`."""
        self._answers.append(self._server.answer(message))

    def take(self) -> Any:
        """Return the answer to the last message."""
        return self._answers.pop()

    def close(self) -> None:
        """Do nothing, because this worker has no process of its own."""


class StageProcess:
    """A worker that runs in its own process."""

    def __init__(self, name: str, label: str, build: BuildStage) -> None:
        """Start a worker process for the engine `name`.

        Error messages call the worker `label`.

        :raises EngineUnavailable: the system cannot start the process.
        """
        self._name = name
        self._label = label
        self._pipe, theirs = Pipe()
        given = theirs.fileno()
        command = python_command("atts.accel.zoo.stage_workers", str(os.getpid()), str(given))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[given],
                process_group=0,
                env=worker_environment(),
            )
        except OSError as error:
            self._pipe.close()
            raise EngineUnavailable(
                self._name,
                f"the worker processes for the model's stages cannot be started ({error})",
            ) from error
        finally:
            theirs.close()
        # If the process has already ended, ignore the error. Missing answers will show it later.
        with suppress(*GONE):
            self._pipe.send(build)

    def send(self, message: object) -> None:
        """Send a message.

        :raises EngineUnavailable: the process has ended.
        """
        try:
            self._pipe.send_bytes(_bytes(message))
        except GONE as error:
            raise self._lost() from error

    def take(self) -> Any:
        """Wait for the answer to the message, and return it.

        :raises EngineUnavailable: the process has ended.
        """
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except GONE as error:
            raise self._lost() from error

    def _lost(self) -> EngineUnavailable:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        advice = (
            "A negative exit code means that a signal ended the process; -9 often means that "
            "memory ran out"
        )
        return EngineUnavailable(
            self._name, f"{self._label} ended with exit code {self._process.returncode}", advice
        )

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    @staticmethod
    def ready(processes: Sequence[Any], seconds: float | None) -> list[StageProcess]:
        """Wait until at least one of these workers has answered or ended, and return all workers
        that have.

        Wait at most `seconds` seconds, or without limit if it is None.
        """
        poll = select.poll()
        numbers = [process._pipe.fileno() for process in processes]
        for number in numbers:
            poll.register(number, select.POLLIN | select.POLLHUP)
        ready = {number for number, _ in poll.poll(None if seconds is None else 1000 * seconds)}
        return [
            process for process, number in zip(processes, numbers, strict=True) if number in ready
        ]


class StageActor(StageServer):
    """The part of a worker that runs in a Ray actor. Messages are sent as bytes, because arrays
    that Ray unpacks are read-only.
    """

    def answer_bytes(self, message: bytes) -> bytes:
        """Answer a message. Both the message and the answer are pickled."""
        return _bytes(self.answer(pickle.loads(message)))


class RayStage:
    """A worker that is a Ray actor, with as many cores and GPUs as the engine's own actor."""

    def __init__(self, name: str, label: str, build: BuildStage) -> None:
        """Start the actor, on another node of the Ray cluster if there is one.

        Error messages call the worker `label`.

        :raises UnsupportedByEngine: this process is not a Ray actor.
        """
        self._name = name
        self._label = label
        self._ray = _ray(name)
        given = self._ray.get_runtime_context().get_assigned_resources()
        limits = {
            "num_cpus": given.get("CPU", 0),
            "num_gpus": given.get("GPU", 0),
            "scheduling_strategy": "SPREAD",
        }
        actor: Any = self._ray.remote(StageActor).options(**limits, max_restarts=0)
        self._actor: Any = actor.remote(build)
        # Ray reference to the next answer that `take` returns; None if no answer is expected
        self._answer: Any = None

    def send(self, message: object) -> None:
        """Send a message."""
        self._answer = self._actor.answer_bytes.remote(_bytes(message))

    def take(self) -> Any:
        """Wait for the answer to the message, and return it.

        :raises EngineUnavailable: the actor has ended.
        """
        answer = self._answer
        self._answer = None
        try:
            return pickle.loads(self._ray.get(answer))
        except importlib.import_module("ray.exceptions").RayError as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise EngineUnavailable(
                self._name, f"an actor with {self._label} died ({reason})"
            ) from error

    def close(self) -> None:
        """End the actor. A second call does nothing."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)

    @staticmethod
    def ready(actors: Sequence[Any], seconds: float | None) -> list[RayStage]:
        """Wait until at least one actor has answered or ended, and return all actors that have.

        Actors without an unanswered message are left out. Wait at most `seconds` seconds, or
        without limit if it is None.
        """
        asked = {actor._answer: actor for actor in actors if actor._answer is not None}
        answered, _ = (
            _ray("").wait([*asked], num_returns=len(asked), timeout=0) if asked else ([], [])
        )
        if asked and not answered:
            answered, _ = _ray("").wait([*asked], timeout=seconds)
        return [asked[answer] for answer in answered]


def _ray(name: str) -> Any:
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        problem = "stages can be Ray actors only if their engine is a Ray actor too"
        advice = "Put ray: before the engine's address"
        raise UnsupportedByEngine(name, problem, advice)
    return ray


def _bytes(message: object) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


KINDS: dict[str, type[StageProcess | RayStage]] = {"process": StageProcess, "ray": RayStage}
"""Worker class for each value of the option `stage_worker`."""


Receive = Callable[[Any], object]
"""Function that receives the answer to a message, or the error if the worker has ended."""


class WorkerHandle:
    """A worker with a queue of messages. Each message is sent after the worker has answered the
    previous one.
    """

    def __init__(self, number: int, label: str, worker: Worker) -> None:
        self.number = number
        self.label = label
        self.worker = worker
        # `due` is the time at which the worker is expected to have answered all messages. `sent` is
        # the time at which the last message was sent.
        self.due = self.sent = 0.0
        self._queue = deque[tuple[object, Receive]]()
        # function that receives the next answer; None if no answer is expected
        self._heard: Receive | None = None
        self.error: EngineUnavailable | None = None
        # the slot table as the worker knows it: the entries that were sent to the worker so far
        self._table: SlotIds = np.zeros((0, 0), dtype=np.int32)

    @property
    def is_asked(self) -> bool:
        """Return whether the worker still has to answer the last message."""
        return self._heard is not None

    @property
    def wait(self) -> float:
        """Return the expected time in seconds until the worker has answered all messages."""
        return max(0.0, self.due - perf_counter()) if self.is_asked else 0.0

    def ask(self, message: object, receive: Receive, seconds: float = 0.0) -> None:
        """Send a message as soon as all earlier messages are answered. The answer is passed to
        `receive`.

        `seconds` is the time that the worker is expected to need.
        """
        if self.error is not None:
            receive(self.error)
            return
        self.due = perf_counter() + self.wait + seconds
        self._queue.append((message, receive))
        self.go()

    def go(self) -> None:
        """Send the next message if the worker has answered the last one."""
        while self._queue and self._heard is None:
            message, self._heard = self._queue.popleft()
            self.sent = perf_counter()
            try:
                self.worker.send(message)
            except EngineUnavailable as error:
                self._lose(error)
            else:
                if isinstance(self.worker, WorkerHere):
                    self.receive()

    def receive(self) -> None:
        """Receive the answer to the last message, and pass it to the message's callback.

        If the worker has ended instead, pass the error to all waiting callbacks.
        """
        try:
            answer = self.worker.take()
        except EngineUnavailable as error:
            self._lose(error)
        else:
            heard = self._heard
            self._heard = None
            assert heard is not None, "an answer must be pending"
            heard(answer)

    def at_once(self, message: object) -> Any:
        """Send a message before all messages in the queue, and return the worker's answer.

        :raises EngineUnavailable: the worker has ended.
        """
        if self._heard is not None:
            self.receive()
        try:
            if self.error is None:
                self.worker.send(message)
                return self.worker.take()
        except EngineUnavailable as error:
            self._lose(error)
        assert self.error is not None, "a worker without an error must answer"
        raise self.error

    def news(self, batch: StepBatch, table: SlotIds) -> News:
        """Return the slot-table entries of a step's sequences that were never sent to the worker,
        or have changed since they were sent.

        Later calls count them as sent.
        """
        if self._table.shape != table.shape:
            self._table = np.zeros_like(table)
        used = np.unique(batch.table_rows)
        longest = int(batch.context_lens.max())
        rows, columns = (table[used, :longest] != self._table[used, :longest]).nonzero()
        changes = used[rows], columns, table[used[rows], columns]
        self._table[changes[:2]] = changes[2]
        return changes

    def _lose(self, error: EngineUnavailable) -> None:
        # Delete the error's traceback, because its frames would keep the callback in memory.
        self.error = error.with_traceback(None)
        self.worker.close()
        waiting = [self._heard, *(receive for _, receive in self._queue)]
        self._heard = None
        self._queue.clear()
        for receive in waiting:
            if receive is not None:
                receive(error)


def main() -> None:
    """Answer messages until the engine's process closes the pipe.

    This is the main function of a worker process.
    """
    end_with(int(sys.argv[1]))
    pipe = Connection(int(sys.argv[2]))
    # A closed pipe means that the engine's process has ended, so this process ends too.
    with suppress(*GONE):
        server = StageServer(pipe.recv())
        while True:
            message = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_bytes(server.answer(message)))
            if isinstance(message, list):
                # The loaded models stay in memory, so exclude them from garbage collection.
                gc.freeze()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
