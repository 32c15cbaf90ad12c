"""Tests of combining: if votes split, the target selects or rewrites an answer, and killed runs
resume.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from atts.core import Combination, CombinePlan, Completion, Outcome, SampleRequest
from atts.engine import EngineAround
from atts.errors import BadReply, OptionError
from atts.journal import (
    JOURNAL,
    Combining,
    FinishedProblem,
    FinishedSample,
    OutcomeReached,
    Sampled,
    Warned,
)
from atts.pipelines import Combiner, FixedGate, Policy, odds
from atts.run import RunResult
from atts.testing import Latency, ScriptedEngine, Selector, Skill, ToyModel, ToyTokenizer

Outcomes = Callable[[RunResult], dict[str, str]]
WEAK = Skill(right=0.7, typical=0.6)
POLICY = Policy(samples=6, early_stop="none")


def planned(world: Any, selector: Selector, combine: Any = "select", **changes: Any) -> Any:
    """Plan a run in which a weak draft writes alone, and the target is called if votes split."""
    return world.plan(
        draft=ScriptedEngine("draft", model=ToyModel(WEAK, ToyTokenizer())),
        target=ScriptedEngine("target", selector=selector),
        gate=FixedGate("accept"),
        policy=replace(POLICY, combine=combine, **changes),
        concurrency=32,
        limits={},
    )


def chance_of(chosen: int, correct: Sequence[bool], selector: Selector) -> float:
    """Return the probability that a candidate answer is chosen, by enumeration of all comparison
    results.

    This is a second implementation of the rule: each verdict gives a point, the most points win,
    and on a tie the earlier candidate wins.
    """
    asked = [
        order
        for first, second in combinations(range(len(correct)), 2)
        for order in ((first, second), (second, first))
    ]
    total = 0.0
    for names_first in product((True, False), repeat=len(asked)):
        chance = 1.0
        points = [0] * len(correct)
        for (first, second), is_first in zip(asked, names_first, strict=True):
            if correct[first] == correct[second]:
                seen = 0.5
            else:
                seen = selector.skill if correct[first] else 1 - selector.skill
            of_first = selector.first + (1 - selector.first) * seen
            chance *= of_first if is_first else 1 - of_first
            points[first if is_first else second] += 1
        if points.index(max(points)) == chosen:
            total += chance
    return total


@pytest.mark.parametrize("selector", [Selector(0.9), Selector(0.75, first=0.3), Selector(0.5)])
def test_a_selector_of_known_skill_gains_as_computed(world: Any, selector: Selector) -> None:
    """With a selector of known skill, the number of correct answers is within three standard
    deviations of its computed mean.
    """
    result = world.run(planned(world, selector), world.session(None), problems=100)
    expected = 0.0
    variance = 0.0
    split = [one for one in result.problems if one.combination.plan.action == "select"]
    for one in split:
        reference = next(
            kept.problem.answer for kept in result.kept if kept.problem.id == one.problem
        )
        correct = [answer == reference for answer in one.combination.finalists]
        chance = sum(
            chance_of(place, correct, selector)
            for place, is_correct in enumerate(correct)
            if is_correct
        )
        expected += chance
        variance += chance * (1 - chance)
    seen = sum(one.is_correct for one in split)
    assert len(split) > 30
    assert variance > 1  # the result of enough problems must depend on chance
    assert abs(seen - expected) < 3 * variance**0.5, (seen, expected, variance)
    found = result.combined
    assert found.split == len(split)
    voted = sum(
        next(s.verdict for s in one.samples if s.answer == one.combination.voted) == "correct"
        for one in split
    )
    assert found.gained - found.lost == seen - voted
    assert found.gain.value == pytest.approx((seen - voted) / 100)
    winnable = sum(any(s.verdict == "correct" for s in one.samples) for one in split) - voted
    assert found.winnable == winnable
    assert found.ceiling == pytest.approx(winnable / 100)


def test_a_perfect_selector_reaches_the_best_of_the_finalists(world: Any) -> None:
    """A perfect selector chooses a correct candidate answer whenever there is one, and no selector
    gains more.
    """
    perfect = world.run(planned(world, Selector(1.0)), world.session(None), problems=100).combined
    assert perfect.lost == 0
    assert 0 < perfect.gain.value <= perfect.ceiling
    assert perfect.gain.low > 0
    written = world.run(
        planned(world, Selector(1.0), "synthesize"), world.session(None), problems=100
    ).combined
    # a rewritten answer may be correct even if no rollout is correct
    assert written.gain.value >= perfect.gain.value


def test_the_cost_of_combining_is_part_of_a_problems_usage(world: Any) -> None:
    """The calls, written tokens and read tokens of combining are part of a problem's usage, and
    equal the sums of the journal.
    """
    result = world.run(planned(world, Selector(0.8)), world.session(), problems=40)
    asked = [
        event for event in world.events() if isinstance(event, Sampled) and event.role == "target"
    ]
    found = result.combined
    assert len(asked) == found.usage.calls == 2 * found.pairs > 0
    assert found.usage.target_tokens == sum(len(event.completion.ids) for event in asked)
    # the draft writes all rollouts, so the target writes tokens only for comparisons
    assert result.usage.target_tokens == found.usage.target_tokens
    assert found.usage.target_prefill_tokens > 0
    recorded = [event for event in world.events() if isinstance(event, OutcomeReached)]
    pairs = [event.combination.pairs for event in recorded if event.combination is not None]
    assert len(pairs) == 40
    assert sum(pairs) == found.pairs


@pytest.mark.parametrize("combine", ["select", "synthesize", "auto"])
def test_a_killed_combining_run_resumes_to_the_same_answers(
    world: Any, outcomes: Outcomes, combine: Any
) -> None:
    """Wherever the journal is cut, the resumed run gives the same answers and sends no request
    twice.
    """
    quick = Latency(per_sample=0.05, sampled_token=0.01, jitter=0.5)

    def plan() -> Any:
        plan = planned(world, Selector(0.9), combine)
        target = ScriptedEngine("target", selector=Selector(0.9), latency=quick)
        return replace(plan, target=target, recall="recorded")

    first = world.run(plan(), world.session(), problems=8)
    calls = sum(isinstance(event, Sampled) for event in world.events())
    combined = {one.problem: one.combination for one in first.problems}
    journal = world.tmp_path / "run" / JOURNAL
    text = journal.read_bytes()
    marks = [place for place in range(len(text)) if text.startswith(b'"combining"', place)]
    draws = random.Random(1)
    # the journal is cut at three comparisons and at four random positions
    places = [*draws.sample(marks, 3), *(draws.randrange(len(text)) for _ in range(4))]
    for place in places:
        shutil.rmtree(world.tmp_path / "copy", ignore_errors=True)
        shutil.copytree(world.tmp_path / "run", world.tmp_path / "copy")
        with (world.tmp_path / "copy" / JOURNAL).open("r+b") as file:
            file.truncate(place + 200 if place in marks else place)
        again = world.run(plan(), world.session("copy"), problems=8)
        assert outcomes(again) == outcomes(first)
        assert {one.problem: one.combination for one in again.problems} == combined
        events = world.events("copy")
        assert sum(isinstance(event, Sampled) for event in events) == calls
        assert not [event for event in events if isinstance(event, Warned)]
        plans = [event.problem for event in events if isinstance(event, Combining)]
        assert len(plans) == len(set(plans)) == 8


def test_auto_ignores_a_selector_without_skill(world: Any) -> None:
    """With `auto`, a selector without skill changes no vote and is soon no longer called.

    Without `auto` such a selector costs accuracy.
    """
    coin = Selector(0.5)
    outright = world.run(planned(world, coin), world.session(None), problems=160).combined
    found = world.run(planned(world, coin, "auto"), world.session(None), problems=160).combined
    assert outright.gain.value < -0.005
    assert found.gain.value >= -0.005
    # fewer problems were compared, because the run stopped calling the target
    assert found.split < outright.split


def test_auto_uses_a_skilled_selector_after_its_trial(world: Any) -> None:
    """With `auto`, a skilled selector is used after its trial and gains accuracy.

    During the trial, every problem keeps its voted answer.
    """
    result = world.run(planned(world, Selector(0.95), "auto"), world.session(None), problems=160)
    found = result.combined
    assert 0 < found.trials < found.split
    assert found.gain.low > 0
    trials = [one.combination for one in result.problems if one.combination.plan.is_trial]
    assert all(one.answer == one.voted for one in trials)


@pytest.mark.parametrize("is_graded", [True, False])
@pytest.mark.parametrize("share_split", [0.15, 0.5])
def test_a_selector_without_skill_loses_half_a_point_at_most(
    is_graded: bool, share_split: float
) -> None:
    """Under `auto`, a selector without skill loses at most half a point of accuracy.

    The limit holds on average over 400 simulated runs of 500 problems, and in all but a few of
    them.
    """
    losses = [_loss_of_a_coin(seed, is_graded, share_split) for seed in range(400)]
    assert sum(losses) / len(losses) < 0.001
    assert sum(loss > 0.005 for loss in losses) / len(losses) < 0.05


def _loss_of_a_coin(seed: int, is_graded: bool, share_split: float) -> float:
    """Return the accuracy that a selector without skill loses against the vote, in one simulated
    run.
    """
    draws = random.Random(seed)
    combiner = Combiner()
    loss = 0
    for number in range(500):
        if draws.random() >= share_split:
            continue
        share = draws.choice((0.375, 0.5, 0.625))
        plan = combiner.plan("auto", share, 2)
        # the candidate answer with more votes is correct more often
        right = draws.choices(("first", "second", "none"), (0.5, 0.25, 0.25))[0]
        # for each of two verdicts, whether it prefers the second candidate answer
        verdicts = [draws.random() < 0.5 for _ in range(2)]
        chosen = "second" if all(verdicts) else "first"
        known = Combination(
            plan,
            "first",
            share,
            chosen=chosen if plan.action != "vote" else None,
            pairs=int(plan.action != "vote"),
            consistent=int(plan.action != "vote" and verdicts[0] == verdicts[1]),
        )
        loss += (right == "first") - (right == known.answer)
        combiner.learn(_finished(str(number), known, right if is_graded else None))
    return loss / 500


def _finished(name: str, known: Combination, right: str | None) -> FinishedProblem:
    """Return a finished problem with the answers "first" and "second"."""

    def verdict(answer: str) -> Any:
        return None if right is None else "correct" if answer == right else "wrong"

    samples = tuple(
        FinishedSample(number, "answer", answer, verdict(answer))
        for number, answer in enumerate(("first", "second"))
    )
    line = FinishedProblem.of(_outcome(name, known))
    return replace(line, samples=samples, verdict=verdict(known.answer))


def _outcome(name: str, known: Combination) -> Outcome:
    from atts.core import Problem

    return Outcome(Problem(name, "?"), (), known.answer, combination=known)


def test_the_threshold_is_the_quantile_of_what_could_be_won() -> None:
    """The vote threshold is a quantile of leading answers' vote shares, taken over problems that
    combining could correct.

    In about nine of ten later problems of this kind, the leading answer's share is at most the
    threshold.
    """
    draws = random.Random(3)
    covered = 0
    for _ in range(400):
        combiner = Combiner()
        for number in range(40):
            share = draws.betavariate(4, 4)
            known = Combination(CombinePlan("vote"), "first", share)
            combiner.learn(_finished(str(number), known, "second"))
        covered += draws.betavariate(4, 4) <= combiner.below
    assert 0.86 < covered / 400 < 0.94


def test_half_votes_replace_missing_references() -> None:
    """Without grades, the threshold is learned from problems in which the vote of one half of the
    rollouts differs from the vote of all rollouts.
    """
    combiner = Combiner()
    for number in range(9):
        halves = ((0.5 + number / 100, False), (0.9, True))
        known = Combination(CombinePlan("vote"), "first", 0.6, halves=halves)
        assert combiner.below == 1.0
        combiner.learn(_finished(str(number), known, None))
    assert combiner.below == pytest.approx(0.58)


def test_the_odds_of_a_fair_coin_rarely_exceed_10() -> None:
    """The betting odds exceed 10 at some time in at most a tenth of all runs of 16 fair coin flips,
    because the mean over a flip's two outcomes leaves the odds unchanged.
    """
    for better, worse in [(0, 0), (3, 1), (7, 9)]:
        mean = (odds(better + 1, worse) + odds(better, worse + 1)) / 2
        assert mean == pytest.approx(odds(better, worse))
    # the number of runs so far whose odds never exceeded 10, keyed by their counts of both outcomes
    low = {(0, 0): 1}
    for _ in range(16):
        following: dict[tuple[int, int], int] = {}
        for (better, worse), runs in low.items():
            for counts in ((better + 1, worse), (better, worse + 1)):
                if odds(*counts) <= 10:
                    following[counts] = following.get(counts, 0) + runs
        low = following
    exceeded = 1 - sum(low.values()) / 2**16
    assert 0 < exceeded <= 0.1


class Refusing(EngineAround):
    """A target that refuses every comparison."""

    async def around(self, request: Any, call: Any) -> Any:
        """Refuse every request after the rollouts."""
        if isinstance(request, SampleRequest) and request.seed.sample >= POLICY.samples:
            raise BadReply(self.spec.name, "the content was filtered")
        return await call(request)


def test_a_refused_comparison_keeps_the_vote(world: Any) -> None:
    """If the target refuses a comparison, the problem keeps its voted answer and the run is
    complete.
    """
    plan = planned(world, Selector(1.0))
    refusing = replace(plan, target=Refusing(ScriptedEngine("target"), "own"))
    result = world.run(refusing, world.session(None), problems=20)
    assert result.status == "finished"
    assert all(one.answer == one.combination.voted for one in result.problems)
    assert result.combined.split > 0
    assert result.combined.changed == 0
    assert result.combined.unusable == result.combined.split
    assert "the content was filtered" in next(
        one.combination.error for one in result.problems if one.combination.error
    )


class Babbling(EngineAround):
    """A target that names neither of two solutions, but states the larger of their answers."""

    async def around(self, request: Any, call: Any) -> Any:
        """Return the larger answer in a sentence."""
        if isinstance(request, SampleRequest) and request.seed.sample >= POLICY.samples:
            boxes = re.findall(r"boxed\{(\d+)\}", self.tokenizer.decode(request.ids))
            text = f"So it is \\boxed{{{max(map(int, boxes))}}}."
            ids = self.tokenizer.encode(text)
            return Completion(ids, text, "length", (0.0,) * len(ids))
        return await call(request)


def test_a_reply_that_states_an_answer_names_its_solution(world: Any) -> None:
    """If the target's reply states an answer instead of naming a solution, atts chooses the
    solution with this answer.

    Some models solve the problem again in their reply.
    """
    plan = planned(world, Selector(1.0))
    babbling = replace(plan, target=Babbling(ScriptedEngine("target"), "own"))
    result = world.run(babbling, world.session(None), problems=20)
    split = [one for one in result.problems if one.combination.finalists]
    assert split
    for one in split:
        assert one.answer == max(one.combination.finalists, key=int)


def test_a_prompt_must_have_its_fields() -> None:
    """A user's prompt without a field for the solutions is refused before anything runs."""
    with pytest.raises(OptionError, match="solutions"):
        Policy(select_prompt="Which is better? {problem}")
