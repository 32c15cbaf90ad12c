"""Tests of a learned judge: the judge uses its features, reports its gain over a coin, and is
refused under other conditions.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from atts.api import Setup, evaluate_sync, judge_of
from atts.calibration import (
    AdvantageJudge,
    Examples,
    fit_judge,
    read_state,
    write_state,
)
from atts.cli.app import run as atts
from atts.errors import CalibrationInputError, FingerprintError, OptionError, UsageError
from atts.evaluators import compare_runs
from atts.pipelines import JUDGE_FEATURES, Policy, ScoreRule, judge_features
from atts.run import RunResult
from atts.testing import toy_problems

POLICY = Policy(samples=4, early_stop="none")


def examples(skill: float, problems: int = 60, seed: int = 0) -> Examples:
    """Sample three features per chunk; the first is correlated with the gain of a takeover, with
    correlation `skill`.
    """
    random = np.random.default_rng(seed)
    count = 8 * problems
    truth = random.random(count) < 0.3  # a takeover gains 1 at these chunks, and 0 at others
    known = skill * truth + random.normal(0, 0.1, count)
    features = np.column_stack([random.normal(size=count), known, 7 * np.ones(count)])
    names = [f"p{index // 8}" for index in range(count)]
    return Examples(("noise", "known", "constant"), features.tolist(), truth.tolist(), names)


def test_the_gain_over_a_coin_is_what_enumeration_says() -> None:
    """With a perfect feature, each chunk that the judge chooses gains 1 and each chunk of a coin
    gains 0.3; at rate 0.2 the difference is 0.14 per chunk.
    """
    planted = examples(1.0)
    judge = fit_judge(planted, rate=0.2)
    mean = float(np.mean(planted.gains))
    assert judge.over_coin[0] == pytest.approx(0.2 * (1 - mean), abs=0.005)
    assert judge.over_coin[1] <= judge.over_coin[0] <= judge.over_coin[2]
    assert judge.beats_coin
    assert judge.advantage((0.0, 1.0, 7.0)) > judge.advantage((0.0, 0.0, 7.0)) + 0.5


def test_a_judge_without_skill_is_rarely_called_better() -> None:
    """At most four of forty judges fitted on noise have an interval above 0."""
    wrong = sum(
        fit_judge(examples(0.0, problems=20, seed=seed), 0.2).beats_coin for seed in range(40)
    )
    assert wrong <= 4


def test_a_judge_survives_its_file_and_another_file_is_refused(tmp_path: Path) -> None:
    """A judge's predictions are the same after saving and reading; a file of scores is refused as a
    judge, and five problems are too few for a judge.
    """
    judge = fit_judge(examples(1.0), 0.2, fingerprint={"draft.model": "a"})
    write_state(tmp_path / "judge.json", judge.state())
    again = AdvantageJudge.from_state(read_state(tmp_path / "judge.json"))
    assert again == judge
    assert 1 <= judge.score((0.0, 1.0, 7.0)) <= 3
    assert math.isnan(judge.score((0.0, math.nan, 7.0)))
    with pytest.raises(CalibrationInputError, match="atts judge"):
        AdvantageJudge.from_state({"kind": "atts scores"})
    with pytest.raises(CalibrationInputError, match="at least 10"):
        fit_judge(examples(1.0, problems=5), 0.2)


def test_features_of_a_chunk_were_computed_by_hand() -> None:
    """The features of a chunk equal those computed by hand and are finite; without the draft's
    log-probabilities a chunk has no features.
    """
    row = judge_features([-1.0, -3.0], [-1.5, -0.5], turn=2, agreement=0.75)
    assert row == pytest.approx((2.0, 3.0, 1.25, 1.0, 1.5, math.log(2), 2.0, 0.75, 0.0))
    assert judge_features([-math.inf], [-0.5], 0, None)[1] == 30.0
    assert all(map(math.isnan, judge_features([-1.0, -1.0], [-1.0], 0, None)))


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the method `trial` on sixty toy problems at rate 0.4."""
    directory = tmp_path_factory.mktemp("runs") / "trial"
    setup = Setup("scripted", "scripted", method="trial", rate=0.4, policy=POLICY)
    evaluate_sync(toy_problems(60, 11), setup, directory=directory)
    return directory


@pytest.fixture(scope="module")
def judge_file(trial: Path) -> Path:
    """Fit a judge on the trial with the command `atts calibration judge`."""
    out = trial.with_name("judge.json")
    assert atts(["calibration", "judge", str(trial), "--out", str(out)]) == 0
    return out


def shares(result: RunResult) -> list[float]:
    """Return the share of correct rollouts of each problem."""
    return [
        sum(one.verdict == "correct" for one in problem.samples) / len(problem.samples)
        for problem in result.problems
    ]


def test_a_judge_of_a_trial_beats_a_coin_on_other_problems(judge_file: Path) -> None:
    """A judge learns from a trial which features show the draft's mistakes. On other problems it
    escalates chunks with a higher gain than a coin does.
    """
    judge = AdvantageJudge.from_state(read_state(judge_file))
    assert judge.names == JUDGE_FEATURES
    assert judge.problems > 50
    learned = Policy(
        samples=4, early_stop="none", score=ScoreRule("learned", judge=str(judge_file))
    )
    results = {
        method: evaluate_sync(
            toy_problems(40, 5), Setup("scripted", "scripted", method=method, policy=policy)
        )
        for method, policy in (("atts", learned), ("coin", POLICY))
    }
    assert abs(results["atts"].rate.value - results["coin"].rate.value) < 0.04
    assert results["atts"].unscored == 0
    assert compare_runs(shares(results["coin"]), shares(results["atts"])).difference.low > 0


def test_a_judge_is_refused_under_other_conditions(judge_file: Path) -> None:
    """A judge is refused under another temperature, with an error that names the difference; a run
    without its judge is refused too.
    """
    score = ScoreRule("learned", judge=str(judge_file))
    policy = Policy(samples=2, score=score, sampling=Policy().sampling.__class__(0.3))
    with pytest.raises(FingerprintError, match="the judge.*sampling.temperature"):
        evaluate_sync(toy_problems(1, 5), Setup("scripted", "scripted", policy=policy))
    taken = Setup("scripted", "scripted", policy=policy, conditions="ignore")
    assert evaluate_sync(toy_problems(1, 5), taken).problems
    nothing = Setup("scripted", "scripted", policy=Policy(samples=2, score=ScoreRule("learned")))
    with pytest.raises(OptionError, match="needs a judge file"):
        evaluate_sync(toy_problems(1, 5), nothing)


def test_a_run_whose_score_chose_is_no_trial(tmp_path: Path) -> None:
    """If chunks were escalated because of their scores, atts fits no judge to the run, because
    these chunks differ from others in more than the takeover.
    """
    setup = Setup("scripted", "scripted", policy=POLICY)
    evaluate_sync(toy_problems(2, 5), setup, directory=tmp_path / "run")
    with pytest.raises(UsageError, match="--method trial"):
        judge_of(tmp_path / "run")
