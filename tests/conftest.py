"""Fixtures and options every test area shares, and how the tests are dealt out between runs that go
on at once.
"""

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
SLOW_TIMEOUT = 600  # seconds of a slow test; pyproject.toml has the limit of all others
SPENT = pytest.StashKey[dict[str, float]]()
collect_ignore = ["typing_api.py"]
# A property holds or it does not: how long an example takes on a busy machine is no part of it.
settings.register_profile("atts", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atts")
# A shell's background jobs ignore interrupts, and so would what the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 1/2`: one of two runs that have every test between them; `--weigh FILE`: what each
    file's tests cost.
    """
    parser.addoption("--share", default="1/1", help="which share of all tests to run, such as 1/2")
    parser.addoption(
        "--weigh", type=Path, help="write the processor seconds of every file's tests to this file"
    )


def deal(seconds: dict[str, float], shares: int) -> dict[str, int]:
    """The share of every test file: the heaviest first, each to the lightest share; the checkout's
    tests to the 1st.
    """
    owners = {CHECKOUT: 1, **{file: 1 for file in FILES if file.startswith("studies/")}}
    loads = [sum(seconds.get(file, 1.0) for file in owners), *[0.0] * (shares - 1)]
    for file in sorted(FILES, key=lambda file: -seconds.get(file, 1.0)):
        if file in owners:
            continue
        lightest = loads.index(min(loads))
        loads[lightest] += seconds.get(file, 1.0)
        owners[file] = lightest + 1
    return owners


def dealt_with(item: pytest.Item) -> str:
    """What a test stays together with: its file, whose fixtures are made once, or all that need a
    checkout.
    """
    if item.get_closest_marker("checkout") or not item.path.is_relative_to(TESTS):
        return CHECKOUT
    return item.path.relative_to(TESTS).as_posix()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is another share's; tests marked `both` are in every share."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
    config.stash[SPENT] = dict.fromkeys([CHECKOUT, *FILES], 0.0)
    number, shares = map(int, str(config.getoption("--share")).split("/"))
    owners = deal(json.loads(WEIGHTS.read_text()), shares)
    others = [
        item
        for item in items
        if owners[dealt_with(item)] != number and not item.get_closest_marker("both")
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [
            item
            for item in items
            if owners[dealt_with(item)] == number or item.get_closest_marker("both")
        ]


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector of garbage need not look through it again and
    again.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Weigh a test, its fixtures and its ended children included."""
    before = sum(os.times()[:4])
    result = yield
    item.config.stash[SPENT][dealt_with(item)] += sum(os.times()[:4]) - before
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the weights down."""
    if file := config.getoption("--weigh"):
        spent = {name: round(seconds, 1) for name, seconds in sorted(config.stash[SPENT].items())}
        Path(file).write_text(json.dumps(spent, indent=1) + "\n")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every async test runs on both back ends."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real traces and benchmark files that are not part of the project; tests that want them skip
    without them.
    """
    named = os.environ.get("ATTS_SHARED_DATA")
    path = Path(named) if named else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; set ATTS_SHARED_DATA to its folder")
    return path
