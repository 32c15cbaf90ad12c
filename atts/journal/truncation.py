"""Truncated rollouts: those that a limit cut before they could answer, and the warning about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atts.journal.finished import FinishedProblem
from atts.journal.manifest import Manifest

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
