"""Fixtures and options every test area shares."""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["typing_api.py"]
# A property holds or it does not: how long an example takes on a busy machine is no part of it.
settings.register_profile("atts", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atts")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 1/2`: of the tests marked `once`, only those of about half the files; `2/2` has the others."""
    parser.addoption("--share", default="1/1", help="which share of the tests marked `once` to run, such as 1/2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `once` that belong to another share; a file's stay together, a checkout's are its."""
    number, shares = map(int, str(config.getoption("--share")).split("/"))
    once = [item for item in items if item.get_closest_marker("once") and not item.get_closest_marker("checkout")]
    others = [item for item in once if crc32("/".join(item.path.parts[-2:]).encode()) % shares != number - 1]
    if others:
        left_out = set(map(id, others))
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if id(item) not in left_out]


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
