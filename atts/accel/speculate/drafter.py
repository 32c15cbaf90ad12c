"""A draft model that proposes tokens, which it samples with the target's random numbers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from atts.local.batch import (
    Ints,
    PrefillChunk,
    Sequence,
    StepBatch,
    StepPlan,
    single_rows,
    step_batch,
)
from atts.local.cache import SlotAllocator, SlotIds
from atts.local.cpu.model import AheadBatch, NativeModel
from atts.local.logit_sampling import (
    SamplingBatch,
    batch_sampling,
    filtered_rows,
    first_rows,
)
from atts.local.model_config import ModelConfig
from atts.local.seams import NOTHING, Ask, Model, Proposer, TokenProposal

# The drafter's KV cache uses the target's slot table, so a token has the same slot number in both
# caches. Slots that the target frees, shares or evicts thus change in the drafter's cache too. The
# drafter itself only records how many tokens of each sequence it has computed.

# Every proposal of a draft model gets this confidence. Proposers that look up tokens give a
# confidence on the same scale, from 0 to 1.
_CONFIDENCE = 0.8
_CHUNK = 512  # largest number of unread tokens that the draft model reads in one pass
# The last unread tokens of all texts are computed together in one batch. At most one more than this
# number of tokens come from each text.
_FEW = 3

FedRow = tuple[int, int, int, bool]
"""A token for the drafter to compute: its row in the slot table, its position and its id. The last
entry is True for the newest token of a sequence, because the drafter samples the token after it.
"""


def fed_rows(row: int, tokens: Many[int], start: int) -> list[FedRow]:
    """Return a `FedRow` for each of these tokens of one sequence. The first token is at position
    `start`.
    """
    last = len(tokens) - 1
    return [(row, start + at, token, at == last) for at, token in enumerate(tokens)]


class DraftedSlots(SlotAllocator):
    """Allocator of cache slots, which have the same numbers in the target's cache and the
    drafter's. It also records which of these slots the drafter has filled.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.drafted = np.zeros(num_slots + 1, dtype=np.bool_)

    def allocate(self, count: int) -> SlotIds:
        """Allocate slots, and record that the drafter has not filled them yet."""
        slots = super().allocate(count)
        self.drafted[slots] = False
        return slots


