"""What the rollouts of one problem know of each other: answers so far, and rollouts to fork from."""

from __future__ import annotations

from atts.core import Rollout
from atts.pipelines.votes import Grouper, classes


class Siblings:
    """One problem's rollouts by sample; each builder keeps its own entry current."""

    def __init__(self, group: Grouper) -> None:
        self._group = group
        self.rollouts: dict[int, Rollout] = {}
        self.claimed: set[tuple[int, int]] = set()  # (sample, turn): forked from already

    def agreement(self, but: int, answer: str | None) -> tuple[int, float, bool]:
        """Answered siblings, the leading answer's share among them, and whether `answer` belongs to it."""
        others: list[str] = []
        for sample in sorted(self.rollouts):
            rollout = self.rollouts[sample]
            if sample != but and rollout.finish and rollout.answer is not None:
                others.append(rollout.answer)
        if not others:
            return 0, 0.0, False
        labels = classes([*others, *([answer] if answer is not None else [])], self._group)
        theirs = labels[: len(others)]
        lead = max(set(theirs), key=theirs.count)
        return len(others), theirs.count(lead) / len(others), answer is not None and labels[-1] == lead
