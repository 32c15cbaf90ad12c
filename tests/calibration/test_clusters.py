"""Scores that move together are counted for what they are worth."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from atts.calibration.conformal import by_cluster, summarise
from atts.calibration.scores import StoredScores
from atts.errors import CalibrationInputError


def test_pooled_thresholds_are_overconfident_and_the_effective_size_says_so() -> None:
    """Twenty questions of twenty scores that share an effect: the spread of true rates fits the
    effective size.
    """
    draw = np.random.default_rng(0)
    rates = list[float]()
    sizes = list[float]()
    for _ in range(300):
        effect = draw.normal(size=(20, 1))
        scores = effect + draw.normal(size=(20, 20)) * 0.8
        summary = summarise(dict(enumerate(scores)))
        sizes.append(summary.effective)
        threshold = np.sort(scores.ravel())[239]
        rates.append(float(np.mean(draw.normal(size=4000) * math.hypot(1, 0.8) > threshold)))
    naive = math.sqrt(0.24 / 400)
    assert np.std(rates) > 2.5 * naive
    assert np.std(rates) == pytest.approx(math.sqrt(0.24 / float(np.mean(sizes))), rel=0.25)


def test_effective_sizes_of_real_arrays(array_of: Callable[..., StoredScores]) -> None:
    """1,600 scores of 100 questions with ICC about .6 are worth about 160; 240 of 15 about 22."""
    for part, icc, effective in (
        ("ec846181", (0.57, 0.61), (155, 170)),
        ("7564d923", (0.55, 0.77), (19, 26)),
    ):
        stored = array_of(part)
        summary = summarise(by_cluster(stored.nonconformity, stored.questions))
        assert icc[0] <= summary.icc <= icc[1]
        assert effective[0] <= summary.effective <= effective[1]


def test_degenerate_clusterings() -> None:
    """Independent scores are worth what they are, one question is worth one score, infinities carry
    no correlation.
    """
    assert summarise({at: [float(at)] for at in range(7)}).effective == 7
    assert summarise({"q": [1.0, 2.0, 3.0]}).effective == 1
    assert summarise({}).effective == 0
    assert math.isfinite(summarise({"a": [1.0, 2.0, math.inf], "b": [5.0, 6.0]}).icc)
    with pytest.raises(CalibrationInputError):
        by_cluster([1.0], [])
