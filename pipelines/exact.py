"""Method exact, in which the draft proposes and the target draws the text while it scores."""

from __future__ import annotations

from dataclasses import replace

import anyio

from atts.core import (
    Beginning,
    Chunk,
    Completion,
    Role,
    SampleRequest,
    ScoreRequest,
    Scores,
    TokenIds,
    Usage,
)
from atts.pipelines.builder import RolloutBuilder, after, continued
from atts.pipelines.speeds import BegunChunk, DraftLength


async def write_exactly(builder: RolloutBuilder) -> Chunk:
    """Write the chunk that the target alone would write next.

    The draft draws with the target's stream of random numbers, so that both come to the same token
    wherever their distributions are alike. Up to the first difference the draft's tokens equal the
    target's; there the target's token is used, and the draft continues after it. If the target
    alone writes at least as many tokens per second, it writes alone, which gives the same text.

    :raises ContextOverflow: if not one more token fits.
    :raises EngineError: if an engine failed for good.
    """
    earlier = _earlier_writer(builder)
    if earlier is not None:
        return await _written_by(builder, earlier)
    choice = builder.context.writers
    begun = choice.begin(anyio.current_time())
    try:
        chunk = await _written_by(builder, begun.writer, begun)
    except BaseException:
        choice.fail(begun, anyio.current_time())
        raise
    choice.end(begun, chunk.tokens, anyio.current_time())
    return chunk


def _earlier_writer(builder: RolloutBuilder) -> Role | None:
    """Return the model that began the chunk in an earlier session, which then continues it.

    Recorded calls say nothing about speeds, so no speed is measured in that case.
    """
    request = builder.request("target")
    writers: tuple[Role, ...] = ("target", "draft")
    return next(
        (writer for writer in writers if builder.engine(writer).recorded_length(request)), None
    )


async def _written_by(
    builder: RolloutBuilder, writer: Role, begun: BegunChunk | None = None
) -> Chunk:
    if writer == "draft":
        return await _checked(builder, begun)
    return await builder.write("target")


async def _checked(builder: RolloutBuilder, begun: BegunChunk | None) -> Chunk:
    """Write the chunk from drafted tokens; the target checks each by drawing a token in its place.

    The target decodes no token itself, unless drafting is given up; then it finishes the chunk
    alone.
    """
    request = builder.request("target")
    beginning = Beginning()
    finished: Completion | None = None
    wasted = 0
    while beginning.ended is None and finished is None:
        rest = after(request, beginning)
        if _is_the_targets(builder, rest, begun):
            finished = await builder.target.sample(rest)
            builder.spend("target", rest, finished)
            continue
        earlier = builder.draft.recorded_length(rest)
        lengths = DraftLength() if earlier else builder.context.draft_length
        drafted = await _drafted(builder, lengths, rest, earlier or lengths.length(rest.max_tokens))
        scores = await _scored(builder, lengths, rest, drafted)
        assert scores.beginning is not None, "an engine that cannot draw was refused before the run"
        more = scores.beginning
        wasted += len(drafted) - _accepted_length(drafted, more.ids)
        beginning = Beginning(
            beginning.ids + more.ids, beginning.logprobs + more.logprobs, more.ended
        )
        if begun is not None:
            builder.context.writers.wrote(begun, len(more.ids), anyio.current_time())
    builder.usage += Usage(wasted_tokens=wasted)
    return builder.written("target", continued(beginning, finished, builder.target))


def _is_the_targets(builder: RolloutBuilder, rest: SampleRequest, begun: BegunChunk | None) -> bool:
    """Return whether the target writes the rest, because it did so in an earlier session or because
    drafting is too slow.
    """
    if begun is None:
        return builder.target.recorded_length(rest) > 0
    return builder.context.writers.is_given_up(begun, anyio.current_time())


async def _drafted(
    builder: RolloutBuilder, lengths: DraftLength, rest: SampleRequest, most: int
) -> TokenIds:
    """Return the draft's guess of the next tokens."""
    since = anyio.current_time()
    ahead = replace(rest, max_tokens=most, logprobs="unneeded")
    drafted = await builder.draft.sample(ahead)
    builder.spend("draft", ahead, drafted)
    lengths.drafted += len(drafted.ids)
    lengths.draft_seconds += anyio.current_time() - since
    return drafted.ids


async def _scored(
    builder: RolloutBuilder, lengths: DraftLength, rest: SampleRequest, drafted: TokenIds
) -> Scores:
    """Return the target's scores of the guess, with the tokens that the target draws in its place."""
    since = anyio.current_time()
    request = ScoreRequest(rest.ids, drafted, builder.name, turn=builder.turn, draw=rest)
    scores = await builder.target.score(request)
    drawn = scores.beginning.ids if scores.beginning else ()
    accepted = _accepted_length(drafted, drawn)
    lengths.scores += 1
    lengths.score_seconds += anyio.current_time() - since
    lengths.accepted += accepted
    lengths.tested += min(accepted + 1, len(drafted))
    read = max(0, len(rest.ids) - scores.cached_tokens)
    builder.usage += Usage(target_tokens=len(drawn), drawn_tokens=len(drawn))
    builder.usage += Usage(scored_tokens=len(drafted), target_prefill_tokens=read, calls=1)
    return scores


def _accepted_length(drafted: TokenIds, drawn: TokenIds) -> int:
    """Return how many drafted tokens equal the drawn ones; only the last drawn token may differ."""
    return len(drawn) - (drawn != drafted[: len(drawn)])
