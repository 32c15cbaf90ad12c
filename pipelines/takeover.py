"""Takeover of a rejected chunk: the target continues, replaces or repairs it, or the draft tries
again.
"""

from __future__ import annotations

from atts.core import Decision, Rollout
from atts.pipelines.builder import Proposal, RolloutBuilder
from atts.pipelines.chunks import part_of
from atts.pipelines.judging import Judge
from atts.sampling import Seed, generator


async def take_over(
    builder: RolloutBuilder, proposal: Proposal, decision: Decision, judge: Judge
) -> None:
    """Carry out an escalation as the policy says and close the turn."""
    mode = builder.policy.takeover
    if mode == "replace":
        await _replace(builder, proposal, decision)
    elif mode == "repair":
        await _repair(builder, proposal, decision)
    elif mode == "resample" and judge.can_retry:
        await _resample(builder, proposal, decision, judge)
    elif mode == "retry":
        await _retry(builder, proposal, decision, judge)
    elif mode == "fork" and _fork(builder, proposal, decision):
        return
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
    kept = part_of(proposal.chunk, proposal.doubt, builder.engine("draft"))
    if kept is None or builder.room_left([kept]) < 1:
        return await _replace(builder, proposal, decision)
    written = await builder.write("target", [kept])
    note = f"{kept.tokens} of {proposal.chunk.tokens} tokens stay"
    return builder.enter(
        [kept, written], [proposal.chunk], decision, proposal.score, note, kept.tokens
    )


async def _resample(
    builder: RolloutBuilder, proposal: Proposal, decision: Decision, judge: Judge
) -> None:
    """The draft tries again until a chunk passes; if none does, the one of lowest perplexity is
    kept.
    """
    tried = await _attempts(builder, proposal, decision, judge)
    passed = not tried[-1][1].escalate
    kept = len(tried) - 1 if passed else min(range(len(tried)), key=lambda i: _worth(tried[i][0]))
    _keep(builder, tried, kept, "passed" if passed else "kept, none passed")


async def _retry(
    builder: RolloutBuilder, proposal: Proposal, decision: Decision, judge: Judge
) -> None:
    """The draft tries again until a chunk passes; if none does, the target writes in their place."""
    tried = (
        [(proposal, decision)]
        if not judge.can_retry
        else await _attempts(builder, proposal, decision, judge)
    )
    proposal, decision = tried[-1]
    if not decision.escalate:
        return _keep(builder, tried, len(tried) - 1, "passed")
    written = await builder.write("target", ())
    note = proposal.flaw or f"none of {len(tried)} attempts passed"
    return builder.enter(
        [written], [other.chunk for other, _ in tried], decision, proposal.score, note
    )


Judged = tuple[Proposal, Decision]


async def _attempts(
    builder: RolloutBuilder, proposal: Proposal, decision: Decision, judge: Judge
) -> list[Judged]:
    """The rejected chunk and the draft's further attempts, up to one that passes or the last; each
    is a decision.
    """
    tried = [(proposal, decision)]
    for attempt in range(1, builder.policy.attempts):
        if not decision.escalate:
            break
        proposal = await builder.propose(attempt)
        decision, proposal = await judge.judge(builder, proposal)
        tried.append((proposal, decision))
    return tried


def _keep(builder: RolloutBuilder, tried: list[Judged], kept: int, how: str) -> None:
    rest = [other.chunk for i, (other, _) in enumerate(tried) if i != kept]
    proposal, decision = tried[kept]
    builder.enter(
        [proposal.chunk],
        rest,
        decision,
        proposal.score,
        proposal.flaw or f"attempt {kept} of {len(tried)} {how}",
    )


def _worth(proposal: Proposal) -> tuple[bool, float]:
    return proposal.score is None, proposal.score or 0.0


def _fork(builder: RolloutBuilder, proposal: Proposal, decision: Decision) -> bool:
    """Adopt a better sibling's line up to this turn, if there is one not adopted yet at this turn.

    Better: its chunk at this turn scored lower. One is drawn at random among all better ones
    (taking the best each time is what makes rollouts herd), and each can be adopted once per turn,
    so diversity is kept.
    """
    mine = builder.rollout
    turn = builder.turn
    score = proposal.score
    better = [
        other
        for other in _candidates(builder)
        if score is None or (other.turns[turn].score or 0.0) < score
    ]
    if not better:
        return False
    draw = generator(
        Seed(builder.context.seed, mine.problem, mine.sample, turn, "draft", purpose="fork")
    )
    chosen = better[int(draw.integers(len(better)))]
    builder.siblings.claimed.add((chosen.sample, turn))
    builder.adopt(chosen, proposal.chunk, decision, proposal.score)
    return True


def _candidates(builder: RolloutBuilder) -> list[Rollout]:
    siblings = builder.siblings
    return [
        other
        for sample, other in sorted(siblings.rollouts.items())
        if sample != builder.rollout.sample
        and len(other.turns)
        > builder.turn + (other.finish is not None)  # not its last turn: an answer is not copied
        and other.turns[builder.turn].score is not None
        and (sample, builder.turn) not in siblings.claimed
    ]
