"""Guarantees in words: what each mode promises, for what sequence, and what voids it, with the
numbers filled in.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from atts.calibration.conformal import ClusterSummary, by_cluster, long_run, summarise
from atts.calibration.controllers import SLACK, Mode, Tuning

if TYPE_CHECKING:
    from atts.calibration.drift import DriftEvent
    from atts.calibration.scores import StoredScores

_LAST = 20


def _reach(spread: float) -> float:
    """What a sub-Gaussian number of that variance proxy stays within, with probability 0.95."""
    return math.sqrt(2 * spread * math.log(2 / 0.05))


TEXTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("guarantees.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers a promise is stated with: what the texts of `guarantees.toml` name."""

    rate: float
    stored: StoredScores
    decided: int
    escalated: int
    tuning: Tuning
    events: Sequence[DriftEvent]
    # decisions expected before the run ends; infinite where that is not known
    left: float = math.inf
    cap: Fraction | None = None  # of any first n decisions at most ceil(cap * n) escalate

    @property
    def count(self) -> int:
        """The number of stored scores."""
        return len(self.stored)

    @property
    def decisions(self) -> int:
        """The number of decisions so far, at least one."""
        return max(1, self.decided)

    @property
    def spread(self) -> float:
        """How far the rate of as many coins may be from theirs."""
        return 1.96 * math.sqrt(self.rate * (1 - self.rate) / self.decisions)

    @property
    def aci_bound(self) -> float:
        """What the sum of errors of mode "aci" stays within."""
        return self._bound(self.tuning.aci_step)

    @property
    def aci_now(self) -> str:
        """What that comes to for the decisions so far, or for all of a run whose size is known."""
        bound = self.aci_bound
        side = max(self.rate, 1 - self.rate)
        if math.isfinite(self.left):
            return (
                f"({SLACK:g} W + 1 + {side:g} E) / T of {self.rate:g} when the run ends, W being "
                f"the most decisions "
                "that were ever expected of it, and E the most by which half of those expected to "
                "be left ever "
                "exceeded those that were left"
            )
        here = f", so here within {bound / self.decided:.4f}" if self.decided > bound else ""
        return f"{bound:.2f} / T of {self.rate:g}{here}"

    @property
    def aci_likely(self) -> str:
        """Within what the rate of mode "aci" is with probability 0.95 if scores are exchangeable.

        What is owed shrinks by a share g before every decision and moves by a martingale difference
        of range 1, so it is sub-Gaussian with v' = (1 - g)^2 v + 1/4. With g the step, v is below 1
        / (4 (2 step - step^2)); with g two in the decisions that are left, below left / 12 + 1/4,
        beyond the slack.
        """
        if math.isfinite(self.left):
            whole = self.decided + self.left
            reach = SLACK + _reach(max(whole / _LAST, 2.0) / 12 + 0.25) / whole
            return (
                f"{reach:.4f} of {self.rate:g} over the whole run, of about {whole:,.0f} "
                f"decisions, though it may end "
                f"when one in {_LAST} of them was still expected"
            )
        step = self.tuning.aci_step
        spread = min(self.decisions / 4, 1 / (4 * step * (2 - step)) if step < 1 else math.inf)
        return f"{_reach(spread) / self.decisions:.4f} of {self.rate:g} over {self.decisions:,} decisions"

    @property
    def question_bound(self) -> float:
        """What the sum of errors of each question stays within."""
        return self.tuning.limit_at(self.rate) + 1

    @property
    def draw(self) -> str:
        """How far the realised long-run rate of these very stored scores may be from the nominal
        one.
        """
        summary = self._clusters()
        effective = max(1, int(summary.effective if summary else self.count))
        low, high = long_run(effective, self.rate)
        worth = f"worth about {effective:,}" if summary else f"{effective:,} if independent"
        return f"for these stored scores ({worth}) its long-run rate is in [{low:.3f}, {high:.3f}] (90 %)"

    @property
    def clustering(self) -> str:
        """How many independent scores the stored ones are worth; empty where their questions are
        not known.
        """
        summary = self._clusters()
        return f" (the stored ones: {summary})" if summary else ""

    def _bound(self, step: float) -> float:
        """An allowance starts at most max(rate, 1 - rate) from where it must act."""
        return (max(self.rate, 1 - self.rate) + step) / step

    def _clusters(self) -> ClusterSummary | None:
        if not self.stored.clustered:
            return None
        return summarise(by_cluster(self.stored.nonconformity, self.stored.questions))


def describe(mode: Mode, facts: Facts, additions: Sequence[str] = ()) -> tuple[str, str]:
    """The promise of a mode and of what was added to it, with the numbers of now, and what voids it
    or already has.
    """
    names = ["question", mode] if mode == "question-turn" else [mode]
    texts = [TEXTS[name] for name in (*names, *additions)]
    guarantee, voided = (
        "".join(text[part] for text in texts).format(facts=facts)
        for part in ("guarantee", "voided_by")
    )
    realised = "No decision yet."
    if facts.decided:
        share = f"{facts.escalated / facts.decided:.4f}, nominal {facts.rate:g}"
        realised = f"So far {facts.escalated:,} of {facts.decided:,} decisions escalated ({share})."
    alarms = "".join(
        f"; ALREADY after {e.scores} scores: {e.message} ({e.action})" for e in facts.events
    )
    return f"{guarantee}. {realised}", voided + alarms
