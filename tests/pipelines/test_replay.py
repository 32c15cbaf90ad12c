"""Tests of replays: the same gate repeats all decisions, and a rollout is marked from the turn on
where another gate decides differently.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

import atts
from atts.analysis import PolicyChange, replay_policy, run_replay
from atts.api import Setup, evaluate_sync
from atts.calibration import Calibrator
from atts.core import Chunk, Decision, Features, Outcome, Turn, TurnKey, Usage
from atts.errors import OptionError
from atts.journal import Decided, open_run
from atts.pipelines import (
    Answers,
    Chunking,
    ConformalGate,
    CueGate,
    FixedGate,
    Gate,
    Policy,
    ThresholdGate,
    TopGate,
)
from atts.testing import toy_problems

Solve = Callable[..., list[Outcome]]
POLICY = Policy(samples=6, early_stop="none")


def conformal(rate: float) -> Gate:
    return ConformalGate(Calibrator(rate, "question-turn"))


def test_the_same_frozen_gate_replays_to_the_same_decisions_and_answers(
    attempt: Solve, answers: Answers
) -> None:
    """With the same frozen gate, a replay has each recorded decision and vote, and no turn is
    off-policy.
    """
    outcomes = attempt(POLICY, ThresholdGate(1.8))
    again = replay_policy(outcomes, ThresholdGate(1.8), POLICY, answers.group)
    assert again.off_policy == 0
    assert [p.answer for p in again.problems] == [o.answer for o in outcomes]
    recorded = [t.decision for o in outcomes for r in o.rollouts for t in r.turns if t.decision]
    assert sorted(d.escalate for d in again.decisions) == sorted(d.escalate for d in recorded if d)
    lines = [r for p in again.problems for r in p.rollouts]
    assert sum(r.draft_tokens for r in lines) == sum(o.usage.draft_tokens for o in outcomes)
    assert sum(r.scored_tokens for r in lines) == sum(o.usage.scored_tokens for o in outcomes)


def test_tokens_of_cancelled_calls_are_counted(attempt: Solve, answers: Answers) -> None:
    """If a settled vote ends a rollout during a call, the tokens already written are counted in the
    run and in its replay.
    """
    outcomes = attempt(POLICY, ThresholdGate(1.8))
    loose = Usage(draft_tokens=7, target_tokens=5, scored_tokens=3, wasted_tokens=12)
    cut = [
        changed(
            o,
            rollouts=tuple(changed(r, finish="settled", usage=r.usage + loose) for r in o.rollouts),
        )
        for o in outcomes
    ]
    lines = [
        r
        for p in replay_policy(cut, ThresholdGate(1.8), POLICY, answers.group).problems
        for r in p.rollouts
    ]
    for line, rollout in zip(lines, (r for o in cut for r in o.rollouts), strict=True):
        spent = (line.draft_tokens, line.target_tokens, line.scored_tokens)
        assert spent == (
            rollout.usage.draft_tokens,
            rollout.usage.target_tokens,
            rollout.usage.scored_tokens,
        )


def test_an_online_gate_replays_exactly_in_the_recorded_order(
    attempt: Solve, answers: Answers
) -> None:
    """A gate that learns during the run repeats its decisions in a replay if it gets the chunks in
    the recorded order.
    """
    decided: dict[TurnKey, Decided] = {}

    class Noting(ConformalGate):
        """A gate that records the order of its requests."""

        def decide(self, features, score):  # type: ignore[no-untyped-def]
            decision = super().decide(features, score)
            decided[decision.turn_key] = Decided(decision)
            return decision

    outcomes = attempt(POLICY, Noting(Calibrator(0.3, "question-turn")))
    again = replay_policy(outcomes, conformal(0.3), POLICY, answers.group, decided=decided)
    assert again.off_policy == 0


def test_another_rate_is_off_policy_where_it_differs(attempt: Solve, answers: Answers) -> None:
    """In a replay that accepts every chunk, a rollout is off-policy exactly if the recorded run
    escalated one of its scored chunks.
    """
    outcomes = attempt(POLICY, conformal(0.4))
    none = replay_policy(outcomes, FixedGate("accept"), POLICY, answers.group)
    strayed = {
        (r.problem, r.sample)
        for p in none.problems
        for r in p.rollouts
        if r.off_policy_from is not None
    }
    escalated = {
        (r.problem, r.sample)
        for o in outcomes
        for r in o.rollouts
        if any(t.decision and t.decision.escalate and t.score is not None for t in r.turns)
    }
    assert strayed == escalated
    assert escalated
    assert none.rate == 0


def test_a_replay_with_fewer_samples_and_turns_cuts_the_record(
    attempt: Solve, answers: Answers
) -> None:
    """A replay may have fewer samples and turns than the recorded run. Rollouts beyond its samples
    do not vote, and answers beyond its turns do not count.
    """
    outcomes = attempt(POLICY, ThresholdGate(1.8))
    one = replay_policy(outcomes, ThresholdGate(1.8), changed(POLICY, samples=1), answers.group)
    assert [p.answer for p in one.problems] == [o.rollouts[0].answer for o in outcomes]
    brief = replay_policy(outcomes, ThresholdGate(1.8), changed(POLICY, turns=1), answers.group)
    assert all(r.answer is None for p in brief.problems for r in p.rollouts)


def test_a_rollout_that_started_again_has_as_many_turns_again(
    attempt: Solve, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the target starts a rollout again, its turns are counted from zero. A replay with fewer
    turns gives the same answers as a live run with that limit.
    """
    monkeypatch.setattr("atts.pipelines.builder._LONG_PIECE", 12)
    long = changed(POLICY, escalates="rollout", chunking=Chunking(12, 12, ()), turns=12)
    short = changed(long, turns=3)
    recorded = attempt(long, ThresholdGate(1.8))
    live = attempt(short, ThresholdGate(1.8))
    late = [
        rollout
        for outcome in live
        for rollout in outcome.rollouts
        if len(rollout.turns) > 3 and rollout.answer is not None
    ]
    assert late, "some rollouts answer after more turns than the limit, because they started again"
    again = replay_policy(recorded, ThresholdGate(1.8), short, answers.group)
    assert again.off_policy == 0
    replayed = {(one.problem, one.sample): one for p in again.problems for one in p.rollouts}
    for rollout in (rollout for outcome in live for rollout in outcome.rollouts):
        one = replayed[rollout.problem, rollout.sample]
        assert one.answer == rollout.answer
        assert one.target_tokens == rollout.usage.target_tokens


