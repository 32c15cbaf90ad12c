"""Fixtures every test area shares."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["typing_api.py"]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on both back ends."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real traces and benchmark files that are not part of the project; tests that want them skip without them."""
    named = os.environ.get("ATTS_SHARED_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; set ATTS_SHARED_DATA to its folder")
    return path
