"""The draft length of method exact: how many tokens to draft before the target scores them, by
goodput.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftLength:
    """What is known of a run's drafts: how many of their tokens stand, and what writing and scoring
    them takes.

    It decides how much is drafted before a score, and so changes when calls are made, never what is
    written.
    """

    tested: int = 0  # tokens all before which stood
    stood: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    scores: int = 0
    score_seconds: float = 0.0

    def length(self, most: int) -> int:
        """How many tokens to draft: those that bring most target tokens a second; all while little
        is known.

        >>> DraftLength(1000, 980, 1000, 1.0, 30, 0.6).length(64)
        36
        >>> DraftLength(1000, 700, 1000, 2.0, 300, 3.0).length(64)
        3
        """
        if self.tested < 50 or not self.draft_seconds or not self.score_seconds:
            return most
        stands = (self.stood + 1) / (self.tested + 2)
        per_token = self.draft_seconds / self.drafted
        per_score = self.score_seconds / self.scores

        def goodput(count: int) -> float:
            return (1 - stands ** (count + 1)) / (1 - stands) / (per_score + count * per_token)

        return max(range(1, most + 1), key=goodput)
