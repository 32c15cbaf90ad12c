"""Solving of one problem, from prompt to outcome: rollouts side by side, and a vote that may settle
early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Literal

from atts.concurrency import task_group
from atts.core import Decision, Outcome, Problem, Prompt, Rollout, Usage
from atts.graph import Admit, ProblemScope, RolloutResult, RolloutScope
from atts.pipelines.builder import Proposal, RolloutBuilder
from atts.pipelines.chunks import render
from atts.pipelines.context import Context
from atts.pipelines.exact import write_exactly
from atts.pipelines.judging import ChunkJudge, Judge, make_judge
from atts.pipelines.policy import Policy
from atts.pipelines.running_vote import RunningVote
from atts.pipelines.siblings import Siblings
from atts.pipelines.takeover import take_over


async def solve(problem: Problem, policy: Policy, context: Context, scope: ProblemScope) -> Outcome:
    """Spend tokens on one problem as the policy says.

    A rollout that fails is recorded and sinks no other; when the vote is settled the remaining
    rollouts are cancelled.
    """
    prompt = render(problem, policy, context.draft, context.target)
    vote = RunningVote(policy, context.answers.group)
    siblings = Siblings(context.answers.group)
    judge = make_judge(context.gate)

    async def rollout(place: RolloutScope[Rollout]) -> Rollout:
        chosen = policy.of(place.sample)
        builder = RolloutBuilder(
            problem, prompt, policy=chosen, context=context, siblings=siblings, scope=place
        )
        return await build(builder, judge)

    results: list[RolloutResult[Rollout]] = []
    for samples in policy.waves:
        admit: Admit = "together" if policy.barrier else "each"
        results += await scope.rollouts(rollout, samples, admit=admit, settle=vote.add_result)
        if vote.can_stop():
            break
    return conclude(problem, prompt, results, vote)


async def build(builder: RolloutBuilder, judge: Judge) -> Rollout:
    """Turns until the rollout ends; one that is cut short leaves its whole turns, and what the last
    one cost.
    """
    try:
        while builder.rollout.finish is None:
            await take_turn(builder, judge)
    finally:
        builder.waste_unfinished()
        builder.scope.save(builder.rollout)
    return builder.rollout


async def take_turn(builder: RolloutBuilder, judge: Judge) -> None:
    """Propose, judge, carry out: the three stages."""
    policy = builder.policy
    if policy.exact:
        return builder.enter([await write_exactly(builder)])
    proposal = await builder.propose()
    if policy.drafter == "target":
        return builder.enter([proposal.chunk])
    if proposal.answer is not None and policy.answers == "stop":
        return builder.enter([proposal.chunk], note="not judged: it holds the answer")
    if policy.optimistic and isinstance(judge, ChunkJudge):
        decision, proposal = await _judge_drafting_on(builder, proposal, judge)
    else:
        decision, proposal = await judge.judge(builder, proposal)
    if decision.action == "escalate":
        builder.drop_ahead()
        return await take_over(builder, proposal, decision)
    return builder.enter([proposal.chunk], (), decision, proposal.score, proposal.flaw)


async def _judge_drafting_on(
    builder: RolloutBuilder, proposal: Proposal, judge: Judge
) -> tuple[Decision, Proposal]:
    """Judge while the drafter goes on as if the chunk had passed; a rejection stops it. The result
    is unchanged.
    """
    async with task_group() as ahead:
        ahead.start_soon(builder.propose_ahead, proposal.chunk)
        decision, proposal = await judge.judge(builder, proposal)
        if decision.escalate:
            ahead.cancel_scope.cancel()
    return decision, proposal


def conclude(
    problem: Problem, prompt: Prompt, results: Sequence[RolloutResult[Rollout]], vote: RunningVote
) -> Outcome:
    """The outcome of everything that happened, failures and cancellations named."""
    rollouts = tuple(_rollout(problem, prompt, result) for result in results)
    count = vote.tally
    failed = [line for line in rollouts if line.finish == "failed"]
    status: Literal["answered", "unanswered", "cancelled", "failed"] = "answered"
    why = vote.why
    if count.winner is None:
        is_cut = any(line.finish == "cancelled" for line in rollouts)
        status = (
            "failed"
            if failed and len(failed) == len(rollouts)
            else "cancelled"
            if is_cut
            else "unanswered"
        )
        why = (
            failed[0].error
            if failed
            else f"no rollout came to an answer{' before the run ended' if is_cut else ''}"
        )
    usage = reduce(add, (line.usage for line in rollouts), Usage())
    votes = dict(zip(count.answers, count.weights, strict=True))
    return Outcome(
        problem, rollouts, count.winner, votes=votes, status=status, why=why, usage=usage
    )


def _rollout(problem: Problem, prompt: Prompt, result: RolloutResult[Rollout]) -> Rollout:
    rollout = result.value or Rollout(problem.id, result.sample, prompt)
    if rollout.finish is not None:
        return rollout
    if result.status == "failed":
        return replace(
            rollout, finish="failed", error=f"{type(result.error).__name__}: {result.error}"
        )
    return replace(rollout, finish="settled" if result.status == "settled" else "cancelled")
