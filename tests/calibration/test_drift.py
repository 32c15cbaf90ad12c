"""Tests of drift alarms: alarms are raised if scores changed or were copied, and rarely in other
cases.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from atts.api.setup import embedded_scores
from atts.calibration import Calibrator, StoredScores, examine
from atts.calibration.drift import (
    DriftMonitor,
    DuplicateScores,
    Floats,
    QuestionSample,
    SimpleJumper,
    TwoSampleTest,
    first_alarm,
    mixture_ratios,
    two_sample_test,
)
from atts.errors import CalibrationInputError, OptionError
from tests.calibration.live_scores import noticed_after, whole_questions

ArrayOf = Callable[..., StoredScores]


def shifted(stored: StoredScores, by: float) -> StoredScores:
    """Shift the logarithms of the scores."""
    return StoredScores.of([max(1.0, score * math.exp(by)) for score in stored.scores], 16)


def test_clean_streams_raise_few_alarms(array_of: ArrayOf) -> None:
    """If a stream consists of whole questions of the stored array, an alarm is raised in fewer than
    1 % of cases.
    """
    stored = array_of()
    alarms = sum(noticed_after(stored, stored, seed) is not None for seed in range(80))
    assert alarms <= 3


@pytest.mark.parametrize("by", [0.5, -0.5])
def test_a_shift_of_a_half_is_noticed_within_300_scores(by: float, array_of: ArrayOf) -> None:
    """All fifteen runs whose log scores shifted by 0.5 raise an alarm within 300 scores."""
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
    """In most runs, scores of another model or benchmark raise an alarm. In the last three of the
    five arrays, the scores differ from the stored ones by only one standard deviation.
    """
    hits = sum(noticed_after(array_of(part), array_of(), seed) is not None for seed in range(12))
    assert hits >= least


@pytest.mark.parametrize(
    ("part", "after"), [("67acab3f", 300), ("7564d923", 300), ("4334263d", 230), ("", None)]
)
def test_a_recorded_stream_differs_from_other_arrays_within_300_scores(
    part: str, after: int | None, arrivals: dict[str, list[dict[str, Any]]], array_of: ArrayOf
) -> None:
    """Stored scores of another run raise an alarm within 300 live scores, although only 80 of these
    are of the same turn as the stored scores.

    Stored scores from the run's own calibration raise no alarm.
    """
    for records in arrivals.values():
        monitor = DriftMonitor(array_of(part) if part else array_of())
        for record in records[:300]:
            monitor.observe(math.log(record["score"]), str(record["question"]), record["turn"])
        assert [event.scores for event in monitor.events] == ([after] if after else [])


def test_simple_jumper_never_overflows_and_keeps_its_level() -> None:
    """If p-values are uniform, at most 5 % of runs raise an alarm at level 1/20. If p-values
    change, an alarm is raised after about 50 steps.
    """
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


def test_a_restored_martingale_continues_exactly() -> None:
    """A restored martingale has the same values as one that was never stopped, and p outside [0, 1]
    is refused.
    """
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


def test_a_restored_monitor_raises_its_alarm_at_the_same_score(array_of: ArrayOf) -> None:
    """A monitor saved and restored in the middle of a stream raises the alarm at the same score."""
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


def test_questions_with_few_samples_are_compared_fairly(array_of: ArrayOf) -> None:
    """Questions with one or two scores are compared with stored questions of sixteen scores without
    a false alarm.
    """
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
    """Let the calibrator decide on chunks, sixteen per question, whose scores lie slightly above
    `level`. Return whether each chunk was escalated.
    """
    draw = random.Random(0)
    done = list[bool]()
    for place in range(count):
        decision = calibrator.decide(level + draw.random() / 4, f"q{place // 16}", 0, place % 16)
        calibrator.observe(decision)
        done.append(decision.escalate)
    return done


def stored_around(level: float) -> StoredScores:
    """Sample sixty questions of sixteen scores, slightly above a level."""
    draw = random.Random(9)
    return StoredScores.of(
        [level + draw.random() / 4 + 0.02 * (k // 16 % 7) for k in range(960)], 16
    )


def test_the_recalibrate_policy_restores_the_rate() -> None:
    """If stored scores are far above the run's scores, nothing escalates with the policy
    `report`; with `recalibrate` the rate recovers.
    """
    silent = Calibrator(0.4, "marginal", stored=stored_around(4.0), drift="report")
    acting = Calibrator(0.4, "marginal", stored=stored_around(4.0), drift="recalibrate")
    assert sum(run(silent)[200:]) == 0
    assert sum(run(acting)[200:]) == pytest.approx(80, abs=25)
    assert [event.action for event in acting.events] == ["recalibrate"]
    assert "ALREADY" in acting.voided_by
    assert "ALREADY" not in Calibrator(0.4, "marginal", stored=stored_around(4.0)).voided_by


def test_the_escalate_policy_lasts_until_resume() -> None:
    """With the policy `escalate`, everything escalates after an alarm until `resume` is called,
    also after a restart.
    """
    calibrator = Calibrator(0.4, "marginal", stored=stored_around(4.0), drift="escalate")
    assert all(run(calibrator)[200:])
    again = Calibrator.restored(calibrator.state())
    assert again.decide(1.0).escalate
    again.resume()
    assert not again.decide(1.0).escalate


def test_the_widen_policy_ends_after_500_decisions() -> None:
    """After an alarm, the policy `widen` raises the escalation rate by half for 500 decisions. Then
    the old rate returns.
    """
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


def test_split_mode_learns_live_scores_after_an_alarm() -> None:
    """In mode `split` the threshold comes from the stored scores and stays fixed. After a drift
    alarm, the threshold also depends on live scores.
    """
    calibrator = Calibrator(0.4, "split", stored=stored_around(4.0))
    assert sum(run(calibrator)[200:]) == pytest.approx(80, abs=25)


@pytest.mark.parametrize(
    "call", [lambda s: DriftMonitor(s, policy=cast(Any, "panic")), lambda s: DriftMonitor(s, significance=0.0)]
)  # fmt: skip
def test_impossible_monitors_are_refused(call: Any) -> None:
    """A monitor with an unknown policy or an impossible level is refused."""
    with pytest.raises((OptionError, CalibrationInputError)):
        call(stored_around(2.0))


SIZE = 6


def law(
    draw: np.random.Generator,
    count: int,
    shift: float = 0.0,
    scale: float = 1.0,
    noise: float = 0.5,
) -> Floats:
    """Sample a level for each question and six scores around it. As with perplexities, a higher
    level has a wider spread.
    """
    level = scale * draw.gamma(2.0, size=count) + shift
    return level[:, None] + noise * np.sqrt(level - shift + 0.1)[:, None] * draw.standard_normal(
        (count, SIZE)
    )


def sample(rows: Floats) -> QuestionSample:
    """Put these questions into the form of stored scores."""
    names = tuple(f"q{at // SIZE}" for at in range(rows.size))
    scores = tuple(float(score) for score in np.exp(rows.clip(0)).ravel())
    return QuestionSample.of(StoredScores(scores, names, (0,) * rows.size), 0)


def looked(stored: Floats, live: Floats, level: float = 1.0, seed: int = 0) -> TwoSampleTest:
    """Run the two-sample test on the stored and the live questions."""
    return two_sample_test(sample(stored), [list(row) for row in live.clip(0)], level, seed)


def test_draws_of_the_stored_questions_are_rarely_called_different() -> None:
    """If live questions are sampled from the stored questions, a tenth of the runs have p <= 0.1,
    within four binomial deviations.
    """
    draw = np.random.default_rng(0)
    stored = law(draw, 30)
    found = [
        looked(stored, stored[draw.integers(30, size=9)], level=1e-9).drawn <= 0.1
        for _ in range(150)
    ]
    assert 0.02 <= np.mean(found) <= 0.2


def test_draws_of_one_distribution_are_rarely_called_different() -> None:
    """If stored and live questions come from one distribution, the permutation test keeps its
    level: p <= 0.1 in about a tenth of the runs.

    The first test, which samples from the stored questions, need not keep its level.
    """
    draw = np.random.default_rng(1)
    found = [looked(law(draw, 12), law(draw, 8)).exchangeable <= 0.1 for _ in range(150)]
    assert np.mean(found) <= 0.2


@pytest.mark.parametrize(
    "change", [{"shift": 3.5}, {"scale": 4.0}, {"scale": 0.15}, {"noise": 2.5}, {"noise": 0.1}]
)
def test_a_change_of_level_width_or_spread_is_noticed(change: dict[str, float]) -> None:
    """After twenty questions, the test notices a change of the level, of the spread between
    questions, or of the spread within questions.
    """
    draw = np.random.default_rng(2)
    found = looked(law(draw, 60, shift=1.0), law(draw, 20, **{"shift": 1.0, **change}))
    assert found.drawn <= 0.002
    assert found.exchangeable <= 0.01
    assert found.questions == 20


def test_the_p_value_does_not_depend_on_the_order_of_questions() -> None:
    """The p-value is the same if the questions are in reverse order, or if it is computed again
    with the same seed.
    """
    draw = np.random.default_rng(3)
    stored = law(draw, 20)
    live = law(draw, 7, shift=0.4)
    assert looked(stored, live[::-1]).drawn == looked(stored, live).drawn
    assert looked(stored, live) == looked(stored, live)


def test_the_permutation_test_is_skipped_after_a_clean_first_test() -> None:
    """If the first test finds no difference, the permutation test cannot raise an alarm, so atts
    skips it to save time.
    """
    draw = np.random.default_rng(4)
    stored = law(draw, 20)
    assert looked(stored, stored[:10], level=1e-4).exchangeable == 1.0


def test_questions_are_compared_at_the_depth_that_uses_most_scores() -> None:
    """The depth is the number of scores compared per question; atts chooses the depth that uses
    most scores. For example, forty questions with one score outweigh three questions with six.
    """
    stored = sample(law(np.random.default_rng(5), 50, noise=1.0))
    assert stored.depth([[1.0] * SIZE] * 3 + [[1.0]] * 40) == 1
    assert stored.depth([[1.0] * SIZE] * 12 + [[1.0]]) == SIZE


def ratios(moved: Floats, runs: int = 400, count: int = 18) -> tuple[float, float]:
    """Return the mean log mixture ratio of live questions sampled from the stored ones, and that of
    the same questions shifted by `moved`. Each question is a row of two correlated columns.
    """
    draw = np.random.default_rng(6)
    stored = draw.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=100)
    weights = draw.multinomial(count, np.full(100, 0.01), size=runs) / count
    clean, other = (
        mixture_ratios(rows, stored, weights, count) for rows in (stored, stored + moved)
    )
    return float(clean.mean()), float(other.mean())


def test_the_mixture_ratio_is_low_without_change_and_high_with_it() -> None:
    """The mean log ratio is negative if the two columns did not change, and above 1.5 if both were
    shifted.
    """
    clean, together = ratios(np.array([0.8, 0.8]))
    _, apart = ratios(np.array([0.8, -0.8]))
    assert clean < 0
    assert together > 1.5
    # a shift against the correlation of the two columns counts as a larger change than a shift
    # along it
    assert apart > together
    assert ratios(np.array([0.0, 0.0]))[1] == clean


def test_the_mixture_accepts_single_scores_and_constant_columns() -> None:
    """The mixture accepts questions with a single score, which have no spread, and columns in which
    all values are equal. A shift is still noticed.
    """
    one = np.arange(20.0)[:, None] / 6
    same = np.zeros((20, 2))
    weights = np.full((1, 20), 0.05)
    assert (
        mixture_ratios(one + 3, one, weights, 20)[0] > 5 > mixture_ratios(one, one, weights, 20)[0]
    )
    assert (
        mixture_ratios(same + 1, same, weights, 20)[0] > mixture_ratios(same, same, weights, 20)[0]
    )


@pytest.mark.parametrize("direction", [1, -1])
def test_a_small_joint_shift_is_noticed_in_most_runs(direction: int) -> None:
    """Eighteen questions are enough to notice a small shift of level and spread together, which
    neither of the two shows alone.
    """
    draw = np.random.default_rng(7)
    stored = law(draw, 80, shift=1.0)
    level = stored.mean(axis=1).std()
    found = list[bool]()
    for _ in range(30):
        near = law(draw, 18, shift=1.0 + 0.75 * direction * level, noise=0.5 * 1.6**direction)
        found.append(looked(stored, near, level=0.005).drawn <= 0.005)
    assert sum(found) >= 24


def alike(seed: int, questions: int = 40, texts: int = 6) -> StoredScores:
    """Sample scores of questions with sixteen rollouts each. The rollouts of a question choose
    among few texts, and each text has one score.
    """
    draw = np.random.default_rng(seed)
    levels = draw.gamma(2.0, 0.2, questions)
    menu = np.exp(levels[:, None] * draw.gamma(4.0, 0.25, (questions, texts)) + 1e-3)
    chosen = draw.integers(texts, size=(questions, 16))
    return StoredScores.of(np.take_along_axis(menu, chosen, axis=1).ravel().tolist(), 16)


def watched(stored: StoredScores, live: StoredScores, most: int = 300) -> DriftMonitor:
    """Return a drift monitor with the stored scores after it has observed the first `most` live
    scores, whose questions have other names.
    """
    monitor = DriftMonitor(stored)
    for nonconformity, question in list(zip(live.nonconformity, live.questions, strict=True))[
        :most
    ]:
        monitor.observe(nonconformity, f"live {question}", 0)
    return monitor


def whole(stored: StoredScores, seed: int) -> StoredScores:
    """Sample whole questions of the same array with replacement."""
    rows = np.array(stored.scores).reshape(-1, 16)
    return StoredScores.of(
        rows[np.random.default_rng(seed).integers(len(rows), size=20)].ravel().tolist(), 16
    )


def copies(stored: StoredScores, every: int) -> StoredScores:
    """Replace the last score in each group of `every` scores by a copy of the score before it."""
    scores = stored.scores
    return StoredScores.of(
        [scores[at - (at % every == every - 1)] for at in range(len(scores))], 16
    )


def test_scores_repeated_by_siblings_raise_no_alarm() -> None:
    """If sibling rollouts write equal chunks in the calibration and in the run, no alarm is raised,
    and the report gives the effective size.
    """
    stored = alike(0)
    found = DuplicateScores.of(stored)
    assert found.within > 0.5
    assert (found.across, found.fault) == (0, "")
    assert not DriftMonitor(stored).events
    assert sum(bool(watched(stored, whole(stored, seed)).events) for seed in range(10)) <= 1
    warnings = " ".join(examine(stored, 0.4).warnings)
    assert "rollouts wrote the same chunk" in warnings
    assert "effective sample size" in warnings


@pytest.mark.parametrize("every", [2, 10])
def test_copied_stored_scores_are_noticed_if_the_run_repeats_none(
    every: int, array_of: ArrayOf
) -> None:
    """If half of the stored scores, or a tenth of them, are copies and the run repeats no score,
    the first comparison raises an alarm.
    """
    for seed in range(5):
        events = watched(copies(array_of(), every), whole(array_of(), seed)).events
        assert [(event.kind, event.scores) for event in events] == [("duplicates", 64)]
        assert "copied" in events[0].message


def test_a_published_array_with_copied_questions_is_an_error(array_of: ArrayOf) -> None:
    """A published array with copied questions is an error.

    Two of its fifteen questions have only two distinct scores among sixteen; the other questions
    repeat no score.
    """
    found = DuplicateScores.of(array_of("e0abbf88"))
    assert found.within == pytest.approx(1 - 212 / 240)
    assert found.distinct == pytest.approx(13 / 15)
    assert DriftMonitor(array_of("e0abbf88")).events[0].scores == 0
    assert not DriftMonitor(array_of()).events


def test_scores_shared_by_two_questions_are_an_error() -> None:
    """If two questions share scores, atts reports that one question may have two names; only chunks
    of perplexity 1 may coincide by chance.
    """
    scores = [1.1 + k**0.5 / 7 for k in range(320)]
    twice = StoredScores.of([*scores, *scores], 16)
    assert DuplicateScores.of(twice).across == 1
    assert "another question" in DriftMonitor(twice).events[0].message
    certain = StoredScores.of([1.0 if k % 16 == 0 else score for k, score in enumerate(scores)], 16)
    assert DuplicateScores.of(certain).across == 0
    assert not DriftMonitor(certain).events


def rounded(seed: int) -> list[float]:
    """Return 640 scores with four decimals: most of them close to 1, and some far above."""
    random = np.random.default_rng(seed)
    near = 1 + random.exponential(0.003, 520)
    far = 1 + random.exponential(3.0, 120)
    scores: list[float] = np.round(random.permutation(np.concatenate([near, far])), 4).tolist()
    return scores


def test_rounded_scores_that_are_equal_by_chance_are_no_copies() -> None:
    """If scores are rounded, equal scores close to the best score of 1 are not called copies, with
    or without known questions.
    """
    for seed in range(5):
        scores = rounded(seed)
        assert len(set(scores)) < 0.5 * len(scores)
        for stored in (StoredScores.of(scores, 16), StoredScores.of(scores)):
            assert DuplicateScores.of(stored).fault == ""
            assert not DriftMonitor(stored).events


def test_the_scores_of_the_embedded_models_are_no_copies() -> None:
    """The scores that atts ships for its embedded models raise no alarm."""
    stored = embedded_scores()
    assert DuplicateScores.of(stored).fault == ""
    assert not DriftMonitor(stored).events


def test_chunks_of_which_the_model_is_certain_are_no_copies() -> None:
    """If unrounded scores are exactly 1 in a quarter of the questions, no alarm is raised, with or
    without known questions.
    """
    random = np.random.default_rng(0)
    scores = 1 + random.exponential(0.5, (40, 16))
    scores[::4, :6] = 1.0
    for stored in (
        StoredScores.of(scores.ravel().tolist(), 16),
        StoredScores.of(scores.ravel().tolist()),
    ):
        assert DuplicateScores.of(stored).within == 0
        assert not DriftMonitor(stored).events


def test_equal_chunks_in_a_few_questions_are_no_copies() -> None:
    """If most rounded scores are close to 1, only questions with other scores show whether scores
    repeat. So equal chunks of siblings in these few questions raise no alarm.
    """
    random = np.random.default_rng(0)
    for num_showing in (2, 5):
        scores = np.round(1 + random.exponential(0.003, (12, 16)), 4)
        scores[:num_showing, :4] = np.round(2 + random.exponential(3.0, (num_showing, 1)), 4)
        stored = StoredScores.of(scores.ravel().tolist(), 16)
        repeats = DuplicateScores.of(stored)
        assert repeats.within > 0.5
        assert (repeats.distinct, repeats.fault) == (0, "")
        assert not DriftMonitor(stored).events


def test_one_value_in_two_questions_is_no_copy() -> None:
    """If two questions share only one rounded score, the cause may be chance."""
    random = np.random.default_rng(0)
    scores = np.round(1 + random.exponential(5.0, (20, 2)), 4)
    scores[1, 0] = scores[0, 0]
    assert DuplicateScores.of(StoredScores.of(scores.ravel().tolist(), 2)).fault == ""


def test_copies_among_rounded_scores_are_noticed() -> None:
    """If a tenth of the rounded scores are copies from other questions, an alarm is raised before
    the first live score.
    """
    for seed in range(5):
        scores = rounded(seed)
        copied = [scores[k - 160] if k % 10 == 9 and k >= 160 else scores[k] for k in range(640)]
        stored = StoredScores.of(copied, 16)
        assert "another question" in DuplicateScores.of(stored).fault


def test_repeated_scores_without_questions_are_an_error() -> None:
    """If scores repeat and the questions are unknown, atts reports an error, because equal chunks
    of siblings cannot be the cause.
    """
    events = DriftMonitor(StoredScores.of(list(alike(1).scores))).events
    assert "without recorded questions" in events[0].message


def test_repeats_in_a_file_alone_are_an_error_with_both_explanations() -> None:
    """Repeats in a file may be copies or equal chunks, so the error has both explanations; the
    scores of a run can show which is true.
    """
    stored = alike(2)
    assert "rollouts wrote the same chunk" in first_alarm(stored).events[0].message
    assert not first_alarm(stored, whole(stored, 0)).events


def test_scores_on_a_coarse_grid_are_not_called_repeats() -> None:
    """Scores such as marks out of ten are often equal by nature, so equal scores are not called
    copies.
    """
    marks = [1.0 + (k * 7 % 10) / 2 for k in range(400)]
    assert DuplicateScores.of(StoredScores.of(marks, 16)).within == 0


def test_scores_that_count_votes_are_no_copies() -> None:
    """The number of rollouts divided by the votes for the leading answer has few values, so equal
    scores are not called copies, whether scores are rounded or not, and questions known or not.
    """
    votes = np.random.default_rng(0).choice((3, 5, 6, 7, 8), 40)
    for digits in (4, 16):
        scores = np.round(8 / votes, digits).tolist()
        for stored in (StoredScores.of(scores, 1), StoredScores.of(scores)):
            assert DuplicateScores.of(stored).within == 0
            assert DuplicateScores.of(stored).fault == ""
            assert not DriftMonitor(stored).events


def test_a_run_of_single_samples_does_not_show_copies(array_of: ArrayOf) -> None:
    """A run with one sample per question repeats no score anyway, so it does not prove that stored
    scores were copied.
    """
    live: Iterator[float] = iter(whole(array_of(), 3).nonconformity)
    monitor = DriftMonitor(copies(array_of(), 2))
    for number in range(100):
        monitor.observe(next(live), f"live {number}", 0)
    assert all(event.kind != "duplicates" for event in monitor.events)
