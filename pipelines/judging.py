"""Judging of a chunk: its features, the target's score where the gate asks for one, the gate's
decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import anyio

from atts.concurrency import collect
from atts.core import Chunk, Decision, Features, ScoreRequest, Usage
from atts.errors import (
    CalibrationInputError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    ModelLoadError,
    UnsupportedByEngine,
)
from atts.pipelines.builder import Proposal, RolloutBuilder, rollout_name
from atts.pipelines.gates import Gate, RoundGate
from atts.pipelines.scores import evidence, first_doubt, score_of
from atts.pipelines.siblings import KnownScore

Round = Mapping[int, tuple[Features, float]]


class ChunkJudge:
    """Asks a gate about one chunk at a time, with the target's score where the gate wants it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def judge(self, builder: RolloutBuilder, proposal: Proposal) -> tuple[Decision, Proposal]:
        """The gate's decision, which it is told will be carried out. What cannot be judged is
        escalated.
        """
        known = features(builder, proposal)
        decision, proposal = await self._decide(builder, proposal, known)
        self._gate.observe(decision, decision.action == "escalate")
        if proposal.is_recalled and builder.draws and decision.escalate:
            return decision, await _drawn_beside(builder, proposal)
        return decision, proposal

    async def _decide(
        self, builder: RolloutBuilder, proposal: Proposal, known: Features
    ) -> tuple[Decision, Proposal]:
        decision = self._gate.preview(known)
        if decision.action != "verify":
            return decision, proposal
        known = replace(known, issue=decision.issue)
        if not proposal.chunk.target_ids:
            return _forced(known, "the draft wrote nothing"), proposal
        proposal = await scored_once(builder, proposal)
        if proposal.score is None or proposal.flaw:
            return _forced(known, f"not scored: {proposal.flaw}"), replace(proposal, score=None)
        try:
            return self._gate.decide(known, proposal.score), proposal
        except CalibrationInputError as error:
            return _forced(known, f"not a score: {error}"), proposal


class RoundJudge:
    """Has a gate rank each round of siblings: every rollout waits for all that still run. This is
    the barrier.
    """

    def __init__(self, gate: RoundGate) -> None:
        self._gate = gate
        self._round: Round = {}
        self._ranked: Mapping[int, Decision] = {}

    async def judge(self, builder: RolloutBuilder, proposal: Proposal) -> tuple[Decision, Proposal]:
        """The gate's decision about this member of the round."""
        known = features(builder, proposal)
        if proposal.chunk.target_ids:
            proposal = await scored(builder, proposal)
        round_ = await builder.scope.meet(
            (known, math.nan if proposal.score is None else proposal.score)
        )
        return self._ranking(round_)[builder.rollout.sample], proposal

    def _ranking(self, round_: Round) -> Mapping[int, Decision]:
        """The decisions of a round, made once by its first member; every member sees the same."""
        # no round begins before every member has read the last one's decisions
        if self._round is not round_:
            decisions = self._gate.decide_round([round_[sample] for sample in sorted(round_)])
            self._round = round_
            self._ranked = dict(zip(sorted(round_), decisions, strict=True))
        return self._ranked


Judge = ChunkJudge | RoundJudge


def make_judge(gate: Gate | RoundGate) -> Judge:
    """The judge that asks this gate; made once per problem, for finding out a gate's kind is slow."""
    return RoundJudge(gate) if isinstance(gate, RoundGate) else ChunkJudge(gate)


