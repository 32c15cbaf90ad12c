"""The result of a run: its finished problems in brief, and the way to their whole rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal

from atts.core import Outcome, Usage
from atts.errors import EngineError
from atts.journal import FinishedProblem, Manifest, Truncation, open_run, truncation

RunStatus = Literal["finished", "interrupted", "stopped", "incomplete", "failed"]
"""Every problem is over; asked to end before that; out of time before that; over but for what failed; all failed."""
INTERRUPTED = 130


@dataclass(slots=True)
class Missing:
    """What failed of a run, for the next session to do."""

    problems: int = 0
    whole: int = 0  # of these, without any rollout that did not fail
    rollouts: int = 0
    first: str = ""

    def add(self, line: FinishedProblem) -> None:
        """Count a problem that is not complete."""
        failures = line.failures
        self.problems += 1
        self.whole += line.status == "failed"
        self.rollouts += len(failures)
        self.first = self.first or next(iter(failures), line.why)

    def words(self, problems: int) -> str:
        """What is missing of so many problems, and why."""
        rollouts = f": {self.rollouts} of their rollouts failed" if self.rollouts else ""
        return f"{self.problems} of {problems} problems are not complete{rollouts}, first by {self.first}"


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
        """0; 130 for a run that was asked to end, 3 for one of which something failed: both can be resumed."""
        if self.status in ("incomplete", "failed"):
            return EngineError.exit_code
        return INTERRUPTED if self.status == "interrupted" else 0

    def outcomes(self) -> Iterator[Outcome]:
        """Every finished problem whole, in the order of finishing; read from the journal as they are asked for.

        :raises JournalError: it cannot be read.
        """
        if self.directory is None:
            yield from self.kept
        else:
            yield from open_run(self.directory).outcomes()
