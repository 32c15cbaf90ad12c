"""Tests that p-values, thresholds and hypothesis tests equal those of independent libraries."""

import importlib
import warnings
from typing import Any

import numpy as np
import pytest

from atts.calibration.certificates import rejected
from atts.calibration.conformal import split_threshold
from atts.calibration.drift import SimpleJumper
from atts.calibration.pools import Window


def oracle(name: str) -> Any:
    """Import a library that only tests need, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed")


def test_plain_p_values_equal_crepes() -> None:
    """The p-values of new scores equal those of the library crepes, after the sign of the scores is
    changed.
    """
    base = oracle("crepes.base")
    draw = np.random.default_rng(1)
    stored = draw.random(100)
    new = draw.random(30)
    theirs = base.p_values_batch(stored, new, smoothing=False)
    mirrored = Window()
    for score in stored:
        # the sign changes, because in crepes a worse score has p near 0
        mirrored.add(-float(score))
    assert [mirrored.rank(-float(s)).p(1.0) for s in new] == pytest.approx(list(theirs))


@pytest.mark.parametrize("law", ["uniform", "changed"])
def test_simple_jumper_equals_crepes(law: str) -> None:
    """The martingales of atts and crepes agree at each step, before and after a change."""
    martingales = oracle("crepes.martingales")
    p_values = np.random.default_rng(2).random(400) ** (1 if law == "uniform" else 1.5)
    theirs = martingales.SimpleJumper().apply(p_values)
    ours = list[float]()
    martingale = SimpleJumper()
    for p in p_values:
        martingale.update(float(p))
        ours.append(float(np.exp(martingale.log_value)))
    assert ours == pytest.approx(list(theirs), rel=1e-9)


@pytest.mark.parametrize("n", [20, 57, 400])
def test_split_thresholds_equal_mapie(n: int) -> None:
    """atts and MAPIE choose the same order statistic wherever MAPIE's floating-point arithmetic
    gives the exact rank.
    """
    utils = oracle("mapie.utils")
    scores = np.random.default_rng(n).random(n)
    for rate in (0.05, 0.1, 0.25, 0.4, 0.5):
        theirs = utils._compute_classification_quantile(scores[:, None], np.array([rate]))
        assert split_threshold(scores, rate) == pytest.approx(float(theirs[0]))


def test_fixed_sequence_testing_equals_mapie() -> None:
    """atts and MAPIE reject the same hypotheses."""
    control = oracle("mapie.risk_control.fwer_control")
    draw = np.random.default_rng(4)
    for _ in range(50):
        p_values = draw.random(8) ** 4
        expected = sorted(
            int(place) for place in control.control_fwer(p_values, 0.1, "fixed_sequence")
        )
        assert rejected(p_values.tolist(), 0.1) == expected