async def scored_once(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """The proposal with its score: that of an equal chunk after an equal beginning, or the target
    is asked.

    Where a sibling has asked and waits for the answer, it came first: waiting with it is shorter
    than asking. Who asked in an earlier session asks again, and is answered by what was recorded.
    """
    if builder.policy.verification == "rating":
        return await scored(builder, proposal)
    scores = builder.siblings.scores
    asking = builder.siblings.asking
    place = proposal.place
    while place in asking:
        await builder.scope.wait(asking[place], builder.turn)
    known = scores.get(place)
    if builder.target.has_recorded_calls:
        request = _request(builder, proposal.chunk)
        if builder.target.recorded_scores(request) is not None:
            known = None  # this rollout asked in the earlier session, so it asks again
        else:
            known = known or _recalled(builder, proposal.chunk, request)
    if known:
        return replace(proposal, score=known.score, doubt=known.doubt, is_recalled=True)
    asking[place] = anyio.Event()
    try:
        proposal = await scored(builder, proposal)
        if proposal.score is not None and not proposal.flaw:
            scores[place] = KnownScore(proposal.score, proposal.doubt)
    finally:
        asking.pop(place).set()
    return proposal


def _recalled(builder: RolloutBuilder, chunk: Chunk, request: ScoreRequest) -> KnownScore | None:
    """Return what an earlier session recorded for the sibling that asked."""
    for sample in range(builder.policy.samples):
        scores = builder.target.recorded_scores(_asked_by(sample, builder, request))
        if scores is None:
            continue
        score = score_of(builder.score, scores.logprobs, chunk)
        if math.isnan(score):
            continue
        doubt = first_doubt(scores.logprobs, chunk.logprobs) if builder.finds_doubt else 0
        return KnownScore(score, doubt)
    return None


def _asked_by(sample: int, builder: RolloutBuilder, request: ScoreRequest) -> ScoreRequest:
    name = rollout_name(builder.rollout.problem, sample)
    draw = request.draw
    if draw:
        draw = replace(draw, rollout=name, seed=replace(draw.seed, sample=sample))
    return replace(request, rollout=name, draw=draw)


def _request(builder: RolloutBuilder, chunk: Chunk) -> ScoreRequest:
    draw = builder.request("target") if builder.draws else None
    prefix = draw.ids if draw else builder.ids("target")
    return ScoreRequest(prefix, chunk.target_ids, builder.name, turn=builder.turn, draw=draw)


async def _drawn_beside(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """A recalled proposal that goes, read after all: for what the target draws in its place
    meanwhile.
    """
    return replace(proposal, begun=(await scored(builder, proposal)).begun)


async def scored(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """The proposal with the target's score, or with the reason why there is none."""
    if builder.policy.verification == "rating":
        return await _rated(builder, proposal)
    request = _request(builder, proposal.chunk)
    try:
        scores = await builder.target.score(request)
    except EngineError as error:
        return replace(proposal, flaw=_excused(error))
    # the suffix is counted as scored, not as read
    read = max(0, len(request.prefix) - scores.cached_tokens)
    builder.count(Usage(scored_tokens=len(request.suffix), target_prefill_tokens=read, calls=1))
    score = score_of(builder.score, scores.logprobs, proposal.chunk)
    flaw = "" if not math.isnan(score) else "the score is not a number"
    doubt = first_doubt(scores.logprobs, proposal.chunk.logprobs) if builder.finds_doubt else 0
    return replace(proposal, score=score, flaw=flaw, doubt=doubt, begun=scores.begun)


async def _rated(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """The target's rating 0-9 of the chunk: the mean of its next-token law over the digits, after a
    question.
    """
    target = builder.target
    prefix = builder.ids("target", [proposal.chunk]) + target.tokenizer.encode(
        builder.policy.rating_text
    )
    digits = [target.tokenizer.encode(str(digit)) for digit in range(10)]
    requests = [ScoreRequest(prefix, ids, builder.name, turn=builder.turn) for ids in digits]

    async def rate(request: ScoreRequest) -> float:
        return math.fsum((await target.score(request)).logprobs)

    try:
        logprobs = await collect([partial(rate, request) for request in requests])
    except EngineError as error:
        return replace(proposal, flaw=_excused(error))
    builder.count(
        Usage(scored_tokens=10, target_prefill_tokens=len(proposal.chunk.target_ids), calls=10)
    )
    top = max(logprobs)
    if not math.isfinite(top):
        return replace(proposal, flaw="the target gives no digit any probability")
    masses = [math.exp(value - top) for value in logprobs]
    mean = math.fsum(digit * mass for digit, mass in enumerate(masses)) / math.fsum(masses)
    return replace(proposal, score=mean)


def features(builder: RolloutBuilder, proposal: Proposal) -> Features:
    """What a gate may know of a proposal."""
    chunk = proposal.chunk
    rollout = builder.rollout
    answered, share, agrees = builder.siblings.agreement(rollout.sample, proposal.answer)
    return Features(
        question=rollout.problem,
        turn=builder.turn,
        sample=rollout.sample,
        left=builder.context.left.share,
        tokens=chunk.tokens,
        draft_logprob=evidence(builder.score, chunk),
        has_answer=proposal.answer is not None,
        answered=answered,
        agreement=share,
        agrees=agrees,
        is_scored=proposal.place in builder.siblings.scores,
        text=chunk.text,
    )


def _forced(known: Features, why: str) -> Decision:
    place = (known.question, known.turn, known.sample, known.issue)
    return Decision("escalate", math.nan, *place, why=f"forced: {why}", origin="forced")


def _excused(error: EngineError) -> str:
    """The words of an answer that is none, which is met by escalating. An engine that is not there
    decides nothing.

    :raises EngineError: the engine is lost, or cannot score at all.
    """
    if isinstance(error, EngineUnavailable | EngineTimeout | UnsupportedByEngine | ModelLoadError):
        raise error
    return str(error)
