"""The texts of the guarantees of all modes, and of the conditions that void these guarantees."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from atts.calibration.conformal import ClusterSummary, by_cluster, long_run, summarise
from atts.calibration.controllers import SLACK, Mode, Tuning
from atts.errors import counted

if TYPE_CHECKING:
    from atts.calibration.drift import DriftEvent
    from atts.calibration.scores import StoredScores

TEXTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("guarantees.toml").read_text(encoding="utf-8")
)
"""For each mode, the texts of the guarantee and of the conditions that void it. The texts are
format strings with fields of `Facts`.
"""


def with_spaced_percent(text: str) -> str:
    """Insert a space before each percent sign, because format strings cannot do so.

    >>> with_spaced_percent("2.0% of 7")
    '2.0 % of 7'
    """
    return re.sub(r"(?<=\d)%", " %", text)


# The expected length of a run is wrong by a few percent. So bounds also hold if the run ends
# earlier, with up to 1 / `_LAST` of the expected decisions missing.
_LAST = 20


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers that appear in a guarantee; the texts in `guarantees.toml` refer to them by name."""

    rate: float
    stored: StoredScores
    decided: int
    escalated: int
    tuning: Tuning
    events: Sequence[DriftEvent]
    # expected number of remaining decisions in the run; infinite if unknown
    left: float = math.inf
    # Hard cap, a share from 0 to 1: at most ceil(cap * n) of the first n decisions escalate, for
    # every n.
    cap: Fraction | None = None

    @property
    def count(self) -> int:
        """Return the number of stored scores."""
        return len(self.stored)

    @property
    def decisions(self) -> int:
        """Return the number of decisions so far, at least one."""
        return max(1, self.decided)

    @property
    def counted_decisions(self) -> str:
        """Return the number of decisions so far with its noun."""
        return counted(self.decisions, "decision")

    @property
    def spread(self) -> float:
        """Return the half-width of the 95 % interval of the rate, for independent decisions.

        This is the bound of mode "marginal". Its decisions are independent coins, because smoothed
        online conformal p-values of exchangeable scores are independent and uniform (Vovk,
        Gammerman and Shafer, 2005).
        """
        return 1.96 * math.sqrt(self.rate * (1 - self.rate) / self.decisions)

    @property
    def aci_bound(self) -> float:
        """Return a bound, for any sequence of scores, on the absolute sum of (rate - escalated) in
        mode "aci".

        The level starts at the rate and moves by step * (rate - escalated). Every chunk is accepted
        if the level is at most 0, and escalated if the level is at least 1. So the level can pass 0
        or 1 by one step at most. The range of the level, divided by the step, bounds the sum (Gibbs
        and Candès, 2021, proposition 4.1).
        """
        step = self.tuning.aci_step
        return (max(self.rate, 1 - self.rate) + step) / step

    @property
    def aci_now(self) -> str:
        """Return the text of the bound that holds for any sequence of scores. The bound is for the
        end of the run if the number of remaining decisions is known, and otherwise for now.

        If this number is unknown, the text is empty until enough decisions were taken for the bound
        to exclude any rate from 0 to 1.
        """
        bound = self.aci_bound
        side = max(self.rate, 1 - self.rate)
        if math.isfinite(self.left):
            return (
                f"({SLACK:g} W + 1 + {side:g} E) / T of the nominal rate when the run ends. W "
                "is the largest number of decisions that the run ever expected. E is the "
                "largest excess of half the expected number of remaining decisions over their "
                "actual number"
            )
        if self.decided * side <= bound:
            return ""
        return (
            f"{bound:.2f} / T of the nominal rate; now, after T = {counted(self.decided, 'decision')}, "
            f"this is {bound / self.decided:.4f}"
        )

    @property
    def aci_likely(self) -> str:
        """Return the text of the 95 % bound on the rate of mode "aci"; empty if the bound excludes
        no rate.

        This assumes exchangeable scores. Each decision shrinks the deficit by a share g, and adds a
        martingale difference of range 1. So the deficit is sub-Gaussian, with variance proxy v' =
        (1 - g)^2 v + 1/4 after the decision (Hoeffding's lemma). If g is the step, v is below its
        fixed point, 1 / (4 (2 step - step^2)). If g is two divided by the number of decisions left,
        v is below left / 12 + 1/4 for the part of the deficit above the slack.
        """
        if math.isfinite(self.left):
            whole = self.decided + self.left
            variance = max(whole / _LAST, 2.0) / 12 + 0.25
            reach = SLACK + _sub_gaussian_reach(variance) / whole
            return (
                f"{reach:.4f} of the nominal rate over the whole run (about {whole:,.0f} "
                f"decisions), even if the run ends earlier than expected by 1 / {_LAST} of its "
                "decisions"
            )
        step = self.tuning.aci_step
        fixed_point = 1 / (4 * step * (2 - step)) if step < 1 else math.inf
        reach = _sub_gaussian_reach(min(self.decisions / 4, fixed_point)) / self.decisions
        if reach >= max(self.rate, 1 - self.rate):
            return ""
        return f"{reach:.4f} of the nominal rate over {self.counted_decisions}"

    @property
    def aci_promise(self) -> str:
        """Return the text of both bounds of mode "aci". A bound that excludes no rate is left out."""
        parts: list[str] = []
        if self.aci_likely:
            parts.append(
                "if scores are exchangeable, with probability 0.95 the realised rate is within "
                f"{self.aci_likely}"
            )
        if self.aci_now:
            parts.append(
                f"for ANY sequence of scores the realised rate of T decisions is within {self.aci_now}"
            )
        if not parts:
            return (
                f"the realised rate approaches {self.rate:g} for ANY sequence of scores; there are "
                "too few decisions for a bound"
            )
        return ". ".join(part[:1].upper() + part[1:] for part in parts)

    @property
    def least_bounded(self) -> int:
        """Return how many decisions a question needs before the bound on its rate excludes any rate
        from 0 to 1.
        """
        return math.floor(self.question_bound / max(self.rate, 1 - self.rate)) + 1

    @property
    def question_bound(self) -> float:
        """Return a bound, for any sequence of scores, on the absolute sum of (rate - escalated)
        over the decisions on one question.

        Once the absolute sum reaches the limit, every decision reduces it, whatever the score. So
        the absolute sum exceeds the limit by one decision at most.
        """
        return self.tuning.limit_at(self.rate) + 1

    @property
    def draw(self) -> str:
        """Return a sentence with the 90 % interval of the long-run escalation rate, given the
        effective number of stored scores.
        """
        summary = self._clusters()
        effective = max(1, int(summary.effective if summary else self.count))
        low, high = long_run(effective, self.rate)
        size = f"{effective:,}" if summary else f"{effective:,} if the scores are independent"
        return (
            f"with these stored scores (effective sample size {size}) the long-run rate is in "
            f"[{low:.3f}, {high:.3f}] (90 % interval)"
        )

    @property
    def clustering(self) -> str:
        """Return a note on the effective number of stored scores.

        The text is empty if the questions of the scores are not known.
        """
        summary = self._clusters()
        return f" (the stored scores: {summary})" if summary else ""

    def _clusters(self) -> ClusterSummary | None:
        if not self.stored.clustered:
            return None
        return summarise(by_cluster(self.stored.nonconformity, self.stored.questions))


