"""Judging of a chunk: what the gate may know of it, the target's score, the gate's decision."""

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
from atts.pipelines.builder import KnownScore, Proposal, RolloutBuilder, rollout_name
from atts.pipelines.context import RolloutEngine
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

# "verify" as a final decision is refused: whatever is not escalated would be kept
NOT_FINAL = (
    "the gate decided 'verify' about a chunk that has its score: "
    "its decide and decide_round must return 'accept' or 'escalate'"
)


class ChunkJudge:
    """Asks a gate about one chunk at a time, with the target's score where the gate wants it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def judge(self, builder: RolloutBuilder, proposal: Proposal) -> tuple[Decision, Proposal]:
        """Return the gate's decision, which the gate observes as carried out.

        What cannot be judged is escalated.

        :raises UsageError: the gate asks for a score that it was just given.
        """
        known = features(builder, proposal)
        decision, proposal = await self._decide(builder, proposal, known)
        is_escalated = decision.action == "escalate"
        self._gate.observe(decision, is_escalated)
        if is_escalated and proposal.score_reused and builder.draws:
            # no forward pass has read this chunk: read it now, for what the target draws meanwhile
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
    """Has a gate rank each round of siblings: every rollout waits for all that still run. This is
    the barrier.
    """

    def __init__(self, gate: RoundGate) -> None:
        self._gate = gate
        self._round: Round = {}
        self._ranked: Mapping[int, Decision] = {}

    async def judge(self, builder: RolloutBuilder, proposal: Proposal) -> tuple[Decision, Proposal]:
        """Return the gate's decision about this member of the round.

        :raises UsageError: the gate asks for a score that it was just given.
        """
        known = features(builder, proposal)
        if proposal.chunk.target_ids:
            proposal = await score_by_target(builder, proposal)
        score = math.nan if proposal.score is None else proposal.score
        round_ = await builder.scope.meet((known, score))
        return self._ranking(round_)[builder.rollout.sample], proposal

    def _ranking(self, round_: Round) -> Mapping[int, Decision]:
        """Return the decisions of a round, made once by its first member."""
        # no round begins before every member has read the last one's decisions
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
    """Return the judge that asks this gate; made once per problem, for finding a gate's kind is
    slow.
    """
    return RoundJudge(gate) if isinstance(gate, RoundGate) else ChunkJudge(gate)


def features(builder: RolloutBuilder, proposal: Proposal) -> Features:
    """Return the features of a proposal that a gate may use."""
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
    """Return the proposal with the score of an equal chunk after an equal beginning, or ask the
    target.

    Where a sibling has asked and waits for the answer, it came first: waiting with it is shorter
    than asking. Where the sibling's call fails and is tried again it is not, so one of those who
    wait then asks for itself. Who asked in an earlier session asks again, and is answered by what
    was recorded.
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
            known = None  # this rollout asked in the earlier session, so it asks again
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
    """Return the record of an earlier session for the sibling that asked."""
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
    """Return the proposal with its score, or with the reason why there is none.

    A score of the draft's own log-probabilities needs no call.

    :raises EngineError: the engine is lost, or cannot score at all.
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
        flaw = "the draft tells no log-probabilities" if math.isnan(score) else ""
        return replace(proposal, score=score, flaw=flaw)
    request = _request(builder, chunk)
    try:
        scores = await builder.target.score(request)
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    # the suffix is counted as scored, not as read
    read = max(0, len(request.prefix) - scores.cached_tokens)
    builder.count(Usage(scored_tokens=len(request.suffix), target_prefill_tokens=read, calls=1))
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
    """Return the score by the run's judge; NaN where the draft tells no log-probabilities.

    :raises UsageError: the run has no judge.
    """
    judge = builder.context.judge
    if judge is None:
        raise UsageError("score.kind learned needs a judge: set score.judge to its file")
    answered, share, _ = builder.siblings.agreement(builder.rollout.sample, proposal.answer)
    known = judge_features(
        logprobs, proposal.chunk.logprobs, builder.turn, share if answered else None
    )
    return float(f"{judge(known):.5g}")


async def _read_again(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with the score that the draft's entropies give, once it reads its chunk."""
    chunk = proposal.chunk
    request = ScoreRequest(
        builder.ids("draft"), chunk.draft_ids, builder.name, turn=builder.turn, entropies=True
    )
    try:
        scores = await builder.draft.score(request)
    except EngineError as error:
        return replace(proposal, flaw=_excuse(error))
    read = max(0, len(request.prefix) + len(request.suffix) - scores.cached_tokens)
    builder.count(Usage(draft_prefill_tokens=read, calls=1))
    return replace(proposal, score=score_of(builder.score_rule, scores.logprobs, chunk))


