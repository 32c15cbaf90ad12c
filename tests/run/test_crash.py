"""Tests of SIGKILL at any moment: no record changes, no recorded call is repeated, and outcomes
stay the same.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked")


@pytest.fixture(scope="module")
def crashing() -> ModuleType:
    """Load `crashing.py` from the folder of this file."""
    spec = importlib.util.spec_from_file_location(
        "crashing", Path(__file__).with_name("crashing.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["crashing"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def children(crashing: ModuleType) -> Iterator[Any]:
    """Start one server of children for all tests."""
    with crashing.nursery() as children:
        yield children


@pytest.fixture(scope="module")
def whole(crashing: ModuleType, children: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that is not killed."""
    directory = tmp_path_factory.mktemp("whole")
    assert children.run(crashing.Order(str(directory))) == 0
    return directory


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_change_no_record(
    crashing: ModuleType, children: Any, whole: Path, tmp_path: Path, seed: int
) -> None:
    """Ten kills at seeded points, some during a write, change no record, even with full disks in
    between.

    In total the test makes twenty kills; `scripts/bench crash --full` makes two hundred.
    """
    size = (whole / crashing.JOURNAL).stat().st_size
    runs = list(crashing.crash_runs(children, tmp_path, size, 10, seed))
    assert sum(crashes.kills for _, crashes in runs) == 10
    assert sum(crashes.full_disks for _, crashes in runs) > 0
    assert sum(crashes.recalled for _, crashes in runs) > 0
    for directory, _ in runs:
        assert crashing.decisions(directory) == crashing.decisions(whole)
        assert crashing.outcomes(directory) == crashing.outcomes(whole)


def test_a_second_process_is_refused(crashing: ModuleType, children: Any, tmp_path: Path) -> None:
    """A second process in a run's directory ends at once with the documented exit code, and the
    first is not disturbed.
    """
    child = children.start(crashing.Order(str(tmp_path), slowness=4.0))
    journal = tmp_path / crashing.JOURNAL
    while not journal.exists() or not journal.stat().st_size:
        time.sleep(0.001)
    command = [sys.executable, str(Path(__file__).with_name("crashing.py")), str(tmp_path)]
    os.kill(child, signal.SIGSTOP)  # the first process keeps its lock while it is stopped
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    os.kill(child, signal.SIGCONT)
    assert second.returncode == 4, second.stderr
    assert f"process {child}" in second.stderr
    assert children.wait() == 0
    assert crashing.check_calls(tmp_path)[0] == 1


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_or_drops_calls_in_flight(
    crashing: ModuleType, children: Any, whole: Path, tmp_path: Path, times: int
) -> None:
    """The first Ctrl-C lets calls in flight finish, and the second cancels them.

    The exit code is 130, and the run can continue.
    """
    order = crashing.Order(str(tmp_path), signals="handle")
    # slow enough that the process still runs when the signal arrives
    child = children.start(replace(order, slowness=8.0))
    journal = tmp_path / crashing.JOURNAL
    while not journal.exists() or journal.stat().st_size < 20_000:
        time.sleep(0.001)
    for _ in range(times):
        os.kill(child, signal.SIGINT)
    assert children.wait() == 130
    assert children.run(order) == 0
    sessions, _, repeated = crashing.check_calls(tmp_path, "some")
    assert sessions == 2
    assert repeated == 0 or times == 2
    assert crashing.outcomes(tmp_path) == crashing.outcomes(whole)
