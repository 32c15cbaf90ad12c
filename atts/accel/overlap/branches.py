"""Branches that a drafter writes beside the target: continuations of guessed outcomes, written pass
by pass.

It writes pass by pass, with the random numbers of the places that are filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.accel.overlap.mirror import StreamHeads
from atts.accel.overlap.outcomes import OutcomeCache, PlaceLaw
from atts.accel.speculate.drafter import FedRow
from atts.core import TokenIds
from atts.local.batch import StepBatch, single_rows
from atts.local.cache import SlotIds
from atts.local.logit_sampling import SamplingBatch, batch_sampling, probabilities, spread_rows
from atts.local.seams import Ask, Model, OverlapStats

Drawn = tuple[list[int], list[PlaceLaw]]
_CONFIDENT = 0.6
"""How likely a head must find its token for that to be kept until the next pass, or the target, has
seen it.
"""


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
    # of the same places and the one after, as it is told
    exits: list[PlaceLaw] = field(default_factory=list[PlaceLaw])
    # what the drafter has not computed of it
    fed: list[FedRow] = field(default_factory=list[FedRow])

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
    # what follows each proposal
    begun: tuple[list[int], list[PlaceLaw]] = field(default_factory=lambda: ([], []))
    is_enough: bool = False  # the step is done: no further draft step is begun
    error: BaseException | None = None


class BranchWriter:
    """Runs the draft model on what is not fed yet, and draws what follows."""

    def __init__(
        self,
        model: Model,
        table: SlotIds,
        vocabulary: int,
        heads: StreamHeads | None,
        stats: OverlapStats,
    ) -> None:
        self._model = model
        self._table = table
        self._vocabulary = vocabulary
        self._heads = heads
        self._stats = stats
        self.streams = False  # whether the heads are used
        self.fan = 0  # of a place's first tokens, those that are told beside its own
        self.stands = 0.7  # how likely a proposed token is thought to stand

    def following(self, batch: StepBatch, lines: list[DraftLine]) -> Drawn:
        """The token after each line's proposal, and the law of its place."""
        places = [len(line.proposal) for line in lines]
        return self._drawn(self._model.forward(batch, self._table), lines, places)

    def grow(self, branches: list[DraftBranch]) -> None:
        """One pass: the tokens of each that were not fed are, and those follow that are drawn then."""
        rows = [(branch, at) for branch in branches for at in range(branch.fed, len(branch.tokens))]
        numbers = [(branch.row, branch.start + at, branch.tokens[at]) for branch, at in rows]
        table_rows, positions, tokens = np.array(numbers, dtype=np.int64).T.copy()
        batch = single_rows(tokens, positions, table_rows, self._table)
        hidden = self._model.forward(batch, self._table)
        places = [branch.accepted + at + 1 for branch, at in rows]
        before = sum([len(branch.tokens) for branch in branches])
        drawn, laws = self._drawn(hidden, [branch.line for branch, _ in rows], places)
        ends = list[int]()
        first = 0
        for branch in branches:
            stop = first + len(branch.tokens) - branch.fed
            ends.append(first + _keep(branch, drawn[first:stop], laws[first:stop]) - 1)
            first = stop
        if self.streams and self._heads is not None:
            self._stream(self._heads, branches, hidden[ends])
        self._stats.passes += len(branches)
        self._stats.drafted += sum([len(branch.tokens) for branch in branches]) - before

    def _stream(self, heads: StreamHeads, branches: list[DraftBranch], hidden: Tensor) -> None:
        """Add what the heads let follow the newest tokens, as long as they are sure of it."""
        live = [
            (at, branch) for at, branch in enumerate(branches) if len(branch.tokens) < branch.most
        ]
        for width in range(1, len(heads.streams) + 1):
            if not live:
                return
            known = torch.tensor(
                [branch.tokens[-width:] for _, branch in live], device=hidden.device
            )
            states = heads(hidden[[at for at, _ in live]], known)
            places = [branch.accepted + len(branch.tokens) for _, branch in live]
            tokens, chances = self._streamed(states, [branch.line for _, branch in live], places)
            sure = [place for place, chance in enumerate(chances) if chance >= _CONFIDENT]
            for place in sure:
                live[place][1].tokens.append(tokens[place])
                live[place][1].laws.append(PlaceLaw(self.stands, (), ()))
            live = [
                live[place] for place in sure if len(live[place][1].tokens) < live[place][1].most
            ]

    def _streamed(
        self, states: Tensor, lines: list[DraftLine], places: list[int]
    ) -> tuple[list[int], list[float]]:
        tokens, logits, sampling = self._sampled(states, lines, places)
        chosen = torch.tensor(tokens, device=logits.device)[:, None]
        chances: list[float] = probabilities(logits, sampling).gather(1, chosen).squeeze(1).tolist()
        return tokens, chances

    def _drawn(self, hidden: Tensor, lines: list[DraftLine], places: list[int]) -> Drawn:
        tokens, logits, sampling = self._sampled(hidden, lines, places)
        return tokens, place_laws(logits, sampling, self.fan, self.stands)

    def _sampled(
        self, hidden: Tensor, lines: list[DraftLine], places: list[int]
    ) -> tuple[list[int], Tensor, SamplingBatch]:
        """A token for each row, with the number of its line's place, and what it was drawn from."""
        logits = self._model.compute_logits(hidden)[:, : self._vocabulary].contiguous()
        asks = {line.ask.key: line.ask for line in lines}
        index = {key: place for place, key in enumerate(asks)}
        settings = batch_sampling(
            [ask.sampling for ask in asks.values()], logits.shape[-1], logits.device
        )
        sampling = spread_rows(settings, torch.tensor([index[line.ask.key] for line in lines]))
        uniforms = [float(line.uniforms[place]) for line, place in zip(lines, places, strict=True)]
        tokens: list[int] = self._model.sample(logits, sampling, uniforms).tokens.tolist()
        return tokens, logits, sampling


def _keep(branch: DraftBranch, drawn: list[int], laws: list[PlaceLaw]) -> int:
    """Keep of the tokens that were fed those that the model draws itself, and what it draws after;
    how many were.
    """
    kept = 1
    count = len(drawn)
    while kept < count and branch.tokens[branch.fed + kept] == drawn[kept - 1]:
        kept += 1
    del branch.tokens[branch.fed + kept :], branch.laws[branch.fed :]
    branch.laws += laws[:kept]
    branch.fed += kept
    branch.tokens.append(drawn[kept - 1])
    return kept


def place_laws(logits: Tensor, sampling: SamplingBatch, fan: int, stands: float) -> list[PlaceLaw]:
    """What is likely in each row: so many tokens beside one that may be proposed there."""
    if not fan:
        return [PlaceLaw(stands, (), ())] * len(logits)
    best = probabilities(logits, sampling).topk(min(fan + 1, logits.shape[-1]), -1)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [PlaceLaw(stands, ids, chances) for ids, chances in found]
