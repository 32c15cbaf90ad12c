"""Small studies, run once for all tests of this folder."""

from pathlib import Path
from typing import Any

import anyio
import pytest

work = pytest.importorskip("scripts.studies.modelled", reason="needs a checkout")
soak = pytest.importorskip("scripts.studies.graph", reason="needs a checkout")


@pytest.fixture(scope="session")
def law() -> Any:
    """Return the distribution of simulated rollouts from the synthetic library, which is the same
    on every machine.
    """
    return work.TraceLaw(work.synthetic_library(questions=20), seed=3)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tally(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Solve problems for a second under faults, cancellations and drift, with at least one run of
    each kind.
    """
    return anyio.run(
        soak.soak, tmp_path_factory.mktemp("soak"), 1.0, 0, ("cancelled and resumed", "drift")
    )
