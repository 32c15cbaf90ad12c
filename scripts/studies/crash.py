"""Kills runs at seeded points, two hundred times with --full, and checks that nothing recorded
changes or repeats.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from atts.journal import JOURNAL
from scripts.studies.harness import Options, Row, Table, say
from tests.run import crashing


def study(options: Options) -> list[Table]:
    """Runs killed ten times each; `crash` raises when anything recorded was changed or done again."""
    kills = options.pick(20, 60, 200)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, crashing.nursery() as children:
        whole = Path(folder) / "whole"
        assert children.run(crashing.Order(str(whole))) == 0
        size = (whole / JOURNAL).stat().st_size
        since = time.perf_counter()
        for directory, crashes in crashing.crash_runs(
            children, Path(folder), size, kills, options.seed
        ):
            words = [
                "identical" if find(directory) == find(whole) else "DIFFERENT"
                for find in (crashing.decisions, crashing.outcomes)
            ]
            counts = (
                crashes.kills,
                crashes.full_disks,
                crashes.sessions,
                crashes.recalled,
                crashes.repeated,
            )
            rows.append((directory.name, *counts, *words, round(time.perf_counter() - since, 1)))
            since = time.perf_counter()
            say(f"crash: {rows[-1][0]}: {crashes.kills} kills, {crashes.full_disks} full disks")
    full = sum(int(row[2] or 0) for row in rows)
    notes = (
        f"{kills} SIGKILLs in {len(rows)} runs, about half of them in the middle of a write, and "
        f"{full} full disks.",
        f"A call repeated is one that was in flight when its process ended; at most "
        f"{crashing.SLOTS} can be at a time.",
    )
    same = sum(row[6] == row[7] == "identical" for row in rows)
    headline = f"{same} of {len(rows)} runs end with identical decisions and outcomes. {notes[0]}"
    header = "run | kills | full disks | sessions | calls recalled | calls repeated | decisions | outcomes | seconds"
    return [Table.of("Runs killed again and again", header, rows, *notes, headline=headline)]
