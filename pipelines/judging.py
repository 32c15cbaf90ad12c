"""Judge chunks: request the score from the target, and let the gate decide."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from atts.concurrency import collect
from atts.core import Chunk, Decision, Features, SampleRequest, ScoreRequest, Usage
from atts.engine import Tokenizer
from atts.errors import (
    CalibrationInputError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    ModelLoadError,
    UnsupportedByEngine,
    UnusableScores,
    UsageError,
)
from atts.graph import Arrival
from atts.pipelines.builder import KnownScore, Proposal, RolloutBuilder, RolloutEngine, rollout_name
from atts.pipelines.gates import Gate, RoundGate
from atts.pipelines.scores import (
    continuation_score,
    evidence,
    first_rejected_token,
    judge_features,
    kind_of,
    mean_logprob,
    score_of,
)
from atts.sampling import Seed

Round = Mapping[int, tuple[Features, float]]

# The error message if a gate decides "verify" although the chunk already has a score. Without this
# error, the chunk would be accepted.
NOT_FINAL = (
    "the gate decided 'verify' on a chunk that already has a score; the gate's methods decide and "
    "decide_round must return 'accept' or 'escalate'"
)


class ChunkJudge:
    """A judge that asks a gate about one chunk at a time, with the target's score if the gate
    requests it.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def judge(self, builder: RolloutBuilder, proposal: Proposal) -> tuple[Decision, Proposal]:
        """Return the gate's decision and the scored proposal, after reporting the decision to the
        gate.

        A chunk without a usable score is escalated.

        :raises UsageError: if the gate requests a score for a chunk that already has one.
        """
        known = features(builder, proposal)
        decision, proposal = await self._decide(builder, proposal, known)
        is_escalated = decision.action == "escalate"
        self._gate.observe(decision, is_escalated)
        if is_escalated and proposal.score_reused and builder.draws:
            # The score was copied from a sibling, so the target has not scored this chunk. Score it
            # now, because the same call also samples the first tokens of the replacement.
            read = await score_by_target(builder, proposal)
            proposal = replace(proposal, beginning=read.beginning)
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
        proposal = await score_or_reuse(builder, proposal)
        if proposal.score is None or proposal.flaw:
            return _forced(known, f"not scored: {proposal.flaw}"), replace(proposal, score=None)
        try:
            decision = self._gate.decide(known, proposal.score)
        except CalibrationInputError as error:
            return _forced(known, f"not a score: {error}"), proposal
        if decision.action == "verify":
            raise UsageError(NOT_FINAL)
        return decision, proposal


class RoundJudge:
    """A judge that lets a gate rank the chunks of all rollouts of a problem, one round at a time.

    Each round is a barrier: every rollout waits for all siblings that are still running.
    """

    def __init__(self, gate: RoundGate) -> None:
        self._gate = gate
        self._round: Round = {}
        self._ranked: Mapping[int, Decision] = {}

    async def judge(self, builder: RolloutBuilder, proposal: Proposal) -> tuple[Decision, Proposal]:
        """Return the gate's decision on this rollout's chunk of the round, and the scored proposal.

        :raises UsageError: if the gate requests a score for a chunk that already has one.
        """
        known = features(builder, proposal)
        if proposal.chunk.target_ids:
            proposal = await score_by_target(builder, proposal)
        score = math.nan if proposal.score is None else proposal.score
        round_ = await builder.scope.meet((known, score))
        return self._ranking(round_)[builder.rollout.sample], proposal

    def _ranking(self, round_: Round) -> Mapping[int, Decision]:
        """Return the decisions of a round, keyed by sample number. The gate ranks all chunks once,
        in the first call of each round.
        """
        # All rollouts of a round get the same `round_` object. When a new object comes, every
        # rollout has already read its decision of the previous round.
        if self._round is not round_:
            samples = sorted(round_)
            decisions = self._gate.decide_round([round_[sample] for sample in samples])
            if any(decision.action == "verify" for decision in decisions):
                raise UsageError(NOT_FINAL)
            self._round = round_
            self._ranked = dict(zip(samples, decisions, strict=True))
        return self._ranked