class DraftedRows:
    """The target's slot table and sequences, with a record of how many tokens of each sequence the
    drafter has computed.
    """

    def __init__(
        self, table: SlotIds, slots: DraftedSlots, sequence: Callable[[int], Sequence]
    ) -> None:
        self.table = table
        self.slots = slots
        self.sequence = sequence  # function that returns the unfinished sequence with a given key
        # for each request: how often the scheduler has admitted it, and how many of its tokens the
        # drafter has computed since then
        self._progress = dict[int, tuple[int, int]]()

    def drafted(self, sequence: Sequence) -> int:
        """Return how many tokens at the start of a sequence the drafter has computed, with keys and
        values in the sequence's current slots.
        """
        admission, count = self._progress.get(sequence.request_id, (-1, 0))
        # A sequence that was preempted and admitted again has new slots, which contain none of its
        # earlier keys and values.
        return count if admission == sequence.num_admissions else 0

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that the drafter has computed the first `count` tokens of a sequence."""
        start = self.drafted(sequence)
        self._progress[sequence.request_id] = sequence.num_admissions, count
        self.slots.drafted[self.table[sequence.row, start:count]] = True

    def forget(self, key: int) -> None:
        """Delete the record of a sequence that ended."""
        self._progress.pop(key, None)


class ModelDrafter(Proposer):
    """Proposes tokens that a smaller model samples with the target's random numbers."""

    def __init__(
        self, model: Model, config: ModelConfig, rows: DraftedRows, vocabulary: int
    ) -> None:
        """Create a drafter that proposes only tokens of the target's `vocabulary`."""
        self._model = model
        self._config = config
        self._rows = rows
        self._table = rows.table
        self._vocabulary = min(vocabulary, config.vocabulary)
        # number of times that a text was too long for the draft's context; the same text counts
        # again in every step
        self._num_beyond = 0
        # number of times that a text had tokens that the draft does not have; the same text counts
        # again in every step
        self._num_unknown = 0
        self._target_vocabulary = vocabulary
        self._context = min(config.context_length, config.long_after or config.context_length)
        self._sampling: tuple[tuple[int, ...], SamplingBatch] = ((), batch_sampling([], 1))
        self._native = (
            model if isinstance(model, NativeModel) and config.vocabulary <= vocabulary else None
        )

    def propose(self, asks: Many[Ask]) -> list[TokenProposal]:
        """Compute the keys and values of all tokens that the draft model has not read yet. Then
        sample the next tokens one by one, for all sequences in one batch.
        """
        proposals = [NOTHING] * len(asks)
        places = [place for place, ask in enumerate(asks) if self._can_follow(ask)]
        if places:
            places.sort(key=lambda place: -asks[place].room)
            chosen = [asks[place] for place in places]
            for place, proposal in zip(places, self._draft(chosen), strict=True):
                proposals[place] = proposal
        return proposals

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Keep the keys and values of accepted tokens.

        Later tokens overwrite the keys and values of rejected tokens.
        """
        sequence = self._rows.sequence(key)
        # The drafter drew the last token of the proposal but has not computed its keys and values.
        fed = min(accepted, max(0, len(proposal.tokens) - 1))
        self._rows.advance(sequence, self._rows.drafted(sequence) + fed)

    def ended(self, key: int) -> None:
        """Delete the record of a sequence that ended."""
        self._rows.forget(key)

    def _can_follow(self, ask: Ask) -> bool:
        sequence = self._rows.sequence(ask.key)
        fits = sequence.rope_row == 0 and len(ask.ids) + ask.room <= self._context
        is_smaller = self._vocabulary < self._target_vocabulary
        is_unknown = is_smaller and max(ask.ids) >= self._vocabulary
        self._num_beyond += not fits
        self._num_unknown += is_unknown
        return fits and not is_unknown

    def silence(self) -> str:
        """Return the reason why the drafter could not propose tokens."""
        if self._num_beyond:
            return f"no text fits into the draft's context of {self._context:,} tokens"
        if self._num_unknown:
            vocabulary = f"the draft's vocabulary of {self._vocabulary:,} tokens"
            return f"every text has tokens outside {vocabulary}"
        return super().silence()

    def _draft(self, asks: list[Ask]) -> list[TokenProposal]:
        """Draft tokens for all requests.

        The caller sorts the requests by the number of tokens to draft, the largest first.
        Therefore, requests that are complete are at the end of the batch, and can be cut off there.
        """
        sequences = [self._rows.sequence(ask.key) for ask in asks]
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        following = np.array([len(sequence.ids) for sequence in sequences], dtype=np.int64)
        first = self._catch_up(sequences)
        if self._native is None or self._filters(asks):
            return self._draft_in_turns(asks, first, (rows, following))
        uniforms = [ask.uniforms[: ask.room] for ask in asks]
        drawn = self._drawn_ahead(asks, uniforms, first, (rows, following))
        return [TokenProposal(tuple(tokens), _CONFIDENCE) for tokens in drawn]

    def _drawn_ahead(
        self,
        asks: list[Ask],
        uniforms: list[NDArray[np.float64]],
        first: StepBatch,
        places: tuple[Ints, Ints],
    ) -> list[list[int]]:
        """Sample the next tokens of all requests in one call of the kernels.

        `uniforms` has the random numbers of each request, and one token is sampled with each
        number. Requests with the most random numbers come first.
        """
        assert self._native is not None, (
            "only a drafter with native kernels samples several tokens in one call"
        )
        rows, following = places
        counts = np.array([len(row_uniforms) for row_uniforms in uniforms])
        numbers = np.zeros((counts[0], len(counts)))
        for place, row_uniforms in enumerate(uniforms):
            numbers[: len(row_uniforms), place] = row_uniforms
        ahead = AheadBatch(
            first=first,
            following=single_rows(np.zeros_like(rows), following, rows, self._table),
            counts=(counts > np.arange(counts[0])[:, None]).sum(1),
            temperatures=self._sampling_batch(asks).temperature,
            uniforms=numbers,
        )
        drawn = self._native.draw_ahead(ahead, self._table).T.tolist()
        return [tokens[:count] for tokens, count in zip(drawn, counts, strict=True)]

    def _draft_in_turns(
        self, asks: list[Ask], first: StepBatch, places: tuple[Ints, Ints]
    ) -> list[TokenProposal]:
        """Draft the same tokens as `_drawn_ahead`, with one pass of the model per position."""
        drafted: list[list[int]] = [[] for _ in asks]
        count = len(asks)
        batch = first
        rows, following = places
        for turn in range(asks[0].room):
            while asks[count - 1].room <= turn:
                count -= 1
            if turn:
                tokens = np.array(
                    [tokens_so_far[-1] for tokens_so_far in drafted[:count]], dtype=np.int64
                )
                batch = single_rows(tokens, following[:count] + turn - 1, rows[:count], self._table)
            for place, token in enumerate(self._draw(batch, asks[:count], turn)):
                drafted[place].append(token)
        return [TokenProposal(tuple(tokens_so_far), _CONFIDENCE) for tokens_so_far in drafted]

    def _draw(self, batch: StepBatch, asks: list[Ask], turn: int) -> list[int]:
        """Run the draft model on a batch, and sample the next token of each request."""
        hidden = self._model.forward(batch, self._table)
        logits = self._model.compute_logits(hidden)[:, : self._vocabulary]
        uniforms = [float(ask.uniforms[turn]) for ask in asks]
        sampling = self._sampling_batch(asks, logits.device)
        tokens: list[int] = self._model.sample(
            logits.contiguous(), sampling, uniforms
        ).tokens.tolist()
        return tokens

    def _filters(self, asks: list[Ask]) -> bool:
        """Return whether the sampling settings of any request, such as top-p, exclude tokens."""
        return filtered_rows(self._sampling_batch(asks), self._vocabulary) is not None

    def _sampling_batch(self, asks: list[Ask], device: torch.device | None = None) -> SamplingBatch:
        """Return the requests' sampling settings as tensors.

        The tensors of the previous call are used again if its first requests were the same.
        """
        key = tuple([ask.key for ask in asks])
        if key != self._sampling[0][: len(key)]:
            self._sampling = (
                key,
                batch_sampling([ask.sampling for ask in asks], self._vocabulary, device),
            )
        return first_rows(self._sampling[1], len(key))

    def _catch_up(self, sequences: list[Sequence]) -> StepBatch:
        """Run the draft model on all text that it has not read yet, except the last few tokens of
        each sequence.

        Return those last tokens as a batch.
        """
        fed = list[FedRow]()
        for sequence in sequences:
            pieces, start = self._pieces(sequence)
            for piece in pieces:
                self._model.forward(piece, self._table)
            fed += fed_rows(sequence.row, sequence.ids[start:], start)
            self._rows.advance(sequence, len(sequence.ids))
        return self._fed_batch(fed)

    def _pieces(self, sequence: Sequence) -> tuple[list[StepBatch], int]:
        """Divide the tokens of a sequence that the drafter has not computed yet into batches,
        without the last few tokens. Return the batches, and the position of the first token that is
        left out.

        If many tokens are missing, the drafter may already have filled their first slots for
        another rollout that shares them. Such tokens are skipped.
        """
        start = min(self._rows.drafted(sequence), len(sequence.ids) - 1)
        newest = len(sequence.ids) - 1
        if newest - start > _FEW:
            known = self._rows.slots.drafted[self._rows.table[sequence.row, start:newest]]
            start += len(known) if known.all() else int(known.argmin())
        pieces = list[StepBatch]()
        while newest - start > _FEW:
            end = min(newest, start + _CHUNK)
            pieces.append(
                step_batch(
                    StepPlan([], [PrefillChunk(sequence, start, end, end)], [], []), self._table
                )
            )
            start = end
        return pieces, start

    def _fed_batch(self, fed: list[FedRow]) -> StepBatch:
        rows, positions, tokens, are_last = np.array(fed, dtype=np.int64).T.copy()
        return single_rows(tokens, positions, rows, self._table, are_last)


Calibration = Literal["exact", "none"]


class GroupedModel(Model, Protocol):
    """A model that can compute several layers' attention at once, as an approximation: the
    attention of all these layers reads the input of the first one.
    """

    is_grouped: bool


class GroupedDrafter(ModelDrafter):
    """EasySpec: a drafter with groups of layers, in which the attention of all layers of a group
    reads the same input. The first and the last layer are in no group.

    This approximation makes keys and values inexact. They are used only until the proposal has been
    verified. Then an exact pass computes the accepted tokens and the next token again, and also
    gives the first token of the next proposal.

    With calibration "none", inexact keys and values are kept, and their errors add up. This setting
    exists only for comparison.
    """

    calibration: Calibration = "exact"

    def __init__(
        self, model: GroupedModel, config: ModelConfig, rows: DraftedRows, vocabulary: int
    ) -> None:
        super().__init__(model, config, rows, vocabulary)
        self._groups = model

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Keep the keys and values of accepted tokens only if calibration is "none".

        Otherwise the exact pass computes them again.
        """
        if self.calibration == "none":
            super().verified(key, proposal, accepted)

    def _draw(self, batch: StepBatch, asks: list[Ask], turn: int) -> list[int]:
        self._groups.is_grouped = turn > 0
        try:
            return super()._draw(batch, asks, turn)
        finally:
            self._groups.is_grouped = False
