"""Counts the chunks that a gate judged and handed to the target, as they happen: also those whose rollout was cut."""

from __future__ import annotations

from atts.evaluators import Estimate, share_estimate
from atts.journal import Decided, Event, Observed, judged
from atts.run.recorder import Notice


class EscalationCounter:
    """A listener: of each problem, how many of its judged chunks were handed over.

    Which chunks those are is for `atts.journal.judged` to say.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def recalled(self, event: Event) -> None:
        """What an earlier session did counts."""
        self.notify(event)

    def notify(self, event: Notice) -> None:
        """Count it, if it is one."""
        if not isinstance(event, Decided | Observed):
            return
        for decision, was_handed in judged(event):
            handed, of = self._counts.get(decision.question, (0, 0))
            self._counts[decision.question] = handed + was_handed, of + 1

    def of(self, problem: str) -> tuple[int, int]:
        """How many of how many of this problem's."""
        return self._counts.get(problem, (0, 0))

    def forget(self, problem: str) -> None:
        """It is over, and has been asked about."""
        self._counts.pop(problem, None)

    @property
    def totals(self) -> tuple[int, int]:
        """How many of how many, of all problems not forgotten."""
        handed, of = zip(*self._counts.values(), strict=True) if self._counts else ((0,), (0,))
        return sum(handed), sum(of)

    @property
    def rate(self) -> Estimate:
        """The share of chunks, clustered by problem."""
        return share_estimate(self._counts.values())