Judge = ChunkJudge | RoundJudge


def make_judge(gate: Gate | RoundGate) -> Judge:
    """Return the judge for a gate; call this once per problem, because it is slow to check a gate's
    kind.
    """
    return RoundJudge(gate) if isinstance(gate, RoundGate) else ChunkJudge(gate)


def features(builder: RolloutBuilder, proposal: Proposal) -> Features:
    """Return the features of a proposed chunk that a gate may use."""
    chunk = proposal.chunk
    rollout = builder.rollout
    answered, share, agrees = builder.siblings.agreement(rollout.sample, proposal.answer)
    return Features(
        question=rollout.problem,
        turn=builder.turn,
        sample=rollout.sample,
        left=builder.context.left.share,
        tokens=chunk.tokens,
        draft_logprob=mean_logprob(chunk),
        draft_evidence=evidence(builder.score_rule, chunk),
        has_answer=proposal.answer is not None,
        answered=answered,
        agreement=share,
        agrees=agrees,
        text=chunk.text,
    )


def _forced(known: Features, why: str) -> Decision:
    return Decision(
        "escalate",
        math.nan,
        known.question,
        known.turn,
        known.sample,
        known.issue,
        why=f"forced: {why}",
        origin="forced",
    )


async def score_or_reuse(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with its score. If a sibling has the same chunk after the same text,
    the sibling's score is copied.

    If a sibling has already requested this score, the rollout waits for that reply. If that call
    fails, one of the waiting rollouts asks the target itself. A rollout that asked in an earlier
    session asks again, and gets the recorded score.
    """
    if builder.score_source != "log-probabilities":
        return await score_by_target(builder, proposal)
    scores = builder.siblings.scores
    pending = builder.siblings.pending_scores
    position = proposal.position
    while (arrival := pending.get(position)) is not None and not arrival.event.is_set():
        await builder.scope.wait(arrival, builder.turn)
    known = scores.get(position)
    if builder.target.has_recorded_calls:
        request = _request(builder, proposal.chunk)
        if builder.target.recorded_scores(request) is not None:
            # In an earlier session, this rollout requested the score itself instead of copying it.
            # Make the same request again, so that its recorded reply is used.
            known = None
        elif known is None:
            known = _recorded_for_sibling(builder, proposal.chunk, request)
    if known is not None:
        return replace(
            proposal,
            score=known.score,
            first_rejected=known.first_rejected,
            score_reused=True,
        )
    scope = builder.scope
    promised = Arrival()
    scope.promised = promised
    pending[position] = promised
    try:
        proposal = await score_by_target(builder, proposal)
        if proposal.score is not None and not proposal.flaw:
            scores[position] = KnownScore(proposal.score, proposal.first_rejected)
    finally:
        if pending.get(position) is promised:
            del pending[position]
        scope.promised = None
        promised.nodes = scope.frontier
        promised.event.set()
    return proposal


def _recorded_for_sibling(
    builder: RolloutBuilder, chunk: Chunk, request: ScoreRequest
) -> KnownScore | None:
    """Return the score that an earlier session recorded for a sibling's identical call, or None."""
    for sample in range(builder.policy.samples):
        name = rollout_name(builder.rollout.problem, sample)
        draw = request.draw
        if draw is not None:
            draw = replace(draw, rollout=name, seed=replace(draw.seed, sample=sample))
        siblings_request = replace(request, rollout=name, draw=draw)
        scores = builder.target.recorded_scores(siblings_request)
        if scores is None:
            continue
        score = score_of(builder.score_rule, scores.logprobs, chunk)
        if math.isnan(score):
            continue
        first_rejected = 0
        if builder.needs_first_rejected:
            first_rejected = first_rejected_token(scores.logprobs, chunk.logprobs)
        return KnownScore(score, first_rejected)
    return None


def _request(builder: RolloutBuilder, chunk: Chunk) -> ScoreRequest:
    draw = builder.request("target") if builder.draws else None
    prefix = builder.ids("target") if draw is None else draw.ids
    return ScoreRequest(prefix, chunk.target_ids, builder.name, turn=builder.turn, draw=draw)


async def score_by_target(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with its score, or with the reason why it has no score.

    A score that is computed from the draft's log-probabilities needs no call.

    :raises EngineError: if the engine is lost, or cannot score at all.
    """
    chunk = proposal.chunk
    source = builder.score_source
    if source == "question":
        return await _ask(builder, proposal)
    if source == "continuation":
        return await _compare_continuation(builder, proposal)
    if source == "entropy":
        return await _read_again(builder, proposal)
    if source == "reward":
        return await _reward(builder, proposal)
    if source == "draft":
        score = score_of(builder.score_rule, (), chunk)
        flaw = "the draft sends no log-probabilities" if math.isnan(score) else ""
        return replace(proposal, score=score, flaw=flaw)
    request = _request(builder, chunk)
    try:
        scores = await builder.target.score(request)
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    # `scored_tokens` counts the suffix, so `target_prefill_tokens` counts only the prefix.
    read = max(0, len(request.prefix) - scores.cached_tokens)
    builder.usage += Usage(scored_tokens=len(request.suffix), target_prefill_tokens=read, calls=1)
    if source == "judge":
        score = _learned_score(builder, proposal, scores.logprobs)
    else:
        score = score_of(builder.score_rule, scores.logprobs, chunk)
    first_rejected = 0
    if builder.needs_first_rejected:
        first_rejected = first_rejected_token(scores.logprobs, chunk.logprobs)
    return replace(
        proposal,
        score=score,
        flaw="the score is not a number" if math.isnan(score) else "",
        first_rejected=first_rejected,
        beginning=scores.beginning,
    )


def _learned_score(builder: RolloutBuilder, proposal: Proposal, logprobs: Sequence[float]) -> float:
    """Return the score that the run's learned judge predicts; NaN if the draft sends no
    log-probabilities.

    :raises UsageError: if the run has no judge.
    """
    judge = builder.context.judge
    if judge is None:
        raise UsageError(
            "score.kind learned needs a judge; set score.judge to the file of the judge"
        )
    answered, share, _ = builder.siblings.agreement(builder.rollout.sample, proposal.answer)
    known = judge_features(
        logprobs, proposal.chunk.logprobs, builder.turn, share if answered else None
    )
    return float(f"{judge(known):.5g}")


async def _read_again(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Let the draft read its chunk again, and return the proposal with a score from the draft's
    entropy at each token.
    """
    chunk = proposal.chunk
    request = ScoreRequest(
        builder.ids("draft"), chunk.draft_ids, builder.name, turn=builder.turn, entropies=True
    )
    try:
        scores = await builder.draft.score(request)
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    read = max(0, len(request.prefix) + len(request.suffix) - scores.cached_tokens)
    builder.usage += Usage(draft_prefill_tokens=read, calls=1)
    return replace(proposal, score=score_of(builder.score_rule, scores.logprobs, chunk))


async def _reward(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with the score from a reward model."""
    chunk = proposal.chunk
    written = [one.text for one in builder.rollout.chunks]
    steps = [text for text in written if text.strip()]
    # The reward model reads `texts`. The token ids only identify the call in the journal.
    ids = builder.ids("target", [chunk])
    request = ScoreRequest(
        ids[:-1],
        ids[-1:],
        builder.name,
        turn=builder.turn,
        texts=(builder.problem_text, *steps, chunk.text),
    )
    try:
        scores = await builder.target.score(request)
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    builder.usage += Usage(scored_tokens=len(chunk.target_ids), calls=1)
    return replace(proposal, score=score_of(builder.score_rule, scores.logprobs, chunk))


async def _ask(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with the score from the target's answer to a question about the chunk."""
    target = builder.target
    is_verdict = kind_of(builder.score_rule) == "verdict"
    questions = VERDICT_QUESTIONS if is_verdict else RATING_QUESTIONS
    before = builder.ids("target", [proposal.chunk])
    answers: list[list[float]] = []
    if not target.spec.capabilities & {"score", "rate"}:
        return await _ask_in_text(builder, proposal, questions, is_verdict=is_verdict)
    for question in questions:
        asked, words = question.texts(target.tokenizer)
        prefix = before + asked
        requests = [ScoreRequest(prefix, ids, builder.name, turn=builder.turn) for ids in words]
        try:
            answers.append(await collect([partial(_logprob, target, one) for one in requests]))
        except EngineError as error:
            return replace(proposal, flaw=_excuse(error))
    # Every request contains the chunk, but its tokens are counted once: later requests should find
    # them in the target's prefix cache.
    calls = sum(map(len, answers))
    read = len(proposal.chunk.target_ids)
    builder.usage += Usage(scored_tokens=calls, target_prefill_tokens=read, calls=calls)
    score = verdict_score(answers) if is_verdict else rating_score(answers)
    if math.isnan(score):
        return replace(proposal, flaw="the target gives probability 0 to every expected word")
    return replace(proposal, score=float(f"{score:.5g}"))


async def _ask_in_text(
    builder: RolloutBuilder,
    proposal: Proposal,
    questions: Sequence[Question],
    *,
    is_verdict: bool,
) -> Proposal:
    """Return the proposal with a score from short replies, for a target without log-probabilities.

    The share of replies that contain a word estimates the probability of the word.
    """
    target = builder.target
    rollout = builder.rollout
    before = builder.ids("target", [proposal.chunk])
    requests: list[SampleRequest] = []
    for question in questions:
        asked, _ = question.texts(target.tokenizer)
        for _ in range(_REPLIES // len(questions)):
            purpose = f"question {len(requests)}"
            seed = Seed(builder.context.seed, rollout.problem, rollout.sample, builder.turn, "target",
                        purpose=purpose)  # fmt: skip
            requests.append(
                SampleRequest(
                    before + asked, _REPLY_TOKENS, seed=seed, rollout=builder.name,
                    logprobs="unneeded",
                )
            )  # fmt: skip
    try:
        replies = await collect([partial(target.sample, request) for request in requests])
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    written = sum(len(reply.ids) for reply in replies)
    read = len(proposal.chunk.target_ids)
    builder.usage += Usage(
        target_tokens=written,
        wasted_tokens=written,
        target_prefill_tokens=read,
        calls=len(replies),
    )
    each = len(replies) // len(questions)
    counts = [
        question.counts([reply.text for reply in replies[place * each : (place + 1) * each]])
        for place, question in enumerate(questions)
    ]
    if not any(map(sum, counts)):
        return replace(proposal, flaw="none of the target's replies contains an expected word")
    # 0.5 is added to each count (Jeffreys' prior). So a word that is in no reply does not get
    # probability 0.
    answers = [[math.log(count + 0.5) for count in row] for row in counts]
    score = verdict_score(answers) if is_verdict else rating_score(answers)
    return replace(proposal, score=float(f"{score:.5g}"))


async def _compare_continuation(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Score the chunk by comparing it with the text that the target writes in its place. Return the
    scored proposal.
    """
    target = builder.target
    request = builder.request("target")
    seed = replace(request.seed, purpose="continuation")
    request = replace(
        request,
        max_tokens=min(request.max_tokens, _CONTINUED),
        sampling=replace(request.sampling, temperature=0.0),
        seed=seed,
        logprobs="unneeded",
    )
    try:
        own = await target.sample(request)
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    written = len(own.ids)
    read = max(0, len(request.ids) - own.cached_tokens)
    builder.usage += Usage(
        target_tokens=written, wasted_tokens=written, target_prefill_tokens=read, calls=1
    )
    return replace(proposal, score=continuation_score(proposal.chunk.text, own.text))


async def _logprob(target: RolloutEngine, request: ScoreRequest) -> float:
    """Return the log-probability of the word in the request's suffix, summed over the word's
    tokens.
    """
    return math.fsum((await target.score(request)).logprobs)


def _excuse(error: EngineError) -> str:
    """Return the message of an error that does not end the run. The run then escalates the chunk
    without a score.

    :raises EngineError: if the engine is lost, or cannot score at all; then no decision is taken.
    """
    ends_the_run = (
        EngineUnavailable | EngineTimeout | UnsupportedByEngine | UnusableScores | ModelLoadError
    )
    if isinstance(error, ends_the_run):
        raise error
    return str(error)


RATING = "\n\nI think the quality score is: "
"""Prompt that asks the target to rate a chunk with one digit, as in SpecReason."""

VERDICT = "\n\nIs the last step correct? Answer {first} or {second}.\nAnswer: "
"""Prompt that asks the target whether a chunk is correct. It is asked with both orders of the words
"Yes" and "No", because models prefer one position.
"""

YES = "Yes"
NO = "No"


# If the target sends no log-probabilities, it writes this many short replies for one score. The
# score is estimated from the words in these replies.
_REPLIES = 4
# token limit of such a reply; the expected word may follow a space or a line break
_REPLY_TOKENS = 4
# The target writes this many tokens at most in place of the chunk. They are compared with the
# chunk.
_CONTINUED = 32


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the target, with the possible answers (words) whose probabilities are compared."""

    text: str
    words: tuple[str, ...]

    def texts(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the token ids of the question, and the token ids of each word."""
        return tokenizer.encode(self.text), [tokenizer.encode(word) for word in self.words]

    def counts(self, replies: Sequence[str]) -> list[int]:
        """Count, for each word, the replies in which this word comes first.

        >>> Question("Correct?", ("Yes", "No")).counts([" yes.", "No, yes", "Maybe"])
        [1, 1]
        """
        pattern = re.compile(rf"\b({'|'.join(self.words)})\b", re.IGNORECASE)
        counts = dict.fromkeys(map(str.lower, self.words), 0)
        for reply in replies:
            named = pattern.search(reply)
            if named is not None:
                counts[named.group().lower()] += 1
        return list(counts.values())


RATING_QUESTIONS = (Question(RATING, tuple(str(digit) for digit in range(10))),)
VERDICT_QUESTIONS = tuple(
    Question(VERDICT.format(first=first, second=second), (YES, NO))
    for first, second in ((YES, NO), (NO, YES))
)


def rating_score(answers: Sequence[Sequence[float]]) -> float:
    """Return 10 minus the expected digit under the target's probabilities; 1 is the best score, 10
    the worst.

    >>> round(rating_score([[-9.0] * 9 + [0.0]]), 2)
    1.01
    """
    shares = _shares(answers[0])
    mean = math.fsum(digit * share for digit, share in enumerate(shares))
    return 10 - mean


def verdict_score(answers: Sequence[Sequence[float]]) -> float:
    """Return 1 / P(Yes). P(Yes) is normalised over "Yes" and "No", and averaged over the two orders
    in which the question is asked.

    >>> verdict_score([[-1.0, -1.0], [-2.0, -2.0]])
    2.0
    """
    chances = [_shares(answer)[0] for answer in answers]
    mean = math.fsum(chances) / len(chances)
    if math.isnan(mean):
        return math.nan
    return 1 / mean if mean > 0 else math.inf


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Return the probabilities of the words, normalized to the sum 1; NaN if all of them are 0."""
    top = max(logprobs)
    if not math.isfinite(top):
        return [math.nan] * len(logprobs)
    masses = [math.exp(value - top) for value in logprobs]
    total = math.fsum(masses)
    return [mass / total for mass in masses]
