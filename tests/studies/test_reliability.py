"""Tests of the soak: it reports growing resources, and its runs leave nothing behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

soak = pytest.importorskip("scripts.studies.graph", reason="needs a checkout")

NOTHING = {"in_flight": 0, "blocks": 0, "temporary": 0}
LEVEL = soak.Level(0.0, 500.0, 400_000, threads=4, files=9, tasks=1, **NOTHING)


def _said(levels: list[Any]) -> dict[str, str]:
    tally = soak.Tally(episodes={"faults": len(levels)}, problems=4, compared=4, levels=levels)
    return {row[0]: row[-1] for row in soak.verdict(tally).rows}


def test_runs_under_faults_leave_nothing_and_their_journals_tell_what_happened(tally: Any) -> None:
    """After the runs no request and no file is left, and the journal equals the outcomes that a
    listener saw live.
    """
    assert tally.differences == []
    assert tally.compared > 0
    assert all(level.in_flight == level.temporary == level.blocks == 0 for level in tally.levels)
    assert {level.tasks for level in tally.levels} == {1}


@pytest.mark.parametrize(
    ("field", "name", "step"),
    [
        ("memory_mib", "memory, MiB", 0.2),
        ("objects", "Python objects", 200),
        ("files", "open files", 0.05),
        ("in_flight", "requests in engines", 0.05),
        ("temporary", "files of runs", 0.05),
    ],
)
def test_what_grows_run_by_run_is_called_so(field: str, name: str, step: float) -> None:
    """The soak reports only the resource that grows from run to run; the same growth during the
    warm-up is ignored.
    """
    start = getattr(LEVEL, field)
    later = [
        replace(LEVEL, seconds=10.0 * n, **{field: start + int(step * n * 10) / 10})
        for n in range(150)
    ]
    said = _said(later)
    assert said.pop(name) == "GROWS"
    assert set(said.values()) == {"flat"}
    early = [replace(level, **{field: start + min(n, 29) * step}) for n, level in enumerate(later)]
    assert set(_said(early).values()) == {"flat"}


def test_a_short_run_does_not_call_its_warm_up_a_leak() -> None:
    """The report of a short run says that it cannot decide whether resources grow."""
    levels = [replace(LEVEL, seconds=10.0 * n, memory_mib=500.0 + 3 * n) for n in range(40)]
    assert _said(levels)["memory, MiB"] == "too few runs to say"


@pytest.mark.slow
def test_two_minutes_of_everything_grow_nothing(tmp_path: Path) -> None:
    """No resource grows in any kind of run, on scripted engines and the embedded pair.

    The version of one hour is `scripts/bench soak --full`.
    """
    tally = anyio.run(soak.soak, tmp_path, 120.0, 1)
    assert tally.differences == []
    assert "GROWS" not in {row[-1] for row in soak.verdict(tally).rows}
