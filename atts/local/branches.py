"""What a drafter works on beside the target: sequences as they stand, branches of what may come, a step's whole job."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atts.core import TokenIds
from atts.local.allocator import SlotIds
from atts.local.batch import StepBatch
from atts.local.drafting import FedRow
from atts.speculation import Ask, OutcomeCache, PlaceLaw


@dataclass(slots=True)
class DraftBranch:
    """A guessed token and what the drafter lets follow it."""

    line: DraftLine
    accepted: int
    tokens: list[int]
    slots: SlotIds
    row: int  # of the drafter's table
    most: int = 1  # tokens it may have
    fed: int = 0  # tokens that the drafter has computed
    laws: list[PlaceLaw] = field(default_factory=list[PlaceLaw])  # of the tokens after the first

    @property
    def start(self) -> int:
        """The position of the first token."""
        return self.line.base + self.accepted


@dataclass(slots=True)
class DraftLine:
    """One sequence as it stands when a step begins, and what its proposal may come to."""

    ask: Ask
    base: int  # tokens that are written
    row: int
    proposal: TokenIds
    laws: list[PlaceLaw]  # of the proposal's places
    uniforms: NDArray[np.float64]  # of the places from `base` on
    cache: OutcomeCache[DraftBranch] = field(default_factory=lambda: OutcomeCache[DraftBranch]())
    exits: list[PlaceLaw] = field(default_factory=list[PlaceLaw])  # of the same places and the one after, as it is told
    fed: list[FedRow] = field(default_factory=list[FedRow])  # what the drafter has not computed of it

    @property
    def stop(self) -> int:
        """The position after the proposal."""
        return self.base + len(self.proposal)


@dataclass(slots=True)
class DraftJob:
    """What is drafted during one step."""

    lines: list[DraftLine] = field(default_factory=list[DraftLine])
    moves: list[tuple[SlotIds, SlotIds]] = field(default_factory=list[tuple[SlotIds, SlotIds]])
    """From where to where: keys and values of branches that become their sequences'."""
    texts: list[StepBatch] = field(default_factory=list[StepBatch])  # given text to catch up with
    lent: list[SlotIds] = field(default_factory=list[SlotIds])  # given back when it is over
    begun: tuple[list[int], list[PlaceLaw]] = field(default_factory=lambda: ([], []))  # what follows each proposal
    is_enough: bool = False  # the step is done: no further draft step is begun
    error: BaseException | None = None
