"""Tests of the cascade: whole problems escalate if the draft's rollouts disagree, at the nominal
rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from atts.analysis.reports.build import build_report
from atts.api import Setup, evaluate, evaluate_sync, replay
from atts.calibration import Calibrator
from atts.core import Outcome
from atts.errors import OptionError, UsageError
from atts.methods import preset
from atts.pipelines import CoinGate, ConformalGate, Features, FixedGate, Policy, Tally, TopGate
from atts.pipelines.scores import disagreement
from atts.run import RunResult
from atts.testing import (
    Latency,
    ScriptedEngine,
    Skill,
    ToyModel,
    ToyTokenizer,
    run_virtual,
    toy_problems,
)

Solve = Callable[..., list[Outcome]]

CASCADE = preset("cascade").policy(Policy(samples=8))


def authors(outcome: Outcome) -> list[set[str]]:
    """Return the model that wrote each rollout."""
    return [
        {chunk.author for turn in rollout.turns for chunk in turn.chunks}
        for rollout in outcome.rollouts
    ]


def test_the_target_writes_whole_rollouts_of_escalated_problems_alone(attempt: Solve) -> None:
    """The draft writes four rollouts of each problem. If the problem escalates, the target writes
    four more; otherwise the target writes none.
    """
    gate = ConformalGate(Calibrator(0.4, "aci", seed=3))
    outcomes = attempt(CASCADE, gate, problems=40)
    sizes = [len(outcome.rollouts) for outcome in outcomes]
    assert set(sizes) == {4, 8}
    for outcome in outcomes:
        assert authors(outcome)[:4] == [{"draft"}] * 4
        assert all(names == {"target"} for names in authors(outcome)[4:])
        assert outcome.usage.scored_tokens == 0
    assert abs(sizes.count(8) / 40 - 0.4) <= 0.1


def test_the_problems_that_agree_least_escalate(attempt: Solve) -> None:
    """With all scores stored in advance, the gate escalates the problems whose draft rollouts agree
    least.
    """
    alone = attempt(replace(CASCADE, samples=5, first_wave=4), FixedGate("accept"), problems=40)
    shares = [max(outcome.votes.values(), default=0.0) for outcome in alone]
    stored = [4 / share if share else 8.0 for share in shares]
    gate = ConformalGate(Calibrator(0.3, "split", stored=stored, seed=1))
    outcomes = attempt(replace(CASCADE, samples=5, first_wave=4), gate, problems=40)
    escalated = [
        share for share, one in zip(shares, outcomes, strict=True) if len(one.rollouts) == 5
    ]
    kept = [share for share, one in zip(shares, outcomes, strict=True) if len(one.rollouts) == 4]
    assert escalated
    assert kept
    assert max(escalated) <= min(kept)


def test_an_accepted_problem_says_how_many_rollouts_agree(attempt: Solve) -> None:
    """The outcome of an accepted problem gives the number of agreeing rollouts as the reason."""
    outcome = attempt(CASCADE, FixedGate("accept"), problems=1)[0]
    leading = int(max(outcome.votes.values()))
    assert outcome.why == f"{leading} of the draft's 4 rollouts agreed"


def test_the_target_alone_may_vote_on_what_is_escalated(attempt: Solve) -> None:
    """An escalated problem has the same rollouts whether all of them vote or only the target's. If
    none of the target's rollouts has an answer, all of them vote.
    """
    kinds: tuple[Literal["all", "target"], ...] = ("all", "target")
    policies = {
        vote: replace(CASCADE, escalated_vote=vote, first_wave=6, samples=8) for vote in kinds
    }
    weak = Skill(right=0.45, typical=0.9)  # a model whose rollouts often make the same mistake
    found = {
        vote: attempt(
            policy,
            FixedGate("escalate"),
            problems=40,
            draft=ScriptedEngine("draft", model=ToyModel(weak, ToyTokenizer())),
        )
        for vote, policy in policies.items()
    }
    right = dict.fromkeys(found, 0)
    for one, other in zip(found["all"], found["target"], strict=True):
        answers = [rollout.answer for rollout in one.rollouts]
        assert answers == [rollout.answer for rollout in other.rollouts]
        assert sum(one.votes.values()) == sum(answer is not None for answer in answers)
        of_target = [answer for answer in answers[6:] if answer is not None]
        if of_target:
            assert sum(other.votes.values()) == len(of_target)
            assert other.answer in of_target
        else:
            assert other.votes == one.votes
        right["all"] += one.answer == one.problem.answer
        right["target"] += other.answer == other.problem.answer
    # six drafts with the same mistake outvote two target rollouts, which are seldom wrong
    assert right["target"] > right["all"]
    kept = attempt(policies["target"], FixedGate("accept"), problems=5)
    assert all(len(outcome.rollouts) == 6 and outcome.votes for outcome in kept)


@pytest.mark.parametrize("action", ["accept", "escalate"])
def test_a_gate_that_needs_no_score_decides_too(
    attempt: Solve, action: Literal["accept", "escalate"]
) -> None:
    """A gate that needs no score escalates all problems or none."""
    outcomes = attempt(CASCADE, FixedGate(action), problems=5)
    assert {len(outcome.rollouts) for outcome in outcomes} == {8 if action == "escalate" else 4}


def test_a_gate_of_rounds_cannot_judge_a_problem(attempt: Solve) -> None:
    """The cascade refuses a gate of rounds, because such a gate compares chunks of sibling
    rollouts, but the cascade judges whole problems.
    """
    with pytest.raises(UsageError, match="whole problem"):
        attempt(CASCADE, TopGate.of(0.5), problems=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 1},
        {"first_wave": 8},
        {"first_wave": 2, "growth": 2.0},
        {"drafter": "target"},
        {"barrier": True},
    ],
)
def test_policies_that_leave_nothing_to_escalate_are_refused(changes: dict[str, object]) -> None:
    """If nothing could escalate under a policy, it is refused, and the message names the key that
    causes this.
    """
    with pytest.raises(OptionError, match="first_wave|escalates"):
        replace(CASCADE, **changes)  # type: ignore[arg-type]


def test_the_score_orders_votes_from_agreement_to_no_answer_at_all() -> None:
    """The fewer rollouts give the leading answer, the worse is a problem's score. A problem without
    any answer has the worst score.
    """
    counts = [(8,), (7, 1), (4, 4), (2, 2, 2, 1, 1), (1,), ()]
    scores = [
        disagreement(Tally(tuple("abcdefgh"[: len(count)]), tuple(map(float, count)), count), 8)
        for count in counts
    ]
    assert scores == sorted(scores)
    assert scores[0] == 1.0
    assert scores[-1] == 16.0


@pytest.mark.parametrize("order", ["random", "easy first", "hard first", "drifting"])
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_the_share_of_problems_is_the_nominal_rate_in_any_order(order: str, rate: float) -> None:
    """The share of escalated problems is the nominal rate within 0.005, in any order of problems.

    The test simulates 10^5 problems of eight rollouts. The possible scores are few, because a score
    depends only on how many rollouts agree.
    """
    rng = random.Random(f"{order} {rate}")
    number = 100_000
    skills = [rng.betavariate(1.2, 1.0) for _ in range(number)]
    if order == "easy first":
        skills.sort(reverse=True)
    elif order == "hard first":
        skills.sort()
    elif order == "drifting":
        skills = [skill * (1 - 0.8 * index / number) for index, skill in enumerate(skills)]
    gate = ConformalGate(Calibrator(rate, "aci", seed=2))
    escalated = 0
    for index, skill in enumerate(skills):
        agreeing = sum(rng.random() < skill for _ in range(8))
        count = Tally(("1",), (float(agreeing),), (agreeing,)) if agreeing else Tally((), (), ())
        features = Features(f"p{index}", sample=8, answered=8, agreement=agreeing / 8)
        asked = gate.preview(features)
        decision = gate.decide(replace(features, issue=asked.issue), disagreement(count, 8))
        gate.observe(decision, decision.escalate)
        gate.forget(features.question)
        escalated += decision.escalate
    assert abs(escalated / number - rate) <= 0.005


def test_escalating_the_rest_gives_the_target_the_rollout(attempt: Solve) -> None:
    """After a rollout's first escalated chunk, the target alone writes the rest of the rollout, and
    its chunks are not judged.
    """
    policy = Policy(samples=6, escalates="rest", early_stop="none")
    gate = ConformalGate(Calibrator(0.2, "aci", seed=5))
    outcomes = attempt(policy, gate, problems=10)
    handed_over = 0
    for outcome in outcomes:
        for rollout in outcome.rollouts:
            turns = rollout.turns
            writers = ["".join(sorted({c.author for c in turn.chunks})) for turn in turns]
            if "target" not in writers:
                continue
            handed_over += 1
            first = writers.index("target")
            assert writers == ["draft"] * first + ["target"] * (len(writers) - first)
            assert all(turn.decision is None for turn in turns[first + 1 :])
    assert handed_over > 5


def test_an_escalated_rollout_is_written_again_from_the_prompt(attempt: Solve) -> None:
    """If a rollout escalates, the target writes it again from the prompt. The draft's tokens count
    as discarded, and the rate counts the chunks that the gate judged.
    """
    policy = Policy(samples=6, escalates="rollout", early_stop="none")
    gate = ConformalGate(Calibrator(0.2, "aci", seed=5))
    outcomes = attempt(policy, gate, problems=40)
    restarted = 0
    late = 0
    judged = 0
    for rollout in (rollout for outcome in outcomes for rollout in outcome.rollouts):
        turns = rollout.turns
        judged += sum(turn.decision is not None for turn in turns)
        written = sum(
            turn.tokens_written("draft") + turn.tokens_written("target") for turn in turns
        )
        usage = rollout.usage
        assert written == usage.draft_tokens + usage.target_tokens
        kept = sum(chunk.tokens for chunk in rollout.chunks)
        assert usage.wasted_tokens == written - kept
        escalated = [turn.index for turn in turns if turn.decision and turn.decision.escalate]
        assert [turn.index for turn in turns if turn.restarts] == escalated
        if not escalated:
            assert {chunk.author for chunk in rollout.chunks} == {"draft"}
            continue
        (place,) = escalated
        restarted += 1
        late += place > 0
        assert {chunk.author for chunk in rollout.chunks} == {"target"}
        assert rollout.text == "".join(c.text for turn in turns[place:] for c in turn.chunks)
        assert rollout.ids("target")[: len(rollout.prompt.target_ids)] == rollout.prompt.target_ids
        assert all(turn.decision is None for turn in turns[place + 1 :])
    assert late > 5, "some rollouts start again after chunks that were accepted"
    assert abs(restarted / judged - 0.2) <= 0.03


def test_a_fresh_rollout_of_a_skilled_target_is_correct(attempt: Solve) -> None:
    """If a target without mistakes writes a rollout again, mistakes of the draft before the
    escalated chunk are corrected too.
    """
    careless = ToyModel(Skill(right=0.5), ToyTokenizer())
    careful = ToyModel(Skill(right=1.0, wander=0.0), ToyTokenizer())
    kinds: tuple[Literal["rest", "rollout"], ...] = ("rest", "rollout")
    correct = dict.fromkeys(kinds, 0)
    for escalates in kinds:
        outcomes = attempt(
            Policy(samples=4, escalates=escalates, early_stop="none"),
            CoinGate(0.3, 1),
            problems=20,
            draft=ScriptedEngine("draft", model=careless),
            target=ScriptedEngine("target", model=careful),
        )
        for outcome in outcomes:
            for rollout in outcome.rollouts:
                if any(turn.decision and turn.decision.escalate for turn in rollout.turns):
                    is_correct = rollout.answer == outcome.problem.answer
                    assert is_correct or escalates == "rest"
                    correct[escalates] += is_correct
    assert correct["rollout"] > correct["rest"]


def test_a_rollout_written_again_keeps_no_chunk() -> None:
    """A takeover that continues or repairs a chunk is refused, because a rollout written again
    keeps no chunk.
    """
    with pytest.raises(OptionError, match="takeover"):
        Policy(escalates="rollout", takeover="continue")


@pytest.mark.parametrize("latency", ["quick problems first", "slow problems first"])
def test_a_small_run_meets_its_rate_in_whatever_order_problems_end(latency: str) -> None:
    """A small run meets its rate whether quick or slow problems end first.

    Problems with agreeing rollouts end early, so scores rise during the run. The gate corrects the
    rate, because it knows how many problems remain.
    """
    problems = toy_problems(40, 5)
    setup = Setup(
        draft=ScriptedEngine("draft", latency=Latency(sampled_token=0.01)),
        target=ScriptedEngine("target", latency=Latency(sampled_token=0.02)),
        method="cascade",
        rate=0.3,
        concurrency=4 if latency == "slow problems first" else 400,
    )

    async def run() -> RunResult:
        return await evaluate(problems, setup)

    result = run_virtual(run)
    judged = sum(problem.judged for problem in result.problems)
    escalated = sum(problem.escalated for problem in result.problems)
    assert judged == 40
    assert abs(escalated - 12) <= 3


@pytest.mark.parametrize("order", ["easy first", "hard first"])
def test_without_the_number_left_a_small_run_misses_its_rate(order: str) -> None:
    """The nominal rate is 0.3, and 40 problems are sorted by agreement. If the gate does not know
    how many problems remain, the realised rate is about 0.6 or 0.1.
    """
    number = 40
    shares: list[float] = []
    for seed in range(20):
        rng = random.Random(seed)
        skills = sorted((rng.betavariate(1.2, 1.0) for _ in range(number)), reverse=order[0] == "e")
        gate = ConformalGate(Calibrator(0.3, "aci", seed=seed))
        escalated = 0
        for index, skill in enumerate(skills):
            agreeing = sum(rng.random() < skill for _ in range(4))
            count = (
                Tally(("1",), (float(agreeing),), (agreeing,)) if agreeing else Tally((), (), ())
            )
            features = Features(f"p{index}", sample=4, left=(number - index) / number)
            asked = gate.preview(features)
            decision = gate.decide(replace(features, issue=asked.issue), disagreement(count, 4))
            gate.observe(decision, decision.escalate)
            escalated += decision.escalate
        shares.append(escalated / number)
    assert abs(sum(shares) / len(shares) - 0.3) <= 0.04
    assert max(abs(share - 0.3) for share in shares) <= 0.1


def test_what_a_cascade_waits_for_is_counted_as_edges_between_siblings(tmp_path: Path) -> None:
    """A target rollout begins after all four draft rollouts of its problem. The task graph
    therefore has an edge from each of them to the target rollout.
    """
    base = Setup(method="cascade", rate=0.5, draft="scripted", target="scripted", concurrency=8)
    setup = replace(base, policy=replace(base.policy, samples=8))
    result = evaluate_sync(toy_problems(12, 3), setup, directory=tmp_path)
    escalated = sum(problem.escalated for problem in result.problems)
    time = build_report(tmp_path).report.timing
    assert escalated > 0
    assert time is not None
    assert time.sibling_edges == escalated * 4 * 4
    assert time.sibling_seconds == 0


def test_a_replay_counts_the_votes_that_the_run_counted(tmp_path: Path) -> None:
    """A replay without changes has the run's answers. Only the target's rollouts vote on escalated
    problems, so some answers differ from those of a vote of all rollouts.
    """
    policy = Policy(samples=8, first_wave=6, escalated_vote="target")
    weak = ScriptedEngine("draft", model=ToyModel(Skill(right=0.45, typical=0.9), ToyTokenizer()))
    setup = Setup(weak, "scripted", method="cascade", rate=0.9, policy=policy)
    result = evaluate_sync(toy_problems(20, 5), setup, directory=tmp_path / "run")
    answers = replay(tmp_path / "run").answers
    assert len(answers) == 20
    assert all(recorded == replayed for recorded, replayed in answers.values())
    overruled = 0
    for problem in result.problems:
        given = [one.answer for one in problem.samples if one.answer is not None]
        overruled += given.count(problem.answer or "") < max(map(given.count, given))
    assert overruled > 0
