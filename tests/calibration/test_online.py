"""Tests of the calibrator's contract: deciding changes no state, observed actions count, bounds
hold for any sequence, and bad input is refused.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atts.calibration import (
    LOG_PROB,
    MODES,
    PERPLEXITY,
    REAL,
    Calibrator,
    Mode,
    Scale,
    StoredScores,
    Tuning,
)
from atts.calibration.controllers import DEFAULTS, Adaptive
from atts.core import Decision
from atts.errors import CalibrationInputError, FingerprintError, OptionError

STORED = [1 + 0.01 * k for k in range(1, 60)]
SCORES = st.one_of(st.floats(1, 50), st.sampled_from([1.0, 1.5, math.inf]))


def fresh(mode: Mode, rate: float = 0.4, **options: Any) -> Calibrator:
    """Make a calibrator with stored scores, which mode `split` needs."""
    return Calibrator(rate, mode, stored=STORED, drift="report", **options)


def play(calibrator: Calibrator, scores: Sequence[float], questions: int = 3) -> list[bool]:
    """Decide on the scores in their order, and observe each decision before the next one."""
    done = list[bool]()
    for place, score in enumerate(scores):
        decision = calibrator.decide(score, f"q{place % questions}", place % 2, place)
        calibrator.observe(decision)
        done.append(decision.escalate)
    return done


@pytest.mark.parametrize("mode", MODES)
def test_deciding_changes_no_state(mode: Mode) -> None:
    """Deciding twice gives the same decision, and a decision that is never observed changes
    nothing.
    """
    asked = fresh(mode)
    quiet = fresh(mode)
    draw = random.Random(1)
    for place in range(120):
        score = 1 + draw.expovariate(1)
        other = 1 + draw.expovariate(1)
        decision = asked.decide(score, "q", place % 3, place)
        asked.decide(other, "r", 0, 7)
        assert (
            asked.decide(score, "q", place % 3, place)
            == decision
            == quiet.decide(score, "q", place % 3, place)
        )
        asked.observe(decision)
        quiet.observe(decision)
    assert asked.state() == quiet.state()


@pytest.mark.parametrize("mode", MODES)
def test_a_decision_records_what_an_audit_needs(mode: Mode) -> None:
    """A decision records its question, turn, sample, issue number, score, p-value in [0, 1], the
    nominal rate and a reason.
    """
    decision = fresh(mode).decide(1.3, "q7", 2, 5, 11)
    assert (decision.question, decision.turn, decision.sample, decision.issue) == ("q7", 2, 5, 11)
    assert decision.score == 1.3
    assert decision.rate == 0.4
    assert decision.p is not None
    assert 0 <= decision.p <= 1
    assert decision.why


def test_a_reason_prints_a_threshold_that_a_p_value_can_reach() -> None:
    """The reason of a decision prints a threshold from 0 to 1 and compares the p-value with it, even
    if the controller's rate is below 0 or above 1.
    """
    calibrator = fresh("aci")
    printed: list[float] = []
    for place in range(900):
        score = 1.0 if place < 600 else 10.0 + place
        decision = calibrator.decide(score, "q", 0, place, left=1 - place / 900)
        p, sign, threshold = decision.why.removeprefix("p-value ").split(" ")[:3]
        assert sign == (">" if decision.action == "escalate" else "<=")
        assert 0 <= float(threshold) <= 1
        assert float(p) >= float(threshold) if sign == ">" else float(p) <= float(threshold)
        printed.append(float(threshold))
        calibrator.observe(replace(decision, action="accept"))
    assert 0.0 in printed


@pytest.mark.parametrize("mode", MODES)
def test_rate_zero_escalates_nothing_and_rate_one_everything(mode: Mode) -> None:
    """At rate 0 the worst scores are accepted too, and at rate 1 the best scores are escalated too."""
    scores = [1.0, math.inf, 1.2, 9.0] * 20
    assert not any(play(fresh(mode, 0.0), scores))
    assert all(play(fresh(mode, 1.0), scores))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(SCORES, min_size=1, max_size=150), st.sampled_from([0.1, 0.4, 0.75]), st.integers(0, 3)
)
def test_aci_bound_holds_for_any_sequence(scores: list[float], rate: float, seed: int) -> None:
    """After each number T of decisions, |realised - rate| <= (max(rate, 1 - rate) + step) / (step
    T).
    """
    calibrator = Calibrator(rate, "aci", seed=seed, tuning=Tuning(aci_step=0.02))
    bound = (max(rate, 1 - rate) + 0.02) / 0.02
    total = 0
    for count, score in enumerate(scores, 1):
        decision = calibrator.decide(score)
        calibrator.observe(decision)
        total += decision.escalate
        assert abs(total - rate * count) <= bound + 1e-9


def test_siblings_share_one_step_of_the_level() -> None:
    """All rollouts of a question together change the level by one step.

    With a step for each of 64 rollouts, the first escalations of a hard problem would prevent its
    later escalations.
    """
    levels: list[float] = []
    for samples in (1, 8, 64):
        calibrator = Calibrator(0.2, "aci", tuning=Tuning.for_rollouts(samples))
        controller = Adaptive(0.2, calibrator.tuning.aci_step)
        for _ in range(samples):
            controller.update(9.0, "hard", 0, escalated=True)
        levels.append(controller.current_rate(9.0, "next", 0))
    assert levels == pytest.approx([0.2 - 0.8 * 0.016] * 3)
    assert Tuning.for_rollouts(8) == Tuning()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.booleans(), min_size=50, max_size=400),
    st.sampled_from([0.05, 0.3]),
    st.integers(0, 5),
)
def test_aci_bound_holds_against_an_adversary_and_delay(
    wishes: list[bool], step: float, delay: int
) -> None:
    """The bound of mode `aci` holds although an adversary chooses every score while the level is
    strictly between 0 and 1, and decisions are observed late.
    """
    rate = 0.4
    waiting = list[bool]()
    total = 0
    controller = Adaptive(rate, step)
    for count, wish in enumerate(wishes, 1):
        level = controller.current_rate(0.0, "", 0)
        escalated = True if level >= 1 else False if level <= 0 else wish
        total += escalated
        waiting.append(escalated)
        if len(waiting) > delay:
            controller.update(0.0, "", 0, waiting.pop(0))
        bound = (max(rate, 1 - rate) + (delay + 1) * step) / step + delay
        assert abs(total - rate * count) <= bound + 1e-9
        if not delay:
            assert abs(total / count - rate) <= aci_bound(rate, step, count) + 1e-9


def aci_bound(rate: float, step: float, decisions: int) -> float:
    """Return the bound on the distance between the realised and the nominal rate."""
    return (max(rate, 1 - rate) + step) / (step * decisions)


def test_aci_bound_is_nearly_reached() -> None:
    """The worst adversary comes within one step of the bound, so the test would notice a wrong
    constant.
    """
    controller = Adaptive(0.4, 0.05)
    total = 0
    while (level := controller.current_rate(0.0, "", 0)) > 0:
        controller.update(0.0, "", 0, level > 0)
        total += 1
    assert (
        abs(total / total - 0.4)
        >= 0.9 * (aci_bound(0.4, 0.05, total) - 0.05 / (0.05 * total)) * 0.4 / 0.6
    )


@pytest.mark.parametrize("mode", ["question", "question-turn"])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SCORES, st.integers(0, 2)), max_size=250), st.sampled_from([0.05, 0.4, 0.9])
)
def test_question_modes_bound_every_question(
    mode: Mode, stream: list[tuple[float, int]], rate: float
) -> None:
    """In modes by question, the number of escalations among the n decisions of a question stays
    near rate * n. The difference is at most 1 plus the mode's limit, for any scores.
    """
    calibrator = Calibrator(rate, mode)
    sums = defaultdict[int, list[bool]](list)
    for place, (score, question) in enumerate(stream):
        decision = calibrator.decide(score, str(question), place % 4, place)
        calibrator.observe(decision)
        sums[question].append(decision.escalate)
        assert (
            abs(sum(sums[question]) - rate * len(sums[question]))
            <= DEFAULTS.limit_at(rate) + 1 + 1e-9
        )


def test_marginal_decisions_are_independent_coins_on_exchangeable_scores() -> None:
    """The p-values are uniform and uncorrelated. The number of escalations among T decisions
    therefore has the distribution Binomial(T, rate).
    """
    draw = np.random.default_rng(3)
    p_values = list[float]()
    counts = list[int]()
    for run in range(300):
        calibrator = Calibrator(0.3, "marginal", seed=run)
        decisions = list[Decision]()
        # rounded, so that many scores tie
        for place, score in enumerate(1 + draw.integers(1, 6, size=40) / 10):
            decisions.append(calibrator.decide(float(score), "q", 0, place))
            calibrator.observe(decisions[-1])
        p_values += [d.p for d in decisions if d.p is not None]
        counts.append(sum(d.escalate for d in decisions))
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    pairs = np.array(p_values).reshape(300, 40)
    assert abs(np.corrcoef(pairs[:, :-1].ravel(), pairs[:, 1:].ravel())[0, 1]) < 0.03
    assert np.mean(counts) == pytest.approx(12, abs=4 * math.sqrt(8.4 / 300))
    assert np.var(counts) == pytest.approx(8.4, rel=0.3)


def test_a_new_question_is_ranked_among_all_questions() -> None:
    """In a question without scores, an extreme score escalates, because it is ranked among the
    scores of all questions. Before any score was observed, a coin decides.
    """
    calibrator = Calibrator(0.4, "question-turn")
    firsts = [
        Calibrator(0.4, "question-turn", seed=s).decide(1.5, "q", 0, 0).escalate for s in range(400)
    ]
    assert sum(firsts) == pytest.approx(160, abs=4 * math.sqrt(400 * 0.24))
    draw = random.Random(0)
    for place in range(300):
        calibrator.observe(calibrator.decide(1 + draw.random(), f"q{place % 10}", 0, place))
    assert calibrator.decide(9.0, "new", 0, 0).escalate
    assert not calibrator.decide(1.0, "new", 0, 0).escalate


@pytest.mark.parametrize("mode", MODES)
def test_infinite_scores_rank_worst_and_do_no_harm(mode: Mode) -> None:
    """A chunk of infinite perplexity ranks worse than all others. After a hundred such chunks,
    later decisions are still correct.
    """
    calibrator = fresh(mode)
    draw = random.Random(0)
    play(calibrator, [1 + 0.6 * draw.random() for _ in range(100)])
    assert calibrator.decide(math.inf, "q0", 0, 1).p == pytest.approx(1, abs=0.05)
    play(calibrator, [math.inf] * 100)
    done = play(calibrator, [1 + 0.6 * draw.random() for _ in range(400)])
    assert 0.2 < sum(done[200:]) / 200 < 0.6
    assert all(math.isfinite(calibrator.decide(s, "q0").p or 0) for s in (1.0, 2.0, math.inf))


def test_overruled_decisions_count_as_what_was_done() -> None:
    """If every chunk is accepted against the calibrator's decisions, the calibrator counts the
    acceptances and decides to escalate more and more.
    """
    calibrator = Calibrator(0.4, "question-turn")
    draw = random.Random(0)
    wanted = list[bool]()
    for place in range(40):
        decision = calibrator.decide(1 + draw.random(), "q", 0, place)
        calibrator.observe(decision, escalated=False)
        wanted.append(decision.escalate)
    assert calibrator.escalated == 0
    assert all(wanted[20:])


def test_decisions_without_a_score_count_for_the_rate_alone() -> None:
    """A skipped verification counts as a decision for the rate and adds no score to the pools."""
    calibrator = Calibrator(0.5, "aci")
    skipped = Decision("accept", 0.5, "q")
    for _ in range(60):
        calibrator.observe(skipped)
    assert (calibrator.decided, calibrator.p_value(1.0)) == (60, 1.0)
    assert calibrator.decide(1.0).escalate  # the level is above 1 at this point


def test_scores_join_the_pools_in_order_of_issue() -> None:
    """Scores join the pools in the order in which they were requested, not the order in which
    chunks finish.
    """
    scores = [1 + 0.1 * k for k in range(8)]
    orders = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 1, 7, 2, 6, 5, 4]]
    states = list[Any]()
    for order in orders:
        calibrator = Calibrator(0.4, "marginal")
        for issue in order:
            calibrator.observe(calibrator.decide(scores[issue], "q", 0, issue, issue))
            held = next(k for k in range(9) if k not in order[: order.index(issue) + 1])
            assert calibrator.p_value(0.5 + 1, 0) == (1 + sum(s <= 1.5 for s in scores[:held])) / (
                held + 1
            )
        states.append(calibrator.state()["pool"])
    assert states[0] == states[1] == states[2]


def test_completion_order_biases_pools_and_issue_order_does_not() -> None:
    """If longer chunks score worse, adding scores in order of completion biases the pools; adding
    scores in order of issue does not.
    """
    draw = np.random.default_rng(5)
    biased = list[float]()
    honest = list[float]()
    for _ in range(60):
        lengths = draw.exponential(size=300)
        scores = 1 + lengths + 0.3 * draw.random(300)
        start = np.arange(300) * 0.02
        finished = np.argsort(start + lengths)
        for with_issue, rates in ((False, biased), (True, honest)):
            calibrator = Calibrator(0.1, "marginal", hold=300)
            for place in finished[:150].tolist():
                decision = calibrator.decide(
                    float(scores[place]), "", 0, place, place if with_issue else None
                )
                calibrator.observe(decision)
            fresh_scores = 1 + draw.exponential(size=40) + 0.3 * draw.random(40)
            rates.append(
                float(np.mean([calibrator.decide(float(s), "", 0).escalate for s in fresh_scores]))
            )
    assert np.mean(biased) > 0.13
    assert np.mean(honest) == pytest.approx(0.1, abs=0.025)


def test_a_missing_issue_is_skipped_or_given_up() -> None:
    """A score waits until all earlier issue numbers have a score. If an earlier number is skipped,
    the wait ends at once; if it is lost, the wait ends after 64 later scores.
    """
    calibrator = Calibrator(0.4, "marginal")
    decisions = [calibrator.decide(1.5, "q", 0, k, k) for k in range(80)]
    for decision in decisions[1:11]:
        calibrator.observe(decision)
    assert len(calibrator.state()["pool"]["live"]) == 0
    calibrator.skip(0)
    assert len(calibrator.state()["pool"]["live"]) == 10
    for decision in decisions[12:78]:
        calibrator.observe(decision)
    assert len(calibrator.state()["pool"]["live"]) == 76
    calibrator.observe(decisions[11])
    assert len(calibrator.state()["pool"]["live"]) == 77
    # this chunk is never scored, so no score waits for it
    calibrator.observe(replace(decisions[78], score=None))
    calibrator.observe(decisions[79])
    assert len(calibrator.state()["pool"]["live"]) == 78


@pytest.mark.parametrize("mode", ["marginal", "aci", "question-turn"])
@pytest.mark.parametrize("memory", [{"window": 50}, {"decay": 0.95}])
def test_windows_and_fading_memories_recover_from_a_jump(
    mode: Mode, memory: dict[str, Any]
) -> None:
    """After a jump of all scores, a window and a fading memory bring the rate back; a memory of all
    scores does not.
    """
    draw = random.Random(4)
    before = [1 + draw.random() for _ in range(600)]
    after = [5 + draw.random() for _ in range(300)]
    done = play(Calibrator(0.3, mode, **memory), [*before, *after], questions=900)
    assert sum(done[-200:]) / 200 == pytest.approx(0.3, abs=0.1)
    keeps_all = play(Calibrator(0.3, "marginal"), [*before, *after], questions=900)
    assert sum(keeps_all[-200:]) / 200 > 0.5


@pytest.mark.parametrize(
    ("scale", "bad"),
    [(PERPLEXITY, math.nan), (PERPLEXITY, 0.99), (PERPLEXITY, 0.0), (PERPLEXITY, -math.inf), (PERPLEXITY, "2"),
     (PERPLEXITY, None), (PERPLEXITY, True), (PERPLEXITY, [2.0]), (LOG_PROB, 0.5), (REAL, math.nan)],
)  # fmt: skip
def test_what_is_not_a_score_is_refused(scale: Scale, bad: Any) -> None:
    """The methods decide, p_value and observe raise a clear error for a value that is not a score,
    and store nothing.
    """
    calibrator = Calibrator(0.4, scale=scale)
    with pytest.raises(CalibrationInputError, match="score"):
        calibrator.decide(bad)
    with pytest.raises(CalibrationInputError, match="score"):
        calibrator.p_value(bad)
    if bad is not None:
        with pytest.raises(CalibrationInputError, match="score"):
            calibrator.observe(Decision("accept", 0.4, "q", score=bad))
    with pytest.raises(CalibrationInputError, match="score"):
        StoredScores.from_records([{"score": bad}], scale)
    several: list[Any] = [bad]
    with pytest.raises(CalibrationInputError, match="score"):
        StoredScores.of(several, scale=scale)
    assert calibrator.decided == 0


def test_scales_say_which_scores_are_worse() -> None:
    """A scale says which scores are worse, such as lower log-probabilities; rounding errors just
    outside the domain and numpy's numbers are accepted.
    """
    calibrator = Calibrator(0.5, "marginal", scale=LOG_PROB, stored=[-1.0, -2.0, -3.0])
    assert calibrator.decide(-9.0).escalate
    assert not calibrator.decide(-0.1).escalate
    assert PERPLEXITY.nonconformity(1 - 1e-8) == 0
    assert PERPLEXITY.nonconformity(np.float32(2.0)) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Calibrator(1.5), CalibrationInputError, "rate"),
        (lambda: Calibrator(math.nan), CalibrationInputError, "rate"),
        (lambda: Calibrator(0.4, "question_turn"), OptionError, "question-turn"),  # type: ignore[arg-type]
        (lambda: Calibrator(0.4, "split"), CalibrationInputError, "stored"),
        (lambda: Calibrator(0.4, window=0), CalibrationInputError, "window"),
        (lambda: Calibrator(0.4).decide(1.5, turn=-1), CalibrationInputError, "turn"),
        (lambda: Calibrator(0.4).decide(1.5, sample=-1), CalibrationInputError, "sample"),
        (lambda: Calibrator(0.4, decay=1.0), CalibrationInputError, "decay"),
        (lambda: Calibrator(0.4, window=9, decay=0.5), OptionError, "cannot be combined"),
        (lambda: Calibrator(0.4, drift="panic"), OptionError, "drift"),  # type: ignore[arg-type]
        (lambda: StoredScores.of([1.5] * 7, per_question=2), CalibrationInputError, "per_question"),
    ],
)
def test_impossible_options_are_refused(call: Any, error: type[Exception], words: str) -> None:
    """An impossible option is refused, and the error names the option."""
    with pytest.raises(error, match=words):
        call()


def test_a_mismatched_fingerprint_is_refused() -> None:
    """Calibration scores of another model, or of conditions that were not recorded, are refused for
    this run.
    """
    stored = StoredScores.of(STORED, fingerprint={"model": "QwQ-32B", "temperature": 0.8})
    assert Calibrator(
        0.4, stored=stored, fingerprint={"model": "QwQ-32B", "temperature": 0.8}
    ).fingerprint
    for other in ({"model": "QwQ-32B", "temperature": 0.6}, {"model": "QwQ-32B"}, {}):
        with pytest.raises(FingerprintError, match="temperature"):
            Calibrator(0.4, stored=stored, fingerprint=other)
