"""Tests of pacing: runs of known size end at their rate, whatever their size and the order of
problems.
"""

import heapq
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.analysis import build_report
from atts.api import Setup, evaluate_sync
from atts.calibration import Calibrator, Tuning, replay_scores
from atts.calibration.controllers import Adaptive, RunEnd
from atts.core import Decision
from atts.errors import CalibrationInputError, OptionError
from atts.run import RunLengthEstimate
from atts.testing import toy_problems

Records = list[dict[str, Any]]


def arrivals(problems: int, samples: int, order: str, seed: int, in_flight: int = 64) -> Records:
    """Simulate a run in which hard problems have longer rollouts and worse scores, and shorter
    chunks arrive sooner.
    """
    draw = random.Random(seed)
    levels = [draw.gauss(0, 1) for _ in range(problems)]
    levels.sort(reverse=order == "hard first") if order != "random" else None
    waiting = [(problem, sample) for problem in range(problems) for sample in range(samples)][::-1]
    found = Records()
    going = list[tuple[float, int, int, int]]()
    left = RunLengthEstimate(problems, samples)

    def begin(now: float) -> None:
        while waiting and len(going) < in_flight:
            heapq.heappush(going, (now + draw.expovariate(1), *waiting.pop(), 0))

    begin(0.0)
    while going:
        now, problem, sample, turn = heapq.heappop(going)
        score = math.exp(abs(draw.gauss(0.5 + 0.15 * levels[problem] + 0.03 * turn, 0.15)))
        found.append(
            {
                "question": problem,
                "sample": sample,
                "turn": turn,
                "score": score,
                "left": left.share,
            }
        )
        left.count(Decision("accept", 0.2, str(problem), turn, sample))
        if turn < 14 and draw.random() < 0.62 + 0.1 * math.tanh(levels[problem]):
            heapq.heappush(going, (now + draw.expovariate(1), problem, sample, turn + 1))
        else:
            left.end(str(problem), sample)
        begin(now)
    return found


def error(records: Records, rate: float, samples: int, seed: int) -> float:
    """Return the distance of the default mode's realised rate from the nominal one."""
    done = replay_scores(
        records, rate=rate, mode="aci", seed=seed, tuning=Tuning.for_rollouts(samples)
    )
    return done.escalated - rate


@pytest.mark.parametrize("order", ["random", "hard first", "easy first"])
@pytest.mark.parametrize(
    ("problems", "samples", "bar"), [(20, 8, 0.010), (30, 16, 0.010), (40, 8, 0.008)]
)
def test_a_small_run_of_known_size_ends_at_its_rate(
    problems: int, samples: int, bar: float, order: str
) -> None:
    """If the number of problems is known, the realised rate's root mean square error, over runs at
    two nominal rates, is within a limit. If not, the error exceeds this limit.
    """
    runs = [arrivals(problems, samples, order, seed) for seed in range(2)]
    unknown = [[{**record, "left": None} for record in run] for run in runs]
    paced, free = (
        math.sqrt(fmean(error(run, rate, samples, 1) ** 2 for run in each for rate in (0.1, 0.4)))
        for each in (runs, unknown)
    )
    assert paced <= bar
    assert free > bar


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.booleans(), min_size=10, max_size=300),
    st.sampled_from([0.1, 0.4, 0.8]),
    st.floats(0, 9),
    st.data(),
)
def test_a_rough_forecast_keeps_any_sequence_within_a_decision(
    wishes: list[bool], rate: float, slack: float, data: st.DataObject
) -> None:
    """The number of escalations differs from rate * n by at most 1 + slack, although an adversary
    chooses the scores.

    The forecast of the remaining decisions varies between 0.2 and 2 times the true number.
    """
    controller = Adaptive(rate, 0.002)
    total = 0
    for place, wish in enumerate(wishes):
        left = (len(wishes) - place) * data.draw(st.floats(0.2, 2.0))
        level = controller.current_rate(0.0, "", 0, RunEnd(left, slack))
        escalated = level >= 1 or (level > 0 and wish)
        controller.update(0.0, "", 0, escalated)
        total += escalated
    assert abs(total - rate * len(wishes)) <= 1 + slack + 1e-6


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.booleans(), min_size=10, max_size=300),
    st.sampled_from([0.1, 0.4]),
    st.integers(0, 40),
)
def test_decisions_that_never_come_add_at_most_one_each(
    wishes: list[bool], rate: float, extra: int
) -> None:
    """If the forecast includes decisions that never come, each of them adds at most one to the
    error of the escalation count.
    """
    controller = Adaptive(rate, 0.002)
    total = 0
    for place, wish in enumerate(wishes):
        level = controller.current_rate(0.0, "", 0, RunEnd(2 * (len(wishes) - place + extra)))
        escalated = level >= 1 or (level > 0 and wish)
        controller.update(0.0, "", 0, escalated)
        total += escalated
    assert abs(total - rate * len(wishes)) <= 1 + max(rate, 1 - rate) * extra + 1e-6


def steps(calibrator: Calibrator, records: Records) -> Iterator[bool]:
    """Decide on and observe the scores one after the other."""
    for record in records:
        decision = calibrator.decide(
            record["score"], str(record["question"]), record["turn"], left=record["left"]
        )
        calibrator.observe(decision)
        yield decision.escalate


