"""Kills runs at seeded points, two hundred times with --full, and checks that nothing recorded changes or repeats."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.studies.harness import Options, Table, say

CHILDREN = Path(__file__).resolve().parents[2] / "tests" / "run" / "crashing.py"
KILLS_PER_RUN = 10


def study(options: Options) -> list[Table]:
    """Runs killed ten times each; `crash` raises when anything recorded was changed or done again."""
    crashing = _crashing()
    runs = options.pick(2, 6, 20)
    rows: list[tuple[str | int | float | None, ...]] = []
    with tempfile.TemporaryDirectory() as folder, crashing.nursery() as children:
        whole = Path(folder) / "whole"
        assert children.run(crashing.Order(str(whole))) == 0
        size = (whole / crashing.JOURNAL).stat().st_size
        for number in range(runs):
            rows.append(_row(crashing, children, Path(folder) / f"run {number}", whole, size, options.seed + number))
            say(f"crash: run {number + 1} of {runs}: {rows[-1][1]} kills")
    kills = sum(int(row[1] or 0) for row in rows)
    notes = (
        f"{kills} SIGKILLs in {runs} runs, half of them in the middle of a write.",
        f"A call repeated is one that was in flight when its process died; at most {crashing.SLOTS} can be per kill.",
    )
    columns = ("run", "kills", "sessions", "calls recalled", "calls repeated", "decisions", "outcomes", "seconds")
    return [Table("Runs killed again and again", columns, tuple(rows), notes)]


def _row(
    crashing: Any, children: Any, directory: Path, whole: Path, size: int, seed: int
) -> tuple[str | int | float | None, ...]:
    since = time.perf_counter()
    crashes = crashing.crash(children, directory, size, KILLS_PER_RUN, seed)
    words = [
        "identical" if find(directory) == find(whole) else "DIFFERENT"
        for find in (crashing.decisions, crashing.outcomes)
    ]
    seconds = round(time.perf_counter() - since, 1)
    return (f"seed {seed}", crashes.kills, crashes.sessions, crashes.recalled, crashes.repeated, *words, seconds)


def _crashing() -> Any:
    """The children's module, which is a program and a helper of tests, loaded by its path."""
    spec = importlib.util.spec_from_file_location("crashing", CHILDREN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["crashing"] = module
    spec.loader.exec_module(module)
    return module
