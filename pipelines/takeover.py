"""Takeover of a rejected chunk: the target continues, replaces or repairs it."""

from __future__ import annotations

from atts.core import Decision
from atts.pipelines.builder import Proposal, RolloutBuilder
from atts.pipelines.chunks import part_of


async def take_over(builder: RolloutBuilder, proposal: Proposal, decision: Decision) -> None:
    """Carry out an escalation as the policy says and close the turn."""
    mode = builder.policy.takeover
    if mode == "replace":
        await _replace(builder, proposal, decision)
    elif mode == "repair":
        await _repair(builder, proposal, decision)
    else:
        await _continue(builder, proposal, decision)


async def _continue(builder: RolloutBuilder, proposal: Proposal, decision: Decision) -> None:
    """The chunk stays, the target goes on: the paper's mode."""
    chunk = proposal.chunk
    kept = [chunk] if chunk.text or chunk.draft_ids or chunk.target_ids else []
    if builder.room_left(kept) < 1:
        return builder.enter(
            kept, (), decision, proposal.score, proposal.flaw or "no room left for the target"
        )
    written = await builder.write("target", kept)
    return builder.enter([*kept, written], (), decision, proposal.score, proposal.flaw)


async def _replace(builder: RolloutBuilder, proposal: Proposal, decision: Decision) -> None:
    """The chunk goes, the target writes in its place, with a stream of its own: the chunk changes
    no token of it.
    """
    written = await builder.replace(proposal)
    builder.enter([written], [proposal.chunk], decision, proposal.score, proposal.flaw)


async def _repair(builder: RolloutBuilder, proposal: Proposal, decision: Decision) -> None:
    """The chunk stays up to the token that the target doubts first, the target goes on from there.

    Without such a token, and between tokenizers, that is to replace it.
    """
    kept = part_of(proposal.chunk, proposal.doubt, builder.draft)
    if kept is None or builder.room_left([kept]) < 1:
        return await _replace(builder, proposal, decision)
    written = await builder.write("target", [kept])
    note = f"{kept.tokens} of {proposal.chunk.tokens} tokens stay"
    return builder.enter(
        [kept, written], [proposal.chunk], decision, proposal.score, note, kept.tokens
    )
