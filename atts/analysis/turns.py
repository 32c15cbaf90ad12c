"""What one recorded turn took: tokens by model, and the chunk that was scored."""

from __future__ import annotations

from atts.core import Chunk, Role, Turn
from atts.pipelines import EQUAL_CHUNK, FORCING


def tokens_written(turn: Turn, author: Role) -> int:
    """Tokens this model wrote in the turn, discarded ones included."""
    chunks = [chunk for chunk in (*turn.discarded, *turn.chunks) if chunk.author == author]
    return sum(chunk.tokens for chunk in chunks if is_written(turn, chunk))


def is_written(turn: Turn, chunk: Chunk) -> bool:
    """Whether a model wrote it there: not words that were put in, nor the part of a discarded chunk that stays."""
    if chunk.logprobs:
        return True
    wholes = [whole for whole in turn.discarded if whole is not chunk and whole.author == chunk.author]
    return turn.note != FORCING and not any(
        whole.target_ids[: len(chunk.target_ids)] == chunk.target_ids for whole in wholes
    )


def drafted_chunk(turn: Turn) -> Chunk | None:
    """The draft's chunk that was judged, kept or discarded; None where the draft wrote none."""
    return next((chunk for chunk in (*turn.discarded, *turn.chunks) if chunk.author == "draft"), None)


def scored_chunk(turn: Turn) -> Chunk | None:
    """The draft's chunk that the target was asked to score; None where none was, or an equal one had been."""
    return None if turn.score is None or turn.note == EQUAL_CHUNK else drafted_chunk(turn)
