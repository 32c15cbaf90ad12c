"""Tests of gates made from calibrations: warm-ups, certified gates, and gates that skip scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atts.analysis import build_report
from atts.api import Setup, evaluate_sync
from atts.calibration import Calibrator, StoredScores
from atts.core import Outcome, Problem
from atts.errors import CalibrationInputError, OptionError
from atts.journal import JOURNAL, open_run
from atts.methods import (
    GateInputs,
    LabelledRun,
    certified_gate,
    certify_net_runs,
    certify_runs,
    frozen_gate,
    preset,
    warming_gate,
)
from atts.pipelines import ConformalGate, Features, FixedGate, Policy, WarmingGate
from atts.testing import toy_problems

Solve = Callable[..., list[Outcome]]
POLICY = Policy(samples=6, early_stop="none")
STORED = StoredScores.of([1.0 + i / 50 for i in range(200)])


def right(outcome: Outcome) -> bool:
    return outcome.answer == outcome.problem.answer


def test_a_warm_up_escalates_nothing_and_counts_its_cost(attempt: Solve) -> None:
    """During the warm-up the gate stores scores and escalates nothing. Later it may escalate
    chunks. It counts the tokens that were scored for the warm-up.
    """
    gate = warming_gate(30, 0.5, "marginal")
    outcomes = attempt(POLICY, gate)
    turns = [turn for o in outcomes for line in o.rollouts for turn in line.turns if turn.decision]
    warm = [turn for turn in turns if turn.decision and turn.decision.origin == "warm-up"]
    later = [turn for turn in turns if turn.decision and turn.decision.origin != "warm-up"]
    assert len(warm) == 30
    assert not any(turn.decision.escalate for turn in warm if turn.decision)
    assert any(turn.decision.escalate for turn in later if turn.decision)
    assert gate.spent == sum(len(turn.chunks[0].logprobs) for turn in warm)
    assert sum(o.usage.scored_tokens for o in outcomes) > gate.spent


def test_after_the_warm_up_the_gate_ranks_among_its_scores() -> None:
    """After a warm-up with scores 1 to 4, the gate has rate 0.2. It escalates a score above all
    four, and accepts a score below all four.
    """
    gate = warming_gate(4, 0.4, "split")
    for number, score in enumerate([1.0, 2.0, 3.0, 4.0]):
        features = Features(f"q{number}", tokens=7)
        assert gate.preview(features).action == "verify"
        decision = gate.decide(features, score)
        gate.observe(decision, False)
        assert not decision.escalate
    assert gate.spent == 28
    assert isinstance(gate.gate, ConformalGate)
    assert isinstance(gate.gate.calibrator, Calibrator)
    assert gate.gate.calibrator.stored.scores == (1.0, 2.0, 3.0, 4.0)
    assert gate.decide(Features("q"), 9.0).escalate
    assert not gate.decide(Features("q"), 1.01).escalate


def test_a_warm_up_may_escalate_everything() -> None:
    """With meanwhile="escalate", every chunk of the warm-up escalates."""
    gate = warming_gate(2, 0.1, meanwhile="escalate")
    assert gate.decide(Features("q"), 1.0).escalate
    with pytest.raises(CalibrationInputError):
        gate.decide(Features("q"), math.nan)
    with pytest.raises(OptionError, match="at least 1"):
        warming_gate(0, 0.1)
    with pytest.raises(OptionError, match="did you mean 'accept'"):
        WarmingGate(3, lambda found: FixedGate("accept"), "acept")  # type: ignore[arg-type]


def test_decisions_of_the_warm_up_do_not_count_for_the_rate() -> None:
    """The calibrator counts only decisions after the warm-up, so those of the warm-up do not affect
    the realised rate.
    """
    gate = warming_gate(2, 0.5, "marginal")
    for score in (1.0, 1.5):
        gate.observe(gate.decide(Features("q"), score), False)
    gate.observe(gate.decide(Features("q"), 1.2), False)
    assert isinstance(gate.gate, ConformalGate)
    assert isinstance(gate.gate.calibrator, Calibrator)
    assert gate.gate.calibrator.decided == 1


def test_a_certified_gate_decides_as_it_was_tested(attempt: Solve) -> None:
    """The certificate was computed from labelled runs with a frozen gate. In a new run, the
    certified gate makes the same decisions, and each decision names the certificate.
    """
    target = attempt(replace(POLICY, drafter="target"), FixedGate("accept"), problems=40)
    runs = [
        LabelledRun(
            "split",
            rate,
            attempt(replace(POLICY, samples=2), frozen_gate(rate, STORED), problems=40),
        )
        for rate in (0.9, 0.5)
    ]
    certificate = certify_runs(target, runs, right, epsilon=0.5, delta=0.2)
    assert certificate.chosen is not None
    gate = certified_gate(certificate, STORED)
    plain = frozen_gate(certificate.chosen.rate, STORED)
    for score in (1.0, 2.5, 4.0, 9.0):
        said = gate.decide(Features("q", 1), score)
        tested = plain.decide(Features("q", 1), score)
        assert (said.action, said.p) == (tested.action, tested.p)
        assert said.origin == "certificate"
    assert "at most 50.0 %" in gate.promise[0]
    assert gate.promise[1] == certificate.voided_by
    outcomes = attempt(POLICY, gate, problems=3)
    decisions = [
        t.decision for o in outcomes for line in o.rollouts for t in line.turns if t.decision
    ]
    assert decisions
    assert all(d.origin == "certificate" or d.score is None for d in decisions)


def test_a_certified_gate_learns_nothing() -> None:
    """Observations do not change a certified gate: after a thousand of them, it decides the same."""
    target = [_solved(str(number)) for number in range(300)]
    certificate = certify_runs(target, [LabelledRun("split", 0.3, target)], right, epsilon=0.05)
    gate = certified_gate(certificate, STORED)
    before = [gate.decide(Features("q"), score).p for score in (1.5, 3.0)]
    for _ in range(1000):
        gate.observe(gate.decide(Features("q"), 50.0), True)
    assert [gate.decide(Features("q"), score).p for score in (1.5, 3.0)] == before


def test_a_lossy_policy_and_runs_of_other_problems_are_not_certified() -> None:
    """A policy whose answers are all wrong is not certified. A run on other problems than those of
    the target alone is refused.
    """
    target = [_solved(str(number)) for number in range(50)]
    wrong = [replace(outcome, answer="no") for outcome in target]
    certificate = certify_runs(target, [LabelledRun("split", 0.2, wrong)], right, epsilon=0.05)
    assert certificate.chosen is None
    with pytest.raises(CalibrationInputError, match="no policy can be certified"):
        certified_gate(certificate, STORED)
    with pytest.raises(CalibrationInputError, match="1 other problem"):
        certify_runs(target, [LabelledRun("split", 0.2, target[:-1])], right, epsilon=0.05)


def test_balanced_losses_and_gains_pass_the_net_test_only() -> None:
    """A policy loses six of 300 answers that the target alone gets right, and wins six others. With
    epsilon = 0.03 it passes only the test of the net loss.
    """
    target = [_solved(str(number)) for number in range(300)]
    target = [replace(one, answer="no") if number < 6 else one for number, one in enumerate(target)]
    policy = [_solved(str(number)) for number in range(300)]
    policy = [
        replace(one, answer="no") if number >= 294 else one for number, one in enumerate(policy)
    ]
    runs = [LabelledRun("split", 0.3, policy)]
    net, old = (
        certify(target, runs, right, epsilon=0.03) for certify in (certify_net_runs, certify_runs)
    )
    assert net.chosen is not None
    assert old.chosen is None
    assert "less often than the target alone" in net.guarantee
    with pytest.raises(CalibrationInputError, match="1 other problem"):
        certify_net_runs(target, [LabelledRun("split", 0.2, target[:-1])], right, epsilon=0.05)


@pytest.mark.parametrize("rollouts", [4, 64, 256])
def test_scores_wait_for_as_many_issues_as_a_run_has_in_flight(rollouts: int) -> None:
    """Scores join the calibrator's pool in the order in which they were requested. If the first
    requested score arrives last, all others wait for it, however many they are.
    """
    gate, calibrator = Setup(concurrency=rollouts).decider()
    issued = [gate.preview(Features("q", sample=sample, tokens=7)) for sample in range(rollouts)]  # type: ignore[union-attr]
    for asked in [*issued[1:], issued[0]]:
        calibrator.observe(calibrator.decide(1.5, "q", 0, asked.sample, asked.issue))
        assert calibrator.state()["order"]["given_up"] == 0


def test_presets_build_the_warmed_gate() -> None:
    """The name of a method and a calibrator are enough to build the gate."""
    assert isinstance(preset("atts").gate(GateInputs(Calibrator(0.2), warmup=10)), WarmingGate)


def _solved(name: str) -> Outcome:
    return Outcome(Problem(name, "?", "yes"), (), "yes")


def test_a_resumed_warm_up_stores_only_the_rest(tmp_path: Path) -> None:
    """If a run is cut during its warm-up, the second session continues the warm-up and does not
    start it again.
    """

    def setup() -> Setup:
        base = Setup(draft="scripted", target="scripted", rate=0.4, concurrency=4)
        policy = replace(base.policy, samples=4, early_stop="none", first_wave=0)
        return replace(base, policy=policy, gate=warming_gate(40, 0.4, "marginal"))

    problems = toy_problems(8, 5)
    evaluate_sync(problems, setup(), directory=tmp_path)
    journal = tmp_path / JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    warm = [number for number, line in enumerate(lines) if "warm-up score " in line]
    journal.write_text("".join(lines[: warm[len(warm) // 2]]))
    evaluate_sync(problems, setup(), directory=tmp_path)
    decided = [event.decision for event in open_run(tmp_path).decisions()]
    assert sum(decision.origin == "warm-up" for decision in decided) == 40
    assert sum(decision.escalate for decision in decided) > 0


def test_the_report_of_a_certified_run_states_the_certificate(tmp_path: Path) -> None:
    """A report needs only the run directory to state the certificate's guarantee and assumptions.
    Each decision in the journal names the certificate.
    """
    target = [_solved(str(number)) for number in range(300)]
    certificate = certify_runs(target, [LabelledRun("split", 0.3, target)], right, epsilon=0.05)
    base = Setup(draft="scripted", target="scripted", rate=0.3)
    evaluate_sync(
        toy_problems(4, 4),
        replace(base, gate=certified_gate(certificate, STORED)),
        directory=tmp_path,
    )
    calibration = build_report(tmp_path).report.calibration
    assert calibration is not None
    promise = calibration.promise
    assert (promise.guarantee, promise.voided_by) == (certificate.guarantee, certificate.voided_by)
    decided = [event.decision for event in open_run(tmp_path).decisions()]
    assert decided
    assert all(
        decision.origin == "certificate" for decision in decided if decision.score is not None
    )
