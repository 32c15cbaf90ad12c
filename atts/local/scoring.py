"""Tokens drawn while a text is scored: the beginning of the model's own completion in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from atts.core import Beginning, SampleRequest
from atts.local.batch import PrefillChunk
from atts.local.logit_sampling import batch_sampling, spread_rows
from atts.local.seams import Model
from atts.local.sequence import Sequence, ending


class DrawnTokens(NamedTuple):
    """One draw at each of some places of a scored text, from the distribution after all that is
    before it there.
    """

    sequence: Sequence  # that scores
    first: int  # index of the first place; 0 is the text's first token
    tokens: list[int]
    logprobs: list[float]


def draw_scored(model: Model, chunks: list[PrefillChunk], hidden: Tensor) -> Iterator[DrawnTokens]:
    """Draw at every place of these chunks whose request wants it, with the uniforms of the
    completion's own places.
    """
    row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        rows = hidden[row : row + chunk.stop - chunk.logits_from]
        row += len(rows)
        drawn = sequence.drawn
        request = drawn.request if drawn else None
        if (
            drawn is None
            or drawn.is_finished
            or drawn.uniforms is None
            or not isinstance(request, SampleRequest)
        ):
            continue
        logits = model.compute_logits(rows)
        first = chunk.logits_from + 1 - sequence.first_scored
        if first == 1 and sequence.cached_logits is not None:
            logits = torch.cat([sequence.cached_logits[None].to(logits.device), logits])
            first = 0
        uniforms = drawn.uniforms[first : first + len(logits)].tolist()
        logits = logits[: len(uniforms)]
        batch = batch_sampling([request.sampling], logits.shape[-1], logits.device)
        sampled = model.sample(
            logits, spread_rows(batch, torch.zeros(len(uniforms), dtype=torch.int64)), uniforms
        )
        yield DrawnTokens(sequence, first, *sampled.lists())


def extend_drawn(
    sequence: Sequence, draws: DrawnTokens, pieces: tuple[bytes, ...], end_ids: frozenset[int]
) -> None:
    """Add to the completion what is its own: up to and with the first token that is not the text's,
    or ends it.
    """
    _, first, tokens, logprobs = draws
    drawn = sequence.drawn
    text = sequence.ids[sequence.first_scored :]
    assert drawn is not None, "only what is wanted is drawn"
    for place in range(len(drawn.logprobs), first + len(tokens)):
        token = tokens[place - first]
        drawn.ids.append(token)
        drawn.logprobs.append(logprobs[place - first])
        drawn.ended = ending(drawn, token, pieces, end_ids)
        drawn.is_finished = drawn.ended is not None or place >= len(text) or token != text[place]
        if drawn.is_finished:
            return


def beginning(sequence: Sequence) -> Beginning | None:
    """Return the part of a scoring request's reply about the completion that it asked for."""
    drawn = sequence.drawn
    if drawn is None or not drawn.logprobs:
        return None
    return Beginning(tuple(drawn.ids[-len(drawn.logprobs) :]), tuple(drawn.logprobs), drawn.ended)
