"""Learn-then-Test certificates: the cheapest policy of bounded accuracy loss, or how much more data it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from atts.calibration.guarantees import TEXTS
from atts.calibration.rates import check_fraction
from atts.calibration.risk import RiskTest, checked_losses, fewest_problems, problems_needed, rejected, risk_p_value
from atts.errors import CalibrationInputError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy of a labelled calibration run: its gate and rate, a loss per problem, what it costs on average.

    Losses are of the same problems in the same order for every candidate; see `lost_answers`. Cost is in any unit,
    such as target tokens per problem.
    """

    gate: str
    rate: float
    losses: Sequence[float]
    cost: float


@dataclass(frozen=True, slots=True)
class Tested:
    """What the run says about one candidate."""

    gate: str
    rate: float
    cost: float
    loss: float
    p: float | None  # None: not reached by the fixed sequence
    certified: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """The outcome: `chosen` is the cheapest certified policy, None when none is."""

    epsilon: float
    delta: float
    problems: int
    chosen: Tested | None
    tested: tuple[Tested, ...]
    needed: int | None  # about how many problems would certify the safest candidate; None if no number would

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        outcome = "certified" if self.chosen else "needs more" if self.needed is not None else "hopeless"
        return TEXTS["certificate"][outcome].format(certificate=self, kept=1 - self.delta)

    @property
    def voided_by(self) -> str:
        """What makes the promise empty, in words."""
        return TEXTS["certificate"]["voided_by"]


def certify(
    candidates: Sequence[Candidate], epsilon: float, delta: float = 0.1, test: RiskTest | None = None
) -> Certificate:
    """Learn-then-Test over policies: the cheapest whose true loss is at most epsilon, with probability 1 - delta.

    Each gate's policies are tested from the highest rate down and the walk stops at the first that fails; `delta` is
    shared equally among the gates. The order depends on rates only, never on the losses, as validity demands.

    :raises CalibrationInputError: without candidates, with losses of different lengths or outside [0, 1], or an
        epsilon or delta outside (0, 1).
    """
    _check(candidates, epsilon, delta)
    ordered = sorted(candidates, key=lambda candidate: (candidate.gate, -candidate.rate))
    chains = [list(chain) for _, chain in groupby(ordered, key=lambda candidate: candidate.gate)]
    share = delta / len(chains)
    tested = [row for chain in chains for row in _walk(chain, epsilon, share, test)]
    certified = [row for row in tested if row.certified]
    chosen = min(certified, key=lambda row: (row.cost, row.loss)) if certified else None
    safest = min(float(checked_losses(chain[0].losses).mean()) for chain in chains)
    needed = problems_needed(safest, epsilon, share)
    problems = len(candidates[0].losses)
    if needed is not None and chosen is None:
        needed = max(needed, problems + 1, fewest_problems(epsilon, share))
    return Certificate(epsilon, delta, problems, chosen, tuple(tested), needed)


def _walk(chain: list[Candidate], epsilon: float, share: float, test: RiskTest | None) -> list[Tested]:
    p_values = list[float]()
    for candidate in chain:
        p_values.append(risk_p_value(candidate.losses, epsilon, test))
        if p_values[-1] > share:
            break
    passed = len(rejected(p_values, share))
    return [
        Tested(
            candidate.gate,
            candidate.rate,
            candidate.cost,
            float(checked_losses(candidate.losses).mean()),
            p_values[place] if place < len(p_values) else None,
            place < passed,
        )
        for place, candidate in enumerate(chain)
    ]


def _check(candidates: Sequence[Candidate], epsilon: float, delta: float) -> None:
    if not candidates:
        raise CalibrationInputError("candidates", [], "at least one policy")
    if len({len(candidate.losses) for candidate in candidates}) > 1:
        raise CalibrationInputError(
            "candidates", "losses of different lengths", "one loss for each of the same problems"
        )
    check_fraction("epsilon", epsilon)
    check_fraction("delta", delta)
    if any(not math.isfinite(candidate.cost) for candidate in candidates):
        raise CalibrationInputError("cost", math.nan, "a finite number")
