"""Local engines with accelerators: proposers of tokens, zoos of models with shared blocks, and
stages of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from atts.accel.options import LoopPlan, SpeculationOptions, StageOptions
from atts.accel.zoo.shared_worker import SharedWorker
from atts.concurrency import import_lock
from atts.errors import EngineError, OptionError
from atts.local.engine import Accelerator, LocalEngine, RunDemand
from atts.local.messages import Loop, LoopBuilder, LoopReport, WorkerConfig, WorkerReady
from atts.local.model_config import read_model_config
from atts.local.options import LocalOptions
from atts.local.seams import Proposer
from atts.local.worker import LoopWorker, new_worker
from atts.models.folders import TEXT_FILES, WEIGHT_FILES, find_folder
from atts.models.stored_blocks import MANIFEST, check_stored
from atts.models.tokenizers import ModelTokenizer


def accelerated(
    model: str | Path,
    *,
    name: str = "",
    options: LocalOptions | None = None,
    speculation: SpeculationOptions | None = None,
    stages: StageOptions | None = None,
    chat: bool = False,
    proposer: type[Proposer] | None = None,
    lent: str = "",
    replica: int = 0,
    demand: RunDemand | None = None,
) -> LocalEngine:
    """Make an engine that writes the same tokens as `LocalEngine`, but faster.

    The class `proposer`, which the loop's process instantiates, replaces the proposers that the
    options name.

    `lent` is the run's draft model. It becomes the drafter if the options allow it, its tokenizer
    agrees with the target's, and both models fit into main memory. If the target runs on a GPU,
    `lent` is ignored, because it would take memory from the target's cache. To use a drafter on a
    GPU, name it in the options.

    Engines on models of one zoo share a step loop if they have the same `replica`. See
    `LocalEngine` for `demand`.

    :raises OptionError: an option has an unknown or impossible value.
    :raises UnsupportedByEngine: `chat` is set, but the model's folder has no chat template.
    """
    acceleration = Acceleration(
        speculation or SpeculationOptions(), stages or StageOptions(), proposer, lent, replica
    )
    return LocalEngine(
        model, name=name, options=options, chat=chat, accelerator=acceleration, demand=demand
    )


@dataclass(frozen=True, slots=True)
class PlannedLoop(LoopBuilder):
    """Builds the step loop of a plan and loads its models, in the process that runs the loop."""

    plan: LoopPlan

    def build(
        self, config: WorkerConfig, send: Callable[[LoopReport], None]
    ) -> tuple[Loop, WorkerReady]:
        """Build the step loop of the plan; see `atts.accel.build`."""
        with import_lock:
            # imported only here, because `atts.accel.build` imports torch
            from atts.accel.build import build_accelerated

        return build_accelerated(self.plan, config, send)


@dataclass(frozen=True, slots=True)
class Acceleration(Accelerator):
    """The accelerators that a local engine uses. With default options, it uses none."""

    speculation: SpeculationOptions
    stages: StageOptions
    proposer: type[Proposer] | None = None
    lent: str = ""
    replica: int = 0

    def check(self, options: LocalOptions) -> None:
        """Check that every accelerator can be combined with these engine options.

        :raises OptionError: an accelerator cannot be combined with them.
        """
        self.speculation.check()
        self.stages.check()
        self.stages.check_beside(options, self.speculation)

    def prepare(self, config: WorkerConfig, tokenizer: ModelTokenizer) -> WorkerConfig:
        """Find the draft model, and check that each token id means the same to draft and target.

        Return the engine's configuration. If the options name an accelerator, the configuration
        contains a builder for the accelerated loop.

        :raises OptionError: the token ids of draft and target differ in meaning.
        :raises EngineError: a model that the options name cannot be used.
        """
        speculation = self.speculation
        plan = LoopPlan(speculation, self.stages, proposer=self.proposer)
        if speculation.is_on and speculation.drafter:
            plan = replace(plan, drafter=_find_drafter(config, speculation.drafter, tokenizer))
        elif self.lent and self.proposer is None and speculation.takes_lent:
            plan = self._with_lent(plan, config, tokenizer)
        if plan.is_plain:
            return config
        drafter = plan.drafter
        floats = drafter.kv_floats_per_token if drafter is not None else 0
        builder = PlannedLoop(plan)
        return replace(config, builder=builder, more_kv_floats=floats, parts=plan.num_parts)

    def worker(self, model: str, options: LocalOptions) -> LoopWorker:
        """Return a worker that shares one step loop with other models of the same zoo.

        If this model cannot share a loop, return a worker with its own loop.
        """
        folder = Path(model).expanduser()
        drafts = self.speculation.is_on or self.proposer is not None
        drafts |= bool(self.lent) and self.speculation.takes_lent
        is_native = options.kernel != "torch" and options.scores == "float32"
        if drafts or not is_native or not (folder / MANIFEST).is_file():
            return new_worker(options.worker)
        zoo = folder.resolve().parent.parent
        return SharedWorker(zoo, self.replica, self.stages, self._share)

    def _share(self, config: WorkerConfig, depth: int) -> WorkerConfig:
        plan = LoopPlan(self.speculation, self.stages, is_shared=True, depth=depth)
        return replace(config, builder=PlannedLoop(plan))

    def _with_lent(
        self, plan: LoopPlan, config: WorkerConfig, tokenizer: ModelTokenizer
    ) -> LoopPlan:
        """Add the run's draft model to the plan, if its folder exists and its token ids mean the
        same as the target's.
        """
        try:
            drafter = _find_drafter(config, self.lent, tokenizer)
        except (OptionError, EngineError):
            return plan
        speculation = replace(plan.speculation, drafter=self.lent)
        return replace(plan, speculation=speculation, drafter=drafter, may_lack_drafter=True)


def _find_drafter(target: WorkerConfig, words: str, tokenizer: ModelTokenizer) -> WorkerConfig:
    """Read the draft model's properties from its files, without loading its weights.

    :raises OptionError: the token ids of draft and target differ in meaning.
    :raises ZooError: the drafter is a model of a zoo, and one of its blocks is damaged.
    """
    name = f"{target.name}'s drafter"
    folder = find_folder(words, name, (*TEXT_FILES, *WEIGHT_FILES))
    check_stored(folder)
    pieces = ModelTokenizer(folder, name).pieces
    shared = min(len(pieces), len(tokenizer.pieces))
    if pieces[:shared] != tokenizer.pieces[:shared]:
        problem = f"{words} cannot propose tokens to {target.name}'s model: their tokenizers differ"
        raise OptionError("drafter", f"{problem}. Choose a smaller model from the target's family")
    model = read_model_config(folder, name)
    return WorkerConfig(name, folder, model, pieces, target.options)
