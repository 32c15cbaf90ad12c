"""Status of a recorded run: finished, under way, or interrupted and able to resume."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from atts.journal import LOCK, RunState, is_held

RunStanding = Literal["finished", "running", "interrupted", "failed", "killed", "not begun"]
"""Over; being written now; asked to end; over but for what failed; ended without a word; only
planned.
"""


def standing_of(directory: Path, state: RunState | None) -> RunStanding:
    """How the run in this directory stands, its journal read into `state`; None where there is no
    run yet.
    """
    if state is None:
        return "running" if is_running(directory) else "not begun"
    if state.ended is not None:
        return state.ended.status
    return "running" if is_running(directory) else "killed"


def is_running(directory: Path) -> bool:
    """Whether a process of this machine writes the run in this directory."""
    return is_held(directory / LOCK)
