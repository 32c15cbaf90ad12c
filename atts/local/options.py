"""The options of a local engine, and the check that they are possible."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from atts.errors import OptionError

Dtype = Literal["auto", "float32", "bfloat16"]
Scores = Literal["float32", "bfloat16"]
Kernel = Literal["auto", "torch", "native"]
Graphs = Literal["auto", "off"]
WorkerKind = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a local engine; the defaults suit small models on a CPU."""

    # auto: a GPU if there is one; if there are two, each model of a pair has its own
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # auto: bfloat16 on a GPU if the checkpoint is bfloat16, else float32
    dtype: Dtype = "auto"
    # a process computes in parallel with other engines and a busy caller; a thread starts at once
    worker: WorkerKind = "process"
    # format to which scored rows are rounded before products; the processor must support it
    scores: Scores = "float32"
    kernel: Kernel = "auto"  # native if it can be built and fits the model, else torch
    # decoding steps on a GPU are captured and replayed, instead of launching their operations one
    # by one
    graphs: Graphs = "auto"
    # size of the cache in tokens; None: what 2 GiB hold on a CPU, or what the run's rollouts can
    # fill on a GPU
    kv_tokens: int | None = None
    max_batch: int = 256  # sequences in one step
    chunk_tokens: int = 512  # most given tokens fed in one step; decoding tokens do not count
    # number of threads of a step; None: the cores that other engines leave
    threads: int | None = None

    def check(self) -> None:
        """Check that every option is known and possible.

        :raises OptionError: one is not.
        """
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            known = ["auto", "cpu", "cuda", "cuda:0", "cuda:1"]
            raise OptionError(self.device, "no such device", known)
        check_choices(
            self,
            dtype=Dtype,
            worker=WorkerKind,
            scores=Scores,
            kernel=Kernel,
            graphs=Graphs,
        )
        check_positive(self, "kv_tokens", "max_batch", "chunk_tokens", "threads")
        is_native = self.dtype != "bfloat16" and self.kernel != "torch"
        if self.scores != "float32" and not is_native:
            raise OptionError(
                "scores", "bfloat16 is for the native kernels in one process, in float32 otherwise"
            )


def check_choices(options: object, **kinds: object) -> None:
    """Check that each of these options is one of the values of its type.

    :raises OptionError: one is not.
    """
    for option, kind in kinds.items():
        choice = getattr(options, option)
        if choice not in get_args(kind):
            raise OptionError(str(choice), f"no such {option}", get_args(kind))


def check_positive(options: object, *names: str) -> None:
    """Check that these options are positive if they are given.

    :raises OptionError: one is not.
    """
    for option in names:
        value = getattr(options, option)
        if value is not None and value < 1:
            raise OptionError(option, f"is {value}, expected at least 1")
