"""Solve one problem: run its rollouts concurrently, turn by turn, and let them vote.

The first part is method exact: the draft proposes tokens, and the target samples the tokens of the
text while it scores the proposed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import anyio

from atts.concurrency import task_group
from atts.core import (
    Beginning,
    Chunk,
    Completion,
    Decision,
    Features,
    Outcome,
    Problem,
    Prompt,
    Role,
    Rollout,
    SampleRequest,
    ScoreRequest,
    Scores,
    TokenIds,
    Usage,
)
from atts.errors import UsageError, counted
from atts.graph import Admit, ProblemScope, RolloutResult, RolloutScope
from atts.pipelines.builder import (
    Context,
    Proposal,
    RolloutBuilder,
    Siblings,
    after,
    continued,
    first_tokens,
    render,
)
from atts.pipelines.combining import combined
from atts.pipelines.gates import RoundGate
from atts.pipelines.judging import NOT_FINAL, ChunkJudge, Judge, make_judge
from atts.pipelines.policy import Policy
from atts.pipelines.scores import disagreement
from atts.pipelines.speeds import BegunChunk, DraftLength
from atts.pipelines.votes import (
    Ballot,
    Grouper,
    Tally,
    ballot,
    cannot_change,
    settled_probability,
    tally,
)


async def write_exactly(builder: RolloutBuilder) -> Chunk:
    """Write the same chunk as the target alone would write, from drafted tokens if that is faster.

    The draft samples with the target's stream of random numbers, so that both models sample the
    same token if their distributions are similar. Drafted tokens are kept up to the first one that
    differs from the target's token. There the target's token is used, and the draft continues after
    it.

    :raises ContextOverflow: if the context has no room for one more token.
    :raises EngineError: if an engine failed for good.
    """
    earlier = _earlier_writer(builder)
    if earlier is not None:
        return await _written_by(builder, earlier)
    choice = builder.context.writers
    begun = choice.begin(anyio.current_time())
    try:
        chunk = await _written_by(builder, begun.writer, begun)
    except BaseException:
        choice.fail(begun, anyio.current_time())
        raise
    choice.end(begun, chunk.tokens, anyio.current_time())
    return chunk


def _earlier_writer(builder: RolloutBuilder) -> Role | None:
    """Return the model that began this chunk in an earlier session, or None. The same model must
    also continue the chunk.

    Such chunks are left out of the speed measurements, because recorded calls take no time.
    """
    request = builder.request("target")
    writers: tuple[Role, ...] = ("target", "draft")
    return next(
        (writer for writer in writers if builder.engine(writer).recorded_length(request)), None
    )


async def _written_by(
    builder: RolloutBuilder, writer: Role, begun: BegunChunk | None = None
) -> Chunk:
    if writer == "draft":
        return await _checked(builder, begun)
    return await builder.write("target")


async def _checked(builder: RolloutBuilder, begun: BegunChunk | None) -> Chunk:
    """Write a chunk from drafted tokens, which the target checks by sampling its own token at each
    position.

    If drafting proves too slow, the target finishes the chunk alone, token by token.
    """
    request = builder.request("target")
    beginning = Beginning()
    finished: Completion | None = None
    wasted = 0
    while beginning.ended is None and finished is None:
        rest = after(request, beginning)
        if _is_the_targets(builder, rest, begun):
            finished = await builder.target.sample(rest)
            builder.spend("target", rest, finished)
            continue
        earlier = builder.draft.recorded_length(rest)
        lengths = DraftLength() if earlier else builder.context.draft_length
        drafted = await _drafted(builder, lengths, rest, earlier or lengths.length(rest.max_tokens))
        scores = await _scored(builder, lengths, rest, drafted)
        assert scores.beginning is not None, "the engine cannot sample tokens while it scores"
        more = scores.beginning
        wasted += len(drafted) - _kept_tokens(drafted, more.ids)
        beginning = Beginning(
            beginning.ids + more.ids, beginning.logprobs + more.logprobs, more.ended
        )
        if begun is not None:
            builder.context.writers.wrote(begun, len(more.ids), anyio.current_time())
    builder.usage += Usage(wasted_tokens=wasted)
    return builder.written("target", continued(beginning, finished, builder.target))


def _is_the_targets(builder: RolloutBuilder, rest: SampleRequest, begun: BegunChunk | None) -> bool:
    """Return whether the target writes the rest of the chunk, because it did so in an earlier
    session or because drafting is too slow.
    """
    if begun is None:
        return builder.target.recorded_length(rest) > 0
    return builder.context.writers.is_given_up(begun, anyio.current_time())


async def _drafted(
    builder: RolloutBuilder, lengths: DraftLength, rest: SampleRequest, most: int
) -> TokenIds:
    """Let the draft sample the next tokens, at most `most`, and return their ids."""
    since = anyio.current_time()
    ahead = replace(rest, max_tokens=most, logprobs="unneeded")
    drafted = await builder.draft.sample(ahead)
    builder.spend("draft", ahead, drafted)
    lengths.drafted += len(drafted.ids)
    lengths.draft_seconds += anyio.current_time() - since
    return drafted.ids


async def _scored(
    builder: RolloutBuilder, lengths: DraftLength, rest: SampleRequest, drafted: TokenIds
) -> Scores:
    """Let the target score the drafted tokens. While it scores, the target also samples its own
    token at each position, up to the first one that differs from the draft's.
    """
    since = anyio.current_time()
    request = ScoreRequest(rest.ids, drafted, builder.name, turn=builder.turn, draw=rest)
    scores = await builder.target.score(request)
    drawn = scores.beginning.ids if scores.beginning else ()
    accepted = _kept_tokens(drafted, drawn)
    lengths.scores += 1
    lengths.score_seconds += anyio.current_time() - since
    lengths.accepted += accepted
    lengths.tested += min(accepted + 1, len(drafted))
    read = max(0, len(rest.ids) - scores.cached_tokens)
    builder.usage += Usage(target_tokens=len(drawn), drawn_tokens=len(drawn))
    builder.usage += Usage(scored_tokens=len(drafted), target_prefill_tokens=read, calls=1)
    return scores


def _kept_tokens(drafted: TokenIds, drawn: TokenIds) -> int:
    """Return how many drafted tokens are the same as the target's samples. Only the target's last
    sample may differ.
    """
    return len(drawn) - (drawn != drafted[: len(drawn)])


async def solve(problem: Problem, policy: Policy, context: Context, scope: ProblemScope) -> Outcome:
    """Solve one problem with the rollouts that the policy describes, and return the outcome of
    their vote.

    A rollout that fails is recorded and does not affect the others. When the vote is settled, the
    remaining rollouts are cancelled.
    """
    prompt = render(problem, policy, context.draft, context.target)
    vote = RunningVote(policy, context.answers.group)
    siblings = Siblings(context.answers.group)
    judge = make_judge(context.gate)
    answers: list[str] = []

    async def rollout(line: RolloutScope[Rollout]) -> Rollout:
        builder = RolloutBuilder(
            problem,
            prompt,
            policy=policy.of(line.sample),
            context=context,
            siblings=siblings,
            scope=line,
        )
        finished = await build(builder, judge)
        if finished.answer is not None:
            answers.append(finished.answer)
            await context.answers.prepare(tuple(answers))
        return finished

    admit: Admit = "together" if policy.barrier else "each"
    results: list[RolloutResult[Rollout]] = []
    reason = ""
    for samples in policy.waves:
        results += await scope.rollouts(rollout, samples, admit=admit, settle=vote.add_result)
        reason = vote.stop_reason()
        if not reason and vote.ended < policy.samples and policy.escalates == "problem":
            reason = judge_problem(problem, vote, context)
        if reason:
            break
    count = vote.tally
    outcome = conclude(problem, prompt, results, count, reason)
    if policy.combine == "vote":
        return outcome
    return await combined(outcome, count, policy, context, scope)


async def build(builder: RolloutBuilder, judge: Judge) -> Rollout:
    """Run turns until the rollout ends.

    If the rollout is cancelled, its finished turns are saved, and the tokens of the unfinished turn
    count as wasted.
    """
    try:
        while builder.rollout.finish is None:
            await take_turn(builder, judge)
    finally:
        builder.waste_unfinished()
        builder.scope.save(builder.rollout)
    return builder.rollout


async def take_turn(builder: RolloutBuilder, judge: Judge) -> None:
    """Run one turn: the draft proposes a chunk, the target scores the chunk, and the gate accepts
    or escalates it.
    """
    policy = builder.policy
    if policy.exact:
        builder.enter([await write_exactly(builder)])
        return
    proposal = await builder.propose()
    if policy.drafter == "target" or policy.escalates == "problem":
        builder.enter([proposal.chunk])
        return
    if proposal.answer is not None and policy.answers == "stop":
        builder.enter([proposal.chunk], note="not judged, because the chunk contains the answer")
        return
    if policy.optimistic and isinstance(judge, ChunkJudge):
        decision, proposal = await _judge_while_drafting(builder, proposal, judge)
    else:
        decision, proposal = await judge.judge(builder, proposal)
    if decision.action == "escalate":
        builder.drop_ahead()
        await take_over(builder, proposal, decision)
    else:
        builder.enter([proposal.chunk], (), decision, proposal.score, proposal.flaw)


async def _judge_while_drafting(
    builder: RolloutBuilder, proposal: Proposal, judge: Judge
) -> tuple[Decision, Proposal]:
    """Judge the chunk while the drafter already writes the next one. If the chunk is escalated, the
    next one is discarded.

    Writing ahead saves time, and changes neither the decision nor the text.
    """
    async with task_group() as ahead:
        ahead.start_soon(builder.propose_ahead, proposal.chunk)
        decision, proposal = await judge.judge(builder, proposal)
        if decision.escalate:
            ahead.cancel_scope.cancel()
    return decision, proposal


async def take_over(builder: RolloutBuilder, proposal: Proposal, decision: Decision) -> None:
    """Let the target take over after an escalation, as the policy says (replace, continue or
    repair), and end the turn.
    """
    chunk = proposal.chunk
    score = proposal.score
    if builder.policy.escalates == "rest":
        builder.hand_over()
    if builder.policy.escalates == "rollout":
        builder.start_again()
        written = await builder.write("target")
        builder.enter([written], [chunk], decision, score, proposal.flaw)
        return
    if builder.policy.takeover == "continue":
        # As in the paper, the draft's chunk stays in the text, and the target writes the chunk
        # after it.
        kept = [chunk] if chunk.text or chunk.draft_ids or chunk.target_ids else []
        if not builder.may_write(kept):
            note = proposal.flaw or "the context has no room for the target's text"
            builder.enter(kept, (), decision, score, note)
            return
        written = await builder.write("target", kept)
        builder.enter([*kept, written], (), decision, score, proposal.flaw)
        return
    if builder.policy.takeover == "repair":
        # Keep the tokens of the chunk before the first token that the target rejects.
        part = first_tokens(chunk, proposal.first_rejected, builder.draft)
        # The whole chunk fitted into the context, and `part` is shorter. So at least one token of
        # the target fits too.
        if part is not None:
            written = await builder.write("target", [part])
            note = f"the first {part.tokens} of the chunk's {chunk.tokens} tokens were kept"
            builder.enter([part, written], [chunk], decision, score, note, part.tokens)
            return
    # Discard the chunk, and let the target write a replacement. The target has a separate stream of
    # random numbers, so the replacement does not depend on the chunk.
    written = await builder.replace(proposal)
    builder.enter([written], [chunk], decision, score, proposal.flaw)


class RunningVote:
    """The vote of one problem, updated whenever a rollout ends; rollouts may end in any order."""

    def __init__(self, policy: Policy, group: Grouper) -> None:
        self.policy = policy
        self.group = group
        self.ended = 0
        # Why the other rollouts cannot change the winner of the vote; empty if they still can.
        self._settled = ""
        self._cast: dict[int, Ballot] = {}

    @property
    def tally(self) -> Tally:
        """Return the vote counts so far, with the ballots in the order of sample numbers instead of
        arrival.

        If `escalated_vote` is "target", only the target's rollouts vote on an escalated problem,
        unless no rollout of the target has an answer.
        """
        samples = sorted(self._cast)
        if self.policy.escalates == "problem" and self.policy.escalated_vote == "target":
            later = self.policy.waves[1]
            of_target = [sample for sample in samples if sample in later]
            samples = of_target or samples
        return tally([self._cast[sample] for sample in samples], self.group)

    def add_result(self, result: RolloutResult[Rollout]) -> bool:
        """Count the vote of a finished rollout. Return True if the remaining rollouts are
        unnecessary.
        """
        self.ended += 1
        cast = ballot(self.policy.vote, result.value) if result.value is not None else None
        if cast is not None:
            self._cast[result.sample] = cast
        remaining = self.policy.samples - self.ended
        if self.policy.early_stop == "none" or remaining == 0:
            return False
        current = self.tally
        if cannot_change(current, remaining):
            self._settled = (
                f"the vote is settled: the leading answer is ahead by {current.lead:.3g} votes, "
                f"with {counted(remaining, 'rollout')} left"
            )
        elif self.policy.early_stop == "likely":
            probability = settled_probability(current, remaining)
            if probability >= self.policy.confidence:
                self._settled = (
                    f"the vote is settled with probability {probability:.3f} (Dirichlet model), "
                    f"with {counted(remaining, 'rollout')} left"
                )
        return bool(self._settled)

    def stop_reason(self) -> str:
        """Return the reason why the finished rollouts suffice, or "" if another wave is needed.

        They suffice if no remaining vote can change the winner, or if enough rollouts agree. If
        whole problems are escalated, the gate decides whether enough rollouts agree.
        """
        if self.policy.escalates == "problem":
            return self._settled
        if not self._settled and self.ended < self.policy.samples:
            agreeing = self.tally.agreement * len(self._cast)
            if agreeing >= max(1, self.policy.agreement * self.ended):
                return f"agreement of the first {counted(self.ended, 'rollout')}"
        return self._settled


def judge_problem(problem: Problem, vote: RunningVote, context: Context) -> str:
    """Let the gate accept or escalate a problem whose draft rollouts have ended.

    Return the reason why the draft's rollouts suffice, or "" if rollouts of the target are needed.
    The gate gets a single score for the whole problem; higher is worse.

    :raises UsageError: if the gate ranks rounds of siblings.
    """
    gate = context.gate
    if isinstance(gate, RoundGate):
        raise UsageError(
            "a gate that ranks the sibling chunks of a round cannot decide on a whole problem"
        )
    first, later = vote.policy.waves
    count = vote.tally
    features = Features(
        problem.id,
        sample=later.start,
        left=context.left.share,
        answered=sum(count.counts),
        agreement=count.agreement,
        agrees=True,
        has_answer=count.winner is not None,
    )
    decision = gate.preview(features)
    if decision.action == "verify":
        features = replace(features, issue=decision.issue)
        decision = gate.decide(features, disagreement(count, len(first)))
        if decision.action == "verify":
            raise UsageError(NOT_FINAL)
    gate.observe(decision, decision.escalate)
    if decision.escalate:
        return ""
    leading = count.counts[0] if count.counts else 0
    return f"{leading} of the draft's {counted(len(first), 'rollout')} agreed"


def conclude(
    problem: Problem,
    prompt: Prompt,
    results: Sequence[RolloutResult[Rollout]],
    count: Tally,
    stop_reason: str,
) -> Outcome:
    """Make the outcome of a problem from its vote and all its rollouts, including failed and
    cancelled ones.
    """
    rollouts = tuple(_concluded(problem, prompt, result) for result in results)
    status: Literal["answered", "unanswered", "cancelled", "failed"] = "answered"
    why = stop_reason
    if count.winner is None:
        failed = [rollout for rollout in rollouts if rollout.finish == "failed"]
        is_cut = any(rollout.finish == "cancelled" for rollout in rollouts)
        if failed and len(failed) == len(rollouts):
            status = "failed"
        elif is_cut:
            status = "cancelled"
        else:
            status = "unanswered"
        if failed:
            why = failed[0].error
        elif is_cut:
            why = "no rollout had an answer when the run ended"
        else:
            why = "none of the rollouts ended with an answer"
    return Outcome(
        problem,
        rollouts,
        count.winner,
        votes=dict(zip(count.answers, count.weights, strict=True)),
        status=status,
        why=why,
        usage=sum((rollout.usage for rollout in rollouts), Usage()),
    )


def _concluded(problem: Problem, prompt: Prompt, result: RolloutResult[Rollout]) -> Rollout:
    """Return the rollout in a result. If the rollout did not finish, set `finish` to "failed",
    "settled" (no longer needed for the vote) or "cancelled".
    """
    rollout = result.value or Rollout(problem.id, result.sample, prompt)
    if rollout.finish is not None:
        return rollout
    if result.status == "failed":
        error = f"{type(result.error).__name__}: {result.error}"
        return replace(rollout, finish="failed", error=error)
    return replace(rollout, finish="settled" if result.status == "settled" else "cancelled")
