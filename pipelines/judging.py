"""How a proposal comes to a decision: evidence, the target's score if the gate wants it, the gate's word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from atts.core import Decision, ScoreRequest, Usage
from atts.errors import CalibrationInputError, EngineError, ModelLoadError, UnsupportedByEngine
from atts.pipelines.asking import ask_score
from atts.pipelines.chunks import shared
from atts.pipelines.gates import Features, Gate, RoundGate
from atts.pipelines.line import Line, Proposal
from atts.pipelines.scores import evidence, first_doubt, score_of
from atts.tasks import collect


async def judge(line: Line, proposal: Proposal, gate: Gate) -> tuple[Decision, Proposal]:
    """Ask the gate, with the target's score if the gate wants it. What cannot be judged is escalated."""
    known = features(line, proposal)
    decision, proposal = await _judge(line, proposal, gate, known)
    line.siblings.judged.append((known, decision))
    return decision, proposal


async def _judge(line: Line, proposal: Proposal, gate: Gate, known: Features) -> tuple[Decision, Proposal]:
    decision = gate.preview(known)
    if decision.action != "verify":
        return decision, proposal
    known = replace(known, issue=decision.issue)
    if not proposal.chunk.target_ids:
        return _forced(known, "the draft wrote nothing"), proposal
    proposal = await scored(line, proposal)
    if proposal.score is None or proposal.flaw:
        return _forced(known, f"not scored: {proposal.flaw}"), replace(proposal, score=None)
    try:
        return gate.decide(known, proposal.score), proposal
    except CalibrationInputError as error:
        return _forced(known, f"not a score: {error}"), proposal


async def judge_together(line: Line, proposal: Proposal, gate: RoundGate) -> tuple[Decision, Proposal]:
    """Have the whole round ranked: wait for every sibling that is still running. This is the barrier."""
    known = features(line, proposal)
    if proposal.chunk.target_ids:
        proposal = await scored(line, proposal)
    round_ = await line.scope.meet((known, math.nan if proposal.score is None else proposal.score))
    return line.siblings.ranked(round_, gate)[line.rollout.sample], proposal


async def scored(line: Line, proposal: Proposal) -> Proposal:
    """The proposal with the target's score, or with the reason why there is none."""
    if line.policy.verification == "rating":
        return await _rated(line, proposal)
    prefix, suffix = line.ids("target"), proposal.chunk.target_ids
    request = ScoreRequest(prefix, suffix, line.name)
    tokens = len(prefix) + len(suffix)
    limit = line.policy.timeout_seconds
    call = line.scope.call(
        "score", ask_score, line.context.target, request, limit, engine="target", turn=line.turn, tokens=tokens
    )
    try:
        scores = await call
    except EngineError as error:
        return replace(proposal, flaw=_excused(error))
    read = max(0, len(prefix) - scores.cached_tokens)  # the suffix is counted as scored, not as read
    line.count(Usage(scored_tokens=len(suffix), target_prefill_tokens=read, calls=1))
    score = score_of(line.score, scores.logprobs, proposal.chunk)
    flaw = "" if not math.isnan(score) else "the score is not a number"
    return replace(proposal, score=score, flaw=flaw, doubt=_doubt(line, proposal, scores.logprobs))


def _doubt(line: Line, proposal: Proposal, theirs: Sequence[float]) -> int:
    """Where the target's doubt begins; 0 between tokenizers, and where the draft's numbers are of another kind."""
    draft, target = line.context.draft, line.context.target
    comparable = shared(draft, target) and draft.spec.logprobs == "raw"
    return first_doubt(theirs, proposal.chunk.logprobs) if comparable else 0


async def _rated(line: Line, proposal: Proposal) -> Proposal:
    """The target's rating 0-9 of the chunk: the mean of its next-token law over the digits, after a question."""
    target = line.context.target
    prefix = line.ids("target", [proposal.chunk]) + target.tokenizer.encode(line.policy.rating_text)
    digits = [target.tokenizer.encode(str(digit)) for digit in range(10)]
    requests = [ScoreRequest(prefix, ids, line.name) for ids in digits]

    async def rate(request: ScoreRequest) -> float:
        tokens = len(request.prefix) + len(request.suffix)
        limit = line.policy.timeout_seconds
        call = line.scope.call(
            "score", ask_score, target, request, limit, engine="target", turn=line.turn, tokens=tokens
        )
        return math.fsum((await call).logprobs)

    try:
        logprobs = await collect([partial(rate, request) for request in requests])
    except EngineError as error:
        return replace(proposal, flaw=_excused(error))
    line.count(Usage(scored_tokens=10, target_prefill_tokens=len(proposal.chunk.target_ids), calls=10))
    top = max(logprobs)
    if not math.isfinite(top):
        return replace(proposal, flaw="the target gives no digit any probability")
    masses = [math.exp(value - top) for value in logprobs]
    mean = math.fsum(digit * mass for digit, mass in enumerate(masses)) / math.fsum(masses)
    return replace(proposal, score=mean)


def features(line: Line, proposal: Proposal) -> Features:
    """What a gate may know of a proposal."""
    chunk, rollout = proposal.chunk, line.rollout
    answered, share, agrees = line.siblings.agreement(rollout.sample, proposal.answer)
    return Features(
        rollout.problem,
        line.turn,
        rollout.sample,
        None,
        proposal.attempt,
        chunk.tokens,
        evidence(line.score, chunk),
        proposal.answer is not None,
        answered,
        share,
        agrees,
        chunk.text,
    )


def _forced(known: Features, why: str) -> Decision:
    place = (known.question, known.turn, known.sample, known.issue)
    return Decision("escalate", math.nan, *place, why=f"forced: {why}", origin="forced")


def _excused(error: EngineError) -> str:
    """The words of a failure that may be met by escalating; what would meet every chunk alike goes up.

    :raises UnsupportedByEngine: the engine cannot score at all.
    """
    if isinstance(error, UnsupportedByEngine | ModelLoadError):
        raise error
    return str(error)
