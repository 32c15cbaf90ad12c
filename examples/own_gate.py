"""Your own gate: it decides from numbers and never waits."""

from dataclasses import dataclass
from typing import ClassVar

import atts
from atts.core import Action, Decision
from atts.pipelines import Features
from atts.testing import toy_problems


@dataclass(frozen=True, slots=True)
class DoubtGate:
    """Accept what the draft was sure of unscored; escalate what the target finds unlikely too."""

    sure: float = -0.5  # mean log-probability of the chunk under the draft
    perplexity: float = 3.0  # under the target
    needs_draft_logprobs: ClassVar[bool] = True  # drafts that give none are refused

    def preview(self, features: Features) -> Decision:
        """Return whether the chunk needs a score at all."""
        # a chunk without log-probabilities has NaN here: it is not accepted, but scored
        action: Action = "accept" if features.draft_logprob > self.sure else "verify"
        return features.decision(action)

    def decide(self, features: Features, score: float) -> Decision:
        """Decide about a chunk of this score."""
        # a chunk without log-probabilities has NaN here: it is not accepted, but scored
        action: Action = "accept" if score <= self.perplexity else "escalate"
        return features.decision(action, score=score)

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Learn nothing."""


def main() -> None:
    """Solve eight toy problems under this gate."""
    setup = atts.Setup(
        draft="scripted", target="scripted", gate=DoubtGate(), policy=atts.Policy(samples=4)
    )
    result = atts.evaluate_sync(toy_problems(8), setup)
    usage = result.usage
    print(
        f"scored {usage.scored_tokens} of {usage.draft_tokens} draft tokens; target wrote "
        f"{usage.target_tokens}"
    )


if __name__ == "__main__":
    main()
