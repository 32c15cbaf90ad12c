"""Fixtures and options for all tests, and the division of test files among parallel runs."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
WEIGHTS = TESTS / "weights.json"
FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))
CHECKOUT = "the checkout's own"
# time limit of a slow test in seconds; pyproject.toml has the limit of other tests
SLOW_TIMEOUT = 600
SPENT = pytest.StashKey[dict[str, float]]()
collect_ignore = ["typing_api.py"]
# A busy machine may exceed hypothesis's time limit for an example although the property holds.
settings.register_profile("atts", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atts")
# A shell's background jobs and their child processes ignore interrupts. Tests start processes and
# interrupt them, so interrupts get their usual handler back.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share 1/2`, which runs one share of all tests, and `--weigh FILE`, which records costs."""
    parser.addoption("--share", default="1/1", help="run only this share of all tests, such as 1/2")
    parser.addoption(
        "--weigh", type=Path, help="write the processor seconds of every file's tests to this file"
    )


def deal(seconds: dict[str, float], shares: int) -> dict[str, int]:
    """Give each test file, the heaviest first, to the share with the lowest total cost so far.
    Tests that need a checkout, and tests of the studies, belong to the first share.
    """
    shares_of_files = {CHECKOUT: 1}
    for file in FILES:
        if file.startswith("studies/"):
            shares_of_files[file] = 1
    loads = [0.0] * shares
    loads[0] = sum(seconds.get(file, 1.0) for file in shares_of_files)
    for file in sorted(FILES, key=lambda file: -seconds.get(file, 1.0)):
        if file in shares_of_files:
            continue
        lightest = loads.index(min(loads))
        loads[lightest] += seconds.get(file, 1.0)
        shares_of_files[file] = lightest + 1
    return shares_of_files


def file_of(item: pytest.Item) -> str:
    """Return the file of a test, or CHECKOUT for a test that needs a checkout.

    A file's tests stay together, because they share fixtures.
    """
    if item.get_closest_marker("checkout") or not item.path.is_relative_to(TESTS):
        return CHECKOUT
    return item.path.relative_to(TESTS).as_posix()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests more time, and leave out the tests that belong to other shares.

    Tests marked `both` belong to every share.
    """
    config.stash[SPENT] = dict.fromkeys([CHECKOUT, *FILES], 0.0)
    share, shares = map(int, str(config.getoption("--share")).split("/"))
    shares_of_files = deal(json.loads(WEIGHTS.read_text()), shares)
    kept = list[pytest.Item]()
    left_out = list[pytest.Item]()
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
        if shares_of_files[file_of(item)] == share or item.get_closest_marker("both"):
            kept.append(item)
        else:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Exempt all objects of the modules imported so far from garbage collection.

    Imported modules have hundreds of thousands of objects, which the collector would otherwise scan
    again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Add up the processor time of each test file, including its fixtures and the child processes
    that have ended.
    """
    before = sum(os.times()[:4])
    result = yield
    item.config.stash[SPENT][file_of(item)] += sum(os.times()[:4]) - before
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the costs to the file that `--weigh` names."""
    file = config.getoption("--weigh")
    if file is None:
        return
    spent = {name: round(seconds, 1) for name, seconds in sorted(config.stash[SPENT].items())}
    Path(file).write_text(json.dumps(spent, indent=1) + "\n")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every async test on both back ends of anyio."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real traces and benchmark files, or skip the test if it is missing.

    The folder is not part of the project.
    """
    named = os.environ.get("ATTS_SHARED_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"the shared data are missing at {path}; set ATTS_SHARED_DATA to their folder")
    return path
