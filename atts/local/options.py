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

    # auto: a GPU where there is one, and each model of a pair its own where there are two
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # auto: bfloat16 on a GPU for checkpoints that are bfloat16, else float32
    dtype: Dtype = "auto"
    # a process overlaps with other engines and a busy caller; a thread opens at once
    worker: WorkerKind = "process"
    # format that scored rows are rounded to for products; the processor must support it
    scores: Scores = "float32"
    kernel: Kernel = "auto"  # native where it can be built and fits the model, else torch
    # decoding steps are captured and replayed on a GPU, not launched one by one
    graphs: Graphs = "auto"
    # the cache's size; None: what 2 GiB hold on a CPU, on a GPU what the run's rollouts can fill
    kv_tokens: int | None = None
    max_batch: int = 256  # sequences in one step
    chunk_tokens: int = 512  # tokens in one step, decoding apart
    threads: int | None = None  # threads of one step; None: those that other engines leave

    def check(self) -> None:
        """See that every option is known and possible.

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
    """See that each of these options is one of the words of its type.

    :raises OptionError: one is not.
    """
    for option, kind in kinds.items():
        choice = getattr(options, option)
        if choice not in get_args(kind):
            raise OptionError(str(choice), f"no such {option}", get_args(kind))


def check_positive(options: object, *names: str) -> None:
    """See that these options are positive where they are given.

    :raises OptionError: one is not.
    """
    for option in names:
        value = getattr(options, option)
        if value is not None and value < 1:
            raise OptionError(option, f"is {value}, expected at least 1")
