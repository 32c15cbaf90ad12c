"""Bursts, which compute several steps of a small model in one call of the kernels."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.core import SampleRequest, TokenIds
from atts.local.batch import Draws, Sequence, StepBatch, StepPlan, TokenTable, is_last, single_rows
from atts.local.cache import SlotIds
from atts.local.cpu.model import AheadBatch, NativeModel
from atts.local.logit_sampling import batch_sampling
from atts.local.scheduler import Scheduler
from atts.local.seams import Model

_MOST_TURNS = 8
"""Largest number of steps in a burst. It is small, because a request that arrives during a burst
waits until the burst ends.
"""
_MOST_ROWS = 16
"""Largest number of sequences in a burst. A burst ends as soon as one sequence samples a token that
may end its answer. With more sequences, this would happen in almost every step.
"""
_SMALL = 1_000_000
"""Largest number of matrix weights of a model that uses bursts. In larger models, the kernels take
most of a step's time, so bursts would save little.
"""


class MultiStep:
    """Bursts for native models, which compute several steps in one call of the C kernels. A burst
    samples the same tokens as plain steps, because it uses the same kernels and random numbers.
    """

    def __init__(self, model: NativeModel, scheduler: Scheduler, table: TokenTable) -> None:
        self._model = model
        self._scheduler = scheduler
        self._ends = lru_cache(64)(
            lambda stops, ids: _ends(table, model.config.vocabulary, stops, ids)
        )
        self._kept: tuple[list[Sequence], Tensor | None, NDArray[np.uint8]] = (
            [],
            None,
            np.zeros(0, dtype=np.uint8),
        )

    @classmethod
    def of(cls, model: Model, scheduler: Scheduler, table: TokenTable) -> MultiStep | None:
        """Return a `MultiStep` for a native model that is small enough to gain from bursts, else
        None.
        """
        if not isinstance(model, NativeModel) or model.config.matrix_weights > _SMALL:
            return None
        return cls(model, scheduler, table)

    def turns(self, plan: StepPlan) -> int:
        """Return how many steps to merge into a burst; 1 if a sequence rules out a burst, for
        example because it uses top-k. Also reserve cache slots for the merged steps.
        """
        if plan.size > _MOST_ROWS or plan.ready or not all(map(is_last, plan.prefills)):
            return 1
        sequences = _sequences(plan)
        if sequences != self._kept[0]:
            self._kept = sequences, *self._settings(sequences)
        most = _MOST_TURNS if self._kept[1] is not None else 1
        for sequence in sequences:
            assert sequence.uniforms is not None, "only sampling requests can be part of a burst"
            most = min(most, len(sequence.uniforms) - len(sequence.logprobs))
            if most < 2:
                return 1
            most = 1 + self._scheduler.widen(sequence, most - 1)
        return most

    def draw(self, plan: StepPlan, batch: StepBatch, turns: int) -> tuple[list[Draws], Tensor]:
        """Run a burst and return each sequence's tokens: at most `turns`, and the same number for
        all. If the step has prefills, also return the logits after the burst's first step; else an
        empty tensor.
        """
        sequences, temperatures, ends = self._kept
        assert temperatures is not None, "a burst must have more than one step"
        table = self._scheduler.table
        shape = (turns, len(sequences))
        numbers = list[NDArray[np.float64]]()
        for sequence in sequences:
            assert sequence.uniforms is not None, "only sampling requests draw tokens"
            written = len(sequence.logprobs)
            numbers.append(sequence.uniforms[written : written + turns])
        ahead = AheadBatch(
            first=batch,
            following=_following(batch, table),
            counts=np.full(turns, len(sequences)),
            temperatures=temperatures,
            uniforms=np.stack(numbers, 1),
            ends=ends,
        )
        logits = torch.empty(*shape, self._model.config.vocabulary) if plan.prefills else None
        logprobs = np.empty(shape, dtype=np.float32)
        drawn = self._model.draw_ahead(ahead, table, logits, logprobs)
        tokens = drawn.T.tolist()
        values = logprobs[: len(drawn)].T.tolist()
        draws = list(zip(sequences, tokens, values, strict=True))
        return draws, torch.empty(0) if logits is None else logits[0]

    def _settings(self, sequences: list[Sequence]) -> tuple[Tensor | None, NDArray[np.uint8]]:
        """Return the temperature of each sequence, and a mask of the tokens that end a burst. The
        temperatures are None if a sequence rules out bursts.
        """
        requests = [each.request for each in sequences if isinstance(each.request, SampleRequest)]
        sampling = batch_sampling(
            [request.sampling for request in requests], self._model.config.vocabulary
        )
        is_filtered = any(
            column is not None for column in (sampling.top_k, sampling.top_p, sampling.min_p)
        )
        ends = np.maximum.reduce(
            [self._ends(stop, ids) for stop, ids in {(r.stop, r.stop_ids) for r in requests}]
        )
        is_long = any(sequence.rope_row for sequence in sequences)
        return None if is_filtered or is_long else sampling.temperature, ends


def _sequences(plan: StepPlan) -> list[Sequence]:
    return plan.decoding + [chunk.sequence for chunk in plan.prefills]


def _following(batch: StepBatch, table: SlotIds) -> StepBatch:
    """Return the batch of a burst's second step. Its tokens are filled in when the first step has
    sampled them.
    """
    return single_rows(
        np.zeros_like(batch.tokens), batch.context_lens.copy(), batch.table_rows, table
    )


def _ends(
    table: TokenTable, vocabulary: int, stops: tuple[str, ...], ids: TokenIds
) -> NDArray[np.uint8]:
    """Return a mask of the tokens that may end an answer. They are end tokens, stop tokens, and
    tokens that contain the last byte of a stop string.
    """
    is_end = np.zeros(vocabulary, dtype=np.uint8)
    last = {stop.encode()[-1] for stop in stops}
    is_end[[token for token in (*table.end_ids, *ids) if token < vocabulary]] = 1
    for token, piece in enumerate(table.pieces[:vocabulary]):
        is_end[token] |= not last.isdisjoint(piece)
    return is_end
