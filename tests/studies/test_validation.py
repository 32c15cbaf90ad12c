"""Engines with fitted costs take about the time that real ones do."""

from pathlib import Path
from typing import Any

import pytest

from scripts.studies.harness import Options

scale = pytest.importorskip("scripts.studies.scale", reason="needs a checkout")


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts what threads use as Linux does"
)
def test_the_processor_time_of_live_runs_is_predicted() -> None:
    """Every kind of run within a third, on a machine that others use; the study asks for a tenth on
    a quiet one.
    """
    costs, predicted = scale.local_validation(Options("quick"))
    assert [row[0] for row in costs.rows] == ["draft", "target"]
    column = predicted.columns.index("predicted")
    errors: list[Any] = [float(str(row[column]).rstrip("%")) / 100 for row in predicted.rows]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 1 / 3, predicted.markdown()
