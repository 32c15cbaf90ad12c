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
from atts.local.options import LocalOptions
from atts.local.placement import Room
from atts.local.seams import SpeculationStats

SMALL_MODEL = 10_000_000
"""Weights below which a second thread costs more in waiting than it computes."""
FailureKind = Literal["broken", "load", "memory", "closed"]
_ERRORS: dict[FailureKind, type[EngineError]] = {
    "load": ModelLoadError,
    "memory": OutOfMemory,
    "closed": EngineUnavailable,
}


class LoopBuilder(Protocol):
    """Builds the loop of an engine that adds something to plain decoding.

    It travels to the process that runs the loop. Packages above this one implement it: nothing here
    knows any of them.
    """

    def build(
        self, config: WorkerConfig, send: Callable[[LoopReport], None]
    ) -> tuple[Loop, WorkerReady]:
        """Load the model and build its loop, in the thread or process that will run it.

        :raises EngineError: it cannot be loaded.
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
    sharers: int = 1  # loops of the same process that divide the cores, this one included
    parts: int = 1  # processes of this loop that compute at the same time
    room: Room | None = None  # memory that a run needs on a GPU; None: not known
    source: str = ""  # the folder or hub id that was named

    @property
    def is_parallel(self) -> bool:
        """Return whether the loop takes as many threads as there are cores for it."""
        return self.options.threads is None and self.model.matrix_weights >= SMALL_MODEL

    def threads(self, cores: int) -> int:
        """Return how many threads a step uses where a process may take so many cores."""
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
    """Serve this request; request ids rise from one to the next."""

    request_id: int
    request: SampleRequest | ScoreRequest
    model: int = 0  # index of the model in a loop with several models


@dataclass(frozen=True, slots=True)
class Cancel(Command):
    """The caller no longer waits for this request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShareCores(Command):
    """So many loops divide the cores from now on."""

    loops: int


@dataclass(frozen=True, slots=True)
class Close(Command):
    """End the loop; unfinished requests are dropped."""


@dataclass(frozen=True, slots=True)
class SampleReply:
    """A request was continued."""

    request_id: int
    ids: TokenIds
    ended: Ending
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """A request was scored."""

    request_id: int
    logprobs: tuple[float, ...]
    cached_tokens: int
    beginning: Beginning | None = None


@dataclass(frozen=True, slots=True)
class FailureReply:
    """A request could not be served; request id 0 means that none can be, from now on."""

    request_id: int
    kind: FailureKind
    problem: str
    advice: str = ""

    @classmethod
    def of(cls, error: EngineError) -> FailureReply:
        """Turn an error while loading into a message, which the caller's side raises again."""
        problem = str(error).removeprefix(f"engine {error.engine}: ")
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return cls(0, kind, problem)
        return cls(0, "broken", problem)

    def error(self, engine: str) -> EngineError:
        """Return the error that the callers of an engine of this name get."""
        return _ERRORS.get(self.kind, EngineError)(engine, self.problem, self.advice)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The model is loaded: how many tokens the cache holds, what computes, and what about that its
    user should know.
    """

    kv_tokens: int
    kernel: str
    trouble: str = ""
    takes_models: bool = False  # whether the loop can run further models
    dtype: str = "float32"  # that it computes in


@dataclass(slots=True)
class LoopStats(EngineCounters):
    """Counters of the step loop since it began; the loop adds to its own and hands out copies."""

    free_tokens: int = 0  # drawn or scored without a forward: from cached logits, or scored before
    step_sequences: int = 0  # summed over steps: divided by steps, the mean batch
    largest_batch: int = 0
    longest_queue_seconds: float = 0.0
    kv_used: int = 0  # slots taken now, cached sequences included
    kv_locked: int = 0  # number of them that a running sequence reads or writes
    kv_peak: int = 0
    preempted: int = 0
    evicted_tokens: int = 0
    shrunk: int = 0  # steps that did not fit into memory and made those after them smaller
    speculation: SpeculationStats | None = None  # None: there is none


Reply = SampleReply | ScoreReply | FailureReply


class Inbox(Protocol):
    """Source of a loop's commands."""

    def take(self, *, wait: bool) -> list[Command]:
        """Return all commands so far; with `wait`, at least one."""
        ...


@dataclass(frozen=True, slots=True)
class LoopReport:
    """A loop's report after a step."""

    replies: tuple[Reply, ...]
    stats: LoopStats | None  # None when the loop is gone


class Loop(Protocol):
    """A loop that a worker runs."""

    def run(self, inbox: Inbox) -> None:
        """Serve commands until asked to close."""
        ...

    def fail_all(self, failure: FailureReply) -> None:
        """Tell every caller that nothing more will come."""
        ...


GONE = (EOFError, OSError, pickle.UnpicklingError)
"""What reading from a process or writing to it raises when it is gone."""


def first_answer(process: subprocess.Popen[bytes], config: object, name: str) -> Any:
    """Return the first answer of a process, once it has loaded what its configuration names.

    :raises EngineError: it could not be loaded.
    :raises EOFError: the process is gone, as it is where another of `GONE` is raised.
    """
    assert process.stdin is not None, "asked for a pipe"
    assert process.stdout is not None, "asked for a pipe"
    write(process.stdin, config)
    answer = pickle.load(process.stdout)
    if isinstance(answer, FailureReply):
        raise answer.error(name)
    return answer


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close what a process that is gone, or soon will be, was written to and read from."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # closing writes what is left
                stream.close()


def write(stream: IO[bytes], value: object) -> None:
    """Write one pickled value, and flush."""
    stream.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()
