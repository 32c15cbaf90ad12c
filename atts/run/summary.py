"""The summary of a run: accuracy, escalation rate and tokens, each rate with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atts.core import Usage
from atts.evaluators import Estimate, accuracy_estimate, mean_estimate, share_estimate
from atts.journal import FinishedProblem, Truncation


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run; accuracies are undefined where nothing was graded.

    `rate` is the share of judged chunks that the target continued; `answers` the accuracy of the
    vote.
    """

    problems: int
    samples: int
    answers: Estimate
    samples_right: Estimate
    rate: Estimate
    usage: Usage
    seconds: float
    failed: int  # problems that are not complete
    unanswered: int
    truncation: Truncation

    @property
    def target_share(self) -> float:
        """The target's part of all tokens that were sampled."""
        total = self.usage.draft_tokens + self.usage.target_tokens
        return self.usage.target_tokens / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Strict JSON."""
        estimates = {
            name: getattr(self, name).as_json() for name in ("answers", "samples_right", "rate")
        }
        cut = {**self.truncation.as_json(), "warning": self.truncation.warning}
        return {**asdict(self), **estimates, "target_share": self.target_share, "truncation": cut}


def summarise(
    problems: Sequence[FinishedProblem], seconds: float, truncation: Truncation
) -> Summary:
    """Add up a run's problems."""
    graded = [one for one in problems if one.verdict is not None]
    return Summary(
        problems=len(problems),
        samples=sum(len(one.samples) for one in problems),
        answers=accuracy_estimate(one.is_right for one in graded),
        samples_right=_of_samples(graded),
        rate=share_estimate((one.escalated, one.judged) for one in problems),
        usage=sum((problem.usage for problem in problems), Usage()),
        seconds=seconds,
        failed=sum(not one.is_complete for one in problems),
        unanswered=sum(one.status == "unanswered" for one in problems),
        truncation=truncation,
    )


def _of_samples(graded: Sequence[FinishedProblem]) -> Estimate:
    """The mean over problems of the share of right rollouts among those that ran to their end."""
    verdicts = [
        [one.verdict for one in problem.complete_samples if one.verdict] for problem in graded
    ]
    n = sum(map(len, verdicts))
    unscored = sum(found.count("unscored") for found in verdicts)

    def right(*counted: str) -> Estimate:
        shares = [
            sum(verdict in counted for verdict in found) / len(found) for found in verdicts if found
        ]
        return mean_estimate(shares, n)

    return right("correct").with_best_case(right("correct", "unscored"), unscored)
