"""Selection and synthesis: if the rollouts of a problem disagree, the target compares or rewrites
the most frequent answers.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from atts.concurrency import collect
from atts.core import (
    Combination,
    Combine,
    CombinePlan,
    Completion,
    Message,
    Outcome,
    Problem,
    Rollout,
    SampleRequest,
    Usage,
)
from atts.errors import BadReply, ContextOverflow, counted
from atts.evaluators import Estimate, compare_runs
from atts.graph import ProblemScope, RolloutScope
from atts.pipelines.builder import Context, RolloutEngine
from atts.pipelines.policy import Policy
from atts.pipelines.votes import Grouper, Tally, ballot, classes, tally
from atts.sampling import Seed

if TYPE_CHECKING:
    from atts.journal import FinishedProblem

COVERED = 0.9
"""The minimum share (0 to 1) of winnable problems that must count as split. A problem is winnable
if its vote is wrong, but another of the most frequent answers is correct.
"""
PROVEN = 10.0
"""The odds that the selector helps. From this value on, `auto` lets the selector overrule votes."""
REFUTED = 0.2
"""The odds that the selector helps. At this value or below, `auto` stops asking the selector."""
# The solutions are cut at most this many times, until the question fits into the context.
_TRIALS = 3
_END_OF_THOUGHT = "</think>"


def odds(better: int, worse: int) -> float:
    """Return the odds of "improvements are likelier than deteriorations" against "both are equally
    likely". `better` and `worse` count the improved and the deteriorated cases.

    If improvements are likelier, their probability has a uniform prior on (1/2, 1). If both are
    equally likely, the odds are a martingale. The probability that they ever exceed 10 during a run
    is then at most 1/10 (Ville's inequality).

    >>> odds(0, 0), odds(5, 0), round(odds(1, 4), 2)
    (1.0, 10.5, 0.23)
    """
    cases = better + worse
    below = sum(math.comb(cases + 1, count) for count in range(better + 1))
    return below / ((cases + 1) * math.comb(cases, better))


class Combiner:
    """A planner that learns from a run's split votes and from the results of its selector.

    The planner learns from finished problems and decides on later problems, so a problem's
    reference never affects the answer to the same problem.
    """

    def __init__(self) -> None:
        # For each problem whose vote was wrong although another finalist was correct: the share of
        # votes for the wrong answer. In ascending order.
        self._winnable: list[float] = []
        # For each half of a problem's rollouts whose winner differs from the winner of all
        # rollouts: the share of votes for the half's winner. In ascending order.
        self._overruled: list[float] = []
        # problems in which the target's choice was correct, but the vote was wrong
        self.better = 0
        # problems in which the vote was correct, but the target's choice was wrong
        self.worse = 0
        # pairs of answers for which the target preferred the same answer in both presentation
        # orders
        self.consistent = 0
        self.inconsistent = 0
        self._is_graded = False

    def learn(self, line: FinishedProblem) -> None:
        """Record the result of a finished problem for later plans."""
        known = line.combination
        if known is None:
            return
        for share, is_same in known.halves:
            if not is_same:
                insort(self._overruled, share)
        self.consistent += known.consistent
        self.inconsistent += known.pairs - known.consistent
        found = CombinedVerdicts.of(line)
        if found is None:
            return
        self._is_graded = True
        if found.is_winnable:
            insort(self._winnable, known.share)
        self.better += found.gain > 0
        self.worse += found.gain < 0

    @property
    def below(self) -> float:
        """Return the threshold for split votes: a vote is split if its leading answer has at most
        this fraction of the votes.

        The threshold is learned from problems whose vote was wrong although another of the most
        frequent answers was correct. It is a conformal quantile of the fractions of votes that the
        wrong answers got. The next such problem then counts as split with probability 0.9.

        With fewer than nine such problems, the threshold is learned instead from votes of half of a
        problem's rollouts. Only half votes with another winner than the full vote are used. With
        fewer than nine of these too, every vote that is not unanimous counts as split.
        """
        for shares in (self._winnable, self._overruled):
            rank = math.ceil((len(shares) + 1) * COVERED)
            if rank <= len(shares):
                return shares[rank - 1]
        return 1.0

    @property
    def odds(self) -> float:
        """Return the odds that the selector helps.

        If problems are graded, the odds come from problems in which exactly one of the selector's
        choice and the vote is correct. Otherwise they come from how often the selector repeats its
        verdict when the answers are presented in reverse order.
        """
        if self._is_graded:
            return odds(self.better, self.worse)
        return odds(self.consistent, self.inconsistent)

    @property
    def evidence(self) -> str:
        """Describe the evidence on which the odds are based."""
        pairs = self.consistent + self.inconsistent
        told_apart = self.better + self.worse if self._is_graded else pairs
        if told_apart == 0:
            return "no selected answer has been compared with a vote yet"
        if self._is_graded:
            better = counted(self.better, "problem")
            return f"better than the vote on {better}, worse on {self.worse}"
        return (
            f"for {self.consistent} of {counted(pairs, 'pair')} of answers, the verdict did not "
            "depend on which answer came first"
        )

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return how to combine a problem's answers, from the leading answer's share of the votes
        and the number of different answers.
        """
        below = self.below
        if kind == "vote" or answers < 2:
            return CombinePlan("vote", below=below, why="the rollouts agree")
        if share > below:
            return CombinePlan("vote", below=below, why=f"{share:.2f} of the votes agree")
        if kind != "auto":
            return CombinePlan(kind, below=below)
        odds = self.odds
        why = f"the odds that the selector helps are {odds:.3g}: {self.evidence}"
        if odds <= REFUTED:
            return CombinePlan("vote", below=below, why=why)
        return CombinePlan("select", is_trial=odds < PROVEN, below=below, why=why)


async def combined(
    outcome: Outcome, count: Tally, policy: Policy, context: Context, scope: ProblemScope
) -> Outcome:
    """Combine the answers of a problem's rollouts as the planner decides, and return the outcome
    with the result.

    The vote's winner stays the answer if the target is not asked, gives no usable reply, or makes a
    choice that is only recorded.
    """
    if count.winner is None:
        return outcome
    share = count.weights[0] / math.fsum(count.weights)
    plan = context.planner.plan(policy.combine, share, len(count.answers))
    found = Combination(
        plan,
        count.winner,
        share,
        halves=_halves(outcome.rollouts, count.winner, policy, context.answers.group),
    )
    if plan.action != "vote":
        asked = _Question(outcome, count.answers[: policy.finalists], policy, context)
        # The target's work on this problem runs like one more rollout, with the next free number.
        # So it is queued, limited and retried in the same way.
        number = range(policy.samples, policy.samples + 1)
        (result,) = await scope.rollouts(asked.select_or_write, number)
        found = replace(found, finalists=asked.answers, usage=asked.usage)
        if result.value is not None:
            found = replace(
                found,
                chosen=result.value.chosen,
                pairs=result.value.pairs,
                consistent=result.value.consistent,
                error=asked.unusable if not asked.usage.calls else "",
            )
        else:
            error = result.error
            found = replace(found, error=result.why or f"{type(error).__name__}: {error}")
    return replace(
        outcome, answer=found.answer, usage=outcome.usage + found.usage, combination=found
    )


def _halves(
    rollouts: Sequence[Rollout], winner: str, policy: Policy, group: Grouper
) -> tuple[tuple[float, bool], ...]:
    """Let the even and the odd rollouts vote separately. For each vote, return the leading answer's
    share, and whether this answer also wins the vote of all rollouts.
    """
    halves: list[tuple[float, bool]] = []
    for parity in (0, 1):
        cast = [
            ballot(policy.vote, rollout) for rollout in rollouts if rollout.sample % 2 == parity
        ]
        count = tally([vote for vote in cast if vote is not None], group)
        if count.winner is not None:
            first, second = classes([count.winner, winner], group)
            halves.append((count.weights[0] / math.fsum(count.weights), first == second))
    return tuple(halves)


class RecordedRollouts:
    """A pipeline that repeats the vote and the combination on the recorded rollouts of an earlier
    run.

    Iterating over the pipeline yields the problems of the earlier run. Outcomes are kept in memory
    only until their problem is finished.
    """

    def __init__(self, outcomes: Callable[[], Iterable[Outcome]], count: int) -> None:
        self._outcomes = outcomes
        self._count = count
        # for each problem that was read but not combined yet: its recorded outcome
        self._open: dict[str, Outcome] = {}
        self._over = set[str]()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Problem]:
        """Yield the problems whose outcomes are complete."""
        for outcome in self._outcomes():
            if not outcome.is_complete:
                continue
            name = outcome.problem.id
            if name not in self._over:
                self._open[name] = outcome
            yield outcome.problem

    def forget(self, problem: str) -> None:
        """Drop the outcome of a finished problem, and do not store it if it is read again."""
        self._over.add(problem)
        self._open.pop(problem, None)

    async def __call__(
        self, problem: Problem, policy: Policy, context: Context, scope: ProblemScope, /
    ) -> Outcome:
        """Repeat the vote and the combination on the problem's recorded rollouts under this policy,
        and return the new outcome.
        """
        outcome = self._open.pop(problem.id)
        rollouts = outcome.rollouts
        await context.answers.prepare([rollout.answer for rollout in rollouts])
        cast = [ballot(policy.vote, rollout) for rollout in rollouts]
        count = tally([vote for vote in cast if vote is not None], context.answers.group)
        usage = sum((rollout.usage for rollout in rollouts), Usage())
        outcome = replace(outcome, answer=count.winner, usage=usage, combination=None)
        return await combined(outcome, count, policy, context, scope)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The target's answers to the questions about one problem: the finalist or new answer that it
    chose (None if it chose none), and its consistency. `consistent` counts the compared pairs with
    the same verdict in both presentation orders.
    """

    chosen: str | None
    pairs: int
    consistent: int


class _Question:
    """The questions to the target about one problem. In its replies, the target selects or
    synthesizes an answer from the finalists (the most frequent answers).
    """

    def __init__(
        self, outcome: Outcome, answers: tuple[str, ...], policy: Policy, context: Context
    ) -> None:
        self.answers = answers
        self.usage = Usage()
        self.unusable = ""  # why a request to the target failed; empty if none failed
        self._problem = outcome.problem
        self._policy = policy
        self._context = context
        # For each answer: the text of the first rollout that gave it.
        texts: dict[str, str] = {}
        for rollout in sorted(outcome.rollouts, key=lambda one: one.sample):
            if rollout.answer is not None:
                texts.setdefault(rollout.answer, rollout.text)
        self._texts = [texts[answer] for answer in answers]

    async def select_or_write(self, scope: RolloutScope[_Verdict]) -> _Verdict:
        """Ask the target to select or to synthesize an answer, as the plan says."""
        policy = self._policy
        target = self._context.bind(self._context.target, "target", scope, policy.timeout_seconds)
        if policy.combine == "synthesize":
            return await self._write(target)
        return await self._select(target)

    async def _select(self, target: RolloutEngine) -> _Verdict:
        """Let the target compare every pair of finalists in both presentation orders. Each
        comparison gives one point to the answer that the target calls correct, or none if the reply
        is unclear.

        The finalist with the most points wins; in a tie, the one with more votes. Of two finalists,
        the less frequent one therefore wins only if it gets more points than the other.
        """
        pairs = list(combinations(range(len(self.answers)), 2))
        orders = [order for first, second in pairs for order in ((first, second), (second, first))]
        winners = await collect(
            [partial(self._compare, target, order, turn) for turn, order in enumerate(orders)]
        )
        points = [0] * len(self.answers)
        for winner in winners:
            if winner is not None:
                points[winner] += 1
        consistent = sum(
            first is not None and first == second
            for first, second in zip(winners[::2], winners[1::2], strict=True)
        )
        return _Verdict(self.answers[points.index(max(points))], len(pairs), consistent)

    async def _compare(
        self, target: RolloutEngine, order: tuple[int, int], turn: int
    ) -> int | None:
        """Return the index of the finalist that the target calls correct, or None if the target
        names neither.
        """
        done = await self._ask(target, self._policy.prompt("select"), order, turn)
        if done is None:
            return None
        place = named_solution(done.text)
        if place is not None:
            return order[place]
        answer = self._answer(done)
        if answer is None:
            return None
        rivals = [self.answers[index] for index in order]
        await self._context.answers.prepare((answer, *rivals))
        label, *others = classes([answer, *rivals], self._context.answers.group)
        return order[others.index(label)] if others.count(label) == 1 else None

    async def _write(self, target: RolloutEngine) -> _Verdict:
        """Let the target write a new solution from the finalists, once for each presentation order.

        The synthesis counts only if both new solutions have the same answer.
        """
        forward = tuple(range(len(self.answers)))
        orders = (forward, forward[::-1])
        text = self._policy.prompt("synthesis")
        done = await collect(
            [partial(self._ask, target, text, order, turn) for turn, order in enumerate(orders)]
        )
        answers = [None if one is None else self._answer(one) for one in done]
        first, second = answers
        if first is None or second is None:
            return _Verdict(None, 1, 0)
        await self._context.answers.prepare((first, second, *self.answers))
        labels = classes([first, second, *self.answers], self._context.answers.group)
        if labels[0] != labels[1]:
            return _Verdict(None, 1, 0)
        # If the new answer equals a finalist in another spelling, use the finalist's spelling. A
        # grader then gives both the same verdict.
        spelt = [answer for answer, label in zip(self.answers, labels[2:], strict=True)
                 if label == labels[0]]  # fmt: skip
        return _Verdict(spelt[0] if spelt else first, 1, 1)

    def _answer(self, done: Completion) -> str | None:
        answer = self._context.answers.extract(done.text)
        if answer is None and done.ended == "end":
            answer = self._context.answers.extract_finished(done.text)
        return answer

    async def _ask(
        self, target: RolloutEngine, prompt: str, order: Sequence[int], turn: int
    ) -> Completion | None:
        """Ask the target a question. Return None if the reply is unusable, or if the question does
        not fit into the context.
        """
        policy = self._policy
        context = self._context
        wanted = policy.combine_tokens or policy.bounds().max_tokens
        tokens = min(wanted, target.spec.context_length // 2)
        ids = self._rendered(target, prompt, order, target.spec.context_length - tokens)
        number = policy.samples
        request = SampleRequest(
            ids,
            tokens,
            policy.sampling_of("target"),
            Seed(context.seed, self._problem.id, number, turn, "target"),
            rollout=f"{self._problem.id}/{number}",
            logprobs="unneeded",
        )
        try:
            done = await target.sample(request)
        except (BadReply, ContextOverflow) as error:
            self.unusable = str(error)
            return None
        read = max(0, len(ids) - done.cached_tokens)
        self.usage += Usage(target_tokens=len(done.ids), target_prefill_tokens=read, calls=1)
        return done

    def _rendered(
        self, target: RolloutEngine, prompt: str, order: Sequence[int], room: int
    ) -> tuple[int, ...]:
        """Return the token ids of the question. Long solutions lose their beginnings, so that the
        question fits into `room` tokens.
        """
        texts = [self._texts[index] for index in order]
        # Leave out the think block, because the text after it contains the whole solution.
        texts = [text.rpartition(_END_OF_THOUGHT)[2].strip() or text.strip() for text in texts]
        ids: tuple[int, ...] = ()
        for _ in range(_TRIALS):
            question = question_text(prompt, self._problem, texts)
            ids = target.tokenizer.render([Message("user", question)])
            if len(ids) <= room:
                break
            kept = max(0.1, 0.9 * room / len(ids))
            texts = [text[len(text) - int(kept * len(text)) :] for text in texts]
        return ids


def question_text(prompt: str, problem: Problem, solutions: Sequence[str]) -> str:
    """Return the prompt with `{problem}` and `{solutions}` filled in. The solutions are numbered
    from 1.
    """
    numbered = "\n\n".join(
        f"Solution {number}:\n{text}" for number, text in enumerate(solutions, start=1)
    )
    # Both placeholders are replaced in one pass. So a "{problem}" inside a solution is not
    # replaced.
    parts = {"{problem}": problem.text, "{solutions}": numbered}
    return re.sub(r"\{problem\}|\{solutions\}", lambda match: parts[match.group()], prompt)


_NAMED = re.compile(
    r"\b(?:correct|better|best|right|solution|judg(?:e)?ment|choice|answer)\b[\s*:#\"'is]{0,12}"
    r"(?:solution\s*)?\\?(?:boxed\{)?([12])\b(?![.\d])",
    re.IGNORECASE,
)
_LINE = re.compile(
    r"^\W*correct\W{1,6}(?:solution\W{1,3})?([12])\W*$", re.IGNORECASE | re.MULTILINE
)


def named_solution(text: str) -> int | None:
    """Return the index (0 or 1) of the solution that a reply calls correct; None if the reply names
    none.

    >>> named_solution("Solution 1 adds wrongly.\\n\\nCorrect: 2"), named_solution("Both are fine.")
    (1, None)
    """
    for pattern in (_LINE, _NAMED):
        numbers = pattern.findall(text)
        if numbers:
            return int(numbers[-1]) - 1
    return None


@dataclass(frozen=True, slots=True)
class CombinedVerdicts:
    """Verdicts on one graded problem: on its vote, on the target's choice, and on whether any
    rollout was correct.
    """

    is_vote_correct: bool
    is_choice_correct: bool
    is_any_correct: bool  # True if at least one rollout has a correct answer

    @classmethod
    def of(cls, line: FinishedProblem) -> CombinedVerdicts | None:
        """Return the verdicts on a finished problem; None if one of them is missing."""
        known = line.combination
        if known is None or line.verdict is None:
            return None
        verdicts = {one.answer: one.verdict for one in line.samples if one.answer is not None}
        if line.answer is not None:
            verdicts.setdefault(line.answer, line.verdict)
        vote = verdicts.get(known.voted)
        choice = vote if known.chosen is None else verdicts.get(known.chosen)
        if vote not in ("correct", "wrong") or choice not in ("correct", "wrong"):
            return None
        return cls(vote == "correct", choice == "correct", "correct" in verdicts.values())

    @property
    def gain(self) -> int:
        """Return 1 if only the target's choice is correct, -1 if only the vote is correct, and 0
        otherwise.
        """
        return self.is_choice_correct - self.is_vote_correct

    @property
    def is_winnable(self) -> bool:
        """Return whether the vote is wrong although the answer of some rollout is correct."""
        return self.is_any_correct and not self.is_vote_correct


@dataclass(frozen=True, slots=True)
class CombineSummary:
    """The effect and the cost of selection or synthesis in a run, and the largest possible gain."""

    problems: int
    split: int  # problems whose vote was split, so that the target was asked
    # problems in which the target's choice was only recorded, and the answer of the vote was kept
    trials: int
    changed: int  # problems in which the target's choice replaced the answer of the vote
    gained: int  # problems in which the target's choice made a wrong answer correct
    lost: int
    pairs: int
    consistent: int
    # graded problems with a split vote in which the vote was wrong, but a rollout was correct
    winnable: int
    # Accuracy with the target's choices minus accuracy of the vote, on graded problems, with its
    # confidence interval. It is a share, -1 to 1.
    gain: Estimate
    # The gain if the target had always chosen a correct answer where one of the rollouts has one.
    ceiling: float
    # At the end of the run, votes counted as split if the leading answer had at most this share.
    below: float
    actions: tuple[str, ...]
    usage: Usage
    unusable: int = 0  # problems for which the request to the target failed

    def __str__(self) -> str:
        """Return the summary as a sentence."""
        kind = " and ".join(self.actions) or "select"
        problems = counted(self.problems, "problem")
        words = f"{kind} on the {self.split:,} of {problems} whose votes split"
        if self.trials:
            words += (
                f"  ({self.trials:,} of them only as a trial, so the answer of the vote was kept)"
            )
        words += f": {counted(self.changed, 'answer')} changed"
        if not math.isnan(self.gain.value):
            points = [100 * value for value in (self.gain.value, self.gain.low, self.gain.high)]
            words += (
                f", {self.gained:,} from wrong to correct, {self.lost:,} from correct to wrong; "
                f"gain in accuracy {points[0]:+.1f} points [{points[1]:+.1f}, {points[2]:+.1f}] of "
                f"at most {100 * self.ceiling:.1f}"
            )
        if self.pairs:
            words += (
                f"; for {self.consistent:,} of {counted(self.pairs, 'pair')} of answers, the "
                "verdict did not depend on which answer came first"
            )
        if self.unusable:
            words += f"; the request to the target failed for {counted(self.unusable, 'problem')}"
        usage = self.usage
        return (
            f"{words}; for this, the target wrote {usage.target_tokens:,} tokens in "
            f"{counted(usage.calls, 'call')}"
        )


def summarise_combinations(problems: Iterable[FinishedProblem]) -> CombineSummary | None:
    """Return the summary of a run's combined problems; None if votes alone decided."""
    lines = [line for line in problems if line.combination is not None]
    if not lines:
        return None
    known = [(line, line.combination) for line in lines if line.combination is not None]
    asked = [(line, one) for line, one in known if one.plan.action != "vote"]
    gains: list[int] = []
    ceilings: list[int] = []
    for line, one in known:
        verdicts = CombinedVerdicts.of(line)
        if verdicts is not None:
            is_asked = one.plan.action != "vote"
            gains.append(0 if one.plan.is_trial or not is_asked else verdicts.gain)
            ceilings.append(int(is_asked and verdicts.is_winnable))
    return CombineSummary(
        problems=len(known),
        split=len(asked),
        trials=sum(one.plan.is_trial for _, one in asked),
        changed=sum(one.answer != one.voted for _, one in asked),
        gained=gains.count(1),
        lost=gains.count(-1),
        pairs=sum(one.pairs for _, one in asked),
        consistent=sum(one.consistent for _, one in asked),
        winnable=sum(ceilings),
        gain=compare_runs([0] * len(gains), gains, n_samples=len(gains)).difference,
        ceiling=sum(ceilings) / len(ceilings) if ceilings else math.nan,
        below=known[-1][1].plan.below,
        actions=tuple(sorted({one.plan.action for _, one in asked})),
        usage=sum((one.usage for _, one in asked), Usage()),
        unusable=sum(bool(one.error) for _, one in asked),
    )
