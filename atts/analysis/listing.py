"""List the runs in a folder, with their status and headline."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atts.errors import JournalError
from atts.evaluators import Estimate, accuracy_estimate, share_estimate
from atts.files import storage
from atts.journal import (
    FACTS,
    JOURNAL,
    LOCK,
    MANIFEST,
    Decided,
    Observed,
    RecordedRun,
    RunState,
    is_held,
    open_run,
)

RunStanding = Literal["finished", "running", "interrupted", "failed", "killed", "not begun"]
"""The status of a run, in this order: finished, being written, asked to end, finished except for
failed problems, ended without closing, only planned.
"""


def standing_of(directory: Path, state: RunState | None) -> RunStanding:
    """Return the status of the run in a directory; None if no run was started there."""
    if state is None:
        return "running" if is_running(directory) else "not begun"
    if state.ended is not None:
        return state.ended.status
    return "running" if is_running(directory) else "killed"


def is_running(directory: Path) -> bool:
    """Return True if a process of this machine is writing the run in this directory."""
    return is_held(directory / LOCK)


_DEEP = 4
"""How many levels of folders below the given one are searched for runs."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run in the list; if it cannot be read, `problem` says why and there are no numbers."""

    directory: str
    standing: RunStanding | None
    method: str = ""
    models: str = ""  # the pair's name, or those of both models
    done: int = 0
    problems: int | None = None
    accuracy: Estimate | None = None
    rate: Estimate | None = None
    draft_tokens: int = 0
    target_tokens: int = 0
    scored_tokens: int = 0
    begun: float = 0.0  # seconds since the epoch
    changed: float = 0.0
    problem: str = ""


def list_runs(folders: Sequence[Path]) -> list[RunLine]:
    """Return the runs in and below these folders, the latest last; a folder may be a run itself.

    :raises JournalError: a folder is not there, or cannot be read.
    """
    directories = dict.fromkeys(
        directory for folder in folders for directory in _directories(folder)
    )
    return sorted(map(_line, directories), key=lambda line: (line.begun, line.directory))


def _directories(folder: Path) -> Iterator[Path]:
    with storage(folder):
        if not folder.is_dir():
            raise JournalError(
                folder,
                "there is no such folder",
                "Give a folder of runs, or the directory of a run",
            )
        os.listdir(folder)  # an unreadable folder is reported; folders below it are left out
    yield from _below(folder, _DEEP)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
        if (folder / JOURNAL).exists() or (folder / MANIFEST).exists():
            yield folder
            return
    except OSError:
        return
    for path in inside if depth else ():
        if path.is_dir() and not path.is_symlink():
            yield from _below(path, depth - 1)


def _line(directory: Path) -> RunLine:
    try:
        run = open_run(directory)
        state = run.state((*FACTS, Decided, Observed))
    except JournalError as error:
        return RunLine(str(directory), None, begun=_changed(directory), problem=str(error))
    usage = state.usage
    return RunLine(
        str(directory),
        standing_of(directory, state),
        method=str(run.setting("method") or run.setting("gate") or ""),
        models=_models(run),
        done=state.done,
        problems=run.manifest.problems,
        accuracy=accuracy_estimate(one.is_right for one in state.graded.values()),
        rate=share_estimate((one.escalated, one.judged) for one in state.finished.values()),
        draft_tokens=usage.draft_tokens,
        target_tokens=usage.target_tokens,
        scored_tokens=usage.scored_tokens,
        begun=run.manifest.created,
        changed=_changed(directory),
    )


def _models(run: RecordedRun) -> str:
    """Return the pair's name if the run has one, else the last parts of both models' names."""
    pair = run.manifest.settings.get("pair")
    if pair is not None and pair.value:
        return str(pair.value)
    roles = [*run.manifest.engines] or ["draft", "target"]
    words = [run.manifest.settings.get(role) for role in roles]
    engines = [str(run.manifest.engines.get(role, {}).get("model", "?")) for role in roles]
    names = [str(word.value) if word else name for word, name in zip(words, engines, strict=True)]
    short = [name.partition("?")[0].rstrip("/").rpartition("/")[2] for name in names]
    return " + ".join(dict.fromkeys(short))


def _changed(directory: Path) -> float:
    try:
        return (directory / JOURNAL).stat().st_mtime
    except OSError:
        return 0.0
