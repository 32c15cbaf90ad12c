"""Duplicate scores: siblings that wrote the same chunk, or draws that were copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atts.calibration.stored import StoredScores
from atts.calibration.two_sample import QuestionSample
from atts.sampling import binomial_tail

FEW = 0.02  # a share of repeats up to which nothing is said
# as near to the end of the scale, chunks that were certain meet without being copied
_CERTAIN = 1e-6


@dataclass(frozen=True, slots=True)
class DuplicateScores:
    """Which share of stored scores repeats another one, and where; all 0 for scores on a coarse
    grid, which tie anyway.

    Siblings that wrote the same chunk have the same score, which is no fault: they are one draw for
    the purposes of certainty, and the effective number of scores counts them so. The same score in
    two questions has no such reason.
    """

    # repeats of another score of the same question; of any other where questions are not known
    within: float
    across: float  # scores that another question has as well
    spared: float  # questions that repeat nothing
    clustered: bool

    @classmethod
    def of(cls, stored: StoredScores) -> DuplicateScores:
        """Counts; a score that is a mark out of ten ties by nature, so nothing is said where most
        are round.
        """
        raw = np.asarray(stored.scores, float)
        raw = raw[np.isfinite(raw)]
        if not len(raw) or float(np.mean(raw == np.round(raw, 3))) > 0.5:
            return cls(0.0, 0.0, 1.0, stored.clustered)
        total = len(stored.nonconformity)
        if not stored.clustered:
            return cls(1 - len(set(stored.nonconformity)) / total, 0.0, 1.0, False)
        counts = Counter(zip(stored.questions, stored.nonconformity, strict=True))
        holders = Counter(score for _, score in counts)
        across = sum(
            n
            for (_, nonconformity), n in counts.items()
            if holders[nonconformity] > 1 and abs(nonconformity) > _CERTAIN
        )
        repeating = {question for (question, _), n in counts.items() if n > 1}
        spared = 1 - len(repeating) / len(set(stored.questions))
        return cls(1 - len(counts) / total, across / total, spared, True)

    @property
    def fault(self) -> str:
        """What no sampling explains, in words; empty where there is nothing of the kind.

        A model that writes the same words again does so in most questions. Repeats in most
        questions may be that, so only live questions can tell (`copied_p_value`).
        """
        if self.across > FEW:
            return f"{self.across:.0%} of the stored scores occur in another question as well: no two chunks score alike"
        if self.within > FEW and not self.clustered:
            return f"{self.within:.0%} of the stored scores repeat another one, and their questions are not known"
        if self.within > FEW and self.spared >= 0.5:
            few = f"{1 - self.spared:.0%} of the questions"
            return f"{self.within:.0%} of the stored scores are repeats, all in {few}: draws that were copied"
        return ""

    @property
    def doubt(self) -> str:
        """What may be a fault, or siblings that wrote the same chunk; empty where few scores
        repeat.
        """
        if self.fault or self.within <= FEW:
            return ""
        return (
            f"{self.within:.0%} of the scores repeat another one of their question: siblings that "
            f"wrote the same "
            "chunk, which is no fault, or copied draws"
        )


def copied_p_value(stored: QuestionSample, live: Sequence[Sequence[float]]) -> float:
    """The p-value of live questions that repeat nothing, were they draws of stored ones of which so
    many do repeat.

    Binomial, with one more stored question that repeats nothing than there is; 1 where live
    siblings are too few.
    """
    depth = stored.depth(live)
    theirs = [
        len(set(scores[:depth])) == depth for scores in stored.questions if len(scores) >= depth
    ]
    ours = [len(set(scores[:depth])) == depth for scores in live if len(scores) >= depth]
    spared = (sum(theirs) + 1) / (len(theirs) + 1)
    return binomial_tail(sum(ours) - 1, len(ours), spared)
