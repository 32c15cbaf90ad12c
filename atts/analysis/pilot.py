"""The result of a pilot: whether a gate helps a pair of models, and the method to use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from atts.core import Usage
from atts.errors import UsageError
from atts.evaluators import (
    Estimate,
    Power,
    compare_runs,
    holm,
    mean_estimate,
    paired_power,
    variance_split,
)

LEVEL = 0.05
"""A gain counts if its p-value, corrected by Holm's method over all scores, is below this."""
CHEAP = 0.1
"""The cost of a token that the target scores, or that the draft writes, in tokens that the target
decodes.

Tokens that the target draws while it scores have the same cost.
"""
_SMALL = 0.03  # accuracy; a smaller headroom does not justify a target
Take = Literal["gate", "exact", "target-only", "draft-only"]


@dataclass(frozen=True, slots=True)
class PilotArm:
    """One method of the pilot with its results; `flags` are the command-line flags for a run with
    it.
    """

    name: str
    flags: Mapping[str, object]
    correct: Mapping[str, Sequence[bool]]  # keyed by problem: verdicts on its rollouts
    usage: Usage
    rate: float  # realised rate; NaN if the method escalates nothing
    coin: str = ""  # the name of the coin for the comparison
    unavailable: str = ""  # why these models cannot run it

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of correct rollouts by problem."""
        return {name: sum(row) / len(row) for name, row in self.correct.items() if row}

    @property
    def cost(self) -> float:
        """Return the cost per problem in tokens that the target decodes."""
        usage = self.usage
        decoded = usage.target_tokens - usage.drawn_tokens
        cheap = usage.drawn_tokens + usage.scored_tokens + usage.draft_tokens
        return (decoded + CHEAP * cheap) / max(1, len(self.correct))


@dataclass(frozen=True, slots=True)
class PilotRow:
    """The numbers of one arm; `p_value` is corrected for the number of gains."""

    arm: PilotArm
    accuracy: Estimate  # accuracy of single rollouts
    gain: Estimate | None  # over the coin of the same policy and rate
    p_value: float
    cost: float
    # cost of a point of accuracy above the draft alone; infinite if it is not better
    cost_per_point: float

    @property
    def helps(self) -> bool:
        """Return whether the gate is shown to be better than its coin."""
        return self.gain is not None and self.gain.value > 0 and self.p_value < LEVEL


@dataclass(frozen=True, slots=True)
class PilotReport:
    """The measurements of a pilot and its recommendation: `take`, the flags for it, and the reason."""

    rows: tuple[PilotRow, ...]
    unavailable: tuple[PilotArm, ...]
    headroom: Estimate  # accuracy of the target minus that of the draft
    power: Power | None
    take: Take
    flags: Mapping[str, object]
    reason: str

    def row(self, name: str) -> PilotRow | None:
        """Return the row with that name; None if there is none."""
        return next((row for row in self.rows if row.arm.name == name), None)


def judge_pilot(arms: Sequence[PilotArm]) -> PilotReport:
    """Compare the arms problem by problem, and recommend one of them.

    :raises UsageError: the draft alone or the target alone is not among them, or no problem was
        graded.
    """
    by_name = {arm.name: arm for arm in arms if not arm.unavailable}
    if "draft-only" not in by_name or "target-only" not in by_name:
        raise UsageError("a pilot needs runs of draft-only and of target-only")
    draft = by_name["draft-only"]
    target = by_name["target-only"]
    if len(draft.shares) < 2:
        raise UsageError("a pilot needs at least two problems with reference answers")
    headroom = _difference(draft, target)
    compared = {
        name: compare_runs(*_paired(by_name[arm.coin], arm))
        for name, arm in by_name.items()
        if arm.coin in by_name
    }
    corrected = dict(zip(compared, holm([one.p_value for one in compared.values()]), strict=True))
    rows = tuple(
        PilotRow(
            arm,
            mean_estimate(list(arm.shares.values()), sum(map(len, arm.correct.values()))),
            gain=compared[name].difference if name in compared else None,
            p_value=corrected.get(name, math.nan),
            cost=arm.cost,
            cost_per_point=_cost_per_point(draft, arm),
        )
        for name, arm in by_name.items()
    )
    take, best, reason = _recommend(rows, headroom)
    split = variance_split(list(target.correct.values()))
    samples = max(map(len, target.correct.values()))
    power = None
    if split is not None and split.within > 0:
        power = paired_power(split, len(target.correct), samples)
    unavailable = tuple(arm for arm in arms if arm.unavailable)
    return PilotReport(
        rows,
        unavailable,
        headroom,
        power,
        take=take,
        flags=best.arm.flags,
        reason=reason,
    )


def _paired(first: PilotArm, second: PilotArm) -> tuple[list[float], list[float]]:
    """Return the correct shares of both arms on their common problems."""
    ours = first.shares
    theirs = second.shares
    common = [name for name in ours if name in theirs]
    return [ours[name] for name in common], [theirs[name] for name in common]


def _difference(first: PilotArm, second: PilotArm) -> Estimate:
    return compare_runs(*_paired(first, second)).difference


def _cost_per_point(draft: PilotArm, arm: PilotArm) -> float:
    """Return the cost of one point of accuracy above the draft alone."""
    points = 100 * _difference(draft, arm).value
    return (arm.cost - draft.cost) / points if points > 0 else math.inf


def _recommend(rows: Sequence[PilotRow], headroom: Estimate) -> tuple[Take, PilotRow, str]:
    """Return the recommended arm, its row, and the reason in a sentence."""
    by_name = {row.arm.name: row for row in rows}
    draft = by_name["draft-only"]
    target = by_name["target-only"]
    whole = f"headroom {headroom.signed()} in accuracy of single rollouts"
    if not headroom.low > 0:
        if headroom.high < _SMALL:
            return "draft-only", draft, f"the target is not better than the draft: {whole}"
        more = f"{whole}; it may be up to {headroom.high:.2f}, which more problems would show"
        return "draft-only", draft, f"the pilot does not show that the target is better: {more}"
    alone: Take = "target-only"
    whole_target = target
    exact = by_name.get("exact")
    if exact is not None and exact.cost < target.cost:
        alone = "exact"
        whole_target = exact
    helpful = [row for row in rows if row.helps]
    if not helpful:
        tried = sum(row.gain is not None for row in rows)
        known = f"none of {tried} gates was shown to be better than a coin of its rate"
        return alone, whole_target, f"{known}, and the target is better: {whole}"
    best = min(helpful, key=lambda row: (row.cost_per_point, -row.accuracy.value))
    gain = f"gain over a coin {best.gain.signed()}" if best.gain is not None else ""
    prices = (
        f"a point of accuracy above the draft costs {best.cost_per_point:,.1f} tokens per problem "
        f"with {best.arm.name}, {whole_target.cost_per_point:,.1f} with {alone}"
    )
    if best.cost_per_point < whole_target.cost_per_point:
        return "gate", best, f"{best.arm.name} escalates better than a coin ({gain}); {prices}"
    return alone, whole_target, f"the gate helps ({gain}), but not enough: {prices}"


def pilot_lines(report: PilotReport) -> list[str]:
    """Return the table, the recommendation and its reason for people."""
    names = [row.arm.name for row in report.rows] + [arm.name for arm in report.unavailable]
    wide = max(map(len, names)) + 2
    lines = [
        f"{'':<{wide}}{'accuracy':<24}{'gain over a coin':<26}{'p':>7}{'rate':>7}{'cost':>9}"
        f"{'per point':>11}"
    ]
    for row in report.rows:
        gain = "" if row.gain is None else row.gain.signed()
        p_value = "" if math.isnan(row.p_value) else f"{row.p_value:.2g}"
        rate = "" if math.isnan(row.arm.rate) else f"{row.arm.rate:.2f}"
        per_point = "" if math.isinf(row.cost_per_point) else f"{row.cost_per_point:,.1f}"
        lines.append(
            f"{row.arm.name:<{wide}}{row.accuracy.brief():<24}{gain:<26}{p_value:>7}{rate:>7}"
            f"{row.cost:>9,.0f}{per_point:>11}"
        )
    lines += [f"{arm.name:<{wide}}not run: {arm.unavailable}" for arm in report.unavailable]
    words = " ".join(f"--set {name}={value}" for name, value in report.flags.items())
    lines += [
        "",
        f"Take {'the gate' if report.take == 'gate' else report.take}: {words}",
        f"Reason: {report.reason}.",
        "",
        f"Headroom: the target's accuracy minus the draft's, {report.headroom.signed()}.",
    ]
    if report.power is not None:
        lines.append(f"Power: {report.power}.")
    tried = sum(row.gain is not None for row in report.rows)
    return [
        *lines,
        "Accuracy is of single rollouts; brackets are 95 % intervals over problems. Gains are "
        "over a coin of the same policy and rate;",
        f"p is corrected by Holm's method for {tried} gates. The best of several methods looks "
        "slightly better than it is.",
        "Cost: tokens per problem that the target decodes, plus a tenth of those that it scores "
        "or draws while it scores, and a tenth of the draft's.",
    ]
