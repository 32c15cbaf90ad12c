"""EasySpec: a drafter whose attentions are computed group by group, and calibrated each round."""

from __future__ import annotations

from typing import Literal, Protocol

from atts.accel.speculate.drafter import DraftedRows, ModelDrafter
from atts.local.batch import StepBatch
from atts.local.model_config import ModelConfig
from atts.local.seams import Ask, Model, TokenProposal

Calibration = Literal["exact", "none"]


class GroupedModel(Model, Protocol):
    """A model that may compute the attentions of a group of layers at once, from the first one's
    input: not exact.
    """

    is_grouped: bool


class GroupedDrafter(ModelDrafter):
    """EasySpec's: drafts with attentions of a group that read one input, first and last layer
    apart.

    Keys and values computed so are used within the round alone: the exact pass over what was
    accepted and the token after it computes them again and gives the first token of the next round.
    With calibration "none" they are kept, and their errors pile up: for comparison.
    """

    calibration: Calibration = "exact"

    def __init__(
        self, model: GroupedModel, config: ModelConfig, rows: DraftedRows, vocabulary: int
    ) -> None:
        super().__init__(model, config, rows, vocabulary)
        self._groups = model

    def settled(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Forget what the round computed."""
        if self.calibration == "none":
            super().settled(key, proposal, accepted)

    def _draw(self, batch: StepBatch, asks: list[Ask], turn: int) -> list[int]:
        self._groups.is_grouped = turn > 0
        try:
            return super()._draw(batch, asks, turn)
        finally:
            self._groups.is_grouped = False
