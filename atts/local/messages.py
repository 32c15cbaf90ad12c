"""The messages between an engine and its worker, across a thread or a process: commands, replies,
counters.
"""

from __future__ import annotations

import pickle
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from atts.core import Beginning, Ending, SampleRequest, ScoreRequest, TokenIds
from atts.engine import EngineCounters
from atts.errors import EngineError, EngineUnavailable, ModelLoadError, OutOfMemory
from atts.local.cores import SMALL_MODEL
from atts.local.model_config import ModelConfig
from atts.local.options import LocalOptions
from atts.speculation import Forecast, OverlapStats, Proposer

FailureKind = Literal["broken", "load", "memory", "closed"]
_ERRORS: dict[FailureKind, type[EngineError]] = {
    "load": ModelLoadError,
    "memory": OutOfMemory,
    "closed": EngineUnavailable,
}


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message: all that is needed to build one engine's step loop."""

    name: str
    folder: Path
    model: ModelConfig
    pieces: tuple[bytes, ...]  # the bytes of each token
    options: LocalOptions
    drafter: WorkerConfig | None = None  # the model that drafts for this one
    proposer: type[Proposer] | None = None  # of one's own: found by name in a process
    shares: bool = False  # whether other models of its zoo may be run in the same loop
    depth: int = 0  # layers of the deepest of these, where that is deeper
    # it was lent: what hinders it is told, and the model works without
    may_lack_drafter: bool = False
    sharers: int = 1  # loops of the same process that divide the cores, this one included

    @property
    def is_parallel(self) -> bool:
        """Whether its loop takes as many threads as there are cores for it."""
        return self.options.threads is None and self.matrix_weights >= SMALL_MODEL

    def threads(self, cores: int) -> int:
        """Return how many threads a step uses where a process may take so many cores."""
        if self.options.threads is not None:
            return self.options.threads
        return max(1, cores // self.sharers) if self.is_parallel else 1

    @property
    def matrix_weights(self) -> int:
        """Weights one token is multiplied with."""
        return self.model.matrix_weights

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers that all caches keep per token."""
        deepest = replace(self.model, num_layers=self.num_layers)
        drafted = self.drafter.kv_floats_per_token if self.drafter else 0
        return deepest.kv_floats_per_token + drafted

    @property
    def num_layers(self) -> int:
        """Layers that the cache is for."""
        return max(self.depth, self.model.num_layers)

    def without_drafter(self) -> WorkerConfig:
        """The same engine, proposing nothing."""
        options = replace(self.options, drafter="", speculate="off")
        return replace(self, options=options, drafter=None, may_lack_drafter=False)


@dataclass(frozen=True, slots=True)
class Submit:
    """Serve this request; request ids rise from one to the next."""

    request_id: int
    request: SampleRequest | ScoreRequest
    chain: int = 0  # which of the loop's models is asked


@dataclass(frozen=True, slots=True)
class AddChain:
    """One more model for a loop that runs several: its number follows the last one's."""

    config: WorkerConfig


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller no longer waits for this request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShareCores:
    """So many loops divide the cores from now on."""

    loops: int


@dataclass(frozen=True, slots=True)
class Close:
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
    begun: Beginning | None = None


@dataclass(frozen=True, slots=True)
class FailureReply:
    """A request could not be served; request id 0 means that none can be, from now on."""

    request_id: int
    kind: FailureKind
    problem: str
    advice: str = ""

    @classmethod
    def of(cls, error: EngineError) -> FailureReply:
        """An error while loading as a message; the caller's side raises it again under its own
        name.
        """
        problem = str(error).removeprefix(f"engine {error.engine}: ")
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return cls(0, kind, problem)
        return cls(0, "broken", problem)

    def error(self, engine: str) -> EngineError:
        """What the callers of an engine of this name get."""
        return _ERRORS.get(self.kind, EngineError)(engine, self.problem, self.advice)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The model is loaded: how many tokens the cache holds, what computes, and what about that its
    user should know.
    """

    kv_tokens: int
    kernel: str
    trouble: str = ""
    shares: bool = False  # whether the loop can run other models of the zoo beside


@dataclass(slots=True)
class SpeculationStats:
    """What was proposed and what of it stood, in all and by position."""

    rounds: int = 0  # proposals verified: one sequence in one step
    proposed: int = 0
    accepted: int = 0
    # rounds in which all tokens before this place stood
    tested_at: list[int] = field(default_factory=list[int])
    # of them, those in which the one at this place did as well
    stood_at: list[int] = field(default_factory=list[int])
    seconds: float = 0.0  # spent on proposing
    trouble: str = ""  # why nothing is proposed any more
    choices: int = 0  # of a length: sequences summed over steps
    chosen: int = 0  # summed lengths: divided by choices, the mean k
    # of steps of which something was expected; beside it what came of them
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    came_tokens: int = 0
    came_seconds: float = 0.0
    saved_seconds: float = 0.0  # in these and the like ones between, beside steps without proposals
    # of guesses continued beside the target, where there are any
    overlap: OverlapStats | None = None

    def compare(self, forecast: Forecast, came: tuple[int, float], sequences: int) -> None:
        """Tokens and seconds of one more step of so many sequences, as they were expected and as
        they came.
        """
        self.expected_tokens += forecast.tokens
        self.expected_seconds += forecast.seconds
        self.came_tokens += came[0]
        self.came_seconds += came[1]
        if forecast.plain:
            self.saved_seconds += forecast.steps * (forecast.plain * came[0] / sequences - came[1])

    def add(self, proposed: int, stood: int) -> None:
        """One more round."""
        self.rounds = self.rounds + 1
        self.proposed = self.proposed + proposed
        self.accepted = self.accepted + stood
        missing = max(0, proposed - len(self.tested_at))
        self.tested_at += [0] * missing
        self.stood_at += [0] * missing
        for place in range(min(stood + 1, proposed)):
            self.tested_at[place] += 1
            self.stood_at[place] += place < stood


@dataclass(slots=True)
class LoopStats(EngineCounters):
    """Counters of the step loop since it began; the loop adds to its own and hands out copies."""

    free_tokens: int = 0  # drawn or scored without a forward: from cached logits, or scored before
    step_sequences: int = 0  # summed over steps: divided by steps, the mean batch
    largest_batch: int = 0
    longest_queue_seconds: float = 0.0
    kv_used: int = 0  # slots taken now, cached sequences included
    kv_locked: int = 0  # of them, those a running sequence reads or writes
    kv_peak: int = 0
    preempted: int = 0
    evicted_tokens: int = 0
    shrunk: int = 0  # steps that did not fit into memory and made those after them smaller
    speculation: SpeculationStats | None = None  # None: there is none


Command = Submit | AddChain | Cancel | ShareCores | Close
Reply = SampleReply | ScoreReply | FailureReply


class Inbox(Protocol):
    """Where commands come from."""

    def take(self, *, wait: bool) -> list[Command]:
        """All commands so far; with `wait`, at least one."""
        ...


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What the loop has to say after a step."""

    replies: tuple[Reply, ...]
    stats: LoopStats | None  # None when the loop is gone


GONE = (EOFError, OSError, pickle.UnpicklingError)
"""What reading from a process or writing to it raises when it is gone."""


def first_answer(process: subprocess.Popen[bytes], config: object, name: str) -> Any:
    """What a process says once it has loaded what its configuration names.

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
    """One pickled value, flushed."""
    stream.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()
