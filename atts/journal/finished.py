"""A finished problem in brief: the value that results, reports, comparisons and plans are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from atts.core import Finish, Outcome, Usage, is_censored
from atts.journal.events import Graded, OutcomeStatus, VerdictStatus


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """One rollout in brief."""

    sample: int
    finish: Finish
    answer: str | None = None
    verdict: VerdictStatus | None = None  # None: it was not graded
    rule: str = ""

    @property
    def is_censored(self) -> bool:
        """Whether it was stopped before it could answer."""
        return is_censored(self.answer, self.finish)


@dataclass(frozen=True, slots=True)
class FinishedProblem:
    """One problem in brief: how it ended, what was answered, what that was worth and cost.

    Whole rollouts are in its `Outcome`.
    """

    problem: str
    status: OutcomeStatus
    answer: str | None
    verdict: VerdictStatus | None  # of the answer; None: it was not graded
    rule: str
    samples: tuple[FinishedSample, ...]
    votes: Mapping[str, float]
    usage: Usage
    why: str = ""
    judged: int = 0  # chunks a gate decided on, also those of rollouts that were cut
    escalated: int = 0  # of them, continued by the target
    seconds: float | None = field(default=None, compare=False)  # in the task graph; None: while it is being run

    @classmethod
    def of(
        cls, outcome: Outcome, graded: Iterable[Graded] = (), *, judged: int = 0, escalated: int = 0
    ) -> FinishedProblem:
        """From the outcome, and what the grader said of its answers."""
        samples = tuple(FinishedSample(one.sample, one.finish or "cancelled", one.answer) for one in outcome.rollouts)
        found = cls(
            outcome.problem.id,
            outcome.status,
            outcome.answer,
            None,
            "",
            samples=samples,
            votes=outcome.votes,
            usage=outcome.usage,
            why=outcome.why,
            judged=judged,
            escalated=escalated,
        )
        return found.graded(graded)

    def graded(self, verdicts: Iterable[Graded]) -> FinishedProblem:
        """With what a grader said; of several verdicts on one answer the last counts."""
        of = {verdict.sample: verdict for verdict in verdicts}
        samples = tuple(
            replace(one, verdict=of[one.sample].status, rule=of[one.sample].rule) if one.sample in of else one
            for one in self.samples
        )
        whole = of.get(None)
        if whole is None:
            return replace(self, samples=samples)
        return replace(self, samples=samples, verdict=whole.status, rule=whole.rule)

    @property
    def is_correct(self) -> bool:
        """Whether the answer was graded and found right."""
        return self.verdict == "correct"

    @property
    def complete_samples(self) -> tuple[FinishedSample, ...]:
        """The rollouts that ran to their end: those that rates of single rollouts are made of."""
        return tuple(one for one in self.samples if not one.is_censored)

    @property
    def agreement(self) -> float:
        """The winner's share of all votes; 0 without any."""
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data for machines; `handed` is an older name of `escalated`."""
        data = {**asdict(self), "handed": self.escalated}
        return data if self.seconds is not None else {name: data[name] for name in data if name != "seconds"}
