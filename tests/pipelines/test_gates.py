"""Tests of gates, which are pure functions from numbers to a decision."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.api import Setup
from atts.calibration import Calibrator, StoredScores
from atts.core import Chunk, Features, Prompt, Rollout
from atts.engine import EngineSpec
from atts.errors import CalibrationInputError, OptionError, UnsupportedByEngine
from atts.methods import PRESETS, GateInputs, preset
from atts.pipelines import (
    AgreementGate,
    CappedGate,
    CoinGate,
    ConformalGate,
    CueGate,
    FixedGate,
    Policy,
    RoundGate,
    StaticRankGate,
    ThresholdGate,
    TopGate,
    check_engines,
)
from atts.pipelines.builder import Siblings
from atts.pipelines.gates import NonLearningGate
from atts.pipelines.scores import SCORE_KINDS, ScoreRule, evidence, mean_logprob, score_of
from atts.testing import toy_groups

SCORES = st.floats(1.0, 50.0, allow_nan=False)


def test_the_conformal_gate_returns_the_calibrators_decision() -> None:
    """The conformal gate returns the calibrator's decision, and numbers the chunks in the order of
    requests across sessions.
    """
    calibrator = Calibrator(0.5, "marginal", stored=[1.1, 1.2, 1.3])
    gate = ConformalGate(calibrator)
    assert gate.preview(Features("q")).action == "verify"
    decision = gate.decide(Features("q", 2, 3), 9.0)
    assert (decision.question, decision.turn, decision.sample, decision.escalate) == (
        "q",
        2,
        3,
        True,
    )
    gate.observe(decision, True)
    assert calibrator.decided == 1
    assert gate.preview(Features("q")).issue == 1
    gate.observe(replace(decision, issue=7), True)
    assert gate.preview(Features("q")).issue == 8


@pytest.mark.parametrize("score", [math.nan, 0.5, -1.0])
def test_a_value_that_is_not_a_perplexity_is_refused(score: float) -> None:
    """The calibrator raises an error for a value that is not a perplexity, and the pipeline
    escalates the chunk.
    """
    with pytest.raises(CalibrationInputError):
        ConformalGate(Calibrator(0.5, "marginal")).decide(Features("q"), score)


def test_a_threshold_gate_escalates_nan() -> None:
    """A threshold gate escalates NaN, whether low or high scores are worse."""
    assert not ThresholdGate(2.0).decide(Features("q"), 2.0).escalate
    assert ThresholdGate(2.0).decide(Features("q"), 2.1).escalate
    assert ThresholdGate(7.0, "below").decide(Features("q"), 6.9).escalate
    assert ThresholdGate(2.0).decide(Features("q"), math.nan).escalate
    assert ThresholdGate(7.0, "below").decide(Features("q"), math.nan).escalate


@settings(max_examples=100, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=40), SCORES, st.sampled_from([0.1, 0.25, 0.4, 0.5]))
def test_the_published_rule_equals_its_formula(
    stored: list[float], score: float, rate: float
) -> None:
    """The published rule escalates a chunk if the share of stored scores below its score is at
    least 1 minus the rate.
    """
    decision = StaticRankGate.of(stored, rate).decide(Features("q"), score)
    assert decision.escalate == (bisect_left(sorted(stored), score) / len(stored) >= 1 - rate)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(SCORES, min_size=1, max_size=16), min_size=1, max_size=8), st.floats(0.0, 1.0)
)
def test_the_round_gate_takes_the_worst_and_carries_its_remainder(
    rounds: list[list[float]], rate: float
) -> None:
    """In each round the chunks with the worst scores escalate. After any number of rounds, their
    number differs from the nominal rate times all chunks by at most one half.
    """
    gate = TopGate.of(rate)
    total = count = 0
    for turn, scores in enumerate(rounds):
        decisions = gate.decide_round([(Features("q", turn, i), s) for i, s in enumerate(scores)])
        over = [s for s, d in zip(scores, decisions, strict=True) if d.escalate]
        kept = [s for s, d in zip(scores, decisions, strict=True) if not d.escalate]
        assert not over or not kept or min(over) >= max(kept)
        total = total + len(scores)
        count = count + len(over)
    assert abs(count - rate * total) <= 0.5 + 1e-6


def test_the_coin_depends_on_the_chunk_and_meets_the_rate() -> None:
    """The coin gate always decides the same for the same chunk. Of 1,600 chunks, the share that
    escalates is near the nominal rate.
    """
    gate = CoinGate(0.3, seed=2)
    coins = [gate.preview(Features("q", t, s)).escalate for t in range(40) for s in range(40)]
    assert coins == [
        gate.preview(Features("q", t, s)).escalate for t in range(40) for s in range(40)
    ]
    assert abs(sum(coins) / 1600 - 0.3) < 4 * math.sqrt(0.21 / 1600)


def test_missing_log_probabilities_give_nan() -> None:
    """If the draft gives no log-probabilities, the chunk's mean and the gate's evidence are NaN
    under each score rule. Another value could look like certainty.
    """
    bare = Chunk("draft", "x", (1,), (1,), "end")
    for kind in SCORE_KINDS:
        assert math.isnan(evidence(ScoreRule(kind), bare))
    assert math.isnan(mean_logprob(bare))
    assert math.isnan(Features("q").draft_logprob)
    assert math.isnan(Features("q").draft_evidence)


def test_the_mean_and_the_lowest_log_probability_are_separate() -> None:
    """Under the speculative rule, the gate's evidence is the chunk's lowest log-probability. The
    chunk's mean log-probability stays available separately.
    """
    chunk = Chunk("draft", "xy", (1, 2), (1, 2), "end", (-1.0, -3.0))
    assert mean_logprob(chunk) == -2.0
    assert evidence(ScoreRule("speculative"), chunk) == pytest.approx(-3.0)
    assert evidence(ScoreRule("mean"), chunk) == pytest.approx(-2.0)


def test_a_gate_without_a_decision_of_its_own_cannot_be_made() -> None:
    """A preview of "verify" must not become the final decision, so a gate without `decide` cannot
    be made.
    """

    class OnlyPreviews(NonLearningGate):
        pass

    with pytest.raises(TypeError, match="decide"):
        OnlyPreviews()  # type: ignore[abstract]


def test_a_draft_without_log_probabilities_is_refused_by_a_gate_that_needs_them() -> None:
    """If the draft gives no log-probabilities, a gate that needs them refuses it, and so does this
    gate inside a cap. A gate that reads only scores accepts the draft.
    """
    able = EngineSpec("able", "m", "t", 512, (1,), 100)
    mute = replace(able, name="mute", logprobs="none")

    class EvidenceGate(ConformalGate):
        needs_draft_logprobs = True

    gate = EvidenceGate(Calibrator(0.2, "marginal"))
    check_engines(Policy(), gate, able, able)
    check_engines(Policy(), ConformalGate(Calibrator(0.2, "marginal")), mute, able)
    for refused in (gate, CappedGate(gate, lambda features: True)):
        with pytest.raises(UnsupportedByEngine, match="mute.*gate EvidenceGate"):
            check_engines(Policy(), refused, mute, able)


def test_a_cue_escalates() -> None:
    """A chunk with a word of hesitation escalates, such as "wait" in upper or lower case."""
    assert CueGate().preview(Features("q", text="So x = 3. WAIT, no")).escalate
    assert not CueGate().preview(Features("q", text="So x = 3.")).escalate


def test_a_cap_is_never_exceeded() -> None:
    """Once the permitted number of escalations is used up, the gate accepts all later chunks with
    the decision's origin "budget".
    """
    slots = iter([True, True])
    gate = CappedGate(FixedGate("escalate"), lambda features: next(slots, False))
    decisions = [gate.preview(Features("q", turn)) for turn in range(5)]
    assert [d.escalate for d in decisions] == [True, True, False, False, False]
    assert decisions[-1].origin == "budget"


@pytest.mark.parametrize("row", PRESETS, ids=lambda row: row.name)
def test_every_preset_is_a_policy_and_a_gate(row: object) -> None:
    """Every preset builds a policy and a gate from the same inputs."""
    found = preset(row.name)  # type: ignore[attr-defined]
    gate = found.gate(
        GateInputs(Calibrator(0.2, "marginal", stored=StoredScores.of([1.1, 1.5], 1)))
    )
    assert found.policy(Policy(samples=5)).samples == 5
    assert isinstance(gate, RoundGate) == found.policy(Policy()).barrier


def test_misspelt_options_are_errors_with_a_suggestion() -> None:
    """Misspelt methods, takeovers and limits are errors that suggest the correct name."""
    with pytest.raises(OptionError, match="did you mean 'top-b'"):
        preset("topb")
    with pytest.raises(OptionError, match="did you mean 'replace'"):
        Policy(takeover="replaec")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="samples: 0 is below 1"):
        Policy(samples=0)
    with pytest.raises(OptionError, match="mean"):
        ScoreRule("meen")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="needs calibration scores before the run"):
        preset("paper-marginal").gate(GateInputs(Calibrator(0.2)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30, 0), min_size=1, max_size=30))
def test_scores_are_perplexities(logprobs: list[float]) -> None:
    """A chunk's mean perplexity is at least 1 and at most that of its worst token. It is infinite
    for a token of probability zero, and NaN for a missing log-probability.
    """
    text = "x" * len(logprobs)
    mean = ScoreRule()(logprobs, text)
    assert 1 <= mean <= math.exp(-min(logprobs)) * (1 + 1e-9)
    assert ScoreRule("byte")(logprobs, text) == pytest.approx(mean)
    assert math.isnan(ScoreRule()([-1.0, math.nan], text))
    assert ScoreRule()([-math.inf], text) == math.inf


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=20))
def test_the_speculative_score_is_one_over_the_chance_to_be_accepted(
    pairs: list[tuple[float, float]],
) -> None:
    """The chance of acceptance is the product of min(1, p_target / p_draft) over the chunk's tokens
    without an end token. The score is one divided by this chance.
    """
    target = [t for t, _ in pairs]
    own = [o for _, o in pairs]
    chunk = Chunk(
        "draft", "x" * len(own), tuple(range(len(own))), tuple(range(len(own))), "end", (*own, -3.0)
    )
    chance = math.prod(min(1.0, math.exp(t - o)) for t, o in pairs)
    rule = ScoreRule("speculative")
    assert score_of(rule, target, chunk) == pytest.approx(1 / chance, rel=1e-4)
    assert score_of(rule, own, chunk) == 1.0
    assert math.isnan(score_of(rule, [*target, -1.0, -1.0], chunk))
    assert math.isnan(score_of(rule, [math.nan, *target[1:]], chunk))
    assert score_of(rule, [-math.inf, *target[1:]], chunk) == math.inf
    assert evidence(rule, chunk) == pytest.approx(min(*own, -3.0))
    assert score_of(ScoreRule("mean"), target, chunk) == pytest.approx(
        ScoreRule("mean")(target, chunk.text), rel=1e-4
    )


@pytest.mark.parametrize("kind", ["mean", "byte", "speculative"])
def test_scores_that_differ_by_rounding_alone_are_equal(kind: Any) -> None:
    """Log-probabilities that differ only by rounding, as between batches, give the same score, so
    that their ranks do not change.
    """
    draws = random.Random(8)
    equal = 0
    for _ in range(300):
        theirs = [-draws.expovariate(3.0) for _ in range(24)]
        chunk = Chunk(
            "draft",
            "x" * 24,
            (1,) * 24,
            (1,) * 24,
            "end",
            tuple(-draws.expovariate(3.0) for _ in range(24)),
        )
        moved = [value * (1 + draws.uniform(-1e-7, 1e-7)) for value in theirs]
        equal += score_of(ScoreRule(kind), theirs, chunk) == score_of(ScoreRule(kind), moved, chunk)
    # three of 300 may differ, because a score halfway between two rounded values may be rounded up
    # or down
    assert equal >= 297


def agreement_run(
    gate: ConformalGate | AgreementGate, seed: int, problems: int = 60
) -> dict[bool, tuple[int, int]]:
    """Simulate sixteen rollouts of eight chunks for each problem. In half of the problems the
    siblings agree.

    Return (number of escalated chunks, number of all chunks) for problems with and without
    agreement.
    """
    draw = random.Random(seed)
    handed = Counter[bool]()
    of = Counter[bool]()
    for problem in range(problems):
        agree = problem % 2 == 0
        for place in range(128):
            left = 1 - (128 * problem + place) / (128 * problems)
            chunk = Features(
                f"q{problem}",
                place // 16,
                place % 16,
                answered=place // 16,
                agreement=1.0 if agree else 0.4,
                left=left,
            )
            decision = gate.preview(chunk)
            decision = gate.decide(replace(chunk, issue=decision.issue), 1 + draw.expovariate(1.0))
            gate.observe(decision, decision.escalate)
            handed[agree] += decision.escalate
            of[agree] += 1
    return {agree: (handed[agree], of[agree]) for agree in (True, False)}


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_escalations_saved_on_agreement_are_spent_on_disagreement(rate: float) -> None:
    """If chunks of agreeing siblings are accepted, other chunks escalate more often, so that the
    total rate is met within 0.01.
    """
    conformal = ConformalGate(Calibrator(rate, "aci", seed=1))
    found = agreement_run(AgreementGate(conformal, 0.9), seed=2)
    total = sum(handed for handed, _ in found.values()) / sum(of for _, of in found.values())
    assert total == pytest.approx(rate, abs=0.01)
    (agreed, of) = found[True]
    (split, others) = found[False]
    assert agreed / of < 0.6 * rate < rate * 1.3 < split / others


def test_agreement_counts_from_three_siblings_on() -> None:
    """A chunk is accepted because of agreement only if at least three siblings have the same
    answer, since two may agree by chance. The decision gives the reason.
    """
    gate = AgreementGate(ConformalGate(Calibrator(1.0, "aci")), 0.9)
    for answered, action in ((2, "escalate"), (3, "accept")):
        said = gate.decide(Features("q", answered=answered, agreement=1.0, issue=answered), 2.0)
        assert said.action == action
    assert "the sibling rollouts agree" in said.why
    assert said.origin == "budget"


def test_impossible_budgets_are_refused() -> None:
    """The setup refuses an agreement that is not a share above 0 and at most 1. It also refuses the
    option with rounds, in which no sibling has an answer yet.
    """
    for setup in (
        Setup(accept_when_agreeing=1.5),
        Setup(accept_when_agreeing=0.0),
        Setup(accept_when_agreeing=0.9, method="top-b"),
    ):
        with pytest.raises(OptionError, match="accept_when_agreeing"):
            setup.decider()
    assert isinstance(Setup(accept_when_agreeing=0.9).decider()[0], AgreementGate)


def test_a_rollout_is_compared_with_its_siblings_only() -> None:
    """A rollout's own earlier answer does not count as the answer of a sibling."""
    siblings = Siblings(toy_groups)
    for sample, answer in enumerate(["7", "7", "8", None]):
        siblings.rollouts[sample] = Rollout(
            "p", sample, Prompt(draft_ids=(1,), target_ids=(1,)), finish="answer", answer=answer
        )
    for answer, belongs in ((None, False), ("7", True), ("8", False)):
        count, share, is_among = siblings.agreement(9, answer)
        assert (count, is_among) == (3, belongs)
        assert share == pytest.approx(2 / 3)
    # the first rollout's own answer does not count, so two siblings with different answers remain
    count, share, _ = siblings.agreement(0, "9")
    assert count == 2
    assert share == pytest.approx(1 / 2)
    assert Siblings(toy_groups).agreement(0, "7") == (0, 0.0, False)


def test_positions_in_the_tree_of_chunks_are_unique() -> None:
    """Different sequences of chunks have different positions in the tree, and the empty sequence
    has position 0.
    """
    siblings = Siblings(toy_groups)
    chunks = [Chunk("draft", str(n), (n,), (n,), "length") for n in range(3)]
    paths = [path for size in range(4) for path in itertools.product(chunks, repeat=size)]
    places = {path: siblings.position(path) for path in paths}
    assert len(set(places.values())) == len(paths)
    assert places[()] == 0
    assert {path: siblings.position(path) for path in reversed(paths)} == places
    assert siblings.position(chunks[1:], places[(chunks[0],)]) == places[tuple(chunks)]
