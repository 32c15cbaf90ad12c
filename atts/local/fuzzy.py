"""EasySpec's drafter: attentions of a group of layers read one input, and every round begins with an exact pass.

Only guesses are made this way; the target draws every token itself, so that nothing else changes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from atts.local.batch import StepBatch
from atts.local.drafting import ModelDrafter
from atts.local.model_config import ModelConfig
from atts.local.scheduler import Scheduler
from atts.local.torch_model import TorchModel
from atts.speculation import Ask, TokenProposal

Calibration = Literal["exact", "none"]


class FuzzyDrafter(ModelDrafter):
    """Drafts with `group` attentions at once, first and last layer apart.

    Keys and values computed so are used within the round alone: the exact pass over what stood and the token after it
    computes them anew and gives the first token of the next round. With calibration "none" they are kept, and their
    errors pile up: for comparison.
    """

    def __init__(
        self,
        model: TorchModel,
        config: ModelConfig,
        scheduler: Scheduler,
        vocabulary: int,
        *,
        group: int,
        calibration: Calibration = "exact",
    ) -> None:
        super().__init__(model, config, scheduler, vocabulary)
        self._torch, self._group, self._calibration = model, group, calibration

    def settled(self, key: int, proposal: TokenProposal, stood: int) -> None:
        """What the round computed is forgotten."""
        if self._calibration == "none":
            super().settled(key, proposal, stood)

    def _draw(self, batch: StepBatch, asks: list[Ask], turn: int, wants_laws: bool) -> tuple[list[int], Tensor | None]:
        self._torch.group = self._group if turn else 1
        try:
            return super()._draw(batch, asks, turn, wants_laws)
        finally:
            self._torch.group = 1
