"""Use your own gate: a rule that decides whether to escalate a chunk."""

from dataclasses import dataclass
from typing import ClassVar

import atts
from atts.core import Action, Decision
from atts.pipelines import Features
from atts.testing import toy_problems


@dataclass(frozen=True, slots=True)
class DoubtGate:
    """A gate that accepts chunks in which the draft is confident. The target scores all other
    chunks.
    """

    # chunks with a mean log-probability of the draft above this are accepted without a score
    sure: float = -0.5
    perplexity: float = 3.0  # chunks with a higher perplexity under the target are escalated
    needs_draft_logprobs: ClassVar[bool] = True  # drafts without log-probabilities are refused

    def preview(self, features: Features) -> Decision:
        """Return the action for a chunk without a score, or "verify" to request the score."""
        # if the draft sent no log-probabilities, the value is NaN, so the chunk is scored, not
        # accepted
        action: Action = "accept" if features.draft_logprob > self.sure else "verify"
        return features.decision(action)

    def decide(self, features: Features, score: float) -> Decision:
        """Return the action for a chunk with this score."""
        action: Action = "accept" if score <= self.perplexity else "escalate"
        return features.decision(action, score=score)

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Ignore the decision, because this gate does not learn."""


def main() -> None:
    """Solve eight toy problems with this gate."""
    setup = atts.Setup(
        draft="scripted", target="scripted", gate=DoubtGate(), policy=atts.Policy(samples=4)
    )
    result = atts.evaluate_sync(toy_problems(8), setup)
    usage = result.usage
    print(
        f"scored {usage.scored_tokens} of {usage.draft_tokens} draft tokens; the target wrote "
        f"{usage.target_tokens}"
    )


if __name__ == "__main__":
    main()
