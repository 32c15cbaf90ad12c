"""Tests that engines with fitted costs take about the time of real engines."""

from pathlib import Path
from typing import Any

import pytest

from scripts.studies.harness import Options

scale = pytest.importorskip("scripts.studies.scale", reason="needs a checkout")


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(),
    reason="needs Linux's counters of the processor time of threads",
)
def test_the_processor_time_of_live_runs_is_predicted() -> None:
    """The predicted processor time of live runs is within a third of the measured time, for every
    kind of run on a shared machine.

    On a quiet machine, the study requires an error of at most a tenth.
    """
    costs, predicted = scale.local_validation(Options("quick"))
    assert [row[0] for row in costs.rows] == ["draft", "target"]
    column = predicted.columns.index("error")
    errors: list[Any] = [float(str(row[column]).rstrip("%")) / 100 for row in predicted.rows]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 1 / 3, predicted.markdown()