def _sub_gaussian_reach(variance: float) -> float:
    """Return the 95 % bound on a sub-Gaussian variable with this variance proxy."""
    return math.sqrt(2 * variance * math.log(2 / 0.05))


def describe(mode: Mode, facts: Facts, additions: Sequence[str] = ()) -> tuple[str, str]:
    """Return the texts of a mode's guarantee and of the conditions that void it.

    The guarantee begins with the share escalated so far, in a sentence that can be quoted alone.
    """
    names = ["question", mode] if mode == "question-turn" else [mode]
    texts = [TEXTS[name] for name in (*names, *additions)]
    guarantee = "".join(text["guarantee"] for text in texts).format(facts=facts)
    voided_by = "".join(text["voided_by"] for text in texts).format(facts=facts)
    realised = (
        f"The gate has not decided on a chunk yet; the nominal rate is {100 * facts.rate:g} %."
    )
    if facts.decided:
        share = f"{100 * facts.escalated / facts.decided:.1f} %"
        realised = (
            f"{facts.escalated:,} of {counted(facts.decided, 'chunk')} escalated ({share}), at a "
            f"nominal rate of {100 * facts.rate:g} %."
        )
    for event in facts.events:
        # every drift alarm voids the guarantee
        voided_by += (
            f"; THE GUARANTEE IS ALREADY VOID after {counted(event.scores, 'score')}: "
            f"{event.message} ({event.action})"
        )
    return f"{realised} {guarantee[:1].upper()}{guarantee[1:]}", voided_by