async def _reward(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with the score that a reward model gives it."""
    chunk = proposal.chunk
    written = [one.text for turn in builder.rollout.turns for one in turn.chunks]
    steps = [text for text in written if text.strip()]
    # the ids name the call; the reward model reads the texts
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
    builder.count(Usage(scored_tokens=len(chunk.target_ids), calls=1))
    return replace(proposal, score=score_of(builder.score_rule, scores.logprobs, chunk))


async def _ask(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with the score that the target gives in words."""
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
    # each question is read after the chunk, which is read once
    calls = sum(map(len, answers))
    read = len(proposal.chunk.target_ids)
    builder.count(Usage(scored_tokens=calls, target_prefill_tokens=read, calls=calls))
    score = verdict_score(answers) if is_verdict else rating_score(answers)
    if math.isnan(score):
        return replace(proposal, flaw="the target gives no expected word any probability")
    return replace(proposal, score=float(f"{score:.5g}"))


async def _ask_in_text(
    builder: RolloutBuilder,
    proposal: Proposal,
    questions: Sequence[Question],
    *,
    is_verdict: bool,
) -> Proposal:
    """Return the proposal with a score from short replies, for a target that reports no chances.

    The replies are draws from the target's distribution, so the shares of the words among them
    estimate the chances that other targets report.
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
    builder.count(
        Usage(
            target_tokens=written,
            wasted_tokens=written,
            target_prefill_tokens=read,
            calls=len(replies),
        )
    )
    each = len(replies) // len(questions)
    counts = [
        question.counts([reply.text for reply in replies[place * each : (place + 1) * each]])
        for place, question in enumerate(questions)
    ]
    if not any(map(sum, counts)):
        return replace(proposal, flaw="the target's replies hold no expected word")
    # Jeffreys' prior: a few draws prove no word impossible
    answers = [[math.log(count + 0.5) for count in row] for row in counts]
    score = verdict_score(answers) if is_verdict else rating_score(answers)
    return replace(proposal, score=float(f"{score:.5g}"))


async def _compare_continuation(builder: RolloutBuilder, proposal: Proposal) -> Proposal:
    """Return the proposal with the score of what the target writes in the chunk's place."""
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
    builder.count(
        Usage(target_tokens=written, wasted_tokens=written, target_prefill_tokens=read, calls=1)
    )
    return replace(proposal, score=continuation_score(proposal.chunk.text, own.text))


async def _logprob(target: RolloutEngine, request: ScoreRequest) -> float:
    """Return the log-probability of a word, however many tokens it has."""
    return math.fsum((await target.score(request)).logprobs)


def _excuse(error: EngineError) -> str:
    """Return the words of a failure that is met by escalating. A lost engine decides nothing.

    :raises EngineError: the engine is lost, or cannot score at all.
    """
    ends_the_run = (
        EngineUnavailable | EngineTimeout | UnsupportedByEngine | UnusableScores | ModelLoadError
    )
    if isinstance(error, ends_the_run):
        raise error
    return str(error)


RATING = "\n\nI think the quality score is: "
"""Stands before the digit of a rating, as SpecReason has it."""

VERDICT = "\n\nIs the last step correct? Answer {first} or {second}.\nAnswer: "
"""Stands before the word of a verdict. It is asked in both orders: models prefer one position."""

YES = "Yes"
NO = "No"


_REPLIES = 4  # drawn for one score where a target reports no chances
_REPLY_TOKENS = 4  # some tokenizers put a space or a line break before the word
_CONTINUED = 32  # tokens of the target's own continuation that a chunk is compared with


@dataclass(frozen=True, slots=True)
class Question:
    """A text that ends where the target would answer, and the words whose chances are compared."""

    text: str
    words: tuple[str, ...]

    def texts(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the ids of the question, and of each word."""
        return tokenizer.encode(self.text), [tokenizer.encode(word) for word in self.words]

    def counts(self, replies: Sequence[str]) -> list[int]:
        """Count the replies that name each word first.

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
    """Return 10 less the mean digit under the target's distribution: 1 is the best, 10 the worst.

    >>> round(rating_score([[-9.0] * 9 + [0.0]]), 2)
    1.01
    """
    shares = _shares(answers[0])
    mean = math.fsum(digit * share for digit, share in enumerate(shares))
    return 10 - mean


def verdict_score(answers: Sequence[Sequence[float]]) -> float:
    """Return one over the target's chance of "Yes" against "No", both orders weighing alike.

    >>> verdict_score([[-1.0, -1.0], [-2.0, -2.0]])
    2.0
    """
    chances = [_shares(answer)[0] for answer in answers]
    mean = math.fsum(chances) / len(chances)
    if math.isnan(mean):
        return math.nan
    return 1 / mean if mean > 0 else math.inf


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Return the words' chances among each other; NaN where the target gives none of them any."""
    top = max(logprobs)
    if not math.isfinite(top):
        return [math.nan] * len(logprobs)
    masses = [math.exp(value - top) for value in logprobs]
    total = math.fsum(masses)
    return [mass / total for mass in masses]
