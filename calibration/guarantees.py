"""Guarantees in words: what each mode promises, for what sequence, and what voids it, with the numbers filled in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atts.calibration.clusters import ClusterSummary, by_cluster, summarise
from atts.calibration.conformal import coverage_interval, split_rank
from atts.calibration.modes import Mode, Tuning

if TYPE_CHECKING:
    from atts.calibration.drift import DriftEvent
    from atts.calibration.stored import StoredScores


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A guarantee and what makes it empty, both in words."""

    guarantee: str
    voided_by: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers a promise is stated with."""

    rate: float
    stored: StoredScores
    decided: int
    escalated: int
    tuning: Tuning
    events: Sequence[DriftEvent]

    @property
    def worst(self) -> float:
        """max(rate, 1 - rate), the farthest an allowance can start from where it must act."""
        return max(self.rate, 1 - self.rate)


def describe(mode: Mode, facts: Facts) -> Guarantee:
    """The promise of a mode with the numbers of now, and what has already voided it."""
    guarantee, voided = _GUARANTEES[mode](facts)
    alarms = "".join(f"; ALREADY after {e.scores} scores: {e.message} ({e.action})" for e in facts.events)
    return Guarantee(f"{guarantee}. {_realised(facts)}", voided + alarms)


def _realised(facts: Facts) -> str:
    if not facts.decided:
        return "No decision yet."
    share = facts.escalated / facts.decided
    return f"So far {facts.escalated:,} of {facts.decided:,} decisions escalated ({share:.4f}, nominal {facts.rate:g})."


def _split(facts: Facts) -> tuple[str, str]:
    return (
        f"a new score exchangeable with the {len(facts.stored):,} stored ones escalates with probability "
        f"{facts.rate:g}, over the draw of both; {_draw(facts)}",
        "drift of any kind (later turns, other questions, another model or temperature); scores that arrive because "
        "they finished early; decisions that change the scores to come" + _clustering(facts),
    )


def _draw(facts: Facts) -> str:
    """How far the realised long-run rate of these very stored scores may be from the nominal one."""
    summary = _clusters(facts)
    effective = max(1, int(summary.effective if summary else len(facts.stored)))
    k = min(effective, max(1, split_rank(effective, facts.rate)))
    low, high = coverage_interval(effective, k)
    worth = f"worth about {effective:,}" if summary else f"{effective:,} if independent"
    return f"for these stored scores ({worth}) its long-run rate is in [{1 - high:.3f}, {1 - low:.3f}] (90 %)"


def _marginal(facts: Facts) -> tuple[str, str]:
    decisions = max(1, facts.decided)
    spread = 1.96 * math.sqrt(facts.rate * (1 - facts.rate) / decisions)
    return (
        f"if all scores are exchangeable, every decision escalates with probability exactly {facts.rate:g}, whatever "
        f"the others did, so the realised rate of {decisions:,} decisions is within {spread:.3f} of it (95 %)",
        "scores that cluster by question, drift with the turn or arrive in an order of completion: then only the grand "
        "average is near, and no question, turn or stretch of the run" + _clustering(facts),
    )


def _aci(facts: Facts) -> tuple[str, str]:
    bound = _bound(facts, facts.tuning.aci_step)
    empty = f", a promise from decision {math.ceil(bound):,} on"
    now = f", so here within {bound / facts.decided:.4f}" if facts.decided > bound else empty
    return (
        f"for ANY sequence of scores the realised rate of T decisions is within {bound:.2f} / T of {facts.rate:g}{now}",
        "nothing about the scores; but d decisions in flight add d / T, decisions overruled without being observed "
        "count for nothing, and it says nothing about one chunk, one question or one turn",
    )


def _turn(facts: Facts) -> tuple[str, str]:
    bound = _bound(facts, facts.tuning.turn_step)
    return (
        f"for ANY sequence of scores, in each turn by itself, the realised rate of its T decisions is within "
        f"{bound:.1f} / T of {facts.rate:g}; while the scores of a turn are exchangeable each of them escalates with "
        f"probability near {facts.rate:g} from the start",
        "nothing about the scores for the first part, but d decisions in flight add d / T; the second by drift within "
        "a turn. Questions are not equalised: hard ones escalate more",
    )


def _tracking(facts: Facts) -> tuple[str, str]:
    step = facts.tuning.tracking_step
    return (
        f"for any sequence of scores within b of each other, b counted in mean distances from the median of the first "
        f"ones, the realised rate of T decisions is within (b / {step:g} + {_lean(facts):g}) / T of {facts.rate:g}",
        "scores without bound, or first ones so much alike that the unit had to be made larger later, by twice or "
        "more, where every unit adds a bound of its own; d decisions in flight add d / T; it says nothing about one "
        "chunk, one question or one turn",
    )


def _lean(facts: Facts) -> float:
    """What the integral term and the warm-up add to the bound of quantile tracking."""
    return 2 * facts.tuning.tracking_integral / facts.tuning.tracking_step + 21


def _question(facts: Facts) -> tuple[str, str]:
    bound = facts.tuning.limit + 1
    return (
        f"for ANY sequence of scores, in each question by itself, the realised rate of its n decisions is within "
        f"{bound:g} / n of {facts.rate:g}; within a question the score decides, and feedback moves the threshold",
        "nothing about the scores; but d decisions of a question in flight add d / n, and overruling decisions (a hard "
        "cap, an alarm that escalates) is undone only as later ones allow. The p-values are predictive ranks within "
        "the question, not exact conformal ones",
    )


def _question_turn(facts: Facts) -> tuple[str, str]:
    guarantee, voided = _question(facts)
    return f"{guarantee}; turns and the whole stream are held by feedback without a bound of their own", voided


_GUARANTEES = {
    "split": _split,
    "marginal": _marginal,
    "aci": _aci,
    "tracking": _tracking,
    "turn": _turn,
    "question": _question,
    "question-turn": _question_turn,
}


def _bound(facts: Facts, step: float) -> float:
    return (facts.worst + step) / step


def _clusters(facts: Facts) -> ClusterSummary | None:
    if not facts.stored.clustered:
        return None
    return summarise(by_cluster(facts.stored.nonconformity, facts.stored.questions))


def _clustering(facts: Facts) -> str:
    summary = _clusters(facts)
    return f" (the stored ones: {summary})" if summary else ""
