"""Fixtures of recorded score streams, published arrays, and an independent definition of the
metrics.
"""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atts.calibration.scores import StoredScores, read_scores

Records = list[dict[str, Any]]
MATH = "ppls_math500_qwq_32B_rllama_8B_s16_t500_temp0.8__ec846181.npy"


@pytest.fixture(scope="session")
def arrivals(shared_data: Path) -> dict[str, Records]:
    """Read the two recorded streams, "sim" and "lock", named after their order of arrival."""
    return {
        name: _read(shared_data / "traces" / f"arrivals_ct0_{name}.jsonl")
        for name in ("sim", "lock")
    }


def _read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def array_of(shared_data: Path) -> Callable[[str], StoredScores]:
    """Return a function that reads a published array of sixteen scores per question; a part of its
    file name selects the array.
    """

    def load(part: str = MATH) -> StoredScores:
        found = sorted((shared_data / "traces" / "calibration").glob(f"*{part}*"))
        assert len(found) == 1, (part, found)
        return read_scores(found[0], 16)

    return load


@pytest.fixture(scope="session")
def reference_metrics(shared_data: Path) -> Callable[..., dict[str, float]]:
    """Load the metrics as they are defined outside this project."""
    tool = shared_data.parent / "tools" / "rate_metrics.py"
    if not tool.exists():
        pytest.skip(f"the outside definition of the metrics is missing: {tool}")
    metrics: Callable[..., dict[str, float]] = runpy.run_path(str(tool))["metrics"]
    return metrics
