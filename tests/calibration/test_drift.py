"""Broken calibrations are noticed soon, clean ones are left alone, and an alarm acts."""

import json
import math
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from atts.calibration import Calibrator, StoredScores
from atts.calibration.drift import DriftMonitor, SimpleJumper
from atts.errors import CalibrationInputError, OptionError
from tests.calibration.live_scores import noticed_after, whole_questions

ArrayOf = Callable[..., StoredScores]


def shifted(stored: StoredScores, by: float) -> StoredScores:
    """The same scores with their logarithm moved."""
    return StoredScores.of([max(1.0, score * math.exp(by)) for score in stored.scores], 16)


def test_clean_streams_raise_few_alarms(array_of: ArrayOf) -> None:
    """Under 1 % over whole questions of the same array; 80 streams here, 1,000 in the study."""
    stored = array_of()
    alarms = sum(noticed_after(stored, stored, seed) is not None for seed in range(80))
    assert alarms <= 3


@pytest.mark.parametrize("by", [0.5, -0.5])
def test_a_shift_of_a_half_is_noticed_within_300_scores(by: float, array_of: ArrayOf) -> None:
    """In every one of fifteen runs, and long before."""
    stored = array_of()
    seen = [noticed_after(shifted(stored, by), stored, seed) for seed in range(15)]
    assert all(after is not None and after <= 160 for after in seen)


@pytest.mark.parametrize(
    ("part", "least"),
    [("4334263d", 12), ("9be0821c", 12), ("d45c196d", 7), ("1b8761b8", 8), ("c0c0a2ea", 9)],
)
def test_scores_of_another_model_are_noticed_in_most_runs(
    part: str, least: int, array_of: ArrayOf
) -> None:
    """Other models and benchmarks, the last three within about one standard deviation: the study
    prints the power.
    """
    hits = sum(noticed_after(array_of(part), array_of(), seed) is not None for seed in range(12))
    assert hits >= least


@pytest.mark.parametrize(
    ("part", "after"), [("67acab3f", 300), ("7564d923", 300), ("4334263d", 230), ("", None)]
)
def test_a_real_stream_is_told_from_another_array_by_its_first_300_scores_of_all_turns(
    part: str, after: int | None, arrivals: dict[str, list[dict[str, Any]]], array_of: ArrayOf
) -> None:
    """Of these only eighty are of the stored turn; the run's own array is left alone."""
    for records in arrivals.values():
        monitor = DriftMonitor(array_of(part) if part else array_of())
        for record in records[:300]:
            monitor.observe(math.log(record["score"]), str(record["question"]), record["turn"])
        assert [event.scores for event in monitor.events] == ([after] if after else [])


def test_simple_jumper_never_overflows_and_keeps_its_level() -> None:
    """Uniform p-values: a 1/20 alarm in at most 5 % of runs; a change is found in about 50 steps."""
    draw = np.random.default_rng(0)
    alarms = 0
    delays = list[int]()
    for _ in range(300):
        martingale = SimpleJumper()
        for p in draw.random(300):
            martingale.update(float(p))
        alarms += martingale.alarm(1 / 20)
        changed = SimpleJumper()
        steps = 0
        while not changed.alarm(1 / 20):
            changed.update(float(draw.random() ** 2))
            steps += 1
        delays.append(steps)
    assert alarms / 300 <= 0.05
    assert 35 <= np.median(delays) <= 70
    certain = SimpleJumper()
    for _ in range(20_000):
        certain.update(1.0)
    assert certain.log_value > 5000


def test_martingale_state_round_trip_and_bad_p_values() -> None:
    """Stopped and restored it goes on exactly; p outside [0, 1] is refused."""
    draw = random.Random(0)
    whole = SimpleJumper()
    half = SimpleJumper()
    values = [draw.random() for _ in range(100)]
    for p in values:
        whole.update(p)
    for p in values[:50]:
        half.update(p)
    again = SimpleJumper()
    again.merge(json.loads(json.dumps(half.state())))
    for p in values[50:]:
        again.update(p)
    assert (again.log_value, again.log_peak) == (whole.log_value, whole.log_peak)
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(CalibrationInputError):
            whole.update(bad)


