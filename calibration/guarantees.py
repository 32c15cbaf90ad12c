"""Guarantees in words: what each mode promises, for what sequence, and what voids it, with the numbers filled in."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atts.calibration.clusters import ClusterSummary, by_cluster, summarise
from atts.calibration.conformal import long_run
from atts.calibration.modes import Mode, Tuning

if TYPE_CHECKING:
    from atts.calibration.drift import DriftEvent
    from atts.calibration.stored import StoredScores

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
    left: float = math.inf  # decisions expected before the run ends; infinite where that is not known

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
        bound, side = self.aci_bound, max(self.rate, 1 - self.rate)
        if math.isfinite(self.left):
            whole = self.decided + self.left
            return (
                f"(1 + {side:g} E) / T of {self.rate:g} when the run ends, E being the most decisions by which a "
                f"quarter of those expected to be left ever exceeded those that were left; of the {whole:,.0f} "
                f"expected here that is {1 / whole:.4f} where E is 0, {(1 + 20 * side) / whole:.4f} where it is 20"
            )
        start = f"{bound:.2f} / T of {self.rate:g}, "
        if self.decided > bound:
            return f"{start}so here within {bound / self.decided:.4f}"
        return f"{start}a promise from decision {math.ceil(bound):,} on"

    @property
    def turn_bound(self) -> float:
        """What the sum of errors of each turn stays within."""
        return self._bound(self.tuning.turn_step_at(self.rate))

    @property
    def question_bound(self) -> float:
        """What the sum of errors of each question stays within."""
        return self.tuning.limit + 1

    @property
    def lean(self) -> float:
        """What the integral term and the warm-up add to the bound of quantile tracking."""
        return 2 * self.tuning.tracking_integral / self.tuning.tracking_step + 21

    @property
    def draw(self) -> str:
        """How far the realised long-run rate of these very stored scores may be from the nominal one."""
        summary = self._clusters()
        effective = max(1, int(summary.effective if summary else self.count))
        low, high = long_run(effective, self.rate)
        worth = f"worth about {effective:,}" if summary else f"{effective:,} if independent"
        return f"for these stored scores ({worth}) its long-run rate is in [{low:.3f}, {high:.3f}] (90 %)"

    @property
    def clustering(self) -> str:
        """How many independent scores the stored ones are worth; empty where their questions are not known."""
        summary = self._clusters()
        return f" (the stored ones: {summary})" if summary else ""

    def _bound(self, step: float) -> float:
        """An allowance starts at most max(rate, 1 - rate) from where it must act."""
        return (max(self.rate, 1 - self.rate) + step) / step

    def _clusters(self) -> ClusterSummary | None:
        if not self.stored.clustered:
            return None
        return summarise(by_cluster(self.stored.nonconformity, self.stored.questions))


def describe(mode: Mode, facts: Facts, by_length: bool = False) -> tuple[str, str]:
    """The promise of a mode with the numbers of now, and what voids it or already has."""
    names = ["question", mode] if mode == "question-turn" else [mode]
    texts = [TEXTS[name] for name in ([*names, "by-length"] if by_length else names)]
    guarantee, voided = (
        "".join(text[part] for text in texts).format(facts=facts) for part in ("guarantee", "voided_by")
    )
    realised = "No decision yet."
    if facts.decided:
        share = f"{facts.escalated / facts.decided:.4f}, nominal {facts.rate:g}"
        realised = f"So far {facts.escalated:,} of {facts.decided:,} decisions escalated ({share})."
    alarms = "".join(f"; ALREADY after {e.scores} scores: {e.message} ({e.action})" for e in facts.events)
    return f"{guarantee}. {realised}", voided + alarms
