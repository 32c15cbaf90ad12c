"""Tests of how well scores predict wrong rollouts, exactly on small cases and by the coverage of
intervals.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from atts.errors import OptionError
from atts.evaluators import LabelledChunk, gain_over_coin, holm, within_question_auroc


def chunks(count: int, shift: float, seed: int) -> list[LabelledChunk]:
    """Draw scores around a random level of each question and rollout. The scores of wrong rollouts
    are worse by `shift`.
    """
    draw = np.random.default_rng(seed)
    made: list[LabelledChunk] = []
    for question in range(count):
        accuracy = draw.uniform()
        level = draw.normal()
        for _ in range(8):
            is_wrong = bool(draw.uniform() > accuracy)
            rollout = level + draw.normal() / 2 + shift * is_wrong
            turns = int(draw.integers(2, 7))
            made += [
                LabelledChunk(question, float(rollout + draw.normal()), is_wrong)
                for _ in range(turns)
            ]
    return made


def test_auroc_counts_pairs_within_questions() -> None:
    """The AUROC equals a count over all pairs within each question, with ties as one half."""
    made = [
        LabelledChunk(chunk.question, round(chunk.score, 1), chunk.is_wrong)
        for chunk in chunks(6, 0.5, 3)
    ]
    wins = pairs = 0.0
    for one, other in itertools.product(made, made):
        if one.question == other.question and one.is_wrong and not other.is_wrong:
            wins += (one.score > other.score) + (one.score == other.score) / 2
            pairs += 1
    assert within_question_auroc(made).value == pytest.approx(wins / pairs)


def test_scores_that_only_know_the_question_have_auroc_one_half() -> None:
    """Scores that only depend on the question rank nothing within a question, however well they
    rank over all questions.
    """
    made = [LabelledChunk(q, float(q), n < q) for q in range(1, 9) for n in range(9)]
    assert within_question_auroc(made).value == 0.5
    assert gain_over_coin(made, 0.3).value == pytest.approx(0.0)


def test_a_perfect_score_catches_what_the_rate_allows() -> None:
    """Two of ten chunks are wrong. At rate 0.2 a perfect score escalates both, but a coin escalates
    a fifth of the wrong chunks on average.
    """
    made = [LabelledChunk(q, float(n), n > 7) for q in range(5) for n in range(10)]
    assert gain_over_coin(made, 0.2).value == pytest.approx(0.8)
    assert gain_over_coin(made, 0.1).value == pytest.approx(0.4)
    assert within_question_auroc(made).value == 1.0


@pytest.mark.parametrize("alike", [0, 1])
def test_one_mixed_question_has_no_interval(alike: int) -> None:
    """If only one question has both correct and wrong rollouts, the AUROC has no interval, and a
    note says so.
    """
    made = [LabelledChunk("a", float(n), n > 3) for n in range(6)] * alike
    made += [LabelledChunk("b", 1.0, True)] * 3
    for estimate in (within_question_auroc(made), gain_over_coin(made, 0.2)):
        assert math.isnan(estimate.value)
        assert "at least two" in estimate.note


@pytest.mark.parametrize(("count", "shift"), [(10, 0.0), (30, 0.0), (30, 0.7), (100, 0.7)])
def test_intervals_cover(count: int, shift: float) -> None:
    """Confidence intervals over questions cover the true value in at least nine of ten simulated
    runs.
    """
    truth = chunks(2_000, shift, 1)
    values = within_question_auroc(truth).value, gain_over_coin(truth, 0.2).value
    covered = np.zeros(2)
    runs = 150
    for seed in range(2, runs + 2):
        made = chunks(count, shift, seed)
        estimates = within_question_auroc(made), gain_over_coin(made, 0.2)
        for place, (estimate, value) in enumerate(zip(estimates, values, strict=True)):
            covered[place] += estimate.low <= value <= estimate.high
    # with a true coverage of 0.96, 150 runs measure at least 0.91 (three standard errors lower)
    assert (covered / runs > 0.90).all(), covered / runs


def test_holm_rejects_no_more_than_it_may() -> None:
    """Holm's correction lowers no p-value, and wrongly rejects any of four true hypotheses in about
    5 % of simulations at most.
    """
    draw = np.random.default_rng(0)
    errors = 0
    for _ in range(2_000):
        null = draw.uniform(size=4).tolist()
        corrected = holm([*null, 1e-9])
        assert all(now >= before for now, before in zip(corrected, [*null, 1e-9], strict=True))
        errors += min(corrected[:4]) < 0.05
    assert errors / 2_000 < 0.065
    assert holm([]) == []


def test_a_missing_p_value_rejects_nothing_and_moves_no_other() -> None:
    """A missing p-value (NaN) counts as p = 1, so the other p-values are corrected for it too."""
    assert holm([math.nan, 0.01]) == [1.0, 0.02]


def test_a_score_that_is_not_a_number_ranks_worst() -> None:
    """NaN ranks like infinity, and a rate outside [0, 1] is refused."""
    made = [
        [LabelledChunk(question, worst if n == 0 else n, n % 2 == 0) for n in range(4)]
        for question in range(3)
        for worst in (math.nan, math.inf)
    ]
    missing = list(itertools.chain(*made[0::2]))
    infinite = list(itertools.chain(*made[1::2]))
    assert within_question_auroc(missing) == within_question_auroc(infinite)
    assert gain_over_coin(missing, 0.2) == gain_over_coin(infinite, 0.2)
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(OptionError, match="outside"):
            gain_over_coin(missing, rate)
