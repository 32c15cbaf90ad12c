"""The messages between an engine and its worker: commands, replies and counters."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from atts.core import Beginning, Ending, SampleRequest, ScoreRequest, TokenIds
from atts.engine import EngineCounters
from atts.errors import EngineError, EngineUnavailable, ModelLoadError, OutOfMemory
from atts.local.model_config import ModelConfig
from atts.local.options import LocalOptions, Room
from atts.local.seams import SpeculationStats

SMALL_MODEL = 10_000_000
"""Number of weights below which a second thread costs more time by waiting than it saves by
computing.
"""
FailureKind = Literal["broken", "load", "memory", "closed"]
_ERRORS: dict[FailureKind, type[EngineError]] = {
    "load": ModelLoadError,
    "memory": OutOfMemory,
    "closed": EngineUnavailable,
}


class LoopBuilder(Protocol):
    """A builder of the loop of an engine that adds something to plain decoding.

    The builder is sent to the process that runs the loop. Packages that build on this one implement
    it, so that this module need not import them.
    """

    def build(
        self, config: WorkerConfig, send: Callable[[LoopReport], None]
    ) -> tuple[Loop, WorkerReady]:
        """Load the model and build its loop, in the thread or process that will run it.

        :raises EngineError: the model cannot be loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message: all that is needed to build one engine's step loop."""

    name: str
    folder: Path
    model: ModelConfig
    pieces: tuple[bytes, ...]  # the bytes of each token
    options: LocalOptions
    builder: LoopBuilder | None = None  # None: plain decoding
    more_kv_floats: int = 0  # numbers that caches besides the model's own keep per token
    sharers: int = 1  # number of loops in the same process that share the cores, including this one
    parts: int = 1  # number of processes of this loop that compute at the same time
    room: Room | None = None  # the needs of the run on a GPU; None if they are not known
    source: str = ""  # the folder or hub id that was named

    @property
    def is_parallel(self) -> bool:
        """Return whether the loop uses as many threads as it has cores."""
        return self.options.threads is None and self.model.matrix_weights >= SMALL_MODEL

    def threads(self, cores: int) -> int:
        """Return how many threads a step uses if the process may use this number of cores."""
        if self.options.threads is not None:
            return self.options.threads
        return max(1, cores // (self.sharers * self.parts)) if self.is_parallel else 1

    @property
    def kv_floats_per_token(self) -> int:
        """Return how many numbers all caches together keep per token."""
        return self.model.kv_floats_per_token + self.more_kv_floats


class Command:
    """A message to a loop."""


@dataclass(frozen=True, slots=True)
class Submit(Command):
    """A request to be served; request ids increase from one request to the next."""

    request_id: int
    request: SampleRequest | ScoreRequest
    model: int = 0  # index of the model in a loop with several models


@dataclass(frozen=True, slots=True)
class Cancel(Command):
    """A message that the caller no longer waits for a request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShareCores(Command):
    """A message about the loops that share the cores from now on."""

    open_loops: int
    busy_loops: int  # loops with requests


@dataclass(frozen=True, slots=True)
class Close(Command):
    """A message that ends the loop; unfinished requests are dropped."""


@dataclass(frozen=True, slots=True)
class SampleReply:
    """The result of a sampling request."""

    request_id: int
    ids: TokenIds
    ended: Ending
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """The result of a scoring request."""

    request_id: int
    logprobs: tuple[float, ...]
    cached_tokens: int
    beginning: Beginning | None = None


@dataclass(frozen=True, slots=True)
class FailureReply:
    """An error of a request; with request id 0, no request can be served from now on."""

    request_id: int
    kind: FailureKind
    problem: str
    advice: str = ""

    @classmethod
    def of(cls, error: EngineError) -> FailureReply:
        """Turn an error during loading into a message; the caller's side raises the error again."""
        problem = str(error).removeprefix(f"engine {error.engine}: ")
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return cls(0, kind, problem)
        return cls(0, "broken", problem)

    def error(self, engine: str) -> EngineError:
        """Return the error to raise in the callers of an engine with this name."""
        return _ERRORS.get(self.kind, EngineError)(engine, self.problem, self.advice)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A message that the model is loaded. It reports the cache's size in tokens, the kernel, and
    notes on the kernel for the user.
    """

    kv_tokens: int
    kernel: str
    trouble: str = ""
    takes_models: bool = False  # whether the loop can run further models
    dtype: str = "float32"  # the number type that the model computes in


@dataclass(slots=True)
class LoopStats(EngineCounters):
    """The counters of the step loop since it began. The loop adds to its own object and hands out
    copies.
    """

    # tokens drawn or scored without a forward pass, because their logits or scores were cached
    free_tokens: int = 0
    step_sequences: int = 0  # sequences summed over steps; divided by steps, it is the mean batch
    largest_batch: int = 0
    longest_queue_seconds: float = 0.0
    kv_used: int = 0  # slots in use now, including those of cached sequences
    kv_locked: int = 0  # number of these slots that a running sequence reads or writes
    kv_peak: int = 0
    preempted: int = 0
    evicted_tokens: int = 0
    # number of steps that did not fit into memory, after which steps became smaller
    shrunk: int = 0
    speculation: SpeculationStats | None = None  # None without speculation


Reply = SampleReply | ScoreReply | FailureReply


class Inbox(Protocol):
    """The source of a loop's commands."""

    def take(self, *, wait: bool) -> list[Command]:
        """Return all commands received so far; with `wait`, wait for at least one."""
        ...


@dataclass(frozen=True, slots=True)
class LoopReport:
    """A loop's report after a step."""

    replies: tuple[Reply, ...]
    stats: LoopStats | None  # None if the loop has ended


class Loop(Protocol):
    """A loop that a worker runs."""

    def run(self, inbox: Inbox) -> None:
        """Serve commands until a command asks the loop to close."""
        ...

    def fail_all(self, failure: FailureReply) -> None:
        """Send every caller a failure: no further request will be served."""
        ...


GONE = (EOFError, OSError, pickle.UnpicklingError)
"""The errors that reading from a process or writing to it raises if the process has ended."""


def first_answer(process: subprocess.Popen[bytes], config: object, name: str) -> Any:
    """Return the first answer of a process, which it sends when it has loaded its model.

    :raises EngineError: the process could not load the model.
    :raises EOFError: the process has ended; other errors of `GONE` mean the same.
    """
    assert process.stdin is not None, "the process must have pipes"
    assert process.stdout is not None, "the process must have pipes"
    write(process.stdin, config)
    answer = pickle.load(process.stdout)
    if isinstance(answer, FailureReply):
        raise answer.error(name)
    return answer


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes of a process that has ended or will end soon."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            # closing a pipe writes its buffer, which fails if the process has ended
            with suppress(OSError):
                stream.close()


def write(stream: IO[bytes], value: object) -> None:
    """Write one pickled value, and flush."""
    stream.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()
