"""The options of a local engine's accelerators, and the plan of the loop that is built from these
options.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from re import ASCII, fullmatch
from typing import Any, Literal, NamedTuple, get_args

from atts.errors import OptionError
from atts.local.messages import WorkerConfig
from atts.local.options import LocalOptions
from atts.local.seams import Proposer

Beside = Literal["process", "inline"]
StageWorker = Literal["process", "ray"]
SPECULATE = ("auto", "draft", "suffix", "pearl", "ssd", "mirror", "off")
OVERLAPPED = ("pearl", "ssd", "mirror")
MOST_PROPOSED = 32
MOST_REPLICAS = 64
_A_DRAFTER = "needs a draft model; add drafter=MODEL, such as drafter=embedded:draft"
_BELONGS = {
    "auto": ("drafter", "k", "fuzzy", "drafter_device", "beside"),
    "draft": ("drafter", "k", "fuzzy", "drafter_device"),
    "suffix": ("k",),
    **dict.fromkeys(OVERLAPPED, ("drafter", "k", "drafter_device", "beside")),
    "off": ("drafter", "k", "drafter_device"),
}
"""For each value of `speculate`: the names of the other options that may be set together with it.
"""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Options of speculation: how tokens for the target are proposed, and how many at a time."""

    # folder or Hugging Face id of the draft model: a smaller model with the target's tokenizer,
    # which proposes tokens to the target
    drafter: str = ""
    # method of proposing tokens, one of SPECULATE. None means `auto` if the engine has a draft
    # model, named here or lent by the run, and `off` otherwise.
    speculate: str | None = None
    # where the draft model runs if it drafts during the target's steps: "process" starts a process
    # for it; "inline" uses the target's process, so the target waits for the drafts
    beside: Beside = "process"
    # number of consecutive layers of the draft model whose attention reads the same input, as an
    # approximation; with 1, nothing is approximated
    fuzzy: int = 1
    # number of tokens to propose per sequence in each step; None lets atts find the fastest number,
    # and 0 proposes none
    k: int | None = None
    # device of the draft model, such as cpu, cuda or cuda:1; empty means the target's device
    drafter_device: str = ""

    def check(self) -> None:
        """Check that every option has a known value and applies to the chosen value of `speculate`.

        :raises OptionError: an option has an unknown value, or applies only to other values of
            `speculate`.
        """
        if self.speculate is not None and self.speculate not in SPECULATE:
            problem = f"{self.speculate!r} is not a valid value"
            raise OptionError("speculate", problem, SPECULATE, self.speculate)
        if self.beside not in get_args(Beside):
            raise OptionError(str(self.beside), "is not a valid value for beside", get_args(Beside))
        if self.k is not None and not 0 <= self.k <= MOST_PROPOSED:
            raise OptionError(
                "k", f"{self.k} is out of range; give a value from 0 to {MOST_PROPOSED}, or auto"
            )
        if self.fuzzy < 1:
            raise OptionError("fuzzy", f"{self.fuzzy} is too small; give a value of at least 1")
        if not fullmatch(r"(cpu|cuda(:\d+)?)?", self.drafter_device, ASCII):
            known = ("cpu", "cuda", "cuda:1")
            raise OptionError(self.drafter_device, "is not a valid value for drafter_device", known)
        for option in fields(self):
            is_given = getattr(self, option.name) != option.default
            if not is_given or option.name in ("speculate", *_BELONGS[self.way]):
                continue
            ways = ", ".join(way for way in SPECULATE if option.name in _BELONGS[way])
            problem = f"does not apply to speculate={self.way}, only to {ways}"
            raise OptionError(option.name, problem)
        if self.drafter:
            return
        if self.speculate in ("draft", *OVERLAPPED):
            raise OptionError("speculate", f"{self.speculate} {_A_DRAFTER}")
        for name in ("drafter_device", "fuzzy"):
            if getattr(self, name) not in ("", 1):
                raise OptionError(name, _A_DRAFTER)

    @property
    def way(self) -> str:
        """Return the value of `speculate`, or "auto" if it is None."""
        return self.speculate or "auto"

    @property
    def is_overlapped(self) -> bool:
        """Return whether the drafter works while the target computes."""
        return self.speculate in OVERLAPPED

    @property
    def is_on(self) -> bool:
        """Return whether the engine proposes any tokens."""
        is_on = bool(self.drafter) if self.speculate is None else self.speculate != "off"
        return is_on and self.k != 0

    @property
    def takes_lent(self) -> bool:
        """Return whether the engine may use the run's draft model to propose tokens. It may if
        these options name no draft model and do not exclude one.
        """
        return not self.drafter and self.speculate in (None, "auto") and self.k != 0

    @property
    def is_open(self) -> bool:
        """Return whether these options let the engine choose from measurements how to use the
        drafter.
        """
        return self.speculate in (None, "auto") and self.k is None and self.fuzzy == 1


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Options that divide the layers of a model, or the blocks of several models, among workers."""

    # number of stages. A stage is a range of the model's layers. Each stage after the first runs in
    # a worker, which also stores the keys and values of these layers.
    stages: int = 1
    # number of workers for each stage after the first: one number for all these stages, or a list
    # such as "2,1" with a number for each
    stage_replicas: str = "1"
    # number of decoding steps that may be in progress at the same time; None means as many steps as
    # stages
    stage_steps: int | None = None
    # what a worker of a stage is: "process" is an operating-system process, "ray" is a Ray actor;
    # only an engine whose name begins with "ray:" uses actors
    stage_worker: StageWorker = "process"
    # Largest number of rows (tokens of a step) that a block shared by several models computes at a
    # time. None means no limit.
    block_rows: int | None = None

    def check(self) -> None:
        """Check the value of every option.

        :raises OptionError: an option has an unknown or impossible value.
        """
        if self.stage_worker not in get_args(StageWorker):
            raise OptionError(
                str(self.stage_worker),
                "is not a valid value for stage_worker",
                get_args(StageWorker),
            )
        for name in ("stages", "stage_steps", "block_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"{value} is too small; give a value of at least 1")
        counts = self.replicas
        is_known = all(1 <= count <= MOST_REPLICAS for count in counts)
        if len(counts) != self.stages - 1 or not is_known:
            problem = (
                f"{self.stage_replicas!r} is not valid; give one number from 1 to "
                f"{MOST_REPLICAS}, or one such number for each stage after the first"
            )
            raise OptionError("stage_replicas", problem)

    def check_beside(self, options: LocalOptions, speculation: SpeculationOptions) -> None:
        """Check that these engine options and speculation options can be combined with stages.

        :raises OptionError: one of these options cannot be combined with stages.
        """
        if self.stages > 1 and speculation.speculate == "mirror":
            raise OptionError(
                "stages",
                "cannot be combined with speculate=mirror, because a target in several "
                "stages has no early exit",
            )
        if self.stages > 1 and options.scores != "float32":
            raise OptionError(
                "scores",
                "bfloat16 scores work only with a float32 model that runs in one process with "
                "the native kernels",
            )

    @property
    def replicas(self) -> list[int]:
        """Return the number of workers of each stage after the first.

        If an entry of the option `stage_replicas` is not a number, its result is 0.
        """
        counts = [int(word) if word.isdecimal() else 0 for word in self.stage_replicas.split(",")]
        return counts * (self.stages - 1) if len(counts) == 1 else counts


class EngineOptions(NamedTuple):
    """All options of an engine, under the names of the arguments of `atts.accel.accelerated`."""

    options: LocalOptions
    speculation: SpeculationOptions
    stages: StageOptions


def options_of(**settings: Any) -> EngineOptions:
    """Return all options of an engine: these settings, and the default values of all other options.

    :raises OptionError: a setting has an unknown name.

    >>> options_of(threads=1, speculate="suffix").speculation.speculate
    'suffix'
    """
    kinds = LocalOptions, SpeculationOptions, StageOptions
    homes = {field.name: kind for kind in kinds for field in fields(kind)}
    given: dict[type[Any], dict[str, Any]] = {kind: {} for kind in kinds}
    for name, value in settings.items():
        if name not in homes:
            raise OptionError(
                "engine", f"{name!r} is not a setting of a local engine", [*homes], name
            )
        given[homes[name]][name] = value
    return EngineOptions(
        LocalOptions(**given[LocalOptions]),
        SpeculationOptions(**given[SpeculationOptions]),
        StageOptions(**given[StageOptions]),
    )


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Plan of a decoding loop, which does not include the target. It says how tokens are proposed,
    and how layers and models are divided among workers.
    """

    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    stages: StageOptions = field(default_factory=StageOptions)
    # configuration of the draft model, which proposes tokens to the target
    drafter: WorkerConfig | None = None
    # True if the drafter is lent: the run has this draft model, but the options do not name it. If
    # it cannot be used, the engine reports this and works without it.
    may_lack_drafter: bool = False
    # a proposer class that the user wrote; the loop's process imports the class by its name
    proposer: type[Proposer] | None = None
    is_shared: bool = False  # whether other models of the target's zoo may run in the same loop
    depth: int = 0  # number of layers of the deepest model that may join the same loop

    @property
    def speculates(self) -> bool:
        """Return whether the loop proposes tokens."""
        is_asked = self.proposer is not None and self.speculation.k != 0
        return is_asked or self.speculation.is_on

    @property
    def is_plain(self) -> bool:
        """Return whether the loop uses no accelerator."""
        return not self.speculates and self.stages.stages == 1 and not self.is_shared

    @property
    def num_parts(self) -> int:
        """Return how many processes of the loop compute at the same time on this machine and share
        its cores.
        """
        if self.stages.stages > 1 and self.stages.stage_worker == "process":
            return 1 + sum(self.stages.replicas)
        speculation = self.speculation
        is_apart = speculation.is_overlapped and speculation.beside == "process"
        is_parallel = self.drafter is not None and self.drafter.is_parallel
        return 2 if is_apart and is_parallel else 1

    def without_drafter(self) -> LoopPlan:
        """Return the same plan without a drafter and without speculation."""
        speculation = replace(self.speculation, drafter="", speculate="off", beside="process")
        return replace(self, speculation=speculation, drafter=None, may_lack_drafter=False)
