"""Use your own score: one number from the target's log-probabilities of a chunk; higher is worse."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import atts
from atts.pipelines import ScoreRule
from atts.testing import toy_problems


@dataclass(frozen=True, slots=True)
class WorstShare(ScoreRule):
    """The perplexity of a chunk's least likely tokens.

    `share` is the fraction of the chunk's tokens that are used, 0 to 1.
    """

    share: float = 0.1

    def __call__(self, logprobs: Sequence[float], text: str) -> float:
        """Return the score of one chunk."""
        worst = sorted(logprobs)[: max(1, round(self.share * len(logprobs)))]
        return math.exp(min(-math.fsum(worst) / len(worst), 700))


def main() -> None:
    """Solve eight toy problems; each chunk is judged by its least likely tokens."""
    policy = atts.Policy(samples=4, score=WorstShare(share=0.2))
    result = atts.evaluate_sync(
        toy_problems(8), atts.Setup(draft="scripted", target="scripted", policy=policy)
    )
    outcomes = list(result.outcomes())
    scores = [
        turn.score
        for o in outcomes
        for r in o.rollouts
        for turn in r.turns
        if turn.score is not None
    ]
    correct = sum(outcome.answer == outcome.problem.answer for outcome in outcomes)
    print(
        f"{correct} of {len(outcomes)} correct; {len(scores)} scores, median "
        f"{sorted(scores)[len(scores) // 2]:.3f}"
    )


if __name__ == "__main__":
    main()