def test_monitor_state_round_trip(array_of: ArrayOf) -> None:
    """Stopped and restored in the middle, the alarm comes at the same score."""
    stored = shifted(array_of(), 0.3)
    whole = DriftMonitor(stored)
    half = DriftMonitor(stored)
    again = DriftMonitor(stored)
    stream = list(whole_questions(array_of(), 5))
    for place, (nonconformity, question) in enumerate(stream):
        whole.observe(nonconformity, question, 0)
        if place < 60:
            half.observe(nonconformity, question, 0)
    again.restore(json.loads(json.dumps(half.state())))
    for nonconformity, question in stream[60:]:
        again.observe(nonconformity, question, 0)
    assert whole.events
    assert again.events == whole.events


def test_few_samples_a_question_are_enough(array_of: ArrayOf) -> None:
    """Live questions with one or two scores each, compared with stored questions of sixteen."""
    for samples in (1, 2):
        monitor = DriftMonitor(shifted(array_of(), 0.5))
        for place, (nonconformity, question) in enumerate(whole_questions(array_of(), 3, 1600)):
            if place % 16 < samples:
                monitor.observe(nonconformity, question, 0)
        assert monitor.events
        clean = DriftMonitor(array_of())
        for place, (nonconformity, question) in enumerate(whole_questions(array_of(), 3, 1600)):
            if place % 16 < samples:
                clean.observe(nonconformity, question, 0)
        assert not clean.events


def run(calibrator: Calibrator, count: int = 400, level: float = 1.5) -> list[bool]:
    """Sixteen samples a question around a level, decided and observed."""
    draw = random.Random(0)
    done = list[bool]()
    for place in range(count):
        decision = calibrator.decide(level + draw.random() / 4, f"q{place // 16}", 0, place % 16)
        calibrator.observe(decision)
        done.append(decision.escalate)
    return done


def stored_around(level: float) -> StoredScores:
    """Sixty questions of sixteen scores around a level."""
    draw = random.Random(9)
    return StoredScores.of(
        [level + draw.random() / 4 + 0.02 * (k // 16 % 7) for k in range(960)], 16
    )


def test_an_alarm_recalibrates() -> None:
    """Stored scores far above the run: without action nothing escalates; with it the rate comes
    back.
    """
    silent = Calibrator(0.4, "marginal", stored=stored_around(4.0), drift="report")
    acting = Calibrator(0.4, "marginal", stored=stored_around(4.0), drift="recalibrate")
    assert sum(run(silent)[200:]) == 0
    assert sum(run(acting)[200:]) == pytest.approx(80, abs=25)
    assert [event.action for event in acting.events] == ["recalibrate"]
    assert "ALREADY" in acting.voided_by
    assert "ALREADY" not in Calibrator(0.4, "marginal", stored=stored_around(4.0)).voided_by


def test_an_alarm_escalates_everything_until_someone_looks() -> None:
    """The careful policy, ended by `resume`, and it survives a restart."""
    calibrator = Calibrator(0.4, "marginal", stored=stored_around(4.0), drift="escalate")
    assert all(run(calibrator)[200:])
    again = Calibrator.restored(calibrator.state())
    assert again.decide(1.0).escalate
    again.resume()
    assert not again.decide(1.0).escalate


def test_an_alarm_widens_for_a_while() -> None:
    """Half as much again escalates for 500 decisions, then the old level."""
    wide = Calibrator(0.4, "split", stored=stored_around(1.4), drift="widen")
    plain = Calibrator(0.4, "split", stored=stored_around(1.4), drift="report")
    run(wide, 200, 1.9)
    run(plain, 200, 1.9)
    assert wide.events
    scores = [1.4 + k / 400 for k in range(130)]
    more, fewer = (sum(c.decide(s, "q", 0, 1).escalate for s in scores) for c in (wide, plain))
    assert more > 1.25 * fewer
    run(wide, 520)
    assert sum(wide.decide(s, "q", 0, 1).escalate for s in scores) == fewer


def test_split_mode_learns_live_scores_once_its_stored_ones_are_disowned() -> None:
    """Frozen as long as the stored scores are trusted."""
    calibrator = Calibrator(0.4, "split", stored=stored_around(4.0))
    assert sum(run(calibrator)[200:]) == pytest.approx(80, abs=25)


@pytest.mark.parametrize(
    "call", [lambda s: DriftMonitor(s, policy=cast(Any, "panic")), lambda s: DriftMonitor(s, significance=0.0)]
)  # fmt: skip
def test_impossible_monitors_are_refused(call: Any) -> None:
    """An unknown policy, an impossible level."""
    with pytest.raises((OptionError, CalibrationInputError)):
        call(stored_around(2.0))
