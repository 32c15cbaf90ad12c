"""Answers that are withheld where confidence is low: the promise by simulation, the counts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atts.calibration import certify_abstention
from atts.errors import CalibrationInputError


def labelled(n: int, seed: int, slope: float) -> tuple[list[float], list[bool]]:
    """Confidences in eighths; the more votes agree, the seldomer they are wrong."""
    draw = np.random.default_rng([seed, n])
    confidence = draw.integers(2, 9, n) / 8
    return confidence.tolist(), (draw.random(n) < slope * (1 - confidence) + 0.03).tolist()


def true_risk(threshold: float, slope: float) -> float:
    """How often an answered problem of that law is wrong."""
    levels = [step / 8 for step in range(2, 9) if step / 8 >= threshold - 1e-9]
    return sum(slope * (1 - level) + 0.03 for level in levels) / len(levels)


@pytest.mark.parametrize("slope", [0.25, 0.5, 0.9])
def test_the_risk_is_kept_with_the_probability_promised(slope: float) -> None:
    """Of 300 calibration runs, those whose threshold answers wrongly more than one time in ten are
    a tenth at most.
    """
    broken = certified = 0
    for seed in range(300):
        found = certify_abstention(*labelled(400, seed, slope), risk=0.1, kept=0.9)
        if found.threshold is not None:
            certified += 1
            broken += true_risk(found.threshold, slope) > 0.1
    assert certified > 100
    assert broken <= 0.1 * 300


def test_counts_by_hand() -> None:
    """Forty unanimous problems, all right: 29 are needed at half of a tenth; more are answered
    while few are wrong.
    """
    found = certify_abstention([1.0] * 40 + [0.5] * 40, [False] * 40 + [True] * 40, 0.1)
    assert (found.threshold, found.answered, found.wrong) == (0.55, 40, 0)
    assert "answered problems are wrong at most 0.1 of the time" in found.guarantee
    all_right = certify_abstention([0.6] * 60, [False] * 60, 0.1)
    assert all_right.threshold == 0.0
    unsure = certify_abstention([0.5] * 60, [False] * 60, 0.1)
    assert unsure.threshold is None
    assert "none has votes that agree" in unsure.guarantee


def test_one_that_may_answer_too_few_stops_where_it_fails() -> None:
    """Twenty-eight right answers do not certify a tenth at a twentieth; it says how many problems
    would.
    """
    found = certify_abstention([1.0] * 28 + [math.nan] * 28, [False] * 56, 0.1)
    assert found.threshold is None
    assert found.needed == 58
    assert "about 58" in found.guarantee
    more = certify_abstention([1.0] * 29 + [math.nan] * 29, [False] * 58, 0.1)
    assert more.threshold == 0.0


def test_where_no_number_would_do() -> None:
    """The most certain answers are wrong a third of the time."""
    found = certify_abstention([1.0] * 90, ([True] + [False] * 2) * 30, 0.1)
    assert (found.threshold, found.needed) == (None, None)
    assert "no number" in found.guarantee


@pytest.mark.parametrize(
    ("confidence", "wrong", "risk", "kept"),
    [
        ([], [], 0.1, 0.9),
        ([1.5], [True], 0.1, 0.9),
        ([0.5], [True, False], 0.1, 0.9),
        ([1], [True], 0, 0.9),
        ([1], [True], 0.1, 1),
    ],
)
def test_what_is_refused(
    confidence: list[float], wrong: list[bool], risk: float, kept: float
) -> None:
    """Nothing to learn from, no confidences, no fractions."""
    with pytest.raises(CalibrationInputError):
        certify_abstention(confidence, wrong, risk, kept)
