"""The plan of an accelerated loop: who proposes to the target, and where its layers and blocks are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from atts.accel.options import SpeculationOptions, StageOptions
from atts.local.messages import WorkerConfig
from atts.local.seams import Proposer


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What a loop consists of besides its model."""

    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    stages: StageOptions = field(default_factory=StageOptions)
    drafter: WorkerConfig | None = None  # the model that drafts for this one
    # it was lent: what hinders it is reported, and the model works without
    may_lack_drafter: bool = False
    proposer: type[Proposer] | None = None  # of one's own: found by name in a process
    is_shared: bool = False  # whether other models of its zoo may be run in the same loop
    depth: int = 0  # layers of the deepest of these

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed."""
        is_asked = self.proposer is not None and self.speculation.k != 0
        return is_asked or self.speculation.is_on

    @property
    def is_plain(self) -> bool:
        """Whether this is nothing but plain decoding."""
        return not self.speculates and self.stages.stages == 1 and not self.is_shared

    @property
    def num_parts(self) -> int:
        """How many processes of this machine compute at the same time, and so divide the cores."""
        if self.stages.stages > 1 and self.stages.stage_worker == "process":
            return 1 + sum(self.stages.replicas)
        speculation = self.speculation
        is_apart = speculation.is_overlapped and speculation.beside == "process"
        is_parallel = self.drafter is not None and self.drafter.is_parallel
        return 2 if is_apart and is_parallel else 1

    def without_drafter(self) -> LoopPlan:
        """Return the same plan, proposing nothing."""
        speculation = replace(self.speculation, drafter="", speculate="off", beside="process")
        return replace(self, speculation=speculation, drafter=None, may_lack_drafter=False)