def test_inserted_tokens_are_not_counted_as_written(attempt: Solve, answers: Answers) -> None:
    """Tokens inserted by budget forcing count as written neither in a shortened rollout nor in the
    whole one.
    """
    outcomes = attempt(POLICY, ThresholdGate(1.8))
    wait = Turn(0, (Chunk("draft", "Wait", (1, 2, 3), (1, 2, 3), "delimiter"),), is_forced=True)
    forced = [
        changed(o, rollouts=tuple(changed(r, turns=(wait, *(changed(t, index=t.index + 1) for t in r.turns)))
                                  for r in o.rollouts))
        for o in outcomes
    ]  # fmt: skip
    brief = replay_policy(forced, ThresholdGate(1.8), changed(POLICY, turns=1), answers.group)
    assert all(r.draft_tokens == 0 for p in brief.problems for r in p.rollouts)


def test_a_round_gate_replays_over_whole_rounds(attempt: Solve, answers: Answers) -> None:
    """A round gate escalates a fixed share of each round. Its replay escalates this share of the
    recorded chunks with scores.
    """
    outcomes = attempt(POLICY, ThresholdGate(1.8))
    again = replay_policy(outcomes, TopGate.of(0.25), POLICY, answers.group)
    assert abs(again.rate - 0.25) < 0.05


def run_of(problems: int, samples: int, directory: Path) -> None:
    """Record a run of scripted models that write whole rollouts, with a gate that learns."""
    setup = Setup(draft="scripted", target="scripted", rate=0.3, concurrency=8)
    policy = changed(setup.policy, samples=samples, early_stop="none")
    evaluate_sync(toy_problems(problems, 4), changed(setup, policy=policy), directory=directory)


def test_a_replay_keeps_numbers_and_no_texts(tmp_path: Path) -> None:
    """After a journal is read, memory keeps only numbers of each chunk and its decisions."""
    run_of(24, 4, tmp_path)
    # this replay only imports modules and fills caches; the next one is measured
    atts.replay(tmp_path, rate=0.4)
    tracemalloc.start()
    try:
        done = atts.replay(tmp_path, rate=0.4)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(done.decisions) > 24 * 4 * 3
    # bytes per decision; earlier versions needed more than 2,000
    assert held / len(done.decisions) < 700


def test_replayed_decisions_read_like_a_list(tmp_path: Path) -> None:
    """A replay's decisions can be indexed and sliced like a list. Each access creates the decision
    from columns, and repeated accesses give equal decisions.
    """
    run_of(6, 4, tmp_path)
    done = atts.replay(tmp_path, rate=0.1)
    pairs = list(done.decisions)
    assert pairs == [done.decisions[place] for place in range(len(pairs))]
    assert list(done.decisions[2:5]) == pairs[2:5]
    assert done.decisions[-1] == pairs[-1]
    assert all(pair.decision.why for pair in pairs)
    assert all(pair.decision.turn_key == pair.recorded.turn_key for pair in pairs)
    changes = sum(pair.decision.escalate != pair.recorded.escalate for pair in pairs)
    assert changes == done.changed > 0
    assert any(pair.off_policy for pair in pairs)


