"""Finished problems in brief, from which results, reports, comparisons and plans are made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from atts.core import Finish, Outcome, Rollout, Usage
from atts.journal.events import Graded, OutcomeStatus, VerdictStatus
from atts.journal.manifest import Manifest

SampleVerdict = VerdictStatus | Literal["spared", "lost"]
"""What a rollout is worth. "spared": it was stopped before it could answer; "lost": it failed.
Neither is wrong.
"""


def is_censored(answer: object, finish: object) -> bool:
    """Whether a rollout was stopped before it could answer: by a settled vote, the run's end, or
    the loss of an engine.

    What it would have answered is unknown. To count it as wrong would make the better method look
    worse, so it is left out of rates of single rollouts.

    >>> is_censored(None, "settled"), is_censored(None, "tokens"), is_censored("7", "settled")
    (True, False, False)
    """
    return answer is None and finish in ("settled", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """One rollout in brief."""

    sample: int
    finish: Finish
    answer: str | None = None
    verdict: SampleVerdict | None = None  # None: it was not graded
    rule: str = ""
    error: str = ""  # why it failed
    is_fallback_answer: bool = False  # found in a finished text without a marked answer

    @classmethod
    def of(cls, rollout: Rollout) -> FinishedSample:
        """From the rollout, before anything was graded."""
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
        """Whether it was stopped before it could answer."""
        return is_censored(self.answer, self.finish)

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens or turns ended it before it could answer."""
        return self.answer is None and self.finish in ("tokens", "turns")

    def graded(self, said: Graded) -> FinishedSample:
        """With what a grader said, which is nothing of a rollout that was stopped."""
        return self if self.is_censored else replace(self, verdict=said.status, rule=said.rule)


@dataclass(frozen=True, slots=True)
class FinishedProblem:
    """One problem in brief: how it ended, what was answered, what that was worth and cost.

    Whole rollouts are in its `Outcome`.
    """

    problem: str
    status: OutcomeStatus
    answer: str | None
    # of the answer; None: it was not graded, or the run ended before there was one
    verdict: VerdictStatus | None
    rule: str
    samples: tuple[FinishedSample, ...]
    votes: Mapping[str, float]
    usage: Usage
    why: str = ""
    judged: int = 0  # chunks a gate decided on, also those of rollouts that were cut
    escalated: int = 0  # of them, continued by the target
    doubt: str = ""  # of the answer, by the stored scores
    # in the task graph; None: while it is being run
    seconds: float | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, outcome: Outcome, graded: Iterable[Graded] = (), *, judged: int = 0, escalated: int = 0
    ) -> FinishedProblem:
        """From the outcome, and what the grader said of its answers."""
        samples = tuple(map(FinishedSample.of, outcome.rollouts))
        found = cls(
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
            judged=judged,
            escalated=escalated,
        )
        return found.graded(graded)

    def graded(self, verdicts: Iterable[Graded]) -> FinishedProblem:
        """With what a grader said; of several verdicts on one answer the last counts."""
        of = {verdict.sample: verdict for verdict in verdicts}
        samples = tuple(
            one.graded(of[one.sample]) if one.sample in of else one for one in self.samples
        )
        whole = of.get(None)
        if whole is None or self.is_censored:
            return replace(self, samples=samples)
        return replace(self, samples=samples, verdict=whole.status, rule=whole.rule)

    @property
    def is_correct(self) -> bool:
        """Whether the answer was graded and found right."""
        return self.verdict == "correct"

    @property
    def is_right(self) -> bool | None:
        """Whether the answer was found right, None where that could not be told."""
        return None if self.verdict == "unscored" else self.is_correct

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: neither the problem nor one of its rollouts failed."""
        return self.status != "failed" and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Why its rollouts failed, those that did."""
        return tuple(one.error for one in self.samples if one.finish == "failed")

    @property
    def is_censored(self) -> bool:
        """Whether it has no answer, and it or a rollout was stopped that could have brought one."""
        return self.answer is None and (
            self.status == "failed" or any(one.is_censored for one in self.samples)
        )

    @property
    def complete_samples(self) -> tuple[FinishedSample, ...]:
        """The rollouts that ran to their end: those that rates of single rollouts are made of."""
        return tuple(one for one in self.samples if not one.is_censored)

    @property
    def agreement(self) -> float:
        """The winner's share of all votes; 0 without any."""
        total = math.fsum(self.votes.values())
        return max(self.votes.values()) / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain data for machines; `seconds` is left out while it is not known."""
        data = asdict(self)
        return (
            data
            if self.seconds is not None
            else {name: data[name] for name in data if name != "seconds"}
        )


LARGE_SHARE = 0.05
"""The share of cut rollouts from which a run's numbers are not to be trusted."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many of the rollouts that ran to their end were cut, and by what."""

    rollouts: int
    at_tokens: int
    at_turns: int
    max_tokens: int
    turns: int
    context: int  # the shorter of both models'; 0 when unknown

    @property
    def cut(self) -> int:
        """How many were cut."""
        return self.at_tokens + self.at_turns

    @property
    def is_large(self) -> bool:
        """Whether more than 5 % were."""
        return self.cut > LARGE_SHARE * self.rollouts

    @property
    def warning(self) -> str:
        """The sentence, where more than 5 % were cut; else nothing."""
        return str(self) if self.is_large else ""

    def as_json(self) -> dict[str, int]:
        """Plain data for machines."""
        names = ("cut", "rollouts", "at_tokens", "at_turns", "max_tokens", "turns")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """One sentence: how many, where, and what to do."""
        by_context = 0 < self.context <= self.max_tokens
        limit = (
            f"the context of {self.context:,}" if by_context else f"max_tokens {self.max_tokens:,}"
        )
        places = [f"{self.at_tokens:,} at {limit}"] if self.at_tokens else []
        places += (
            [f"{self.at_turns:,} at the last of {self.turns:,} turns"] if self.at_turns else []
        )
        longer = "serve models with a longer context" if by_context else "raise --max-tokens"
        advice = [longer] if self.at_tokens else []
        advice += ["leave --turns out, or raise it"] if self.at_turns else []
        share = self.cut / self.rollouts if self.rollouts else 0.0
        told = f"{self.cut:,} of {self.rollouts:,} rollouts ({share:.1%}) were cut before they could answer"
        return f"{told}: {', '.join(places)}; {', '.join(advice)}" if places else told


def truncation(problems: Iterable[FinishedProblem], manifest: Manifest) -> Truncation:
    """What was cut of these problems, under the limits that the manifest holds."""
    samples = [sample for problem in problems for sample in problem.complete_samples]
    ends = Counter(sample.finish for sample in samples if sample.is_cut)
    held = manifest.configuration.get("policy")
    policy: Mapping[str, Any] = (
        held.value if held is not None and isinstance(held.value, Mapping) else {}
    )
    lengths = [
        length
        for engine in manifest.engines.values()
        if isinstance(length := engine.get("context_length"), int)
    ]
    return Truncation(
        len(samples),
        ends["tokens"],
        ends["turns"],
        max_tokens=policy.get("max_tokens") or 0,
        turns=policy.get("turns") or 0,
        context=min(lengths, default=0),
    )
