"""Tests of the distillation example: training on a run's export brings the draft closer to the
target.
"""

import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.checkout


def test_the_divergence_falls_on_problems_left_out(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft with disturbed weights learns, and the interval of the change in divergence is below
    zero.
    """
    example("distil").main(["--problems", "12", "--epochs", "4", "--noise", "0.15"])
    printed = capsys.readouterr().out
    found = re.search(r"KL .*difference (\S+) \[(\S+), (\S+)\], n = (\d+)", printed)
    assert found is not None, printed
    difference, low, high, places = map(float, found.groups())
    assert low <= difference <= high < 0
    assert places > 500
    assert re.search(r"escalated +0\.\d+ -> 0\.\d+", printed)
    assert "6 problems left out of training, 4 rollouts of each, seeds: 1" in printed


def test_the_interval_is_over_problems(example: Callable[[str], ModuleType]) -> None:
    """The interval of the change in divergence is over problems, so one problem with many positions
    does not narrow the interval.
    """
    interval = example("distil").interval
    rows = np.array([[10.0, 10, 0, 10]] + [[0.0, 10, 0, 10]] * 9)
    difference, low, high = interval(rows)
    assert difference == pytest.approx(0.1)
    assert low == 0.0
    assert 0.1 < high <= 0.4
