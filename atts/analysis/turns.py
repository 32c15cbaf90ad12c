"""What one recorded turn took: tokens by model, and the chunk that was scored."""

from __future__ import annotations

from atts.core import Chunk, Role, Turn


def tokens_written(turn: Turn, author: Role) -> int:
    """Tokens this model wrote in the turn, discarded ones included."""
    return sum(len(chunk.logprobs) for chunk in (*turn.discarded, *turn.chunks) if chunk.author == author)


def scored_chunk(turn: Turn) -> Chunk | None:
    """The draft's chunk that the target scored, kept or discarded; None where no chunk was scored."""
    drafted = [chunk for chunk in (*turn.discarded, *turn.chunks) if chunk.author == "draft"]
    return drafted[0] if drafted and turn.score is not None else None
