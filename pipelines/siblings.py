"""Facts that the rollouts of one problem share: their answers, the chunks they have in common, the
scores of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import anyio

from atts.core import Chunk, Rollout, TokenIds
from atts.pipelines.votes import Grouper, classes


@dataclass(frozen=True, slots=True)
class KnownScore:
    """What the target said of a chunk; it would say the same of an equal one that begins as this
    one does.
    """

    score: float
    doubt: int


class Siblings:
    """One problem's rollouts by sample; each builder keeps its own entry current.

    What was written is a tree: equal chunks after equal beginnings are one place, whichever
    rollouts wrote them.
    """

    def __init__(self, group: Grouper) -> None:
        self._group = group
        self.rollouts: dict[int, Rollout] = {}
        self._places: dict[tuple[int, TokenIds], int] = {}
        self.scores: dict[int, KnownScore] = {}  # by place, of the chunk that leads there
        self.asking: dict[int, anyio.Event] = {}  # by place: set when the target has answered

    def agreement(self, but: int, answer: str | None) -> tuple[int, float, bool]:
        """Answered siblings, the leading answer's share among them, and whether `answer` belongs to
        it.
        """
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
        return (
            len(others),
            theirs.count(lead) / len(others),
            answer is not None and labels[-1] == lead,
        )

    def place(self, chunks: Iterable[Chunk], start: int = 0) -> int:
        """Where these chunks lead from a place of the tree; 0 is the prompt."""
        for chunk in chunks:
            start = self._places.setdefault((start, chunk.target_ids), len(self._places) + 1)
        return start
