"""The result of a run: its finished problems in brief, and the way to their whole rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal

from atts.core import Outcome, Usage
from atts.journal import FinishedProblem, Manifest, Truncation, open_run, truncation

RunStatus = Literal["finished", "interrupted", "stopped"]
"""Every problem is over; asked to end before that; out of time before that."""
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run as it stands; `problems` are the finished ones, in the order of the dataset."""

    status: RunStatus
    problems: tuple[FinishedProblem, ...]
    manifest: Manifest
    seconds: float  # by the run's clock, all sessions together
    sessions: int = 1
    directory: Path | None = None
    why: str = ""
    kept: tuple[Outcome, ...] = field(default=(), repr=False)  # whole, for a run without a directory

    @property
    def usage(self) -> Usage:
        """What all finished problems cost."""
        return reduce(add, (problem.usage for problem in self.problems), Usage())

    @property
    def truncation(self) -> Truncation:
        """The rollouts that a limit cut before they could answer; its `warning` is "" unless they are many."""
        return truncation(self.problems, self.manifest)

    @property
    def exit_code(self) -> int:
        """0, or 130 for a run that was asked to end and can be resumed."""
        return INTERRUPTED if self.status == "interrupted" else 0

    def outcomes(self) -> Iterator[Outcome]:
        """Every finished problem whole, in the order of finishing; read from the journal as they are asked for.

        :raises JournalError: it cannot be read.
        """
        if self.directory is None:
            yield from self.kept
        else:
            yield from open_run(self.directory).outcomes()
