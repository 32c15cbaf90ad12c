"""The options of a local engine, and the check that they are possible."""

from __future__ import annotations

from dataclasses import dataclass
from re import ASCII, fullmatch
from typing import Literal, get_args

from atts.errors import OptionError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Kernel = Literal["auto", "torch", "native"]
Graphs = Literal["auto", "off"]
WorkerKind = Literal["thread", "process"]
Beside = Literal["process", "inline"]
StageWorker = Literal["process", "ray"]
SPECULATE = ("auto", "draft", "suffix", "pearl", "ssd", "mirror", "off")
OVERLAPPED = ("pearl", "ssd", "mirror")
MOST_PROPOSED = 32
MOST_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a local engine runs; the defaults suit small models on a CPU."""

    device: Device = "auto"  # CUDA where there is one
    dtype: Dtype = "float32"
    # overlaps with other engines and a busy caller; a thread opens at once
    worker: WorkerKind = "process"
    # what rows that are scored are rounded to for products, which this processor must have
    scores: Dtype = "float32"
    kernel: Kernel = "auto"  # native where it can be built and fits the model, else torch
    # decoding steps are captured and replayed on a GPU, not launched one by one
    graphs: Graphs = "auto"
    # the cache's size; None: what 2 GiB hold on a CPU, most of what is free on a GPU
    kv_tokens: int | None = None
    max_batch: int = 256  # sequences in one step
    chunk_tokens: int = 512  # tokens in one step, decoding apart
    # most that one run of a block takes, where models of a zoo share them; None: all
    block_rows: int | None = None
    threads: int | None = None  # of one step; None leaves torch's setting
    # ranges of layers, each of the others with its keys and values in a worker of its own
    stages: int = 1
    # workers of each stage behind the first: one number for all, or "2,1"
    stage_replicas: str = "1"
    # steps on their way through the stages at once; None: as many as stages
    stage_steps: int | None = None
    stage_worker: StageWorker = "process"  # what such a worker is; behind "ray:", an actor
    # the folder or hub id of a smaller model with the same tokenizer, which proposes tokens
    drafter: str = ""
    speculate: str | None = None  # one of SPECULATE; None: auto where a drafter is named
    # where an overlapped drafter works: inline it does so while the target waits, the same way each time
    beside: Beside = "process"
    fuzzy: int = 1  # attentions of the drafter that read one input; 1: exact
    k: int | None = None  # tokens proposed at a time; None: chosen here, 0: none
    # cpu, cuda or cuda:1, where the drafter is computed; empty: where the target is
    drafter_device: str = ""

    def check(self) -> None:
        """See that every option is known and possible.

        :raises OptionError: one is not.
        """
        kinds = {
            "device": Device,
            "dtype": Dtype,
            "worker": WorkerKind,
            "kernel": Kernel,
            "graphs": Graphs,
        }
        kinds |= {"scores": Dtype, "beside": Beside, "stage_worker": StageWorker}
        for option, known in kinds.items():
            choice = getattr(self, option)
            if choice not in get_args(known):
                raise OptionError(str(choice), f"no such {option}", get_args(known))
        for option in (
            "kv_tokens",
            "max_batch",
            "chunk_tokens",
            "block_rows",
            "threads",
            "stages",
            "stage_steps",
        ):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise OptionError(option, f"is {value}, expected at least 1")
        is_native = self.dtype == "float32" and self.kernel != "torch" and self.stages == 1
        if self.scores != "float32" and not is_native:
            raise OptionError(
                "scores", "bfloat16 is for the native kernels in one process, in float32 otherwise"
            )
        if self.k is not None and not 0 <= self.k <= MOST_PROPOSED:
            raise OptionError("k", f"is {self.k}, expected 0 to {MOST_PROPOSED}, or auto")
        if self.speculate is not None and self.speculate not in SPECULATE:
            raise OptionError(
                "speculate", f"{self.speculate!r} is no way to speculate", SPECULATE, self.speculate
            )
        if not fullmatch(r"(cpu|cuda(:\d+)?)?", self.drafter_device, ASCII):
            raise OptionError(
                self.drafter_device, "no such drafter_device", ("cpu", "cuda", "cuda:1")
            )
        if self.drafter_device and not self.drafter:
            raise OptionError(
                "drafter_device",
                "needs a draft model: write drafter=embedded:draft, or another's name",
            )
        counts = self.replicas_of_stages
        if len(counts) != self.stages - 1 or not all(
            1 <= count <= MOST_REPLICAS for count in counts
        ):
            problem = f"{self.stage_replicas!r} is no number from 1 to {MOST_REPLICAS}, or one for each stage but the first"
            raise OptionError("stage_replicas", problem)
        if self.stages > 1 and self.speculate == "mirror":
            raise OptionError("stages", "are not heard between their layers (mirror)")
        if self.fuzzy < 1 or (
            self.fuzzy > 1 and (not self.drafter or self.speculate in OVERLAPPED)
        ):
            problem = f"is {self.fuzzy}: a number from 1 on, for a draft model that takes turns with the target"
            raise OptionError("fuzzy", problem)
        if self.speculate in ("draft", *OVERLAPPED) and not self.drafter:
            advice = "write drafter=embedded:draft, or another's name"
            raise OptionError("speculate", f"{self.speculate} needs a draft model: {advice}")

    @property
    def replicas_of_stages(self) -> list[int]:
        """How many workers hold each stage behind the first; 0 for what is no number."""
        said = [int(word) if word.isdecimal() else 0 for word in self.stage_replicas.split(",")]
        return said * (self.stages - 1) if len(said) == 1 else said

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed at all."""
        is_on = bool(self.drafter) if self.speculate is None else self.speculate != "off"
        return is_on and self.k != 0

    @property
    def takes_lent(self) -> bool:
        """Whether a draft model that is not named here may propose."""
        return not self.drafter and self.speculate in (None, "auto") and self.k != 0