class Reading:
    """A gate that escalates by the text alone."""

    def preview(self, features: Features) -> Decision:
        """Escalate or accept depending on whether the text has a given letter."""
        return features.decision("escalate" if "e" in features.text else "accept")

    def decide(self, features: Features, score: float) -> Decision:
        """Decide as the preview did."""
        return self.preview(features)

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn nothing."""


@pytest.mark.parametrize("way", ["a gate of the user's", "a method that looks for words", "capped"])
def test_a_gate_that_reads_gets_the_texts(way: str, tmp_path: Path) -> None:
    """In a replay, a gate that reads texts gets the texts of the chunks. The cases are a user's
    gate, and atts' gate of cue words with and without a cap.
    """
    run_of(6, 2, tmp_path)
    texts = {
        (rollout.problem, rollout.sample, turn.index): (turn.drafted or turn.chunks[0]).text
        for outcome in open_run(tmp_path).outcomes()
        for rollout in outcome.rollouts
        for turn in rollout.turns
    }
    if way == "a gate of the user's":
        done = atts.replay(tmp_path, gate=Reading())
        wanted = {key: "e" in text for key, text in texts.items()}
    else:
        budget = 10**6 if way == "capped" else None
        cue = min(texts.values(), key=len)[-3:]
        done = run_replay.replay_run(
            open_run(tmp_path), PolicyChange(budget=budget), lambda _: CueGate((cue.lower(),))
        )
        wanted = {key: cue.lower() in text.lower() for key, text in texts.items()}
    found = {pair.decision.turn_key: pair.decision.escalate for pair in done.decisions}
    assert found == {key: wanted[key] for key in found}
    assert len(set(found.values())) == 2


def test_a_method_that_would_have_written_other_chunks_is_not_replayed(tmp_path: Path) -> None:
    """A replay under a method with which other chunks would have been written is refused, because
    the record does not contain these chunks.
    """
    setup = Setup(draft="scripted", target="scripted", policy=Policy(samples=2))
    run = evaluate_sync(toy_problems(1), setup, directory=tmp_path / "run")
    for method, named in (
        ("target-only", "drafter"),
        ("exact", "drafter"),
        ("cascade", "escalates"),
        ("spec-reason", "score"),
        ("paper-marginal", "takeover"),
    ):
        with pytest.raises(OptionError, match=f"needs a value of {named} that differs"):
            atts.replay(run, method=method)
    for method in ("coin", "draft-only", "top-b"):
        assert atts.replay(run, method=method).replayed.decisions > 0


def test_a_run_without_scores_cannot_be_replayed_at_another_rate(tmp_path: Path) -> None:
    """A run of coins has no scores for a replay at another rate, but it can be replayed with fewer
    samples.
    """
    setup = Setup(draft="scripted", target="scripted", method="coin", policy=Policy(samples=2))
    run = evaluate_sync(toy_problems(1), setup, directory=tmp_path / "run")
    changes: list[dict[str, Any]] = [{"rate": 0.5}, {"method": "atts"}, {"budget": 1}]
    for change in changes:
        with pytest.raises(OptionError, match="no chunk of the run has a score"):
            atts.replay(run, **change)
    assert atts.replay(run, samples=1).changed == 0


def test_a_replay_keeps_the_rule_that_accepts_what_siblings_agree_on(tmp_path: Path) -> None:
    """If the run accepted chunks because sibling rollouts agreed, a replay does too.

    At the recorded rate it repeats all decisions of the run.
    """
    policy = Policy(samples=8, early_stop="none")
    setup = Setup(
        "scripted", "scripted", rate=0.5, accept_when_agreeing=0.4, policy=policy, concurrency=1
    )
    evaluate_sync(toy_problems(12, 5), setup, directory=tmp_path / "run")
    recorded = {
        event.decision.turn_key: event.decision for event in open_run(tmp_path / "run").decisions()
    }
    assert any("the sibling rollouts agree" in decision.why for decision in recorded.values())
    again = atts.replay(tmp_path / "run", rate=0.5)
    different = [one for one in again.decisions if one.decision.action != one.recorded.action]
    assert different == []
    assert any("the sibling rollouts agree" in one.decision.why for one in again.decisions)
