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
"""Models with fewer matrix weights than this compute with one thread. Several threads would spend
more time waiting for each other than they save.
"""
FailureKind = Literal["broken", "load", "memory", "closed"]
_ERRORS: dict[FailureKind, type[EngineError]] = {
    "load": ModelLoadError,
    "memory": OutOfMemory,
    "closed": EngineUnavailable,
}


class LoopBuilder(Protocol):
    """A builder of step loops that do more than plain decoding.

    Other packages, such as `atts.accel`, implement builders. The builder is sent to the process
    that runs the loop.
    """

    def build(
        self, config: WorkerConfig, send: Callable[[LoopReport], None]
    ) -> tuple[Loop, WorkerReady]:
        """Load the model and build its loop, in the thread or process that will run the loop.

        :raises EngineError: the model cannot be loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker, with all data needed to build an engine's step loop."""

    name: str
    folder: Path
    model: ModelConfig
    pieces: tuple[bytes, ...]  # bytes of each token, indexed by token id
    options: LocalOptions
    # builds a loop that does more than plain decoding; None for plain decoding
    builder: LoopBuilder | None = None
    # number of floats that additional caches store per token, such as the KV cache of a draft
    more_kv_floats: int = 0
    sharers: int = 1  # number of loops in the same process that share the cores, including this one
    parts: int = 1  # number of processes that compute parts of this loop's model in parallel
    # the run's requirements on the KV cache of a GPU; None if they are not known
    room: Room | None = None
    source: str = ""  # the folder or hub id of the model, as the user gave it

    @property
    def is_parallel(self) -> bool:
        """Return whether the loop uses one thread per core of its share, rather than a fixed number
        of threads.
        """
        return self.options.threads is None and self.model.matrix_weights >= SMALL_MODEL

    def threads(self, cores: int) -> int:
        """Return how many threads a step uses if this process may use `cores` cores."""
        if self.options.threads is not None:
            return self.options.threads
        return max(1, cores // (self.sharers * self.parts)) if self.is_parallel else 1

    @property
    def kv_floats_per_token(self) -> int:
        """Return how many floats all caches together store per token."""
        return self.model.kv_floats_per_token + self.more_kv_floats


class Command:
    """The base class of all messages to a loop."""


@dataclass(frozen=True, slots=True)
class Submit(Command):
    """A message with a new request, whose id is larger than the ids of earlier requests."""

    request_id: int
    request: SampleRequest | ScoreRequest
    model: int = 0  # index of the model that serves the request, if the loop has several models


@dataclass(frozen=True, slots=True)
class Cancel(Command):
    """A message that cancels a request, because its caller no longer waits."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShareCores(Command):
    """A message with the number of loops that share the cores from now on."""

    open_loops: int
    busy_loops: int  # number of open loops that have requests


@dataclass(frozen=True, slots=True)
class Close(Command):
    """A message that ends the loop. Unfinished requests are dropped."""


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
    """A message that a request failed. Request id 0 means that all requests fail from now on."""

    request_id: int
    kind: FailureKind
    problem: str
    advice: str = ""

    @classmethod
    def of(cls, error: EngineError) -> FailureReply:
        """Convert an error during loading into a message, so that the caller's process can raise it
        again.
        """
        problem = str(error).removeprefix(f"engine {error.engine}: ")
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return cls(0, kind, problem)
        return cls(0, "broken", problem)

    def error(self, engine: str) -> EngineError:
        """Convert the message into the error that the engine's callers must raise."""
        return _ERRORS.get(self.kind, EngineError)(engine, self.problem, self.advice)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A message that the model is loaded. It gives the cache's size in tokens, the kernel that
    computes, and a note to the user about the kernel.
    """

    kv_tokens: int
    kernel: str
    trouble: str = ""
    # whether this loop can also serve requests to the models of other engines
    takes_models: bool = False
    dtype: str = "float32"  # dtype in which the model computes


@dataclass(slots=True)
class LoopStats(EngineCounters):
    """Counters of a step loop since its start. The loop changes its own object and reports copies
    of it.
    """

    # number of tokens drawn or scored without a forward pass, from cached logits or from cached
    # scores
    free_tokens: int = 0
    # number of sequences in each step, summed over all steps; divided by `steps`, it is the mean
    # batch size
    step_sequences: int = 0
    largest_batch: int = 0
    longest_queue_seconds: float = 0.0
    # number of cache slots in use now, including those of ended sequences that the prefix tree
    # keeps
    kv_used: int = 0
    kv_locked: int = 0  # number of cache slots that running sequences read or write now
    kv_peak: int = 0
    preempted: int = 0
    evicted_tokens: int = 0
    # number of times that a step ran out of memory, so that later steps were made smaller
    shrunk: int = 0
    # counters of proposed and accepted tokens; None without speculation
    speculation: SpeculationStats | None = None


Reply = SampleReply | ScoreReply | FailureReply


class Inbox(Protocol):
    """A queue from which a loop takes its commands."""

    def take(self, *, wait: bool) -> list[Command]:
        """Return all commands that have arrived. If `wait` is true, first wait for at least one
        command.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoopReport:
    """A loop's report to its engine: replies to requests, and the loop's counters."""

    replies: tuple[Reply, ...]
    stats: LoopStats | None  # counters of the loop; None if the loop has ended


class Loop(Protocol):
    """A loop that serves requests; a worker runs it."""

    def run(self, inbox: Inbox) -> None:
        """Serve requests until a command closes the loop."""
        ...

    def fail_all(self, failure: FailureReply) -> None:
        """Send a failure to all callers; afterwards, the loop serves no more requests."""
        ...


GONE = (EOFError, OSError, pickle.UnpicklingError)
"""Errors that are raised on reading from or writing to a process that has ended."""


def first_answer(process: subprocess.Popen[bytes], config: object, name: str) -> Any:
    """Send a process its configuration, wait until it has loaded the model, and return its first
    answer.

    :raises EngineError: the process could not load the model.
    :raises EOFError: the process has ended; the other errors in `GONE` also mean this.
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
            # Closing a pipe first writes the rest of its buffer, which fails if the process has
            # ended.
            with suppress(OSError):
                stream.close()


def write(stream: IO[bytes], value: object) -> None:
    """Write one pickled value to a stream, and flush the stream."""
    stream.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()
