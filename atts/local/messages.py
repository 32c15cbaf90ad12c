"""What the caller's side and the step loop tell each other, across a thread or a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atts.core import Ending, SampleRequest, ScoreRequest, TokenIds
from atts.engine import EngineCounters
from atts.local.shape import Shape

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Kernel = Literal["auto", "torch", "native"]
FailureKind = Literal["broken", "load", "memory", "closed"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The first message: all that is needed to build one engine's loop."""

    name: str
    folder: Path
    shape: Shape
    pieces: tuple[bytes, ...]
    device: Device
    dtype: Dtype
    kernel: Kernel
    kv_tokens: int | None
    max_batch: int
    chunk_tokens: int
    threads: int | None


@dataclass(frozen=True, slots=True)
class Submit:
    """Do this request; the ticket names it and rises from one to the next."""

    ticket: int
    request: SampleRequest | ScoreRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this ticket any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the loop; unfinished requests are dropped."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request was continued."""

    ticket: int
    ids: TokenIds
    ended: Ending
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A request was scored."""

    ticket: int
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be done; ticket 0 means that none can be, from now on."""

    ticket: int
    kind: FailureKind
    problem: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """The model is loaded: how many tokens the cache holds, and what computes."""

    kv_tokens: int
    kernel: str


@dataclass(slots=True)
class LoopStats(EngineCounters):
    """Counters of the step loop since it began; the loop adds to its own and hands out copies."""

    free_tokens: int = 0  # first tokens drawn or scored from remembered logits, without a forward
    step_sequences: int = 0  # summed over steps: divided by steps, the mean batch
    largest_batch: int = 0
    longest_queue_seconds: float = 0.0
    kv_used: int = 0  # slots taken now, cached sequences included
    kv_locked: int = 0  # of them, those a running sequence reads or writes
    kv_peak: int = 0
    preempted: int = 0
    evicted_tokens: int = 0
    shrunk: int = 0  # steps that did not fit into memory and made those after them smaller


Order = Submit | Cancel | Close
Reply = Sampled | Scored | Failed


@dataclass(frozen=True, slots=True)
class Report:
    """What the loop has to say after a step."""

    replies: tuple[Reply, ...]
    stats: LoopStats | None  # None when the loop is gone
