"""Runs that leave some decisions to chance, and what they say of rates that were not run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atts.analysis.doubly_robust import LoggedRollout, LoggedTurn, doubly_robust
from atts.api import Setup, evaluate_sync, replay
from atts.errors import OptionError
from atts.journal import open_run
from atts.pipelines import Policy
from atts.testing import toy_problems

TURNS = 3


def logged(seed: int, problems: int, mistaken: float = 1.0) -> list[LoggedRollout]:
    """Rollouts of three turns: a score says who is escalated, with two fifths left to chance;
    escalation helps.

    `mistaken` multiplies the likelihoods that are told.
    """
    draw = np.random.default_rng(seed)
    found = list[LoggedRollout]()
    for problem in range(problems):
        ease = draw.normal()
        for _ in range(4):
            turns = list[LoggedTurn]()
            strength = ease
            for turn in range(TURNS):
                score = draw.normal() - 0.5 * ease
                chance = 0.4 * 0.4 + 0.6 * (score > 0.6)
                escalated = bool(draw.random() < chance)
                propensity = mistaken * (chance if escalated else 1 - chance)
                turns.append(LoggedTurn(turn, escalated, propensity, bool(score > 0.0)))
                strength += 0.6 * escalated - 0.3 * score
            found.append(
                LoggedRollout(
                    str(problem), turns, float(draw.random() < 1 / (1 + math.exp(-strength)))
                )
            )
    return found


def truth() -> float:
    """What the other policy is worth, by running it."""
    draw = np.random.default_rng(99)
    ease = draw.normal(size=(200_000, 1))
    scores = draw.normal(size=(200_000, TURNS)) - 0.5 * ease
    strength = ease[:, 0] + (0.6 * (scores > 0.0) - 0.3 * scores).sum(axis=1)
    return float((1 / (1 + np.exp(-strength))).mean())


def test_the_estimate_has_no_bias_and_its_interval_covers() -> None:
    """Sixty logs of 60 problems, a model of turns and actions only, which is wrong: the likelihoods
    make up for it.
    """
    value = truth()
    found = [
        one.accuracy for seed in range(60) if (one := doubly_robust(logged(seed, 60))) is not None
    ]
    naive = [np.mean([one.right for one in logged(seed, 60)]) for seed in range(60)]
    error = float(np.std([one.value for one in found])) / math.sqrt(60)
    assert abs(float(np.mean([one.value for one in found])) - value) < 3 * error
    # what the log itself says is of another policy
    assert abs(float(np.mean(naive)) - value) > 0.02
    covered = sum(one.low <= value <= one.high for one in found)
    assert covered >= 52  # of 60: fewer in one study of two hundred at 95 %


def test_a_right_model_makes_up_for_wrong_likelihoods() -> None:
    """Where the share of right rollouts depends on turn and action alone, likelihoods may be told
    half too large.
    """
    draw = np.random.default_rng(1)
    rollouts = list[LoggedRollout]()
    for problem in range(3000):
        escalated = bool(draw.random() < 0.3)
        turn = LoggedTurn(0, escalated, 0.9 if escalated else 0.95, True)
        rollouts.append(
            LoggedRollout(str(problem), [turn], float(draw.random() < (0.8 if escalated else 0.4)))
        )
    found = doubly_robust(rollouts)
    assert found is not None
    assert found.accuracy.value == pytest.approx(0.8, abs=0.04)


def test_by_hand_and_with_nothing_to_say() -> None:
    """The policy that was run has the accuracy that was recorded; one problem is none."""
    turns = [LoggedTurn(0, True, 1.0, True), LoggedTurn(1, False, 1.0, False)]
    same = [
        LoggedRollout(name, turns, right) for name, right in (("a", 1.0), ("b", 0.0), ("c", 1.0))
    ]
    found = doubly_robust(same)
    assert found is not None
    assert found.accuracy.value == pytest.approx(2 / 3)
    assert found.effective == pytest.approx(3)
    assert doubly_robust(same[:1]) is None


def test_a_run_that_explores_logs_how_likely_each_decision_was(tmp_path: Path) -> None:
    """A fifth is left to coins; another rate is estimated with an interval, also after a second
    reading.
    """
    policy = Policy(samples=4, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", rate=0.3, explore=0.2, policy=policy)
    result = evaluate_sync(toy_problems(8, 2), setup, directory=tmp_path / "run")
    decided = [event.decision for event in open_run(result.directory or tmp_path).decisions()]
    judged = [decision for decision in decided if decision.p is not None]
    explored = sum(decision.origin == "exploration" for decision in judged)
    assert 0.1 < explored / len(judged) < 0.3
    for decision in judged:
        assert decision.propensity is not None
        sure = decision.propensity == pytest.approx(0.86) or decision.propensity == pytest.approx(
            0.94
        )
        assert sure or decision.origin == "exploration"
    same = replay(result)
    other = replay(result, rate=0.1)
    for found in (same, other):
        assert found.estimated is not None
        assert found.estimated.accuracy.n_problems == 8
        assert 0 <= found.estimated.accuracy.low <= found.estimated.accuracy.high <= 1
    plain = evaluate_sync(
        toy_problems(4, 2), replace(setup, explore=0.0), directory=tmp_path / "plain"
    )
    assert replay(plain, rate=0.1).estimated is None
    with pytest.raises(OptionError, match="explore"):
        Setup(explore=1.5)
    with pytest.raises(OptionError, match="explore"):
        Setup(method="top-b", explore=0.1).decider()
