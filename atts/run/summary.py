"""What a run came to in a handful of numbers, each with its interval: accuracy, rate, tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

from atts.core import Usage
from atts.evaluators import Estimate, mean_estimate, share_estimate
from atts.run.result import ProblemLine, RunResult


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run; accuracies are undefined where nothing was graded.

    `rate` is the share of judged chunks that were handed over; `answers` the accuracy of the vote.
    """

    problems: int
    samples: int
    answers: Estimate
    samples_right: Estimate
    rate: Estimate
    usage: Usage
    seconds: float
    failed: int
    unanswered: int

    @property
    def target_share(self) -> float:
        """The target's part of all tokens that were sampled."""
        total = self.usage.draft_tokens + self.usage.target_tokens
        return self.usage.target_tokens / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Strict JSON."""
        estimates = {name: getattr(self, name).as_json() for name in ("answers", "samples_right", "rate")}
        return {**asdict(self), **estimates, "target_share": self.target_share}


def summarise(result: RunResult) -> Summary:
    """Add up the lines of a run's problems."""
    graded = [line for line in result.problems if line.verdict is not None]
    return Summary(
        len(result.problems),
        sum(len(line.samples) for line in result.problems),
        mean_estimate([float(line.verdict == "correct") for line in graded], len(graded)),
        _of_samples(graded),
        share_estimate((line.handed, line.judged) for line in result.problems),
        reduce(add, (line.usage for line in result.problems), Usage()),
        result.seconds,
        sum(line.status == "failed" for line in result.problems),
        sum(line.status == "unanswered" for line in result.problems),
    )


def _of_samples(graded: list[ProblemLine]) -> Estimate:
    """The mean over problems of the share of right rollouts among those that ran to their end."""
    shares: list[float] = []
    count = 0
    for line in graded:
        verdicts = [sample.verdict for sample in line.samples if sample.verdict and not sample.is_censored]
        count += len(verdicts)
        if verdicts:
            shares.append(sum(verdict == "correct" for verdict in verdicts) / len(verdicts))
    return mean_estimate(shares, count)