def test_a_restored_calibrator_keeps_its_pace() -> None:
    """A restored calibrator keeps its pace, because only past decisions and the remaining share
    determine the pace.
    """
    records = arrivals(12, 8, "random", 4)
    whole = Calibrator(0.2, "aci")
    half = Calibrator(0.2, "aci")
    expected = list(steps(whole, records))
    assert list(steps(half, records[:200])) == expected[:200]
    again = Calibrator.restored(half.state())
    assert list(steps(again, records[200:])) == expected[200:]


def early(left: float | None, stored: int) -> float:
    """Return the escalated share of the first ten decisions at rate 0.5, over 60 runs."""
    draw = random.Random(5)
    found = list[bool]()
    for seed in range(60):
        calibrator = Calibrator(
            0.5, "aci", seed=seed, stored=[1 + draw.random() for _ in range(stored)]
        )
        for place in range(10):
            decision = calibrator.decide(1 + draw.random(), str(place), left=left)
            calibrator.observe(decision)
            found.append(decision.escalate)
    return fmean(found)


def test_a_run_of_known_size_escalates_little_at_first() -> None:
    """Ranks among the first few scores are unreliable. A run without stored scores therefore
    escalates less at first and makes up for it later.
    """
    assert early(left=0.99, stored=0) < 0.15
    assert early(left=0.99, stored=40) == pytest.approx(0.5, abs=0.1)
    assert early(left=None, stored=0) == pytest.approx(0.5, abs=0.1)


def run_of_coins(
    rate: float, rollouts: int, together: int, seed: int, mode_known: bool
) -> tuple[int, int, str]:
    """Decide on exchangeable scores while rollouts end at random. Return the number of escalations,
    the number of decisions and the guarantee.

    The last `together` rollouts may end at once. For a run of known size, the guarantee is read
    when half of the rollouts remain.
    """
    draw = random.Random(seed)
    calibrator = Calibrator(rate, "aci", seed=seed)
    left = rollouts
    promise = ""
    while left > (together if draw.random() < 0.1 else 0):
        share = left / rollouts if mode_known else None
        calibrator.observe(calibrator.decide(1 + draw.random(), str(left // 8), left=share))
        left -= draw.random() < 0.3
        if not promise and left <= rollouts / 2:
            promise = calibrator.guarantee
    return calibrator.escalated, calibrator.decided, promise if mode_known else calibrator.guarantee


def likely(promise: str) -> float:
    """Read from the guarantee's text the distance from the nominal rate that is not exceeded with
    probability 0.95.
    """
    found = re.search(r"[Ww]ith probability 0.95 .*? is within ([0-9.]+) of ", promise)
    assert found is not None, promise
    return float(found[1])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.6])
def test_the_guarantee_of_a_small_run_holds_in_95_percent_and_is_narrow(
    rate: float, known: bool
) -> None:
    """At most one in twenty runs of 20 problems ends outside the band of its guarantee, up to the
    sampling error of the simulation.
    """
    outside = 0
    widths = list[float]()
    for seed in range(40):
        escalated, decided, promise = run_of_coins(rate, 160, 8, seed, known)
        widths.append(likely(promise))
        outside += abs(escalated / decided - rate) > widths[-1]
    assert outside <= 4
    assert fmean(widths) < (0.02 if known else 0.05)


@pytest.mark.parametrize("worst", ["random", "all at once", "never"])
def test_a_cap_is_exact_at_every_moment(worst: str) -> None:
    """With a cap, at most ceil(cap n) of the first n decisions escalate, in every mode and after a
    restart.
    """
    draw = random.Random(3)
    calibrator = Calibrator(0.5, "marginal", cap=0.2)
    for count in range(1, 200):
        score = {"random": 1 + draw.random(), "all at once": 2.0 + count, "never": 1.0}[worst]
        decision = calibrator.decide(score, str(count // 8))
        calibrator.observe(decision)
        assert calibrator.escalated <= math.ceil(Fraction(1, 5) * count)
        assert (decision.origin == "budget") <= (not decision.escalate)
        if count % 50 == 0:
            calibrator = Calibrator.restored(json.loads(json.dumps(calibrator.state())))
    assert calibrator.escalated >= 39 or worst == "never"
    assert (
        "at most ceil(1/5 n) of the first n decisions escalate, for ANY sequence"
        in calibrator.guarantee
    )
    with pytest.raises(CalibrationInputError, match="cap"):
        Calibrator(0.5, cap=1.5)


@pytest.mark.parametrize("cap", [0.0, 0.1, 0.25])
def test_the_audit_repeats_the_decisions_of_a_capped_run(cap: float, tmp_path: Path) -> None:
    """The audit of a capped run repeats its decisions within the cap, in the recorded order; gates
    without a cap refuse the option.
    """
    setup = Setup(draft="scripted", target="scripted", rate=0.5, cap=cap)
    evaluate_sync(toy_problems(4), setup, directory=tmp_path / "run")
    held = build_report(tmp_path / "run").report.calibration
    assert held is not None
    assert held.escalated - held.forced <= math.ceil(cap * held.decisions)
    assert "had the recorded result" in held.promise.audit
    assert "; 0 did not" not in held.promise.audit
    with pytest.raises(OptionError, match="cap"):
        replace(setup, method="coin").decider()
    with pytest.raises(OptionError, match="cap"):
        replace(setup, cap=1.5)


def test_an_impossible_remaining_share_is_refused() -> None:
    """An impossible remaining share is refused, and the error names the argument with its value."""
    with pytest.raises(CalibrationInputError, match="left"):
        Calibrator(0.2, "aci").decide(1.5, left=1.5)
