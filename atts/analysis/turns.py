"""Facts of one recorded turn: tokens by model, and the chunk that was judged."""

from __future__ import annotations

from collections.abc import Iterable

from atts.core import Chunk, Role, Turn, Usage


def tokens_written(turn: Turn, author: Role) -> int:
    """Count the tokens that this model wrote in the turn, discarded tokens included."""
    chunks = [chunk for chunk in (*turn.discarded, *turn.chunks) if chunk.author == author]
    return sum(chunk.tokens for chunk in chunks if is_written(turn, chunk))


def usage_of(turns: Iterable[Turn]) -> Usage:
    """Return the tokens of some turns of a rollout."""
    found = Usage()
    for turn in turns:
        found += Usage(
            tokens_written(turn, "draft"), tokens_written(turn, "target"), turn.scored_tokens
        )
    return found


def is_written(turn: Turn, chunk: Chunk) -> bool:
    """Return True if a model wrote the chunk in this turn.

    Forced words were put in, and a part of a discarded chunk was written with the whole.
    """
    if chunk.logprobs:
        return True
    wholes = [
        whole for whole in turn.discarded if whole is not chunk and whole.author == chunk.author
    ]
    return not (
        turn.is_forced
        or any(whole.target_ids[: len(chunk.target_ids)] == chunk.target_ids for whole in wholes)
    )


def was_cut_short(turn: Turn) -> bool:
    """Return True if the turn was judged and not carried out, because its rollout was stopped."""
    return bool(turn.discarded) and not turn.chunks
