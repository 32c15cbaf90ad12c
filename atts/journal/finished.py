"""Summaries of finished problems, from which results, reports, comparisons and plans are made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from atts.core import Combination, Finish, Outcome, Rollout, Usage
from atts.journal.events import Graded, OutcomeStatus, VerdictStatus
from atts.journal.manifest import Manifest

SampleVerdict = VerdictStatus | Literal["spared", "lost"]
"""The verdict on a rollout. A rollout that was stopped before it could answer is "spared", a failed
one is "lost"; neither counts as wrong.
"""


def is_censored(answer: object, finish: object) -> bool:
    """Return True if a rollout was stopped before it could answer.

    A settled vote, the end of the run or the loss of an engine stops rollouts. The answer of such a
    rollout is unknown. Counting it as wrong would make a better method look worse, so rates of
    single rollouts leave it out.

    >>> is_censored(None, "settled"), is_censored(None, "tokens"), is_censored("7", "settled")
    (True, False, False)
    """
    return answer is None and finish in ("settled", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """The summary of one rollout."""

    sample: int
    finish: Finish
    answer: str | None = None
    verdict: SampleVerdict | None = None  # None: it was not graded
    rule: str = ""
    error: str = ""  # why it failed
    is_fallback_answer: bool = False  # found in a finished text without a marked answer

    @classmethod
    def of(cls, rollout: Rollout) -> FinishedSample:
        """Make a summary of a rollout that is not graded yet."""
        finish = rollout.finish or "cancelled"
        verdict: SampleVerdict | None = None
        if is_censored(rollout.answer, finish):
            verdict = "lost" if finish == "failed" else "spared"
        return cls(
            rollout.sample,
            finish,
            rollout.answer,
            verdict,
            error=rollout.error if finish == "failed" else "",
            is_fallback_answer=rollout.is_fallback_answer,
        )

    @property
    def is_censored(self) -> bool:
        """Return True if the rollout was stopped before it could answer."""
        return is_censored(self.answer, self.finish)

    @property
    def is_cut(self) -> bool:
        """Return True if a limit of tokens or turns ended the rollout before it could answer."""
        return self.answer is None and self.finish in ("tokens", "turns")

    def graded(self, graded: Graded) -> FinishedSample:
        """Return the rollout with its verdict; a rollout that was stopped gets none."""
        if self.is_censored:
            return self
        return replace(self, verdict=graded.status, rule=graded.rule)


@dataclass(frozen=True, slots=True)
class FinishedProblem:
    """The summary of one problem: its status, answer, verdict and cost; whole rollouts are in
    `Outcome`.
    """

    problem: str
    status: OutcomeStatus
    answer: str | None
    # verdict on the answer; None: it was not graded, or the run ended before there was one
    verdict: VerdictStatus | None
    rule: str
    samples: tuple[FinishedSample, ...]
    votes: Mapping[str, float]
    usage: Usage
    why: str = ""
    judged: int = 0  # chunks that a gate decided on, including those of rollouts that were cut
    escalated: int = 0  # number of these that were escalated
    doubt: str = ""  # warning that the problem is unlike the questions of the stored scores
    combination: Combination | None = None  # None if the vote alone decided
    # seconds in the task graph; None while the problem runs
    seconds: float | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, outcome: Outcome, graded: Iterable[Graded] = (), *, judged: int = 0, escalated: int = 0
    ) -> FinishedProblem:
        """Make a summary of an outcome and the verdicts on its answers."""
        samples = tuple(map(FinishedSample.of, outcome.rollouts))
        finished = cls(
            outcome.problem.id,
            outcome.status,
            outcome.answer,
            None,
            "",
            samples=samples,
            votes=outcome.votes,
            usage=outcome.usage,
            why=outcome.why,
            doubt=outcome.doubt,
            combination=outcome.combination,
            judged=judged,
            escalated=escalated,
        )
        return finished.graded(graded)

    def graded(self, verdicts: Iterable[Graded]) -> FinishedProblem:
        """Return the problem with verdicts; of several verdicts on one answer the last counts."""
        by_sample = {verdict.sample: verdict for verdict in verdicts}
        samples = tuple(
            one.graded(by_sample[one.sample]) if one.sample in by_sample else one
            for one in self.samples
        )
        of_answer = by_sample.get(None)
        if of_answer is None or self.is_censored:
            return replace(self, samples=samples)
        return replace(self, samples=samples, verdict=of_answer.status, rule=of_answer.rule)

    @property
    def is_correct(self) -> bool:
        """Return True if the answer was graded as correct."""
        return self.verdict == "correct"

    @property
    def is_right(self) -> bool | None:
        """Return whether the answer is correct; None if the grader could not decide."""
        return None if self.verdict == "unscored" else self.is_correct

    @property
    def is_complete(self) -> bool:
        """Return True if neither the problem nor one of its rollouts failed."""
        return self.status != "failed" and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the errors of the rollouts that failed."""
        return tuple(one.error for one in self.samples if one.finish == "failed")

    @property
    def is_censored(self) -> bool:
        """Return True if there is no answer, but a stopped rollout might have given one."""
        return self.answer is None and (
            self.status == "failed" or any(one.is_censored for one in self.samples)
        )

    @property
    def complete_samples(self) -> tuple[FinishedSample, ...]:
        """Return the rollouts that ran to their end; rates of single rollouts count only these."""
        return tuple(one for one in self.samples if not one.is_censored)

    @property
    def agreement(self) -> float:
        """Return the winner's share of all votes; 0 if there are none."""
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain data for machines, without unknown or empty values."""
        data = asdict(self)
        for name in ("seconds", "combination"):
            if data[name] is None:
                del data[name]
        return data


LARGE_SHARE = 0.05
"""The share of cut rollouts above which a run's numbers cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The number of rollouts that a limit cut before they could answer, by limit."""

    rollouts: int
    at_tokens: int
    at_turns: int
    max_tokens: int
    turns: int
    context: int  # the shorter context of both models; 0 if unknown

    @property
    def cut(self) -> int:
        """Return the number of rollouts that were cut."""
        return self.at_tokens + self.at_turns

    @property
    def is_large(self) -> bool:
        """Return True if more than 5 % of the rollouts were cut."""
        return self.cut > LARGE_SHARE * self.rollouts

    @property
    def warning(self) -> str:
        """Return a warning if more than 5 % were cut, else an empty text."""
        return str(self) if self.is_large else ""

    def as_json(self) -> dict[str, int]:
        """Return plain data for machines."""
        names = ("cut", "rollouts", "at_tokens", "at_turns", "max_tokens", "turns")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return a sentence on how many were cut, at which limit, with advice."""
        share = self.cut / self.rollouts if self.rollouts else 0.0
        counts = f"{self.cut:,} of {self.rollouts:,} rollouts ({100 * share:.1f} %)"
        limits = list[str]()
        advice = list[str]()
        if self.at_tokens and 0 < self.context <= self.max_tokens:
            limits.append(f"{self.at_tokens:,} at the context of {self.context:,}")
            advice.append("serve models with a longer context")
        elif self.at_tokens:
            limits.append(f"{self.at_tokens:,} at max_tokens {self.max_tokens:,}")
            advice.append("raise --max-tokens")
        if self.at_turns:
            limits.append(f"{self.at_turns:,} at the last of {self.turns:,} turns")
            advice.append("leave --turns out, or raise it")
        sentence = f"{counts} were cut before they could answer"
        if limits:
            sentence += f": {', '.join(limits)}; {', '.join(advice)}"
        return sentence


def truncation(problems: Iterable[FinishedProblem], manifest: Manifest) -> Truncation:
    """Count the rollouts of these problems that were cut under the limits of the manifest."""
    samples = [sample for problem in problems for sample in problem.complete_samples]
    ends = Counter(sample.finish for sample in samples if sample.is_cut)
    setting = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = {}
    if setting is not None and isinstance(setting.value, Mapping):
        policy = setting.value
    lengths = list[int]()
    for engine in manifest.engines.values():
        length = engine.get("context_length")
        if isinstance(length, int):
            lengths.append(length)
    return Truncation(
        len(samples),
        ends["tokens"],
        ends["turns"],
        max_tokens=policy.get("max_tokens") or 0,
        turns=policy.get("turns") or 0,
        context=min(lengths, default=0),
    )
