"""What a run came to: one line per problem, and the way to the whole story."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal

from atts.core import Finish, Outcome, Usage, is_censored
from atts.journal import FACTS, JOURNAL, Graded, Manifest, OutcomeReached, read_entries, read_outcomes
from atts.journal.events import OutcomeStatus, VerdictStatus

RunStatus = Literal["finished", "interrupted", "stopped"]
"""Every problem is over; asked to end before that; out of time before that."""
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class SampleLine:
    """One rollout in brief."""

    sample: int
    finish: Finish
    answer: str | None = None
    verdict: VerdictStatus | None = None  # None: nobody graded it
    rule: str = ""

    @property
    def is_censored(self) -> bool:
        """Nobody knows what it would have answered."""
        return is_censored(self.answer, self.finish)


@dataclass(frozen=True, slots=True)
class ProblemLine:
    """One problem in brief: how it ended, what was answered, what that was worth and cost."""

    problem: str
    status: OutcomeStatus
    answer: str | None
    verdict: VerdictStatus | None  # None: nobody graded it
    rule: str
    samples: tuple[SampleLine, ...]
    votes: Mapping[str, float]
    usage: Usage
    why: str = ""
    judged: int = 0  # chunks, also those of rollouts that were cut
    handed: int = 0  # of them, to the target


def problem_line(
    reached: OutcomeReached, finishes: Sequence[Finish], graded: Sequence[Graded], handed: tuple[int, int]
) -> ProblemLine:
    """From what the journal says of a finished problem; of several verdicts the last counts.

    `handed` is how many chunks went to the target, of how many that were judged.
    """
    of = {event.sample: event for event in graded}
    whole = of.get(None)
    return ProblemLine(
        reached.problem,
        reached.status,
        reached.answer,
        whole.status if whole else None,
        whole.rule if whole else "",
        tuple(
            _sample(sample, finish, of.get(sample)) for sample, finish in zip(reached.samples, finishes, strict=True)
        ),
        reached.votes,
        reached.usage,
        reached.why,
        handed[1],
        handed[0],
    )


def _sample(sample: int, finish: Finish, graded: Graded | None) -> SampleLine:
    if graded is None:
        return SampleLine(sample, finish)
    return SampleLine(sample, finish, graded.answer, graded.status, graded.rule)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run as it stands; `problems` are the finished ones, in the order of the dataset."""

    status: RunStatus
    problems: tuple[ProblemLine, ...]
    manifest: Manifest
    seconds: float  # by the run's clock, all sessions together
    sessions: int = 1
    directory: Path | None = None
    why: str = ""
    kept: tuple[Outcome, ...] = field(default=(), repr=False)  # whole, for a run without a directory

    @property
    def usage(self) -> Usage:
        """What all finished problems cost."""
        return reduce(add, (line.usage for line in self.problems), Usage())

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
            yield from read_outcomes(read_entries(self.directory / JOURNAL, kinds=FACTS))
