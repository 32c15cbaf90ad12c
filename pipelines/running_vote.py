"""The running vote of a problem: whether it is settled, so that rollouts still running can be
cancelled.
"""

from __future__ import annotations

from atts.core import Rollout
from atts.graph import RolloutResult
from atts.pipelines.policy import Policy
from atts.pipelines.votes import (
    Ballot,
    Grouper,
    Tally,
    ballot,
    cannot_change,
    settled_probability,
    tally,
)


class RunningVote:
    """The vote of one problem while its rollouts end, one by one, in any order."""

    def __init__(self, policy: Policy, group: Grouper) -> None:
        self.policy = policy
        self.group = group
        self.ended = 0
        self.why = ""
        self._cast: dict[int, Ballot] = {}

    @property
    def tally(self) -> Tally:
        """The count so far, by sample number so that the order of arrival does not matter."""
        return tally([self._cast[sample] for sample in sorted(self._cast)], self.group)

    def add_result(self, result: RolloutResult[Rollout]) -> bool:
        """Count a rollout that ended; whether the rest could be spared."""
        self.ended += 1
        cast = ballot(self.policy.vote, result.value) if result.value is not None else None
        if cast is not None:
            self._cast[result.sample] = cast
        remaining = self.policy.samples - self.ended
        if self.policy.early_stop == "none" or remaining == 0:
            return False
        current = self.tally
        heaviest = 1.0  # the weight of a confidence vote is at most 1
        if cannot_change(current, remaining, heaviest):
            self.why = f"settled: lead {current.lead:.3g} with {remaining} left"
        elif self.policy.early_stop == "likely":
            probability = settled_probability(current, remaining)
            if probability >= self.policy.confidence:
                self.why = f"settled with probability {probability:.3f} (Dirichlet model), {remaining} left"
        return bool(self.why)

    def can_stop(self) -> bool:
        """Whether the waves so far have settled the vote, or agree enough to spare the rest."""
        agreeing = self.tally.agreement * len(self._cast)
        if (
            not self.why
            and self.ended < self.policy.samples
            and agreeing >= max(1, self.policy.agreement * self.ended)
        ):
            self.why = f"the first {self.ended} agree"
        return bool(self.why)
