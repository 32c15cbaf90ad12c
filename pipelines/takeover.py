"""What happens to a rejected chunk: the target goes on after it, rewrites or mends it, or the draft tries again."""

from __future__ import annotations

from atts.core import Decision, Rollout
from atts.pipelines.chunks import part_of
from atts.pipelines.gates import Gate
from atts.pipelines.judging import judge
from atts.pipelines.line import Line, Proposal
from atts.seeds import Seed, generator


async def take_over(line: Line, proposal: Proposal, decision: Decision, gate: Gate | None) -> None:
    """Carry out an escalation as the policy says and close the turn."""
    mode = line.policy.takeover
    if mode == "replace":
        await _replace(line, proposal, decision)
    elif mode == "repair":
        await _repair(line, proposal, decision)
    elif mode == "resample" and gate is not None:
        await _resample(line, proposal, decision, gate)
    elif mode == "retry":
        await _retry(line, proposal, decision, gate)
    elif mode == "fork" and _fork(line, proposal, decision):
        return
    else:
        await _continue(line, proposal, decision)


async def _continue(line: Line, proposal: Proposal, decision: Decision) -> None:
    """The chunk stays, the target goes on: the paper's mode."""
    chunk = proposal.chunk
    kept = [chunk] if chunk.text or chunk.draft_ids or chunk.target_ids else []
    if line.room_left(kept) < 1:
        return line.enter(kept, (), decision, proposal.score, proposal.flaw or "no room left for the target")
    written = await line.write("target", kept)
    return line.enter([*kept, written], (), decision, proposal.score, proposal.flaw)


async def _replace(line: Line, proposal: Proposal, decision: Decision) -> None:
    """The chunk goes, the target writes in its place from a fresh start: nothing of the chunk is used as a proposal."""
    written = await line.write("target", ())
    line.enter([written], [proposal.chunk], decision, proposal.score, proposal.flaw)


async def _repair(line: Line, proposal: Proposal, decision: Decision) -> None:
    """The chunk stays up to the token that the target doubts first, the target goes on from there.

    Without such a token, and between tokenizers, that is to replace it.
    """
    kept = part_of(proposal.chunk, proposal.doubt, line.engine("draft"))
    if kept is None or line.room_left([kept]) < 1:
        return await _replace(line, proposal, decision)
    written = await line.write("target", [kept])
    note = f"{kept.tokens} of {proposal.chunk.tokens} tokens stay"
    return line.enter([kept, written], [proposal.chunk], decision, proposal.score, note, kept.tokens)


async def _resample(line: Line, proposal: Proposal, decision: Decision, gate: Gate) -> None:
    """The draft tries again until a chunk passes; if none does, the one of lowest perplexity is kept."""
    tried = await _attempts(line, proposal, decision, gate)
    passed = not tried[-1][1].escalate
    kept = len(tried) - 1 if passed else min(range(len(tried)), key=lambda i: _worth(tried[i][0]))
    _keep(line, tried, kept, "passed" if passed else "kept, none passed")


async def _retry(line: Line, proposal: Proposal, decision: Decision, gate: Gate | None) -> None:
    """The draft tries again until a chunk passes; if none does, the target writes in their place."""
    tried = [(proposal, decision)] if gate is None else await _attempts(line, proposal, decision, gate)
    proposal, decision = tried[-1]
    if not decision.escalate:
        return _keep(line, tried, len(tried) - 1, "passed")
    written = await line.write("target", ())
    note = proposal.flaw or f"none of {len(tried)} attempts passed"
    return line.enter([written], [other.chunk for other, _ in tried], decision, proposal.score, note)


async def _attempts(line: Line, proposal: Proposal, decision: Decision, gate: Gate) -> list[tuple[Proposal, Decision]]:
    """The rejected chunk and the draft's further attempts, up to one that passes or the last; each is a decision."""
    tried = [(proposal, decision)]
    for attempt in range(1, line.policy.attempts):
        if not decision.escalate:
            break
        proposal = await line.propose(attempt)
        decision, proposal = await judge(line, proposal, gate)
        gate.observe(decision, decision.escalate)
        tried.append((proposal, decision))
    return tried


def _keep(line: Line, tried: list[tuple[Proposal, Decision]], kept: int, how: str) -> None:
    rest = [other.chunk for i, (other, _) in enumerate(tried) if i != kept]
    proposal, decision = tried[kept]
    line.enter(
        [proposal.chunk], rest, decision, proposal.score, proposal.flaw or f"attempt {kept} of {len(tried)} {how}"
    )


def _worth(proposal: Proposal) -> tuple[bool, float]:
    return proposal.score is None, proposal.score or 0.0


def _fork(line: Line, proposal: Proposal, decision: Decision) -> bool:
    """Adopt a better sibling's line up to this turn, if there is one nobody has adopted at this turn.

    Better: its chunk at this turn scored lower. One is drawn at random among all better ones (taking the best each time
    is what makes rollouts herd), and each can be adopted once per turn, so diversity is kept.
    """
    mine, turn = line.rollout, line.turn
    score = proposal.score
    better = [other for other in _candidates(line) if score is None or (other.turns[turn].score or 0.0) < score]
    if not better:
        return False
    draw = generator(Seed(line.context.seed, mine.problem, mine.sample, turn, "draft", purpose="fork"))
    chosen = better[int(draw.integers(len(better)))]
    line.siblings.claimed.add((chosen.sample, turn))
    line.adopt(chosen, proposal.chunk, decision, proposal.score)
    return True


def _candidates(line: Line) -> list[Rollout]:
    siblings = line.siblings
    return [
        other
        for sample, other in sorted(siblings.rollouts.items())
        if sample != line.rollout.sample
        and len(other.turns) > line.turn + (other.finish is not None)  # not its last turn: an answer is not copied
        and other.turns[line.turn].score is not None
        and (sample, line.turn) not in siblings.claimed
    ]
